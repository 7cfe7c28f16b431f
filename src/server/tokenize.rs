//! `POST /v1/tokenize` and `POST /v1/detokenize`: text to token ids and back, as the other endpoints do it.
//!
//! Invariant: no request to the engine is made.

use super::ServeParts;
use super::chat::put;
use super::error::ApiError;
use super::fields::brief;
use super::inputs::token_id;
use super::params::conversation;
use super::respond::{encode, fields_of};
use super::wire::{Detokenized, Tokenized};
use crate::actors::Kind;
use serde_json::Value;

/// Handles `POST /v1/tokenize`: returns the token ids of a text or of chat messages.
pub fn tokenize(parts: &ServeParts, body: &[u8]) -> Result<Tokenized, ApiError> {
    let mut fields = fields_of(parts, body)?;
    let with_texts = fields.flag("return_token_strs", false)?;
    let prompt = fields.text("prompt")?;
    if prompt.is_some() && fields.take("messages").is_some() {
        return Err(ApiError::invalid("messages", "'prompt' and 'messages' are mutually exclusive"));
    }
    let is_chat = prompt.is_none();
    let add_special = fields.flag("add_special_tokens", !is_chat)?;
    let (text, param) = match prompt {
        Some(text) => (text, "prompt"),
        None => (put(parts, &conversation(&mut fields)?)?, "messages"),
    };
    fields.refuse_others(&[])?;
    let tokens = encode(parts, &text, add_special, param)?;
    let texts = || tokens.iter().map(|id| parts.tokenizer.token_text(*id)).collect();
    Ok(Tokenized {
        count: tokens.len(),
        // A text for an encoder-decoder is tokenized as encoder input.
        max_model_len: match parts.model.kind {
            Kind::EncoderDecoder => parts.model.source_context,
            Kind::Decoder | Kind::Encoder => parts.model.longest,
        },
        token_strs: with_texts.then(texts),
        tokens,
    })
}

/// Handles `POST /v1/detokenize`: returns the text of token ids, including special tokens.
pub fn detokenize(parts: &ServeParts, body: &[u8]) -> Result<Detokenized, ApiError> {
    let mut fields = fields_of(parts, body)?;
    let error = |message| ApiError::invalid("tokens", message);
    let ids: Vec<u32> = match fields.take("tokens") {
        Some(Value::Array(list)) => {
            let ids = list.iter().map(|value| token_id(value, parts.model.vocab));
            ids.collect::<Result<_, _>>().map_err(error)?
        }
        None => return Err(error("'tokens' is missing".into())),
        Some(other) => {
            return Err(error(format!("'tokens' must be a list of token ids, not {}", brief(&other))));
        }
    };
    fields.refuse_others(&[])?;
    let text = parts.tokenizer.decode(&ids, false);
    let prompt = text.map_err(|reason| error(format!("'tokens' cannot be decoded: {reason}")))?;
    Ok(Detokenized { prompt })
}
