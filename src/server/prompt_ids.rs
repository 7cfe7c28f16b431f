//! Token ids of prompts: tokenization, and checks against the model's limits.
//!
//! Invariant: an error names the parameter that the ids come from.

use super::ServeParts;
use super::error::ApiError;
use super::fields::shorten;
use crate::actors::Kind;
use crate::text::{Encoded, Tokenizer};
use std::sync::Arc;

/// Token ids of a prompt.
#[derive(Clone, Debug)]
pub struct PromptIds {
    /// Encoder input; empty for models without an encoder.
    pub encoder_input: Arc<[u32]>,
    /// Decoder tokens to continue: the prompt, or the decoder start tokens. Never empty.
    pub prompt: Arc<[u32]>,
    /// Number of the last tokens of `prompt` that count as generated ones in a beam search: 1 if it ends with
    /// a forced BOS token, which transformers generates.
    pub forced_tokens: u32,
}

impl PromptIds {
    /// Creates the ids of a prompt for a model without an encoder.
    pub fn decoder_only(prompt: Arc<[u32]>) -> PromptIds {
        PromptIds { encoder_input: Arc::default(), prompt, forced_tokens: 0 }
    }

    /// Returns the number of tokens of encoder input and decoder prompt together.
    pub fn token_count(&self) -> usize {
        self.encoder_input.len() + self.prompt.len()
    }
}

/// Tokenizes a prompt, or a part of it. Errors name the parameter `param`. A text that has far more tokens
/// than the model's context is not tokenized to its end.
pub fn encode(parts: &ServeParts, text: &str, add_special: bool, param: &str) -> Result<Vec<u32>, ApiError> {
    let context = parts.model.context;
    encode_at_most(&parts.tokenizer, text, add_special, context, param).and_then(|encoded| {
        encoded.map_err(|tokens| {
            let message = format!(
                "the {param} has at least {tokens} tokens, which leaves no room for generated tokens in the \
                 context of {context} tokens"
            );
            ApiError::too_long(param, message)
        })
    })
}

/// Tokenizes an encoder input, or a text that a decoder embeds, as [`encode`] does for its context. `what` is
/// what the message calls the value of the parameter `param`.
pub fn encode_text(
    parts: &ServeParts,
    text: &str,
    add_special: bool,
    param: &str,
    what: &str,
) -> Result<Vec<u32>, ApiError> {
    let most = parts.model.text_context();
    encode_at_most(parts.tokenizer.source(), text, add_special, most, param).and_then(|encoded| {
        encoded.map_err(|tokens| text_too_long(parts, param, what, format_args!("at least {tokens}")))
    })
}

/// Tokenizes a text of at most about `most` tokens; the inner error is how many it has at least.
fn encode_at_most(
    tokenizer: &Tokenizer,
    text: &str,
    add_special: bool,
    most: usize,
    param: &str,
) -> Result<Result<Vec<u32>, usize>, ApiError> {
    match tokenizer.encode_at_most(text, add_special, most) {
        Ok(Encoded::Ids(ids)) => Ok(Ok(ids)),
        Ok(Encoded::TooMany(tokens)) => Ok(Err(tokens)),
        Err(error) => Err(cannot_be_tokenized(param, &error)),
    }
}

/// Tokenizes a text of any length: an encoder input, if the model has an encoder. Errors name the parameter
/// `param`.
pub fn encode_any(
    parts: &ServeParts,
    text: &str,
    add_special: bool,
    param: &str,
) -> Result<Vec<u32>, ApiError> {
    parts.tokenizer.source().encode(text, add_special).map_err(|error| cannot_be_tokenized(param, &error))
}

fn cannot_be_tokenized(param: &str, error: &anyhow::Error) -> ApiError {
    ApiError::invalid(param, format!("'{param}' cannot be tokenized: {error}"))
}

/// Returns an error if a token is not in the model's vocabulary; a tokenizer may have more tokens than the
/// model. `what` is what the message calls the value of the parameter `param`.
pub fn check_vocabulary(parts: &ServeParts, param: &str, what: &str, ids: &[u32]) -> Result<(), ApiError> {
    check_tokens((&parts.tokenizer, parts.model.vocab), param, what, ids)
}

/// Returns an error if a token of an encoder input is not in the model's vocabulary, as [`check_vocabulary`]
/// does.
pub fn check_source_vocabulary(
    parts: &ServeParts,
    param: &str,
    what: &str,
    ids: &[u32],
) -> Result<(), ApiError> {
    check_tokens((parts.tokenizer.source(), parts.model.source_vocab), param, what, ids)
}

fn check_tokens(
    (tokenizer, vocab): (&Tokenizer, usize),
    param: &str,
    what: &str,
    ids: &[u32],
) -> Result<(), ApiError> {
    let Some(id) = ids.iter().find(|id| **id as usize >= vocab) else { return Ok(()) };
    let name = shorten(&tokenizer.token_text(*id)).escape_debug().to_string();
    let message = format!(
        "{what} has the token '{name}', whose id {id} is not in the model's vocabulary of {vocab} tokens"
    );
    Err(ApiError::invalid(param, message))
}

/// Returns an error if a text has more `tokens` than the model's context for texts. Its message calls the
/// value of the parameter `param` `what`.
pub fn check_text_len(parts: &ServeParts, param: &str, what: &str, tokens: usize) -> Result<(), ApiError> {
    match tokens <= parts.model.text_context() {
        true => Ok(()),
        false => Err(text_too_long(parts, param, what, format_args!("{tokens}"))),
    }
}

fn text_too_long(parts: &ServeParts, param: &str, what: &str, tokens: std::fmt::Arguments) -> ApiError {
    let (most, reader) = (
        parts.model.text_context(),
        match parts.model.kind {
            Kind::Decoder => "model",
            Kind::Encoder | Kind::EncoderDecoder => "encoder",
        },
    );
    let message = format!("{what} has {tokens} tokens, more than the {most} that the {reader} accepts");
    ApiError::too_long(param, message)
}
