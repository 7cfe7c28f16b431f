//! A model as numbers: what each of its layers takes to hold, to read and to compute.
//!
//! Invariant: sizes only, in bytes and multiplications; every layer of the model is there, in order.

use crate::model::shard::Deal;
use crate::model::spec::{
    AttentionSpec, DenseSpec, LayerSpec, LinearSpec, MlpSpec, ModelSpec, NormSpec, Norms, Piece, StackSpec,
};
use mainstem_kernels::{KvLayout, QuantType};
use std::iter::Sum;
use std::ops::{Add, Mul, Range};

/// What a part of a model takes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Part {
    /// Bytes of its weights.
    pub stored: f64,
    /// Bytes of them that every step reads, however few its rows.
    pub read: f64,
    /// Bytes that each row reads beside: the experts it is sent to.
    pub read_per_row: f64,
    /// Bytes that a step reads at most, however many its rows: of experts all, of a table that is looked up none.
    pub read_max: f64,
    /// Multiplications of a row with weights.
    pub macs: f64,
    /// Multiplications of a row with each position before it.
    pub macs_per_position: f64,
    /// Bytes of K and V of one position.
    pub kv: f64,
    /// Passes of the device over a row.
    pub ops: f64,
    /// Times that the members of a stage add up what each has.
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

/// A member's share of a part. It goes through all operations, and takes part in all sums.
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
    /// Bytes of weights that a step of so many rows reads.
    pub fn bytes_read(&self, rows: f64) -> f64 {
        (self.read + self.read_per_row * rows).min(self.read_max)
    }
}

/// A layer, with what stands before or behind it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Unit {
    /// What the members of a stage divide among them by their shares, as if it could be cut anywhere.
    pub divided: Part,
    /// Queries, and what is made of them: each member has whole heads.
    pub of_queries: Part,
    /// K and V, from their projections to the cache: of a KV head, each member that needs it has all.
    pub of_kv: Part,
    /// How heads are dealt out, by the blocks of this layer alone; `None` divides them as all else.
    pub deal: Option<Deal>,
}

impl Unit {
    pub fn whole(&self) -> Part {
        self.divided + self.of_queries + self.of_kv
    }

    /// Those of a stage's members, by rank. More than can have heads are refused elsewhere; here they have parts of some.
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

/// A whole model.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelShape {
    pub name: String,
    /// Width of the residual stream.
    pub hidden: usize,
    pub vocab: usize,
    /// The encoder's, if there is one, then the decoder's.
    pub encoder: Option<StackShape>,
    pub decoder: Option<StackShape>,
    /// Tables that several units have alike, such as an embedding that is the head too.
    pub tables: Vec<Table>,
}

/// One that two units have, which a device with both holds once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Table {
    /// From the one to the other.
    pub first: usize,
    pub last: usize,
    /// Bytes.
    pub stored: f64,
}

/// A stack of layers.
#[derive(Clone, Debug, PartialEq)]
pub struct StackShape {
    /// Before the first layer.
    pub embedding: Part,
    pub layers: Vec<Unit>,
    /// Behind the last one.
    pub head: Part,
}

/// The sizes of a decoder whose layers are all alike.
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
    /// Whether the head's matrix is the embedding's.
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
    /// The shape of a model whose tensors are stored as `stored` says, with a cache of that type.
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

    /// A decoder of equal layers. Norms and biases are left out.
    pub fn uniform(name: &str, of: &Uniform) -> ModelShape {
        let (q, kv) = (of.heads * of.head_dim, of.kv_heads * of.head_dim);
        let cache = cached(of.kv, of.kv_heads, (of.head_dim, of.head_dim));
        let matrices = of.hidden * (2 + usize::from(of.gated)) * of.ffn;
        let divided = Part { ops: LAYER_OPS, sums: 2.0, ..matrix(of.weights, matrices) };
        let of_queries = Part { macs_per_position: 2.0 * q as f64, ..matrix(of.weights, of.hidden * 2 * q) };
        let of_kv = Part { kv: cache, ..matrix(of.weights, of.hidden * 2 * kv) };
        let deal = Deal {
            heads: of.heads,
            kv_heads: of.kv_heads,
            v_dim: of.head_dim,
            block: of.weights.row().block_elements,
        };
        let layer = Unit { divided, of_queries, of_kv, deal: Some(deal) };
        let table = matrix(of.weights, of.vocab * of.hidden);
        let (embedding, head) = (looked_up(table), Part { ops: 2.0, ..table });
        let decoder = StackShape { embedding, layers: vec![layer; of.layers], head };
        ModelShape {
            name: name.to_owned(),
            hidden: of.hidden,
            vocab: of.vocab,
            encoder: None,
            decoder: Some(decoder),
            tables: Vec::from_iter(of.tied.then_some(Table {
                first: 0,
                last: of.layers - 1,
                stored: table.stored,
            })),
        }
    }

    /// The encoder's layers, then the decoder's.
    pub fn layers(&self) -> usize {
        self.encoder_layers() + self.decoder.as_ref().map_or(0, |stack| stack.layers.len())
    }

    pub fn encoder_layers(&self) -> usize {
        self.encoder.as_ref().map_or(0, |stack| stack.layers.len())
    }

    /// Every layer with what stands before or behind it, which goes where the layer goes.
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

    /// Bytes of the weights that `units` have twice and a device holds once.
    pub fn stored_twice(&self, units: &Range<usize>) -> f64 {
        let both = |table: &&Table| units.contains(&table.first) && units.contains(&table.last);
        self.tables.iter().filter(both).map(|table| table.stored).sum()
    }

    /// Bytes of all weights.
    pub fn stored(&self) -> f64 {
        let units = self.units();
        units.iter().map(|unit| unit.whole().stored).sum::<f64>() - self.stored_twice(&(0..units.len()))
    }
}

/// Norms, rotary positions, storing, attention, activation, residuals and the products of a layer.
const LAYER_OPS: f64 = 16.0;

fn bytes(ty: QuantType, numbers: usize) -> f64 {
    let row = ty.row();
    numbers as f64 * row.block_bytes as f64 / row.block_elements as f64
}

/// K and V of one position, as a cache of that type takes them.
fn cached(ty: QuantType, kv_heads: usize, (k_dim, v_dim): (usize, usize)) -> f64 {
    let layout = KvLayout { ty, pages: 1, page_positions: KvLayout::BLOCK, kv_heads, k_dim, v_dim };
    layout.position_bytes().map_or(f64::INFINITY, |bytes| bytes as f64)
}

/// A matrix that every row is multiplied with.
fn matrix(ty: QuantType, numbers: usize) -> Part {
    let stored = bytes(ty, numbers);
    Part { stored, read: stored, read_max: stored, macs: numbers as f64, ..Part::default() }
}

/// A matrix of which each row takes one of its own.
fn looked_up(table: Part) -> Part {
    Part { read: 0.0, read_max: 0.0, macs: 0.0, ops: 1.0, sums: 1.0, ..table }
}

/// Numbers that are kept in single precision and cost nothing else.
fn vector(numbers: usize) -> Part {
    let stored = bytes(QuantType::F32, numbers);
    Part { stored, read: stored, read_max: stored, ..Part::default() }
}

/// K and V of a source, which are made once: no step of a token does it again.
fn made_once(products: Part) -> Part {
    Part { read: 0.0, read_max: 0.0, macs: 0.0, ops: 0.0, ..products }
}

/// How the tensors and the cache are stored.
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

    /// Every table that stands in one unit and then in a further one, as the model's loading shares them: by name.
    fn tables(&self, spec: &ModelSpec) -> Vec<Table> {
        let (mut tables, mut seen, mut at) = (Vec::new(), Vec::<(usize, &Piece)>::new(), 0);
        for stack in spec.encoder.iter().chain(&spec.decoder) {
            let (first, last) = (at, at + stack.layers.len() - 1);
            at = last + 1;
            let embedding = stack.embedding.as_ref().map(|embedding| (first, &embedding.table));
            // Rows that are brought to length 1 are the head's own.
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

    fn attention(&self, of: &AttentionSpec) -> Unit {
        let between = Part {
            macs_per_position: (of.q_width() + of.out_width()) as f64,
            ops: 5.0,
            sums: 1.0,
            ..Part::default()
        };
        let qk_norms = of.qk_norms.iter().flat_map(|(q, k)| [norm(q), norm(k)]).sum();
        let cache = Part { kv: cached(self.kv, of.kv_heads, (of.k_dim, of.v_dim)), ..Part::default() };
        let block = (self.stored)(&of.o.weight).row().block_elements;
        Unit {
            divided: qk_norms,
            of_queries: self.linear(&of.q) + self.linear(&of.o) + between,
            of_kv: self.linear(&of.k) + self.linear(&of.v) + cache,
            deal: Some(Deal::of(of, block)),
        }
    }

    fn mlp(&self, of: &MlpSpec) -> Part {
        let sum = Part { sums: 1.0, ops: 2.0, ..Part::default() };
        match of {
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

    fn dense(&self, of: &DenseSpec) -> Part {
        [&of.gate, &of.down].into_iter().chain(&of.up).map(|linear| self.linear(linear)).sum()
    }

    fn linear(&self, of: &LinearSpec) -> Part {
        let bias = if of.bias.is_some() { of.out } else { 0 };
        Part { ops: 1.0, ..matrix((self.stored)(&of.weight), of.out * of.inp) + vector(bias) }
    }
}

fn norms(of: &Norms) -> Part {
    of.pre.iter().chain(&of.out).chain(&of.post).map(norm).sum()
}

fn norm(of: &NormSpec) -> Part {
    let numbers = of.width * (1 + usize::from(of.bias.is_some()));
    Part { ops: 1.0, ..vector(numbers) }
}

#[cfg(test)]
mod tests;
