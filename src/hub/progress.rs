//! Progress of downloads.
//!
//! Invariant: nothing is shown for a file before its name and size are known.

use indicatif::{ProgressBar, ProgressStyle};

/// Receives the progress of each download. A resumed attempt counts from its start again.
pub trait Progress {
    /// An attempt begins. `size` is in bytes, 0 if unknown.
    fn begin(&mut self, file: &str, size: u64);
    /// `bytes` more bytes are present.
    fn advance(&mut self, bytes: u64);
    /// The attempt has ended, successfully or not.
    fn finish(&mut self);
}

/// Ignores progress.
impl Progress for () {
    fn begin(&mut self, _: &str, _: u64) {}
    fn advance(&mut self, _: u64) {}
    fn finish(&mut self) {}
}

/// Shows a progress bar per file if stderr is a terminal.
#[derive(Default)]
pub struct ProgressBars {
    bar: Option<ProgressBar>,
}

impl Progress for ProgressBars {
    fn begin(&mut self, file: &str, size: u64) {
        self.show(ProgressBar::new(size), file);
    }

    fn advance(&mut self, bytes: u64) {
        self.bar.iter().for_each(|bar| bar.inc(bytes));
    }

    fn finish(&mut self) {
        self.bar.take().into_iter().for_each(|bar| bar.abandon());
    }
}

impl ProgressBars {
    /// Replaces the current bar. Shows nothing yet.
    fn show(&mut self, bar: ProgressBar, file: &str) {
        self.finish();
        let style =
            ProgressStyle::with_template("{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}");
        let style = style.expect("the template is well formed; anything else is a bug");
        self.bar = Some(bar.with_style(style).with_message(file.to_owned()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use indicatif::{ProgressDrawTarget, TermLike};
    use std::io::Result;
    use std::sync::{Arc, Mutex};

    /// A terminal that records everything written to it.
    #[derive(Clone, Debug, Default)]
    struct FakeTerminal(Arc<Mutex<String>>);

    impl TermLike for FakeTerminal {
        fn width(&self) -> u16 {
            80
        }
        fn move_cursor_up(&self, _: usize) -> Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> Result<()> {
            Ok(())
        }
        fn write_line(&self, text: &str) -> Result<()> {
            self.write_str(text)
        }
        fn write_str(&self, text: &str) -> Result<()> {
            self.0.lock().expect("no writer panics").push_str(text);
            Ok(())
        }
        fn clear_line(&self) -> Result<()> {
            Ok(())
        }
        fn flush(&self) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_bar_is_seen_with_its_name_and_size_or_not_at_all() {
        let paper = FakeTerminal::default();
        let written = || paper.0.lock().expect("no writer panics").clone();
        let target = ProgressDrawTarget::term_like(Box::new(paper.clone()));
        let mut bars = ProgressBars { bar: None };
        bars.show(ProgressBar::with_draw_target(Some(2048), target), "model.safetensors");
        assert_eq!(written(), "");
        bars.advance(2048);
        bars.finish();
        let written = written();
        assert!(
            written.starts_with("model.safetensors") && written.contains("2.00 KiB/2.00 KiB"),
            "{written}"
        );
    }
}
