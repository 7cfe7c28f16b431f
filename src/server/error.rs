//! Refusals and failures as the OpenAI error object, with the status that belongs to each.
//!
//! Invariant: the one place where a [`RequestError`] becomes a status.

use crate::request::RequestError;
use actix_web::http::StatusCode;
use actix_web::{HttpResponse, ResponseError};
use serde::Serialize;
use std::fmt;
use std::time::Duration;

/// What the client is told instead of an answer.
#[derive(Clone, Debug)]
pub struct ApiError {
    status: StatusCode,
    object: ErrorObject,
}

/// The body: `{"error": {...}}`.
#[derive(Clone, Debug, Serialize)]
pub struct ErrorBody<'a> {
    pub error: &'a ErrorObject,
}

/// The OpenAI error object.
#[derive(Clone, Debug, Serialize)]
pub struct ErrorObject {
    message: String,
    #[serde(rename = "type")]
    kind: &'static str,
    param: Option<String>,
    code: &'static str,
}

impl ApiError {
    fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> ApiError {
        let kind = match status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::SERVICE_UNAVAILABLE => "service_unavailable_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        ApiError { status, object: ErrorObject { message: message.into(), kind, param: None, code } }
    }

    fn about(mut self, param: impl Into<String>) -> ApiError {
        self.object.param = Some(param.into());
        self
    }

    /// 400: the value of `param` cannot be taken.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, "invalid_value", message).about(param)
    }

    /// 400: `param` is of the API but not of this server, or of neither.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, "unsupported_parameter", message).about(param)
    }

    /// 400: the body is no JSON object.
    pub fn malformed(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, "malformed_body", message)
    }

    /// 413: the body is longer than `limit` bytes.
    pub fn body_too_large(limit: usize) -> ApiError {
        let message = format!("the request body is larger than {limit} bytes");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
    }

    /// 408: the body did not arrive in time.
    pub fn body_too_slow(limit: Duration) -> ApiError {
        let message = format!("the request body did not arrive within {} s", limit.as_secs());
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "body_too_slow", message)
    }

    /// 404: no such path.
    pub fn not_found() -> ApiError {
        ApiError::new(StatusCode::NOT_FOUND, "not_found", "there is nothing at this path")
    }

    /// 405: the path is there, but not with this method.
    pub fn method_not_allowed(allowed: &str) -> ApiError {
        let message = format!("this path answers to {allowed} only");
        ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
    }

    /// 500: our own fault.
    pub fn internal(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
    }

    /// The body, also sent as an event where an answer has begun already.
    pub fn body(&self) -> ErrorBody<'_> {
        ErrorBody { error: &self.object }
    }
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> ApiError {
        let message = error.to_string();
        match error {
            RequestError::Invalid { param, .. } => ApiError::invalid(param, message),
            RequestError::TooLong { .. } => {
                ApiError::new(StatusCode::BAD_REQUEST, "context_length_exceeded", message).about("max_tokens")
            }
            RequestError::TooLarge { .. } => {
                ApiError::new(StatusCode::BAD_REQUEST, "kv_cache_exceeded", message).about("max_tokens")
            }
            RequestError::UnknownModel { .. } => {
                ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message).about("model")
            }
            RequestError::Busy { .. } => ApiError::new(StatusCode::TOO_MANY_REQUESTS, "server_busy", message),
            RequestError::Draining => {
                ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "shutting_down", message)
            }
            RequestError::EngineGone => ApiError::internal(message),
            RequestError::DeviceFailed(_) => {
                ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "device_failed", message)
            }
        }
    }
}

impl fmt::Display for ApiError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.object.message)
    }
}

impl ResponseError for ApiError {
    fn status_code(&self) -> StatusCode {
        self.status
    }

    fn error_response(&self) -> HttpResponse {
        HttpResponse::build(self.status).json(self.body())
    }
}
