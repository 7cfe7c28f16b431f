//! Reads prompts from files: ShareGPT conversations, JSON lines, or plain text.
//!
//! The prompt of a conversation is its first human turn, and the answer to it determines the output length;
//! system turns before it are ignored. Conversations without such a pair and empty prompts are skipped. A
//! file is plain text if its name ends in `.txt` or its content does not begin like a JSON list or object;
//! each paragraph (consecutive non-empty lines) is then a prompt.
//!
//! Invariant: each text has a non-empty prompt, and lengths of at least 1.

mod count;
mod json;

use std::path::Path;

use anyhow::{Context, ensure};
use tokenizers::Tokenizer;

use super::{files::read_text, prompts::PromptText};
use count::TokenCounter;

/// Reads the texts of `file`: a JSON list of ShareGPT-like conversations, JSON lines, or plain text. Errors
/// name the file and the line or entry. Without a tokenizer, four characters count as one token.
///
/// An object is a conversation, `{"conversations": [{"from": "human", "value": "..."}, {"from": "gpt",
/// ...}]}` or `{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}`, or a prompt,
/// `{"prompt": "..."}`, with the answer's length in tokens as `output_len` or `output_tokens`, or the answer
/// itself as `completion`.
pub fn read(file: &Path, tokenizer: Option<&Tokenizer>) -> anyhow::Result<Vec<PromptText>> {
    let texts = || texts(&read_text(file)?, FileFormat::from_path(file), &TokenCounter::new(tokenizer)?);
    texts().with_context(|| file.display().to_string())
}

/// The format of a file as indicated by its name.
#[derive(Clone, Copy, PartialEq, Eq)]
enum FileFormat {
    Plain,
    Any,
}

impl FileFormat {
    fn from_path(file: &Path) -> Self {
        let plain = file.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("txt"));
        if plain { FileFormat::Plain } else { FileFormat::Any }
    }
}

/// A prompt as read from a file, before token counting.
#[derive(Debug, PartialEq)]
struct DatasetEntry {
    prompt: String,
    answer: RecordedAnswer,
}

/// The recorded answer to a prompt: absent, only its length in tokens, or its text.
#[derive(Debug, PartialEq)]
enum RecordedAnswer {
    None,
    Tokens(u32),
    Text(String),
}

fn texts(content: &str, format: FileFormat, counter: &TokenCounter) -> anyhow::Result<Vec<PromptText>> {
    let entries = match content.trim_start().chars().next() {
        _ if format == FileFormat::Plain => paragraphs(content),
        Some('[') => json::list(content)?,
        Some('{') => json::lines(content)?,
        _ => paragraphs(content),
    };
    ensure!(
        !entries.is_empty(),
        "the file contains no prompt: expected conversations of a human and a model, objects with a prompt, \
         or text"
    );
    entries.into_iter().map(|entry| counter.count_entry(entry)).collect()
}

fn paragraphs(content: &str) -> Vec<DatasetEntry> {
    let lines: Vec<&str> = content.lines().map(str::trim_end).collect();
    let paragraphs = lines.split(|line| line.is_empty()).filter(|paragraph| !paragraph.is_empty());
    paragraphs.map(|lines| DatasetEntry { prompt: lines.join("\n"), answer: RecordedAnswer::None }).collect()
}

#[cfg(test)]
mod tests;
