//! A sign of life for work that takes a while, with how far it is where that is known; and the log's way past it.
//!
//! Invariant: drawn on a terminal's standard error only, and gone when the work is over. No line of the log is
//! mixed with it.

use crate::model::progress::Progress;
use indicatif::{HumanBytes, ProgressBar, ProgressState, ProgressStyle};
use std::io::{self, IsTerminal, Write};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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
        Spinner::turn(message, style("{spinner} {msg}"))
    }

    /// The same, and behind the message how far it is. Off a terminal the log tells it.
    pub fn measured(message: &'static str, progress: Arc<Progress>) -> Spinner {
        if io::stderr().is_terminal() {
            progress.show();
        }
        let so_far =
            move |_: &ProgressState, out: &mut dyn std::fmt::Write| _ = out.write_str(&told(&progress));
        Spinner::turn(message, style("{spinner} {msg}{so_far}").with_key("so_far", so_far))
    }

    fn turn(message: &'static str, style: ProgressStyle) -> Spinner {
        let spinner = ProgressBar::new_spinner().with_style(style).with_message(message);
        *turning() = Some(spinner.clone());
        spinner.tick();
        spinner.enable_steady_tick(TICK);
        Spinner(spinner)
    }
}

fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).expect("the template is well formed; anything else is a bug")
}

/// How far it is; nothing before anything is expected.
fn told(progress: &Progress) -> String {
    match progress.so_far() {
        (_, 0) => String::new(),
        (done, total) => format!(": {} of {}, {} %", HumanBytes(done), HumanBytes(total), done * 100 / total),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn how_far_it_is_stands_there_once_something_is_expected() {
        let progress = Progress::default();
        assert_eq!(told(&progress), "");
        progress.expect(4096);
        progress.advance(1024).unwrap();
        assert_eq!(told(&progress), ": 1.00 KiB of 4.00 KiB, 25 %");
    }
}
