//! Bookkeeping of slots and KV pages: which sequence holds them, the sliding window of occupied slots, and
//! the tokens that pages hold.
//!
//! Invariant: pure bookkeeping. Nothing here touches a device, waits, or knows what a sequence is.

pub mod shuffle;

pub mod slots;

pub mod prefix;

mod group;

pub mod window;

pub mod pages;

pub use pages::{Lease, NoLease, PageDemand, PagePool};
pub use prefix::{PageHash, TokenChain};
pub use slots::{SlotMap, split_slots};
pub use window::WindowCache;

/// Reproducible random choices for the tests of this module.
#[cfg(test)]
mod dice {
    use mainstem_kernels::random::philox;

    pub struct Dice {
        seed: u32,
        throws: u32,
    }

    impl Dice {
        pub fn new(seed: u32) -> Dice {
            Dice { seed, throws: 0 }
        }

        /// A number in `0..sides`.
        pub fn below(&mut self, sides: usize) -> usize {
            self.throws += 1;
            philox([self.throws, 0, 0, 0], [self.seed, 0])[0] as usize % sides
        }
    }
}
