//! Models described by their sizes: the memory, bandwidth and computation that each layer costs.
//!
//! Invariant: only sizes in bytes and numbers of multiplications; every layer of the model is included, in
//! order.

use crate::model::load::{self, LoadedStacks};
use crate::model::shard::HeadSplit;
use crate::model::spec::{AttentionSpec, LayerSpec, ModelSpec, StackSpec, TensorSlice};
use crate::model::weights::{Attention, Dense, Embedding, LayerWeights, Linear, Mlp, Stack, SublayerNorms};
use mainstem_kernels::{KvLayout, Norm, QuantType, Weight};
use std::iter::Sum;
use std::ops::{Add, Mul, Range};
use std::sync::Arc;

/// The resources that a part of a model costs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ResourceCost {
    /// Size of the weights in bytes.
    pub stored: f64,
    /// Bytes of weights that every step reads, whatever its number of rows.
    pub read: f64,
    /// Additional bytes that each row reads: the experts that it is routed to.
    pub read_per_row: f64,
    /// Maximum bytes that a step reads, whatever its number of rows: all experts, and none of an embedding
    /// table.
    pub read_max: f64,
    /// Multiplications of weights per row.
    pub macs: f64,
    /// Multiplications per row and cached position.
    pub macs_per_position: f64,
    /// Size of K and V of one position in bytes.
    pub kv: f64,
    /// Number of device operations per step.
    pub ops: f64,
    /// Number of all-reduces over the ranks of a stage.
    pub all_reduces: f64,
}

impl Add for ResourceCost {
    type Output = ResourceCost;

    fn add(self, other: ResourceCost) -> ResourceCost {
        ResourceCost {
            stored: self.stored + other.stored,
            read: self.read + other.read,
            read_per_row: self.read_per_row + other.read_per_row,
            read_max: self.read_max + other.read_max,
            macs: self.macs + other.macs,
            macs_per_position: self.macs_per_position + other.macs_per_position,
            kv: self.kv + other.kv,
            ops: self.ops + other.ops,
            all_reduces: self.all_reduces + other.all_reduces,
        }
    }
}

impl Sum for ResourceCost {
    fn sum<I: Iterator<Item = ResourceCost>>(parts: I) -> ResourceCost {
        parts.fold(ResourceCost::default(), Add::add)
    }
}

/// Scales the cost to one rank's share. The numbers of operations and all-reduces stay the same.
impl Mul<f64> for ResourceCost {
    type Output = ResourceCost;

    fn mul(self, share: f64) -> ResourceCost {
        ResourceCost {
            stored: self.stored * share,
            read: self.read * share,
            read_per_row: self.read_per_row * share,
            read_max: self.read_max * share,
            macs: self.macs * share,
            macs_per_position: self.macs_per_position * share,
            kv: self.kv * share,
            ..self
        }
    }
}

impl ResourceCost {
    /// Returns the bytes of weights that a step of `rows` rows reads.
    pub fn bytes_read(&self, rows: f64) -> f64 {
        (self.read + self.read_per_row * rows).min(self.read_max)
    }
}

/// The cost of a layer, with the embedding or head next to it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerCost {
    /// Cost that the ranks of a stage split by their shares, as if it could be split anywhere.
    pub divided: ResourceCost,
    /// Cost of the query heads, from their projection to the output projection; each rank has whole heads.
    pub query_heads: ResourceCost,
    /// Cost of K and V, from their projections to the cache; each rank that needs a KV head has all of it.
    pub kv_heads: ResourceCost,
    /// The split of heads, by the block size of this layer alone; `None` splits them like everything else.
    pub head_split: Option<HeadSplit>,
}

impl LayerCost {
    /// Returns the sum of all parts.
    pub fn total(&self) -> ResourceCost {
        self.divided + self.query_heads + self.kv_heads
    }

    /// Returns the cost for each rank of a stage. More ranks than heads allow are refused elsewhere; here
    /// they get fractions of heads.
    pub fn by_rank(&self, shares: &[u32]) -> Vec<ResourceCost> {
        let all = f64::from(shares.iter().sum::<u32>());
        let deal = self.head_split.filter(|deal| (2..=deal.max_ranks()).contains(&shares.len()));
        let heads = deal.map(|deal| (deal, deal.by_rank(shares)));
        let rank_cost = |(rank, share): (usize, &u32)| {
            let share = f64::from(*share) / all;
            let (queries, kv) = heads.as_ref().map_or((share, share), |(deal, by_rank)| {
                let own = &by_rank[rank];
                (own.query.len() as f64 / deal.heads as f64, own.kv.len() as f64 / deal.kv_heads as f64)
            });
            self.divided * share + self.query_heads * queries + self.kv_heads * kv
        };
        shares.iter().enumerate().map(rank_cost).collect()
    }
}

/// The sizes of a whole model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelShape {
    pub name: String,
    /// Width of the residual stream.
    pub hidden: usize,
    pub vocab: usize,
    /// The encoder, if there is one.
    pub encoder: Option<StackShape>,
    /// The decoder, if there is one.
    pub decoder: Option<StackShape>,
    /// Tables that several layers have in common, such as an embedding that is also the head.
    pub shared_tables: Vec<SharedTable>,
}

/// A table that two layers have in common, which a device with both holds once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SharedTable {
    /// The two layers.
    pub first: usize,
    pub last: usize,
    /// Size in bytes.
    pub stored: f64,
}

/// The costs of a stack of layers.
#[derive(Clone, Debug, PartialEq)]
pub struct StackShape {
    /// The embedding, before the first layer.
    pub embedding: ResourceCost,
    pub layers: Vec<LayerCost>,
    /// The head, after the last layer.
    pub head: ResourceCost,
}

/// The sizes of a decoder whose layers are identical.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct UniformDecoder {
    pub layers: usize,
    pub hidden: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub ffn: usize,
    /// Whether the feed-forward network has a gate.
    pub gated: bool,
    pub vocab: usize,
    /// Whether the head's matrix is the embedding table.
    pub tied: bool,
    pub weights: QuantType,
    pub kv: QuantType,
}

/// Falcon-40B in half precision: the model of Shi et al. 2024, Table 5.
pub const FALCON_40B: UniformDecoder = UniformDecoder {
    layers: 60,
    hidden: 8192,
    heads: 128,
    kv_heads: 8,
    head_dim: 64,
    ffn: 4 * 8192,
    gated: false,
    vocab: 65_024,
    tied: true,
    weights: QuantType::F16,
    kv: QuantType::F16,
};

impl ModelShape {
    /// Returns the shape of a model whose tensors are loaded in the formats that `stored` returns, with a
    /// cache in the format `kv`. The sizes are those of the loaded tensors without padding.
    pub fn from_spec(
        name: &str,
        spec: &ModelSpec,
        stored: impl Fn(&TensorSlice) -> QuantType,
        kv: QuantType,
    ) -> Self {
        let held = load::count(spec, &stored);
        let shape = |spec: &Option<StackSpec>, held: &Option<Stack<usize>>| {
            spec.as_ref().zip(held.as_ref()).map(|(spec, held)| stack_shape(spec, held, kv))
        };
        ModelShape {
            name: name.to_owned(),
            hidden: spec.hidden,
            vocab: spec.vocab,
            encoder: shape(&spec.encoder, &held.encoder),
            decoder: shape(&spec.decoder, &held.decoder),
            shared_tables: shared_tables(spec, &held),
        }
    }

    /// Returns the shape of a decoder with identical layers. Norms and biases are ignored.
    pub fn uniform(name: &str, sizes: &UniformDecoder) -> ModelShape {
        let (q, kv) = (sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim);
        let cache = kv_bytes(sizes.kv, sizes.kv_heads, (sizes.head_dim, sizes.head_dim), false);
        let matrices = sizes.hidden * (2 + usize::from(sizes.gated)) * sizes.ffn;
        let divided =
            ResourceCost { ops: LAYER_OPS, all_reduces: 2.0, ..matrix_cost(sizes.weights, matrices) };
        let of_queries = ResourceCost {
            macs_per_position: 2.0 * q as f64,
            ..matrix_cost(sizes.weights, sizes.hidden * 2 * q)
        };
        let of_kv = ResourceCost { kv: cache, ..matrix_cost(sizes.weights, sizes.hidden * 2 * kv) };
        let deal = HeadSplit {
            heads: sizes.heads,
            kv_heads: sizes.kv_heads,
            v_dim: sizes.head_dim,
            block: sizes.weights.row().block_elements,
        };
        let layer = LayerCost { divided, query_heads: of_queries, kv_heads: of_kv, head_split: Some(deal) };
        let table = matrix_cost(sizes.weights, sizes.vocab * sizes.hidden);
        let (embedding, head) = (lookup_cost(table), ResourceCost { ops: 2.0, ..table });
        let decoder = StackShape { embedding, layers: vec![layer; sizes.layers], head };
        ModelShape {
            name: name.to_owned(),
            hidden: sizes.hidden,
            vocab: sizes.vocab,
            encoder: None,
            decoder: Some(decoder),
            shared_tables: Vec::from_iter(sizes.tied.then_some(SharedTable {
                first: 0,
                last: sizes.layers - 1,
                stored: table.stored,
            })),
        }
    }

    /// Returns the number of layers of both stacks.
    pub fn layers(&self) -> usize {
        self.encoder_layers() + self.decoder.as_ref().map_or(0, |stack| stack.layers.len())
    }

    /// Returns the number of encoder layers.
    pub fn encoder_layers(&self) -> usize {
        self.encoder.as_ref().map_or(0, |stack| stack.layers.len())
    }

    /// Returns the cost of every layer, including the embedding or head that is placed with it; encoder
    /// layers come first.
    pub fn layer_costs(&self) -> Vec<LayerCost> {
        let mut units: Vec<LayerCost> = Vec::new();
        for stack in self.encoder.iter().chain(&self.decoder) {
            let (first, last) = (units.len(), units.len() + stack.layers.len() - 1);
            units.extend(&stack.layers);
            units[first].divided = units[first].divided + stack.embedding;
            units[last].divided = units[last].divided + stack.head;
        }
        units
    }

    /// Returns the bytes of weights that are counted twice in the layers `units` but held once by a device
    /// with all of them.
    pub fn duplicate_bytes(&self, units: &Range<usize>) -> f64 {
        let both = |table: &&SharedTable| units.contains(&table.first) && units.contains(&table.last);
        self.shared_tables.iter().filter(both).map(|table| table.stored).sum()
    }

    /// Returns the size of all weights in bytes.
    pub fn stored(&self) -> f64 {
        let units = self.layer_costs();
        units.iter().map(|unit| unit.total().stored).sum::<f64>() - self.duplicate_bytes(&(0..units.len()))
    }
}

/// Number of operations in a layer: norms, rotary positions, KV store, attention, activation, residuals and
/// GEMMs.
const LAYER_OPS: f64 = 16.0;

fn stored_bytes(ty: QuantType, numbers: usize) -> f64 {
    let row = ty.row();
    numbers as f64 * row.block_bytes as f64 / row.block_elements as f64
}

/// Returns the size of K and V of one position in a cache of that format, in bytes.
fn kv_bytes(ty: QuantType, kv_heads: usize, (k_dim, v_dim): (usize, usize), v_in_k: bool) -> f64 {
    let (pages, page_positions) = (1, KvLayout::BLOCK_POSITIONS);
    let layout = KvLayout { ty, pages, page_positions, kv_heads, k_dim, v_dim, v_in_k };
    layout.position_bytes().map_or(f64::INFINITY, |bytes| bytes as f64)
}

/// Returns the cost of a matrix that every row is multiplied by.
fn matrix_cost(ty: QuantType, numbers: usize) -> ResourceCost {
    let stored = stored_bytes(ty, numbers);
    ResourceCost { stored, read: stored, read_max: stored, macs: numbers as f64, ..ResourceCost::default() }
}

/// Returns the cost of a lookup table, of which each row reads one row.
fn lookup_cost(table: ResourceCost) -> ResourceCost {
    ResourceCost { read: 0.0, read_max: 0.0, macs: 0.0, ops: 1.0, all_reduces: 1.0, ..table }
}

/// Returns the cost of vectors or tables of `bytes` bytes, which only take memory and bandwidth.
fn vector_cost(bytes: usize) -> ResourceCost {
    let stored = bytes as f64;
    ResourceCost { stored, read: stored, read_max: stored, ..ResourceCost::default() }
}

/// Removes the costs per step: cross-attention K and V are computed once, not in each decode step.
fn without_step_cost(products: ResourceCost) -> ResourceCost {
    ResourceCost { read: 0.0, read_max: 0.0, macs: 0.0, ops: 0.0, ..products }
}

/// Returns the costs of a stack, given its tensors in memory and the format of the KV cache.
fn stack_shape(spec: &StackSpec, held: &Stack<usize>, kv: QuantType) -> StackShape {
    let layers = spec.layers.iter().enumerate();
    StackShape {
        embedding: held.embedding.as_ref().map_or(ResourceCost::default(), embedding_cost),
        layers: layers.map(|(index, layer)| layer_cost(layer, held.weights.layer(index), kv)).collect(),
        head: head_cost(held),
    }
}

fn embedding_cost(held: &Embedding<usize>) -> ResourceCost {
    let positions = held.position_table.as_ref().map_or(0, |positions| positions.table.buf);
    let positions = ResourceCost { read: 0.0, read_max: 0.0, ..vector_cost(positions) };
    let around = held.project_in.iter().map(linear_cost).chain(held.norm.iter().map(norm_cost));
    lookup_cost(weight_cost(&held.table)) + positions + around.sum()
}

/// Returns the cost of what follows the last layer: the final norm and the head.
fn head_cost(held: &Stack<usize>) -> ResourceCost {
    let norm: ResourceCost = held.norm.iter().map(norm_cost).sum();
    let Some(head) = &held.head else { return norm };
    let transform = head.transform.iter().map(|(linear, _, norm)| linear_cost(linear) + norm_cost(norm));
    let before: ResourceCost = transform.chain(head.project_out.iter().map(linear_cost)).sum();
    let table = weight_cost(&head.table) + vector_cost(head.bias.unwrap_or(0));
    ResourceCost { ops: 2.0, ..table + before + norm }
}

/// Returns every table that several layers have in common.
fn shared_tables(spec: &ModelSpec, held: &LoadedStacks<usize>) -> Vec<SharedTable> {
    let (mut tables, mut seen, mut at) = (Vec::new(), Vec::<(usize, &Arc<Weight<usize>>)>::new(), 0);
    for (spec, held) in spec.stacks().zip(held.encoder.iter().chain(&held.decoder)) {
        let (first, last) = (at, at + spec.layers.len() - 1);
        at = last + 1;
        let embedding = held.embedding.as_ref().map(|embedding| (first, &embedding.table));
        let head = held.head.as_ref().map(|head| (last, &head.table));
        for (unit, table) in embedding.into_iter().chain(head) {
            let before = seen.iter().rev().find(|(_, other)| Arc::ptr_eq(other, table));
            let stored = table.buf as f64;
            tables.extend(before.map(|(first, _)| SharedTable { first: *first, last: unit, stored }));
            seen.push((unit, table));
        }
    }
    tables
}

fn layer_cost(spec: &LayerSpec, held: &LayerWeights<usize>, kv: QuantType) -> LayerCost {
    let own = attention_cost(&spec.attention, &held.attention, kv);
    let around = norms_cost(&held.attention_norms) + mlp_cost(&held.mlp) + norms_cost(&held.mlp_norms);
    let cross = spec.cross.as_ref().zip(held.cross.as_ref());
    let cross = cross.map_or(LayerCost::default(), |((_, spec), (norms, held))| {
        let cross = attention_cost(spec, held, kv);
        LayerCost {
            divided: cross.divided + norms_cost(norms),
            kv_heads: without_step_cost(cross.kv_heads),
            ..cross
        }
    });
    LayerCost {
        divided: own.divided + cross.divided + around,
        query_heads: own.query_heads + cross.query_heads,
        kv_heads: own.kv_heads + cross.kv_heads,
        head_split: own.head_split,
    }
}

fn attention_cost(spec: &AttentionSpec, held: &Attention<usize>, kv: QuantType) -> LayerCost {
    let between = ResourceCost {
        macs_per_position: (spec.q_width() + spec.out_width()) as f64,
        ops: 5.0,
        all_reduces: 1.0,
        ..ResourceCost::default()
    };
    let qk_norms = held.qk_norms.iter().flat_map(|(q, k)| [norm_cost(q), norm_cost(k)]).sum();
    let cache = kv_bytes(kv, spec.kv_heads, (spec.k_dim, spec.v_dim), spec.latent.is_some());
    let cache = ResourceCost { kv: cache, ..ResourceCost::default() };
    let block = held.o.weight.ty.row().block_elements;
    let head_split = Some(HeadSplit::for_attention(spec, block));
    let of_queries = linear_cost(&held.q) + linear_cost(&held.o) + between;
    let Some(latent) = &held.latent else {
        let of_kv = linear_cost(&held.k) + linear_cost(&held.v) + cache;
        return LayerCost { divided: qk_norms, query_heads: of_queries, kv_heads: of_kv, head_split };
    };
    let keys = latent.keys.iter().map(linear_cost).sum::<ResourceCost>();
    let of_heads = linear_cost(&held.v) + linear_cost(&latent.q_rope) + linear_cost(&latent.absorbed) + keys;
    let q_a = latent.q_a.iter().map(|(linear, norm)| linear_cost(linear) + norm_cost(norm)).sum();
    let of_latents = [linear_cost(&held.k), linear_cost(&latent.k_rope), norm_cost(&latent.norm), q_a];
    // All ranks have the KV head and what makes latents.
    let kv_heads = of_latents.into_iter().sum::<ResourceCost>() + cache;
    LayerCost { divided: qk_norms, query_heads: of_queries + of_heads, kv_heads, head_split }
}

fn mlp_cost(held: &Mlp<usize>) -> ResourceCost {
    let sum = ResourceCost { all_reduces: 1.0, ops: 2.0, ..ResourceCost::default() };
    match held {
        Mlp::Dense(dense) => dense_cost(dense) + sum,
        Mlp::Experts(moe) => {
            let matrices = moe.experts.iter().flat_map(|it| [&it.gate, &it.down].into_iter().chain(&it.up));
            let experts: ResourceCost = matrices.map(weight_cost).sum();
            let biases = moe.biases.iter().flat_map(|it| [it.gate, it.up, it.down]).flatten();
            let experts = experts + biases.map(vector_cost).sum();
            let chosen = moe.shape.top_k as f64 / moe.experts.len().max(1) as f64;
            let experts = ResourceCost {
                read: 0.0,
                read_per_row: experts.stored * chosen,
                macs: experts.macs * chosen,
                ops: 3.0,
                ..experts
            };
            let shared = moe.shared.iter().map(dense_cost).sum();
            let routers = [&moe.router].into_iter().chain(&moe.shared_router).map(linear_cost).sum();
            experts + shared + routers + sum
        }
    }
}

fn dense_cost(held: &Dense<usize>) -> ResourceCost {
    [&held.gate, &held.down].into_iter().chain(&held.up).map(linear_cost).sum()
}

fn linear_cost(held: &Linear<usize>) -> ResourceCost {
    ResourceCost { ops: 1.0, ..weight_cost(&held.weight) + vector_cost(held.bias.unwrap_or(0)) }
}

/// Returns the cost of a matrix in memory that every row is multiplied by.
fn weight_cost(held: &Weight<usize>) -> ResourceCost {
    ResourceCost { macs: (held.n * held.k) as f64, ..vector_cost(held.buf) }
}

fn norms_cost(held: &SublayerNorms<usize>) -> ResourceCost {
    held.pre.iter().chain(&held.out).chain(&held.post).map(norm_cost).sum()
}

fn norm_cost(held: &Norm<usize>) -> ResourceCost {
    ResourceCost { ops: 1.0, ..vector_cost(held.weight.unwrap_or(0) + held.bias.unwrap_or(0)) }
}

#[cfg(test)]
mod tests;
