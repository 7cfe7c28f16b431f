//! The members of a stage as threads of one process.
//!
//! Each lays its numbers into a box of its own, all meet, and each reads everybody's. A member's two boxes take turns, so
//! that one meeting for each piece of an operation is enough: who comes to the next has read what this one brought.
//! Invariant: after construction nothing is allocated, and who waits for long uses no CPU. Nobody waits for a member that
//! is gone, nor after an abort.

#[cfg(test)]
mod tests;

use super::{Aborted, Collective};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, Weak};
use std::time::{Duration, Instant};

/// How long a member looks out for the others before it sleeps.
const SPIN: Duration = Duration::from_micros(40);
/// Looks between two readings of the clock.
const SPIN_LOOKS: usize = 64;

/// Gives stages up: from then on every operation of their members fails, also those that wait in one.
#[derive(Clone, Debug, Default)]
pub struct Abort(Arc<Signal>);

#[derive(Debug, Default)]
struct Signal {
    given: AtomicBool,
    stages: Mutex<Vec<Weak<Stage>>>,
}

/// One member; made by [`stage`], given to a device's thread.
#[derive(Debug)]
pub struct LocalMember {
    stage: Arc<Stage>,
    rank: usize,
    /// Meetings it has come to.
    meetings: u64,
    /// An operation is under way, or was left before its end: it begins no other, so that nobody is out of step.
    within: bool,
}

/// What the members share.
#[derive(Debug)]
struct Stage {
    abort: Abort,
    members: usize,
    /// How often members came to meetings, all together: the n-th is complete at n times as many as there are members.
    arrived: AtomicU64,
    /// Somebody has left, and comes to no meeting any more.
    left: AtomicBool,
    /// Who sleeps or is about to.
    sleepers: AtomicUsize,
    door: Mutex<()>,
    wake: Condvar,
    /// By turn, then by rank. Written by its owner before a meeting, read by all after it: no lock ever waits.
    boxes: [Vec<RwLock<Part>>; 2],
    /// Numbers that a box takes.
    floats: usize,
}

/// A member's part of the piece at hand.
#[derive(Debug)]
struct Part {
    len: usize,
    numbers: Box<[f32]>,
}

/// A stage of `members` that exchange up to `floats` numbers (at least one) at a time; a larger operation goes in pieces.
/// By rank. `abort` gives it up.
pub fn stage(members: usize, floats: usize, abort: &Abort) -> Vec<LocalMember> {
    let boxes = || (0..members).map(|_| RwLock::new(Part::new(floats))).collect();
    let stage = Arc::new(Stage {
        abort: abort.clone(),
        members,
        arrived: AtomicU64::new(0),
        left: AtomicBool::new(false),
        sleepers: AtomicUsize::new(0),
        door: Mutex::new(()),
        wake: Condvar::new(),
        boxes: [boxes(), boxes()],
        floats: floats.max(1),
    });
    abort.0.stages().push(Arc::downgrade(&stage));
    (0..members).map(|rank| LocalMember { stage: stage.clone(), rank, meetings: 0, within: false }).collect()
}

impl Abort {
    /// One that has not been given yet.
    pub fn new() -> Abort {
        Abort::default()
    }

    /// Gives the stages up. Once is for ever.
    pub fn abort(&self) {
        self.0.given.store(true, Ordering::SeqCst);
        for stage in self.0.stages().iter().filter_map(Weak::upgrade) {
            stage.wake_all();
        }
    }

    /// Whether they are given up.
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
        for piece in x.chunks_mut(self.stage.floats) {
            self.lay(piece.len(), |own| own.copy_from_slice(piece));
            self.meet()?;
            for rank in 0..self.stage.members {
                let part = self.part(rank, piece.len());
                match rank {
                    0 => piece.copy_from_slice(part.numbers()),
                    _ => piece.iter_mut().zip(part.numbers()).for_each(|(x, part)| *x += part),
                }
            }
        }
        self.within = false;
        Ok(())
    }

    fn gather(&mut self, rows: usize, widths: &[usize], own: &[f32], all: &mut [f32]) -> Result<(), Aborted> {
        self.begin()?;
        assert_eq!(widths.len(), self.stage.members, "a width for each member, else this is a bug");
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
    /// Gathers those rows, and of each member's columns those, as far as it has them.
    fn gather_piece(
        &mut self,
        rows: Range<usize>,
        columns: Range<usize>,
        widths: &[usize],
        own: &[f32],
        all: &mut [f32],
    ) -> Result<(), Aborted> {
        let columns_of = |rank: usize| columns.start.min(widths[rank])..columns.end.min(widths[rank]);
        let (width, mine) = (widths[self.rank], columns_of(self.rank));
        self.lay(rows.len() * mine.len(), |part| {
            for (to, row) in part.chunks_exact_mut(mine.len().max(1)).zip(rows.clone()) {
                to.copy_from_slice(&own[row * width..][mine.clone()]);
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

    /// Every operation begins so, and says so when it has come to its end.
    fn begin(&mut self) -> Result<(), Aborted> {
        let left = std::mem::replace(&mut self.within, true);
        if left || self.stage.abort.is_aborted() { Err(Aborted) } else { Ok(()) }
    }

    /// Fills this member's box for the meeting to come.
    fn lay(&self, len: usize, fill: impl FnOnce(&mut [f32])) {
        let mut part = self.stage.boxes[turn(self.meetings + 1)][self.rank]
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        part.len = len;
        fill(&mut part.numbers[..len]);
    }

    /// What that member brought to the last meeting.
    fn part(&self, rank: usize, len: usize) -> RwLockReadGuard<'_, Part> {
        let part = self.stage.boxes[turn(self.meetings)][rank].read().unwrap_or_else(PoisonError::into_inner);
        assert_eq!(part.len, len, "members do the same operations with the same sizes, else this is a bug");
        part
    }

    /// Waits until all have come.
    fn meet(&mut self) -> Result<(), Aborted> {
        self.meetings += 1;
        let complete = self.meetings * self.stage.members as u64;
        if self.stage.arrived.fetch_add(1, Ordering::SeqCst) + 1 == complete {
            self.stage.wake_sleepers();
        }
        self.stage.wait_for(complete)
    }
}

/// A member that goes takes nobody along who could still meet the others; but whoever waits for it is told.
impl Drop for LocalMember {
    fn drop(&mut self) {
        self.stage.left.store(true, Ordering::SeqCst);
        self.stage.wake_all();
    }
}

/// Which boxes a meeting uses.
fn turn(meeting: u64) -> usize {
    (meeting % 2) as usize
}

impl Stage {
    fn wait_for(&self, complete: u64) -> Result<(), Aborted> {
        if let Some(outcome) = self.spin(complete) {
            return outcome;
        }
        // The count of sleepers is raised before the last look, and read after an arrival: one sees the other.
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

    /// How the meeting went; `None` while somebody is still to come. Who left did so after the meetings that it came to.
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
