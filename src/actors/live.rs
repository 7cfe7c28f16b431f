//! A live view of the sequences in flight: which sequence has which slot of a lane, and how far it is. It is
//! kept up to date only while someone watches.
//!
//! Invariant: the decode loops write their own lanes and never wait for watchers; a watcher copies a lane at
//! once, so it sees the state after one slot plan.

use crate::memory::PagePool;
use mainstem_kernels::batch::Slot;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// The state that decode loops share with those who watch them.
pub struct LiveView {
    started: Instant,
    watchers: AtomicUsize,
    lanes: Vec<Arc<LiveLane>>,
    /// The slots of each lane.
    pub slots: Vec<Range<Slot>>,
    pages: PagePool,
}

/// The state of a lane.
#[derive(Default)]
pub struct LiveLane {
    steps: AtomicU64,
    generated: AtomicU64,
    moves: AtomicU64,
    /// Time of the last step in microseconds.
    step_us: AtomicU64,
    sequences: Mutex<LaneSequences>,
}

/// The sequences of a lane, by slot.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LaneSequences {
    /// The range from the lowest to the highest occupied slot.
    pub window: Range<Slot>,
    pub sequences: Vec<LiveSequence>,
}

/// The progress of a sequence.
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
    pub generated: u64,
    /// Sequences that the shuffle has moved.
    pub moves: u64,
    /// The longest of the lanes' last steps.
    pub step: Duration,
    pub pages_used: usize,
}

/// Keeps the view up to date until it is dropped.
pub struct Watcher(Arc<LiveView>);

impl LiveView {
    /// Creates the view of an idle engine with these slots by lane, and these pages.
    pub fn new(slots: impl Iterator<Item = Range<Slot>>, pages: PagePool) -> LiveView {
        let slots: Vec<_> = slots.collect();
        LiveView {
            started: Instant::now(),
            watchers: AtomicUsize::new(0),
            lanes: slots.iter().map(|_| Arc::default()).collect(),
            slots,
            pages,
        }
    }

    /// Begins to watch; `None` if `limit` others do.
    pub fn watch(self: &Arc<Self>, limit: usize) -> Option<Watcher> {
        let admit = |watchers| (watchers < limit).then_some(watchers + 1);
        let before = self.watchers.fetch_update(Ordering::SeqCst, Ordering::SeqCst, admit).ok()?;
        if before == 0 {
            // What is left from the last time is outdated.
            self.lanes.iter().for_each(|lane| lane.lock().sequences.clear());
        }
        Some(Watcher(self.clone()))
    }

    /// Returns the state of a lane.
    pub(super) fn lane(&self, lane: usize) -> Arc<LiveLane> {
        self.lanes[lane].clone()
    }

    /// Returns the number of KV pages that sequences can have.
    pub fn pages(&self) -> usize {
        self.pages.total()
    }

    /// Shows the sequences of a lane, if someone watches.
    pub(super) fn show(
        &self,
        lane: usize,
        window: Range<Slot>,
        sequences: impl Iterator<Item = LiveSequence>,
    ) {
        if self.watchers.load(Ordering::Relaxed) == 0 {
            return;
        }
        let mut shown = self.lanes[lane].lock();
        shown.window = window;
        shown.sequences.clear();
        shown.sequences.extend(sequences);
    }
}

impl Watcher {
    /// Copies the sequences of a lane.
    pub fn sequences(&self, lane: usize) -> LaneSequences {
        self.0.lanes[lane].lock().clone()
    }

    /// Returns the totals of all lanes.
    pub fn totals(&self) -> LiveTotals {
        let view = &self.0;
        let mut totals = LiveTotals {
            time: view.started.elapsed(),
            pages_used: view.pages.used(),
            ..LiveTotals::default()
        };
        for lane in &view.lanes {
            totals.steps += lane.steps.load(Ordering::Relaxed);
            totals.generated += lane.generated.load(Ordering::Relaxed);
            totals.moves += lane.moves.load(Ordering::Relaxed);
            totals.step = totals.step.max(Duration::from_micros(lane.step_us.load(Ordering::Relaxed)));
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
        self.step_us.store(time.as_micros() as u64, Ordering::Relaxed);
    }

    /// Counts a generated token.
    pub(super) fn count_generated(&self) {
        self.generated.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts sequences that the shuffle moved.
    pub(super) fn count_moves(&self, moves: usize) {
        self.moves.fetch_add(moves as u64, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, LaneSequences> {
        self.sequences.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::split_slots;

    fn view(slots: usize, lanes: usize) -> Arc<LiveView> {
        Arc::new(LiveView::new(split_slots(slots, lanes), PagePool::with_window(10, 32, None)))
    }

    const SEQUENCE: LiveSequence =
        LiveSequence { slot: 1, number: 7, prompt: 4, computed: 4, generated: 2, limit: 9 };

    fn show(view: &LiveView) {
        view.show(0, 1..2, [SEQUENCE].into_iter());
    }

    /// Without watchers nothing is copied, and a new watcher sees nothing of before.
    #[test]
    fn sequences_are_shown_while_someone_watches() {
        let view = view(4, 1);
        show(&view);
        let watcher = view.watch(1).unwrap();
        assert!(watcher.sequences(0).sequences.is_empty());
        show(&view);
        assert_eq!(watcher.sequences(0), LaneSequences { window: 1..2, sequences: vec![SEQUENCE] });
        drop(watcher);
        assert!(view.watch(1).unwrap().sequences(0).sequences.is_empty());
    }

    #[test]
    fn watchers_are_limited() {
        let view = view(4, 1);
        let first = view.watch(2).unwrap();
        let second = view.watch(2).unwrap();
        assert!(view.watch(2).is_none());
        drop(first);
        show(&view);
        assert!(view.watch(2).is_some());
        assert_eq!(second.sequences(0).sequences, [SEQUENCE], "others do not clear what one sees");
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
        let totals = view.watch(1).unwrap().totals();
        let expected = (2, 2, 4, Duration::from_micros(30), 0);
        let LiveTotals { steps, generated, moves, step, pages_used, .. } = totals;
        assert_eq!((steps, generated, moves, step, pages_used), expected);
    }
}
