//! A CTA: its warps, shared memory and barriers.

use super::warp::Warp;
use crate::memory::{CtaClock, Known, Region};

/// The barriers of a CTA.
pub(super) const BARRIERS: usize = 16;

/// A barrier that some warps have reached.
#[derive(Clone, Debug, Default)]
pub(super) struct BarrierState {
    /// Threads that must arrive; none for all.
    pub(super) expected: Option<u32>,
    pub(super) arrived: u32,
    /// Warps that wait, and those that only arrived.
    pub(super) warps: u64,
    /// The clocks of those who arrived, joined.
    pub(super) clock: Known,
    pub(super) count: u32,
    pub(super) all: bool,
    pub(super) any: bool,
}

/// A CTA.
#[derive(Debug, Default)]
pub(super) struct Cta {
    pub(super) index: [u32; 3],
    pub(super) shared: Region,
    pub(super) warps: Vec<Warp>,
    pub(super) barriers: Vec<Option<BarrierState>>,
    pub(super) clock: Option<CtaClock>,
}

impl Cta {
    /// Warps that can run.
    pub(super) fn ready_warps(&self) -> Vec<usize> {
        (0..self.warps.len()).filter(|at| self.warps[*at].live != 0 && !self.warps[*at].blocked).collect()
    }
}
