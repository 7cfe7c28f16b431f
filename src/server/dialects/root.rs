//! `POST /`, which Hugging Face's clients of TGI and those of Inferflow share.

use super::dialect::Dialect;
use super::handler::off_loop;
use super::inferflow::Query;
use super::tgi::error_type;
use crate::server::body::INLINE_BYTES;
use crate::server::error::{ApiError, ErrorParts};
use actix_web::web::Bytes;
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;

/// The field that only TGI's requests have.
#[derive(Deserialize)]
struct Inputs {
    inputs: Option<IgnoredAny>,
}

/// Returns whether a request body is one of TGI's.
pub async fn is_of_tgi(body: Bytes) -> Result<bool, ApiError> {
    let is_long = body.len() > INLINE_BYTES;
    let has_inputs = move || {
        let read = serde_json::from_slice::<Inputs>(&body);
        read.is_ok_and(|body| body.inputs.is_some())
    };
    off_loop(is_long, has_inputs).await
}

/// Returns the body of an error response, with what clients of either server read.
pub fn error_body(error: ErrorParts<'_>) -> Value {
    let mut body = Query::error(error);
    body["error"] = error.message.into();
    body["error_type"] = error_type(error).into();
    body
}
