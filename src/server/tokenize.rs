//! `POST /v1/tokenize` and `POST /v1/detokenize`: text to token ids and back, as the other endpoints do it.
//!
//! Invariant: no request to the engine is made.

use super::body::RequestBody;
use super::chat::render_conversation;
use super::error::ApiError;
use super::fields::{Fields, IgnoredFields, describe};
use super::held_body::json_body;
use super::openapi::describe::Api;
use super::openapi::requests::{DetokenizeBody, TokenizeBody};
use super::params::parse_conversation;
use super::prompt_ids::encode_any;
use super::prompts::parse_token_id;
use super::respond::{Turn, admit_any, parse_off_loop};
use super::wire::{DetokenizeResponse, TokenizeResponse};
use super::{App, ServeParts};
use crate::actors::Kind;
use actix_web::web::Bytes;
use serde::Serialize;
use serde_json::Value;
use std::sync::Arc;

/// Describes the paths, which other servers have without the prefix.
pub fn describe_paths(api: &mut Api) {
    for path in ["/v1/tokenize", "/tokenize"] {
        let summary = "Returns the token ids of a text or of messages.";
        api.post(path, summary).body::<TokenizeBody>().returns::<TokenizeResponse>();
    }
    for path in ["/v1/detokenize", "/detokenize"] {
        let summary = "Returns the text of token ids.";
        api.post(path, summary).body::<DetokenizeBody>().returns::<DetokenizeResponse>();
    }
}

/// Handles a request to one of these endpoints: parses the body, and returns the response of `answer` as
/// JSON, with the ignored fields of the request.
pub async fn run_tokenizer_request<T: Serialize + 'static>(
    app: &Arc<App>,
    body: RequestBody,
    answer: fn(&ServeParts, &Turn, Fields) -> Result<T, ApiError>,
) -> Result<(Bytes, IgnoredFields), ApiError> {
    let client = body.client;
    let _open = admit_any(app, client)?;
    // Written where it is parsed: the response of a long body is long, too.
    let write = move |parts: &ServeParts, turn: &Turn, fields: Fields| {
        let answer = answer(parts, turn, fields)?;
        Ok(json_body(parts.status.responses.hold(client), &answer)?)
    };
    parse_off_loop(app, body, usize::MAX, write).await
}

/// Handles `POST /v1/tokenize`: returns the token ids of a text or of chat messages.
pub fn tokenize(parts: &ServeParts, turn: &Turn, mut fields: Fields) -> Result<TokenizeResponse, ApiError> {
    let with_texts = fields.take_bool("return_token_strs", false)?;
    let prompt = fields.take_string("prompt")?;
    if prompt.is_some() && fields.take("messages").is_some() {
        return Err(ApiError::invalid("messages", "'prompt' and 'messages' are mutually exclusive"));
    }
    let is_chat = prompt.is_none();
    let add_special = fields.take_bool("add_special_tokens", !is_chat)?;
    let (text, param) = match prompt {
        Some(text) => (text, "prompt"),
        None => (render_conversation(parts, turn, &parse_conversation(&mut fields)?)?, "messages"),
    };
    fields.finish(&[])?;
    let tokens = encode_any(parts, &text, add_special, param)?;
    let texts = || tokens.iter().map(|id| parts.tokenizer.source().token_text(*id)).collect();
    Ok(TokenizeResponse {
        count: tokens.len(),
        // A text for an encoder-decoder is tokenized as encoder input.
        max_model_len: match parts.model.kind {
            Kind::EncoderDecoder => parts.model.encoder_context,
            Kind::Decoder | Kind::Encoder => parts.model.max_sequence_tokens,
        },
        token_strs: with_texts.then(texts),
        tokens,
    })
}

/// Handles `POST /v1/detokenize`: returns the text of token ids, including special tokens.
pub fn detokenize(parts: &ServeParts, _: &Turn, mut fields: Fields) -> Result<DetokenizeResponse, ApiError> {
    let error = |message| ApiError::invalid("tokens", message);
    let ids: Vec<u32> = match fields.take("tokens") {
        Some(Value::Array(list)) => {
            let ids = list.iter().map(|value| parse_token_id(value, parts.model.vocab));
            ids.collect::<Result<_, _>>().map_err(error)?
        }
        None => return Err(error("'tokens' is missing".into())),
        Some(other) => {
            return Err(error(format!("'tokens' must be a list of token ids, not {}", describe(&other))));
        }
    };
    fields.finish(&[])?;
    let text = parts.tokenizer.decode(&ids, false);
    let prompt = text.map_err(|reason| error(format!("'tokens' cannot be decoded: {reason}")))?;
    Ok(DetokenizeResponse { prompt })
}
