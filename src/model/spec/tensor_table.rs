//! The table of tensor names of a specification file, as written.
//!
//! Invariant: names are patterns; only numbers of layers and experts are filled in.

use super::setting::{OneOrMore, Setting};
use super::table_macro::table;
use schemars::JsonSchema;
use serde::Deserialize;

table! {
    /// Names of tensors: `{i}` stands for the layer, `{e}` for the expert, `{g}` and `{j}` for a group of
    /// layers and a layer of it (`size.layer_groups`). Of several names, the first that exists is used. A
    /// bias is named like its weight, with `bias` for `weight` (`beta` for `gamma`).
    TensorTable {
        /// Whether matrices of linear layers are stored as (in, out) instead of (out, in). Default: false.
        transposed: Setting<bool>,
        embedding: OneOrMore<String>,
        /// Table of learned positions.
        positions: OneOrMore<String>,
        token_types: OneOrMore<String>,
        embedding_norm: OneOrMore<String>,
        project_in: OneOrMore<String>,
        /// Table of relative position biases, (buckets, heads). With `{i}`, each layer has its own.
        relative_bias: OneOrMore<String>,
        /// Disentangled: vectors of distances, (2 * buckets, hidden), and their norm.
        distances: OneOrMore<String>,
        distance_norm: OneOrMore<String>,
        /// Disentangled: projections of distances to queries and to keys.
        distance_q: OneOrMore<String>,
        distance_k: OneOrMore<String>,
        /// Norm before attention, or with `post` after its residual.
        attention_norm: OneOrMore<String>,
        /// With `sandwich` or `output`: norm of the attention output.
        attention_out_norm: OneOrMore<String>,
        /// Query, key and value projections in one matrix.
        qkv: OneOrMore<String>,
        /// Latent: from the latent of queries, if there is one.
        q: OneOrMore<String>,
        /// Latent: the latent of queries, and its norm.
        q_a: OneOrMore<String>,
        q_a_norm: OneOrMore<String>,
        /// Latent: the latent of keys and values, then the rotated part of the key.
        kv_a: OneOrMore<String>,
        /// Latent: norm of the latent of keys and values.
        kv_a_norm: OneOrMore<String>,
        /// Latent: for each head its key without positions, then its value.
        kv_b: OneOrMore<String>,
        /// Latent: of each head the part of `kv_b` for its key, transposed, and the one for its value, in
        /// files that have these in place of `kv_b`.
        k_b: OneOrMore<String>,
        v_b: OneOrMore<String>,
        k: OneOrMore<String>,
        v: OneOrMore<String>,
        o: OneOrMore<String>,
        /// Attention sinks, (heads).
        sinks: OneOrMore<String>,
        /// With `{h}`, each head's weights are a tensor of their own.
        q_norm: OneOrMore<String>,
        k_norm: OneOrMore<String>,
        cross_norm: OneOrMore<String>,
        cross_out_norm: OneOrMore<String>,
        cross_q: OneOrMore<String>,
        cross_k: OneOrMore<String>,
        cross_v: OneOrMore<String>,
        /// Key and value projections of cross-attention in one matrix.
        cross_kv: OneOrMore<String>,
        cross_o: OneOrMore<String>,
        /// Norm before the MLP, or with `post` after its residual.
        mlp_norm: OneOrMore<String>,
        /// With `sandwich` or `output`: norm of the MLP output.
        mlp_out_norm: OneOrMore<String>,
        /// Gate projection of a gated MLP, whose output goes through the activation.
        gate: OneOrMore<String>,
        up: OneOrMore<String>,
        down: OneOrMore<String>,
        /// Gate and up projections in one matrix.
        gate_up: OneOrMore<String>,
        /// Xielu, `p x² + l x` for `x > 0` and `n (e^min(x, e) - 1 - x) + l x` otherwise: a number of which p
        /// is the softplus.
        xielu_positive: OneOrMore<String>,
        /// A number whose softplus plus l is n.
        xielu_negative: OneOrMore<String>,
        /// The number l.
        xielu_linear: OneOrMore<String>,
        /// The number e.
        xielu_bound: OneOrMore<String>,
        router: OneOrMore<String>,
        /// Correction of the scores by which experts are chosen, (experts).
        router_correction: OneOrMore<String>,
        /// Gate projections of the experts. A name without `{e}` is one tensor (experts, out, in).
        expert_gate: OneOrMore<String>,
        /// Gate and up projections of the experts in one matrix. The bias of a name without `.weight` may
        /// also end with `_bias`.
        expert_gate_up: OneOrMore<String>,
        expert_up: OneOrMore<String>,
        expert_down: OneOrMore<String>,
        shared_gate: OneOrMore<String>,
        shared_gate_up: OneOrMore<String>,
        shared_up: OneOrMore<String>,
        shared_down: OneOrMore<String>,
        shared_router: OneOrMore<String>,
        /// Norm after the last layer.
        norm: OneOrMore<String>,
        project_out: OneOrMore<String>,
        head_transform: OneOrMore<String>,
        head_transform_norm: OneOrMore<String>,
        head: OneOrMore<String>,
        /// Bias of the head. Default: the bias name that belongs to `head`.
        head_bias: OneOrMore<String>,
        classifier_dense: OneOrMore<String>,
        classifier_norm: OneOrMore<String>,
        /// Matrix of the classifier. Default in a decoder: `score.weight`.
        classifier: OneOrMore<String>,
    }
}
