//! Middleware that gives errors the shape of the API of their path, whoever refused the request.

use super::anthropic::Messages;
use super::dialect::Dialect;
use super::llama_server::Completion;
use super::{ollama, root, tgi};
use crate::server::error::{ApiError, ErrorParts};
use actix_web::Error;
use actix_web::body::{BoxBody, MessageBody};
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::middleware::Next;
use serde_json::Value;

/// Makes the body of an error response.
type ErrorShape = fn(ErrorParts<'_>) -> Value;

/// The paths whose errors have other shapes, with the paths below them.
const SHAPES: &[(&str, ErrorShape)] = &[
    ("/v1/messages", Messages::error),
    ("/api", ollama::error_body),
    ("/generate", tgi::Generate::<tgi::Whole>::error),
    ("/generate_stream", tgi::Generate::<tgi::Streamed>::error),
    ("/info", tgi::Generate::<tgi::Whole>::error),
    ("/completion", Completion::error),
    ("/props", Completion::error),
    ("/slots", Completion::error),
    ("/", root::error_body),
];

/// Middleware that rewrites the errors of dialects. It must wrap what may refuse requests.
pub async fn shape_errors(
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<impl MessageBody>, Error> {
    let response = next.call(request).await?;
    let error = response.response().extensions().get::<ApiError>().cloned();
    match (error, shape_of(response.request().path())) {
        (Some(error), Some(shape)) => {
            let body = shape(error.parts()).to_string();
            Ok(response.map_body(|_, _| BoxBody::new(body)).map_into_right_body())
        }
        _ => Ok(response.map_into_left_body()),
    }
}

/// Returns the shape of the errors of a path; `None` if it is OpenAI's.
fn shape_of(path: &str) -> Option<ErrorShape> {
    let is_below =
        |base: &str| path.strip_prefix(base).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    SHAPES.iter().find(|(base, _)| is_below(base)).map(|(_, shape)| *shape)
}
