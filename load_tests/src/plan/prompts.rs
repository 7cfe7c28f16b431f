//! What prompts are made of.
//!
//! Invariant: with the same seed, the prompts of a group begin with the same `shared` tokens or words, and what
//! follows at a place does not depend on how long that beginning is.

use std::sync::Arc;

use super::{
    draws::{Draws, Purpose},
    requests::Prompt,
    words::WORDS,
};

/// Where prompts come from.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompts {
    /// Token ids drawn from `0..vocab` (at least 1). A completions endpoint that takes ids is needed.
    Ids { vocab: u32 },
    /// English words drawn from a list of the program; a length is a number of words.
    Words,
    /// Texts of a file (at least one), drawn at random. What a group shares are words of the list before them.
    Texts(Arc<[Text]>),
}

/// A text of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Text {
    pub prompt: String,
    /// Tokens of the prompt; an estimate where there was no tokenizer to count them.
    pub prompt_len: u32,
    /// Tokens of the answer that the file has, where it has one.
    pub output_len: Option<u32>,
}

/// The prompt of one request.
pub(super) struct Drawn {
    pub prompt: Prompt,
    /// Tokens or words.
    pub len: u32,
    /// Tokens of the answer that belongs to a text.
    pub output_len: Option<u32>,
}

/// The random numbers of one prompt.
pub(super) struct Source {
    pub seed: u64,
    pub index: u64,
    pub group: u64,
    /// Tokens or words that are the group's.
    pub shared: u32,
}

impl Prompts {
    /// The prompt of this source; `len` tokens or words long, unless it is a file's text.
    pub(super) fn draw(&self, source: &Source, len: u32) -> Drawn {
        match self {
            Prompts::Ids { vocab } => {
                let mut ids = Vec::with_capacity(len as usize);
                source.numbers(*vocab, len).for_each(|id| ids.push(id));
                Drawn { prompt: Prompt::Ids(ids), len, output_len: None }
            }
            Prompts::Words => {
                let text = join(source.numbers(WORDS.len() as u32, len), String::new());
                Drawn { prompt: Prompt::Text(text), len, output_len: None }
            }
            Prompts::Texts(texts) => {
                let place = source.own(0).between(0, texts.len() as u32 - 1);
                let text = &texts[place as usize];
                let shared = source.numbers(WORDS.len() as u32, source.shared);
                Drawn {
                    prompt: Prompt::Text(join(shared, text.prompt.clone())),
                    len: text.prompt_len.saturating_add(source.shared),
                    output_len: text.output_len,
                }
            }
        }
    }
}

impl Source {
    /// `len` numbers below `bound`: first the group's, then this request's own.
    fn numbers(&self, bound: u32, len: u32) -> impl Iterator<Item = u32> {
        let shared = self.shared.min(len);
        let mut group = Draws::new(self.seed, Purpose::Prefix(self.group));
        let mut own = self.own(shared);
        (0..len).map(move |place| if place < shared { &mut group } else { &mut own }.between(0, bound - 1))
    }

    /// The request's own numbers from this one on.
    fn own(&self, from: u32) -> Draws {
        Draws::new(self.seed, Purpose::Request(self.index)).skipping(u64::from(from))
    }
}

/// The words of these numbers, then `rest`, with spaces between.
fn join(numbers: impl Iterator<Item = u32>, rest: String) -> String {
    let mut numbers = numbers.peekable();
    if numbers.peek().is_none() {
        return rest;
    }
    let mut text = String::new();
    for number in numbers {
        text.push_str(WORDS[number as usize]);
        text.push(' ');
    }
    text.push_str(&rest);
    text.truncate(text.trim_end_matches(' ').len());
    text
}
