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
    /// How long all may be well without a beat of a lane.
    quiet: Duration,
    /// Milliseconds after `started` when the devices, which are being built again, should be back; `NOT_AWAY` while they
    /// are there.
    back_ms: AtomicU64,
    /// Milliseconds after `started` when work last came where there was none, or devices where there were none.
    came_ms: AtomicU64,
    lanes: Vec<Lane>,
}

/// What is known of a lane.
#[derive(Default)]
struct Lane {
    /// Milliseconds after `started` when it last turned, or a step of it landed.
    beat_ms: AtomicU64,
    /// Whether it has sequences, so that it should beat.
    works: AtomicBool,
}

/// The devices are there.
const NOT_AWAY: u64 = u64::MAX;

impl Status {
    /// Nothing in flight in so many lanes. `quiet`: how long all may be well without a beat of one: while requests gather,
    /// and while steps take the time that they may take.
    pub fn new(quiet: Duration, lanes: usize) -> Status {
        Status {
            started: Instant::now(),
            waiting: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            draining: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            quiet,
            back_ms: AtomicU64::new(NOT_AWAY),
            came_ms: AtomicU64::new(0),
            lanes: (0..lanes).map(|_| Lane::default()).collect(),
        }
    }

    /// The decode loop of this lane turned, or heard of a step, just now, and has work.
    pub fn beat(&self, lane: usize) {
        let lane = &self.lanes[lane];
        lane.beat_ms.store(self.now_ms(), Ordering::Relaxed);
        lane.works.store(true, Ordering::Relaxed);
    }

    /// This lane has nothing to do, and need not beat.
    pub fn rest(&self, lane: usize) {
        let lane = &self.lanes[lane];
        lane.beat_ms.store(self.now_ms(), Ordering::Relaxed);
        lane.works.store(false, Ordering::Relaxed);
    }

    /// The devices are built again, which may take that long. Until they are there the first word stands: another try
    /// does not excuse the one that failed.
    pub fn away_for(&self, time: Duration) {
        let (back, relaxed) = (self.now_ms() + time.as_millis() as u64, Ordering::Relaxed);
        let _ = self.back_ms.compare_exchange(NOT_AWAY, back, relaxed, relaxed);
    }

    /// They are there. What waited for them begins now.
    pub fn back(&self) {
        self.came_ms.store(self.now_ms(), Ordering::SeqCst);
        self.back_ms.store(NOT_AWAY, Ordering::SeqCst);
    }

    /// Intake's counts. Work that comes where there was none starts the clock anew.
    pub fn count(&self, waiting: usize, running: usize) {
        if self.pending() == 0 && waiting + running > 0 {
            self.came_ms.store(self.now_ms(), Ordering::Relaxed);
        }
        self.waiting.store(waiting, Ordering::Relaxed);
        self.running.store(running, Ordering::Relaxed);
    }

    /// How long requests have been in flight without a beat of the lane that has them, beyond what may be; where no lane
    /// has any, without a beat of whichever beat last. While the devices are built again, how much longer that takes than
    /// it may.
    pub fn stalled_for(&self) -> Duration {
        let back = self.back_ms.load(Ordering::Relaxed);
        if back != NOT_AWAY {
            return self.started.elapsed().saturating_sub(Duration::from_millis(back));
        }
        if self.pending() == 0 {
            return Duration::ZERO;
        }
        let beat = |lane: &Lane| lane.beat_ms.load(Ordering::Relaxed);
        let working = self.lanes.iter().filter(|lane| lane.works.load(Ordering::Relaxed)).map(beat).min();
        let last = working.or_else(|| self.lanes.iter().map(beat).max()).unwrap_or(0);
        let since = Duration::from_millis(last.max(self.came_ms.load(Ordering::Relaxed)));
        self.started.elapsed().saturating_sub(since).saturating_sub(self.quiet)
    }

    fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
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
        let mut status = Status::new(Duration::ZERO, 1);
        old_by(&mut status, Duration::from_secs(100));
        assert_eq!(status.stalled_for(), Duration::ZERO);
        status.count(0, 1);
        assert!(status.stalled_for() < Duration::from_secs(50), "the work is new");
        old_by(&mut status, Duration::from_secs(100));
        status.count(2, 1);
        assert!(status.stalled_for() >= Duration::from_secs(99), "more work does not excuse it");
        status.beat(0);
        assert!(status.stalled_for() < Duration::from_secs(50));
    }

    #[test]
    fn a_lane_with_work_that_does_not_turn_is_noticed_whatever_the_others_do() {
        let mut status = Status::new(Duration::ZERO, 3);
        status.count(0, 2);
        status.beat(0);
        status.beat(1);
        old_by(&mut status, Duration::from_secs(100));
        status.beat(0);
        assert!(status.stalled_for() >= Duration::from_secs(99), "the second stands still");
        status.rest(1);
        assert!(status.stalled_for() < Duration::from_secs(50), "it has nothing to do");
        old_by(&mut status, Duration::from_secs(100));
        status.rest(0);
        assert!(
            status.stalled_for() < Duration::from_secs(50),
            "who waits for a lane begins with the next turn"
        );
        old_by(&mut status, Duration::from_secs(100));
        assert!(status.stalled_for() >= Duration::from_secs(99), "but nobody turns");
    }

    /// Whether anybody waits for them or not: there is nothing to serve with.
    #[test]
    fn devices_that_are_built_again_have_their_time_for_it() {
        let mut status = Status::new(Duration::ZERO, 1);
        status.count(0, 1);
        status.beat(0);
        status.away_for(Duration::from_secs(60));
        old_by(&mut status, Duration::from_secs(50));
        assert_eq!(status.stalled_for(), Duration::ZERO);
        status.beat(0);
        old_by(&mut status, Duration::from_secs(50));
        assert!(status.stalled_for() >= Duration::from_secs(39), "who is turned away is no sign of life");
        status.away_for(Duration::from_secs(60));
        assert!(status.stalled_for() >= Duration::from_secs(39), "nor is another try");
        status.back();
        assert!(status.stalled_for() < Duration::from_secs(10), "a step that waited for them begins now");
        old_by(&mut status, Duration::from_secs(50));
        assert!(status.stalled_for() >= Duration::from_secs(49), "but has to come to its end");
        status.away_for(Duration::from_secs(60));
        assert_eq!(status.stalled_for(), Duration::ZERO, "the next time they have their time again");
    }

    #[test]
    fn what_may_take_its_time_is_no_silence() {
        let mut status = Status::new(Duration::from_secs(60), 1);
        status.count(0, 1);
        old_by(&mut status, Duration::from_secs(50));
        assert_eq!(status.stalled_for(), Duration::ZERO);
        old_by(&mut status, Duration::from_secs(50));
        assert!(status.stalled_for() >= Duration::from_secs(39));
    }
}
