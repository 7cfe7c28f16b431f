//! Token counts of texts.
//!
//! Invariant: truncation and padding settings of the tokenizer file do not affect counts, and no count is 0.

use anyhow::anyhow;
use tokenizers::Tokenizer;

use super::{DatasetEntry, RecordedAnswer};
use crate::plan::prompts::PromptText;

/// A token counter: exact with a tokenizer, or an estimate from the number of characters.
pub(super) enum TokenCounter {
    Tokenizer(Box<Tokenizer>),
    Characters,
}

/// Typical for English text and current vocabularies.
const CHARACTERS_PER_TOKEN: usize = 4;

/// Whether a count includes the special tokens that a server adds to a prompt, such as a BOS token.
#[derive(Clone, Copy, PartialEq, Eq)]
enum SpecialTokens {
    Included,
    Excluded,
}

impl TokenCounter {
    /// Creates a counter that uses `tokenizer`, if given, without its truncation and padding.
    pub fn new(tokenizer: Option<&Tokenizer>) -> anyhow::Result<Self> {
        let Some(tokenizer) = tokenizer else { return Ok(TokenCounter::Characters) };
        let mut tokenizer = Box::new(tokenizer.clone());
        tokenizer.with_truncation(None).map_err(|error| anyhow!(error))?;
        tokenizer.with_padding(None);
        Ok(TokenCounter::Tokenizer(tokenizer))
    }

    /// Converts an entry of a file to a text with token counts.
    pub fn count_entry(&self, entry: DatasetEntry) -> anyhow::Result<PromptText> {
        let output_len = match &entry.answer {
            RecordedAnswer::None => None,
            RecordedAnswer::Tokens(tokens) => Some((*tokens).max(1)),
            RecordedAnswer::Text(answer) => Some(self.count(answer, SpecialTokens::Excluded)?),
        };
        Ok(PromptText {
            prompt_len: self.count(&entry.prompt, SpecialTokens::Included)?,
            prompt: entry.prompt,
            output_len,
        })
    }

    fn count(&self, text: &str, around: SpecialTokens) -> anyhow::Result<u32> {
        let tokens = match self {
            TokenCounter::Tokenizer(tokenizer) => {
                let encoded = tokenizer.encode_fast(text, around == SpecialTokens::Included);
                encoded.map_err(|error| tokenizer_error(text, &error))?.len()
            }
            TokenCounter::Characters => text.chars().count().div_ceil(CHARACTERS_PER_TOKEN),
        };
        Ok(u32::try_from(tokens).unwrap_or(u32::MAX).max(1))
    }
}

/// Returns a tokenizer error with the beginning of the text.
fn tokenizer_error(text: &str, error: &tokenizers::Error) -> anyhow::Error {
    let beginning: String = text.chars().take(40).collect();
    anyhow!("tokenizing the text that begins with {beginning:?} failed: {error}")
}
