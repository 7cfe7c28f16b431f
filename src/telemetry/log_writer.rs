//! Writes lines to a sink on a thread of its own, so that whoever logs neither waits for the sink nor fails
//! with it.
//!
//! Invariant: adding a line takes a short lock and memory for at most `QUEUE_BYTES`; it never blocks on the
//! sink and never panics. A line that finds no room, or that the sink does not take, is counted as dropped.

use memchr::memchr_iter;
use std::io::{self, ErrorKind, Write};
use std::mem::swap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Builder};
use std::time::Duration;
use tracing::warn;

/// Maximum size of the lines that wait to be written. As many may be on their way to the sink.
const QUEUE_BYTES: usize = 1 << 20;

/// Time until the next attempt to write to a sink that would block but does not wait itself.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// A queue of lines and the thread that writes them to the sink. Clones share both.
#[derive(Clone)]
pub struct LogWriter(Arc<Shared>);

struct Shared {
    queue: Mutex<Queue>,
    /// Notified when lines were queued, and when all of them were written.
    changed: Condvar,
    dropped: AtomicU64,
    /// The name of the log in messages.
    name: &'static str,
}

#[derive(Default)]
struct Queue {
    /// Whole lines that wait to be written.
    lines: Vec<u8>,
    /// Whether the thread is writing earlier lines.
    is_writing: bool,
}

impl LogWriter {
    /// Starts the thread of the log `name`, which writes to `sink` until the process ends. Fails if there can
    /// be no more threads.
    pub fn start(name: &'static str, sink: impl Write + Send + 'static) -> io::Result<LogWriter> {
        let (queue, changed, dropped) = (Mutex::default(), Condvar::new(), AtomicU64::new(0));
        let writer = LogWriter(Arc::new(Shared { queue, changed, dropped, name }));
        let shared = writer.0.clone();
        Builder::new().name(name.into()).spawn(move || shared.write_to(sink))?;
        Ok(writer)
    }

    /// Adds whole lines to the queue, or counts one as dropped if they do not fit.
    pub fn add(&self, lines: &[u8]) {
        let mut queue = self.0.lock();
        if queue.lines.len() + lines.len() > QUEUE_BYTES {
            self.0.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        queue.lines.extend_from_slice(lines);
        drop(queue);
        self.0.changed.notify_all();
    }

    /// Returns the number of lines that were dropped.
    pub fn dropped(&self) -> u64 {
        self.0.dropped.load(Ordering::Relaxed)
    }

    /// Waits until all lines are written, but at most for `timeout`.
    pub fn flush(&self, timeout: Duration) {
        let is_busy = |queue: &mut Queue| queue.is_writing || !queue.lines.is_empty();
        drop(self.0.changed.wait_timeout_while(self.0.lock(), timeout, is_busy));
    }
}

/// Adds to the queue. Never fails.
impl Write for LogWriter {
    fn write(&mut self, lines: &[u8]) -> io::Result<usize> {
        self.add(lines);
        Ok(lines.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes queued lines to `sink`, without end.
    fn write_to(&self, mut sink: impl Write) {
        let (mut batch, mut reported, mut ends_in_line) = (Vec::new(), 0, false);
        loop {
            let mut queue = self.lock();
            queue.is_writing = false;
            self.changed.notify_all();
            let waited = self.changed.wait_while(queue, |queue| queue.lines.is_empty());
            queue = waited.unwrap_or_else(PoisonError::into_inner);
            swap(&mut queue.lines, &mut batch);
            queue.is_writing = true;
            drop(queue);
            if ends_in_line {
                // The sink failed within a line, which must not swallow the next one.
                ends_in_line = write(&mut sink, b"\n") == 0;
            }
            let written = if ends_in_line { 0 } else { write(&mut sink, &batch) };
            ends_in_line |= batch[..written].last().is_some_and(|last| *last != b'\n');
            let lost = memchr_iter(b'\n', &batch[written..]).count() as u64;
            batch.clear();
            let dropped = lost + self.dropped.fetch_add(lost, Ordering::Relaxed);
            if lost == 0 && dropped > reported {
                // The sink takes lines again, so this one has a chance to be read.
                warn!(lines = dropped - reported, "{} lines were dropped", self.name);
                reported = dropped;
            }
        }
    }
}

/// Writes lines, and returns how many bytes the sink took before it failed.
fn write(sink: &mut impl Write, lines: &[u8]) -> usize {
    let mut rest = lines;
    while !rest.is_empty() {
        match sink.write(rest) {
            Ok(0) => break,
            Ok(written) => rest = &rest[written..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) if error.kind() == ErrorKind::WouldBlock => thread::sleep(RETRY_INTERVAL),
            Err(_) => break,
        }
    }
    lines.len() - rest.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc::{Receiver, Sender, channel};

    const PATIENCE: Duration = Duration::from_secs(60);

    /// A sink whose every write waits for its outcome: how many bytes it takes, or an error. It passes on
    /// what it took.
    struct Sink(Receiver<Result<usize, ErrorKind>>, Sender<Vec<u8>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            // Without a test, the sink takes everything.
            let taken = self.0.recv().unwrap_or(Ok(usize::MAX))?.min(bytes.len());
            _ = self.1.send(bytes[..taken].to_vec());
            Ok(taken)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn writer() -> (LogWriter, Sender<Result<usize, ErrorKind>>, Receiver<Vec<u8>>) {
        let ((outcomes, sink), (taken, written)) = (channel(), channel());
        (LogWriter::start("log", Sink(sink, taken)).unwrap(), outcomes, written)
    }

    #[test]
    fn lines_are_written_in_order_and_whole() {
        let (log, outcomes, written) = writer();
        for outcome in [Ok(2), Err(ErrorKind::Interrupted), Err(ErrorKind::WouldBlock), Ok(usize::MAX)] {
            outcomes.send(outcome).unwrap();
        }
        log.add(b"one\n");
        let parts = [written.recv_timeout(PATIENCE).unwrap(), written.recv_timeout(PATIENCE).unwrap()];
        assert_eq!(parts.concat(), b"one\n");
        drop(outcomes);
        (0..100).for_each(|i| log.add(format!("{i}\n").as_bytes()));
        log.flush(PATIENCE);
        let all: Vec<u8> = written.try_iter().flatten().collect();
        assert_eq!(all, (0..100).map(|i| format!("{i}\n")).collect::<String>().into_bytes());
        assert_eq!(log.dropped(), 0);
    }

    #[test]
    fn what_a_sink_refuses_is_counted_and_later_lines_are_written() {
        let (log, outcomes, written) = writer();
        outcomes.send(Ok(6)).unwrap();
        outcomes.send(Err(ErrorKind::BrokenPipe)).unwrap();
        log.add(b"one\ntwo\nthree\n");
        log.flush(PATIENCE);
        assert_eq!((written.recv().unwrap(), log.dropped()), (b"one\ntw".to_vec(), 2));
        // A line of its own ends the one that was begun; while that fails, lines are lost.
        outcomes.send(Err(ErrorKind::BrokenPipe)).unwrap();
        log.add(b"four\n");
        log.flush(PATIENCE);
        assert_eq!(log.dropped(), 3);
        drop(outcomes);
        log.add(b"five\n");
        log.flush(PATIENCE);
        assert_eq!((written.try_iter().flatten().collect(), log.dropped()), (b"\nfive\n".to_vec(), 3));
    }

    /// The thread holds what it is writing; as much again waits, and the rest is dropped at once.
    #[test]
    fn a_sink_that_takes_nothing_holds_up_nobody() {
        let (log, outcomes, written) = writer();
        let line = [vec![b'x'; QUEUE_BYTES / 4 - 1], b"\n".to_vec()].concat();
        outcomes.send(Ok(1)).unwrap();
        log.add(b"-\n");
        written.recv_timeout(PATIENCE).unwrap();
        (0..10).for_each(|_| log.add(&line));
        assert_eq!(log.dropped(), 6);
        log.flush(Duration::ZERO);
        assert!(log.0.lock().lines.capacity() <= 2 * QUEUE_BYTES);
        drop(outcomes);
        log.flush(PATIENCE);
        assert_eq!(written.try_iter().map(|bytes| bytes.len()).sum::<usize>(), 1 + QUEUE_BYTES);
    }
}
