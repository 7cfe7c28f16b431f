//! What prompts are made of.

use std::sync::Arc;

/// Where prompts come from.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompts {
    /// Token ids drawn from `0..vocab` (at least 1). A completions endpoint that takes ids is needed.
    Ids { vocab: u32 },
    /// English words drawn from a list of the program; a length is a number of words.
    Words,
    /// Texts of a file, drawn at random.
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
