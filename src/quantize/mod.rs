//! Conversion of weights to other number formats: rules that select the formats, rounding, and the importance
//! matrix of a text.
//!
//! Invariant: this module knows number formats, names of matrices and backends, and no model. Loading a model
//! and writing one in other formats (`export`) are built on it.

mod importance_matrix;
mod observed;
mod requantize;
mod weight_rules;

pub use importance_matrix::{ImportanceMatrix, Observations, RoundingPolicy};
pub use observed::Observed;
pub use requantize::{Rounding, SourceRows, requantize};
pub use weight_rules::{MatrixNames, WeightRules};
