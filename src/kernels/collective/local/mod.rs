//! Collective operations among ranks that are threads of one process.
//!
//! In each round of an operation, every rank writes its numbers to its own buffer, all ranks meet at a
//! barrier, and each rank reads the buffers of all. A rank alternates between two buffers, so one barrier per
//! round suffices: a rank that arrives at the next barrier has read everything of the previous round.
//!
//! Invariant: no operation allocates, and a long wait uses no CPU time. A rank waits neither for a rank that
//! was dropped nor after an abort.

#[cfg(test)]
mod tests;

use super::{Aborted, Collective};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, Weak};
use std::time::{Duration, Instant};

/// Time that a waiting rank spins before it sleeps.
const SPIN: Duration = Duration::from_micros(40);
/// Spins between two readings of the clock.
const SPIN_LOOKS: usize = 64;

/// Aborts stages: afterwards every operation of their ranks fails, including those that are waiting.
#[derive(Clone, Debug, Default)]
pub struct Abort(Arc<Signal>);

/// The state that all clones of an [`Abort`] share.
#[derive(Debug, Default)]
struct Signal {
    given: AtomicBool,
    stages: Mutex<Vec<Weak<Stage>>>,
}

/// One rank of a stage; created by [`create_ranks`] and passed to the thread of a device.
#[derive(Debug)]
pub struct LocalMember {
    stage: Arc<Stage>,
    rank: usize,
    /// Barriers that this rank has arrived at.
    meetings: u64,
    /// Whether an operation is in progress or was left early. Then no other operation begins, so that the
    /// ranks stay in step.
    within: bool,
}

/// The state that the ranks of a stage share.
#[derive(Debug)]
struct Stage {
    abort: Abort,
    members: usize,
    /// Arrivals of all ranks at barriers. Barrier number n is complete at n times the number of ranks.
    arrived: AtomicU64,
    /// Whether a rank was dropped, so that it arrives at no further barrier.
    left: AtomicBool,
    /// Ranks that sleep or are about to.
    sleepers: AtomicUsize,
    door: Mutex<()>,
    wake: Condvar,
    /// Exchange buffers, indexed by parity of the barrier and by rank. The owner writes before a barrier, all
    /// ranks read after it: no lock ever blocks.
    boxes: [Vec<RwLock<Part>>; 2],
    /// Capacity of an exchange buffer, in numbers.
    floats: usize,
}

/// The numbers that a rank contributes to the current round.
#[derive(Debug)]
struct Part {
    len: usize,
    numbers: Box<[f32]>,
}

/// Creates a stage and returns its ranks in order. A round exchanges up to `floats` numbers (at least one)
/// per rank; a larger operation takes several rounds. `abort` aborts the stage.
pub fn stage(count: usize, floats: usize, abort: &Abort) -> Vec<LocalMember> {
    let boxes = || (0..count).map(|_| RwLock::new(Part::new(floats))).collect();
    let shared = Arc::new(Stage {
        abort: abort.clone(),
        members: count,
        arrived: AtomicU64::new(0),
        left: AtomicBool::new(false),
        sleepers: AtomicUsize::new(0),
        door: Mutex::new(()),
        wake: Condvar::new(),
        boxes: [boxes(), boxes()],
        floats: floats.max(1),
    });
    abort.0.stages().push(Arc::downgrade(&shared));
    (0..count).map(|rank| LocalMember { stage: shared.clone(), rank, meetings: 0, within: false }).collect()
}

impl Abort {
    /// Creates a handle that is not aborted.
    pub fn new() -> Abort {
        Abort::default()
    }

    /// Aborts the stages, permanently.
    pub fn abort(&self) {
        self.0.given.store(true, Ordering::SeqCst);
        for shared in self.0.stages().iter().filter_map(Weak::upgrade) {
            shared.wake_all();
        }
    }

    /// Returns whether the stages are aborted.
    pub fn is_aborted(&self) -> bool {
        self.0.given.load(Ordering::SeqCst)
    }
}

impl Signal {
    fn stages(&self) -> MutexGuard<'_, Vec<Weak<Stage>>> {
        self.stages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Collective for LocalMember {
    fn rank(&self) -> usize {
        self.rank
    }

    fn members(&self) -> usize {
        self.stage.members
    }

    fn sum(&mut self, x: &mut [f32]) -> Result<(), Aborted> {
        self.begin()?;
        for chunk in x.chunks_mut(self.stage.floats) {
            self.lay(chunk.len(), |own| own.copy_from_slice(chunk));
            self.meet()?;
            for rank in 0..self.stage.members {
                let part = self.part(rank, chunk.len());
                match rank {
                    0 => chunk.copy_from_slice(part.numbers()),
                    _ => chunk.iter_mut().zip(part.numbers()).for_each(|(x, part)| *x += part),
                }
            }
        }
        self.within = false;
        Ok(())
    }

    fn gather(&mut self, rows: usize, widths: &[usize], own: &[f32], all: &mut [f32]) -> Result<(), Aborted> {
        self.begin()?;
        assert_eq!(widths.len(), self.stage.members, "one width for each rank is required; this is a bug");
        let widest = widths.iter().copied().max().unwrap_or(0);
        let columns_each = widest.min(self.stage.floats).max(1);
        let rows_each = self.stage.floats / columns_each;
        for first in (0..rows).step_by(rows_each) {
            for column in (0..widest).step_by(columns_each) {
                let rows = first..rows.min(first + rows_each);
                self.gather_piece(rows, column..column + columns_each, widths, own, all)?;
            }
        }
        self.within = false;
        Ok(())
    }
}

impl LocalMember {
    /// Runs one round of an all-gather: the given rows, and of each rank the given columns as far as it has
    /// them.
    fn gather_piece(
        &mut self,
        rows: Range<usize>,
        columns: Range<usize>,
        widths: &[usize],
        own: &[f32],
        all: &mut [f32],
    ) -> Result<(), Aborted> {
        let columns_of = |rank: usize| columns.start.min(widths[rank])..columns.end.min(widths[rank]);
        let (width, own_columns) = (widths[self.rank], columns_of(self.rank));
        self.lay(rows.len() * own_columns.len(), |buffer| {
            for (to, row) in buffer.chunks_exact_mut(own_columns.len().max(1)).zip(rows.clone()) {
                to.copy_from_slice(&own[row * width..][own_columns.clone()]);
            }
        });
        self.meet()?;
        let total: usize = widths.iter().sum();
        let mut before = 0;
        for (rank, width) in widths.iter().enumerate() {
            let columns = columns_of(rank);
            let part = self.part(rank, rows.len() * columns.len());
            for (from, row) in part.numbers().chunks_exact(columns.len().max(1)).zip(rows.clone()) {
                all[row * total + before..][columns.clone()].copy_from_slice(from);
            }
            before += width;
        }
        Ok(())
    }

    /// Begins an operation. Each operation resets the flag when it completes.
    fn begin(&mut self) -> Result<(), Aborted> {
        let left = std::mem::replace(&mut self.within, true);
        if left || self.stage.abort.is_aborted() { Err(Aborted) } else { Ok(()) }
    }

    /// Writes the contribution of this rank for the next barrier.
    fn lay(&self, len: usize, fill: impl FnOnce(&mut [f32])) {
        let mut part = self.stage.boxes[turn(self.meetings + 1)][self.rank]
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        part.len = len;
        fill(&mut part.numbers[..len]);
    }

    /// Reads the contribution of `rank` to the last barrier.
    fn part(&self, rank: usize, len: usize) -> RwLockReadGuard<'_, Part> {
        let part = self.stage.boxes[turn(self.meetings)][rank].read().unwrap_or_else(PoisonError::into_inner);
        assert_eq!(part.len, len, "ranks must run the same operations with the same sizes; this is a bug");
        part
    }

    /// Waits until all ranks have arrived at the next barrier.
    fn meet(&mut self) -> Result<(), Aborted> {
        self.meetings += 1;
        let complete = self.meetings * self.stage.members as u64;
        if self.stage.arrived.fetch_add(1, Ordering::SeqCst) + 1 == complete {
            self.stage.wake_sleepers();
        }
        self.stage.wait_for(complete)
    }
}

/// Lets the other ranks complete the barriers that this rank has arrived at, and fails their later
/// operations.
impl Drop for LocalMember {
    fn drop(&mut self) {
        self.stage.left.store(true, Ordering::SeqCst);
        self.stage.wake_all();
    }
}

/// Returns the parity of the buffers that a barrier uses.
fn turn(barrier: u64) -> usize {
    (barrier % 2) as usize
}

impl Stage {
    /// Waits until a barrier is complete: spins first, then sleeps.
    fn wait_for(&self, complete: u64) -> Result<(), Aborted> {
        if let Some(outcome) = self.spin(complete) {
            return outcome;
        }
        // The count of sleepers is incremented before the last check of the barrier, and read after an
        // arrival: at least one of the two threads sees the other.
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let mut door = self.door();
        let outcome = loop {
            match self.outcome(complete) {
                Some(outcome) => break outcome,
                None => door = self.wake.wait(door).unwrap_or_else(PoisonError::into_inner),
            }
        };
        drop(door);
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        outcome
    }

    /// Spins for [`SPIN_TIME`]; returns `None` if ranks are still missing then.
    fn spin(&self, complete: u64) -> Option<Result<(), Aborted>> {
        let start = Instant::now();
        loop {
            for _ in 0..SPIN_LOOKS {
                if let Some(outcome) = self.outcome(complete) {
                    return Some(outcome);
                }
                std::hint::spin_loop();
            }
            if start.elapsed() > SPIN {
                return None;
            }
        }
    }

    /// Returns the outcome of a barrier; `None` while ranks are missing. A rank that was dropped did arrive
    /// at its earlier barriers.
    fn outcome(&self, complete: u64) -> Option<Result<(), Aborted>> {
        let left = self.left.load(Ordering::SeqCst);
        match self.arrived.load(Ordering::SeqCst) >= complete {
            _ if self.abort.is_aborted() => Some(Err(Aborted)),
            true => Some(Ok(())),
            false => left.then_some(Err(Aborted)),
        }
    }

    fn wake_sleepers(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.wake_all();
        }
    }

    fn wake_all(&self) {
        drop(self.door());
        self.wake.notify_all();
    }

    fn door(&self) -> MutexGuard<'_, ()> {
        self.door.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Part {
    fn new(floats: usize) -> Part {
        Part { len: 0, numbers: vec![0.0; floats.max(1)].into() }
    }

    fn numbers(&self) -> &[f32] {
        &self.numbers[..self.len]
    }
}
