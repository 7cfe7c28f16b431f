//! Between a run and whoever watches it: the counts go out, the word to stop comes in.
//!
//! The run's tasks share their own counts, which a thread copies over every few milliseconds.
//! Invariant: when a run is over, the watcher's counts are the run's.

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

/// How often counts go out and the word to stop is looked for.
const INTERVAL: Duration = Duration::from_millis(20);

/// Tells all tasks of a run to end, on any thread.
#[derive(Clone, Debug)]
pub struct Stop(Arc<watch::Sender<bool>>);

impl Stop {
    fn new() -> Self {
        Self(Arc::new(watch::Sender::new(false)))
    }

    pub fn now(&self) {
        self.0.send_replace(true);
    }

    pub fn is_now(&self) -> bool {
        *self.0.borrow()
    }

    /// What becomes true when it is time.
    pub fn receiver(&self) -> watch::Receiver<bool> {
        self.0.subscribe()
    }
}

/// Ends the watching thread, however the run ended.
struct Over<'a> {
    over: &'a AtomicBool,
    thread: Thread,
}

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.over.store(true, Relaxed);
        self.thread.unpark();
    }
}

/// Runs `run` with counts that `progress` shows, and a stop that follows its word.
pub fn watched<T>(progress: &Progress, run: impl FnOnce(&Arc<Progress>, &Stop) -> T) -> T {
    let (live, stop, over) = (Arc::new(Progress::default()), Stop::new(), AtomicBool::new(false));
    thread::scope(|scope| {
        let watcher = scope.spawn(|| watch(progress, &live, &stop, &over));
        let _over = Over { over: &over, thread: watcher.thread().clone() };
        run(&live, &stop)
    })
}

fn watch(progress: &Progress, live: &Progress, stop: &Stop, over: &AtomicBool) {
    loop {
        // Looked at before the counts are copied, so that the last copy is whole.
        let last = over.load(Relaxed);
        copy(live, progress);
        if progress.stop.load(Relaxed) {
            stop.now();
        }
        if last {
            return;
        }
        thread::park_timeout(INTERVAL);
    }
}

fn copy(from: &Progress, to: &Progress) {
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
        watched(&progress, |live, stop| {
            assert!(!stop.is_now());
            live.sent.store(3, Relaxed);
            progress.stop.store(true, Relaxed);
            let runtime = super::super::local_runtime().unwrap();
            runtime.block_on(crate::client::stopped(stop.receiver()));
            live.tokens.store(7, Relaxed);
        });
        assert_eq!((progress.sent.load(Relaxed), progress.tokens.load(Relaxed)), (3, 7));
    }

    #[test]
    fn a_run_that_panics_ends_its_watcher() {
        let panicked =
            std::panic::catch_unwind(|| watched(&Progress::default(), |_, _| panic!("as planned")));
        assert!(panicked.is_err());
    }
}
