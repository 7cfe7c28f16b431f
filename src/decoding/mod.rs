//! Logits to token: what a request's sampling parameters mean, and when a sequence is over. Hidden states to vector.
//!
//! A request's parameters are checked by [`validate`], turned by [`compile`] into what a device draws by,
//! and [`draw`] and [`logprobs`] define the result that every device must give.
//! Invariant: pure functions. A token depends on its logits, the parameters, the seed and its position.

pub mod sampling;

pub mod finish;

pub mod pooling;

#[cfg(test)]
mod tests;

pub use finish::{biases, finish};
pub use mainstem_kernels::reference::{LogProbs, draw, logprobs};
pub use pooling::pool;
pub use sampling::{compile, validate};
