//! Regular expressions that split a text into words, within which alone tokens come about.
//!
//! Invariant: what a pattern does not match stays, as words of its own: nothing of a text is lost.

use serde_json::{Value, json};

/// Qwen's: digits one by one.
pub const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// Llama 3's: digits by threes.
pub const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The stages of a pre-tokenizer, as `tokenizer.json` writes them, that splits by one pattern after the
/// other.
pub fn stages(patterns: &[&str]) -> Vec<Value> {
    let split = |pattern: &&str| json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false});
    patterns.iter().map(split).collect()
}

/// These stages, and after them every byte spelled as a printable character.
pub fn byte_level(patterns: &[&str]) -> Value {
    let spelled =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let stages: Vec<Value> = stages(patterns).into_iter().chain([spelled]).collect();
    json!({"type": "Sequence", "pretokenizers": stages})
}

/// GPT-2's own way to split, with every byte spelled.
pub fn gpt2(prefix: AddedSpace) -> Value {
    let adds_space = prefix == AddedSpace::Before;
    json!({"type": "ByteLevel", "add_prefix_space": adds_space, "trim_offsets": true, "use_regex": true})
}

/// Whether a text that does not begin with a space gets one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AddedSpace {
    None,
    Before,
}
