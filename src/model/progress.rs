//! Progress of work on a model's weights, and its cancellation.
//!
//! Invariant: the bytes done never exceed the total. If no progress display is attached, progress is logged
//! periodically.

use anyhow::{Result, bail};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tracing::info;

/// Minimum time between two log lines.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Bytes done and the total, shared by several threads.
#[derive(Debug, Default)]
pub struct Progress(Mutex<ProgressState>);

#[derive(Debug, Default)]
struct ProgressState {
    done: u64,
    total: u64,
    is_displayed: bool,
    is_stopped: bool,
    /// Time of the last log line, or of the start.
    logged_at: Option<Instant>,
}

impl Progress {
    /// Adds bytes to the total. If all earlier work is done, counting starts anew.
    pub fn add_total(&self, bytes: usize) {
        let mut state = self.lock();
        if state.done >= state.total {
            (state.done, state.total) = (0, 0);
            state.logged_at = Some(Instant::now());
        }
        state.total += bytes as u64;
    }

    /// Adds bytes to those done. Fails if the work has been stopped.
    pub fn advance(&self, bytes: usize) -> Result<()> {
        let mut state = self.lock();
        state.done = state.total.min(state.done + bytes as u64);
        if state.is_stopped {
            bail!("stopped");
        }
        let is_due = state.logged_at.is_some_and(|logged_at| logged_at.elapsed() >= LOG_INTERVAL);
        if is_due && !state.is_displayed && state.done < state.total {
            state.logged_at = Some(Instant::now());
            info!(done = state.done, total = state.total, "weights: {} %", state.done * 100 / state.total);
        }
        Ok(())
    }

    /// Returns the bytes done and the total.
    pub fn done_and_total(&self) -> (u64, u64) {
        let state = self.lock();
        (state.done, state.total)
    }

    /// Turns off logging, because a progress display is attached.
    pub fn disable_log(&self) {
        self.lock().is_displayed = true;
    }

    /// Stops the work; callable from any thread.
    pub fn stop(&self) {
        self.lock().is_stopped = true;
    }

    /// Returns whether the work has been stopped.
    pub fn is_stopped(&self) -> bool {
        self.lock().is_stopped
    }

    fn lock(&self) -> MutexGuard<'_, ProgressState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_several_expect_adds_up_and_the_next_time_begins_anew() {
        let progress = Progress::default();
        progress.add_total(10);
        progress.advance(4).unwrap();
        progress.add_total(5);
        assert_eq!(progress.done_and_total(), (4, 15));
        progress.advance(99).unwrap();
        assert_eq!(progress.done_and_total(), (15, 15));
        progress.add_total(7);
        assert_eq!(progress.done_and_total(), (0, 7));
        progress.stop();
        assert!(progress.is_stopped() && progress.advance(1).is_err());
    }
}
