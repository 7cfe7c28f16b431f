//! The log.

use crate::config::{LogConfig, LogFormat};
use std::io::{IsTerminal, Write};
use std::time::Duration;
use tracing_subscriber::EnvFilter;

/// Starts the log, which writes to stderr through `writer`. Later calls have no effect.
pub fn start_log<W: Write + 'static>(config: &LogConfig, writer: fn() -> W) {
    let filter = EnvFilter::new(&config.level);
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(writer)
        .with_ansi(std::io::stderr().is_terminal());
    let _ = match config.format {
        LogFormat::Text => lines.try_init(),
        LogFormat::Json => lines.json().flatten_event(true).try_init(),
    };
}

/// Returns a duration in milliseconds, rounded down to microseconds, for the log.
pub fn milliseconds(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1e3
}
