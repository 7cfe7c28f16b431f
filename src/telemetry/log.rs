//! The log, which the program writes to stderr.

use super::log_writer::LogWriter;
use crate::config::{LogConfig, LogFormat};
use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::{self, IsTerminal, Write};
use std::panic::{self, PanicHookInfo};
use std::sync::OnceLock;
use std::time::Duration;
use tracing_subscriber::EnvFilter;

/// The process's log, once it is started.
static LOG: OnceLock<LogWriter> = OnceLock::new();

/// Maximum time that the end of the program waits for a slow reader of the log.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// Starts the log, which writes to stderr through `sink`, on a thread of its own. Messages of panics go the
/// same way. Fails if there can be no more threads; later calls have no effect.
pub fn start_log(config: &LogConfig, sink: impl Write + Send + 'static) -> io::Result<()> {
    if LOG.get().is_some() {
        return Ok(());
    }
    let writer = LogWriter::start(sink)?;
    let log = LOG.get_or_init(|| writer).clone();
    panic::set_hook(Box::new(|info| write_line(&panic_text(info))));
    let lines = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(&config.level))
        .with_writer(move || log.clone())
        // They are reported with a macro that panics if stderr is closed.
        .log_internal_errors(false)
        .with_ansi(io::stderr().is_terminal());
    let _ = match config.format {
        LogFormat::Text => lines.try_init(),
        LogFormat::Json => lines.json().flatten_event(true).try_init(),
    };
    Ok(())
}

/// Writes a line to stderr, after the lines of the log if it is started. Errors are ignored, because stderr
/// may be closed or full.
pub fn write_line(line: &str) {
    let line = format!("{line}\n");
    match LOG.get() {
        Some(log) => log.add(line.as_bytes()),
        None => _ = io::stderr().write_all(line.as_bytes()),
    }
}

/// Waits until the lines of the log are written, but only for a moment if nobody reads them.
pub fn flush_log() {
    if let Some(log) = LOG.get() {
        log.flush(FLUSH_TIMEOUT);
    }
}

/// Returns the number of lines of the log that could not be written.
pub fn dropped_log_lines() -> u64 {
    LOG.get().map_or(0, LogWriter::dropped)
}

/// Formats the message of a panic like the standard library.
fn panic_text(info: &PanicHookInfo) -> String {
    let thread = std::thread::current();
    let text = format!("thread '{}' {info}", thread.name().unwrap_or("<unnamed>"));
    let backtrace = Backtrace::capture();
    match backtrace.status() {
        BacktraceStatus::Captured => format!("{text}\nstack backtrace:\n{backtrace}"),
        _ => text,
    }
}

/// Returns a duration in milliseconds, rounded down to microseconds, for the log.
pub fn milliseconds(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1e3
}
