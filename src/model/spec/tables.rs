//! The tables of a specification file, as written.
//!
//! The same tables stand at the top of the file, under `encoder` and `decoder` for one of the two, and in each
//! `[[override]]` for some models or some layers. What is said later counts, value by value.
//!
//! Invariant: every value is optional here; what must be said is asked for where the numbers are filled in.

use super::setting::{OneOrMore, Setting, Value};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A table all of whose values may be left out, and what becomes of two of them.
macro_rules! table {
    ($(#[$about:meta])* $name:ident { $($(#[$field_about:meta])* $field:ident: $ty:ty,)* }) => {
        $(#[$about])*
        #[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
        #[serde(default, deny_unknown_fields)]
        pub struct $name { $($(#[$field_about])* pub $field: Option<$ty>,)* }

        impl $name {
            /// These values, and those of `base` where there are none.
            pub fn over(&self, base: &$name) -> $name {
                $name { $($field: self.$field.clone().or_else(|| base.$field.clone()),)* }
            }
        }
    };
}

/// A struct with the tables that describe layers, and some fields of its own.
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
            pub tensors: TensorTable,
        }

        impl $name {
            /// The tables alone.
            pub fn tables(&self) -> Tables {
                let $name { size, embedding, position, norm, residual, attention, cross, mlp, moe, head, tensors, .. } =
                    self.clone();
                Tables { size, embedding, position, norm, residual, attention, cross, mlp, moe, head, tensors }
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
    pub tensors: TensorTable,
}

impl Tables {
    /// These values, and those of `base` where there are none.
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
            tensors: self.tensors.over(&base.tensors),
        }
    }
}

with_tables! {
    /// A specification of a family of models: known blocks, how they are wired, and what their tensors are called.
    SpecText {
        /// Values of config.json's `model_type` this file is for.
        model_types: Vec<String>,
        /// What the model consists of.
        #[serde(default = "decoder")]
        kind: Kind,
        /// Something to know about it.
        note: Option<String>,
        /// What may stand before the names of tensors in some files.
        #[serde(default)]
        prefixes: Vec<String>,
        /// Tensors a file may hold and nobody needs: `{i}` stands for a number, `*` for anything.
        #[serde(default)]
        ignored: Vec<String>,
        /// Keys of config.json that would change what is computed, each with the values that it may have.
        #[serde(default)]
        neutral: BTreeMap<String, Vec<serde_json::Value>>,
        /// What holds for the encoder alone.
        #[serde(default)]
        encoder: Tables,
        /// What holds for the decoder alone.
        #[serde(default)]
        decoder: Tables,
        /// What holds for some models or some layers alone, the later before the earlier.
        #[serde(default, rename = "override")]
        overrides: Vec<Override>,
    }
}

with_tables! {
    /// Values that hold for some models or some layers.
    Override {
        /// For models of which all this is true; left out, for every one.
        when: Option<OneOrMore<Condition>>,
        /// For one of the two stacks; left out, for both.
        stack: Option<StackName>,
        /// For some layers; left out, for all, and for what stands around them.
        layers: Option<LayerPick>,
    }
}

/// Something that is true of a model or not.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Condition {
    /// The value of this key of config.json …
    pub key: Option<OneOrMore<String>>,
    /// … or whether there is a tensor of this name …
    pub tensor: Option<String>,
    /// … is this; true, if it is left out …
    pub is: Option<serde_json::Value>,
    /// … or is there at all, or not.
    pub exists: Option<bool>,
    /// What the key is taken for where it is missing; else the condition does not hold then.
    pub default: Option<serde_json::Value>,
}

table! {
    /// Which layers: those for which all that is said is true.
    LayerPick {
        /// A key of config.json with a list, one entry a layer. Where there is one, it alone decides …
        key: OneOrMore<String>,
        /// … by this entry.
        is: serde_json::Value,
        /// These.
        only: Setting<Vec<usize>>,
        /// From this one on.
        from: Setting<usize>,
        /// Up to this one, itself left out.
        to: Setting<usize>,
        /// Every so many, beginning with `at`.
        every: Setting<usize>,
        /// The first of `every`; 0 if it is left out.
        at: Setting<usize>,
    }
}

table! {
    /// Sizes of the whole.
    SizeTable {
        /// Tokens of the vocabulary, padding counted: rows of the embedding.
        vocab: Setting<usize>,
        /// Width of the residual stream.
        hidden: Setting<usize>,
        layers: Setting<usize>,
        /// Tokens of the longest sequence.
        context: Setting<usize>,
    }
}

table! {
    /// From tokens to the residual stream.
    EmbeddingTable {
        /// Of a token's row; `size.hidden` if it is left out. Another width needs `tensors.project_in`.
        width: Setting<usize>,
        /// Multiplies a token's row; 1 if it is left out.
        scale: Setting<f64>,
        /// The sum of token and position is normed; false if it is left out.
        norm: Setting<bool>,
        /// Rows of `tensors.token_types`, the first of which is added to all; 0, or left out, is none.
        token_types: Setting<usize>,
    }
}

table! {
    /// How positions come in.
    PositionTable {
        kind: Setting<PositionKind>,
        /// Rope: which dimensions form a pair; `halves` if it is left out.
        style: Setting<RopeStyleName>,
        /// Rope: leading dimensions of a head that are turned; all, times config.json's `partial_rotary_factor`, if it is
        /// left out.
        dims: Setting<usize>,
        /// Rope: the base of the frequencies; config.json's `rope_theta`, or 10000, if it is left out.
        theta: Setting<f64>,
        /// Rope: what changes the frequencies: `none`, or a key of config.json with an object as `rope_scaling` is; that
        /// one's, if it is left out.
        scaling: ScalingSetting,
        /// Learned, sinusoidal: added to a position; 0 if it is left out.
        offset: Setting<usize>,
        /// Learned: rows of the table; `size.context` + `offset` if it is left out.
        rows: Setting<usize>,
        /// Sinusoidal: where sines and cosines stand; `halves` if it is left out.
        layout: Setting<SinusoidLayout>,
        /// Sinusoidal: multiplies the table. Alibi: multiplies the slopes. 1 if it is left out.
        scale: Setting<f64>,
        /// Relative: kinds of distance that have a bias of their own.
        buckets: Setting<usize>,
        /// Relative: distances from which on all have the same bias.
        max_distance: Setting<usize>,
    }
}

/// What changes rotary frequencies.
#[derive(Clone, Debug, PartialEq, Deserialize, JsonSchema)]
#[serde(untagged, expecting = "expected \"none\" or { key = … }")]
pub enum ScalingSetting {
    /// Nothing.
    Fixed(NoneWord),
    /// An object of config.json.
    Sought { key: OneOrMore<String> },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum NoneWord {
    None,
}

table! {
    /// Normalisation.
    NormTable {
        kind: Setting<NormName>,
        /// Added to the variance, or the mean of squares.
        eps: Setting<f64>,
        /// A bias is added at last; true for `layer`, false for `rms`, if it is left out.
        bias: Setting<bool>,
        /// Added to each weight: 1 where files hold them around 0. 0 if it is left out.
        offset: Setting<f64>,
        /// Where the sub-layers' norms stand; `pre` if it is left out.
        placement: Setting<Placement>,
        /// One more stands behind the last layer; unless `placement` is `post` or `none`, if it is left out.
        last: Setting<bool>,
    }
}

table! {
    /// How sub-layers and the residual stream are wired.
    ResidualTable {
        wiring: Setting<Wiring>,
        /// Multiplies what a sub-layer adds; 1 if it is left out.
        scale: Setting<f64>,
    }
}

table! {
    /// Self-attention.
    AttentionTable {
        /// Query heads.
        heads: Setting<usize>,
        /// Key and value heads; as many as `heads` if it is left out.
        kv_heads: Setting<usize>,
        /// Width of a query or key; `size.hidden / attention.heads` if it is left out.
        head_dim: Setting<usize>,
        /// Width of a value; `attention.head_dim` if it is left out.
        value_dim: Setting<usize>,
        /// All four projections have biases; false if it is left out.
        bias: Setting<bool>,
        /// Those of queries, keys and values have; as `bias` if it is left out.
        qkv_bias: Setting<bool>,
        /// That of the output has; as `bias` if it is left out.
        out_bias: Setting<bool>,
        /// How the three projections are stored; `separate` if it is left out.
        qkv: Setting<QkvLayout>,
        /// Norms of queries and keys, before positions; `none` if it is left out.
        qk_norm: Setting<QkNorm>,
        /// Their kind; `norm.kind` if it is left out.
        qk_norm_kind: Setting<NormName>,
        /// Their epsilon; `norm.eps` if it is left out.
        qk_norm_eps: Setting<f64>,
        /// Multiplies the product of query and key; `1 / sqrt(attention.head_dim)` if it is left out.
        scale: Setting<f64>,
        /// Caps the scores by a hyperbolic tangent; 0, or left out, is no cap.
        softcap: Setting<f64>,
        /// It has norms, as `norm.placement` says; true if it is left out.
        norm: Setting<bool>,
        /// Who sees whom; `causal` in a decoder and `bidirectional` in an encoder if it is left out.
        mask: Setting<MaskName>,
        /// Causal: positions that are seen, the own one counted. Bidirectional: on either side. 0, or left out, is all.
        window: Setting<usize>,
    }
}

table! {
    /// Attention of a decoder to what the encoder made; sizes are those of self-attention.
    CrossTable {
        /// All four projections have biases; as `attention.bias` if it is left out.
        bias: Setting<bool>,
        /// Multiplies the product of query and key; as `attention.scale` if it is left out.
        scale: Setting<f64>,
    }
}

table! {
    /// The feed-forward network.
    MlpTable {
        kind: Setting<MlpKind>,
        /// Of its inner layer.
        width: Setting<usize>,
        /// It has norms, as `norm.placement` says; true if it is left out.
        norm: Setting<bool>,
        activation: Setting<ActivationName>,
        /// All its projections have biases; false if it is left out.
        bias: Setting<bool>,
        /// Gate and up are stored as one matrix, the gate first; false if it is left out.
        fused: Setting<bool>,
    }
}

table! {
    /// A mixture of experts, for layers whose `mlp.kind` is `experts`.
    MoeTable {
        experts: Setting<usize>,
        /// Experts that each token goes through.
        top_k: Setting<usize>,
        /// Of one expert's inner layer.
        width: Setting<usize>,
        /// `softmax` if it is left out.
        scoring: Setting<ScoringName>,
        /// The chosen scores are divided by their sum; false if it is left out.
        renormalise: Setting<bool>,
        /// Multiplies the scores at last; 1 if it is left out.
        scale: Setting<f64>,
        /// Experts have a gate; true if it is left out.
        gated: Setting<bool>,
        /// Inner width of the expert that every token goes through; 0, or left out, is none.
        shared_width: Setting<usize>,
        /// Its result is multiplied by the sigmoid of `tensors.shared_router`; false if it is left out.
        shared_router: Setting<bool>,
    }
}

table! {
    /// From the residual stream to what is asked for.
    HeadTable {
        /// `lm` if it is left out.
        kind: Setting<HeadKind>,
        /// Its matrix is the embedding's; false if it is left out.
        tied: Setting<bool>,
        /// A bias is added to the logits; false if it is left out.
        bias: Setting<bool>,
        /// Each row of the matrix has length 1; false if it is left out.
        normalised: Setting<bool>,
        /// Multiplies the logits; 1 if it is left out.
        scale: Setting<f64>,
        /// Caps the logits by a hyperbolic tangent; 0, or left out, is no cap.
        softcap: Setting<f64>,
        /// A linear layer, an activation and a norm come before it, as in masked language models; false if it is left
        /// out.
        transform: Setting<bool>,
        /// That linear layer has a bias; true if it is left out.
        transform_bias: Setting<bool>,
        /// The transform's; `mlp.activation` if it is left out.
        activation: Setting<ActivationName>,
    }
}

table! {
    /// Names of tensors; `{i}` stands for the layer, `{e}` for the expert. Of several names the first that is there counts.
    /// A bias is called as its weight, with `.bias` for `.weight` (`.beta` for `.gamma`).
    TensorTable {
        /// Matrices of linear layers are stored (in, out) instead of (out, in); false if it is left out.
        transposed: Setting<bool>,
        embedding: OneOrMore<String>,
        /// Learned positions.
        positions: OneOrMore<String>,
        token_types: OneOrMore<String>,
        embedding_norm: OneOrMore<String>,
        project_in: OneOrMore<String>,
        /// Biases of relative positions, (buckets, heads).
        relative_bias: OneOrMore<String>,
        /// Before attention, or with `post` behind its residual.
        attention_norm: OneOrMore<String>,
        /// With `sandwich`: of what attention gives.
        attention_out_norm: OneOrMore<String>,
        /// The three projections in one.
        qkv: OneOrMore<String>,
        q: OneOrMore<String>,
        k: OneOrMore<String>,
        v: OneOrMore<String>,
        o: OneOrMore<String>,
        q_norm: OneOrMore<String>,
        k_norm: OneOrMore<String>,
        cross_norm: OneOrMore<String>,
        cross_out_norm: OneOrMore<String>,
        cross_q: OneOrMore<String>,
        cross_k: OneOrMore<String>,
        cross_v: OneOrMore<String>,
        cross_o: OneOrMore<String>,
        /// Before the MLP, or with `post` behind its residual.
        mlp_norm: OneOrMore<String>,
        /// With `sandwich`: of what the MLP gives.
        mlp_out_norm: OneOrMore<String>,
        /// The one whose result is activated, where there are two.
        gate: OneOrMore<String>,
        up: OneOrMore<String>,
        down: OneOrMore<String>,
        /// Gate and up in one.
        gate_up: OneOrMore<String>,
        router: OneOrMore<String>,
        /// Without `{e}`: one tensor (experts, out, in).
        expert_gate: OneOrMore<String>,
        expert_up: OneOrMore<String>,
        expert_down: OneOrMore<String>,
        shared_gate: OneOrMore<String>,
        shared_up: OneOrMore<String>,
        shared_down: OneOrMore<String>,
        shared_router: OneOrMore<String>,
        /// Behind the last layer.
        norm: OneOrMore<String>,
        project_out: OneOrMore<String>,
        head_transform: OneOrMore<String>,
        head_transform_norm: OneOrMore<String>,
        head: OneOrMore<String>,
        /// As `head`'s bias would be called, if it is left out.
        head_bias: OneOrMore<String>,
    }
}

/// Choices by name.
macro_rules! words {
    ($($(#[$about:meta])* $name:ident { $($(#[$word_about:meta])* $word:ident,)* })*) => {$(
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
        #[serde(rename_all = "snake_case")]
        pub enum $name { $($(#[$word_about])* $word,)* }

        impl Value for $name {}

        impl $name {
            /// Every one.
            pub const ALL: &[$name] = &[$($name::$word,)*];
        }
    )*};
}

words! {
    /// What a model consists of.
    Kind {
        /// A decoder, which generates.
        Decoder,
        /// An encoder, which embeds texts and fills masks.
        Encoder,
        /// An encoder that reads a source, and a decoder that generates from it.
        EncoderDecoder,
    }
    /// One of a model's two stacks of layers.
    StackName {
        Encoder,
        Decoder,
    }
    PositionKind {
        /// Rotary: queries and keys are turned.
        Rope,
        /// A row of a table is added to the embedding.
        Learned,
        /// Sines and cosines are added to the embedding.
        Sinusoidal,
        /// Scores fall with the distance, at each head's own slope.
        Alibi,
        /// Scores have a learned bias by distance and head, the same in all layers.
        Relative,
        None,
    }
    RopeStyleName {
        /// `(i, i + dims / 2)`.
        Halves,
        /// `(2i, 2i + 1)`.
        Interleaved,
    }
    SinusoidLayout {
        /// All sines, then all cosines, of frequencies that end at 1/10000.
        Halves,
        /// Sine, cosine, sine, cosine …
        Interleaved,
    }
    NormName {
        /// Root mean square.
        Rms,
        /// Mean and variance.
        Layer,
    }
    Placement {
        /// Before each sub-layer.
        Pre,
        /// Behind each residual.
        Post,
        /// Before each sub-layer, and of what it gives.
        Sandwich,
        None,
    }
    Wiring {
        /// The MLP reads what attention has added to.
        Sequential,
        /// Attention and MLP read the same normed input.
        Parallel,
        /// Attention and MLP read the same input, each with a norm of its own.
        ParallelTwoNorms,
    }
    QkvLayout {
        Separate,
        /// One matrix: all queries, all keys, all values.
        Blocks,
        /// One matrix: for each KV head its queries, its key, its value. With as many KV heads as heads that is head by
        /// head.
        Groups,
    }
    QkNorm {
        None,
        /// Each head by itself, all by the same weights.
        PerHead,
        /// All heads together.
        Whole,
    }
    MaskName {
        /// The own position and those before.
        Causal,
        Bidirectional,
    }
    MlpKind {
        /// down(act(up(x)))
        Plain,
        /// down(act(gate(x)) * up(x))
        Gated,
        /// A mixture of experts.
        Experts,
    }
    ScoringName {
        /// Over all experts.
        Softmax,
        /// Of each for itself.
        Sigmoid,
    }
    HeadKind {
        /// Logits over the vocabulary.
        Lm,
        /// None: hidden states are what the model gives.
        None,
    }
}

/// A non-linearity, by the names that configurations have for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ActivationName {
    Relu,
    /// The square of `relu`.
    #[serde(alias = "relu2", alias = "relu_squared")]
    SquaredRelu,
    /// By the error function.
    #[serde(alias = "gelu_python")]
    Gelu,
    /// By a hyperbolic tangent.
    #[serde(alias = "gelu_new", alias = "gelu_pytorch_tanh", alias = "gelu_fast", alias = "gelu_accurate")]
    GeluTanh,
    /// By the sigmoid of 1.702 x.
    QuickGelu,
    #[serde(alias = "swish")]
    Silu,
    Tanh,
}

impl Value for ActivationName {}

impl ActivationName {
    /// Every one.
    pub const ALL: &[ActivationName] = {
        use ActivationName::*;
        &[Relu, SquaredRelu, Gelu, GeluTanh, QuickGelu, Silu, Tanh]
    };
}

/// What a model is unless its specification says.
fn decoder() -> Kind {
    Kind::Decoder
}
