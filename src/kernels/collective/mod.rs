//! Collective operations among the tensor-parallel ranks of a stage: all-reduce and all-gather.
//!
//! Each rank holds the same rows of the residual stream and a part of the weights. The operations exchange
//! slices of f32 in host memory and share no other memory, so that an implementation can connect threads of
//! one process or several processes (MPI). A device with its own memory reduces there, with the means of its
//! kind (NCCL), in [`crate::Backend::all_reduce`]; it uses [`Collective`] only to learn the ranks and for one
//! exchange that sets up its own communicator.
//!
//! Open problem: when the stage is aborted, only ranks that wait in a [`Collective`], and [`local::Waiters`],
//! are woken. A device that waits in its own communicator has to be woken by other means.
//!
//! Invariant: all ranks call the same operations in the same order with the same sizes. All get the same
//! bits, independent of the order of arrival.

pub mod local;

/// The error of an operation of an aborted stage or step: another rank failed, or did not arrive in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the stage was aborted")]
pub struct Aborted;

/// The connection of one rank to the other ranks of its stage.
pub trait Collective: Send {
    /// Returns the rank, less than [`Collective::rank_count`].
    fn rank(&self) -> usize;

    /// Returns the number of ranks of the stage.
    fn rank_count(&self) -> usize;

    /// All-reduce: replaces x by the sum of x over all ranks, added in rank order.
    fn all_reduce(&mut self, x: &mut [f32]) -> Result<(), Aborted>;

    /// All-gather of columns: all (rows, sum of `widths`) = the `own` (rows, widths\[rank\]) of every rank,
    /// side by side in rank order, bit for bit.
    fn all_gather(
        &mut self,
        rows: usize,
        widths: &[usize],
        own: &[f32],
        all: &mut [f32],
    ) -> Result<(), Aborted>;
}

/// The collective of a stage with a single rank.
#[derive(Clone, Copy, Debug, Default)]
pub struct SingleRank;

impl Collective for SingleRank {
    fn rank(&self) -> usize {
        0
    }

    fn rank_count(&self) -> usize {
        1
    }

    fn all_reduce(&mut self, _: &mut [f32]) -> Result<(), Aborted> {
        Ok(())
    }

    fn all_gather(
        &mut self,
        rows: usize,
        widths: &[usize],
        own: &[f32],
        all: &mut [f32],
    ) -> Result<(), Aborted> {
        let len = rows * widths[0];
        all[..len].copy_from_slice(&own[..len]);
        Ok(())
    }
}
