//! Derives the specification of one rank's part of a model.
//!
//! The residual stream is whole on every rank. Matrices that read it are split by rows (queries, keys,
//! values, the inner layer of an MLP), and matrices that write to it by columns, so that the ranks' results
//! are summed; a bias of the latter is on the first rank only. Norms, routers and other small or intermediate
//! parts are replicated on all ranks.
//!
//! Invariant: each row or column that is not replicated is on exactly one rank, except KV heads, which are on
//! all ranks that need them.

use super::bounds::{self, block, expert_block, head_block};
use super::heads::{self, Deal, Heads};
use super::{ExpertSplit, Refusal, Shard, Types, layers};
use crate::model::spec::{
    AttentionSpec, Cut, DenseSpec, DistanceSpec, EmbeddingSpec, HeadSpec, LayerSpec, LinearSpec, MlpSpec,
    ModelSpec, MoeSpec, Piece, Spread, StackSpec,
};
use std::collections::BTreeSet;
use std::ops::Range;

/// Returns the specification of the shard's part of a model. Fails if the split is impossible.
pub fn cut(whole: &ModelSpec, shard: &Shard, types: Types) -> Result<ModelSpec, Refusal> {
    bounds::check(whole, shard, types)?;
    let cutter = Cutter { shard, types, vocab: shard.ranges(whole.vocab, 1) };
    let part = |stack: &Option<StackSpec>, own: &Range<usize>| {
        stack.as_ref().filter(|_| !own.is_empty()).map(|stack| cutter.stack(stack, own.clone()))
    };
    Ok(ModelSpec {
        kind: whole.kind,
        vocab: whole.vocab,
        hidden: whole.hidden,
        context: whole.context,
        encoder: part(&whole.encoder, &shard.encoder),
        decoder: part(&whole.decoder, &shard.decoder),
        ignored: whole.ignored.clone(),
        provenance: whole.provenance.clone(),
    })
}

/// Builds the specification of one rank.
struct Cutter<'a> {
    shard: &'a Shard,
    types: Types<'a>,
    /// Ranges of vocabulary rows, by rank.
    vocab: Vec<Range<usize>>,
}

/// The layers of a stack that are in the stage.
struct Held<'a> {
    layers: &'a [LayerSpec],
    /// Block size at whose multiples their output projections can be split.
    head_block: usize,
    /// Indices of the rotary position embeddings of these layers: the stage has no tables of others.
    ropes: BTreeSet<usize>,
}

impl Held<'_> {
    fn of<'a>(layers: &'a [LayerSpec], types: Types) -> Held<'a> {
        let ropes = layers.iter().filter_map(|layer| layer.attention.rope).collect();
        Held { layers, head_block: head_block(layers, types), ropes }
    }
}

impl Cutter<'_> {
    fn stack(&self, stack: &StackSpec, own: Range<usize>) -> StackSpec {
        let (begins, ends) = (own.start == 0, own.end == layers(Some(stack)));
        let held = Held::of(&stack.layers[own], self.types);
        StackSpec {
            context: stack.context,
            embedding: stack.embedding.as_ref().filter(|_| begins).map(|spec| self.embedding(spec)),
            added: stack.added.clone().filter(|_| begins),
            distance: stack.distance.as_ref().and_then(|spec| self.distance(spec, &held)),
            ropes: held.ropes.iter().map(|kind| stack.ropes[*kind].clone()).collect(),
            layers: held.layers.iter().map(|layer| self.layer(layer, &held)).collect(),
            norm: stack.norm.clone().filter(|_| ends),
            head: stack.head.as_ref().filter(|_| ends).map(|spec| self.head(spec)),
        }
    }

    fn embedding(&self, spec: &EmbeddingSpec) -> EmbeddingSpec {
        EmbeddingSpec { table: self.of_vocabulary(&spec.table), ..spec.clone() }
    }

    fn head(&self, spec: &HeadSpec) -> HeadSpec {
        let spread = Spread {
            widths: self.vocab.iter().map(Range::len).collect(),
            own: self.vocab[self.shard.rank].clone(),
        };
        HeadSpec {
            table: self.of_vocabulary(&spec.table),
            bias: spec.bias.as_ref().map(|bias| self.of_vocabulary(bias)),
            spread: (self.shard.members() > 1).then_some(spread),
            ..spec.clone()
        }
    }

    fn of_vocabulary(&self, piece: &Piece) -> Piece {
        let all = self.vocab.last().map_or(0, |last| last.end);
        rows_of(piece, all, self.vocab[self.shard.rank].clone())
    }

    /// Returns the relative position bias of this rank. All layers that use it have the same heads, so the
    /// first one determines them.
    fn distance(&self, spec: &DistanceSpec, held: &Held) -> Option<DistanceSpec> {
        let first = held.layers.iter().find(|layer| layer.attention.by_distance)?;
        let by_rank = Deal::of(&first.attention, held.head_block).by_rank(&self.shard.shares);
        Some(DistanceSpec { own: by_rank[self.shard.rank].query.clone(), ..spec.clone() })
    }

    fn layer(&self, layer: &LayerSpec, held: &Held) -> LayerSpec {
        let attention = |spec: &AttentionSpec| self.attention(spec, held);
        LayerSpec {
            wiring: layer.wiring,
            residual_scale: layer.residual_scale,
            attention_norms: layer.attention_norms.clone(),
            attention: attention(&layer.attention),
            cross: layer.cross.as_ref().map(|(norms, spec)| (norms.clone(), attention(spec))),
            mlp_norms: layer.mlp_norms.clone(),
            mlp: match &layer.mlp {
                MlpSpec::Dense(dense) => MlpSpec::Dense(Box::new(self.dense(dense))),
                MlpSpec::Experts(moe) => MlpSpec::Experts(Box::new(self.moe(moe))),
            },
        }
    }

    fn attention(&self, spec: &AttentionSpec, held: &Held) -> AttentionSpec {
        let by_rank = Deal::of(spec, held.head_block).by_rank(&self.shard.shares);
        let Heads { query, kv } = &by_rank[self.shard.rank];
        let (k_dim, v_dim) = (spec.k_dim, spec.v_dim);
        let of = |heads: &Range<usize>, width: usize| heads.start * width..heads.end * width;
        let spreads = self.shard.members() > 1 && spec.norms_all_heads();
        AttentionSpec {
            heads: query.len(),
            kv_heads: kv.len(),
            q: rows(&spec.q, of(query, k_dim)),
            k: rows(&spec.k, of(kv, k_dim)),
            v: rows(&spec.v, of(kv, v_dim)),
            o: self.columns(&spec.o, of(query, v_dim)),
            rope: spec.rope.and_then(|kind| held.ropes.iter().position(|own| *own == kind)),
            qk_norms: spec.qk_norms.clone(),
            spread: spreads.then(|| heads::spread(&by_rank, self.shard.rank, k_dim)),
            ..*spec
        }
    }

    fn dense(&self, spec: &DenseSpec) -> DenseSpec {
        self.dense_at(spec, self.shard.share(spec.width, block(&spec.down, self.types)))
    }

    /// Returns the part of a dense network with the columns `own` of its inner layer.
    fn dense_at(&self, spec: &DenseSpec, own: Range<usize>) -> DenseSpec {
        DenseSpec {
            width: own.len(),
            activation: spec.activation,
            gate: rows(&spec.gate, own.clone()),
            up: spec.up.as_ref().map(|up| rows(up, own.clone())),
            down: self.columns(&spec.down, own),
        }
    }

    fn moe(&self, spec: &MoeSpec) -> MoeSpec {
        let (all, width) = (spec.experts.len(), spec.experts[0].width);
        let granule = expert_block(spec, self.types);
        let (held, columns) = match self.shard.experts {
            ExpertSplit::Column if width.div_ceil(granule) >= self.shard.members() => {
                (0..all, self.shard.share(width, granule))
            }
            ExpertSplit::Column | ExpertSplit::Expert => (self.shard.share(all, 1), 0..width),
        };
        let experts = spec.experts[held.clone()].iter();
        MoeSpec {
            first: held.start,
            experts: experts.map(|expert| self.dense_at(expert, columns.clone())).collect(),
            shared: spec.shared.as_ref().map(|shared| self.dense(shared)),
            router: spec.router.clone(),
            shared_router: spec.shared_router.clone(),
            ..*spec
        }
    }

    /// Splits a linear layer that writes to the residual stream. The ranks' results are summed, so the bias
    /// is on the first rank only.
    fn columns(&self, linear: &LinearSpec, own: Range<usize>) -> LinearSpec {
        LinearSpec {
            out: linear.out,
            inp: own.len(),
            bias: linear.bias.clone().filter(|_| self.shard.rank == 0),
            weight: Piece {
                cut: Cut { columns: part_of(linear.inp, own), ..linear.weight.cut.clone() },
                ..linear.weight.clone()
            },
        }
    }
}

/// Splits a linear layer that reads the residual stream.
fn rows(linear: &LinearSpec, own: Range<usize>) -> LinearSpec {
    LinearSpec {
        out: own.len(),
        inp: linear.inp,
        bias: linear.bias.as_ref().map(|bias| rows_of(bias, linear.out, own.clone())),
        weight: rows_of(&linear.weight, linear.out, own),
    }
}

fn rows_of(piece: &Piece, all: usize, own: Range<usize>) -> Piece {
    Piece { cut: Cut { rows: part_of(all, own), ..piece.cut.clone() }, ..piece.clone() }
}

/// Returns the range, or `None` if it is everything.
fn part_of(all: usize, own: Range<usize>) -> Option<Range<usize>> {
    (own != (0..all)).then_some(own)
}
