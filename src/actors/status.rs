//! What the rest of the process may know about the engine without asking an actor: a few numbers.
//!
//! Invariant: written by the actors, read by anyone, never used to decide anything inside the engine.

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
            beat_ms: AtomicU64::new(0),
        }
    }
}

impl Status {
    /// The decode loop turned just now.
    pub fn beat(&self) {
        self.beat_ms.store(self.started.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    /// Time since the decode loop last turned.
    pub fn since_beat(&self) -> Duration {
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
}
