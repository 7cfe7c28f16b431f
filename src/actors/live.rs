//! A live view of the sequences in flight: which sequence has which slot of a lane, and how far it is.
//!
//! Invariant: the decode loops write their own lanes and wait for no reader; a reader gets the state of a
//! lane after one slot plan.

use crate::memory::PagePool;
use mainstem_kernels::batch::Slot;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The state that decode loops share with those who watch them.
pub struct LiveView {
    started: Instant,
    watchers: AtomicUsize,
    lanes: Vec<Arc<LiveLane>>,
    /// The slots of each lane.
    pub slots: Vec<Range<Slot>>,
    pool: PagePool,
    /// Number of pages that sequences have.
    pages_used: AtomicUsize,
}

/// The state of a lane.
#[derive(Default)]
pub struct LiveLane {
    steps: AtomicU64,
    /// Time of all steps in microseconds.
    steps_us: AtomicU64,
    generated: AtomicU64,
    moves: AtomicU64,
    /// Replaced as a whole, so that the lock is held for no longer than that.
    sequences: Mutex<Arc<LaneSequences>>,
}

/// The sequences of a lane, by slot.
#[derive(Debug, Default, PartialEq)]
pub struct LaneSequences {
    /// The range from the lowest to the highest occupied slot.
    pub window: Range<Slot>,
    pub sequences: Vec<LiveSequence>,
}

/// The progress of a sequence: the steps that were sent before the current one, and the results that are
/// back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LiveSequence {
    pub slot: Slot,
    /// Number of the sequence, in the order of arrival.
    pub number: u64,
    /// Tokens of the prompt, and those of them that were computed or found in the prefix cache.
    pub prompt: usize,
    pub computed: usize,
    /// Generated tokens, and their maximum number.
    pub generated: u32,
    pub limit: u32,
}

/// Totals of all lanes since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LiveTotals {
    /// Time since the start.
    pub time: Duration,
    pub steps: u64,
    /// Time of all steps.
    pub step_time: Duration,
    pub generated: u64,
    /// Sequences that the shuffle has moved.
    pub moves: u64,
    /// Pages that sequences had when the last step was planned.
    pub pages_used: usize,
}

/// The place of one who watches, until it is dropped.
pub struct Watcher(Arc<LiveView>);

impl LiveView {
    /// Creates the view of an idle engine with these slots by lane, and these pages.
    pub fn new(slots: impl Iterator<Item = Range<Slot>>, pool: PagePool) -> LiveView {
        let slots: Vec<_> = slots.collect();
        LiveView {
            started: Instant::now(),
            watchers: AtomicUsize::new(0),
            lanes: slots.iter().map(|_| Arc::default()).collect(),
            slots,
            pool,
            pages_used: AtomicUsize::new(0),
        }
    }

    /// Begins to watch; `None` if `limit` others do.
    pub fn watch(self: &Arc<Self>, limit: usize) -> Option<Watcher> {
        let admit = |watchers| (watchers < limit).then_some(watchers + 1);
        self.watchers.fetch_update(Ordering::SeqCst, Ordering::SeqCst, admit).ok()?;
        Some(Watcher(self.clone()))
    }

    /// Returns the number of KV pages that sequences can have.
    pub fn pages(&self) -> usize {
        self.pool.total()
    }

    /// Returns the state of a lane.
    pub(super) fn lane(&self, lane: usize) -> Arc<LiveLane> {
        self.lanes[lane].clone()
    }

    /// Shows the sequences of a lane. Called on the control thread, which the pool's lock does not hold up,
    /// because nobody else takes pages.
    pub(super) fn show(
        &self,
        lane: usize,
        window: Range<Slot>,
        sequences: impl Iterator<Item = LiveSequence>,
    ) {
        let shown = Arc::new(LaneSequences { window, sequences: sequences.collect() });
        let before = std::mem::replace(&mut *self.lanes[lane].lock(), shown);
        drop(before);
        self.pages_used.store(self.pool.used(), Ordering::Relaxed);
    }
}

impl Watcher {
    /// Returns the sequences of a lane.
    pub fn sequences(&self, lane: usize) -> Arc<LaneSequences> {
        self.0.lanes[lane].lock().clone()
    }

    /// Returns the totals of all lanes.
    pub fn totals(&self) -> LiveTotals {
        let view = &self.0;
        let mut totals = LiveTotals {
            time: view.started.elapsed(),
            pages_used: view.pages_used.load(Ordering::Relaxed),
            ..LiveTotals::default()
        };
        for lane in &view.lanes {
            totals.steps += lane.steps.load(Ordering::Relaxed);
            totals.step_time += Duration::from_micros(lane.steps_us.load(Ordering::Relaxed));
            totals.generated += lane.generated.load(Ordering::Relaxed);
            totals.moves += lane.moves.load(Ordering::Relaxed);
        }
        totals
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.0.watchers.fetch_sub(1, Ordering::SeqCst);
    }
}

impl LiveLane {
    /// Counts a completed step that took `time`.
    pub(super) fn count_step(&self, time: Duration) {
        self.steps.fetch_add(1, Ordering::Relaxed);
        self.steps_us.fetch_add(time.as_micros() as u64, Ordering::Relaxed);
    }

    /// Counts a generated token.
    pub(super) fn count_generated(&self) {
        self.generated.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts sequences that the shuffle moved.
    pub(super) fn count_moves(&self, moves: usize) {
        self.moves.fetch_add(moves as u64, Ordering::Relaxed);
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Arc<LaneSequences>> {
        self.sequences.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::split_slots;

    fn view(slots: usize, lanes: usize) -> Arc<LiveView> {
        Arc::new(LiveView::new(split_slots(slots, lanes), PagePool::new(10, 32)))
    }

    const SEQUENCE: LiveSequence =
        LiveSequence { slot: 1, number: 7, prompt: 4, computed: 4, generated: 2, limit: 9 };

    /// A reader's state does not change in its hands.
    #[test]
    fn a_reader_has_one_state_of_a_lane() {
        let view = view(4, 1);
        let watcher = view.watch(1).unwrap();
        let idle = watcher.sequences(0);
        view.show(0, 1..2, [SEQUENCE].into_iter());
        assert_eq!(*idle, LaneSequences::default());
        assert_eq!(*watcher.sequences(0), LaneSequences { window: 1..2, sequences: vec![SEQUENCE] });
    }

    #[test]
    fn watchers_are_limited() {
        let view = view(4, 1);
        let first = view.watch(2).unwrap();
        let _second = view.watch(2).unwrap();
        assert!(view.watch(2).is_none());
        drop(first);
        assert!(view.watch(2).is_some());
    }

    #[test]
    fn totals_are_those_of_all_lanes() {
        let view = view(4, 2);
        for (lane, us) in [(0, 30), (1, 20)] {
            let lane = view.lane(lane);
            lane.count_step(Duration::from_micros(us));
            lane.count_generated();
            lane.count_moves(2);
        }
        let LiveTotals { steps, step_time, generated, moves, .. } = view.watch(1).unwrap().totals();
        assert_eq!((steps, step_time, generated, moves), (2, Duration::from_micros(50), 2, 4));
    }
}
