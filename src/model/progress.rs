//! How far work on a model's weights is, for whoever wants to know, and whether it should go on.
//!
//! Invariant: what is done is never more than what is expected; where nobody shows it, the log tells it now and then.

use anyhow::{Result, bail};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tracing::info;

/// Between two lines of the log.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Bytes done, and all bytes. Several threads may work on one.
#[derive(Debug, Default)]
pub struct Progress(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    done: u64,
    total: u64,
    is_shown: bool,
    is_stopped: bool,
    /// When the log told of it, or of its beginning.
    told: Option<Instant>,
}

impl Progress {
    /// So many bytes are to be done beside those that are under way. What was done before counts no more.
    pub fn expect(&self, bytes: usize) {
        let mut state = self.state();
        if state.done >= state.total {
            (state.done, state.total) = (0, 0);
            state.told = Some(Instant::now());
        }
        state.total += bytes as u64;
    }

    /// So many more are done. An error if nobody wants the rest.
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

    /// Bytes done, and all.
    pub fn so_far(&self) -> (u64, u64) {
        let state = self.state();
        (state.done, state.total)
    }

    /// Somebody shows it: the log need not tell.
    pub fn show(&self) {
        self.state().is_shown = true;
    }

    /// The work is to end, from any thread.
    pub fn stop(&self) {
        self.state().is_stopped = true;
    }

    /// Whether somebody has said so.
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
