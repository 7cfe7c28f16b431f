//! From logits to tokens and from hidden states to vectors.
//!
//! `strategies` has all ways to choose a token, `speculation` the rules for drafts, `host` the threads that
//! compute the host's part, `beams` the search for sequences of tokens, and the re-exported reference
//! functions `sample` and `logprobs` define the result that every device must give.
//! Invariant: a token depends on its logits, the request's parameters, the tokens before it, the seed and its
//! position only; with some rules for drafts, also on the draft in its place, and of a beam search, on the
//! logits of the other beams.

pub mod strategies;

pub mod speculation;

pub mod pooling;

pub mod dense;

pub mod host;

pub mod beams;

pub mod time_fit;

#[cfg(test)]
mod tests;

pub use beams::{BeamParams, BeamSearch, BeamStep, EarlyStopping, Hypothesis, NewBeam};
pub use dense::{Classifier, DenseLayer, LayerNorm, OutputFunction, apply_all, dot};
pub use host::{Constraint, HostPool, HostSequence, HostWork};
pub use mainstem_kernels::reference::{LogProbs, logprobs, sample};
pub use pooling::{Pooling, RowMean, pool};
pub use speculation::AcceptanceRule;
pub use strategies::SamplingPlan;
