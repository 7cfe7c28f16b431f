//! Middleware around every request: request id, request count, access log, and headers that depend on the
//! status rather than on the handler.
//!
//! Invariant: every response has an `X-Request-Id`, and every 429 and 503 a `Retry-After`.

use super::App;
use super::connections::Connection;
use super::error::ApiError;
use super::log_limit::LogLimit;
use crate::request::Client;
use crate::telemetry::{self, RequestSpan, TraceHeaders};
use actix_web::body::{BodySize, BoxBody, MessageBody};
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::header::{HeaderName, HeaderValue, RETRY_AFTER};
use actix_web::http::{ConnectionType, Method, StatusCode};
use actix_web::middleware::Next;
use actix_web::web::Bytes;
use actix_web::{Error, HttpMessage, web};
use std::error;
use std::hash::{BuildHasher, RandomState};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;
use tracing::{debug, info, warn};

/// Header of the request id, in requests and responses.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Maximum number of characters of a client's request id; the rest is cut off.
const ID_CHARS_MAX: usize = 128;

/// Maximum number of characters of an error message in the log: some quote the request.
const REASON_CHARS_MAX: usize = 300;

/// Id of a request in logs and responses.
#[derive(Clone, Debug)]
pub struct RequestId(pub Arc<str>);

/// Middleware that assigns the request id, sets the common headers and logs the response.
pub async fn track_request(
    app: web::Data<App>,
    request: ServiceRequest,
    next: Next<impl MessageBody + 'static>,
) -> Result<ServiceResponse<TrackedBody>, Error> {
    let began = Instant::now();
    let connection = request.conn_data::<Arc<Connection>>().cloned();
    let id = RequestId::from_request(&request);
    request.extensions_mut().insert(id.clone());
    let mut response = next.call(request).await?;

    let status = response.status();
    let error = response.response().error().and_then(|error| error.as_error::<ApiError>());
    let known = error.map_or(0, ApiError::retry_after_s);
    let headers = response.headers_mut();
    headers.insert(REQUEST_ID, id_header(&id.0));
    if matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
        headers.insert(RETRY_AFTER, app.config.retry_after.as_secs().max(known).into());
    }
    if app.parts.status.is_draining() {
        response.response_mut().head_mut().set_connection_type(ConnectionType::Close);
    }
    log_response(&id, &response, began);
    let span = response.request().extensions_mut().remove::<RequestSpan>();
    span.iter().for_each(|span| span.set_response(&id.0, status.as_u16()));
    Ok(response.map_body(|_, body| TrackedBody { body: body.boxed(), connection, _span: span }))
}

/// Middleware that begins the span of a request, which [`track_request`] ends. It is inside of
/// authorization: who shows no key takes no space for spans.
pub async fn trace_request<B: MessageBody + 'static>(
    request: ServiceRequest,
    next: Next<B>,
) -> Result<ServiceResponse<B>, Error> {
    let Some(span) = begin_span(&request) else { return next.call(request).await };
    let response = span.scope(next.call(request)).await?;
    response.request().extensions_mut().insert(span);
    Ok(response)
}

/// Begins the span of a request, if there are traces. Requests that only read are not traced: many are
/// probes.
fn begin_span(request: &ServiceRequest) -> Option<RequestSpan> {
    let is_traced = *request.method() == Method::POST && request.path() != "/ping";
    let pattern = is_traced.then(|| request.match_pattern()).flatten()?;
    let header = |name| request.headers().get(name).and_then(|value| value.to_str().ok());
    let parent = TraceHeaders { traceparent: header("traceparent"), tracestate: header("tracestate") };
    RequestSpan::begin("POST", &pattern, parent)
}

/// The body of a response, whose connection is idle when it is dropped.
pub struct TrackedBody {
    body: BoxBody,
    connection: Option<Arc<Connection>>,
    /// Ends when the whole body has been passed on, or the client is gone.
    _span: Option<RequestSpan>,
}

impl MessageBody for TrackedBody {
    type Error = Box<dyn error::Error>;

    fn size(&self) -> BodySize {
        self.body.size()
    }

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Self::Error>>> {
        Pin::new(&mut self.body).poll_next(cx)
    }
}

impl Drop for TrackedBody {
    fn drop(&mut self) {
        self.connection.iter().for_each(|connection| connection.set_idle());
    }
}

impl RequestId {
    /// Returns the client's request id, reduced to printable ASCII characters, or a new id if there is none.
    fn from_request(request: &ServiceRequest) -> RequestId {
        let given = request.headers().get(REQUEST_ID).map_or(&[][..], HeaderValue::as_bytes);
        let kept = given.iter().copied().filter(u8::is_ascii_graphic).take(ID_CHARS_MAX).map(char::from);
        let id: String = kept.collect();
        if id.is_empty() { RequestId::generate() } else { RequestId(id.into()) }
    }

    /// Generates a random id.
    pub fn generate() -> RequestId {
        RequestId(format!("{:016x}{:016x}", random(), random()).into())
    }
}

/// Returns 64 random bits. The standard library's hash keys come from the system's random number generator.
pub fn random() -> u64 {
    RandomState::new().hash_one(Instant::now())
}

fn id_header(id: &str) -> HeaderValue {
    HeaderValue::from_str(id).expect("a request id is ASCII; this is a bug")
}

/// Limit of log lines about rejected requests, which anyone can cause.
static REJECTIONS: LogLimit = LogLimit::new();

/// Counts and logs a response.
fn log_response<B>(id: &RequestId, response: &ServiceResponse<B>, began: Instant) {
    let request = response.request();
    let method = match *request.method() {
        Method::GET | Method::POST | Method::HEAD | Method::OPTIONS | Method::PUT | Method::DELETE => {
            request.method().as_str()
        }
        _ => "other",
    };
    // Requests that were refused before have none.
    let extensions = request.extensions();
    let client = extensions.get::<Arc<Client>>().map(|client| &*client.name);
    // Metric labels take few values, whatever paths clients request.
    let pattern = request.match_pattern();
    let path = pattern.as_deref().unwrap_or("other");
    telemetry::HTTP_REQUESTS.count([method, path, response.status().as_str()]);
    let (request_id, status) = (&*id.0, response.status().as_u16());
    let took_ms = telemetry::milliseconds(began.elapsed());
    // The error's message is escaped by the log, because it may quote the request.
    let error = response.response().error().and_then(|error| error.as_error::<ApiError>());
    let reason = error.map(|error| error.to_string().chars().take(REASON_CHARS_MAX).collect::<String>());
    let (reason, param) = (reason.as_deref(), error.and_then(ApiError::param));
    let is_rejected = matches!(status, 400..500 | 503) && path != "/health";
    let is_logged = !is_rejected
        || REJECTIONS.allows(Instant::now(), |count| {
            info!(count, "rejected requests were not logged");
        });
    // Completed requests log a line of their own; scrapes and probes would fill the log.
    match status {
        _ if path == "/health" => debug!(request = request_id, status, took_ms, "probed"),
        _ if !is_logged => {
            debug!(request = request_id, method, path = request.path(), status, reason, "rejected")
        }
        503 => {
            info!(request = request_id, method, path = request.path(), status, took_ms, client, "rejected")
        }
        500.. => {
            warn!(request = request_id, method, path = request.path(), status, took_ms, client, "failed")
        }
        400.. => info!(
            request = request_id,
            method,
            path = request.path(),
            status,
            took_ms,
            client,
            param,
            reason,
            "rejected"
        ),
        _ => debug!(request = request_id, method, path = request.path(), status, took_ms, client, "answered"),
    }
}
