//! Families of small models, which the property tests use.
//!
//! Invariant: together they use every operation, mask and table.

use super::inputs::few_types;
use super::rope::Lengths;
use crate::backend::{Activation, MoeShape, NormKind, RopeStyle, Scoring};
use crate::quant::QuantType;

/// The architecture of a small model.
#[derive(Clone, Copy, Debug)]
pub(super) struct Family {
    pub(super) name: &'static str,
    pub(super) norm: NormKind,
    /// Whether each head of Q and K is normalized, without a weight.
    pub(super) head_norm: bool,
    pub(super) positions: Positions,
    /// Sliding window.
    pub(super) window: Option<usize>,
    /// Softcap of scores and of logits.
    pub(super) softcap: Option<f32>,
    pub(super) mlp: Mlp,
    /// Factor of the embeddings and of each sublayer result.
    pub(super) factor: f32,
    /// Whether there is an encoder, to which the decoder has cross-attention.
    pub(super) has_encoder: bool,
}

/// The position encoding of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Positions {
    /// RoPE on this many dimensions of a head; 0 for all.
    Rotary(RopeStyle, usize, Lengths),
    /// Learned position embeddings.
    Learned,
    /// Relative position bias.
    Biased,
}

/// The MLP of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Mlp {
    Gated(Activation),
    Plain(Activation),
    /// A mixture of experts plus a gated MLP whose rows have gates.
    Mixture(Scoring),
}

impl Family {
    /// The architecture of Llama.
    pub(super) const PLAIN: Family = Family {
        name: "plain",
        norm: NormKind::Rms,
        head_norm: false,
        positions: Positions::Rotary(RopeStyle::Halves, 0, Lengths::One),
        window: None,
        softcap: None,
        mlp: Mlp::Gated(Activation::Silu),
        factor: 1.0,
        has_encoder: false,
    };

    /// All families.
    pub(super) const ALL: [Family; 6] = [
        Family::PLAIN,
        Family {
            name: "windowed and capped",
            head_norm: true,
            positions: Positions::Rotary(RopeStyle::Interleaved, 6, Lengths::Some),
            window: Some(20),
            softcap: Some(3.0),
            mlp: Mlp::Gated(Activation::GeluTanh),
            factor: 1.7,
            ..Family::PLAIN
        },
        Family {
            name: "learned positions",
            norm: NormKind::Layer,
            positions: Positions::Learned,
            mlp: Mlp::Plain(Activation::Gelu),
            ..Family::PLAIN
        },
        Family {
            name: "mixture",
            positions: Positions::Rotary(RopeStyle::Halves, 0, Lengths::Stretched),
            mlp: Mlp::Mixture(Scoring::Softmax),
            ..Family::PLAIN
        },
        Family {
            name: "encoder and decoder",
            norm: NormKind::Layer,
            positions: Positions::Biased,
            mlp: Mlp::Plain(Activation::Relu),
            has_encoder: true,
            ..Family::PLAIN
        },
        Family {
            name: "windowed encoder and decoder",
            head_norm: true,
            positions: Positions::Rotary(RopeStyle::Halves, 8, Lengths::Some),
            window: Some(9),
            softcap: Some(2.0),
            mlp: Mlp::Mixture(Scoring::Sigmoid),
            factor: 0.6,
            has_encoder: true,
            ..Family::PLAIN
        },
    ];

    /// Returns each family with one number format; the plain family with one format of each storage kind.
    pub(super) fn cases() -> impl Iterator<Item = (Family, QuantType)> {
        let plain = few_types().map(|ty| (Family::PLAIN, ty));
        let types: Vec<QuantType> = few_types().collect();
        let others = (1..Family::ALL.len()).map(move |i| (Family::ALL[i], types[i % types.len()]));
        plain.chain(others)
    }

    /// Returns the mixture of experts of a family.
    pub(super) fn experts(scoring: Scoring, width: usize) -> MoeShape {
        let activation = Activation::Silu;
        MoeShape { experts: 6, first: 0, top_k: 2, scoring, renormalise: true, scale: 1.0, width, activation }
    }
}
