//! The tables of a specification file, as written.
//!
//! The same tables can be at the top of the file, under `encoder` and `decoder` for one of the two stacks,
//! and in each `[[override]]` for some models or some layers. Later values override earlier ones, value by
//! value.
//!
//! Invariant: every value is optional here; required values are checked when the specification is resolved.

use super::classifier_table::ClassifierTable;
use super::moe_table::MoeTable;
use super::setting::{OneOrMore, Setting};
use super::table_macro::table;
use super::tensor_table::TensorTable;
use super::words::{
    ActivationName, AttentionKind, HeadKind, Kind, MaskName, MlpKind, NoneWord, NormName, Placement,
    PositionKind, QkNorm, QkvLayout, QkvOrder, RopeStyleName, SinusoidFrequencies, SinusoidLayout, StackName,
    Wiring,
};
use schemars::JsonSchema;
use serde::Deserialize;
use std::collections::BTreeMap;

/// Defines a struct with the tables that describe layers, and some fields of its own.
macro_rules! with_tables {
    ($(#[$about:meta])* $name:ident { $($(#[$field_about:meta])* $field:ident: $ty:ty,)* }) => {
        $(#[$about])*
        #[derive(Clone, Debug, Deserialize, JsonSchema)]
        #[serde(deny_unknown_fields)]
        pub struct $name {
            $($(#[$field_about])* pub $field: $ty,)*
            #[serde(default)]
            pub size: SizeTable,
            #[serde(default)]
            pub embedding: EmbeddingTable,
            #[serde(default)]
            pub position: PositionTable,
            #[serde(default)]
            pub norm: NormTable,
            #[serde(default)]
            pub residual: ResidualTable,
            #[serde(default)]
            pub attention: AttentionTable,
            #[serde(default)]
            pub cross: CrossTable,
            #[serde(default)]
            pub mlp: MlpTable,
            #[serde(default)]
            pub moe: MoeTable,
            #[serde(default)]
            pub head: HeadTable,
            #[serde(default)]
            pub classifier: ClassifierTable,
            #[serde(default)]
            pub tensors: TensorTable,
        }

        impl $name {
            /// Returns only the tables.
            pub fn tables(&self) -> Tables {
                let all = self.clone();
                Tables {
                    size: all.size,
                    embedding: all.embedding,
                    position: all.position,
                    norm: all.norm,
                    residual: all.residual,
                    attention: all.attention,
                    cross: all.cross,
                    mlp: all.mlp,
                    moe: all.moe,
                    head: all.head,
                    classifier: all.classifier,
                    tensors: all.tensors,
                }
            }
        }
    };
}

/// All tables that describe layers.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub struct Tables {
    pub size: SizeTable,
    pub embedding: EmbeddingTable,
    pub position: PositionTable,
    pub norm: NormTable,
    pub residual: ResidualTable,
    pub attention: AttentionTable,
    pub cross: CrossTable,
    pub mlp: MlpTable,
    pub moe: MoeTable,
    pub head: HeadTable,
    pub classifier: ClassifierTable,
    pub tensors: TensorTable,
}

impl Tables {
    /// Returns these values; missing ones are taken from `base`.
    pub fn over(&self, base: &Tables) -> Tables {
        Tables {
            size: self.size.over(&base.size),
            embedding: self.embedding.over(&base.embedding),
            position: self.position.over(&base.position),
            norm: self.norm.over(&base.norm),
            residual: self.residual.over(&base.residual),
            attention: self.attention.over(&base.attention),
            cross: self.cross.over(&base.cross),
            mlp: self.mlp.over(&base.mlp),
            moe: self.moe.over(&base.moe),
            head: self.head.over(&base.head),
            classifier: self.classifier.over(&base.classifier),
            tensors: self.tensors.over(&base.tensors),
        }
    }
}

with_tables! {
    /// The specification of a family of models: known blocks, how they are connected, and the names of their
    /// tensors.
    SpecText {
        /// Name of a built-in specification that this one is derived from: it has every value of the base
        /// that it does not give itself, except `model_types` and `note`. Overrides of the base come first,
        /// without the values that this file gives for all layers. Nothing is inherited for blocks that it
        /// does not have.
        base: Option<String>,
        /// Values of config.json's `model_type` that select this file.
        model_types: Vec<String>,
        /// The stacks of the model.
        #[serde(default = "decoder")]
        kind: Kind,
        /// A note about the family, for readers.
        note: Option<String>,
        /// Prefixes that tensor names have in some files.
        #[serde(default)]
        prefixes: Vec<String>,
        /// Prefixes of the tensor names below that some files lack, such as those of models without a head.
        #[serde(default)]
        optional_prefixes: Vec<String>,
        /// Tensors that a file may have although they are unused: `{i}` matches a number, `*` matches
        /// anything.
        #[serde(default)]
        ignored: Vec<String>,
        /// Keys of config.json that would change what is computed, each with its supported values.
        #[serde(default, alias = "neutral")]
        supported_values: BTreeMap<String, Vec<serde_json::Value>>,
        /// Keys of config.json that the model's own code ignores, though in other models they change what is
        /// computed.
        #[serde(default)]
        ignored_keys: Vec<String>,
        /// Values for the encoder only.
        #[serde(default)]
        encoder: Tables,
        /// Values for the decoder only.
        #[serde(default)]
        decoder: Tables,
        /// Values for some models or some layers only; later overrides take precedence.
        #[serde(default, rename = "override")]
        overrides: Vec<Override>,
    }
}

with_tables! {
    /// Values for some models or some layers.
    Override {
        /// Conditions that a model must meet, all of them. Default: every model.
        when: Option<OneOrMore<Condition>>,
        /// The stack it applies to. Default: both.
        stack: Option<StackName>,
        /// The layers it applies to. Default: all layers, and the parts outside of layers.
        layers: Option<LayerPick>,
    }
}

/// A condition on a model.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Condition {
    /// The key of config.json to test.
    pub key: Option<OneOrMore<String>>,
    /// The tensor to test, instead of a key.
    pub tensor: Option<String>,
    /// The value to compare with; a tensor has the value true if it exists. Default: true.
    pub is: Option<serde_json::Value>,
    /// Tests whether the key or tensor exists, instead of its value.
    pub exists: Option<bool>,
    /// The value of a missing key. Default: the condition is false if the key is missing.
    pub default: Option<serde_json::Value>,
}

table! {
    /// A selection of layers: those that meet all conditions given.
    LayerPick {
        /// A key of config.json with a list of one entry per layer. If it exists, it alone decides.
        key: OneOrMore<String>,
        /// The list entry that selects a layer. Default: true.
        is: serde_json::Value,
        /// The indices of the layers.
        only: Setting<Vec<usize>>,
        /// The first layer.
        from: Setting<usize>,
        /// The end of the range, exclusive.
        to: Setting<usize>,
        /// Every n-th layer, starting with `at`.
        every: Setting<usize>,
        /// The first layer of `every`. Default: 0.
        at: Setting<usize>,
    }
}

table! {
    /// Sizes of the whole model.
    SizeTable {
        /// Vocabulary size including padding: rows of the embedding table.
        vocab: Setting<usize>,
        /// Width of the residual stream.
        hidden: Setting<usize>,
        layers: Setting<usize>,
        /// Number of groups that layers are divided into, one after another, in which layers have the same
        /// weights: `{g}` in the names of tensors is the group. Default: 1.
        layer_groups: Setting<usize>,
        /// Number of layers of a group that have weights of their own, and take turns: `{j}` in the names of
        /// tensors is the layer's number among these. Default: 1.
        group_layers: Setting<usize>,
        /// Maximum sequence length in tokens.
        context: Setting<usize>,
    }
}

table! {
    /// The token embedding, which maps tokens to the residual stream.
    EmbeddingTable {
        /// Width of a token's row. Default: `size.hidden`; another width requires `tensors.project_in`.
        width: Setting<usize>,
        /// Whether the projection to `size.hidden` comes last: positions, token types and the norm are then
        /// as wide as a token's row. Default: false.
        project_last: Setting<bool>,
        /// Whether the projection to `size.hidden` has a bias. Default: false.
        project_bias: Setting<bool>,
        /// Factor of a token's row. Default: 1.
        scale: Setting<f64>,
        /// Whether the sum of token and position embedding is normalized. Default: false.
        norm: Setting<bool>,
        /// Whether the norm comes before positions and token types are added. Default: false.
        norm_first: Setting<bool>,
        /// Rows of `tensors.token_types`, the first of which is added to all tokens. Default: 0, which means
        /// none.
        token_types: Setting<usize>,
    }
}

table! {
    /// Representation of positions.
    PositionTable {
        kind: Setting<PositionKind>,
        /// Rope: which dimensions form a rotated pair. Default: `neox`.
        style: Setting<RopeStyleName>,
        /// Rope: number of leading dimensions of a head that are rotated. Default: all, times config.json's
        /// `partial_rotary_factor`.
        dims: Setting<usize>,
        /// Rope: the base of the frequencies. Default: config.json's `rope_theta`, or 10000.
        theta: Setting<f64>,
        /// Rope: scaling of the frequencies: `none`, or a key of config.json whose object has the form of
        /// `rope_scaling`. Default: `rope_scaling`.
        scaling: ScalingSetting,
        /// Learned, sinusoidal: offset added to a position. Default: 0.
        offset: Setting<usize>,
        /// Learned: rows of the table. Default: `size.context` + `offset`.
        rows: Setting<usize>,
        /// Sinusoidal: order of sines and cosines. Default: `concatenated`.
        layout: Setting<SinusoidLayout>,
        /// Sinusoidal: frequencies of sines and cosines. Default: `to_last` if `layout` is `concatenated`,
        /// otherwise `by_width`.
        frequencies: Setting<SinusoidFrequencies>,
        /// Sinusoidal: factor of the table. Alibi: factor of the slopes. Default: 1.
        scale: Setting<f64>,
        /// Alibi: the last of the slopes is 2 to the power of minus this number, if the number of heads is a
        /// power of two. Default: 8.
        alibi_max: Setting<f64>,
        /// Relative bias: number of distance buckets, each with its own bias. Disentangled: number of
        /// distance buckets in either direction, or 0 if there is one for each distance up to `max_distance`.
        buckets: Setting<usize>,
        /// Relative bias and disentangled: distance from which on all distances share the last bucket.
        max_distance: Setting<usize>,
        /// Disentangled: whether the vectors of distances are normalized. Default: false.
        norm: Setting<bool>,
        /// Disentangled: whether the layer's query and key projections are those of distances, too. Default:
        /// false.
        shared: Setting<bool>,
    }
}

/// Scaling of the rotary frequencies.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "expected \"none\" or { key = … }")]
pub enum ScalingSetting {
    /// No scaling.
    Fixed(NoneWord),
    /// The object under a key of config.json.
    Sought { key: OneOrMore<String> },
}

table! {
    /// Normalization.
    NormTable {
        kind: Setting<NormName>,
        /// Epsilon, added to the variance or the mean of squares.
        eps: Setting<f64>,
        /// Whether a bias is added. Default: true for `layer`, false for `rms`.
        bias: Setting<bool>,
        /// Whether the normalized numbers are multiplied by weights. Default: true. Without weights there is
        /// no bias.
        weight: Setting<bool>,
        /// Constant added to each weight: 1 if files store weights around 0. Default: 0.
        offset: Setting<f64>,
        /// Placement of the sub-layers' norms. Default: `pre`.
        placement: Setting<Placement>,
        /// Whether there is a norm after the last layer. Default: true, unless `placement` is `post` or
        /// `none`.
        last: Setting<bool>,
    }
}

table! {
    /// Connection of sub-layers and residual stream.
    ResidualTable {
        wiring: Setting<Wiring>,
        /// Factor of the sub-layer outputs that are added to the residual stream. Default: 1.
        scale: Setting<f64>,
    }
}

table! {
    /// Self-attention.
    AttentionTable {
        /// Kind of attention. Default: `heads`.
        kind: Setting<AttentionKind>,
        /// Query heads.
        heads: Setting<usize>,
        /// Key and value heads. Default: `heads`. Latent: not used.
        kv_heads: Setting<usize>,
        /// Latent: width of the latent vector of queries. Default: 0, which means none.
        q_rank: Setting<usize>,
        /// Latent: width of the latent vector of keys and values.
        kv_rank: Setting<usize>,
        /// Latent: width of the part of a query or key without positions.
        nope_dim: Setting<usize>,
        /// Latent: width of the rotated part of a query or key.
        rope_dim: Setting<usize>,
        /// Width of a query or key. Default: `size.hidden / attention.heads`.
        head_dim: Setting<usize>,
        /// Width of a value. Default: `attention.head_dim`; latent: `attention.nope_dim`.
        value_dim: Setting<usize>,
        /// Whether all four projections have biases. Default: false.
        bias: Setting<bool>,
        /// Whether the query, key and value projections have biases. Default: `bias`.
        qkv_bias: Setting<bool>,
        /// Whether the output projection has a bias. Default: `bias`.
        out_bias: Setting<bool>,
        /// Storage of the query, key and value projections. Default: `separate`.
        qkv: Setting<QkvLayout>,
        /// `fused_grouped`: number of groups. Default: `attention.kv_heads`.
        qkv_groups: Setting<usize>,
        /// Order of queries, keys and values in one matrix, or in a group of it. Default: `qkv`.
        qkv_order: Setting<QkvOrder>,
        /// Bound of the numbers of queries, keys and values: they are limited to the range from `-clip` to
        /// `clip`. Default: 0, which means no bound.
        clip: Setting<f64>,
        /// Norms of queries and keys. Default: `none`.
        qk_norm: Setting<QkNorm>,
        /// Whether queries and keys are rotated before they are normalized. Default: false.
        qk_norm_last: Setting<bool>,
        /// Kind of the query and key norms; latent: of the norms of latents. Default: `norm.kind`.
        qk_norm_kind: Setting<NormName>,
        /// Whether the query and key norms have biases, if they are of kind `layer`. Default: `norm.bias`.
        qk_norm_bias: Setting<bool>,
        /// Epsilon of the query and key norms. Default: `norm.eps`.
        qk_norm_eps: Setting<f64>,
        /// Whether the query and key norms have weights. Default: true.
        qk_norm_weight: Setting<bool>,
        /// Factor g of the growth of queries with their position p: they are multiplied by
        /// `1 + g * ln(1 + floor((p + 1) / attention.growth_interval))`. Default: 0, which means none.
        growth: Setting<f64>,
        /// Number of positions between which queries grow.
        growth_interval: Setting<f64>,
        /// Factor of the dot products of queries and keys. Default: `1 / sqrt(attention.head_dim)`; latent:
        /// `1 / sqrt(attention.nope_dim + attention.rope_dim)`, times the factor that YaRN's `mscale_all_dim`
        /// gives.
        scale: Setting<f64>,
        /// Soft cap of the scores, applied with a hyperbolic tangent. Default: 0, which means no cap.
        softcap: Setting<f64>,
        /// Whether it has norms, placed by `norm.placement`. Default: true.
        norm: Setting<bool>,
        /// Whether each head has a sink, a score without a value. Default: false.
        sinks: Setting<bool>,
        /// The attention mask. Default: `causal` in a decoder and `bidirectional` in an encoder.
        mask: Setting<MaskName>,
        /// Sliding window. Causal: visible positions including the own one. Bidirectional: visible positions
        /// on each side. Causal layers with a window keep K and V of the window and of one step only, unless
        /// the model has an encoder. Default: 0, which means no window.
        window: Setting<usize>,
        /// Causal: number of positions of a chunk. A position sees those of its own chunk only, and K and V
        /// are kept as with a window of that size. Default: 0, which means no chunks.
        chunk: Setting<usize>,
    }
}

table! {
    /// Cross-attention of a decoder to the encoder's output; its sizes are those of self-attention.
    CrossTable {
        /// Whether all four projections have biases. Default: `attention.bias`.
        bias: Setting<bool>,
        /// Factor of the dot products of queries and keys. Default: `attention.scale`.
        scale: Setting<f64>,
    }
}

table! {
    /// The feed-forward network.
    MlpTable {
        kind: Setting<MlpKind>,
        /// Width of the inner layer.
        width: Setting<usize>,
        /// Whether it has norms, placed by `norm.placement`. Default: true.
        norm: Setting<bool>,
        activation: Setting<ActivationName>,
        /// Whether all projections have biases. Default: false.
        bias: Setting<bool>,
        /// Whether gate and up are stored as one matrix, the gate first. Default: false.
        fused: Setting<bool>,
    }
}

table! {
    /// The head, which maps the residual stream to the model's output.
    HeadTable {
        /// Kind of head. Default: `lm`.
        kind: Setting<HeadKind>,
        /// Whether the head's matrix is the embedding table. Default: false.
        tied: Setting<bool>,
        /// Whether a bias is added to the logits. Default: false.
        bias: Setting<bool>,
        /// Whether each row of the matrix is scaled to an L2 norm of 1. Default: false.
        #[serde(alias = "normalised")]
        normalize_rows: Setting<bool>,
        /// Factor of the logits. Default: 1.
        scale: Setting<f64>,
        /// Soft cap of the logits, applied with a hyperbolic tangent. Default: 0, which means no cap.
        softcap: Setting<f64>,
        /// Whether a linear layer, an activation and a norm precede the head's matrix, as in masked language
        /// models. Default: false.
        transform: Setting<bool>,
        /// Whether the transform's linear layer has a bias. Default: true.
        transform_bias: Setting<bool>,
        /// Activation of the transform. Default: `mlp.activation`.
        activation: Setting<ActivationName>,
    }
}

/// The default of `kind`.
fn decoder() -> Kind {
    Kind::Decoder
}
