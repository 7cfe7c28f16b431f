//! From logits to tokens and from hidden states to vectors: the meaning of a request's sampling and pooling
//! parameters, and when a sequence ends.
//!
//! [`strategies`] has all ways to choose a token, for rows that the host samples.
//! `validate` checks a request's parameters, `sample_row` converts them to a device's sampling
//! parameters, and the re-exported reference functions for sampling and `logprobs` define the result that
//! every device must give.
//! Invariant: pure functions. A token depends on its logits, the parameters, the seed and its position only.

pub mod sampling;

pub mod strategies;

pub mod finish;

pub mod pooling;

#[cfg(test)]
mod tests;

pub use finish::{finish_reason, logit_biases};
pub use mainstem_kernels::reference::{LogProbs, logprobs, sample};
pub use pooling::pool;
pub use sampling::{sample_row, validate};
