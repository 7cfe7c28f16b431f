//! Token counts of texts.
//!
//! Invariant: truncation and padding settings of the tokenizer file do not affect counts, and no count is 0.

use anyhow::anyhow;
use tokenizers::Tokenizer;

use super::{Answer, Entry};
use crate::plan::prompts::Text;

/// A token counter: exact with a tokenizer, or an estimate from the number of characters.
pub(super) enum Counter {
    Tokenizer(Box<Tokenizer>),
    Characters,
}

/// Typical for English text and current vocabularies.
const CHARACTERS_PER_TOKEN: usize = 4;

/// Whether a count includes the special tokens that a server adds to a prompt, such as a BOS token.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Around {
    Prompt,
    Nothing,
}

impl Counter {
    /// Creates a counter that uses `tokenizer`, if given, without its truncation and padding.
    pub fn new(tokenizer: Option<&Tokenizer>) -> anyhow::Result<Self> {
        let Some(tokenizer) = tokenizer else { return Ok(Counter::Characters) };
        let mut tokenizer = Box::new(tokenizer.clone());
        tokenizer.with_truncation(None).map_err(|error| anyhow!(error))?;
        tokenizer.with_padding(None);
        Ok(Counter::Tokenizer(tokenizer))
    }

    /// Converts an entry of a file to a text with token counts.
    pub fn text(&self, entry: Entry) -> anyhow::Result<Text> {
        let output_len = match &entry.answer {
            Answer::None => None,
            Answer::Tokens(tokens) => Some((*tokens).max(1)),
            Answer::Text(answer) => Some(self.count(answer, Around::Nothing)?),
        };
        Ok(Text { prompt_len: self.count(&entry.prompt, Around::Prompt)?, prompt: entry.prompt, output_len })
    }

    fn count(&self, text: &str, around: Around) -> anyhow::Result<u32> {
        let tokens = match self {
            Counter::Tokenizer(tokenizer) => {
                let encoded = tokenizer.encode_fast(text, around == Around::Prompt);
                encoded.map_err(|error| about(text, &error))?.len()
            }
            Counter::Characters => text.chars().count().div_ceil(CHARACTERS_PER_TOKEN),
        };
        Ok(u32::try_from(tokens).unwrap_or(u32::MAX).max(1))
    }
}

/// Returns a tokenizer error with the beginning of the text.
fn about(text: &str, error: &tokenizers::Error) -> anyhow::Error {
    let beginning: String = text.chars().take(40).collect();
    anyhow!("tokenizing the text that begins with {beginning:?} failed: {error}")
}
