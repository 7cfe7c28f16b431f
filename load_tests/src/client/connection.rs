//! An HTTP/1.1 connection driven by the task that awaits its response.
//!
//! There is no background task between the socket and the reader, so received data is processed without
//! delay.
//! Invariant: nothing is read while no caller awaits a method, so that a slow reader causes TCP backpressure.

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

/// The body type of requests.
pub type RequestBody = Full<Bytes>;

/// Size of the read buffer in bytes, and maximum size of a response head.
const BUFFER_BYTES_MAX: usize = 1 << 16;

type Http = http1::Connection<TokioIo<Wire>, RequestBody>;

/// A connection to a server, closed on drop.
pub struct Connection {
    sender: http1::SendRequest<RequestBody>,
    driver: Driver,
    /// Bytes received before the current request was sent.
    received_before: u64,
}

/// The half of the connection that performs the I/O.
struct Driver {
    /// `None` once the connection is closed.
    http: Option<Http>,
    tap: Rc<Tap>,
    /// Set when one half wakes the other: both are polled in one loop, without rescheduling the task.
    again: Arc<WakeFlag>,
    waker: Waker,
}

/// A waker that only records that it was woken, so that the poll loop runs once more.
#[derive(Default)]
struct WakeFlag(AtomicBool);

impl Wake for WakeFlag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Relaxed);
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.store(true, Relaxed);
    }
}

impl Driver {
    fn new(http: Http, tap: Rc<Tap>) -> Self {
        let again = Arc::new(WakeFlag::default());
        Self { http: Some(http), tap, waker: Waker::from(Arc::clone(&again)), again }
    }

    /// Drives the I/O until `poll` is ready.
    async fn drive<T>(&mut self, mut poll: impl FnMut(&mut Context<'_>) -> Poll<T>) -> T {
        let Self { http, tap, again, waker } = self;
        let inner = &mut Context::from_waker(waker);
        poll_fn(|cx| {
            tap.set_waker(cx.waker());
            // Buffered data is consumed before more is read, so that the read time belongs to the data
            // returned.
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
        // The error, if any, is reported to the caller that awaits the response.
        *http = None;
    }
}

impl Connection {
    /// Opens a connection that reads at most `read_rate` bytes per second, if given.
    pub async fn open(server: &Server, read_rate: Option<u32>) -> Result<Self, Failure> {
        let wire = server.connect(read_rate).await?;
        let tap = wire.tap();
        let (sender, http) = http1::Builder::new()
            .max_buf_size(BUFFER_BYTES_MAX)
            .handshake(TokioIo::new(wire))
            .await
            .map_err(|error| FailureKind::Connect.with_message(with_cause(&error)))?;
        Ok(Self { sender, driver: Driver::new(http, tap), received_before: 0 })
    }

    /// Sends `request` and waits for the head of the response.
    pub async fn request(&mut self, request: Request<RequestBody>) -> hyper::Result<Response<Incoming>> {
        self.received_before = self.driver.tap.received();
        let mut answer = pin!(self.sender.send_request(request));
        self.driver.drive(|cx| answer.as_mut().poll(cx)).await
    }

    /// Returns whether any byte was received since the last request was sent.
    pub fn has_received(&self) -> bool {
        self.driver.tap.received() > self.received_before
    }

    /// Returns the next chunk of a body and the time it was read from the socket, or `None` at the end of the
    /// body.
    pub async fn next_chunk(&mut self, body: &mut Incoming) -> Option<hyper::Result<(Bytes, Instant)>> {
        loop {
            let frame = self.driver.drive(|cx| Pin::new(&mut *body).poll_frame(cx)).await?;
            match frame.map(|frame| frame.into_data()) {
                Ok(Ok(data)) => return Some(Ok((data, self.driver.tap.read_at()))),
                // Trailers are ignored.
                Ok(Err(_)) => {}
                Err(error) => return Some(Err(error)),
            }
        }
    }

    /// Reads a body of fewer than `bytes_max` bytes as text. Returns `Err` with the text received when the
    /// body is longer or the connection breaks.
    pub async fn read_text(&mut self, mut body: Incoming, bytes_max: usize) -> Result<String, String> {
        let mut bytes = Vec::new();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        while bytes.len() < bytes_max {
            match self.next_chunk(&mut body).await {
                None => return Ok(text(&bytes)),
                Some(Ok((piece, _))) => {
                    bytes.extend_from_slice(&piece[..piece.len().min(bytes_max - bytes.len())]);
                }
                Some(Err(_)) => break,
            }
        }
        Err(text(&bytes))
    }

    /// Returns whether the connection is open and its last response is complete, so that it can send a
    /// request.
    pub fn is_idle(&mut self) -> bool {
        let Driver { http, tap, waker, .. } = &mut self.driver;
        // No task needs to be woken until the connection is used again.
        tap.set_waker(Waker::noop());
        poll_http(http, &mut Context::from_waker(waker));
        self.driver.http.is_some() && self.sender.is_ready()
    }
}

/// Returns the failure of a request that received no response head.
pub fn head_failure(error: &hyper::Error) -> Failure {
    let kind = if error.is_parse() { FailureKind::BadHttp } else { FailureKind::EarlyClose };
    kind.with_message(with_cause(error))
}

/// Returns the failure of a response whose body was cut off.
pub fn body_failure(error: &hyper::Error) -> Failure {
    FailureKind::EarlyClose.with_message(with_cause(error))
}

/// Formats an error together with its cause.
fn with_cause(error: &hyper::Error) -> String {
    match std::error::Error::source(error) {
        Some(cause) => format!("{error}: {cause}"),
        None => error.to_string(),
    }
}
