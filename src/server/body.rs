//! Request bodies: they are received within limits of size, time and memory, and their cost is estimated.
//!
//! Invariant: a long body counts in the memory for bodies from the time at which its length is known until it
//! has been parsed.

use super::App;
use super::connections::Connection;
use super::error::ApiError;
use super::turns::Share;
use crate::request::client::ClientId;
use crate::request::{Client, RequestError};
use actix_web::dev::Payload;
use actix_web::error::PayloadError;
use actix_web::http::header::CONTENT_LENGTH;
use actix_web::web::{self, Bytes, BytesMut};
use actix_web::{FromRequest, HttpMessage, HttpRequest, rt};
use futures_util::{Stream, StreamExt};
use std::convert::Infallible;
use std::future::{Ready, ready};
use std::sync::Arc;
use std::time::Duration;

/// Bodies longer than this are parsed and tokenized off the event loop, and wait for their turn.
pub const INLINE_BYTES: usize = 8192;

/// Maximum time for a request body to arrive, once there is memory for it.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum time for which the body of a refused request is read on, and maximum time without a part of it.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(5);
const DISCARD_PAUSE: Duration = Duration::from_millis(200);

/// Memory that parsing takes at most: per byte of the body, per list element or field, and per object. The
/// copies of a text; a value, in a list that has just grown; a map with its index.
const BYTE_COST: usize = 4;
const VALUE_COST: usize = 192;
const OBJECT_COST: usize = 512;

/// Memory that the tokenizer library takes at most per byte of text: it keeps the origin of each byte in
/// several copies, and each word and token on its own.
const TOKENIZING_COST: usize = 192;

/// A request body, with what is held for it.
pub struct RequestBody {
    pub bytes: Bytes,
    pub client: ClientId,
    /// Memory of the body; `None` for a short one, and within the process.
    memory: Option<Share>,
}

/// The client and the announced length of a request's body.
pub struct BodyHead {
    client: ClientId,
    /// `Content-Length`; `None` if the body comes in chunks.
    length: Option<u64>,
    connection: Option<Arc<Connection>>,
}

impl FromRequest for BodyHead {
    type Error = Infallible;
    type Future = Ready<Result<BodyHead, Infallible>>;

    fn from_request(request: &HttpRequest, _: &mut Payload) -> Self::Future {
        let length = request.headers().get(CONTENT_LENGTH).and_then(|length| length.to_str().ok());
        let length = length.and_then(|length| length.parse().ok());
        let client = request.extensions().get::<Arc<Client>>().map_or(ClientId::Local, |client| client.id);
        let connection = request.conn_data::<Arc<Connection>>().cloned();
        ready(Ok(BodyHead { client, length, connection }))
    }
}

impl RequestBody {
    /// Creates the body of a request within the process.
    pub fn local(bytes: Bytes) -> RequestBody {
        RequestBody { bytes, client: ClientId::Local, memory: None }
    }

    /// Receives a body. One that is announced to be larger than the limit is not read, and a long one waits
    /// until there is memory for it.
    pub async fn receive(
        app: &App,
        head: BodyHead,
        mut payload: web::Payload,
    ) -> Result<RequestBody, ApiError> {
        let limit = app.config.body_limit_bytes;
        if head.length.is_some_and(|length| length > limit as u64) {
            return Err(ApiError::body_too_large(limit));
        }
        let announced = head.length.unwrap_or(0) as usize;
        let mut memory = match reserve(app, head.client, announced).await {
            Ok(memory) => memory,
            Err(busy) => {
                discard(&mut payload).await;
                return Err(busy.into());
            }
        };
        let read = rt::time::timeout(
            TIMEOUT,
            read_chunks(&mut payload, announced, limit, &mut memory, || {
                reserve(app, head.client, 2 * INLINE_BYTES)
            }),
        );
        let bytes = read.await.map_err(|_| ApiError::body_too_slow(TIMEOUT))??;
        head.connection.iter().for_each(|connection| connection.begin_response());
        Ok(RequestBody { bytes, client: head.client, memory })
    }

    /// Returns the body's bytes, and what keeps its memory counted.
    pub fn into_parts(self) -> (Bytes, Option<Share>) {
        (self.bytes, self.memory)
    }
}

/// Waits for memory for a body of `bytes` bytes, if it is long.
async fn reserve(app: &App, client: ClientId, bytes: usize) -> Result<Option<Share>, RequestError> {
    match bytes > INLINE_BYTES {
        true => app.bodies.acquire(client, bytes, bytes).await.map(Some),
        false => Ok(None),
    }
}

/// Reads the rest of a body that is refused, for a while and as long as it comes quickly: a client that is
/// still sending when the connection is closed may not see why.
async fn discard(payload: &mut web::Payload) {
    let read =
        async { while let Ok(Some(Ok(_))) = rt::time::timeout(DISCARD_PAUSE, payload.next()).await {} };
    _ = rt::time::timeout(DISCARD_TIMEOUT, read).await;
}

/// Reads a body of at most `limit` bytes. One that was not announced gets its first memory from `begin`.
async fn read_chunks<F: Future<Output = Result<Option<Share>, RequestError>>>(
    payload: &mut (impl Stream<Item = Result<Bytes, PayloadError>> + Unpin),
    announced: usize,
    limit: usize,
    memory: &mut Option<Share>,
    begin: impl Fn() -> F,
) -> Result<Bytes, ApiError> {
    let mut body = BytesMut::with_capacity(announced);
    while let Some(chunk) = payload.next().await {
        let chunk = chunk
            .map_err(|error| ApiError::malformed(format!("the request body cannot be read: {error}")))?;
        let length = body.len() + chunk.len();
        if length > limit {
            return Err(ApiError::body_too_large(limit));
        }
        if length > announced.max(INLINE_BYTES) {
            if memory.is_none() {
                *memory = begin().await?;
            }
            // A buffer that grows doubles.
            let grown = 2 * length;
            if memory.as_mut().is_some_and(|memory| !memory.grow(grown)) {
                return Err(RequestError::NoBodyMemory.into());
            }
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body.freeze())
}

/// Returns the memory that parsing a body and tokenizing its texts takes at most, in bytes. `longest_text` is
/// the length beyond which no text is tokenized.
pub fn parsing_memory(body: &[u8], longest_text: usize) -> usize {
    // What is counted within a text is counted too much.
    let (mut values, mut objects) = (0usize, 0usize);
    for byte in body {
        values += usize::from(matches!(byte, b',' | b'['));
        objects += usize::from(*byte == b'{');
    }
    let parsed = body.len() * BYTE_COST + values * VALUE_COST + objects * OBJECT_COST;
    parsed + body.len().min(longest_text) * TOKENIZING_COST
}
