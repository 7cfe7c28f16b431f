//! Chat settings in a GGUF file.
//!
//! Invariant: special tokens are named by the file's own vocabulary.

use super::Gguf;
use crate::formats::chat::{ChatConfig, ChatTemplateSource};
use anyhow::Result;
use std::collections::BTreeMap;

const TEMPLATE: &str = "tokenizer.chat_template";
const TOKENS: &str = "tokenizer.ggml.tokens";

/// Metadata keys of special token ids, and the names templates use for these tokens.
const SPECIAL: [(&str, &str); 4] = [
    ("tokenizer.ggml.bos_token_id", "bos_token"),
    ("tokenizer.ggml.eos_token_id", "eos_token"),
    ("tokenizer.ggml.unknown_token_id", "unk_token"),
    ("tokenizer.ggml.padding_token_id", "pad_token"),
];

impl ChatConfig {
    /// Reads the chat settings of a GGUF file. Values it does not have come from the folder it is in.
    pub fn from_gguf(gguf: &Gguf) -> Result<ChatConfig> {
        let mut chat = ChatConfig::from_folder(&gguf.folder())?;
        if let Some(text) = gguf.opt_str(TEMPLATE)? {
            let origin = format!("{}: key '{TEMPLATE}'", gguf.path().display());
            chat.template = Some(ChatTemplateSource { origin, text: text.to_owned() });
        }
        chat.special_tokens.extend(special_tokens(gguf)?);
        Ok(chat)
    }
}

fn special_tokens(gguf: &Gguf) -> Result<BTreeMap<String, String>> {
    let mut special = BTreeMap::new();
    for (key, name) in SPECIAL {
        let Some(id) = gguf.opt_id(key)? else { continue };
        if let Some(token) = gguf.opt_string_at(TOKENS, id as usize)? {
            special.insert(name.to_owned(), token.to_owned());
        }
    }
    Ok(special)
}
