//! Scenarios of the log's writer.

use super::log_writer::LogWriter;
use crate::scenarios::join;
use crate::schedules::draw;
use std::io::{self, ErrorKind, Write};
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::thread::{End, spawn, yield_now};
use std::time::Duration;

/// A sink that passes on what it takes. It may take a part, fail, or ask to try again. When the flag is set,
/// it ends the thread of the writer, which otherwise ends with the process.
struct Sink(Sender<Vec<u8>>, Arc<AtomicBool>);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.1.load(Ordering::SeqCst) {
            resume_unwind(Box::new(End));
        }
        let taken = match draw(6) {
            0 => 1,
            1 => return Err(ErrorKind::WouldBlock.into()),
            2 => return Err(ErrorKind::BrokenPipe.into()),
            _ => bytes.len(),
        };
        let _ = self.0.send(bytes[..taken].to_vec());
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Lines are written whole and in the order of each thread, and each line is written or counted as dropped.
pub fn each_line_is_written_or_counted() {
    let (sink, written) = channel();
    let is_over = Arc::new(AtomicBool::new(false));
    let log = LogWriter::start("log", Sink(sink, is_over.clone())).expect("threads can be created");
    let adders = ["a", "b"].map(|name| {
        let log = log.clone();
        spawn(move || (0..3).for_each(|number| log.add(format!("{name}{number}\n").as_bytes())))
    });
    let mut text = Vec::new();
    // A line of which the sink took all but its end is counted, and may end later.
    let whole = |text: &[u8]| text.split_inclusive(|byte| *byte == b'\n').filter(|it| it.len() == 3).count();
    // A wait for the lines may end by its timeout.
    while (whole(&text) as u64) < 6_u64.saturating_sub(log.dropped()) {
        log.flush(Duration::from_secs(1));
        yield_now();
        text.extend(written.try_iter().flatten());
    }
    join(adders);
    let lines = || text.split(|byte| *byte == b'\n');
    let is_in_order = |name| lines().filter(|line| line.len() == 2 && line[0] == name).is_sorted();
    let are_apart = lines().all(|line| line.len() <= 2);
    assert!(are_apart && is_in_order(b'a') && is_in_order(b'b'), "{}", String::from_utf8_lossy(&text));
    is_over.store(true, Ordering::SeqCst);
    log.add(b"end\n");
}
