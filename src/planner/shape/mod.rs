//! Models described by their sizes: the memory, bandwidth and computation that each layer costs.
//!
//! Invariant: only sizes in bytes and numbers of multiplications; every layer of the model is included, in
//! order.

use crate::model::shard::Deal;
use crate::model::spec::{
    AttentionSpec, DenseSpec, LayerSpec, LinearSpec, MlpSpec, ModelSpec, NormSpec, Norms, Piece, StackSpec,
};
use mainstem_kernels::{KvLayout, QuantType};
use std::iter::Sum;
use std::ops::{Add, Mul, Range};

/// The resources that a part of a model costs.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Part {
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
    pub sums: f64,
}

impl Add for Part {
    type Output = Part;

    fn add(self, other: Part) -> Part {
        Part {
            stored: self.stored + other.stored,
            read: self.read + other.read,
            read_per_row: self.read_per_row + other.read_per_row,
            read_max: self.read_max + other.read_max,
            macs: self.macs + other.macs,
            macs_per_position: self.macs_per_position + other.macs_per_position,
            kv: self.kv + other.kv,
            ops: self.ops + other.ops,
            sums: self.sums + other.sums,
        }
    }
}

impl Sum for Part {
    fn sum<I: Iterator<Item = Part>>(parts: I) -> Part {
        parts.fold(Part::default(), Add::add)
    }
}

/// Scales the cost to one rank's share. The numbers of operations and all-reduces stay the same.
impl Mul<f64> for Part {
    type Output = Part;

    fn mul(self, share: f64) -> Part {
        Part {
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

impl Part {
    /// Returns the bytes of weights that a step of `rows` rows reads.
    pub fn bytes_read(&self, rows: f64) -> f64 {
        (self.read + self.read_per_row * rows).min(self.read_max)
    }
}

/// The cost of a layer, with the embedding or head next to it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Unit {
    /// Cost that the ranks of a stage split by their shares, as if it could be split anywhere.
    pub divided: Part,
    /// Cost of the query heads, from their projection to the output projection; each rank has whole heads.
    pub of_queries: Part,
    /// Cost of K and V, from their projections to the cache; each rank that needs a KV head has all of it.
    pub of_kv: Part,
    /// The split of heads, by the block size of this layer alone; `None` splits them like everything else.
    pub deal: Option<Deal>,
}

impl Unit {
    pub fn whole(&self) -> Part {
        self.divided + self.of_queries + self.of_kv
    }

    /// Returns the cost for each rank of a stage. More ranks than heads allow are refused elsewhere; here
    /// they get fractions of heads.
    pub fn of_members(&self, shares: &[u32]) -> Vec<Part> {
        let all = f64::from(shares.iter().sum::<u32>());
        let deal = self.deal.filter(|deal| (2..=deal.members_max()).contains(&shares.len()));
        let heads = deal.map(|deal| (deal, deal.by_rank(shares)));
        let member = |(rank, share): (usize, &u32)| {
            let share = f64::from(*share) / all;
            let (queries, kv) = heads.as_ref().map_or((share, share), |(deal, by_rank)| {
                let own = &by_rank[rank];
                (own.query.len() as f64 / deal.heads as f64, own.kv.len() as f64 / deal.kv_heads as f64)
            });
            self.divided * share + self.of_queries * queries + self.of_kv * kv
        };
        shares.iter().enumerate().map(member).collect()
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
    pub tables: Vec<Table>,
}

/// A table that two layers have in common, which a device with both holds once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Table {
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
    pub embedding: Part,
    pub layers: Vec<Unit>,
    /// The head, after the last layer.
    pub head: Part,
}

/// The sizes of a decoder whose layers are identical.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Uniform {
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
pub const FALCON_40B: Uniform = Uniform {
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
    /// Returns the shape of a model whose tensors are stored in the formats that `stored` returns, with a
    /// cache in the format `kv`.
    pub fn of_spec(
        name: &str,
        spec: &ModelSpec,
        stored: impl Fn(&Piece) -> QuantType,
        kv: QuantType,
    ) -> Self {
        let sizes = Sizes { stored: &stored, kv };
        ModelShape {
            name: name.to_owned(),
            hidden: spec.hidden,
            vocab: spec.vocab,
            encoder: spec.encoder.as_ref().map(|stack| sizes.stack(stack)),
            decoder: spec.decoder.as_ref().map(|stack| sizes.stack(stack)),
            tables: sizes.tables(spec),
        }
    }

    /// Returns the shape of a decoder with identical layers. Norms and biases are ignored.
    pub fn uniform(name: &str, sizes: &Uniform) -> ModelShape {
        let (q, kv) = (sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim);
        let cache = cached(sizes.kv, sizes.kv_heads, (sizes.head_dim, sizes.head_dim));
        let matrices = sizes.hidden * (2 + usize::from(sizes.gated)) * sizes.ffn;
        let divided = Part { ops: LAYER_OPS, sums: 2.0, ..matrix(sizes.weights, matrices) };
        let of_queries =
            Part { macs_per_position: 2.0 * q as f64, ..matrix(sizes.weights, sizes.hidden * 2 * q) };
        let of_kv = Part { kv: cache, ..matrix(sizes.weights, sizes.hidden * 2 * kv) };
        let deal = Deal {
            heads: sizes.heads,
            kv_heads: sizes.kv_heads,
            v_dim: sizes.head_dim,
            block: sizes.weights.row().block_elements,
        };
        let layer = Unit { divided, of_queries, of_kv, deal: Some(deal) };
        let table = matrix(sizes.weights, sizes.vocab * sizes.hidden);
        let (embedding, head) = (looked_up(table), Part { ops: 2.0, ..table });
        let decoder = StackShape { embedding, layers: vec![layer; sizes.layers], head };
        ModelShape {
            name: name.to_owned(),
            hidden: sizes.hidden,
            vocab: sizes.vocab,
            encoder: None,
            decoder: Some(decoder),
            tables: Vec::from_iter(sizes.tied.then_some(Table {
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

    pub fn encoder_layers(&self) -> usize {
        self.encoder.as_ref().map_or(0, |stack| stack.layers.len())
    }

    /// Returns the cost of every layer, including the embedding or head that is placed with it; encoder
    /// layers come first.
    pub fn units(&self) -> Vec<Unit> {
        let mut units: Vec<Unit> = Vec::new();
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
    pub fn stored_twice(&self, units: &Range<usize>) -> f64 {
        let both = |table: &&Table| units.contains(&table.first) && units.contains(&table.last);
        self.tables.iter().filter(both).map(|table| table.stored).sum()
    }

    /// Returns the size of all weights in bytes.
    pub fn stored(&self) -> f64 {
        let units = self.units();
        units.iter().map(|unit| unit.whole().stored).sum::<f64>() - self.stored_twice(&(0..units.len()))
    }
}

/// Number of operations in a layer: norms, rotary positions, KV store, attention, activation, residuals and
/// GEMMs.
const LAYER_OPS: f64 = 16.0;

fn bytes(ty: QuantType, numbers: usize) -> f64 {
    let row = ty.row();
    numbers as f64 * row.block_bytes as f64 / row.block_elements as f64
}

/// Returns the size of K and V of one position in a cache of that format, in bytes.
fn cached(ty: QuantType, kv_heads: usize, (k_dim, v_dim): (usize, usize)) -> f64 {
    let layout = KvLayout { ty, pages: 1, page_positions: KvLayout::BLOCK, kv_heads, k_dim, v_dim };
    layout.position_bytes().map_or(f64::INFINITY, |bytes| bytes as f64)
}

/// Returns the cost of a matrix that every row is multiplied by.
fn matrix(ty: QuantType, numbers: usize) -> Part {
    let stored = bytes(ty, numbers);
    Part { stored, read: stored, read_max: stored, macs: numbers as f64, ..Part::default() }
}

/// Returns the cost of a lookup table, of which each row reads one row.
fn looked_up(table: Part) -> Part {
    Part { read: 0.0, read_max: 0.0, macs: 0.0, ops: 1.0, sums: 1.0, ..table }
}

/// Returns the cost of F32 values that only take memory and bandwidth.
fn vector(numbers: usize) -> Part {
    let stored = bytes(QuantType::F32, numbers);
    Part { stored, read: stored, read_max: stored, ..Part::default() }
}

/// Removes the costs per step: cross-attention K and V are computed once, not in each decode step.
fn made_once(products: Part) -> Part {
    Part { read: 0.0, read_max: 0.0, macs: 0.0, ops: 0.0, ..products }
}

/// Computes costs from the storage formats of tensors and cache.
struct Sizes<'a> {
    stored: &'a dyn Fn(&Piece) -> QuantType,
    kv: QuantType,
}

impl Sizes<'_> {
    fn stack(&self, stack: &StackSpec) -> StackShape {
        let embedding = stack.embedding.as_ref();
        let embedding =
            embedding.map_or(Part::default(), |embedding| looked_up(self.table(&embedding.table)));
        let head = stack.head.as_ref().map_or(Part::default(), |head| {
            let bias = head.bias.as_ref().map_or(0, |bias| bias.shape.iter().product());
            Part { ops: 2.0, ..self.table(&head.table) + vector(bias) }
        });
        StackShape { embedding, layers: stack.layers.iter().map(|layer| self.layer(layer)).collect(), head }
    }

    fn table(&self, piece: &Piece) -> Part {
        matrix((self.stored)(piece), piece.shape.iter().product())
    }

    /// Returns every table that several layers have in common. Like loading, this compares names.
    fn tables(&self, spec: &ModelSpec) -> Vec<Table> {
        let (mut tables, mut seen, mut at) = (Vec::new(), Vec::<(usize, &Piece)>::new(), 0);
        for stack in spec.encoder.iter().chain(&spec.decoder) {
            let (first, last) = (at, at + stack.layers.len() - 1);
            at = last + 1;
            let embedding = stack.embedding.as_ref().map(|embedding| (first, &embedding.table));
            // Normalized rows are a separate matrix of the head.
            let head = stack.head.as_ref().filter(|head| !head.normalised).map(|head| (last, &head.table));
            for (unit, piece) in embedding.into_iter().chain(head) {
                let stored = self.table(piece).stored;
                let before = seen.iter().rev().find(|(_, other)| other.name == piece.name);
                tables.extend(before.map(|(first, _)| Table { first: *first, last: unit, stored }));
                seen.push((unit, piece));
            }
        }
        tables
    }

    fn layer(&self, layer: &LayerSpec) -> Unit {
        let own = self.attention(&layer.attention);
        let around = norms(&layer.attention_norms) + self.mlp(&layer.mlp) + norms(&layer.mlp_norms);
        let cross = layer.cross.as_ref().map_or(Unit::default(), |(around, cross)| {
            let cross = self.attention(cross);
            Unit { divided: cross.divided + norms(around), of_kv: made_once(cross.of_kv), ..cross }
        });
        Unit {
            divided: own.divided + cross.divided + around,
            of_queries: own.of_queries + cross.of_queries,
            of_kv: own.of_kv + cross.of_kv,
            deal: own.deal,
        }
    }

    fn attention(&self, spec: &AttentionSpec) -> Unit {
        let between = Part {
            macs_per_position: (spec.q_width() + spec.out_width()) as f64,
            ops: 5.0,
            sums: 1.0,
            ..Part::default()
        };
        let qk_norms = spec.qk_norms.iter().flat_map(|(q, k)| [norm(q), norm(k)]).sum();
        let cache = Part { kv: cached(self.kv, spec.kv_heads, (spec.k_dim, spec.v_dim)), ..Part::default() };
        let block = (self.stored)(&spec.o.weight).row().block_elements;
        Unit {
            divided: qk_norms,
            of_queries: self.linear(&spec.q) + self.linear(&spec.o) + between,
            of_kv: self.linear(&spec.k) + self.linear(&spec.v) + cache,
            deal: Some(Deal::of(spec, block)),
        }
    }

    fn mlp(&self, spec: &MlpSpec) -> Part {
        let sum = Part { sums: 1.0, ops: 2.0, ..Part::default() };
        match spec {
            MlpSpec::Dense(dense) => self.dense(dense) + sum,
            MlpSpec::Experts(moe) => {
                let experts: Part = moe.experts.iter().map(|expert| self.dense(expert)).sum();
                let chosen = moe.top_k as f64 / moe.experts.len().max(1) as f64;
                let experts = Part {
                    read: 0.0,
                    read_per_row: experts.stored * chosen,
                    macs: experts.macs * chosen,
                    ops: 3.0,
                    ..experts
                };
                let shared = moe.shared.as_ref().map_or(Part::default(), |shared| self.dense(shared));
                experts + shared + self.linear(&moe.router) + sum
            }
        }
    }

    fn dense(&self, spec: &DenseSpec) -> Part {
        [&spec.gate, &spec.down].into_iter().chain(&spec.up).map(|linear| self.linear(linear)).sum()
    }

    fn linear(&self, spec: &LinearSpec) -> Part {
        let bias = if spec.bias.is_some() { spec.out } else { 0 };
        Part { ops: 1.0, ..matrix((self.stored)(&spec.weight), spec.out * spec.inp) + vector(bias) }
    }
}

fn norms(spec: &Norms) -> Part {
    spec.pre.iter().chain(&spec.out).chain(&spec.post).map(norm).sum()
}

fn norm(spec: &NormSpec) -> Part {
    let numbers = spec.width * (1 + usize::from(spec.bias.is_some()));
    Part { ops: 1.0, ..vector(numbers) }
}

#[cfg(test)]
mod tests;
