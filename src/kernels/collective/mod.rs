//! What the members of a stage exchange: sums, and columns side by side.
//!
//! Each member holds the same rows of the residual stream and a part of the weights. A message is a run of numbers in the
//! host's memory, and no other memory is shared: threads of one process can be behind this door, and processes of several
//! (MPI). A device with memory of its own adds up where its numbers are, by what its kind has for that (NCCL): its door is
//! [`crate::Backend::reduce`], and of this one it needs who the members are and one exchange, over which they agree on
//! theirs. What is open: whoever waits there is not woken when the stage is given up, for only this door tells of that, and
//! only who is in it; such a device has to be told by its own means.
//! Invariant: members call the same operations in the same order with the same sizes, and get the same bits, which do not
//! depend on who came first.

pub mod local;

/// The stage was given up while this member was in it: somebody failed, or did not come in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the stage was given up")]
pub struct Aborted;

/// One member's place among those of its stage.
pub trait Collective: Send {
    /// This member's place, below [`Collective::members`].
    fn rank(&self) -> usize;

    /// Devices of the stage, this one counted.
    fn members(&self) -> usize;

    /// x = the sum of all members' x, added in the order of their ranks.
    fn sum(&mut self, x: &mut [f32]) -> Result<(), Aborted>;

    /// all (rows, sum of `widths`) = everybody's own (rows, widths\[rank\]), side by side by rank, bit for bit.
    fn gather(&mut self, rows: usize, widths: &[usize], own: &[f32], all: &mut [f32]) -> Result<(), Aborted>;
}

/// The only member of its stage.
#[derive(Clone, Copy, Debug, Default)]
pub struct Alone;

impl Collective for Alone {
    fn rank(&self) -> usize {
        0
    }

    fn members(&self) -> usize {
        1
    }

    fn sum(&mut self, _: &mut [f32]) -> Result<(), Aborted> {
        Ok(())
    }

    fn gather(&mut self, rows: usize, widths: &[usize], own: &[f32], all: &mut [f32]) -> Result<(), Aborted> {
        let numbers = rows * widths[0];
        all[..numbers].copy_from_slice(&own[..numbers]);
        Ok(())
    }
}
