//! Scenarios of the log's writer.

use super::log_writer::LogWriter;
use crate::scenarios::join;
use crate::schedules::draw;
use std::io::{self, ErrorKind, Write};
use std::panic::resume_unwind;
use std::sync::mpsc::{Sender, channel};
use std::thread::{End, spawn};
use std::time::Duration;

/// A line that ends the thread of the writer, which otherwise ends with the process.
const END: &[u8] = b"end\n";

/// A sink that passes on what it takes. It may take a part, fail, or ask to try again.
struct Sink(Sender<Vec<u8>>);

impl Write for Sink {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes == END {
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

/// Lines are written in the order of each thread, and each line is written or counted as dropped.
pub fn each_line_is_written_or_counted() {
    let (sink, written) = channel();
    let log = LogWriter::start(Sink(sink)).expect("threads can be created");
    let adders = ["a", "b"].map(|name| {
        let log = log.clone();
        spawn(move || (0..3).for_each(|number| log.add(format!("{name}{number}\n").as_bytes())))
    });
    let (mut text, mut ends) = (Vec::new(), 0);
    // A wait for the lines may end by its timeout.
    while ends as u64 + log.dropped() < 6 {
        log.flush(Duration::from_secs(1));
        text.extend(written.try_iter().flatten());
        ends = text.iter().filter(|byte| **byte == b'\n').count();
    }
    join(adders);
    assert_eq!(ends as u64 + log.dropped(), 6);
    for name in [b'a', b'b'] {
        let lines = text.split(|byte| *byte == b'\n').filter(|line| line.first() == Some(&name));
        assert!(lines.collect::<Vec<_>>().is_sorted(), "{}", String::from_utf8_lossy(&text));
    }
    log.add(END);
}
