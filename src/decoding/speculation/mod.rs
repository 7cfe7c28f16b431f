//! Speculative decoding, as far as it needs no device: which drafts are accepted, drafts that are copied
//! from the text, and how many drafts to make.
//!
//! A step computes K + 1 rows of a sequence: the last known token and K drafts. Row i gives the token s_i by
//! an [`AcceptanceRule`]; s_0 to s_a are emitted, where each of s_0 to s_(a - 1) equals the draft after it
//! and s_a does not, or has none.
//!
//! Invariant: pure functions and plain data. Only the emitted tokens change the state of a sequence.

pub mod rule;

pub mod verifier;

pub mod draft;

pub mod lookup;

pub mod stats;

pub mod costs;

pub mod depth;

#[cfg(test)]
mod tests;

pub use costs::{StepCost, StepCosts, StepWork};
pub use depth::{DepthPlanner, Speculating};
pub use draft::draft_row;
pub use lookup::PromptLookup;
pub use rule::{AcceptanceRule, UnknownRule};
pub use stats::{MAX_DEPTH, SpeculationStats};
pub use verifier::Proposal;
