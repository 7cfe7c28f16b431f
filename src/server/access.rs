//! What happens around every request: its id, its count, its log line and the headers that belong to a
//! status rather than to a handler.
//!
//! Invariant: every response has an `X-Request-Id`, and every 429 and 503 a `Retry-After`.

use super::App;
use crate::telemetry;
use actix_web::body::MessageBody;
use actix_web::dev::{ServiceRequest, ServiceResponse};
use actix_web::http::header::{HeaderName, HeaderValue, RETRY_AFTER};
use actix_web::http::{ConnectionType, Method, StatusCode};
use actix_web::middleware::Next;
use actix_web::{Error, HttpMessage, web};
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::time::Instant;
use tracing::{debug, info, warn};

/// The header that carries a request's id both ways.
pub const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Longest id taken from a client.
const ID_CHARS_MAX: usize = 128;

/// What a request is called in logs and answers.
#[derive(Clone, Debug)]
pub struct RequestId(pub Arc<str>);

/// The middleware.
pub async fn access(
    app: web::Data<App>,
    request: ServiceRequest,
    next: Next<impl MessageBody>,
) -> Result<ServiceResponse<impl MessageBody>, Error> {
    let began = Instant::now();
    let id = RequestId::of(&request);
    request.extensions_mut().insert(id.clone());
    let mut response = next.call(request).await?;

    let status = response.status();
    let headers = response.headers_mut();
    headers.insert(REQUEST_ID, header(&id.0));
    if matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
        headers.insert(RETRY_AFTER, app.config.retry_after.as_secs().into());
    }
    if app.parts.status.is_draining() {
        response.response_mut().head_mut().set_connection_type(ConnectionType::Close);
    }
    note(&id, &response, began);
    Ok(response)
}

impl RequestId {
    /// The client's id, of which only what can be seen belongs into logs and headers; without one, a fresh id.
    fn of(request: &ServiceRequest) -> RequestId {
        let given = request.headers().get(REQUEST_ID).map_or(&[][..], HeaderValue::as_bytes);
        let kept = given.iter().copied().filter(u8::is_ascii_graphic).take(ID_CHARS_MAX).map(char::from);
        let id: String = kept.collect();
        if id.is_empty() { RequestId::fresh() } else { RequestId(id.into()) }
    }

    /// One that no other request has.
    pub fn fresh() -> RequestId {
        RequestId(format!("{:016x}{:016x}", random(), random()).into())
    }
}

/// 64 random bits: the standard library's hash keys come from the system's generator.
pub fn random() -> u64 {
    RandomState::new().hash_one(Instant::now())
}

fn header(id: &str) -> HeaderValue {
    HeaderValue::from_str(id).expect("an id is plain ASCII; anything else is a bug")
}

fn note<B>(id: &RequestId, response: &ServiceResponse<B>, began: Instant) {
    let request = response.request();
    let method = match *request.method() {
        Method::GET | Method::POST | Method::HEAD | Method::OPTIONS | Method::PUT | Method::DELETE => {
            request.method().as_str()
        }
        _ => "other",
    };
    // A label takes few values, whatever clients ask for.
    let pattern = request.match_pattern();
    let path = pattern.as_deref().unwrap_or("other");
    telemetry::HTTP_REQUESTS.count([method, path, response.status().as_str()]);
    let (request_id, status) = (&*id.0, response.status().as_u16());
    let took_ms = began.elapsed().as_secs_f64() * 1e3;
    // Completions have a line of their own at their end; scrapes and probes would fill the log.
    match status {
        _ if path == "/health" => debug!(request = request_id, status, took_ms, "probed"),
        503 => info!(request = request_id, method, path = request.path(), status, took_ms, "refused"),
        500.. => warn!(request = request_id, method, path = request.path(), status, took_ms, "failed"),
        400.. => info!(request = request_id, method, path = request.path(), status, took_ms, "refused"),
        _ => debug!(request = request_id, method, path = request.path(), status, took_ms, "answered"),
    }
}
