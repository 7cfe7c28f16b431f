//! The plain data of all operations but attention: matrices, norms, rotary embeddings, activations, experts.
//!
//! Invariant: every number that affects the arithmetic is in one of these types or in a weight.

use crate::quant::QuantType;
use std::sync::Arc;

/// A weight matrix (n, k) in device memory: n outputs, k inputs.
pub struct Weight<Buf> {
    /// The matrix of the model's files that this is, or is a part of; `None` until the loader sets it.
    /// Backends ignore it, unless they report something by matrix.
    pub id: Option<MatrixId>,
    /// The data, in a layout that is private to the backend.
    pub buf: Buf,
    /// Storage format.
    pub ty: QuantType,
    /// Output features: rows of the matrix.
    pub n: usize,
    /// Input features: columns of the matrix.
    pub k: usize,
}

/// Identifies a stored matrix: a whole tensor, or one of the matrices stacked in it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MatrixId {
    tensor: Arc<str>,
    plane: usize,
}

impl MatrixId {
    /// Identifies a matrix by its tensor's name and its index in that tensor; 0 for a whole tensor.
    pub fn new(tensor: &str, plane: usize) -> MatrixId {
        MatrixId { tensor: tensor.into(), plane }
    }

    /// Returns the name of the tensor.
    pub fn tensor(&self) -> &str {
        &self.tensor
    }
}

/// Normalization of each row, followed by `* weight + bias`. Weight and bias are F32 (width); both are
/// optional.
pub struct Norm<Buf> {
    pub kind: NormKind,
    pub weight: Option<Buf>,
    pub bias: Option<Buf>,
    /// Number of rows of `weight` and `bias`: row r is multiplied by row r modulo this. If not 1, heads have
    /// weights of their own.
    pub sets: usize,
    /// Length of a row.
    pub width: usize,
    /// Added to the mean square or the variance before the square root.
    pub eps: f32,
}

/// The kind of a normalization.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// RMS norm: `x / rms(x)` (Zhang and Sennrich 2019).
    Rms,
    /// Layer norm: `(x - mean(x)) / std(x)`, with the biased variance (Ba et al. 2016).
    Layer,
}

/// Rotary position embedding (RoPE): precomputed rotations of pairs of dimensions by position.
pub struct Rope<Buf> {
    /// Tables with the largest reserved sequence length that each one is for, ascending; the last table also
    /// serves all longer sequences. Nearly every model has one table. A table is F32 (positions, dims / 2,
    /// 2): cosine and sine for each position and pair, both multiplied by the attention factor of the
    /// scaling, if it has one.
    pub tables: Vec<(usize, Buf)>,
    /// Positions that each table covers.
    pub positions: usize,
    /// Leading dimensions of each head that are rotated; even.
    pub dims: usize,
    /// Dimensions that form a pair.
    pub style: RopeStyle,
    /// Dynamic NTK scaling, for sequences longer than its context.
    pub dynamic_ntk: Option<DynamicNtk>,
}

/// Dynamic NTK scaling of RoPE: a sequence whose reserved length L exceeds `context` has the base `theta *
/// (factor * L / context - (factor - 1)) ^ (dims / (dims - 2))`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DynamicNtk {
    /// Base of sequences within the context.
    pub theta: f64,
    /// Scaling factor.
    pub factor: f64,
    /// Context length of training, in tokens.
    pub context: usize,
}

impl<Buf> Rope<Buf> {
    /// Returns the table for sequences with `reserved` reserved tokens.
    pub fn table(&self, reserved: usize) -> &Buf {
        let table = self.tables.iter().find(|(bound, _)| reserved <= *bound).or(self.tables.last());
        &table.expect("RoPE has at least one table; this is a bug").1
    }
}

impl DynamicNtk {
    /// Returns the base for sequences with `reserved` reserved tokens, more than `context`.
    pub fn base(&self, dims: usize, reserved: usize) -> f64 {
        let growth = self.factor * reserved as f64 / self.context as f64 - (self.factor - 1.0);
        self.theta * growth.powf(dims as f64 / (dims as f64 - 2.0))
    }

    /// Returns the angle of a pair at a position, in radians: an F32 frequency times the position, rounded to
    /// F32, as checkpoints expect it.
    pub fn angle(base: f64, dims: usize, pair: usize, position: usize) -> f64 {
        let frequency = (1.0 / base.powf(2.0 * pair as f64 / dims as f64)) as f32;
        f64::from(position as f32 * frequency)
    }
}

/// The pairing of dimensions in RoPE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// Pairs `(i, i + dims / 2)`: GPT-NeoX and Hugging Face checkpoints.
    NeoX,
    /// Adjacent pairs `(2i, 2i + 1)`: GPT-J and the original checkpoints of Meta and llama2.c.
    GptJ,
}

/// An activation function.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0)²`.
    SquaredRelu,
    /// `x * Φ(x)`, computed with the error function.
    Gelu,
    /// `x / 2 * (1 + tanh(√(2/π) * (x + 0.044715 x³)))`.
    GeluTanh,
    /// `x * sigmoid(1.702 x)`.
    QuickGelu,
    /// `x * sigmoid(x)`.
    Silu,
    /// `tanh(x)`, in poolers and embedding transforms.
    Tanh,
    /// `x' * sigmoid(1.702 x')` for `x' = min(x, 7)`. The factor u that the result is multiplied by becomes
    /// `1 + max(-7, min(u, 7))`.
    ClampedSwiglu,
    /// A square above zero and a power below it, with numbers of the layer.
    Xielu(Xielu),
}

/// The numbers of xIELU: `positive x² + linear x` for `x > 0`, and otherwise
/// `negative (e^min(x, bound) - 1 - x) + linear x`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Xielu {
    pub positive: f32,
    pub negative: f32,
    pub linear: f32,
    /// A number below zero.
    pub bound: f32,
}

impl Activation {
    /// The largest magnitude in [`Activation::ClampedSwiglu`].
    pub const LIMIT: f32 = 7.0;
}

/// Parameters of a mixture of experts (Shazeer et al. 2017): each row passes through the `top_k` experts with
/// the largest scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoeShape {
    /// Experts of the layer, on all ranks together.
    pub experts: usize,
    /// Number of the first expert that this device holds.
    pub first_expert: usize,
    /// Experts per row.
    pub top_k: usize,
    /// Function from router logits to scores.
    pub scoring: Scoring,
    /// Groups of experts, of which each row chooses some first; `None` if it chooses among all experts.
    pub groups: Option<ExpertGroups>,
    /// Whether the selected scores are divided by their sum.
    pub normalize_scores: bool,
    /// Final factor of the scores.
    pub scale: f32,
    /// Whether a score multiplies the input of its expert, in place of the result.
    pub weighs_input: bool,
    /// Inner width of the MLP of one expert.
    pub width: usize,
    /// Activation function of the experts.
    pub activation: Activation,
}

/// Division of a mixture's experts into groups of equal size, of consecutive experts. A row is routed to
/// experts of the `top_groups` groups with the largest scores only.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Number of groups; divides the number of experts.
    pub groups: usize,
    /// Groups per row, which have at least `top_k` experts together.
    pub top_groups: usize,
    /// The score of a group.
    pub score: GroupScore,
}

/// The score of a group of experts, by which groups are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GroupScore {
    /// The largest score of its experts.
    Max,
    /// The sum of the two largest scores of its experts; the score of a single one.
    TopTwo,
}

impl MoeShape {
    /// Asserts that the shape is possible, and that the device holds experts of it from
    /// [`Self::first_expert`] on, `held` of them.
    pub fn check(&self, held: usize) {
        let MoeShape { experts, first_expert, top_k, groups, .. } = *self;
        let end = first_expert + held;
        assert!(end <= experts, "experts {first_expert}..{end} of {experts}");
        let choice = groups.map_or(experts, |it| {
            assert!(it.groups > 0 && experts.is_multiple_of(it.groups), "{experts} experts, {it:?}");
            assert!(it.top_groups <= it.groups, "{it:?}");
            experts / it.groups * it.top_groups
        });
        assert!(top_k <= choice, "top {top_k} of {choice} experts");
        let is_nearby = matches!(self.scoring, Scoring::Nearby { .. });
        assert!(!(is_nearby && groups.is_some()), "the order of experts that are not in groups");
    }

    /// Returns whether experts are chosen by their scores: with a correction, or with sums of scores.
    /// Otherwise they are chosen by their logits, which order them as the scores do.
    pub fn chooses_by_score(&self, is_corrected: bool) -> bool {
        is_corrected || self.groups.is_some_and(|it| it.score == GroupScore::TopTwo)
    }
}

/// The function from router logits to expert scores.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scoring {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each logit.
    Sigmoid,
    /// Softmax over those of the expert and the ones after it, in the order of choice, whose logits are near
    /// its own, `a`: a logit `b` is near it unless `(a - b) / max(|b|, a) > tolerance`, computed in F32.
    /// Without groups and correction.
    Nearby { tolerance: f32 },
}

impl Scoring {
    /// Returns whether the logit `other` is so far below the logit `own` that it does not count.
    pub fn is_far(self, own: f32, other: f32) -> bool {
        matches!(self, Scoring::Nearby { tolerance } if (own - other) / other.abs().max(own) > tolerance)
    }
}

/// The biases of one expert's projections, F32.
#[derive(Default)]
pub struct ExpertBiases<Buf> {
    /// (width)
    pub gate: Option<Buf>,
    /// (width)
    pub up: Option<Buf>,
    /// (hidden)
    pub down: Option<Buf>,
}

/// The weights of one expert: down(act(gate(x)) * up(x)), or down(act(gate(x))) without `up`.
pub struct Expert<Buf> {
    /// Gate projection (width, hidden).
    pub gate: Weight<Buf>,
    /// Up projection (width, hidden).
    pub up: Option<Weight<Buf>>,
    /// Down projection (hidden, width).
    pub down: Weight<Buf>,
}
