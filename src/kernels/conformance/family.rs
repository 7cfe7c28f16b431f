//! Families of small models, which the property tests use.
//!
//! Invariant: together they use every operation, mask and table.

use super::inputs::few_types;
use super::rope::LengthDependence;
use mainstem_kernels::backend::{Activation, MoeShape, NormKind, RopeStyle, Scoring};
use mainstem_kernels::quant::QuantType;

/// The architecture of a small model.
#[derive(Clone, Copy, Debug)]
pub(super) struct ModelFamily {
    pub(super) name: &'static str,
    pub(super) norm: NormKind,
    /// Whether each head of Q and K is normalized, without a weight.
    pub(super) head_norm: bool,
    pub(super) positions: PositionEncoding,
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
pub(super) enum PositionEncoding {
    /// RoPE on this many dimensions of a head; 0 for all.
    Rotary(RopeStyle, usize, LengthDependence),
    /// Learned position embeddings.
    Learned,
    /// Relative position bias.
    RelativeBias,
}

/// The MLP of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Mlp {
    Gated(Activation),
    Plain(Activation),
    /// A mixture of experts plus a gated MLP whose rows have gates.
    Mixture(Scoring),
}

impl ModelFamily {
    /// The architecture of Llama.
    pub(super) const PLAIN: ModelFamily = ModelFamily {
        name: "plain",
        norm: NormKind::Rms,
        head_norm: false,
        positions: PositionEncoding::Rotary(RopeStyle::NeoX, 0, LengthDependence::Independent),
        window: None,
        softcap: None,
        mlp: Mlp::Gated(Activation::Silu),
        factor: 1.0,
        has_encoder: false,
    };

    /// All families.
    pub(super) const ALL: [ModelFamily; 6] = [
        ModelFamily::PLAIN,
        ModelFamily {
            name: "windowed and capped",
            head_norm: true,
            positions: PositionEncoding::Rotary(RopeStyle::GptJ, 6, LengthDependence::Tables),
            window: Some(20),
            softcap: Some(3.0),
            mlp: Mlp::Gated(Activation::GeluTanh),
            factor: 1.7,
            ..ModelFamily::PLAIN
        },
        ModelFamily {
            name: "learned positions",
            norm: NormKind::Layer,
            positions: PositionEncoding::Learned,
            mlp: Mlp::Plain(Activation::Gelu),
            ..ModelFamily::PLAIN
        },
        ModelFamily {
            name: "mixture",
            positions: PositionEncoding::Rotary(RopeStyle::NeoX, 0, LengthDependence::DynamicNtk),
            mlp: Mlp::Mixture(Scoring::Softmax),
            ..ModelFamily::PLAIN
        },
        ModelFamily {
            name: "encoder and decoder",
            norm: NormKind::Layer,
            positions: PositionEncoding::RelativeBias,
            mlp: Mlp::Plain(Activation::Relu),
            has_encoder: true,
            ..ModelFamily::PLAIN
        },
        ModelFamily {
            name: "windowed encoder and decoder",
            head_norm: true,
            positions: PositionEncoding::Rotary(RopeStyle::NeoX, 8, LengthDependence::Tables),
            window: Some(9),
            softcap: Some(2.0),
            mlp: Mlp::Mixture(Scoring::Sigmoid),
            factor: 0.6,
            has_encoder: true,
            ..ModelFamily::PLAIN
        },
    ];

    /// Returns each family with one number format; the plain family with one format of each storage kind.
    pub(super) fn with_formats() -> impl Iterator<Item = (ModelFamily, QuantType)> {
        let plain = few_types().map(|ty| (ModelFamily::PLAIN, ty));
        let types: Vec<QuantType> = few_types().collect();
        let others = (1..ModelFamily::ALL.len()).map(move |i| (ModelFamily::ALL[i], types[i % types.len()]));
        plain.chain(others)
    }

    /// Returns the mixture of experts of a family.
    pub(super) fn experts(scoring: Scoring, width: usize) -> MoeShape {
        let activation = Activation::Silu;
        MoeShape {
            experts: 6,
            groups: None,
            first_expert: 0,
            top_k: 2,
            scoring,
            normalize_scores: true,
            scale: 1.0,
            weighs_input: false,
            width,
            activation,
        }
    }
}
