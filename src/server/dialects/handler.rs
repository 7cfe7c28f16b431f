//! The path of a translated request: its body is translated in its turn, the native API answers it, and the
//! answer is translated back.
//!
//! Invariant: the native stream is owned by the translated one, so that dropping this cancels the request.

use super::dialect::{Caller, Dialect, DialectContext, Inner};
use super::frames::Frames;
use crate::request::RequestError;
use crate::server::body::{INLINE_BYTES, RequestBody};
use crate::server::error::{ApiError, ErrorParts};
use crate::server::fields::Fields;
use crate::server::held_body::json_body;
use crate::server::respond::{ApiResponse, ResponseBody, Turn, parse_off_loop};
use crate::server::turns::Share;
use crate::server::{App, LocalApi, ServeParts};
use actix_web::web::{self, Bytes};
use async_stream::stream;
use futures_util::{Stream, StreamExt};
use serde_json::Value;
use std::pin::Pin;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

/// Memory that a byte of a native response takes at most while it is translated: as values, and as JSON.
const TRANSLATED_BYTE_COST: usize = 8;

/// Answers a translated request.
pub async fn respond<D: Dialect>(
    app: &Arc<App>,
    caller: Caller,
    body: RequestBody,
) -> Result<ApiResponse, ApiError> {
    answer::<D>(app, caller, body).await.map_err(D::rename)
}

async fn answer<D: Dialect>(
    app: &Arc<App>,
    caller: Caller,
    mut body: RequestBody,
) -> Result<ApiResponse, ApiError> {
    // The body of the native request takes its place.
    let mut memory = body.take_memory();
    let (id, created, keeps_responses) = (caller.id.clone(), unix_time(), caller.service.0.is_some());
    let open = move |parts: &ServeParts, _: &Turn, fields: Fields| {
        D::open(fields, &DialectContext { parts, id: &id, created, keeps_responses })
    };
    let ((mut dialect, mut inner), ignored) = parse_off_loop(app, body, 0, open).await?;
    dialect.prepare(&mut inner, &caller).await?;
    let Inner { path, body } = inner;
    // With what is kept of earlier requests, the native body may be much longer.
    let may_be_long = keeps_responses || caller.body_bytes > INLINE_BYTES;
    let body = off_loop(may_be_long, move || Bytes::from(body.to_string())).await?;
    hold(app, &mut memory, &caller, body.len()).await?;
    let api = LocalApi::of_server(app.clone(), caller.client.clone());
    let body = match api.post_with_id(caller.id.clone(), path, body, memory).await? {
        ResponseBody::Json(json) => ResponseBody::Json(translate_whole(app, dialect, caller, json).await?),
        ResponseBody::Events(events) => {
            ResponseBody::Events(Box::pin(translate_events(dialect, caller, events)))
        }
    };
    Ok(ApiResponse { body, ignored })
}

/// Holds the memory of a native body of `bytes` bytes, in addition to that of the translated one.
async fn hold(app: &App, memory: &mut Option<Share>, caller: &Caller, bytes: usize) -> Result<(), ApiError> {
    if bytes > caller.native_bytes_max {
        return Err(ApiError::body_too_large(caller.native_bytes_max));
    }
    let Some(share) = memory else {
        if bytes > INLINE_BYTES {
            *memory = Some(app.bodies.acquire(caller.client.id, bytes, bytes).await?);
        }
        return Ok(());
    };
    // It does not wait for more while it has some.
    match share.grow(bytes, bytes) {
        true => Ok(()),
        false => Err(RequestError::NoBodyMemory.into()),
    }
}

/// Runs `work`, on a thread of the blocking pool if it takes long.
pub async fn off_loop<T: Send + 'static>(
    is_long: bool,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, ApiError> {
    match is_long {
        false => Ok(work()),
        true => web::block(work)
            .await
            .map_err(|error| ApiError::internal(format!("translating a body failed: {error}"))),
    }
}

/// Translates a whole response.
async fn translate_whole<D: Dialect>(
    app: &App,
    mut dialect: D,
    caller: Caller,
    json: Bytes,
) -> Result<Bytes, ApiError> {
    let held = app.parts.status.responses.hold(caller.client.id);
    held.grow(json.len() * TRANSLATED_BYTE_COST)?;
    let is_long = json.len() > INLINE_BYTES;
    let translate = move || {
        let body = json_body(held, &dialect.response(parse(&json)));
        (dialect, body)
    };
    let (mut dialect, body) = off_loop(is_long, translate).await?;
    dialect.keep(&caller).await?;
    Ok(body?)
}

/// Translates a stream.
fn translate_events<D: Dialect>(
    mut dialect: D,
    caller: Caller,
    mut events: Pin<Box<dyn Stream<Item = Bytes>>>,
) -> impl Stream<Item = Bytes> {
    stream! {
        let mut out = Frames::new(D::FRAMING);
        let mut has_failed = false;
        while let Some(batch) = events.next().await {
            for event in native_events(&batch) {
                match event {
                    _ if has_failed => {}
                    NativeEvent::Comment => dialect.heartbeat(&mut out),
                    NativeEvent::Data(chunk) => match ErrorParts::in_chunk(&chunk) {
                        None => dialect.chunk(chunk, &mut out),
                        Some(error) => {
                            dialect.fail(error, &mut out);
                            has_failed = true;
                        }
                    },
                    NativeEvent::Done => match dialect.keep(&caller).await {
                        Ok(()) => dialect.end(&mut out),
                        Err(error) => dialect.fail(error.parts(), &mut out),
                    },
                }
            }
            if let Some(frames) = out.take() {
                yield frames;
            }
        }
    }
}

/// An event of a native stream.
enum NativeEvent {
    Data(Value),
    Comment,
    Done,
}

/// Returns the events of an item of a native stream, which are whole.
fn native_events(batch: &[u8]) -> impl Iterator<Item = NativeEvent> {
    let text = std::str::from_utf8(batch).expect("native events are UTF-8; this is a bug");
    text.split_terminator("\n\n").map(|event| match event.strip_prefix("data: ") {
        Some("[DONE]") => NativeEvent::Done,
        Some(json) => NativeEvent::Data(parse(json.as_bytes())),
        None => NativeEvent::Comment,
    })
}

fn parse(json: &[u8]) -> Value {
    serde_json::from_slice(json).expect("native answers are JSON; this is a bug")
}

/// Returns the time in seconds of Unix time.
fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
