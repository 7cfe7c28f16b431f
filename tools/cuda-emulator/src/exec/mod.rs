//! Execution of a launch: CTAs one after another (all at once if the launch is cooperative), warps in
//! seeded order, the lanes of a warp in lock-step.
//!
//! Invariant: nothing that a kernel does makes the emulator panic; it becomes a finding.

mod access;
mod atomics;
mod begin;
mod calls;
mod copies;
mod cta;
mod exchange;
mod launch;
mod matrices;
mod run;
mod sync;
mod warp;

pub(crate) use launch::{Config, Request, launch};

/// A small generator of pseudo-random numbers (SplitMix64).
#[derive(Clone, Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    /// The next number.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// A number below `bound`.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }
}
