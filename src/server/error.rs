//! API errors: the OpenAI error object and the HTTP status of each.
//!
//! Invariant: only this module maps a [`RequestError`] to a status, and only here are rejections counted,
//! each once, when it becomes a response.

use crate::actors::ModelInfo;
use crate::request::RequestError;
use crate::telemetry;
use crate::text::tools::ToolError;
use actix_web::http::StatusCode;
use actix_web::{HttpResponse, ResponseError};
use serde::Serialize;
use serde_json::Value;
use std::fmt;
use std::time::Duration;
use utoipa::ToSchema;

/// Code of errors about unknown fields.
const UNKNOWN_PARAMETER: &str = "unknown_parameter";

/// Maximum number of characters of a client's name for the server in an error message.
const NAME_CHARS_MAX: usize = 253;

/// An error response: status and error object.
#[derive(Clone, Debug)]
pub struct ApiError {
    status: StatusCode,
    object: ErrorObject,
    /// Time after which to retry, in seconds; 0 if it is not known.
    retry_after_s: u64,
}

/// Body of an error response: `{"error": {...}}`.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ErrorBody<'a> {
    pub error: &'a ErrorObject,
}

/// The OpenAI error object.
#[derive(Clone, Debug, Serialize, ToSchema)]
pub struct ErrorObject {
    message: String,
    #[serde(rename = "type")]
    kind: &'static str,
    param: Option<String>,
    code: &'static str,
}

/// The parts of an error, for the error objects of other APIs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorParts<'a> {
    /// The type in OpenAI's error object.
    pub kind: &'a str,
    pub code: &'a str,
    /// The parameter that the error is about.
    pub param: Option<&'a str>,
    pub message: &'a str,
}

impl ErrorParts<'_> {
    /// Returns the error in a chunk of a stream, if it is one.
    pub fn in_chunk(chunk: &Value) -> Option<ErrorParts<'_>> {
        let error = chunk.get("error")?;
        let text = |name: &str| error.get(name).and_then(Value::as_str);
        Some(ErrorParts {
            kind: text("type").unwrap_or_default(),
            code: text("code").unwrap_or_default(),
            param: text("param"),
            message: text("message").unwrap_or_default(),
        })
    }
}

impl ApiError {
    fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> ApiError {
        let kind = match status {
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::SERVICE_UNAVAILABLE => "service_unavailable_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        let object = ErrorObject { message: message.into(), kind, param: None, code };
        ApiError { status, object, retry_after_s: 0 }
    }

    /// Sets the parameter that the error is about.
    fn with_param(mut self, param: impl Into<String>) -> ApiError {
        self.object.param = Some(param.into());
        self
    }

    /// Sets the time after which to retry, in seconds.
    fn with_retry_after(self, retry_after_s: u64) -> ApiError {
        ApiError { retry_after_s, ..self }
    }

    /// Returns the time after which to retry, in seconds; 0 if it is not known.
    pub fn retry_after_s(&self) -> u64 {
        self.retry_after_s
    }

    /// Renames the parameter that the error is about to `to` if it is `from`.
    pub fn rename_param(mut self, from: &str, to: &str) -> ApiError {
        if let Some(param) = self.object.param.as_mut().filter(|param| *param == from) {
            *param = to.to_owned();
        }
        self
    }

    /// Renames a parameter from `from` to `to`, in the message too. `from` must be no word of the language.
    pub fn rename_everywhere(mut self, from: &str, to: &str) -> ApiError {
        if from != to {
            self.object.message = self.object.message.replace(from, to);
        }
        self.rename_param(from, to)
    }

    /// 400: the value of `param` is invalid.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, "invalid_value", message).with_param(param)
    }

    /// 400: `param` is empty.
    pub fn empty(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, "empty_value", message).with_param(param)
    }

    /// 400: messages were sent to a model without a chat template.
    pub fn no_chat_template(message: &str) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, "no_chat_template", message).with_param("messages")
    }

    /// 400: `param` is unknown or not supported.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, "unsupported_parameter", message).with_param(param)
    }

    /// 400: the field at `path` is unknown, and [`UnknownFieldsPolicy::Reject`] applies.
    ///
    /// [`UnknownFieldsPolicy::Reject`]: crate::config::UnknownFieldsPolicy::Reject
    pub fn unknown_parameter(path: &str) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, UNKNOWN_PARAMETER, format!("unknown parameter '{path}'"))
            .with_param(path)
    }

    /// 400: the model does not support the endpoint `path`.
    pub fn wrong_endpoint(path: &str, model: &ModelInfo) -> ApiError {
        let (kind, endpoints) = (model.prompting.kind_name(), model.endpoints.join(" and "));
        let message = format!(
            "{path} is not supported by the model '{}', which is {kind}: use {endpoints}",
            model.name
        );
        ApiError::new(StatusCode::BAD_REQUEST, "wrong_endpoint", message).with_param("model")
    }

    /// 400: `param` exceeds the model's context.
    pub fn too_long(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, "context_length_exceeded", message).with_param(param)
    }

    /// 400: the request body is not a JSON object.
    pub fn malformed(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, "malformed_body", message)
    }

    /// 413: the request body is larger than `limit` bytes.
    pub fn body_too_large(limit: usize) -> ApiError {
        let message = format!("the request body is larger than {limit} bytes");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
    }

    /// 413: a kept conversation has too many bytes to be continued.
    pub fn conversation_too_long(bytes: usize, limit: usize) -> ApiError {
        let message = format!(
            "the conversation of 'previous_response_id' has {bytes} bytes, which with the input are more \
             than {limit} (twice server.body_limit)"
        );
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
            .with_param("previous_response_id")
    }

    /// 408: the request body did not arrive in time, or is far from it.
    pub fn body_too_slow(limit: Duration) -> ApiError {
        let seconds = limit.as_secs();
        let message = format!("the request body arrives too slowly to be there within {seconds} s");
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "body_too_slow", message)
    }

    /// 401: the API key is missing or invalid; the message does not say which.
    pub fn unauthorized() -> ApiError {
        let message = "a valid API key is required (Authorization: Bearer KEY)";
        ApiError::new(StatusCode::UNAUTHORIZED, "invalid_api_key", message)
    }

    /// 403: a browser sent the request for a page of another origin.
    pub fn cross_origin() -> ApiError {
        let message = "cross-origin requests are allowed only from the origins in server.cors_origins";
        ApiError::new(StatusCode::FORBIDDEN, "origin_not_allowed", message)
    }

    /// 403: the server does not answer under this name.
    pub fn host_not_allowed(host: &str) -> ApiError {
        let host: String = host.chars().take(NAME_CHARS_MAX).collect();
        let message =
            format!("requests for the host '{host}' are not allowed; server.allowed_hosts can allow it");
        ApiError::new(StatusCode::FORBIDDEN, "host_not_allowed", message)
    }

    /// 404: there is no such file or batch, or another client has it. `what` is its kind.
    pub fn no_such(what: &str, id: &str) -> ApiError {
        let id: String = id.chars().take(NAME_CHARS_MAX).collect();
        ApiError::new(StatusCode::NOT_FOUND, "not_found", format!("there is no {what} '{id}'"))
            .with_param("id")
    }

    /// 400: there is no such response to go on from, or another client has it.
    pub fn no_previous_response(id: &str) -> ApiError {
        let id: String = id.chars().take(NAME_CHARS_MAX).collect();
        let message = format!("there is no response '{id}'");
        ApiError::new(StatusCode::BAD_REQUEST, "previous_response_not_found", message)
            .with_param("previous_response_id")
    }

    /// 409: a file or a batch is in a state that does not permit the request.
    pub fn conflict(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::CONFLICT, "conflict", message)
    }

    /// 403: the client's files or responses would take more than it may have.
    pub fn quota_exceeded(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::FORBIDDEN, "quota_exceeded", message)
    }

    /// 429: the client has too many batches that have not ended.
    pub fn too_many_batches(limit: usize) -> ApiError {
        let message = format!("{limit} batches have not ended; the maximum is {limit} (batches.max_batches)");
        ApiError::new(StatusCode::TOO_MANY_REQUESTS, "too_many_batches", message)
    }

    /// 429: too many clients watch the sequences in flight.
    pub fn too_many_watchers(limit: usize) -> ApiError {
        let message = format!("{limit} clients watch the requests in flight, which is the maximum");
        ApiError::new(StatusCode::TOO_MANY_REQUESTS, "too_many_watchers", message)
    }

    /// 413: an uploaded file is larger than `limit` bytes.
    pub fn file_too_large(limit: u64) -> ApiError {
        let message = format!("the file is larger than {limit} bytes (batches.file_limit)");
        ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "file_too_large", message).with_param("file")
    }

    /// 408: an upload has stalled, or is far too slow.
    pub fn upload_too_slow() -> ApiError {
        let message = "the upload arrives too slowly: nothing for 30 s, or less than 16 KiB per second";
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "upload_too_slow", message)
    }

    /// 501: the server keeps no files.
    pub fn batches_disabled() -> ApiError {
        let message = "this server has no files and batches: batches.data_dir (--data-dir) is not set";
        ApiError::new(StatusCode::NOT_IMPLEMENTED, "batches_disabled", message)
    }

    /// 507: the disk is full.
    pub fn storage_full() -> ApiError {
        let message = "the server's disk is full";
        ApiError::new(StatusCode::INSUFFICIENT_STORAGE, "storage_full", message)
    }

    /// 404: the path does not exist. `endpoints` are those of the served model.
    pub fn not_found(endpoints: &[&str]) -> ApiError {
        let message = format!(
            "this path does not exist; there are POST {}, /v1/tokenize and /v1/detokenize, GET /v1/models, \
             /health, /metrics and /version, /v1/files and /v1/batches, /v1/responses and \
             /v1/messages, and the paths of other servers' APIs",
            endpoints.join(", ")
        );
        ApiError::new(StatusCode::NOT_FOUND, "not_found", message)
    }

    /// 405: the path does not support this method.
    pub fn method_not_allowed(allowed: &str) -> ApiError {
        let message = format!("this path supports only {allowed}");
        ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
    }

    /// 500: a failure of the server.
    pub fn internal(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
    }

    /// Returns the rejection metric's `reason` label. `None` for failures of the server and for requests that
    /// do not reach the API; these are not rejections.
    fn rejection_reason(&self) -> Option<&'static str> {
        match (self.status, self.object.code) {
            (_, "context_length_exceeded") => Some("too_long"),
            (_, "kv_cache_exceeded") => Some("too_large"),
            (_, "model_not_found") => Some("unknown_model"),
            (_, "shutting_down") => Some("draining"),
            (_, "rate_limit_exceeded") => Some("rate_limit"),
            (StatusCode::TOO_MANY_REQUESTS, _) => Some("busy"),
            (StatusCode::FORBIDDEN, "quota_exceeded") => None,
            (StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN, _) => Some("unauthorized"),
            (StatusCode::BAD_REQUEST | StatusCode::PAYLOAD_TOO_LARGE | StatusCode::REQUEST_TIMEOUT, _) => {
                Some("invalid")
            }
            _ => None,
        }
    }

    /// Returns the code of the error object.
    pub fn code(&self) -> &'static str {
        self.object.code
    }

    /// Returns the parameter that the error is about.
    pub fn param(&self) -> Option<&str> {
        self.object.param.as_deref()
    }

    /// Returns the label of the parameter in metrics: without indices, and "unknown" for names that clients
    /// make up.
    fn param_label(&self) -> Option<String> {
        let param = self.param()?;
        if self.object.code == UNKNOWN_PARAMETER {
            return Some("unknown".to_owned());
        }
        let mut label = String::with_capacity(param.len());
        let mut in_index = false;
        for c in param.chars() {
            in_index = c == '[' || in_index && c != ']';
            if !in_index && c != ']' {
                label.push(c);
            }
        }
        Some(label)
    }

    /// Returns the parts of the error.
    pub fn parts(&self) -> ErrorParts<'_> {
        let ErrorObject { message, kind, param, code } = &self.object;
        ErrorParts { kind, code, param: param.as_deref(), message }
    }

    /// Replaces a part of parameter names, in the parameter and in the message. `from` must be no word of
    /// the language.
    pub fn replace_in_names(mut self, from: &str, to: &str) -> ApiError {
        self.object.message = self.object.message.replace(from, to);
        self.object.param = self.object.param.map(|param| param.replace(from, to));
        self
    }

    /// Returns the response body, which is also sent as an event if a stream has started already.
    pub fn body(&self) -> ErrorBody<'_> {
        ErrorBody { error: &self.object }
    }
}

impl From<ToolError> for ApiError {
    fn from(ToolError { path, message }: ToolError) -> ApiError {
        ApiError::invalid(path, message)
    }
}

impl From<RequestError> for ApiError {
    fn from(error: RequestError) -> ApiError {
        let message = error.to_string();
        match error {
            RequestError::Invalid { param, .. } => ApiError::invalid(param, message),
            RequestError::TooLong { .. } => {
                ApiError::new(StatusCode::BAD_REQUEST, "context_length_exceeded", message)
                    .with_param("max_tokens")
            }
            RequestError::PromptTooLong { prompt, .. } => {
                ApiError::new(StatusCode::BAD_REQUEST, "context_length_exceeded", message).with_param(prompt)
            }
            RequestError::TooLarge { param, .. } => {
                ApiError::new(StatusCode::BAD_REQUEST, "kv_cache_exceeded", message).with_param(param)
            }
            RequestError::UnknownModel { .. } => {
                ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message).with_param("model")
            }
            RequestError::Busy { retry_after_s, .. } => {
                ApiError::new(StatusCode::TOO_MANY_REQUESTS, "server_busy", message)
                    .with_retry_after(retry_after_s)
            }
            RequestError::RateLimited { retry_after_s, .. } => {
                ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_exceeded", message)
                    .with_retry_after(retry_after_s)
            }
            RequestError::TooManyLongBodies { .. }
            | RequestError::NoBodyMemory
            | RequestError::TooManyGrammars { .. }
            | RequestError::ResponsesTooLarge { .. } => {
                ApiError::new(StatusCode::TOO_MANY_REQUESTS, "server_busy", message)
            }
            RequestError::ResponseTooLarge { .. } => {
                ApiError::new(StatusCode::BAD_REQUEST, "response_too_large", message)
            }
            RequestError::Interrupted => ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "shut_down", message),
            RequestError::Draining => {
                ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "shutting_down", message)
            }
            RequestError::TimedOut { .. } => {
                ApiError::new(StatusCode::GATEWAY_TIMEOUT, "request_timeout", message)
            }
            RequestError::EngineStopped => ApiError::internal(message),
            RequestError::DeviceFailed(_) => {
                ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "device_failed", message)
            }
            RequestError::SamplingFailed(_) => {
                ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "sampling_failed", message)
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
        if let Some(reason) = self.rejection_reason() {
            telemetry::ADMISSION_REJECTIONS.count([reason]);
        }
        if let Some(param) = self.param_label().filter(|_| self.status.is_client_error()) {
            telemetry::REJECTED_PARAMETERS.count([&*param, self.object.code]);
        }
        let mut response = HttpResponse::build(self.status).json(self.body());
        // For the dialects, whose errors have other shapes.
        response.extensions_mut().insert(self.clone());
        response
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use actix_web::test::{TestRequest, call_service, init_service};
    use actix_web::{App, web};

    /// Errors are returned from a handler, as in the server, so that they are converted to responses the same
    /// way.
    #[actix_web::test]
    async fn a_refusal_is_counted_once_by_its_reason_and_a_failure_not_at_all() {
        let busy = RequestError::Busy { coming: 1, waiting: 4, limit: 4, retry_after_s: 0 };
        let too_long =
            RequestError::TooLong { prompt: "prompt", prompt_tokens: 60, max_tokens: 10, context: 64 };
        let unknown = RequestError::UnknownModel { model: "big".into(), served: "tiny".into() };
        let wrong = RequestError::Invalid { param: "top_p", message: "top_p is 2".into() };
        let limited = RequestError::RateLimited { what: "tokens", limit: 9, retry_after_s: 7 };
        let cases: [(ApiError, Option<&str>); 19] = [
            (ApiError::invalid("n", "no"), Some("invalid")),
            (ApiError::no_chat_template("no"), Some("invalid")),
            (ApiError::unsupported("n", "no"), Some("invalid")),
            (ApiError::malformed("no"), Some("invalid")),
            (ApiError::body_too_large(1), Some("invalid")),
            (ApiError::body_too_slow(Duration::ZERO), Some("invalid")),
            (wrong.into(), Some("invalid")),
            (too_long.into(), Some("too_long")),
            (ApiError::too_long("input", "no"), Some("too_long")),
            (
                RequestError::TooLarge {
                    param: "max_tokens",
                    what: "prompt and max_tokens",
                    needed: 9,
                    pages: 8,
                }
                .into(),
                Some("too_large"),
            ),
            (unknown.into(), Some("unknown_model")),
            (busy.into(), Some("busy")),
            (limited.into(), Some("rate_limit")),
            (RequestError::Draining.into(), Some("draining")),
            (ApiError::unauthorized(), Some("unauthorized")),
            (ApiError::not_found(&["/v1/completions"]), None),
            (ApiError::method_not_allowed("GET"), None),
            (RequestError::Interrupted.into(), None),
            (RequestError::EngineStopped.into(), None),
        ];
        for (error, reason) in cases {
            let recorder = telemetry::recorder(None);
            let _here = metrics::set_default_local_recorder(&recorder);
            let answer = error.clone();
            let refuse = move || std::future::ready(Err::<HttpResponse, ApiError>(answer.clone()));
            let app = init_service(App::new().default_service(web::to(refuse))).await;
            let response = call_service(&app, TestRequest::default().to_request()).await;
            assert_eq!(response.status(), error.status_code());
            let text = recorder.handle().render();
            let counted: Vec<_> =
                text.lines().filter(|line| line.starts_with("mainstem_admission_rejections")).collect();
            let expected = reason
                .map(|reason| format!("mainstem_admission_rejections_total{{reason=\"{reason}\"}} 1"))
                .unwrap_or_default();
            assert_eq!(counted.join("\n").trim(), expected, "{error}");
        }
    }

    /// Clients cannot create series of their own: indices and unknown names are not labels.
    #[test]
    fn rejected_parameters_are_counted_without_what_clients_make_up() {
        for (error, label) in [
            (ApiError::invalid("top_p", "no"), Some("top_p")),
            (ApiError::invalid("messages[17].content[2].type", "no"), Some("messages.content.type")),
            (ApiError::unknown_parameter("bogus"), Some("unknown")),
            (ApiError::malformed("no"), None),
        ] {
            assert_eq!(error.param_label().as_deref(), label, "{error}");
        }
    }
}
