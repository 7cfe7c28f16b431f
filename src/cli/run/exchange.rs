//! One question and its answer, shown as it arrives. Used for a single prompt and in a chat.
//!
//! Invariant: an interruption ends only the answer; the text received before it is kept.

use super::client::{Chunk, Client, Dialog};
use super::tool_calls::ToolCall;
use super::transport::{ChatUnsupported, Failure};
use futures_util::future::LocalBoxFuture;
use std::io;
use tokio::select;

/// Output of answers, with interruption by the user.
pub trait Screen {
    /// Shows a chunk of an answer. Fails if the output is closed.
    fn show(&mut self, chunk: &Chunk) -> io::Result<()>;

    /// Shows a note that is not part of the answer.
    fn note(&mut self, text: &str);

    /// Completes when the user interrupts the answer.
    fn interrupted(&mut self) -> LocalBoxFuture<'_, ()>;
}

/// Returns the note for a model that does not support chat.
fn no_chat_note(why: ChatUnsupported) -> &'static str {
    match why {
        ChatUnsupported::NoTemplate => {
            "the model has no chat template: it continues each prompt without the earlier conversation"
        }
        ChatUnsupported::EncoderDecoder => {
            "the model is an encoder-decoder: it processes each prompt without the earlier conversation"
        }
    }
}

/// The note in place of reasoning.
const REASONING_NOTE: &str = "(thinking; /reasoning on shows it)";

/// The result of a question.
#[derive(Debug)]
pub struct Outcome {
    /// Text that was shown.
    pub text: String,
    /// The answer, as far as it was received.
    pub answer: String,
    /// Calls of tools that a complete answer ended with.
    pub calls: Vec<ToolCall>,
    pub ending: AnswerEnd,
    /// Token count and speed; `None` if the answer did not begin.
    pub stats: Option<String>,
}

/// The end of an answer.
#[derive(Debug, PartialEq)]
pub enum AnswerEnd {
    Complete,
    /// The answer reached its maximum number of tokens.
    Cut,
    Interrupted,
    Failed(Failure),
}

/// Sends the dialog's last question and shows the answer. Without `reasoning`, a note stands for the model's
/// reasoning. Fails if it cannot be shown.
pub async fn answer(
    client: &mut Client,
    dialog: &Dialog,
    screen: &mut dyn Screen,
    reasoning: bool,
) -> io::Result<Outcome> {
    let (mut text, mut content) = (String::new(), String::new());
    let mut answer = loop {
        let ending = match unless_stopped(screen.interrupted(), client.ask(dialog)).await {
            Some(Ok(answer)) => break answer,
            Some(Err(failure)) => match client.fall_back_to_raw(&failure) {
                Some(why) => {
                    screen.note(no_chat_note(why));
                    continue;
                }
                None => AnswerEnd::Failed(failure),
            },
            None => AnswerEnd::Interrupted,
        };
        return Ok(Outcome { text, answer: content, calls: Vec::new(), ending, stats: None });
    };
    let mut is_noted = reasoning;
    let ending = loop {
        match unless_stopped(screen.interrupted(), answer.next()).await {
            Some(Ok(Some(mut chunk))) => {
                if !reasoning && chunk.text != chunk.content {
                    if !std::mem::replace(&mut is_noted, true) {
                        screen.note(REASONING_NOTE);
                    }
                    chunk.text.clone_from(&chunk.content);
                }
                text += &chunk.text;
                content += &chunk.content;
                screen.show(&chunk)?;
            }
            Some(Ok(None)) if answer.is_cut() => break AnswerEnd::Cut,
            Some(Ok(None)) => break AnswerEnd::Complete,
            Some(Err(failure)) => break AnswerEnd::Failed(failure),
            None => break AnswerEnd::Interrupted,
        }
    };
    let calls = if ending == AnswerEnd::Complete { answer.take_calls() } else { Vec::new() };
    Ok(Outcome { text, answer: content, calls, ending, stats: Some(answer.stats()) })
}

/// Awaits `work` and returns its result, or `None` if `stop` completes first.
pub async fn unless_stopped<T>(stop: impl Future<Output = ()>, work: impl Future<Output = T>) -> Option<T> {
    select! {
        biased;
        () = stop => None,
        value = work => Some(value),
    }
}
