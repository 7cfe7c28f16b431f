//! The table of a mixture of experts in a specification file, as written.
//!
//! Invariant: every value is optional here; required values are checked when the specification is resolved.

use super::setting::Setting;
use super::table_macro::table;
use super::words::{ExpertLayout, GroupScoreName, ScoringName};
use schemars::JsonSchema;
use serde::Deserialize;

table! {
    /// A mixture of experts, for layers whose `mlp.kind` is `experts`.
    MoeTable {
        experts: Setting<usize>,
        /// Number of experts that each token is routed to.
        top_k: Setting<usize>,
        /// Width of one expert's inner layer.
        width: Setting<usize>,
        /// Function from the router's logits to scores. Default: `softmax`.
        scoring: Setting<ScoringName>,
        /// Nearby: the largest difference between logits `a` and `b <= a` that are near each other, relative
        /// to the greater of `a` and the magnitude of `b`.
        nearness: Setting<f64>,
        /// Whether the scores of the chosen experts are divided by their sum. Default: false.
        #[serde(alias = "renormalise")]
        normalize_scores: Setting<bool>,
        /// Factor of the final scores. Default: 1.
        scale: Setting<f64>,
        /// Whether `tensors.router_correction` is added to the scores by which experts are chosen. Default:
        /// false.
        correction: Setting<bool>,
        /// Number of groups that the experts are divided into, of which each token is routed to some.
        /// Default: 1.
        groups: Setting<usize>,
        /// Number of groups that each token is routed to. Default: `groups`.
        top_groups: Setting<usize>,
        /// Score of a group, by which groups are chosen. Default: `top_two`.
        group_score: Setting<GroupScoreName>,
        /// Whether a score multiplies the input of its expert, in place of the result. Default: false.
        weigh_input: Setting<bool>,
        /// Whether experts have a gate. Default: true.
        gated: Setting<bool>,
        /// Storage of the gate and up projections of an expert. Default: `separate`.
        gate_up: Setting<ExpertLayout>,
        /// Whether the matrices of experts are stored as (in, out). Default: `tensors.transposed`.
        transposed: Setting<bool>,
        /// Whether the projections of experts have biases. Default: false.
        bias: Setting<bool>,
        /// Whether the router has a bias. Default: false.
        router_bias: Setting<bool>,
        /// Inner width of the shared expert, which processes every token. Its gate and up are one matrix if
        /// `mlp.fused`. Default: 0, which means none.
        shared_width: Setting<usize>,
        /// Whether the shared expert's output is multiplied by the sigmoid of `tensors.shared_router`.
        /// Default: false.
        shared_router: Setting<bool>,
    }
}
