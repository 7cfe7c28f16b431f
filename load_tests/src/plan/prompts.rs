//! Prompt sources.
//!
//! Invariant: with the same seed, the prompts of a group begin with the same `shared` tokens or words, and
//! the tokens at later positions do not depend on the length of that prefix.

use std::sync::Arc;

use super::{
    random::{Purpose, RandomStream},
    requests::Prompt,
    words::WORDS,
};

/// The source of prompts.
#[derive(Clone, Debug, PartialEq)]
pub enum PromptSource {
    /// Random token ids in `0..vocab` (`vocab` is at least 1). Requires a completions endpoint that accepts
    /// ids.
    Ids { vocab: u32 },
    /// Random English words from a built-in list; a length is a number of words.
    Words,
    /// Random texts of a file (at least one). A group's shared prefix consists of words of the built-in list.
    Texts(Arc<[PromptText]>),
}

/// A prompt read from a file.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptText {
    pub prompt: String,
    /// Number of prompt tokens; an estimate if there was no tokenizer.
    pub prompt_len: u32,
    /// Number of tokens of the recorded answer, if there is one.
    pub output_len: Option<u32>,
}

/// The prompt generated for one request.
pub(super) struct GeneratedPrompt {
    pub prompt: Prompt,
    /// Length in tokens or words.
    pub len: u32,
    /// Number of tokens of the recorded answer to a text.
    pub output_len: Option<u32>,
}

/// The parameters that determine the random numbers of one prompt.
pub(super) struct PromptSeed {
    pub seed: u64,
    pub index: u64,
    pub group: u64,
    /// Length of the group's prefix in tokens or words.
    pub shared: u32,
}

impl PromptSource {
    /// Generates the prompt of a request, `len` tokens or words long unless it is a text of a file.
    pub(super) fn generate(&self, source: &PromptSeed, len: u32) -> GeneratedPrompt {
        match self {
            PromptSource::Ids { vocab } => {
                let mut ids = Vec::with_capacity(len as usize);
                source.numbers(*vocab, len).for_each(|id| ids.push(id));
                GeneratedPrompt { prompt: Prompt::Ids(ids), len, output_len: None }
            }
            PromptSource::Words => {
                let text = join(source.numbers(WORDS.len() as u32, len), String::new());
                GeneratedPrompt { prompt: Prompt::Text(text), len, output_len: None }
            }
            PromptSource::Texts(texts) => {
                let place = source.request_stream(0).between(0, texts.len() as u32 - 1);
                let text = &texts[place as usize];
                let shared = source.numbers(WORDS.len() as u32, source.shared);
                GeneratedPrompt {
                    prompt: Prompt::Text(join(shared, text.prompt.clone())),
                    len: text.prompt_len.saturating_add(source.shared),
                    output_len: text.output_len,
                }
            }
        }
    }
}

impl PromptSeed {
    /// Returns `len` numbers below `bound`: first those of the group, then those of the request.
    fn numbers(&self, bound: u32, len: u32) -> impl Iterator<Item = u32> {
        let shared = self.shared.min(len);
        let mut group = RandomStream::new(self.seed, Purpose::Prefix(self.group));
        let mut own = self.request_stream(shared);
        (0..len).map(move |place| if place < shared { &mut group } else { &mut own }.between(0, bound - 1))
    }

    /// Returns the stream of the request's own numbers, starting at number `from`.
    fn request_stream(&self, from: u32) -> RandomStream {
        RandomStream::new(self.seed, Purpose::Request(self.index)).skip_to(u64::from(from))
    }
}

/// Returns a text of `len` random words, determined by `seed` and `index`.
pub fn random_words(seed: u64, index: u64, len: u32) -> String {
    let source = PromptSeed { seed, index, group: 0, shared: 0 };
    join(source.numbers(WORDS.len() as u32, len), String::new())
}

/// Joins the words with these numbers and `rest` with spaces.
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
