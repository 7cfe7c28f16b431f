//! The cost of steps of a model, by its specification: seconds of computing some rows in each layer, and the
//! bytes of matrices that are read for them.
//!
//! A layer takes the time of its GEMMs, of attention, and of operations that pass over the activations.
//!
//! Invariant: more rows, longer contexts and fewer resident bytes are never faster.

use super::rates::{AttentionShape, MachineRates};
use super::step::{LayerWork, StackWork, StepCost, StepTime, StepWork};
use super::traffic::StepPolicy;
use crate::model::load;
use crate::model::spec::{AttentionSpec, LayerSpec, ModelSpec, StackSpec, TensorSlice};
use crate::model::weights::{Attention, Dense, Head, LayerWeights, Linear, Mlp, Stack};
use mainstem_kernels::{Mask, QuantType, Weight};

/// Bytes of an activation, and of a logit.
const VALUE_BYTES: f64 = 4.0;

/// Number of times that the residual stream, and the vectors of attention and of the MLP, pass through memory
/// in a layer.
const STREAM_PASSES: f64 = 6.0;
const INNER_PASSES: f64 = 3.0;

/// Number of passes over logits in sampling.
const LOGIT_PASSES: f64 = 2.0;

/// Operations of a layer.
const LAYER_OPERATIONS: f64 = 12.0;

/// The cost of a model.
#[derive(Clone, Debug)]
pub struct ModelCost {
    encoder: StackCost,
    decoder: StackCost,
    /// The matrices that each row with logits is multiplied by.
    head: Vec<Matrix>,
    vocab: f64,
    part: Part,
}

/// The part of a model that a cost is of.
#[derive(Clone, Copy, Debug)]
struct Part {
    /// Whether the whole model has an encoder, and a decoder.
    has_encoder: bool,
    has_decoder: bool,
    /// Whether it returns the results of steps.
    is_last: bool,
}

/// The cost of the layers of a stack.
#[derive(Clone, Debug, Default)]
struct StackCost {
    /// Layers that differ.
    kinds: Vec<LayerCost>,
    /// The kind of each layer.
    layers: Vec<usize>,
}

/// The cost of a layer.
#[derive(Clone, Debug, Default, PartialEq)]
struct LayerCost {
    matrices: Vec<Matrix>,
    /// Matrices that encoder positions are multiplied by, for cross-attention.
    of_encoder: Vec<Matrix>,
    attention: Vec<AttentionCost>,
    /// Bytes of activations that a row reads and writes.
    row_bytes: f64,
    /// Bytes of all matrices, which may be read from slower memories.
    bytes: f64,
    /// Bytes of those of experts, of which only the chosen ones are read.
    expert_bytes: f64,
    /// Number of experts, and of those that a row chooses; 0 without a mixture.
    experts: [f64; 2],
}

/// A matrix, or the matrices of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Matrix {
    ty: QuantType,
    /// Number of elements, of all experts together.
    weights: f64,
    /// Number of experts, and of those that a row is multiplied by.
    experts: f64,
    chosen: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
struct AttentionCost {
    heads: [usize; 4],
    /// Whether V is in K.
    v_in_k: bool,
    /// Maximum number of positions that a row attends to.
    window: Option<f64>,
    /// Whether it attends to the encoder's positions.
    is_cross: bool,
}

impl ModelCost {
    /// Returns the cost of a model whose tensors are loaded in the formats that `types` returns.
    pub fn from_spec(spec: &ModelSpec, types: &dyn Fn(&TensorSlice) -> QuantType) -> ModelCost {
        let held = load::count(spec, types);
        let layers = |stack: &Option<StackSpec>, held: &Option<Stack<usize>>| {
            let stack = stack.as_ref().zip(held.as_ref());
            stack.map(|(stack, held)| StackCost::new(stack, held, spec.hidden)).unwrap_or_default()
        };
        let head = held.decoder.as_ref().or(held.encoder.as_ref()).and_then(|stack| stack.head.as_ref());
        let has_decoder = spec.decoder.is_some();
        ModelCost {
            part: Part { has_encoder: spec.encoder.is_some(), has_decoder, is_last: true },
            encoder: layers(&spec.encoder, &held.encoder),
            decoder: layers(&spec.decoder, &held.decoder),
            head: head.map(head_matrices).unwrap_or_default(),
            vocab: head.map_or(0.0, |head| head.table.n as f64),
        }
    }

    /// Returns the cost of a part of the model that `whole` is the cost of. `is_last` says whether it returns
    /// the results of steps.
    pub fn of_stage(self, whole: &ModelCost, is_last: bool) -> ModelCost {
        ModelCost { part: Part { is_last, ..whole.part }, ..self }
    }

    /// Returns the number formats of all matrices.
    pub fn formats(&self) -> Vec<QuantType> {
        let layers = self.encoder.kinds.iter().chain(&self.decoder.kinds);
        let matrices = layers.flat_map(|layer| layer.matrices.iter().chain(&layer.of_encoder));
        let mut formats: Vec<QuantType> = Vec::new();
        for Matrix { ty, .. } in matrices.chain(&self.head) {
            if !formats.contains(ty) {
                formats.push(*ty);
            }
        }
        formats
    }

    /// Returns the shapes of attention over a cache of this format.
    pub fn attention_shapes(&self, ty: QuantType) -> Vec<AttentionShape> {
        let mut shapes = Vec::new();
        let layers = self.encoder.kinds.iter().chain(&self.decoder.kinds);
        for attention in layers.flat_map(|layer| &layer.attention) {
            let shape = attention.shape(ty);
            if !shapes.contains(&shape) {
                shapes.push(shape);
            }
        }
        shapes
    }

    /// Returns whether the model has an encoder and a decoder, so that prompts are encoded.
    pub fn has_both(&self) -> bool {
        self.part.has_encoder && self.part.has_decoder
    }

    /// Returns whether the model generates tokens.
    pub fn generates(&self) -> bool {
        self.part.has_decoder
    }

    /// Returns the time of a step.
    pub fn step(&self, rates: &MachineRates, policy: &StepPolicy, work: &StepWork) -> StepTime {
        self.prepare(rates, policy.kv, work).time(policy)
    }

    /// Returns what a step costs wherever weights and caches are, with a cache of this format.
    pub fn prepare(&self, rates: &MachineRates, kv: QuantType, work: &StepWork) -> StepCost {
        let head: f64 = self.head.iter().map(|matrix| matrix.seconds(rates, work.outputs)).sum();
        let sampling = work.outputs * self.vocab * VALUE_BYTES * LOGIT_PASSES / rates.memory;
        let scheduling = if self.part.is_last { rates.step + work.outputs * rates.token } else { 0.0 };
        // The rows of prompts belong to the first stack of the model.
        let encoder = if self.part.has_encoder { work.prompt_rows } else { 0.0 };
        let prompt = work.prompt_rows - encoder;
        let all_bytes = self.encoder.bytes() + self.decoder.bytes();
        let prepared = |stack: &StackCost, rows: Rows, caches: f64| StackWork {
            layers: stack
                .counted()
                .map(|(layer, count)| (layer.work((rates, kv), work, rows, all_bytes), count))
                .collect(),
            order: stack.layers.clone(),
            caches,
        };
        let mut stacks = Vec::new();
        if encoder > 0.0 && self.encoder.is_there() {
            stacks.push(prepared(&self.encoder, Rows { prompt: encoder, ..Rows::default() }, 0.0));
        }
        if self.decoder.is_there() {
            let rows = Rows { prompt, decode: work.decode_rows, encoder };
            stacks.push(prepared(&self.decoder, rows, 1.0 / self.decoder.layers.len() as f64));
        }
        StepCost { stacks, around: head + sampling + scheduling, work: *work }
    }
}

impl StackCost {
    fn new(spec: &StackSpec, held: &Stack<usize>, hidden: usize) -> StackCost {
        let mut cost = StackCost::default();
        for (index, spec) in spec.layers.iter().enumerate() {
            let mut layer = layer_cost(spec, held.weights.layer(index));
            layer.row_bytes += STREAM_PASSES * hidden as f64 * VALUE_BYTES;
            let kind = cost.kinds.iter().position(|kind| *kind == layer).unwrap_or(cost.kinds.len());
            if kind == cost.kinds.len() {
                cost.kinds.push(layer);
            }
            cost.layers.push(kind);
        }
        cost
    }

    fn is_there(&self) -> bool {
        !self.layers.is_empty()
    }

    /// Returns the kinds of layers, each with the number of its layers.
    fn counted(&self) -> impl Iterator<Item = (&LayerCost, f64)> {
        let count = |kind: usize| self.layers.iter().filter(|other| **other == kind).count() as f64;
        self.kinds.iter().enumerate().map(move |(kind, layer)| (layer, count(kind)))
    }

    /// Returns the bytes of all matrices.
    fn bytes(&self) -> f64 {
        self.layers.iter().map(|kind| self.kinds[*kind].bytes).sum()
    }
}

/// The rows of a step that a layer computes.
#[derive(Clone, Copy, Default)]
struct Rows {
    prompt: f64,
    decode: f64,
    encoder: f64,
}

impl LayerCost {
    /// Returns the work of the layer in a step, in a model with so many bytes of matrices of layers.
    fn work(
        &self,
        (rates, kv): (&MachineRates, QuantType),
        work: &StepWork,
        rows: Rows,
        all_bytes: f64,
    ) -> LayerWork {
        let read = [self.read_bytes(rows.prompt + rows.decode), self.bytes];
        let compute = self.seconds(rates, kv, work, rows);
        LayerWork { compute, read: read.map(|bytes| bytes / all_bytes.max(1.0)) }
    }

    /// Returns the bytes that a step with so many rows reads if nothing is resident. Experts are resident as
    /// often as other matrices.
    fn read_bytes(&self, rows: f64) -> f64 {
        let [experts, chosen] = self.experts;
        let used = if experts > 0.0 { distinct_experts(experts, chosen, rows) / experts } else { 1.0 };
        self.bytes - self.expert_bytes * (1.0 - used)
    }

    fn seconds(&self, rates: &MachineRates, kv: QuantType, work: &StepWork, rows: Rows) -> f64 {
        let all = rows.prompt + rows.decode;
        if all + rows.encoder == 0.0 {
            return 0.0;
        }
        let gemms: f64 = self.matrices.iter().map(|matrix| matrix.seconds(rates, all)).sum();
        let of_encoder: f64 = self.of_encoder.iter().map(|matrix| matrix.seconds(rates, rows.encoder)).sum();
        let attention = self.attention.iter().map(|attention| {
            let speed = rates.attention(&attention.shape(kv));
            let seen = |context: f64| {
                let context = if attention.is_cross { work.encoder_len } else { context };
                attention.window.map_or(context, |window| context.min(window))
            };
            let prompt = rows.prompt * seen(work.prompt_context);
            let decode = rows.decode * seen(work.decode_context);
            let seconds = |positions: f64, each: f64| if positions > 0.0 { positions * each } else { 0.0 };
            seconds(prompt, speed.prompt) + seconds(decode, speed.decode)
        });
        let passes = all * self.row_bytes / rates.memory + LAYER_OPERATIONS * rates.operation;
        gemms + of_encoder + attention.sum::<f64>() + passes
    }
}

impl Matrix {
    fn new<Buf>(weight: &Weight<Buf>) -> Matrix {
        Matrix { ty: weight.ty, weights: (weight.n * weight.k) as f64, experts: 1.0, chosen: 1.0 }
    }

    /// Returns the seconds of its GEMM with so many rows.
    fn seconds(&self, rates: &MachineRates, rows: f64) -> f64 {
        if rows <= 0.0 {
            return 0.0;
        }
        let used = distinct_experts(self.experts, self.chosen, rows);
        let each = rows * self.chosen / used;
        used * rates.gemm(self.ty, self.weights / self.experts, each)
    }
}

/// Returns the expected number of experts that some of these rows choose: each row `chosen` of them, at
/// random.
fn distinct_experts(experts: f64, chosen: f64, rows: f64) -> f64 {
    experts * (1.0 - (1.0 - chosen / experts).powf(rows))
}

impl AttentionCost {
    fn new(spec: &AttentionSpec, is_cross: bool) -> AttentionCost {
        let window = match spec.mask {
            Mask::Causal { .. } | Mask::Chunked { .. } => spec.mask.causal_window(),
            Mask::Bidirectional { window } => window.map(|reach| 2 * reach + 1),
        };
        AttentionCost {
            heads: [spec.heads, spec.kv_heads, spec.k_dim, spec.v_dim],
            v_in_k: spec.latent.is_some(),
            window: window.map(|window| window as f64),
            is_cross,
        }
    }

    fn shape(&self, ty: QuantType) -> AttentionShape {
        let ([heads, kv_heads, k_dim, v_dim], v_in_k) = (self.heads, self.v_in_k);
        AttentionShape { ty, heads, kv_heads, k_dim, v_dim, v_in_k }
    }
}

fn layer_cost(spec: &LayerSpec, held: &LayerWeights<usize>) -> LayerCost {
    let mut cost = LayerCost::default();
    cost.add_attention(&spec.attention, &held.attention, false);
    if let Some(((_, spec), (_, held))) = spec.cross.as_ref().zip(held.cross.as_ref()) {
        cost.add_attention(spec, held, true);
    }
    match &held.mlp {
        Mlp::Dense(dense) => cost.add_dense(dense),
        Mlp::Experts(moe) => {
            let (experts, chosen) = (moe.experts.len().max(1) as f64, moe.shape.top_k as f64);
            let chosen = chosen.min(experts);
            if let Some(one) = moe.experts.first() {
                for weight in [&one.gate, &one.down].into_iter().chain(&one.up) {
                    let matrix = Matrix::new(weight);
                    cost.matrices.push(Matrix {
                        weights: matrix.weights * experts,
                        experts,
                        chosen,
                        ..matrix
                    });
                    cost.row_bytes += chosen * INNER_PASSES * weight.n as f64 * VALUE_BYTES;
                }
            }
            let each = moe.experts.iter().flat_map(|it| [&it.gate, &it.down].into_iter().chain(&it.up));
            cost.expert_bytes = each.map(|weight| weight.buf as f64).sum();
            cost.bytes += cost.expert_bytes;
            cost.experts = [experts, chosen];
            [&moe.router].into_iter().chain(&moe.shared_router).for_each(|linear| cost.add(linear, false));
            moe.shared.iter().for_each(|dense| cost.add_dense(dense));
        }
    }
    cost
}

impl LayerCost {
    fn add(&mut self, linear: &Linear<usize>, of_encoder: bool) {
        let list = if of_encoder { &mut self.of_encoder } else { &mut self.matrices };
        list.push(Matrix::new(&linear.weight));
        self.bytes += linear.weight.buf as f64;
    }

    fn add_attention(&mut self, spec: &AttentionSpec, held: &Attention<usize>, is_cross: bool) {
        let Attention { q, k, v, o, .. } = held;
        [q, o].into_iter().for_each(|linear| self.add(linear, false));
        [k, v].into_iter().for_each(|linear| self.add(linear, is_cross));
        self.attention.push(AttentionCost::new(spec, is_cross));
        let latent = held.latent.iter().flat_map(|latent| latent.linears());
        latent.clone().for_each(|linear| self.add(linear, false));
        let computed = [q, k, v].into_iter().chain(latent);
        let width = computed.map(|linear| linear.weight.n as f64).sum::<f64>();
        self.row_bytes += INNER_PASSES * width * VALUE_BYTES;
    }

    fn add_dense(&mut self, dense: &Dense<usize>) {
        [&dense.gate, &dense.down].into_iter().chain(&dense.up).for_each(|linear| self.add(linear, false));
        self.row_bytes += INNER_PASSES * dense.width as f64 * VALUE_BYTES;
    }
}

/// Returns the matrices that each row with logits is multiplied by.
fn head_matrices(head: &Head<usize>) -> Vec<Matrix> {
    let transform = head.transform.iter().map(|(linear, ..)| &linear.weight);
    let before = transform.chain(head.project_out.iter().map(|linear| &linear.weight));
    before.chain([&*head.table]).map(Matrix::new).collect()
}
