//! Synchronization between a run and its observer: publishes the live counts and forwards the stop flag.
//!
//! The tasks of the run update private counts, which a thread copies to the observer every few milliseconds.
//! Invariant: after the run, the observer's counts equal those of the run.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread::{self, Thread},
    time::Duration,
};

use tokio::sync::watch;

use super::Progress;

/// Interval of copying the counts and checking the stop flag.
const INTERVAL: Duration = Duration::from_millis(20);

/// A stop signal for all tasks of a run, on any thread.
#[derive(Clone, Debug)]
pub struct StopSignal(Arc<watch::Sender<bool>>);

impl StopSignal {
    fn new() -> Self {
        Self(Arc::new(watch::Sender::new(false)))
    }

    /// Triggers the signal.
    pub fn trigger(&self) {
        self.0.send_replace(true);
    }

    /// Returns whether the signal was triggered.
    pub fn is_triggered(&self) -> bool {
        *self.0.borrow()
    }

    /// Returns a receiver that becomes true when the signal is triggered.
    pub fn receiver(&self) -> watch::Receiver<bool> {
        self.0.subscribe()
    }
}

/// A guard that ends the watcher thread on drop, even if the run panics.
struct WatcherGuard<'a> {
    over: &'a AtomicBool,
    thread: Thread,
}

impl Drop for WatcherGuard<'_> {
    fn drop(&mut self) {
        self.over.store(true, Relaxed);
        self.thread.unpark();
    }
}

/// Runs `run` with live counts that are copied to `progress`, and a stop signal that follows `progress.stop`.
pub fn with_watcher<T>(progress: &Progress, run: impl FnOnce(&Arc<Progress>, &StopSignal) -> T) -> T {
    let (live, stop, over) = (Arc::new(Progress::default()), StopSignal::new(), AtomicBool::new(false));
    thread::scope(|scope| {
        let watcher = scope.spawn(|| watch(progress, &live, &stop, &over));
        let _over = WatcherGuard { over: &over, thread: watcher.thread().clone() };
        run(&live, &stop)
    })
}

fn watch(progress: &Progress, live: &Progress, stop: &StopSignal, over: &AtomicBool) {
    loop {
        // Loaded before the counts are copied, so that the last copy is complete.
        let last = over.load(Relaxed);
        copy_counts(live, progress);
        if progress.stop.load(Relaxed) {
            stop.trigger();
        }
        if last {
            return;
        }
        thread::park_timeout(INTERVAL);
    }
}

fn copy_counts(from: &Progress, to: &Progress) {
    to.sent.store(from.sent.load(Relaxed), Relaxed);
    to.in_flight.store(from.in_flight.load(Relaxed), Relaxed);
    to.completed.store(from.completed.load(Relaxed), Relaxed);
    to.failed.store(from.failed.load(Relaxed), Relaxed);
    to.hung_up.store(from.hung_up.load(Relaxed), Relaxed);
    to.tokens.store(from.tokens.load(Relaxed), Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_go_out_and_the_word_to_stop_comes_in() {
        let progress = Progress::default();
        with_watcher(&progress, |live, stop| {
            assert!(!stop.is_triggered());
            live.sent.store(3, Relaxed);
            progress.stop.store(true, Relaxed);
            let runtime = super::super::local_runtime().unwrap();
            runtime.block_on(crate::client::wait_until_stopped(stop.receiver()));
            live.tokens.store(7, Relaxed);
        });
        assert_eq!((progress.sent.load(Relaxed), progress.tokens.load(Relaxed)), (3, 7));
    }

    #[test]
    fn a_run_that_panics_ends_its_watcher() {
        let panicked =
            std::panic::catch_unwind(|| with_watcher(&Progress::default(), |_, _| panic!("as planned")));
        assert!(panicked.is_err());
    }
}
