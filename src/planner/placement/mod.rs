//! Plans where the weights of a model lie on one machine, and how many sequences share a step: a policy for
//! a memory that may be smaller than the model.
//!
//! The machine is described by measured rates (`rates`), the model by the cost of its steps (`cost`). They
//! give the time of a job (`job`), and the best policy is searched among choices that fit (`search`).
//!
//! Invariant: nothing is measured or opened here, and memory is counted by whoever asks for a plan.

mod choices;

mod cost;

mod job;

mod rates;

mod search;

pub use choices::{slot_counts, token_budgets};
pub use cost::{ModelCost, StepPolicy, StepTime};
pub use job::Workload;
pub use rates::{AttentionRates, AttentionShape, DiskRates, MachineRates, RowCurve};
pub use search::{
    Bound, Choice, MemoryFit, Objective, PlacementProblem, PlannedPolicy, Prediction, Predictor, Tier,
    Variant,
};

#[cfg(test)]
mod tests;
