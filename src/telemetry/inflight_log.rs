//! The inflight log: a file with a line of comma-separated values for each request that ends, like the file
//! of elapsed times that Flover writes.
//!
//! Invariant: lines are written whole, on a thread of their own; an error of the disk is logged once, and
//! loses lines only.

use super::log_writer::LogWriter;
use super::requests::FinishedRequest;
use super::{log::FLUSH_TIMEOUT, milliseconds};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use tracing::warn;

/// The columns. Times without a date are in milliseconds since the arrival; a value that there is not, is
/// empty.
const HEADER: &str = "id,arrived_unix_ms,queue_ms,first_token_ms,elapsed_ms,prompt_tokens,cached_tokens,\
                      generated_tokens,slot,reason\n";

/// The process's inflight log, if there is one.
static LOG: OnceLock<LogWriter> = OnceLock::new();

/// Starts to append to a file, which is created if there is none. Later calls have no effect. Fails if the
/// file cannot be opened for writing, or if there can be no more threads.
pub fn start_inflight_log(path: &Path) -> io::Result<()> {
    if LOG.get().is_none() {
        let log = LogWriter::start("inflight log", open(path)?)?;
        _ = LOG.set(log);
    }
    Ok(())
}

/// Waits until all lines are written, but only for a moment if the disk is slow.
pub fn flush_inflight_log() {
    if let Some(log) = LOG.get() {
        log.flush(FLUSH_TIMEOUT);
    }
}

/// Adds the line of a request, if there is a log.
pub(super) fn write(request: &FinishedRequest<'_>) {
    if let Some(log) = LOG.get() {
        log.add(line(request, SystemTime::now(), Instant::now()).as_bytes());
    }
}

/// Returns the line of a request at a time, `now` by both clocks.
fn line(request: &FinishedRequest<'_>, system_now: SystemTime, now: Instant) -> String {
    let FinishedRequest { prompt_tokens, cached_tokens, generated_tokens, reason, .. } = *request;
    let after = |moment: Option<Instant>| {
        moment.map_or(String::new(), |moment| milliseconds(request.since_arrival(moment)).to_string())
    };
    let arrived = system_now.checked_sub(request.since_arrival(now)).unwrap_or(UNIX_EPOCH);
    let arrived_ms = arrived.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_millis());
    let (queue, first, elapsed) =
        (after(request.scheduled), after(request.first_token), after(Some(request.ended)));
    let slot = request.slot.map_or(String::new(), |slot| slot.to_string());
    // Clients choose their ids.
    let id = request.id.replace('"', "\"\"");
    format!(
        "\"{id}\",{arrived_ms},{queue},{first},{elapsed},{prompt_tokens},{cached_tokens},{generated_tokens},\
         {slot},{reason}\n"
    )
}

/// A file whose first error is logged.
struct LoggedFile {
    path: PathBuf,
    file: File,
    has_failed: bool,
}

/// Opens a file to append lines to. An empty one gets the header.
fn open(path: &Path) -> io::Result<LoggedFile> {
    let mut file = OpenOptions::new().append(true).create(true).open(path)?;
    if file.metadata()?.len() == 0 {
        file.write_all(HEADER.as_bytes())?;
    }
    Ok(LoggedFile { path: path.to_owned(), file, has_failed: false })
}

impl Write for LoggedFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes).inspect_err(|error| {
            if !std::mem::replace(&mut self.has_failed, true) {
                let path = self.path.display().to_string();
                warn!("server.inflight_log: cannot write {}: {error}", path.escape_debug());
            }
        })
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_line_has_the_values_of_its_columns() {
        let arrived = Instant::now();
        let at = |us| Some(arrived + Duration::from_micros(us));
        let mut request = FinishedRequest {
            id: "a,\"b\"",
            operation: "chat",
            arrived,
            scheduled: at(1500),
            first_token: at(2500),
            last_token: at(9000),
            ended: arrived + Duration::from_millis(10),
            prompt_tokens: 7,
            cached_tokens: 3,
            generated_tokens: 5,
            max_tokens: 9,
            slot: Some(2),
            reason: "stop",
        };
        let shown = |request: &FinishedRequest<'_>| {
            line(request, UNIX_EPOCH + Duration::from_secs(60), arrived + Duration::from_secs(1))
        };
        assert_eq!(shown(&request), "\"a,\"\"b\"\"\",59000,1.5,2.5,10,7,3,5,2,stop\n");
        (request.scheduled, request.first_token, request.slot) = (None, None, None);
        (request.generated_tokens, request.reason) = (0, "abort");
        assert_eq!(shown(&request), "\"a,\"\"b\"\"\",59000,,,10,7,3,0,,abort\n");
        assert_eq!(HEADER.split(',').count(), 10);
    }

    #[test]
    fn a_file_is_appended_to_and_has_one_header() {
        let path = std::env::temp_dir().join(format!("mainstem-inflight-{}.csv", std::process::id()));
        for line in ["a\n", "b\n"] {
            open(&path).unwrap().write_all(line.as_bytes()).unwrap();
        }
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(text, format!("{HEADER}a\nb\n"));
    }

    /// A full disk is reported once, and the writer goes on.
    #[test]
    fn errors_of_the_disk_lose_lines_only() {
        let mut full = open(Path::new("/dev/full")).err().map(|error| error.kind());
        assert_eq!(full.take(), Some(io::ErrorKind::StorageFull));
        let file = OpenOptions::new().append(true).open("/dev/full").unwrap();
        let log = LogWriter::start("test", LoggedFile { path: "/dev/full".into(), file, has_failed: false });
        let log = log.unwrap();
        (0..3).for_each(|_| log.add(b"line\n"));
        log.flush(Duration::from_secs(60));
        assert_eq!(log.dropped(), 3);
    }
}
