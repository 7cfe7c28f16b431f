//! Strategies: the ways to choose a token from logits, one file each, listed in one table.
//!
//! A strategy is a pure unit: it is built from its parameters once per request, and is a function of the
//! logits or candidates, the tokens so far, and the random numbers of a seed and a position. There are three
//! forms: an [`Edit`] changes logits, a [`Filter`] removes candidates or changes their temperature, and a
//! [`Choose`] takes a token. [`registry::TABLE`] lists them with their parameters; [`SamplingPlan::parse`]
//! checks a request against it. A [`HostSampler`] draws a row according to a plan.
//!
//! What a strategy knows of a sequence is the tokens, and for choosers a few numbers ([`Registers`]). So a
//! [`SequenceState`] can be rolled back at once, and a strategy needs no table that must be kept in step.
//!
//! To add a strategy, write its file and add its row to the table; docs/sampling.md is generated from it.
//! Invariant: a token depends on its logits, the plan, the tokens before it, the seed and the position only.

pub mod unit;

pub mod params;

pub mod history;

pub mod registry;

mod parse;

pub mod plan;

pub mod state;

pub mod sampler;

mod bad_words;

mod cutoffs;

mod dry;

mod fsd;

mod logit_bias;

mod min_p;

mod min_tokens;

mod mirostat;

mod no_repeat_ngram;

mod penalties;

mod pool;

mod tail_free;

mod temperature;

mod thinking;

mod token_filter;

mod top_k;

mod top_n_sigma;

mod top_p;

mod typical;

mod xtc;

#[cfg(test)]
mod tests;

pub use history::History;
pub use params::{AnyVocabulary, Kind, Param, ParamError, Values, Vocabulary};
pub use plan::{CheckedDefaults, DeviceSampling, LogprobsMode, SamplingPlan};
pub use sampler::{EmptyMask, HostSampler, Row};
pub use state::{Checkpoint, Draw, SequenceState};
pub use unit::{Choose, Edit, Filter, Place, Registers, Strategy, Unit};
