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
    /// How long requests may gather before the decode loop is expected to turn.
    gathering: Duration,
    /// Milliseconds after `started` when the decode loop last turned, or work came where there was none.
    beat_ms: AtomicU64,
}

impl Status {
    /// Nothing in flight. `gathering`: how long requests may gather before the decode loop is expected to
    /// turn; the window of that policy, else zero.
    pub fn new(gathering: Duration) -> Status {
        Status {
            started: Instant::now(),
            waiting: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            draining: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            gathering,
            beat_ms: AtomicU64::new(0),
        }
    }

    /// The decode loop turned just now.
    pub fn beat(&self) {
        self.beat_ms.store(self.started.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    /// Intake's counts. Work that comes where there was none starts the clock anew.
    pub fn count(&self, waiting: usize, running: usize) {
        if self.pending() == 0 && waiting + running > 0 {
            self.beat();
        }
        self.waiting.store(waiting, Ordering::Relaxed);
        self.running.store(running, Ordering::Relaxed);
    }

    /// How long requests have been in flight without a turn of the decode loop.
    pub fn stalled_for(&self) -> Duration {
        if self.pending() == 0 {
            return Duration::ZERO;
        }
        let beat = Duration::from_millis(self.beat_ms.load(Ordering::Relaxed));
        self.started.elapsed().saturating_sub(beat).saturating_sub(self.gathering)
    }

    /// Requests in flight, waiting or running.
    pub fn pending(&self) -> usize {
        self.waiting.load(Ordering::Relaxed) + self.running.load(Ordering::Relaxed)
    }

    /// Whether new requests are refused.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn old_by(status: &mut Status, age: Duration) {
        status.started -= age;
    }

    #[test]
    fn silence_counts_only_while_somebody_waits_for_an_end_of_it() {
        let mut status = Status::new(Duration::ZERO);
        old_by(&mut status, Duration::from_secs(100));
        assert_eq!(status.stalled_for(), Duration::ZERO);
        status.count(0, 1);
        assert!(status.stalled_for() < Duration::from_secs(50), "the work is new");
        old_by(&mut status, Duration::from_secs(100));
        status.count(2, 1);
        assert!(status.stalled_for() >= Duration::from_secs(99), "more work does not excuse it");
        status.beat();
        assert!(status.stalled_for() < Duration::from_secs(50));
    }

    #[test]
    fn gathering_is_no_silence() {
        let mut status = Status::new(Duration::from_secs(60));
        status.count(0, 1);
        old_by(&mut status, Duration::from_secs(50));
        assert_eq!(status.stalled_for(), Duration::ZERO);
        old_by(&mut status, Duration::from_secs(50));
        assert!(status.stalled_for() >= Duration::from_secs(39));
    }
}
