//! What the rest of the process may know about the engine without asking an actor: a few numbers.
//!
//! Invariant: the numbers are the actors' to write and anyone's to read. Two words come from outside and bind
//! them: `draining` closes the door, `stopping` says that what ends now ends on purpose.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Shared counters of the engine.
pub struct Status {
    started: Instant,
    /// Requests in the waiting room.
    pub waiting: AtomicUsize,
    /// Requests holding permits: in prefill or decode.
    pub running: AtomicUsize,
    /// Whether new requests are refused because the process is on its way out.
    pub draining: AtomicBool,
    stopping: AtomicBool,
    failed: AtomicBool,
    /// The decode loop has nothing to do and waits for work.
    resting: AtomicBool,
    /// Milliseconds after `started` when the decode loop last turned.
    beat_ms: AtomicU64,
}

impl Default for Status {
    fn default() -> Self {
        Status {
            started: Instant::now(),
            waiting: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            draining: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            resting: AtomicBool::new(true),
            beat_ms: AtomicU64::new(0),
        }
    }
}

impl Status {
    /// The decode loop waits for work: silence is no bad sign from here on.
    pub fn rest(&self) {
        self.resting.store(true, Ordering::Relaxed);
    }

    /// The decode loop turned just now.
    pub fn beat(&self) {
        self.resting.store(false, Ordering::Relaxed);
        self.beat_ms.store(self.started.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    /// Time since the decode loop last turned; zero while it waits for work.
    pub fn since_beat(&self) -> Duration {
        if self.resting.load(Ordering::Relaxed) {
            return Duration::ZERO;
        }
        let now = self.started.elapsed();
        now.saturating_sub(Duration::from_millis(self.beat_ms.load(Ordering::Relaxed)))
    }

    /// Requests in flight, waiting or running.
    pub fn pending(&self) -> usize {
        self.waiting.load(Ordering::Relaxed) + self.running.load(Ordering::Relaxed)
    }

    /// Whether new requests are refused.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// What ends from here on ends on purpose.
    pub fn stop(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }

    /// Whether the engine is being stopped.
    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// The engine cannot serve any more.
    pub fn fail(&self) {
        self.failed.store(true, Ordering::Relaxed);
    }

    /// Whether the engine can serve no more.
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }
}
