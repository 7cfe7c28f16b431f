//! Parsing of request bodies off the event loop, and checks that several APIs share.

use crate::request::RequestError;
use crate::server::body::{INLINE_BYTES, RequestBody, parsing_memory};
use crate::server::error::ApiError;
use crate::server::fields::{Fields, IgnoredFields, shorten};
use crate::server::params::GenerationParams;
use crate::server::{App, ServeParts};
use actix_web::web;
use std::sync::Arc;

/// Number of choices that one request may always ask for, even if the engine's limit is lower: the API's own
/// limit; some choices may need no slot.
const CHOICES_MAX: usize = 2048;

/// Parses a body into its fields and checks that `model` names the served model.
fn parse_fields(parts: &ServeParts, body: &[u8]) -> Result<Fields, ApiError> {
    let mut fields = Fields::parse(body)?;
    check_model(&fields.take_string("model")?, &parts.model.name)?;
    Ok(fields)
}

/// Parses a body with `read`, and returns its result and the fields that it did not know. A long body waits
/// for its turn and is parsed on a thread of the blocking pool. `longest_text` is the length in bytes beyond
/// which `read` tokenizes no text.
pub async fn parse_off_loop<T: Send + 'static>(
    app: &Arc<App>,
    body: RequestBody,
    longest_text: usize,
    read: impl FnOnce(&ServeParts, Fields) -> Result<T, ApiError> + Send + 'static,
) -> Result<(T, IgnoredFields), ApiError> {
    let policy = app.config.unknown_fields;
    let parse = move |parts: &ServeParts, body: &[u8]| {
        let fields = parse_fields(parts, body)?;
        let unknown = fields.unknown();
        let parsed = read(parts, fields)?;
        Ok((parsed, unknown.apply(policy)?))
    };
    let length = body.bytes.len();
    if length <= INLINE_BYTES {
        return parse(&app.parts, &body.bytes);
    }
    let memory = parsing_memory(&body.bytes, longest_text);
    let turn = app.parsing.acquire(body.client, length, memory).await?;
    let app = app.clone();
    let read = web::block(move || {
        let _turn = turn;
        let (bytes, _memory) = body.into_parts();
        parse(&app.parts, &bytes)
    });
    read.await.map_err(|error| ApiError::internal(format!("parsing the request body failed: {error}")))?
}

/// Returns an error if a request names another model than the served one.
pub fn check_model(requested: &Option<String>, served: &str) -> Result<(), ApiError> {
    match requested {
        Some(model) if model != served => {
            Err(RequestError::UnknownModel { model: shorten(model), served: served.to_owned() }.into())
        }
        _ => Ok(()),
    }
}

/// Returns an error for more choices than the server can ever accept at once, before anything is allocated
/// per choice. Intake checks the exact limits.
pub fn check_choices(
    parts: &ServeParts,
    prompts: usize,
    generation: &GenerationParams,
) -> Result<(), ApiError> {
    let (computed, most) = (generation.computed_choices(), parts.model.max_choices.max(CHOICES_MAX));
    let choices = prompts.saturating_mul(computed as usize);
    if choices <= most {
        return Ok(());
    }
    let param = match (generation.n, computed) {
        (_, 1) => "prompt",
        (n, computed) if n == computed => "n",
        _ => "best_of",
    };
    let message =
        format!("{prompts} prompts with {computed} choices each make {choices}; the maximum is {most}");
    Err(ApiError::invalid(param, message))
}
