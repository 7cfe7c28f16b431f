//! Regular expressions that split a text into words; tokens do not span words.
//!
//! Invariant: text between matches is kept as words of its own, so that no text is lost.

use serde_json::{Value, json};

/// Pattern of Qwen 2: single digits.
pub const QWEN2: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|",
    r"\s+(?!\S)|\s+"
);

/// Pattern of Llama 3: groups of up to three digits.
pub const LLAMA3: &str = concat!(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|",
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
);

/// Returns pre-tokenizers that split by one pattern after the other, in the format of `tokenizer.json`.
pub fn stages(patterns: &[&str]) -> Vec<Value> {
    let split = |pattern: &&str| {
        let regex = json!({"Regex": pattern});
        json!({"type": "Split", "pattern": regex, "behavior": "Isolated", "invert": false})
    };
    patterns.iter().map(split).collect()
}

/// Returns a pre-tokenizer that splits by the patterns and then writes each byte as a printable character.
pub fn byte_level(patterns: &[&str]) -> Value {
    let spelled =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false});
    let stages: Vec<Value> = stages(patterns).into_iter().chain([spelled]).collect();
    json!({"type": "Sequence", "pretokenizers": stages})
}

/// Returns GPT-2's pre-tokenizer, which splits and writes each byte as a printable character.
pub fn gpt2(prefix: PrefixSpace) -> Value {
    let adds_space = prefix == PrefixSpace::Added;
    json!({"type": "ByteLevel", "add_prefix_space": adds_space, "trim_offsets": true, "use_regex": true})
}

/// Whether a space is added to a text that does not start with one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefixSpace {
    None,
    Added,
}
