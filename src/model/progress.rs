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
pub struct Progress(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    done: u64,
    total: u64,
    is_shown: bool,
    is_stopped: bool,
    /// Time of the last log line, or of the start.
    told: Option<Instant>,
}

impl Progress {
    /// Adds bytes to the total. If all earlier work is done, counting starts anew.
    pub fn expect(&self, bytes: usize) {
        let mut state = self.state();
        if state.done >= state.total {
            (state.done, state.total) = (0, 0);
            state.told = Some(Instant::now());
        }
        state.total += bytes as u64;
    }

    /// Adds bytes to those done. Fails if the work has been stopped.
    pub fn advance(&self, bytes: usize) -> Result<()> {
        let mut state = self.state();
        state.done = state.total.min(state.done + bytes as u64);
        if state.is_stopped {
            bail!("stopped");
        }
        let is_due = state.told.is_some_and(|told| told.elapsed() >= LOG_INTERVAL);
        if is_due && !state.is_shown && state.done < state.total {
            state.told = Some(Instant::now());
            info!(done = state.done, total = state.total, "weights: {} %", state.done * 100 / state.total);
        }
        Ok(())
    }

    /// Returns the bytes done and the total.
    pub fn so_far(&self) -> (u64, u64) {
        let state = self.state();
        (state.done, state.total)
    }

    /// Turns off logging, because a progress display is attached.
    pub fn show(&self) {
        self.state().is_shown = true;
    }

    /// Stops the work; callable from any thread.
    pub fn stop(&self) {
        self.state().is_stopped = true;
    }

    /// Returns whether the work has been stopped.
    pub fn is_stopped(&self) -> bool {
        self.state().is_stopped
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_several_expect_adds_up_and_the_next_time_begins_anew() {
        let progress = Progress::default();
        progress.expect(10);
        progress.advance(4).unwrap();
        progress.expect(5);
        assert_eq!(progress.so_far(), (4, 15));
        progress.advance(99).unwrap();
        assert_eq!(progress.so_far(), (15, 15));
        progress.expect(7);
        assert_eq!(progress.so_far(), (0, 7));
        progress.stop();
        assert!(progress.is_stopped() && progress.advance(1).is_err());
    }
}
