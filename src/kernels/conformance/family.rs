//! Families of small models: what properties are shown with, so that every operation has its company.
//!
//! Invariant: together they use every operation, mask and table.

use super::inputs::few_types;
use super::rope::Lengths;
use crate::backend::{Activation, MoeShape, NormKind, RopeStyle, Scoring};
use crate::quant::QuantType;

/// How one layer with embedding and head is wired.
#[derive(Clone, Copy, Debug)]
pub(super) struct Family {
    pub(super) name: &'static str,
    pub(super) norm: NormKind,
    /// Each head of Q and K is normed, without a weight.
    pub(super) head_norm: bool,
    pub(super) positions: Positions,
    pub(super) window: Option<usize>,
    /// Of scores, and of logits.
    pub(super) softcap: Option<f32>,
    pub(super) mlp: Mlp,
    /// Multiplies the embeddings, and each sub-layer's result.
    pub(super) factor: f32,
    /// There is an encoder, and the decoder looks at what it made.
    pub(super) has_encoder: bool,
}

/// Where a model takes positions from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Positions {
    /// Rotations of so many of the head's dimensions, 0 for all.
    Rotary(RopeStyle, usize, Lengths),
    /// A vector for each.
    Learned,
    /// Biases of the scores.
    Biased,
}

/// What follows attention.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Mlp {
    Gated(Activation),
    Plain(Activation),
    /// Experts beside a gated MLP whose rows have gates.
    Mixture(Scoring),
}

impl Family {
    /// As Llama has it.
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

    /// Each family with one number format, the plain one with one of each way of storing.
    pub(super) fn cases() -> impl Iterator<Item = (Family, QuantType)> {
        let plain = few_types().map(|ty| (Family::PLAIN, ty));
        let types: Vec<QuantType> = few_types().collect();
        let others = (1..Family::ALL.len()).map(move |i| (Family::ALL[i], types[i % types.len()]));
        plain.chain(others)
    }

    pub(super) fn experts(scoring: Scoring, width: usize) -> MoeShape {
        let activation = Activation::Silu;
        MoeShape { experts: 6, first: 0, top_k: 2, scoring, renormalise: true, scale: 1.0, width, activation }
    }
}
