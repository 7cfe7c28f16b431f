//! Shared status of the engine: a few numbers that the rest of the process reads without asking an actor.
//!
//! Invariant: the actors write the numbers, and anyone may read them. Two flags are set from outside:
//! `draining` refuses new requests, and `stopping` marks what ends from then on as intended.

use super::response_memory::ResponseMemory;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Shared counters and flags of the engine.
pub struct Status {
    started: Instant,
    /// Queued requests.
    pub waiting: AtomicUsize,
    /// Requests that hold permits: in prefill or decode.
    pub running: AtomicUsize,
    /// Whether new requests are refused because the process is shutting down.
    pub draining: AtomicBool,
    stopping: AtomicBool,
    failed: AtomicBool,
    /// Maximum time between heartbeats of a lane with work.
    allowed_silence: Duration,
    /// Milliseconds after `started` when the devices being rebuilt should be back; `NOT_REBUILDING` while
    /// they are available.
    rebuild_deadline_ms: AtomicU64,
    /// Milliseconds after `started` when the engine last went from no work to some, or the devices last came
    /// back.
    clock_start_ms: AtomicU64,
    lanes: Vec<LaneStatus>,
    /// The memory of responses.
    pub responses: Arc<ResponseMemory>,
}

/// The status of a lane.
#[derive(Default)]
struct LaneStatus {
    /// Milliseconds after `started` of the lane's last heartbeat.
    heartbeat_ms: AtomicU64,
    /// Whether the lane has sequences, so that heartbeats are expected.
    has_work: AtomicBool,
}

/// Value of `rebuild_deadline_ms` while the devices are available.
const NOT_REBUILDING: u64 = u64::MAX;

impl Status {
    /// Creates the status of an idle engine with `lanes` lanes. `allowed_silence` is how long a lane with
    /// work may go without a heartbeat: while requests gather, and while steps take their allowed time.
    pub fn new(allowed_silence: Duration, lanes: usize) -> Status {
        Status {
            started: Instant::now(),
            waiting: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            draining: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            allowed_silence,
            rebuild_deadline_ms: AtomicU64::new(NOT_REBUILDING),
            clock_start_ms: AtomicU64::new(0),
            lanes: (0..lanes).map(|_| LaneStatus::default()).collect(),
            responses: ResponseMemory::new(usize::MAX),
        }
    }

    /// Limits the memory of responses to `limit` bytes.
    pub fn with_response_memory(self, limit: usize) -> Status {
        Status { responses: ResponseMemory::new(limit), ..self }
    }

    /// Records a heartbeat of a lane with work: its decode loop started an iteration or processed a step.
    pub fn heartbeat(&self, lane: usize) {
        let lane = &self.lanes[lane];
        lane.heartbeat_ms.store(self.now_ms(), Ordering::Relaxed);
        lane.has_work.store(true, Ordering::Relaxed);
    }

    /// Records that a lane has no work, so that no heartbeats are expected.
    pub fn idle(&self, lane: usize) {
        let lane = &self.lanes[lane];
        lane.heartbeat_ms.store(self.now_ms(), Ordering::Relaxed);
        lane.has_work.store(false, Ordering::Relaxed);
    }

    /// Records that the devices are being rebuilt, which may take `time`. While they are unavailable, further
    /// calls do not extend the first deadline: a retry does not excuse the failed attempt.
    pub fn start_rebuild(&self, time: Duration) {
        let (back, relaxed) = (self.now_ms() + time.as_millis() as u64, Ordering::Relaxed);
        let _ = self.rebuild_deadline_ms.compare_exchange(NOT_REBUILDING, back, relaxed, relaxed);
    }

    /// Records that the devices are available again. The stall clock restarts.
    pub fn finish_rebuild(&self) {
        self.clock_start_ms.store(self.now_ms(), Ordering::SeqCst);
        self.rebuild_deadline_ms.store(NOT_REBUILDING, Ordering::SeqCst);
    }

    /// Sets intake's counts. Going from no work to some restarts the stall clock.
    pub fn set_counts(&self, waiting: usize, running: usize) {
        if self.pending() == 0 && waiting + running > 0 {
            self.clock_start_ms.store(self.now_ms(), Ordering::Relaxed);
        }
        self.waiting.store(waiting, Ordering::Relaxed);
        self.running.store(running, Ordering::Relaxed);
    }

    /// Returns how long the engine has stalled, beyond the allowed time: with requests in flight, the time
    /// since the oldest heartbeat among the lanes with work, or since the latest heartbeat if no lane has
    /// work. While the devices are being rebuilt, the time since they should have been back.
    pub fn stalled_for(&self) -> Duration {
        let back = self.rebuild_deadline_ms.load(Ordering::Relaxed);
        if back != NOT_REBUILDING {
            return self.started.elapsed().saturating_sub(Duration::from_millis(back));
        }
        if self.pending() == 0 {
            return Duration::ZERO;
        }
        let beat = |lane: &LaneStatus| lane.heartbeat_ms.load(Ordering::Relaxed);
        let working = self.lanes.iter().filter(|lane| lane.has_work.load(Ordering::Relaxed)).map(beat).min();
        let last = working.or_else(|| self.lanes.iter().map(beat).max()).unwrap_or(0);
        let since = Duration::from_millis(last.max(self.clock_start_ms.load(Ordering::Relaxed)));
        self.started.elapsed().saturating_sub(since).saturating_sub(self.allowed_silence)
    }

    fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    /// Returns the number of requests in flight, queued or running.
    pub fn pending(&self) -> usize {
        self.waiting.load(Ordering::Relaxed) + self.running.load(Ordering::Relaxed)
    }

    /// Returns the numbers of running and of queued requests.
    pub fn counts(&self) -> (usize, usize) {
        (self.running.load(Ordering::Relaxed), self.waiting.load(Ordering::Relaxed))
    }

    /// Whether new requests are refused.
    pub fn is_draining(&self) -> bool {
        self.draining.load(Ordering::SeqCst)
    }

    /// Marks the engine as stopping: what ends from now on is intended.
    pub fn set_stopping(&self) {
        self.stopping.store(true, Ordering::Relaxed);
    }

    /// Whether the engine is being stopped.
    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Relaxed)
    }

    /// Marks the engine as permanently failed.
    pub fn set_failed(&self) {
        self.failed.store(true, Ordering::Relaxed);
    }

    /// Whether the engine has permanently failed.
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn age_by(status: &mut Status, age: Duration) {
        status.started -= age;
    }

    #[test]
    fn silence_counts_only_while_requests_are_in_flight() {
        let mut status = Status::new(Duration::ZERO, 1);
        age_by(&mut status, Duration::from_secs(100));
        assert_eq!(status.stalled_for(), Duration::ZERO);
        status.set_counts(0, 1);
        assert!(status.stalled_for() < Duration::from_secs(50), "the work is new");
        age_by(&mut status, Duration::from_secs(100));
        status.set_counts(2, 1);
        assert!(status.stalled_for() >= Duration::from_secs(99), "more work does not reset the clock");
        status.heartbeat(0);
        assert!(status.stalled_for() < Duration::from_secs(50));
    }

    #[test]
    fn a_stalled_lane_is_noticed_whatever_the_others_do() {
        let mut status = Status::new(Duration::ZERO, 3);
        status.set_counts(0, 2);
        status.heartbeat(0);
        status.heartbeat(1);
        age_by(&mut status, Duration::from_secs(100));
        status.heartbeat(0);
        assert!(status.stalled_for() >= Duration::from_secs(99), "the second lane is stalled");
        status.idle(1);
        assert!(status.stalled_for() < Duration::from_secs(50), "the second lane has no work");
        age_by(&mut status, Duration::from_secs(100));
        status.idle(0);
        assert!(
            status.stalled_for() < Duration::from_secs(50),
            "queued requests wait for the next iteration"
        );
        age_by(&mut status, Duration::from_secs(100));
        assert!(status.stalled_for() >= Duration::from_secs(99), "but no lane iterates");
    }

    /// The rebuild has its deadline whether requests are in flight or not.
    #[test]
    fn a_rebuild_has_a_deadline() {
        let mut status = Status::new(Duration::ZERO, 1);
        status.set_counts(0, 1);
        status.heartbeat(0);
        status.start_rebuild(Duration::from_secs(60));
        age_by(&mut status, Duration::from_secs(50));
        assert_eq!(status.stalled_for(), Duration::ZERO);
        status.heartbeat(0);
        age_by(&mut status, Duration::from_secs(50));
        assert!(
            status.stalled_for() >= Duration::from_secs(39),
            "a heartbeat does not extend the rebuild deadline"
        );
        status.start_rebuild(Duration::from_secs(60));
        assert!(status.stalled_for() >= Duration::from_secs(39), "nor does another attempt");
        status.finish_rebuild();
        assert!(
            status.stalled_for() < Duration::from_secs(10),
            "a step that waited for the devices starts now"
        );
        age_by(&mut status, Duration::from_secs(50));
        assert!(status.stalled_for() >= Duration::from_secs(49), "but it has to complete in time");
        status.start_rebuild(Duration::from_secs(60));
        assert_eq!(status.stalled_for(), Duration::ZERO, "the next rebuild has its own deadline");
    }

    #[test]
    fn allowed_silence_is_not_a_stall() {
        let mut status = Status::new(Duration::from_secs(60), 1);
        status.set_counts(0, 1);
        age_by(&mut status, Duration::from_secs(50));
        assert_eq!(status.stalled_for(), Duration::ZERO);
        age_by(&mut status, Duration::from_secs(50));
        assert!(status.stalled_for() >= Duration::from_secs(39));
    }
}
