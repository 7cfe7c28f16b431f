//! One connection with HTTP on it, driven by whoever waits for its answer.
//!
//! No task of its own stands between the socket and the reader: what is read is seen in the same breath.
//! Invariant: while nobody awaits anything here, nothing is read, so the server feels a reader that is slow.

use std::{
    future::poll_fn,
    pin::{Pin, pin},
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll, Wake, Waker},
    time::Instant,
};

use http_body_util::Full;
use hyper::{
    Request, Response,
    body::{Body, Bytes, Incoming},
    client::conn::http1,
};
use hyper_util::rt::TokioIo;

use super::{
    server::Server,
    wire::{Tap, Wire},
};
use crate::sample::{Failure, FailureKind};

/// What requests carry.
pub type Post = Full<Bytes>;

/// Bytes that are read at once, and the most a head may have.
const BUFFER_BYTES_MAX: usize = 1 << 16;

type Http = http1::Connection<TokioIo<Wire>, Post>;

/// A connection to a server; dropping it closes it.
pub struct Connection {
    sender: http1::SendRequest<Post>,
    driver: Driver,
    /// What had come before the request in progress.
    received_before: u64,
}

/// The half that reads and writes.
struct Driver {
    /// `None` once it is over.
    http: Option<Http>,
    tap: Rc<Tap>,
    /// What the two halves wake each other by: both are polled here, so that none needs another turn of the task.
    again: Arc<Again>,
    waker: Waker,
}

/// Whether one half has something for the other.
#[derive(Default)]
struct Again(AtomicBool);

impl Wake for Again {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Relaxed);
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.store(true, Relaxed);
    }
}

impl Driver {
    fn new(http: Http, tap: Rc<Tap>) -> Self {
        let again = Arc::new(Again::default());
        Self { http: Some(http), tap, waker: Waker::from(Arc::clone(&again)), again }
    }

    /// Moves bytes until `poll` has what it waits for.
    async fn drive<T>(&mut self, mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>) -> T {
        let Self { http, tap, again, waker } = self;
        let inner = &mut Context::from_waker(waker);
        poll_fn(|cx| {
            tap.wake(cx.waker());
            // What was read before comes out before more is read, so that the time of the last read is its own.
            let mut ready = poll(inner);
            while ready.is_pending() {
                again.0.store(false, Relaxed);
                poll_http(http, inner);
                ready = poll(inner);
                if !again.0.load(Relaxed) {
                    break;
                }
            }
            ready
        })
        .await
    }
}

fn poll_http(http: &mut Option<Http>, cx: &mut Context<'_>) {
    if let Some(connection) = http
        && Pin::new(connection).poll(cx).is_ready()
    {
        // Its error, if any, has gone to whoever waits for the answer.
        *http = None;
    }
}

impl Connection {
    /// A new one, that reads no faster than `read_rate` bytes per second.
    pub async fn open(server: &Server, read_rate: Option<u32>) -> Result<Self, Failure> {
        let wire = server.connect(read_rate).await?;
        let tap = wire.tap();
        let (sender, http) = http1::Builder::new()
            .max_buf_size(BUFFER_BYTES_MAX)
            .handshake(TokioIo::new(wire))
            .await
            .map_err(|error| FailureKind::Connect.saying(with_cause(&error)))?;
        Ok(Self { sender, driver: Driver::new(http, tap), received_before: 0 })
    }

    /// Sends `request` and waits for the head of its answer.
    pub async fn request(&mut self, request: Request<Post>) -> hyper::Result<Response<Incoming>> {
        self.received_before = self.driver.tap.received();
        let mut answer = pin!(self.sender.send_request(request));
        self.driver.drive(|cx| answer.as_mut().poll(cx)).await
    }

    /// Whether anything has come since the request.
    pub fn has_received(&self) -> bool {
        self.driver.tap.received() > self.received_before
    }

    /// The next piece of a body, and when it was read from the socket; `None` at its end.
    pub async fn piece(&mut self, body: &mut Incoming) -> Option<hyper::Result<(Bytes, Instant)>> {
        loop {
            let frame = self.driver.drive(|cx| Pin::new(&mut *body).poll_frame(cx)).await?;
            match frame.map(|frame| frame.into_data()) {
                Ok(Ok(data)) => return Some(Ok((data, self.driver.tap.read_at()))),
                // Trailers mean nothing to this client.
                Ok(Err(_)) => {}
                Err(error) => return Some(Err(error)),
            }
        }
    }

    /// At most the first `bytes_max` bytes of a body. `Err` tells what came before it broke off.
    pub async fn text(&mut self, mut body: Incoming, bytes_max: usize) -> Result<String, String> {
        let mut bytes = Vec::new();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        while bytes.len() < bytes_max {
            match self.piece(&mut body).await {
                None => return Ok(text(&bytes)),
                Some(Ok((piece, _))) => {
                    bytes.extend_from_slice(&piece[..piece.len().min(bytes_max - bytes.len())]);
                }
                Some(Err(_)) => break,
            }
        }
        Err(text(&bytes))
    }

    /// Whether it is open and its last answer is over, so that it can take a request.
    pub fn is_idle(&mut self) -> bool {
        let Driver { http, tap, waker, .. } = &mut self.driver;
        // Nobody waits for it until it is used again.
        tap.wake(Waker::noop());
        poll_http(http, &mut Context::from_waker(waker));
        self.driver.http.is_some() && self.sender.is_ready()
    }
}

/// The failure of a request whose answer has not begun.
pub fn no_head(error: &hyper::Error) -> Failure {
    let kind = if error.is_parse() { FailureKind::BadHttp } else { FailureKind::EarlyClose };
    kind.saying(with_cause(error))
}

/// The failure of an answer whose body broke off.
pub fn no_end(error: &hyper::Error) -> Failure {
    FailureKind::EarlyClose.saying(with_cause(error))
}

/// The error and what caused it.
fn with_cause(error: &hyper::Error) -> String {
    match std::error::Error::source(error) {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}
