//! The live display of a run: two lines on the terminal.
//!
//! Invariant: nothing is written unless standard error is a terminal, and the display is cleared at the end.

use std::{
    io::IsTerminal,
    sync::{
        Arc,
        atomic::Ordering,
        mpsc::{self, RecvTimeoutError, Sender},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::bars;
use crate::run::Progress;

/// Interval between two updates.
const TICK: Duration = Duration::from_millis(200);

/// Maximum number of columns of the chart.
const COLUMNS: usize = 60;

/// A live display that is updated until it is dropped.
#[derive(Debug)]
pub struct LiveDisplay {
    drawing: Option<(Sender<()>, JoinHandle<()>)>,
}

/// The state of the display.
#[derive(Debug)]
struct DisplayState {
    label: String,
    planned: Option<usize>,
    /// Times and token counts of the updates within the last second.
    tokens: Vec<(Duration, u64)>,
    in_flight: History,
}

/// The maximum number of requests in flight in equal intervals of the run so far.
#[derive(Debug, Default)]
struct History {
    columns: Vec<f64>,
    /// Base-2 logarithm of the number of updates per column.
    doublings: u32,
    /// Number of updates so far.
    updates: usize,
}

impl LiveDisplay {
    /// Starts the display of a run of `planned` requests, if known, with its label. Does nothing unless
    /// standard error is a terminal.
    pub fn start(progress: Arc<Progress>, planned: Option<usize>, label: &str) -> Self {
        let drawing = std::io::stderr().is_terminal().then(|| {
            let watch = DisplayState::new(planned, label);
            let (keep, kept) = mpsc::channel();
            let draw = move || draw(&progress, watch, ProgressDrawTarget::stderr(), TICK, &kept);
            (keep, std::thread::spawn(draw))
        });
        Self { drawing }
    }
}

impl Drop for LiveDisplay {
    fn drop(&mut self) {
        if let Some((keep, thread)) = self.drawing.take() {
            drop(keep);
            // After a panic of the thread there is nothing left to clear.
            let _ = thread.join();
        }
    }
}

/// Updates the display every `tick` until the channel is closed, then clears it.
fn draw(
    progress: &Progress,
    mut watch: DisplayState,
    target: ProgressDrawTarget,
    tick: Duration,
    kept: &mpsc::Receiver<()>,
) {
    let style = ProgressStyle::with_template("{msg}");
    let style = style.expect("the template is valid");
    let bar = ProgressBar::with_draw_target(None, target).with_style(style);
    let began = Instant::now();
    loop {
        bar.set_message(watch.render(progress, began.elapsed()));
        if kept.recv_timeout(tick) != Err(RecvTimeoutError::Timeout) {
            return bar.finish_and_clear();
        }
    }
}

impl DisplayState {
    fn new(planned: Option<usize>, label: &str) -> Self {
        let label = label.chars().filter(|c| !c.is_control()).collect();
        Self { label, planned, tokens: Vec::new(), in_flight: History::default() }
    }

    /// Records the counts at a time since the start and returns the two lines of the display.
    fn render(&mut self, progress: &Progress, now: Duration) -> String {
        let [sent, in_flight, completed, failed, hung_up] =
            [&progress.sent, &progress.in_flight, &progress.completed, &progress.failed, &progress.hung_up]
                .map(|count| count.load(Ordering::Relaxed));
        let rate = self.tokens_per_s(progress.tokens.load(Ordering::Relaxed), now);
        self.in_flight.push(in_flight as f64);
        let planned = self.planned.map_or(String::new(), |planned| format!("/{planned}"));
        let hung_up = if hung_up > 0 { format!(", {hung_up} hung up") } else { String::new() };
        format!(
            "{} {} s: {sent}{planned} sent, {completed} completed, {failed} failed{hung_up}, {rate:.0} \
             tok/s\n\
             {in_flight:>6} in flight {}",
            self.label,
            now.as_secs(),
            bars::bar_lines(&self.in_flight.columns, 1).concat(),
        )
    }

    /// Returns the token rate over the last second, or since the start if that is less.
    fn tokens_per_s(&mut self, tokens: u64, now: Duration) -> f64 {
        self.tokens.push((now, tokens));
        // Keeps the last update that is at least a second old: the interval starts there.
        let old = self.tokens.iter().filter(|look| now - look.0 >= Duration::from_secs(1)).count();
        self.tokens.drain(..old.saturating_sub(1));
        let (since, before) = self.tokens[0];
        let seconds = (now - since).as_secs_f64();
        if seconds > 0.0 { tokens.saturating_sub(before) as f64 / seconds } else { 0.0 }
    }
}

impl History {
    fn push(&mut self, value: f64) {
        let begins = self.updates.is_multiple_of(1 << self.doublings);
        self.updates += 1;
        match self.columns.last_mut() {
            Some(last) if !begins => *last = last.max(value),
            _ => self.columns.push(value),
        }
        if self.columns.len() > COLUMNS {
            self.columns =
                self.columns.chunks(2).map(|pair| pair.iter().copied().fold(0.0, f64::max)).collect();
            self.doublings += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use indicatif::TermLike;
    use std::{io::Result, sync::Mutex};

    #[test]
    fn a_look_tells_the_counts_and_the_rate_of_the_last_second() {
        let progress = Progress::default();
        let mut watch = DisplayState::new(Some(10), "poisson\n\x1b");
        let mut look = |ms: u64, sent, tokens| {
            progress.sent.store(sent, Ordering::Relaxed);
            progress.in_flight.store(sent, Ordering::Relaxed);
            progress.tokens.store(tokens, Ordering::Relaxed);
            watch.render(&progress, Duration::from_millis(ms))
        };
        assert!(look(0, 0, 0).starts_with("poisson 0 s: 0/10 sent, 0 completed, 0 failed, 0 tok/s\n"));
        assert!(look(500, 1, 100).contains(" 200 tok/s"));
        assert!(look(1000, 2, 200).contains(" 200 tok/s"));
        // The count one second earlier was 100.
        let later = look(1500, 4, 1100);
        assert!(later.starts_with("poisson 1 s: 4/10 sent") && later.contains(" 1000 tok/s"), "{later}");
        assert!(later.ends_with("     4 in flight  ▂▄█"), "{later}");
        assert!(look(9000, 4, 1100).contains(" 0 tok/s"));
    }

    #[test]
    fn a_long_history_is_folded_and_keeps_its_peak() {
        let mut history = History::default();
        for look in 0..5000 {
            history.push(if look == 1234 { 99.0 } else { 1.0 });
            assert!(history.columns.len() <= COLUMNS);
        }
        assert!(history.columns.len() > COLUMNS / 2 - 1);
        let peaks: Vec<usize> = (0..history.columns.len()).filter(|&i| history.columns[i] == 99.0).collect();
        // Its position is kept too.
        assert_eq!(peaks, [1234 >> history.doublings]);
    }

    /// A terminal that records everything written to it, including cleared lines.
    #[derive(Clone, Debug, Default)]
    struct RecordingTerminal(Arc<Mutex<String>>);

    impl TermLike for RecordingTerminal {
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
            self.write_str("<cleared>")
        }
        fn flush(&self) -> Result<()> {
            Ok(())
        }
    }

    #[test]
    fn drawing_ends_with_its_owner_and_is_cleared() {
        let paper = RecordingTerminal::default();
        let target = ProgressDrawTarget::term_like(Box::new(paper.clone()));
        let (keep, kept) = mpsc::channel();
        let (end, ended) = mpsc::channel();
        // The next update would be in an hour.
        let tick = Duration::from_secs(3600);
        let drawing = move || {
            draw(&Progress::default(), DisplayState::new(Some(3), "x"), target, tick, &kept);
            end.send(())
        };
        std::thread::spawn(drawing);
        drop(keep);
        assert_eq!(ended.recv_timeout(Duration::from_secs(30)), Ok(()));
        let written = paper.0.lock().expect("no writer panics").clone();
        let (_, after) = written.rsplit_once("0 in flight").expect("it was drawn");
        assert!(written.contains("x 0 s: 0/3 sent") && after.ends_with("<cleared><cleared>"), "{written}");
    }
}
