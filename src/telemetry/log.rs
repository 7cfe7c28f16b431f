//! The log, which the program writes to stderr.

use super::log_writer::LogWriter;
use crate::config::{LogConfig, LogFormat};
use std::backtrace::{Backtrace, BacktraceStatus};
use std::io::{self, IsTerminal, Write};
use std::panic::{self, PanicHookInfo};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};
use tracing::subscriber::Interest;
use tracing::{Level, Metadata, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::dynamic_filter_fn;
use tracing_subscriber::layer::{Context, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;
use tracing_subscriber::util::SubscriberInitExt;

/// The process's log, once it is started.
static LOG: OnceLock<LogWriter> = OnceLock::new();

/// Maximum time that the end of the program waits for a slow reader of a log.
pub(super) const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// Starts the log, which writes to stderr through `sink`, on a thread of its own. Messages of panics go the
/// same way. Fails if there can be no more threads; later calls have no effect.
pub fn start_log(config: &LogConfig, sink: impl Write + Send + 'static) -> io::Result<()> {
    if LOG.get().is_some() {
        return Ok(());
    }
    let writer = LogWriter::start("log", sink)?;
    let log = LOG.get_or_init(|| writer).clone();
    panic::set_hook(Box::new(|info| write_line(&panic_text(info))));
    let lines = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(&config.level))
        .with_writer(move || log.clone())
        // They are reported with a macro that panics if stderr is closed.
        .log_internal_errors(false)
        .with_ansi(io::stderr().is_terminal());
    match config.format {
        LogFormat::Text => install_subscriber(lines.finish()),
        LogFormat::Json => install_subscriber(lines.json().flatten_event(true).finish()),
    }
    Ok(())
}

/// Target of messages that strangers cause with requests that are not valid HTTP.
const HTTP_TARGET: &str = "actix_http";

/// Time for which warnings of `HTTP_TARGET` are left out after one.
const HTTP_WARNING_INTERVAL: Duration = Duration::from_secs(10);

/// Installs the process's subscriber, with a limit on what strangers can make it log.
fn install_subscriber<S>(subscriber: S)
where
    S: Subscriber + for<'a> LookupSpan<'a> + Send + Sync + 'static,
{
    let is_limited =
        |metadata: &Metadata| metadata.target().starts_with(HTTP_TARGET) && *metadata.level() <= Level::WARN;
    let limit = dynamic_filter_fn(move |metadata, _: &Context<S>| !is_limited(metadata) || may_warn())
        .with_callsite_filter(move |metadata| match is_limited(metadata) {
            true => Interest::sometimes(),
            false => Interest::always(),
        });
    let _ = subscriber.with(limit).try_init();
}

/// Returns true at most once in `HTTP_WARNING_INTERVAL`.
fn may_warn() -> bool {
    static NEXT: Mutex<Option<Instant>> = Mutex::new(None);
    let (mut next, now) = (NEXT.lock().unwrap_or_else(PoisonError::into_inner), Instant::now());
    if next.is_some_and(|next| now < next) {
        return false;
    }
    *next = Some(now + HTTP_WARNING_INTERVAL);
    true
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
