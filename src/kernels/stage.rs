//! The collective operations of a device whose buffers lie in host memory.
//!
//! Invariant: when the stage is aborted, an operation in progress unwinds with [`Aborted`] as its payload,
//! without calling the panic hook.

use crate::collective::{Aborted, Alone, Collective};
use std::fmt;
use std::panic::resume_unwind;

/// The stage of a device: a group of one rank until the device joins another.
pub(crate) struct Stage(Box<dyn Collective>);

impl Stage {
    /// Wraps the collective that connects this rank to the others.
    pub(crate) fn of(collective: Box<dyn Collective>) -> Stage {
        Stage(collective)
    }

    /// Returns the rank of the device, and the number of ranks.
    pub(crate) fn place(&self) -> (usize, usize) {
        (self.0.rank(), self.0.members())
    }

    /// Replaces x by its sum over all ranks, added in rank order.
    pub(crate) fn sum(&mut self, x: &mut [f32]) {
        or_unwind(self.0.sum(x));
    }

    /// Concatenates the columns of all ranks: all (rows, sum of `widths`) = the `own` (rows, widths\[rank\])
    /// of every rank, in rank order. Both slices may be longer than needed.
    pub(crate) fn gather(&mut self, rows: usize, widths: &[usize], own: &[f32], all: &mut [f32]) {
        assert_eq!(widths.len(), self.0.members(), "one width for each rank is required; this is a bug");
        let (own, all) =
            (&own[..rows * widths[self.0.rank()]], &mut all[..rows * widths.iter().sum::<usize>()]);
        or_unwind(self.0.gather(rows, widths, own, all));
    }
}

impl Default for Stage {
    fn default() -> Stage {
        Stage(Box::new(Alone))
    }
}

impl fmt::Debug for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rank, count) = self.place();
        write!(f, "Stage({rank} of {count})")
    }
}

/// Unwinds if the stage was aborted.
fn or_unwind(outcome: Result<(), Aborted>) {
    outcome.unwrap_or_else(|aborted| resume_unwind(Box::new(aborted)));
}
