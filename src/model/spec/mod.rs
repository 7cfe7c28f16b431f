//! Model specifications: the blocks of a model, how they are connected, and the names of their tensors.
//!
//! A specification file (TOML, `specs/`; [`tables`]) selects the blocks. Where a number is needed it may name
//! the key of the model's config.json that holds it. Together with the names of the checkpoint's tensors they
//! give a [`ModelSpec`], in which every value is resolved, layer by layer.
//!
//! Invariant: a `ModelSpec` contains no memory sizes, no devices and no model names.

pub mod formula;

pub mod setting;

mod table_macro;

pub mod tensor_table;

pub mod classifier_table;

pub mod tables;

pub mod words;

pub mod file;

mod lookup;

mod context;

mod resolve;

mod layer;

pub mod latent;

pub mod distances;

mod experts;

mod moe_table;

pub mod classifier;

mod positions;

mod tensor_slice;

mod check;

mod unread;

mod setting_names;

mod unused;

pub mod merge;

mod inherit;

pub mod nearest;

pub mod schema;

#[cfg(test)]
mod tests;

pub use file::{SpecFile, UnknownType};

pub use tensor_slice::{IgnoredTensors, SliceBounds, TensorPart, TensorSlice};
pub use words::Kind;

use self::classifier::ClassifierSpec;
use self::distances::DistanceSpec;
use self::latent::LatentSpec;
use super::provenance::Provenance;
use crate::formats::RopeConfig;
use mainstem_kernels::{Activation, ExpertGroups, Mask, MoeShape, NormKind, RopeStyle, Scoring};
use std::ops::Range;

/// A model's architecture with all values resolved.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    pub kind: Kind,
    /// Rows of the embedding table of the decoder, or of an encoder-only model.
    pub vocab: usize,
    /// Rows of the embedding table of the encoder, whose vocabulary may be another one; `vocab` without an
    /// encoder.
    pub source_vocab: usize,
    /// Width of the residual stream, in encoder and decoder.
    pub hidden: usize,
    /// Context length of the decoder, or of an encoder-only model, in positions.
    pub context: usize,
    pub encoder: Option<StackSpec>,
    pub decoder: Option<StackSpec>,
    /// The classifier; only in the specification of a whole model, because it is computed by the host.
    pub classifier: Option<ClassifierSpec>,
    /// Tensors that a file may have although they are unused.
    pub ignored: IgnoredTensors,
    /// The origin of each value.
    pub provenance: Provenance,
}

/// A stack of layers with its embedding and head. In the specification of a shard only some layers are
/// present; the embedding and the positions added to it are with the first layer, the final norm and the head
/// with the last.
#[derive(Clone, Debug, PartialEq)]
pub struct StackSpec {
    /// Context length in positions.
    pub context: usize,
    /// `None` only if the first layer is in another shard.
    pub embedding: Option<EmbeddingSpec>,
    /// Position embedding that is added to the token embedding.
    pub position_embedding: Option<PositionEmbeddingSpec>,
    /// The distinct relative position biases of the layers, which are added to attention scores.
    pub relative_biases: Vec<RelativeBiasSpec>,
    /// The distinct rotary position embeddings of the layers.
    pub ropes: Vec<RopeSpec>,
    pub layers: Vec<LayerSpec>,
    /// Final norm, after the last layer.
    pub norm: Option<NormSpec>,
    pub head: Option<HeadSpec>,
}

/// The token embedding, which maps tokens to the residual stream.
#[derive(Clone, Debug, PartialEq)]
pub struct EmbeddingSpec {
    /// (vocabulary, width)
    pub table: TensorSlice,
    pub scale: f32,
    /// Projection to the width of the residual stream, if the table has another width.
    pub project_in: Option<LinearSpec>,
    /// Whether positions, token types and the norm are applied before the projection, at the table's width.
    pub projects_last: bool,
    /// Token type embedding, (types, width); its first row is added to all tokens.
    pub token_types: Option<TensorSlice>,
    pub norm: Option<NormSpec>,
    /// Whether the norm comes before positions and token types are added.
    pub norm_first: bool,
}

/// A position embedding that is added to the token embedding.
#[derive(Clone, Debug, PartialEq)]
pub enum PositionEmbeddingSpec {
    /// Row `position + offset` of a table (rows, width).
    Learned { table: Box<TensorSlice>, offset: usize },
    /// Sines and cosines (Vaswani et al. 2017, section 3.5).
    Sinusoidal {
        layout: words::SinusoidLayout,
        frequencies: words::SinusoidFrequencies,
        offset: usize,
        scale: f32,
    },
}

/// A relative position bias: a bias of attention scores by distance and head.
#[derive(Clone, Debug, PartialEq)]
pub struct RelativeBiasSpec {
    pub kind: RelativeBiasKind,
    /// Number of heads of the whole model.
    pub heads: usize,
    /// Heads of this shard: all of them in a whole model.
    pub local_heads: Range<usize>,
}

/// Selects how the bias depends on the distance.
#[derive(Clone, Debug, PartialEq)]
pub enum RelativeBiasKind {
    /// ALiBi (Press et al. 2022, section 3).
    Alibi {
        scale: f32,
        /// The last slope of a power of two heads is 2 to the power of minus this.
        max: f32,
    },
    /// Learned biases by distance bucket (Raffel et al. 2020, section 2.1); the table is (buckets, heads).
    Learned { table: Box<TensorSlice>, buckets: usize, max_distance: usize, bidirectional: bool },
}

/// A rotary position embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeSpec {
    pub style: RopeStyle,
    /// Leading dimensions of each head that are rotated.
    pub dims: usize,
    pub config: RopeConfig,
    /// Growth with the position, in place of a rotation.
    pub growth: Option<GrowthSpec>,
}

/// Growth of queries with their positions, which sharpens attention over long contexts: a query at position p
/// is multiplied by `1 + factor * ln(1 + floor((p + 1) / interval))` (Nakanishi 2025, and Llama 4).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GrowthSpec {
    pub factor: f32,
    /// Number of positions with the same factor.
    pub interval: f32,
}

/// One transformer layer.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpec {
    pub wiring: words::Wiring,
    /// Factor of the sub-layer outputs that are added to the residual stream.
    pub residual_scale: f32,
    pub attention_norms: Norms,
    pub attention: AttentionSpec,
    /// Cross-attention to the encoder's output, with its norms.
    pub cross: Option<(Norms, AttentionSpec)>,
    pub mlp_norms: Norms,
    pub mlp: MlpSpec,
}

/// The norms around a sub-layer.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Norms {
    /// Norm of the sub-layer's input.
    pub pre: Option<NormSpec>,
    /// Norm of the sub-layer's output.
    pub out: Option<NormSpec>,
    /// Norm of the residual stream after the output was added.
    pub post: Option<NormSpec>,
}

/// A normalization (LayerNorm or RMSNorm).
#[derive(Clone, Debug, PartialEq)]
pub struct NormSpec {
    pub kind: NormKind,
    /// Weight vectors, (width) each: none, one for all rows, or one for each head.
    pub weights: Vec<TensorSlice>,
    /// Bias vectors: none, or as many as weight vectors.
    pub biases: Vec<TensorSlice>,
    /// Constant that is added to each weight.
    pub offset: f32,
    pub width: usize,
    pub eps: f32,
}

/// Self-attention or cross-attention of one layer.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionSpec {
    pub heads: usize,
    /// Number of KV heads; consecutive query heads share one. Divides `heads`.
    pub kv_heads: usize,
    /// Width of a query or key head.
    pub k_dim: usize,
    /// Width of a value head.
    pub v_dim: usize,
    /// Factor of the dot products of queries and keys.
    pub scale: f32,
    pub softcap: Option<f32>,
    pub mask: Mask,
    /// Index of the rotary position embedding among the stack's `ropes`.
    pub rope: Option<usize>,
    /// Index of the growth of queries with their positions among the stack's `ropes`.
    pub growth: Option<usize>,
    /// Attention sinks, (heads): scores without a value.
    pub sinks: Option<TensorSlice>,
    /// Index of the relative position bias among the stack's `relative_biases`.
    pub relative_bias: Option<usize>,
    /// Bound of queries, keys and values, before norms and rotary positions.
    pub clip: Option<f32>,
    pub q: LinearSpec,
    pub k: LinearSpec,
    pub v: LinearSpec,
    pub o: LinearSpec,
    /// Norms of queries and keys: per head if the norm is as wide as a head, else over all heads together.
    pub qk_norms: Option<(NormSpec, NormSpec)>,
    /// Whether the norms of queries and keys come after the rotary positions.
    pub qk_norms_last: bool,
    /// The split of queries and keys over the ranks of the stage, if a norm spans all heads: of queries and
    /// of keys.
    pub qk_split: Option<(ColumnSplit, ColumnSplit)>,
    /// The parts of latent attention besides.
    pub latent: Option<Box<LatentSpec>>,
    /// The vectors of distances of disentangled attention.
    pub distances: Option<Box<DistanceSpec>>,
}

/// Columns that are split over the ranks of a stage, side by side.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ColumnSplit {
    /// Number of columns of each rank.
    pub widths: Vec<usize>,
    /// Range of this rank's columns among all.
    pub local: Range<usize>,
}

/// A feed-forward network.
#[derive(Clone, Debug, PartialEq)]
pub enum MlpSpec {
    Dense(Box<DenseSpec>),
    Experts(Box<MoeSpec>),
}

/// A dense feed-forward network: down(act(gate(x)) * up(x)), or down(act(gate(x))) without `up`.
#[derive(Clone, Debug, PartialEq)]
pub struct DenseSpec {
    pub width: usize,
    pub activation: Activation,
    /// The learned numbers of the activation, in the order of [`mainstem_kernels::Xielu`]; empty if there are
    /// none.
    pub activation_numbers: Vec<TensorSlice>,
    pub gate: LinearSpec,
    pub up: Option<LinearSpec>,
    pub down: LinearSpec,
}

/// A mixture of experts.
#[derive(Clone, Debug, PartialEq)]
pub struct MoeSpec {
    pub top_k: usize,
    pub scoring: Scoring,
    pub groups: Option<ExpertGroups>,
    pub normalize_scores: bool,
    pub scale: f32,
    /// Whether a score multiplies the input of its expert, in place of the result.
    pub weighs_input: bool,
    pub router: LinearSpec,
    /// Correction of the scores by which experts are chosen, (experts).
    pub correction: Option<TensorSlice>,
    /// Index of the first expert in `experts` among those of the router: 0 in a whole model.
    pub first_expert: usize,
    pub experts: Vec<DenseSpec>,
    /// The shared expert, which processes every token.
    pub shared: Option<DenseSpec>,
    /// Gate of the shared expert, (1, hidden): its sigmoid multiplies the shared expert's output.
    pub shared_router: Option<LinearSpec>,
}

/// The head, which maps the residual stream to logits.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadSpec {
    /// A linear layer, an activation and a norm before the head's matrix.
    pub transform: Option<(LinearSpec, Activation, NormSpec)>,
    /// Projection to the embedding's width, if that differs from `hidden` and there is no transform, which
    /// projects too.
    pub project_out: Option<LinearSpec>,
    /// Whether the head's matrix is the embedding table.
    pub tied: bool,
    /// Names of a separate head matrix, if the head is tied: files may contain it although it is unused.
    pub unused_names: Vec<String>,
    /// (vocabulary, width)
    pub table: TensorSlice,
    pub bias: Option<TensorSlice>,
    /// Whether the rows of the matrix are scaled to an L2 norm of 1.
    pub normalize_rows: bool,
    /// Factor of the logits, applied before the soft cap.
    pub scale: f32,
    pub softcap: Option<f32>,
    /// The split of the vocabulary over the ranks of the stage, if it is split.
    pub vocab_split: Option<ColumnSplit>,
}

/// A linear layer: y = x · Wᵀ (+ b).
#[derive(Clone, Debug, PartialEq)]
pub struct LinearSpec {
    pub n: usize,
    pub k: usize,
    pub weight: TensorSlice,
    pub bias: Option<TensorSlice>,
}

impl ModelSpec {
    /// Returns the stacks of the model, the encoder first.
    pub fn stacks(&self) -> impl Iterator<Item = &StackSpec> {
        self.encoder.iter().chain(&self.decoder)
    }

    /// Returns the stack with the head: the decoder, or the encoder of an encoder-only model.
    pub fn last_stack(&self) -> &StackSpec {
        self.decoder.as_ref().or(self.encoder.as_ref()).expect("a model has a stack; this is a bug")
    }

    /// Returns the layers whose keys and values are cached: those of the decoder.
    pub fn cached_layers(&self) -> &[LayerSpec] {
        self.decoder.as_ref().map_or(&[], |stack| &stack.layers)
    }

    /// Returns the number of layers of all stacks.
    pub fn layers(&self) -> usize {
        self.stacks().map(|stack| stack.layers.len()).sum()
    }

    /// Returns the maximum length of the encoder input in tokens; 0 for decoder-only models.
    pub fn encoder_context(&self) -> usize {
        self.encoder.as_ref().map_or(0, |stack| stack.context)
    }

    /// Makes the model one that returns hidden states only, without a head or a classifier, whose tensors the
    /// files may have or lack.
    pub fn drop_head(&mut self) {
        let Some(decoder) = &mut self.decoder else { return };
        if let Some(classifier) = self.classifier.take() {
            self.ignored.patterns.extend(classifier.slices().map(|slice| slice.name.clone()));
        }
        let Some(head) = decoder.head.take() else { return };
        let linears = head.transform.iter().map(|(linear, ..)| linear).chain(&head.project_out);
        let of_linears = linears.flat_map(|linear| std::iter::once(&linear.weight).chain(&linear.bias));
        let of_norm = head.transform.iter().flat_map(|(.., norm)| norm.weights.iter().chain(&norm.biases));
        let table = std::iter::once(&head.table).filter(|_| !head.tied);
        let unused = of_linears.chain(of_norm).chain(&head.bias).chain(table).map(|slice| slice.name.clone());
        self.ignored.patterns.extend(unused.chain(head.unused_names.iter().cloned()));
    }

    /// Returns whether the model computes logits.
    pub fn has_head(&self) -> bool {
        self.last_stack().head.is_some()
    }
}

impl AttentionSpec {
    /// Returns the width of all queries together.
    pub fn q_width(&self) -> usize {
        self.heads * self.k_dim
    }

    /// Returns the width of all keys together.
    pub fn k_width(&self) -> usize {
        self.kv_heads * self.k_dim
    }

    /// Returns the width of all values together.
    pub fn v_width(&self) -> usize {
        self.kv_heads * self.v_dim
    }

    /// Returns the width of the output of a head, before the output projection.
    pub fn head_output_dim(&self) -> usize {
        self.latent.as_ref().map_or(self.v_dim, |latent| latent.value_dim)
    }

    /// Returns whether the norms of queries and keys span all heads.
    pub fn norms_all_heads(&self) -> bool {
        self.qk_norms.as_ref().is_some_and(|(q, _)| q.width != self.k_dim)
    }

    /// Returns the larger width of a whole stage's queries and keys whose norm spans several ranks; 0 if
    /// there are none.
    pub fn gathered_qk_width(&self) -> usize {
        let widths = self.qk_split.iter().flat_map(|(q, k)| [q, k]).map(|spread| spread.widths.iter().sum());
        widths.max().unwrap_or(0)
    }

    /// Returns the width of the products of queries, or of keys, with vectors of distances; 0 without any.
    pub fn distances_width(&self) -> usize {
        self.distances.as_ref().map_or(0, |distances| self.heads * distances.buckets())
    }

    /// Returns the width of what attention sums for all heads together.
    pub fn out_width(&self) -> usize {
        self.heads * self.v_dim
    }
}

impl MlpSpec {
    /// Returns the width of the inner layer that is kept in row buffers: of the dense network or the shared
    /// expert.
    pub fn width(&self) -> usize {
        match self {
            MlpSpec::Dense(dense) => dense.width,
            MlpSpec::Experts(moe) => moe.shared.as_ref().map_or(0, |shared| shared.width),
        }
    }

    /// Returns the number of experts in this shard; 0 for a dense network.
    pub fn experts(&self) -> usize {
        match self {
            MlpSpec::Dense(_) => 0,
            MlpSpec::Experts(moe) => moe.experts.len(),
        }
    }
}

impl MoeSpec {
    /// Returns the parameters that the kernels need.
    pub fn shape(&self) -> MoeShape {
        let MoeSpec { top_k, scoring, groups, normalize_scores, scale, weighs_input, .. } = *self;
        let first = self.experts.first().expect("there is an expert; this is a bug");
        let (experts, width, activation) = (self.router.n, first.width, first.activation);
        MoeShape {
            experts,
            first_expert: self.first_expert,
            top_k,
            scoring,
            groups,
            normalize_scores,
            scale,
            weighs_input,
            width,
            activation,
        }
    }
}
