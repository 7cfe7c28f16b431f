//! A byte stream that counts and timestamps received bytes, and limits the read rate of slow clients.
//!
//! Invariant: bytes are read from the socket no faster than the rate allows, so that the server sees
//! backpressure.

use std::{
    cell::{Cell, RefCell},
    io,
    pin::Pin,
    rc::Rc,
    task::{Context, Poll, Waker, ready},
    time::{Duration, Instant},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Sleep, sleep},
};

/// Reads per second of a slow reader, if its rate is high enough.
const READS_PER_SECOND: u32 = 20;

/// A bidirectional byte stream.
pub trait Stream: AsyncRead + AsyncWrite + Unpin {}

impl<T: AsyncRead + AsyncWrite + Unpin> Stream for T {}

/// Statistics of the bytes received on a connection, and the waker of its reader.
#[derive(Debug)]
pub struct Tap {
    /// Number of bytes received.
    received: Cell<u64>,
    /// Time of the last read.
    read_at: Cell<Instant>,
    /// Waker that is woken when the socket is ready, independent of the polling context.
    reader: RefCell<Waker>,
}

impl Tap {
    /// Returns the number of bytes received.
    pub fn received(&self) -> u64 {
        self.received.get()
    }

    /// Returns the time of the last read.
    pub fn read_at(&self) -> Instant {
        self.read_at.get()
    }

    /// Sets the waker that the socket wakes.
    pub fn set_waker(&self, waker: &Waker) {
        self.reader.borrow_mut().clone_from(waker);
    }
}

/// A connection to a server, with or without TLS.
pub struct Wire {
    stream: Box<dyn Stream>,
    tap: Rc<Tap>,
    pace: Option<ReadThrottle>,
}

impl Wire {
    /// Wraps `stream`, limiting reads to `read_rate` bytes per second if given.
    pub fn new(stream: Box<dyn Stream>, read_rate: Option<u32>) -> Self {
        let tap = Tap {
            received: Cell::new(0),
            read_at: Cell::new(Instant::now()),
            reader: RefCell::new(Waker::noop().clone()),
        };
        Self { stream, tap: Rc::new(tap), pace: read_rate.map(ReadThrottle::new) }
    }

    /// Returns the tap, which sees all bytes of the connection.
    pub fn tap(&self) -> Rc<Tap> {
        Rc::clone(&self.tap)
    }
}

/// Limits the read rate of a slow reader, in bytes per second.
struct ReadThrottle {
    rate: u32,
    pause: Pin<Box<Sleep>>,
}

impl ReadThrottle {
    fn new(rate: u32) -> Self {
        Self { rate: rate.max(1), pause: Box::pin(sleep(Duration::ZERO)) }
    }

    /// Returns the number of bytes that may be read once the pause is over.
    fn poll_allowed(&mut self, cx: &mut Context<'_>) -> Poll<usize> {
        ready!(self.pause.as_mut().poll(cx));
        Poll::Ready((self.rate / READS_PER_SECOND).max(1) as usize)
    }

    /// Accounts for bytes read: delays the next read by their transfer time. Idle time earns no credit.
    fn record_read(&mut self, bytes: usize) {
        let from = self.pause.deadline().max(tokio::time::Instant::now());
        self.pause.as_mut().reset(from + Duration::from_secs_f64(bytes as f64 / f64::from(self.rate)));
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let Wire { stream, tap, pace } = &mut *self;
        let before = buffer.filled().len();
        let waker = tap.reader.borrow();
        let cx = &mut Context::from_waker(&waker);
        match pace {
            None => ready!(Pin::new(stream).poll_read(cx, buffer))?,
            Some(pace) => ready!(poll_read_slowly(&mut **stream, pace, cx, buffer))?,
        }
        let received = (buffer.filled().len() - before) as u64;
        tap.received.set(tap.received.get() + received);
        tap.read_at.set(Instant::now());
        Poll::Ready(Ok(()))
    }
}

fn poll_read_slowly(
    stream: &mut dyn Stream,
    pace: &mut ReadThrottle,
    cx: &mut Context<'_>,
    buffer: &mut ReadBuf<'_>,
) -> Poll<io::Result<()>> {
    let allowed = ready!(pace.poll_allowed(cx)).min(buffer.remaining());
    let mut part = ReadBuf::new(buffer.initialize_unfilled_to(allowed));
    ready!(Pin::new(stream).poll_read(cx, &mut part))?;
    let received = part.filled().len();
    buffer.advance(received);
    pace.record_read(received);
    Poll::Ready(Ok(()))
}

impl Wire {
    /// Polls the stream with the waker of the reader.
    fn poll_stream<T>(
        &mut self,
        poll: impl FnOnce(Pin<&mut Box<dyn Stream>>, &mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        poll(Pin::new(&mut self.stream), &mut Context::from_waker(&self.tap.reader.borrow()))
    }
}

impl AsyncWrite for Wire {
    fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_stream(|stream, cx| stream.poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_stream(|stream, cx| stream.poll_write_vectored(cx, parts))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_stream(|stream, cx| stream.poll_flush(cx))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_stream(|stream, cx| stream.poll_shutdown(cx))
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    #[test]
    fn a_slow_reader_keeps_to_its_rate_and_saves_up_nothing() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let (near, mut far) = tokio::io::duplex(1 << 16);
            let mut wire = Wire::new(Box::new(near), Some(20_000));
            far.write_all(&[0; 10_000]).await.unwrap();
            sleep(Duration::from_millis(60)).await;
            let start = Instant::now();
            let tap = wire.tap();
            std::future::poll_fn(|cx| {
                tap.set_waker(cx.waker());
                Poll::Ready(())
            })
            .await;
            wire.read_exact(&mut [0; 3000]).await.unwrap();
            // Pieces of 1000 bytes: the first at once, the others 50 ms apart.
            assert!(start.elapsed() >= Duration::from_millis(100), "{:?}", start.elapsed());
            assert_eq!(wire.tap().received(), 3000);
        });
    }
}
