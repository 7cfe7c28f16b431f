//! Request bodies: they are received within limits of size, time and memory, and their cost is estimated.
//!
//! Invariant: a long body counts in the memory for bodies from the time at which its length is known until it
//! has been parsed.

use super::connections::Connection;
use super::error::ApiError;
use super::turns::Share;
use super::{App, BODIES_SHARE};
use crate::config::ServerConfig;
use crate::request::client::ClientId;
use crate::request::{Client, RequestError};
use actix_web::dev::Payload;
use actix_web::error::PayloadError;
use actix_web::http::header::CONTENT_LENGTH;
use actix_web::web::{Bytes, BytesMut};
use actix_web::{FromRequest, HttpMessage, HttpRequest};
use futures_util::{Stream, StreamExt};
use std::convert::Infallible;
use std::future::{Ready, ready};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout, timeout_at};

/// Bodies longer than this are parsed and tokenized off the event loop, and wait for their turn.
pub const INLINE_BYTES: usize = 8192;

/// Maximum time for a request body to arrive, once there is memory for it.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// Time by which a body that holds memory may be late against its pace: the pace at which all of it arrives
/// in time, or 1 KiB per second if that is more.
const LATE_MAX: Duration = Duration::from_secs(5);
const PACED_BYTES_MIN: u64 = TIMEOUT.as_secs() << 10;

/// Time after which a late body is looked at again, if nobody waited for its memory.
const LATE_STEP: Duration = Duration::from_secs(1);

/// Maximum time for which a request waits for memory for its body.
const MEMORY_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum time for which the body of a refused request is read on, and maximum time without a part of it.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(5);
const DISCARD_PAUSE: Duration = Duration::from_millis(200);

/// Memory that parsing takes at most: per byte of the body, per list element or field, and per object. The
/// copies of a text; a value, in a list that has just grown; a map with its index.
const BYTE_COST: usize = 4;
const VALUE_COST: usize = 192;
const OBJECT_COST: usize = 512;

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
    pub length: Option<u64>,
    pub connection: Option<Arc<Connection>>,
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
    /// Creates the body of a client's request within the process.
    pub fn local(client: ClientId, bytes: Bytes, memory: Option<Share>) -> RequestBody {
        RequestBody { bytes, client, memory }
    }

    /// Takes the memory of the body out, which the caller has to hold until the body has been parsed.
    pub fn take_memory(&mut self) -> Option<Share> {
        self.memory.take()
    }

    /// Receives a body. One that is announced to be larger than the limit is not read, and a long one waits
    /// until there is memory for it.
    pub async fn receive(
        app: &App,
        head: BodyHead,
        mut payload: impl Stream<Item = Result<Bytes, PayloadError>> + Unpin,
    ) -> Result<RequestBody, ApiError> {
        let limit = app.config.body_limit_bytes;
        if head.length.is_some_and(|length| length > limit as u64) {
            return Err(ApiError::body_too_large(limit));
        }
        let mut upload = Upload::new(app, &head);
        match upload.read(&mut payload, limit).await {
            Ok(bytes) => {
                let memory = upload.memory;
                head.connection.iter().for_each(|connection| connection.set_busy());
                Ok(RequestBody { bytes, client: head.client, memory })
            }
            Err(refusal) => {
                // Others can have its memory meanwhile.
                drop(upload);
                discard(&mut payload).await;
                Err(refusal)
            }
        }
    }
}

/// A body that is being received.
struct Upload<'a> {
    app: &'a App,
    head: &'a BodyHead,
    memory: Option<Share>,
    /// The beginning of the time for the body to arrive.
    began: Instant,
    /// The time at which it got memory, and the number of bytes that had arrived by then.
    paced: (Instant, usize),
}

impl<'a> Upload<'a> {
    fn new(app: &'a App, head: &'a BodyHead) -> Upload<'a> {
        let began = Instant::now();
        Upload { app, head, memory: None, began, paced: (began, 0) }
    }

    /// Reads a body of at most `limit` bytes.
    async fn read(
        &mut self,
        payload: &mut (impl Stream<Item = Result<Bytes, PayloadError>> + Unpin),
        limit: usize,
    ) -> Result<Bytes, ApiError> {
        let announced = self.head.length.unwrap_or(0) as usize;
        if announced > INLINE_BYTES {
            self.wait_for_memory(announced).await?;
        }
        let mut body = BytesMut::with_capacity(announced);
        loop {
            let Some(chunk) = self.next(payload, body.len()).await? else { return Ok(body.freeze()) };
            self.head.connection.iter().for_each(|connection| connection.touch());
            let chunk = chunk
                .map_err(|error| ApiError::malformed(format!("the request body cannot be read: {error}")))?;
            let length = body.len() + chunk.len();
            if length > limit {
                return Err(ApiError::body_too_large(limit));
            }
            if length > announced.max(INLINE_BYTES) {
                if self.memory.is_none() {
                    self.wait_for_memory(2 * INLINE_BYTES).await?;
                    self.paced.1 = length;
                }
                // A buffer that grows doubles.
                if self.memory.as_mut().is_some_and(|memory| !memory.grow(length, 2 * length)) {
                    return Err(RequestError::NoBodyMemory.into());
                }
            }
            body.extend_from_slice(&chunk);
        }
    }

    /// Receives the next part of a body of which `received` bytes are there. One that is late against its
    /// pace is refused once others wait for its memory.
    async fn next(
        &self,
        payload: &mut (impl Stream<Item = Result<Bytes, PayloadError>> + Unpin),
        received: usize,
    ) -> Result<Option<Result<Bytes, PayloadError>>, ApiError> {
        let (mut due, last) = (self.due(received), self.began + TIMEOUT);
        loop {
            match timeout_at(due, payload.next()).await {
                Ok(next) => return Ok(next),
                Err(_) if due < last && !self.app.bodies.is_contended() => due = last.min(due + LATE_STEP),
                Err(_) => return Err(ApiError::body_too_slow(TIMEOUT)),
            }
        }
    }

    /// Returns the time by which more than `received` bytes have to be there while others wait for memory.
    /// Otherwise clients could hold it by sending next to nothing.
    fn due(&self, received: usize) -> Instant {
        let last = self.began + TIMEOUT;
        if self.memory.is_none() {
            return last;
        }
        let pace = self.head.length.unwrap_or(0).max(PACED_BYTES_MIN);
        let (since, before) = self.paced;
        let on_time = TIMEOUT.mul_f64((received - before.min(received)) as f64 / pace as f64);
        last.min(since + on_time + LATE_MAX)
    }

    /// Waits for memory for `bytes` bytes, for some time. Meanwhile the connection is busy, and the time of
    /// the upload does not pass: it is not the client that is slow.
    async fn wait_for_memory(&mut self, bytes: usize) -> Result<(), RequestError> {
        let (began, connection) = (Instant::now(), &self.head.connection);
        connection.iter().for_each(|connection| connection.set_busy());
        let share = timeout(MEMORY_TIMEOUT, self.app.bodies.acquire(self.head.client, bytes, bytes)).await;
        connection.iter().for_each(|connection| connection.set_idle());
        self.memory = Some(share.map_err(|_| RequestError::NoBodyMemory)??);
        self.began += began.elapsed();
        self.paced.0 = Instant::now();
        Ok(())
    }
}

/// Reads the rest of a body that is refused, for a while and as long as it comes quickly: a client that is
/// still sending when the connection is closed may not see why.
pub async fn discard(payload: &mut (impl Stream<Item = Result<Bytes, PayloadError>> + Unpin)) {
    let read = async { while let Ok(Some(Ok(_))) = timeout(DISCARD_PAUSE, payload.next()).await {} };
    _ = timeout(DISCARD_TIMEOUT, read).await;
}

/// Returns the memory that parsing a body takes at most, in bytes.
pub fn parsing_memory(body: &[u8]) -> usize {
    // What is counted within a text is counted too much.
    let (mut values, mut objects) = (0usize, 0usize);
    for byte in body {
        values += usize::from(matches!(byte, b',' | b'['));
        objects += usize::from(*byte == b'{');
    }
    body.len() * BYTE_COST + values * VALUE_COST + objects * OBJECT_COST
}

/// Returns the memory that all request bodies take at most, while they are read, parsed and tokenized, in
/// bytes. Tokenizing takes `tokenizing` bytes per byte of text at most.
pub fn request_memory_max(config: &ServerConfig, tokenizing: usize) -> usize {
    // As much as either a text or a list takes.
    let parsing = |bytes: usize| bytes.saturating_mul(BYTE_COST + VALUE_COST.max(tokenizing));
    // The largest body takes what it needs, beside the quarter of a pool that it leaves to others.
    let pool = |limit: usize, largest: usize| limit.max(largest.saturating_add(limit / 4));
    let (bodies, limit) = (config.request_memory_bytes / BODIES_SHARE, config.body_limit_bytes);
    pool(bodies, limit.saturating_mul(2))
        .saturating_add(pool(config.request_memory_bytes - bodies, parsing(limit)))
        .saturating_add(config.workers * parsing(INLINE_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::server::connections::Connections;
    use crate::server::tests::test_server::app;
    use futures_util::FutureExt;
    use futures_util::stream::poll_fn;
    use std::cell::Cell;
    use std::rc::Rc;
    use std::task::{Poll, ready};
    use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

    type Payload = Result<Bytes, PayloadError>;

    /// Returns a payload, what sends its parts, and how many of these were read.
    fn payload() -> (UnboundedSender<Payload>, impl Stream<Item = Payload> + Unpin, Rc<Cell<usize>>) {
        let (sender, mut parts) = unbounded_channel();
        let read = Rc::new(Cell::new(0));
        let count = read.clone();
        let next = poll_fn(move |cx| {
            let part = ready!(parts.poll_recv(cx));
            count.set(count.get() + usize::from(part.is_some()));
            Poll::Ready(part)
        });
        (sender, next, read)
    }

    fn head(client: u64, length: Option<u64>, connection: Option<Arc<Connection>>) -> BodyHead {
        BodyHead { client: ClientId::Key(client), length, connection }
    }

    fn part(bytes: usize) -> Payload {
        Ok(vec![b' '; bytes].into())
    }

    fn is_closed(connection: &Connection) -> bool {
        connection.closed(Duration::from_secs(3600)).now_or_never().is_some()
    }

    /// Regression: requests that waited for memory counted as idle for longest, and were closed first.
    #[actix_web::test]
    async fn a_connection_is_busy_while_its_body_waits_for_memory() {
        let app = app(|config| config.request_memory_bytes = 1 << 20);
        let all = Connections::new(2, None);
        let accept = || Arc::new(all.accept([192, 0, 2, 1].into()).unwrap());
        let (waiting, second) = (accept(), accept());
        let held = app.bodies.acquire(ClientId::Key(1), 200_000, 200_000).now_or_never().unwrap().unwrap();
        let (parts, body, _) = payload();
        let body = RequestBody::receive(&app, head(2, Some(100_000), Some(waiting.clone())), body);
        let mut body = Box::pin(body);
        assert!(body.as_mut().now_or_never().is_none());
        let third = accept();
        assert_eq!([&waiting, &second, &third].map(|connection| is_closed(connection)), [false, true, false]);
        // Once there is memory, it is the client that makes others wait.
        drop((held, second));
        assert!(body.as_mut().now_or_never().is_none());
        let fourth = accept();
        assert_eq!([&waiting, &third].map(|connection| is_closed(connection)), [false, true]);
        drop(third);
        // One whose body makes progress is not the longest idle.
        parts.send(part(50_000)).unwrap();
        assert!(body.as_mut().now_or_never().is_none());
        let _fifth = accept();
        assert_eq!([&waiting, &fourth].map(|connection| is_closed(connection)), [false, true]);
        parts.send(part(50_000)).unwrap();
        drop(parts);
        assert_eq!(body.await.map(|body| body.bytes.len()).ok(), Some(100_000));
    }

    #[actix_web::test]
    async fn the_time_of_an_upload_does_not_pass_while_it_waits_for_memory() {
        let app = app(|config| config.request_memory_bytes = 1 << 20);
        let held = app.bodies.acquire(ClientId::Key(1), 200_000, 200_000).now_or_never().unwrap().unwrap();
        let head = head(2, None, None);
        let mut upload = Upload::new(&app, &head);
        let began = upload.began;
        let mut waiting = Box::pin(upload.wait_for_memory(100_000));
        assert!(waiting.as_mut().now_or_never().is_none());
        drop(held);
        waiting.await.unwrap();
        assert!(upload.began > began);
    }

    /// Regression: a client held the memory of a body for a minute by sending a byte.
    #[actix_web::test]
    async fn a_body_that_holds_memory_has_to_keep_its_pace() {
        let app = app(|config| config.request_memory_bytes = 1 << 20);
        for (length, seconds) in [
            (Some(INLINE_BYTES as u64), [60, 60, 60]),
            (Some(4_000_000), [5, 5, 20]),
            (Some(20_000), [5, 14, 60]),
            (None, [60, 14, 60]),
        ] {
            let head = head(1, length, None);
            for (received, seconds) in [0u64, 10_000, 1_000_000].into_iter().zip(seconds) {
                let mut upload = Upload::new(&app, &head);
                if length.unwrap_or(received) > INLINE_BYTES as u64 {
                    upload.wait_for_memory(INLINE_BYTES + 1).await.unwrap();
                }
                let time = upload.due(received as usize) - upload.began;
                assert_eq!(time.as_secs(), seconds, "{length:?} {received}");
            }
        }
        // One that is late is refused if somebody waits for its memory.
        let (head, (_parts, mut body, _)) = (head(1, Some(100_000), None), payload());
        let mut upload = Upload::new(&app, &head);
        upload.wait_for_memory(100_000).await.unwrap();
        upload.began -= Duration::from_secs(20);
        upload.paced.0 = upload.began;
        assert!(upload.next(&mut body, 1000).now_or_never().is_none());
        let mut waiting = Box::pin(app.bodies.acquire(ClientId::Key(2), 1 << 20, 1 << 20));
        assert!(waiting.as_mut().now_or_never().is_none());
        let refused = upload.next(&mut body, 1000).await.err().map(|refusal| refusal.to_string());
        assert!(refused.is_some_and(|text| text.contains("too slowly")));
    }

    /// Regression: the connection was closed while its client still sent, which then saw no response.
    #[actix_web::test]
    async fn the_rest_of_a_body_that_finds_no_memory_is_read() {
        let app = app(|config| config.request_memory_bytes = 1 << 20);
        let [mut first, mut second] = [(); 2].map(|()| {
            let (parts, body, read) = payload();
            (parts, Box::pin(RequestBody::receive(&app, head(1, None, None), body)), read)
        });
        // Both have begun before the first one takes nearly all that its client may have.
        for (parts, body, _) in [&mut first, &mut second] {
            parts.send(part(9000)).unwrap();
            assert!(body.as_mut().now_or_never().is_none());
        }
        first.0.send(part(200_000)).unwrap();
        assert!(first.1.as_mut().now_or_never().is_none());
        (0..5).for_each(|_| second.0.send(part(40_000)).unwrap());
        drop(second.0);
        let refusal = second.1.await.err().map(|refusal| refusal.to_string());
        assert!(refusal.is_some_and(|text| text.contains("no memory is left")));
        assert_eq!(second.2.get(), 6);
        // Its memory is free.
        drop(first.0);
        assert_eq!(first.1.await.map(|body| body.bytes.len()).ok(), Some(209_000));
        assert!(app.bodies.acquire(ClientId::Key(1), 60_000, 60_000).now_or_never().is_some());
    }
}
