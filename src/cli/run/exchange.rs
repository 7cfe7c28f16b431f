//! One question and its answer, shown as it comes. The same for a single prompt and within a chat.
//!
//! Invariant: an interruption ends the answer and nothing else; what came before it is kept.

use super::client::{Chunk, Client, Dialog};
use super::transport::{Failure, NoChat};
use futures_util::future::LocalBoxFuture;
use std::io;
use tokio::select;

/// Where an answer is shown.
pub trait Screen {
    /// Shows a piece of an answer. An error means that nobody looks any more.
    fn show(&mut self, chunk: &Chunk) -> io::Result<()>;

    /// Tells the user something beside the answer.
    fn note(&mut self, text: &str);

    /// Waits until the user wants the answer to stop.
    fn interrupted(&mut self) -> LocalBoxFuture<'_, ()>;
}

/// What the user is told of a model that does not chat.
fn note_of(why: NoChat) -> &'static str {
    match why {
        NoChat::NoTemplate => {
            "the model has no chat template: it continues each prompt as it stands and knows of nothing before it"
        }
        NoChat::ReadsSources => {
            "the model reads each prompt as a source, which it answers, and knows of nothing before it"
        }
    }
}

/// What came of a question.
#[derive(Debug)]
pub struct Outcome {
    /// The answer, as far as it came.
    pub text: String,
    pub ending: Ending,
    /// How fast it came; `None` if it did not begin.
    pub stats: Option<String>,
}

/// How an answer ended.
#[derive(Debug, PartialEq)]
pub enum Ending {
    Complete,
    /// By its limit of tokens.
    Cut,
    Interrupted,
    Failed(Failure),
}

/// Asks the dialog's last question and shows the answer. Fails when it cannot be shown.
pub async fn answer(client: &mut Client, dialog: &Dialog, screen: &mut dyn Screen) -> io::Result<Outcome> {
    let mut text = String::new();
    let mut answer = loop {
        let ending = match unless(screen.interrupted(), client.ask(dialog)).await {
            Some(Ok(answer)) => break answer,
            Some(Err(failure)) => match client.falls_back(&failure) {
                Some(why) => {
                    screen.note(note_of(why));
                    continue;
                }
                None => Ending::Failed(failure),
            },
            None => Ending::Interrupted,
        };
        return Ok(Outcome { text, ending, stats: None });
    };
    let ending = loop {
        match unless(screen.interrupted(), answer.next()).await {
            Some(Ok(Some(chunk))) => {
                text += &chunk.text;
                screen.show(&chunk)?;
            }
            Some(Ok(None)) if answer.is_cut() => break Ending::Cut,
            Some(Ok(None)) => break Ending::Complete,
            Some(Err(failure)) => break Ending::Failed(failure),
            None => break Ending::Interrupted,
        }
    };
    Ok(Outcome { text, ending, stats: Some(answer.stats()) })
}

/// What `work` gives, unless `stop` comes first.
pub async fn unless<T>(stop: impl Future<Output = ()>, work: impl Future<Output = T>) -> Option<T> {
    select! {
        biased;
        () = stop => None,
        value = work => Some(value),
    }
}
