//! Plans where the weights and KV caches of a model lie on one machine, and how many sequences share a step:
//! a policy for memories that may be smaller than the model.
//!
//! The machine is described by measured rates (`rates`), the model by the cost of its steps (`cost`), and by
//! what these move between the tiers (`traffic`). They give the time of a job (`job`, `predictor`), and the
//! best policy is searched among choices that fit (`search`).
//!
//! Invariant: nothing is measured or opened here, and memory is counted by whoever asks for a plan.

mod choices;

mod cost;

mod job;

mod predictor;

mod rates;

mod search;

mod step;

mod traffic;

pub use choices::{Choice, slot_counts, token_budgets};
pub use cost::ModelCost;
pub use job::Workload;
pub use predictor::{Bound, Prediction, Predictor, Variant};
pub use rates::{AttentionRates, AttentionShape, DiskRates, MachineRates, RowCurve};
pub use search::{MemoryFit, Objective, PlacementProblem, PlannedPolicy, TierLimits};
pub use step::StepTime;
pub use traffic::{ByTier, Links, Route, StageData, StepPolicy};

#[cfg(test)]
mod tests;
