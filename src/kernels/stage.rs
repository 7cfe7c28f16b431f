//! The collective operations of a device whose buffers lie in host memory.
//!
//! Invariant: when the stage is aborted, an operation in progress unwinds with [`Aborted`] as its payload,
//! without calling the panic hook.

use crate::collective::{Aborted, Collective, SingleRank};
use std::fmt;
use std::panic::resume_unwind;

/// The stage of a device: a group of one rank until the device joins another.
pub(crate) struct StageCollective(Box<dyn Collective>);

impl StageCollective {
    /// Wraps the collective that connects this rank to the others.
    pub(crate) fn new(collective: Box<dyn Collective>) -> StageCollective {
        StageCollective(collective)
    }

    /// Returns the rank of the device, and the number of ranks.
    pub(crate) fn rank_and_count(&self) -> (usize, usize) {
        (self.0.rank(), self.0.rank_count())
    }

    /// Replaces x by its sum over all ranks, added in rank order.
    pub(crate) fn all_reduce(&mut self, x: &mut [f32]) {
        unwind_if_aborted(self.0.all_reduce(x));
    }

    /// Concatenates the columns of all ranks: all (rows, sum of `widths`) = the `own` (rows, widths\[rank\])
    /// of every rank, in rank order. Both slices may be longer than needed.
    pub(crate) fn all_gather(&mut self, rows: usize, widths: &[usize], own: &[f32], all: &mut [f32]) {
        assert_eq!(widths.len(), self.0.rank_count(), "one width for each rank is required; this is a bug");
        let (own, all) =
            (&own[..rows * widths[self.0.rank()]], &mut all[..rows * widths.iter().sum::<usize>()]);
        unwind_if_aborted(self.0.all_gather(rows, widths, own, all));
    }
}

impl Default for StageCollective {
    fn default() -> StageCollective {
        StageCollective(Box::new(SingleRank))
    }
}

impl fmt::Debug for StageCollective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rank, count) = self.rank_and_count();
        write!(f, "Stage({rank} of {count})")
    }
}

/// Returns the value, or unwinds if the stage or the step was aborted.
pub(crate) fn unwind_if_aborted<T>(outcome: Result<T, Aborted>) -> T {
    outcome.unwrap_or_else(|aborted| resume_unwind(Box::new(aborted)))
}
