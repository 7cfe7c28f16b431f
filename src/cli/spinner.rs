//! Progress spinner for long operations, and a stderr writer for the log that does not disturb it.
//!
//! Invariant: the spinner is drawn only if stderr is a terminal and is removed when the operation ends. Log
//! lines never mix with it.

use crate::model::progress::Progress;
use indicatif::{HumanBytes, ProgressBar, ProgressState, ProgressStyle};
use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

const TICK: Duration = Duration::from_millis(100);

/// The spinner that is shown, if any.
static ACTIVE: Mutex<Option<ProgressBar>> = Mutex::new(None);

fn active_spinner() -> MutexGuard<'static, Option<ProgressBar>> {
    ACTIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A spinner that is shown until it is dropped. Only one is shown at a time.
pub struct Spinner(ProgressBar);

impl Spinner {
    /// Shows a spinner with `message`.
    pub fn start(message: &'static str) -> Spinner {
        Spinner::show(message, style("{spinner} {msg}"))
    }

    /// Shows a spinner with `message` and the progress so far. If stderr is not a terminal, the log reports
    /// the progress instead.
    pub fn with_progress(message: &'static str, progress: Arc<Progress>) -> Spinner {
        if io::stderr().is_terminal() {
            progress.disable_log();
        }
        let so_far = move |_: &ProgressState, out: &mut dyn std::fmt::Write| {
            _ = out.write_str(&progress_text(&progress))
        };
        Spinner::show(message, style("{spinner} {msg}{so_far}").with_key("so_far", so_far))
    }

    fn show(message: &'static str, style: ProgressStyle) -> Spinner {
        let spinner = ProgressBar::new_spinner().with_style(style).with_message(message);
        *active_spinner() = Some(spinner.clone());
        spinner.tick();
        spinner.enable_steady_tick(TICK);
        Spinner(spinner)
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the template is well formed; anything else is a bug")
}

/// Formats the progress; empty while the total is unknown.
fn progress_text(progress: &Progress) -> String {
    match progress.done_and_total() {
        (_, 0) => String::new(),
        (done, total) => format!(": {} of {}, {} %", HumanBytes(done), HumanBytes(total), done * 100 / total),
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        *active_spinner() = None;
        self.0.finish_and_clear();
    }
}

/// Standard error that hides the spinner while it writes.
pub struct Stderr;

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match &*active_spinner() {
            Some(spinner) => spinner.suspend(|| io::stderr().write(bytes)),
            None => io::stderr().write(bytes),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stderr().flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_shown_once_a_total_is_known() {
        let progress = Progress::default();
        assert_eq!(progress_text(&progress), "");
        progress.add_total(4096);
        progress.advance(1024).unwrap();
        assert_eq!(progress_text(&progress), ": 1.00 KiB of 4.00 KiB, 25 %");
    }
}
