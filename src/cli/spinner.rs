//! A sign of life for work that takes a while and has no measure; and the log's way past it.
//!
//! Invariant: drawn on a terminal's standard error only, and gone when the work is over. No line of the log is
//! mixed with it.

use indicatif::{ProgressBar, ProgressStyle};
use std::io::{self, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

const TICK: Duration = Duration::from_millis(100);

/// The one that turns.
static TURNING: Mutex<Option<ProgressBar>> = Mutex::new(None);

fn turning() -> MutexGuard<'static, Option<ProgressBar>> {
    TURNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Turns until it is dropped. There is one at a time.
pub struct Spinner(ProgressBar);

impl Spinner {
    /// Begins to turn before `message`.
    pub fn start(message: &'static str) -> Spinner {
        let style = ProgressStyle::with_template("{spinner} {msg}");
        let style = style.expect("the template is well formed; anything else is a bug");
        let spinner = ProgressBar::new_spinner().with_style(style).with_message(message);
        *turning() = Some(spinner.clone());
        spinner.tick();
        spinner.enable_steady_tick(TICK);
        Spinner(spinner)
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        *turning() = None;
        self.0.finish_and_clear();
    }
}

/// Standard error; the spinner makes room for what is written.
pub struct Stderr;

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &*turning() {
            Some(spinner) => spinner.suspend(|| io::stderr().write(bytes)),
            None => io::stderr().write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}
