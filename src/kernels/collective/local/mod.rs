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
const SPIN_TIME: Duration = Duration::from_micros(40);
/// Spins between two readings of the clock.
const SPINS_PER_CLOCK_CHECK: usize = 64;

/// Aborts stages: afterwards every operation of their ranks fails, including those that are waiting.
#[derive(Clone, Debug, Default)]
pub struct Abort(Arc<AbortState>);

/// Threads that wait for something, and stop waiting when an [`Abort`] is aborted that they
/// [listen to](Abort::wake_on_abort).
pub trait Waiters: Send + Sync {
    /// Wakes all threads that wait, so that they look whether they should stop.
    fn wake_all(&self);
}

/// The state that all clones of an [`Abort`] share.
#[derive(Debug, Default)]
struct AbortState {
    is_aborted: AtomicBool,
    waiters: Mutex<Vec<Weak<dyn Waiters>>>,
}

/// One rank of a stage; created by [`create_ranks`] and passed to the thread of a device.
#[derive(Debug)]
pub struct LocalRank {
    stage: Arc<SharedStage>,
    rank: usize,
    /// Barriers that this rank has arrived at.
    barriers: u64,
    /// Whether an operation is in progress or was left early. Then no other operation begins, so that the
    /// ranks stay in step.
    in_operation: bool,
}

/// The state that the ranks of a stage share.
#[derive(Debug)]
struct SharedStage {
    abort: Abort,
    rank_count: usize,
    /// Arrivals of all ranks at barriers. Barrier number n is complete at n times the number of ranks.
    arrived: AtomicU64,
    /// Whether a rank was dropped, so that it arrives at no further barrier.
    has_dropped_rank: AtomicBool,
    /// Ranks that sleep or are about to.
    sleepers: AtomicUsize,
    sleep_lock: Mutex<()>,
    wake: Condvar,
    /// Exchange buffers, indexed by parity of the barrier and by rank. The owner writes before a barrier, all
    /// ranks read after it: no lock ever blocks.
    buffers: [Vec<RwLock<Contribution>>; 2],
    /// Capacity of an exchange buffer, in numbers.
    buffer_len: usize,
}

/// The numbers that a rank contributes to the current round.
#[derive(Debug)]
struct Contribution {
    len: usize,
    values: Box<[f32]>,
}

/// Creates a stage and returns its ranks in order. A round exchanges up to `floats` numbers (at least one)
/// per rank; a larger operation takes several rounds. `abort` aborts the stage.
pub fn create_ranks(count: usize, floats: usize, abort: &Abort) -> Vec<LocalRank> {
    let boxes = || (0..count).map(|_| RwLock::new(Contribution::new(floats))).collect();
    let shared = Arc::new(SharedStage {
        abort: abort.clone(),
        rank_count: count,
        arrived: AtomicU64::new(0),
        has_dropped_rank: AtomicBool::new(false),
        sleepers: AtomicUsize::new(0),
        sleep_lock: Mutex::new(()),
        wake: Condvar::new(),
        buffers: [boxes(), boxes()],
        buffer_len: floats.max(1),
    });
    let stage = Arc::downgrade(&shared);
    abort.wake_on_abort(stage);
    (0..count)
        .map(|rank| LocalRank { stage: shared.clone(), rank, barriers: 0, in_operation: false })
        .collect()
}

impl Abort {
    /// Creates a handle that is not aborted.
    pub fn new() -> Abort {
        Abort::default()
    }

    /// Aborts the stages, permanently.
    pub fn abort(&self) {
        self.0.is_aborted.store(true, Ordering::SeqCst);
        for waiters in self.0.waiters().iter().filter_map(Weak::upgrade) {
            waiters.wake_all();
        }
    }

    /// Lets the abort wake `waiters`. Those that begin to wait later must look at [`Abort::is_aborted`]
    /// first, with the lock that `wake_all` takes.
    pub fn wake_on_abort(&self, waiters: Weak<dyn Waiters>) {
        self.0.waiters().push(waiters);
    }

    /// Returns whether the stages are aborted.
    pub fn is_aborted(&self) -> bool {
        self.0.is_aborted.load(Ordering::SeqCst)
    }
}

impl AbortState {
    fn waiters(&self) -> MutexGuard<'_, Vec<Weak<dyn Waiters>>> {
        self.waiters.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Collective for LocalRank {
    fn rank(&self) -> usize {
        self.rank
    }

    fn rank_count(&self) -> usize {
        self.stage.rank_count
    }

    fn all_reduce(&mut self, x: &mut [f32]) -> Result<(), Aborted> {
        self.begin()?;
        for chunk in x.chunks_mut(self.stage.buffer_len) {
            self.write_own(chunk.len(), |own| own.copy_from_slice(chunk));
            self.wait_for_all()?;
            for rank in 0..self.stage.rank_count {
                let part = self.read_part(rank, chunk.len());
                match rank {
                    0 => chunk.copy_from_slice(part.values()),
                    _ => chunk.iter_mut().zip(part.values()).for_each(|(x, part)| *x += part),
                }
            }
        }
        self.in_operation = false;
        Ok(())
    }

    fn all_gather(
        &mut self,
        rows: usize,
        widths: &[usize],
        own: &[f32],
        all: &mut [f32],
    ) -> Result<(), Aborted> {
        self.begin()?;
        assert_eq!(widths.len(), self.stage.rank_count, "one width for each rank is required; this is a bug");
        let widest = widths.iter().copied().max().unwrap_or(0);
        let columns_each = widest.min(self.stage.buffer_len).max(1);
        let rows_each = self.stage.buffer_len / columns_each;
        for first in (0..rows).step_by(rows_each) {
            for column in (0..widest).step_by(columns_each) {
                let rows = first..rows.min(first + rows_each);
                self.gather_round(rows, column..column + columns_each, widths, own, all)?;
            }
        }
        self.in_operation = false;
        Ok(())
    }
}

impl LocalRank {
    /// Runs one round of an all-gather: the given rows, and of each rank the given columns as far as it has
    /// them.
    fn gather_round(
        &mut self,
        rows: Range<usize>,
        columns: Range<usize>,
        widths: &[usize],
        own: &[f32],
        all: &mut [f32],
    ) -> Result<(), Aborted> {
        let columns_of = |rank: usize| columns.start.min(widths[rank])..columns.end.min(widths[rank]);
        let (width, own_columns) = (widths[self.rank], columns_of(self.rank));
        self.write_own(rows.len() * own_columns.len(), |buffer| {
            for (to, row) in buffer.chunks_exact_mut(own_columns.len().max(1)).zip(rows.clone()) {
                to.copy_from_slice(&own[row * width..][own_columns.clone()]);
            }
        });
        self.wait_for_all()?;
        let total: usize = widths.iter().sum();
        let mut before = 0;
        for (rank, width) in widths.iter().enumerate() {
            let columns = columns_of(rank);
            let part = self.read_part(rank, rows.len() * columns.len());
            for (from, row) in part.values().chunks_exact(columns.len().max(1)).zip(rows.clone()) {
                all[row * total + before..][columns.clone()].copy_from_slice(from);
            }
            before += width;
        }
        Ok(())
    }

    /// Begins an operation. Each operation resets the flag when it completes.
    fn begin(&mut self) -> Result<(), Aborted> {
        let left = std::mem::replace(&mut self.in_operation, true);
        if left || self.stage.abort.is_aborted() { Err(Aborted) } else { Ok(()) }
    }

    /// Writes the contribution of this rank for the next barrier.
    fn write_own(&self, len: usize, fill: impl FnOnce(&mut [f32])) {
        let mut part = self.stage.buffers[parity(self.barriers + 1)][self.rank]
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        part.len = len;
        fill(&mut part.values[..len]);
    }

    /// Reads the contribution of `rank` to the last barrier.
    fn read_part(&self, rank: usize, len: usize) -> RwLockReadGuard<'_, Contribution> {
        let part =
            self.stage.buffers[parity(self.barriers)][rank].read().unwrap_or_else(PoisonError::into_inner);
        assert_eq!(part.len, len, "ranks must run the same operations with the same sizes; this is a bug");
        part
    }

    /// Waits until all ranks have arrived at the next barrier.
    fn wait_for_all(&mut self) -> Result<(), Aborted> {
        self.barriers += 1;
        let complete = self.barriers * self.stage.rank_count as u64;
        if self.stage.arrived.fetch_add(1, Ordering::SeqCst) + 1 == complete {
            self.stage.wake_sleepers();
        }
        self.stage.wait_for(complete)
    }
}

/// Lets the other ranks complete the barriers that this rank has arrived at, and fails their later
/// operations.
impl Drop for LocalRank {
    fn drop(&mut self) {
        self.stage.has_dropped_rank.store(true, Ordering::SeqCst);
        self.stage.wake_all();
    }
}

/// Returns the parity of the buffers that a barrier uses.
fn parity(barrier: u64) -> usize {
    (barrier % 2) as usize
}

impl Waiters for SharedStage {
    fn wake_all(&self) {
        drop(self.sleep_lock());
        self.wake.notify_all();
    }
}

impl SharedStage {
    /// Waits until a barrier is complete: spins first, then sleeps.
    fn wait_for(&self, complete: u64) -> Result<(), Aborted> {
        if let Some(outcome) = self.spin(complete) {
            return outcome;
        }
        // The count of sleepers is incremented before the last check of the barrier, and read after an
        // arrival: at least one of the two threads sees the other.
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let mut door = self.sleep_lock();
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
            for _ in 0..SPINS_PER_CLOCK_CHECK {
                if let Some(outcome) = self.outcome(complete) {
                    return Some(outcome);
                }
                std::hint::spin_loop();
            }
            if start.elapsed() > SPIN_TIME {
                return None;
            }
        }
    }

    /// Returns the outcome of a barrier; `None` while ranks are missing. A rank that was dropped did arrive
    /// at its earlier barriers.
    fn outcome(&self, complete: u64) -> Option<Result<(), Aborted>> {
        let left = self.has_dropped_rank.load(Ordering::SeqCst);
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

    fn sleep_lock(&self) -> MutexGuard<'_, ()> {
        self.sleep_lock.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Contribution {
    fn new(floats: usize) -> Contribution {
        Contribution { len: 0, values: vec![0.0; floats.max(1)].into() }
    }

    fn values(&self) -> &[f32] {
        &self.values[..self.len]
    }
}
