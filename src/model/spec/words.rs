//! The words that a specification file may contain as values.
//!
//! Invariant: a word is written in snake case; deprecated words are aliases of the current ones.

use super::setting::Value;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Defines enums whose values are written as names.
macro_rules! words {
    ($($(#[$about:meta])* $name:ident { $($(#[$word_about:meta])* $word:ident,)* })*) => {$(
        $(#[$about])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
        #[serde(rename_all = "snake_case")]
        pub enum $name { $($(#[$word_about])* $word,)* }

        impl Value for $name {}

        impl $name {
            /// All values.
            pub const ALL: &[$name] = &[$($name::$word,)*];
        }
    )*};
}

words! {
    /// The stacks that a model consists of.
    Kind {
        /// A decoder, which generates text.
        Decoder,
        /// An encoder-only model, which embeds texts and fills masks.
        Encoder,
        /// An encoder that reads the input, and a decoder that generates from it.
        EncoderDecoder,
    }
    /// One of a model's two stacks of layers.
    StackName {
        Encoder,
        Decoder,
    }
    PositionKind {
        /// Rotary: queries and keys are rotated.
        Rope,
        /// Learned: a row of a table is added to the embedding.
        Learned,
        /// Sinusoidal: sines and cosines are added to the embedding.
        Sinusoidal,
        /// ALiBi: scores decrease linearly with the distance, with a slope per head.
        Alibi,
        /// Scores have a learned bias by distance and head, the same in all layers.
        #[serde(alias = "relative")]
        RelativeBias,
        /// Disentangled attention: queries meet the keys of distances, and keys their queries. Only in a
        /// bidirectional encoder.
        Disentangled,
        None,
    }
    RopeStyleName {
        /// Pairs `(i, i + dims / 2)`, as in GPT-NeoX.
        #[serde(rename = "neox", alias = "halves")]
        NeoX,
        /// Pairs `(2i, 2i + 1)`, as in GPT-J.
        #[serde(rename = "gptj", alias = "interleaved")]
        GptJ,
    }
    SinusoidLayout {
        /// All sines, then all cosines.
        #[serde(alias = "halves")]
        Concatenated,
        /// Sine, cosine, sine, cosine …
        Interleaved,
    }
    SinusoidFrequencies {
        /// Frequency i is 10000^(-i / (width / 2 - 1)): the last one is 1/10000.
        ToLast,
        /// Frequency i is 10000^(-2 i / width): the last one is a step before 1/10000.
        ByWidth,
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
        /// After each residual.
        Post,
        /// Before each sub-layer, and on its output.
        Sandwich,
        /// On each sub-layer's output, before it is added to the residual stream.
        Output,
        None,
    }
    Wiring {
        /// The MLP reads the residual stream after attention.
        Sequential,
        /// Attention and MLP read the same normalized input.
        Parallel,
        /// Attention and MLP read the same input, each with a norm of its own.
        ParallelTwoNorms,
    }
    AttentionKind {
        /// Every head has a query, and shares a key and a value with none or some other heads.
        Heads,
        /// Keys and values of all heads are made from one latent vector (multi-head latent attention).
        Latent,
    }
    QkvLayout {
        Separate,
        /// One matrix: all queries, all keys, all values.
        #[serde(alias = "blocks")]
        Fused,
        /// One matrix: for each KV head its queries, its key, its value. With as many KV heads as query
        /// heads, this is head by head. With fewer groups (`attention.qkv_groups`), a group has the queries
        /// of its heads, then their keys, then their values.
        #[serde(alias = "groups")]
        FusedGrouped,
    }
    QkvOrder {
        /// Queries, keys, values.
        Qkv,
        /// Queries, values, keys.
        Qvk,
    }
    QkNorm {
        None,
        /// Each head separately, all with the same weights.
        PerHead,
        /// Each head separately, with weights of its own.
        PerHeadWeights,
        /// All heads together.
        #[serde(alias = "whole")]
        Full,
    }
    MaskName {
        /// The own position and earlier ones.
        Causal,
        Bidirectional,
    }
    MlpKind {
        /// down(act(up(x)))
        #[serde(alias = "plain")]
        Ungated,
        /// down(act(gate(x)) * up(x))
        Gated,
        /// A mixture of experts.
        Experts,
    }
    ScoringName {
        /// Over all experts.
        Softmax,
        /// Of each expert separately.
        Sigmoid,
        /// Softmax over the expert and those that are chosen after it or not at all, as far as their logits
        /// are near its own (`moe.nearness`).
        Nearby,
    }
    ExpertLayout {
        Separate,
        /// One matrix: all rows of the gate, then all rows of up.
        Halves,
        /// One matrix: a row of the gate, then a row of up, and so on.
        Interleaved,
    }
    GroupScoreName {
        /// The largest score of its experts.
        Max,
        /// The sum of the two largest scores of its experts.
        TopTwo,
    }
    ClassifierKind {
        None,
        /// The model classifies texts.
        Sequence,
        /// The model classifies each token of a text.
        Token,
    }
    ClassifierPooling {
        /// The hidden state of the first token.
        First,
        /// The hidden state of the last token.
        Last,
        /// The mean of all hidden states.
        Mean,
    }
    HeadKind {
        /// Logits over the vocabulary.
        Lm,
        /// No head: the model returns hidden states.
        None,
    }
}

/// An activation function, by its names in configurations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum ActivationName {
    Relu,
    /// The square of `relu`.
    #[serde(alias = "relu2", alias = "relu_squared")]
    SquaredRelu,
    /// With the error function.
    #[serde(alias = "gelu_python")]
    Gelu,
    /// Approximation with a hyperbolic tangent.
    #[serde(alias = "gelu_new", alias = "gelu_pytorch_tanh", alias = "gelu_fast", alias = "gelu_accurate")]
    GeluTanh,
    /// Approximation with the sigmoid of 1.702 x.
    QuickGelu,
    #[serde(alias = "swish")]
    Silu,
    Tanh,
    /// `quick_gelu` of at most 7, times 1 more than up, which is limited to 7 too.
    ClampedSwiglu,
    /// A square above zero and a power below it, with learned numbers for each layer:
    /// `tensors.xielu_positive` and those after it. In dense MLPs only.
    Xielu,
}

impl Value for ActivationName {}

impl ActivationName {
    /// All values.
    pub const ALL: &[ActivationName] = {
        use ActivationName::*;
        &[Relu, SquaredRelu, Gelu, GeluTanh, QuickGelu, Silu, Tanh, ClampedSwiglu, Xielu]
    };
}

/// The word `none`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum NoneWord {
    None,
}
