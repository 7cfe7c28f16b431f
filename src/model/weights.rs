//! The weights of a loaded model, in a device's memory.
//!
//! Invariant: buffers are in the memory of one backend, in the layout that its operations expect.

use super::shard::StageRole;
use super::spec::{ColumnSplit, ModelSpec};
use mainstem_kernels::{
    Abort, Activation, Backend, DeviceError, DistanceBuckets, Expert, ExpertBiases, ExpertSource, Experts,
    MoeShape, Norm, QuantType, RelativeBias, Rope, Weight,
};
use std::any::Any;
use std::sync::Arc;

/// A model, or one rank's part of it, in a device's memory. An encoder-decoder model has two stacks.
pub struct Model<Buf> {
    /// Specification of this rank's part.
    pub spec: ModelSpec,
    pub role: StageRole,
    pub encoder: Option<Stack<Buf>>,
    pub decoder: Option<Stack<Buf>>,
    /// The loaded tensors, in loading order.
    pub tensors: Vec<TensorRecord>,
}

/// A stack of layers with its embedding, final norm and head.
pub struct Stack<Buf> {
    /// The embedding; `None` if the first layer is on another stage.
    pub embedding: Option<Embedding<Buf>>,
    /// Tables of the distinct rotary position embeddings of the layers.
    pub ropes: Vec<Rope<Buf>>,
    /// The distinct relative position biases of the layers.
    pub relative_biases: Vec<RelativeBias<Buf>>,
    pub weights: Box<dyn WeightSource<Buf>>,
    pub norm: Option<Norm<Buf>>,
    pub head: Option<Head<Buf>>,
}

/// The token embedding, which maps tokens to the residual stream.
pub struct Embedding<Buf> {
    /// Table, (tokens, width).
    pub table: Arc<Weight<Buf>>,
    /// Token of the table's first row.
    pub first_token: usize,
    pub scale: f32,
    /// Projection to the width of the residual stream.
    pub project_in: Option<Linear<Buf>>,
    /// Whether the projection comes after positions and norm.
    pub projects_last: bool,
    /// Table that is added by position.
    pub position_table: Option<PositionTable<Buf>>,
    pub norm: Option<Norm<Buf>>,
    /// Whether the norm comes before the table is added.
    pub norm_first: bool,
}

/// A table of position embeddings, (types * positions, width): the positions of the first type of tokens,
/// then those of the second, and so on.
pub struct PositionTable<Buf> {
    pub table: Weight<Buf>,
    /// Row of position 0.
    pub offset: usize,
    /// Number of rows of a type; 0 if all have the same.
    pub type_rows: usize,
}

/// Provides the weights of a stack's layers, by index within the stack. A step uses the layers in ascending
/// order, one at a time, each between one call of [`WeightSource::acquire`] and one of
/// [`WeightSource::release`]. Nothing is allocated in them.
pub trait WeightSource<Buf>: Any + Send {
    /// Begins a step. Without openings ([`mainstem_kernels::Span::is_opening`]), matrices that only these use
    /// may be missing. Does nothing for a source that has all weights.
    fn begin_step(&mut self, _has_openings: bool) {}

    /// Waits until the weights of a layer are in the memory of `device`, where they stay until they are
    /// released. Fails if they cannot be read.
    fn acquire(&mut self, device: &mut dyn Backend<Buf = Buf>, layer: usize) -> Result<(), DeviceError>;

    /// Returns the weights of the acquired layer.
    fn layer(&self, layer: usize) -> &LayerWeights<Buf>;

    /// Ends the use of the acquired layer's weights: their memory may be overwritten.
    fn release(&mut self, device: &mut dyn Backend<Buf = Buf>, layer: usize);

    /// Lets `abort` end waits in [`WeightSource::acquire`], and for experts of the layers, which then fail.
    /// Does nothing for a source that never waits.
    fn stop_on_abort(&mut self, _abort: &Abort) {}
}

/// The weights of one layer.
pub struct LayerWeights<Buf> {
    pub attention_norms: SublayerNorms<Buf>,
    pub attention: Attention<Buf>,
    /// Cross-attention to the encoder output, with its norms.
    pub cross: Option<(SublayerNorms<Buf>, Attention<Buf>)>,
    pub mlp_norms: SublayerNorms<Buf>,
    pub mlp: Mlp<Buf>,
}

impl<Buf> LayerWeights<Buf> {
    /// Lets `abort` end waits for experts, which then fail.
    pub fn stop_on_abort(&self, abort: &Abort) {
        if let Mlp::Experts(moe) = &self.mlp
            && let Some(source) = &moe.source
        {
            source.stop_on_abort(abort);
        }
    }

    /// Calls `visit` with every matrix, in the order in which they are loaded.
    pub fn for_each_matrix(&mut self, visit: &mut dyn FnMut(&mut Weight<Buf>)) {
        let cross = self.cross.as_mut().map(|(_, attention)| attention);
        for attention in std::iter::once(&mut self.attention).chain(cross) {
            let Attention { q, k, v, o, .. } = &mut *attention;
            [q, k, v, o].into_iter().for_each(|linear| linear.for_each_matrix(visit));
            attention.latent.iter_mut().for_each(|latent| latent.for_each_matrix(visit));
        }
        match &mut self.mlp {
            Mlp::Dense(dense) => dense.for_each_matrix(visit),
            Mlp::Experts(moe) => {
                moe.router.for_each_matrix(visit);
                for Expert { gate, up, down } in &mut moe.experts {
                    visit(gate);
                    up.iter_mut().for_each(&mut *visit);
                    visit(down);
                }
                moe.shared.iter_mut().for_each(|dense| dense.for_each_matrix(visit));
                moe.shared_router.iter_mut().for_each(|linear| linear.for_each_matrix(visit));
            }
        }
    }
}

impl<Buf> Dense<Buf> {
    fn for_each_matrix(&mut self, visit: &mut dyn FnMut(&mut Weight<Buf>)) {
        self.gate.for_each_matrix(visit);
        self.up.iter_mut().for_each(|linear| linear.for_each_matrix(visit));
        self.down.for_each_matrix(visit);
    }
}

impl<Buf> Linear<Buf> {
    fn for_each_matrix(&mut self, visit: &mut dyn FnMut(&mut Weight<Buf>)) {
        std::iter::once(&mut self.weight).chain(&mut self.rest).for_each(visit);
    }
}

/// The norms around a sub-layer: of its input, of its output, and of the sum.
pub struct SublayerNorms<Buf> {
    pub pre: Option<Norm<Buf>>,
    pub out: Option<Norm<Buf>>,
    pub post: Option<Norm<Buf>>,
}

/// The projections around attention.
pub struct Attention<Buf> {
    pub q: Linear<Buf>,
    pub k: Linear<Buf>,
    pub v: Linear<Buf>,
    pub o: Linear<Buf>,
    /// Norms of queries and of keys.
    pub qk_norms: Option<(Norm<Buf>, Norm<Buf>)>,
    /// Attention sinks, F32, (heads).
    pub sinks: Option<Buf>,
    /// The split of queries and keys over ranks, if a norm spans all heads.
    pub qk_split: Option<(ColumnSplit, ColumnSplit)>,
    pub latent: Option<Latent<Buf>>,
    pub distances: Option<Distances<Buf>>,
}

/// The vectors of distances of disentangled attention: see [`super::spec::distances`].
pub struct Distances<Buf> {
    /// Their queries and keys, (heads * buckets, k_dim), F32.
    pub queries: Weight<Buf>,
    pub keys: Weight<Buf>,
    pub buckets: DistanceBuckets<Buf>,
}

/// The weights of latent attention besides: see [`super::spec::latent::LatentSpec`].
pub struct Latent<Buf> {
    pub q_a: Option<(Linear<Buf>, Norm<Buf>)>,
    pub q_rope: Linear<Buf>,
    pub k_rope: Linear<Buf>,
    pub absorbed: Linear<Buf>,
    pub keys: Option<Linear<Buf>>,
    pub norm: Norm<Buf>,
}

impl<Buf> Latent<Buf> {
    /// Returns the linear layers.
    pub fn linears(&self) -> impl Iterator<Item = &Linear<Buf>> + Clone {
        let q_a = self.q_a.iter().map(|(linear, _)| linear);
        q_a.chain([&self.q_rope, &self.k_rope, &self.absorbed]).chain(&self.keys)
    }

    fn for_each_matrix(&mut self, visit: &mut dyn FnMut(&mut Weight<Buf>)) {
        let q_a = self.q_a.iter_mut().map(|(linear, _)| linear);
        let linears = q_a.chain([&mut self.q_rope, &mut self.k_rope, &mut self.absorbed]);
        linears.chain(&mut self.keys).for_each(|linear| linear.for_each_matrix(visit));
    }
}

/// A feed-forward network.
pub enum Mlp<Buf> {
    Dense(Box<Dense<Buf>>),
    Experts(Box<Moe<Buf>>),
}

/// A dense feed-forward network: down(act(gate(x)) * up(x)), or down(act(gate(x))) without `up`.
pub struct Dense<Buf> {
    pub width: usize,
    pub activation: Activation,
    pub gate: Linear<Buf>,
    pub up: Option<Linear<Buf>>,
    pub down: Linear<Buf>,
}

/// A mixture of experts.
pub struct Moe<Buf> {
    pub shape: MoeShape,
    pub router: Linear<Buf>,
    /// Correction of the scores by which experts are chosen, F32, (experts).
    pub correction: Option<Buf>,
    pub experts: Vec<Expert<Buf>>,
    /// The biases of the experts; empty if they have none.
    pub biases: Vec<ExpertBiases<Buf>>,
    /// Reads experts when rows choose them; their buffers above are then empty. `None` if all are in memory.
    pub source: Option<Box<dyn ExpertSource<Buf>>>,
    /// The shared expert, which processes every token.
    pub shared: Option<Dense<Buf>>,
    /// Gate of the shared expert, (1, hidden): its sigmoid multiplies the shared expert's output.
    pub shared_router: Option<Linear<Buf>>,
}

impl<Buf> Moe<Buf> {
    /// Returns the experts of this device.
    pub fn experts(&self) -> Experts<'_, Buf> {
        let Moe { experts, biases, correction, .. } = self;
        Experts { held: experts, source: self.source.as_deref(), biases, correction: correction.as_ref() }
    }
}

/// A linear layer: y = x · Wᵀ (+ b).
pub struct Linear<Buf> {
    pub weight: Weight<Buf>,
    /// Further weights, if each has only a range of the layer's rows: those with the rows that follow.
    pub rest: Vec<Weight<Buf>>,
    /// Bias, F32, (n).
    pub bias: Option<Buf>,
}

/// The head, which maps the residual stream to logits.
pub struct Head<Buf> {
    pub transform: Option<(Linear<Buf>, Activation, Norm<Buf>)>,
    /// Projection to the width of the embedding.
    pub project_out: Option<Linear<Buf>>,
    /// Matrix (tokens, width); the embedding table if the head is tied.
    pub table: Arc<Weight<Buf>>,
    /// The split of the vocabulary over ranks, if it is split.
    pub vocab_split: Option<ColumnSplit>,
    /// Bias of the logits, F32, (tokens).
    pub bias: Option<Buf>,
    pub scale: f32,
    pub softcap: Option<f32>,
}

/// Describes a loaded tensor, or a part of one.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorRecord {
    pub name: String,
    pub ty: QuantType,
    /// Loaded shape: (n, k), or the length of a vector.
    pub shape: Vec<usize>,
    /// Size in that number format.
    pub bytes: usize,
}

impl TensorRecord {
    /// Returns the rows of a matrix, or the length of a vector.
    pub fn n(&self) -> usize {
        self.shape[0]
    }

    /// Returns the columns of a matrix; 1 for a vector.
    pub fn k(&self) -> usize {
        self.shape.get(1).copied().unwrap_or(1)
    }
}

/// All layers in the device's memory, where they stay.
impl<Buf: Send + Sync + 'static> WeightSource<Buf> for Vec<LayerWeights<Buf>> {
    fn acquire(&mut self, _: &mut dyn Backend<Buf = Buf>, _: usize) -> Result<(), DeviceError> {
        Ok(())
    }

    fn layer(&self, layer: usize) -> &LayerWeights<Buf> {
        &self[layer]
    }

    fn release(&mut self, _: &mut dyn Backend<Buf = Buf>, _: usize) {}

    fn stop_on_abort(&mut self, abort: &Abort) {
        self.iter().for_each(|layer| layer.stop_on_abort(abort));
    }
}

/// Layers in the device's memory, several of which have the same weights.
pub struct SharedLayers<Buf> {
    /// The distinct layers.
    pub layers: Vec<LayerWeights<Buf>>,
    /// The index of each layer among the distinct ones.
    pub places: Vec<usize>,
}

impl<Buf: Send + Sync + 'static> WeightSource<Buf> for SharedLayers<Buf> {
    fn acquire(&mut self, _: &mut dyn Backend<Buf = Buf>, _: usize) -> Result<(), DeviceError> {
        Ok(())
    }

    fn layer(&self, layer: usize) -> &LayerWeights<Buf> {
        &self.layers[self.places[layer]]
    }

    fn release(&mut self, _: &mut dyn Backend<Buf = Buf>, _: usize) {}

    fn stop_on_abort(&mut self, abort: &Abort) {
        self.layers.stop_on_abort(abort);
    }
}
