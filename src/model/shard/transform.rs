//! Derives the specification of one rank's part of a model.
//!
//! The residual stream is whole on every rank. Matrices that read it are split by rows (queries, keys,
//! values, the inner layer of an MLP), and matrices that write to it by columns, so that the ranks' results
//! are summed; a bias of the latter is on the first rank only. Latents, norms, routers and other small or
//! intermediate parts are replicated on all ranks.
//!
//! Invariant: each row or column that is not replicated is on exactly one rank, except KV heads, which are on
//! all ranks that need them.

use super::heads::{self, HeadSplit, RankHeads};
use super::rank_limits::{self, column_block, expert_block, head_block};
use super::{ExpertSplit, Shard, ShardError, TypeLookup, layer_count};
use crate::model::spec::distances::DistanceSpec;
use crate::model::spec::latent::LatentSpec;
use crate::model::spec::{
    AttentionSpec, ColumnSplit, DenseSpec, EmbeddingSpec, HeadSpec, LayerSpec, LinearSpec, MlpSpec,
    ModelSpec, MoeSpec, NormSpec, RelativeBiasSpec, SliceBounds, StackSpec, TensorSlice,
};
use std::collections::BTreeSet;
use std::ops::Range;

/// Returns the specification of the shard's part of a model. Fails if the split is impossible.
pub fn shard_spec(whole: &ModelSpec, shard: &Shard, types: TypeLookup) -> Result<ModelSpec, ShardError> {
    rank_limits::check(whole, shard, types)?;
    let cutter = ShardBuilder { shard, types, vocab: shard.ranges(whole.vocab, 1) };
    let part = |stack: &Option<StackSpec>, own: &Range<usize>| {
        stack.as_ref().filter(|_| !own.is_empty()).map(|stack| cutter.stack(stack, own.clone()))
    };
    Ok(ModelSpec {
        kind: whole.kind,
        vocab: whole.vocab,
        source_vocab: whole.source_vocab,
        hidden: whole.hidden,
        context: whole.context,
        encoder: part(&whole.encoder, &shard.encoder),
        decoder: part(&whole.decoder, &shard.decoder),
        classifier: None,
        ignored: whole.ignored.clone(),
        provenance: whole.provenance.clone(),
    })
}

/// Builds the specification of one rank.
struct ShardBuilder<'a> {
    shard: &'a Shard,
    types: TypeLookup<'a>,
    /// Ranges of the rows of the head, by rank.
    vocab: Vec<Range<usize>>,
}

/// The layers of a stack that are in the stage.
struct StageLayers<'a> {
    layers: &'a [LayerSpec],
    /// Block size at whose multiples their output projections can be split.
    head_block: usize,
    /// Indices of the rotary position embeddings of these layers: the stage has no tables of others.
    ropes: BTreeSet<usize>,
    /// Indices of their relative position biases.
    relative_biases: BTreeSet<usize>,
}

impl StageLayers<'_> {
    fn new<'a>(layers: &'a [LayerSpec], types: TypeLookup) -> StageLayers<'a> {
        let of_layer = |layer: &'a LayerSpec| [layer.attention.rope, layer.attention.growth];
        let ropes = layers.iter().flat_map(of_layer).flatten().collect();
        let relative_biases = layers.iter().filter_map(|layer| layer.attention.relative_bias).collect();
        StageLayers { layers, head_block: head_block(layers, types), ropes, relative_biases }
    }

    /// Returns the index of a rotary position embedding in the stage, given that in the whole stack.
    fn rope(&self, kind: Option<usize>) -> Option<usize> {
        kind.and_then(|kind| self.ropes.iter().position(|own| *own == kind))
    }
}

impl ShardBuilder<'_> {
    fn stack(&self, stack: &StackSpec, own: Range<usize>) -> StackSpec {
        let (begins, ends) = (own.start == 0, own.end == layer_count(Some(stack)));
        let held = StageLayers::new(&stack.layers[own], self.types);
        StackSpec {
            context: stack.context,
            embedding: stack.embedding.as_ref().filter(|_| begins).map(|spec| self.embedding(spec)),
            position_embedding: stack.position_embedding.clone().filter(|_| begins),
            relative_biases: self.relative_biases(&stack.relative_biases, &held),
            ropes: held.ropes.iter().map(|kind| stack.ropes[*kind].clone()).collect(),
            layers: held.layers.iter().map(|layer| self.layer(layer, &held)).collect(),
            norm: stack.norm.clone().filter(|_| ends),
            head: stack.head.as_ref().filter(|_| ends).map(|spec| self.head(spec)),
        }
    }

    fn embedding(&self, spec: &EmbeddingSpec) -> EmbeddingSpec {
        // Encoder and decoder may have vocabularies of their own.
        let all = spec.table.shape[0];
        EmbeddingSpec { table: with_rows(&spec.table, all, self.shard.range(all, 1)), ..spec.clone() }
    }

    fn head(&self, spec: &HeadSpec) -> HeadSpec {
        let spread = ColumnSplit {
            widths: self.vocab.iter().map(Range::len).collect(),
            local: self.vocab[self.shard.rank].clone(),
        };
        HeadSpec {
            table: self.vocab_rows(&spec.table),
            bias: spec.bias.as_ref().map(|bias| self.vocab_rows(bias)),
            vocab_split: (self.shard.rank_count() > 1).then_some(spread),
            ..spec.clone()
        }
    }

    fn vocab_rows(&self, piece: &TensorSlice) -> TensorSlice {
        let all = self.vocab.last().map_or(0, |last| last.end);
        with_rows(piece, all, self.vocab[self.shard.rank].clone())
    }

    /// Returns the relative position biases of this rank. All layers that use one have the same heads, so the
    /// first of them determines them.
    fn relative_biases(&self, all: &[RelativeBiasSpec], held: &StageLayers) -> Vec<RelativeBiasSpec> {
        let of_rank = |bias: &usize| {
            let first = held.layers.iter().find(|layer| layer.attention.relative_bias == Some(*bias))?;
            let split = HeadSplit::for_attention(&first.attention, held.head_block);
            let heads = split.by_rank(&self.shard.shares).swap_remove(self.shard.rank);
            Some(RelativeBiasSpec { local_heads: heads.query, ..all[*bias].clone() })
        };
        held.relative_biases.iter().filter_map(of_rank).collect()
    }

    fn layer(&self, layer: &LayerSpec, held: &StageLayers) -> LayerSpec {
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

    fn attention(&self, spec: &AttentionSpec, held: &StageLayers) -> AttentionSpec {
        let by_rank = HeadSplit::for_attention(spec, held.head_block).by_rank(&self.shard.shares);
        let RankHeads { query, kv } = &by_rank[self.shard.rank];
        let (k_dim, v_dim) = (spec.k_dim, spec.v_dim);
        let of = |heads: &Range<usize>, width: usize| heads.start * width..heads.end * width;
        let spreads = self.shard.rank_count() > 1 && spec.norms_all_heads();
        let latent = spec.latent.as_ref().map(|latent| {
            Box::new(LatentSpec {
                q_rope: split_outputs(&latent.q_rope, of(query, latent.rope_dim)),
                absorbed: split_outputs(&latent.absorbed, of(query, v_dim)),
                keys: latent.keys.as_ref().map(|keys| split_outputs(keys, of(query, latent.nope_dim))),
                ..(**latent).clone()
            })
        });
        let distances = spec.distances.as_ref().map(|distances| {
            let [q, k] = [&distances.q, &distances.k].map(|linear| split_outputs(linear, of(query, k_dim)));
            Box::new(DistanceSpec { q, k, ..(**distances).clone() })
        });
        let [q, k, v] = match &spec.latent {
            Some(latent) => [
                split_outputs(&spec.q, of(query, latent.nope_dim)),
                spec.k.clone(),
                split_outputs(&spec.v, of(query, latent.value_dim)),
            ],
            None => [
                split_outputs(&spec.q, of(query, k_dim)),
                split_outputs(&spec.k, of(kv, k_dim)),
                split_outputs(&spec.v, of(kv, v_dim)),
            ],
        };
        AttentionSpec {
            heads: query.len(),
            kv_heads: kv.len(),
            q,
            k,
            v,
            o: self.split_inputs(&spec.o, of(query, spec.head_output_dim())),
            latent,
            distances,
            rope: held.rope(spec.rope),
            growth: held.rope(spec.growth),
            sinks: spec.sinks.as_ref().map(|sinks| with_rows(sinks, spec.heads, query.clone())),
            relative_bias: spec
                .relative_bias
                .and_then(|bias| held.relative_biases.iter().position(|own| *own == bias)),
            qk_norms: spec
                .qk_norms
                .as_ref()
                .map(|(q, k)| (weights_of_heads(q, query), weights_of_heads(k, kv))),
            qk_split: spreads.then(|| heads::qk_splits(&by_rank, self.shard.rank, k_dim)),
            ..*spec
        }
    }

    fn dense(&self, spec: &DenseSpec) -> DenseSpec {
        self.dense_columns(spec, self.shard.range(spec.width, column_block(&spec.down, self.types)))
    }

    /// Returns the part of a dense network with the columns `own` of its inner layer.
    fn dense_columns(&self, spec: &DenseSpec, own: Range<usize>) -> DenseSpec {
        DenseSpec {
            width: own.len(),
            activation: spec.activation,
            activation_numbers: spec.activation_numbers.clone(),
            gate: split_outputs(&spec.gate, own.clone()),
            up: spec.up.as_ref().map(|up| split_outputs(up, own.clone())),
            down: self.split_inputs(&spec.down, own),
        }
    }

    fn moe(&self, spec: &MoeSpec) -> MoeSpec {
        let (all, width) = (spec.experts.len(), spec.experts[0].width);
        let granule = expert_block(spec, self.types);
        let (held, columns) = match self.shard.experts {
            ExpertSplit::Column if width.div_ceil(granule) >= self.shard.rank_count() => {
                (0..all, self.shard.range(width, granule))
            }
            ExpertSplit::Column | ExpertSplit::Expert => (self.shard.range(all, 1), 0..width),
        };
        // The results of whole experts are on one rank, with their biases.
        let expert = |expert: &DenseSpec| match columns == (0..width) {
            true => expert.clone(),
            false => self.dense_columns(expert, columns.clone()),
        };
        let experts = spec.experts[held.clone()].iter();
        MoeSpec {
            first_expert: held.start,
            experts: experts.map(expert).collect(),
            shared: spec.shared.as_ref().map(|shared| self.dense(shared)),
            router: spec.router.clone(),
            correction: spec.correction.clone(),
            shared_router: spec.shared_router.clone(),
            ..*spec
        }
    }

    /// Splits a linear layer that writes to the residual stream. The ranks' results are summed, so the bias
    /// is on the first rank only.
    fn split_inputs(&self, linear: &LinearSpec, own: Range<usize>) -> LinearSpec {
        LinearSpec {
            n: linear.n,
            k: own.len(),
            bias: linear.bias.clone().filter(|_| self.shard.rank == 0),
            weight: TensorSlice {
                bounds: SliceBounds { columns: partial_range(linear.k, own), ..linear.weight.bounds.clone() },
                ..linear.weight.clone()
            },
        }
    }
}

/// Returns the norm of some heads only, which may have weights of their own.
fn weights_of_heads(norm: &NormSpec, heads: &Range<usize>) -> NormSpec {
    let own = |all: &[TensorSlice]| match all.len() {
        0 | 1 => all.to_vec(),
        _ => all[heads.clone()].to_vec(),
    };
    NormSpec { weights: own(&norm.weights), biases: own(&norm.biases), ..norm.clone() }
}

/// Splits a linear layer that reads the residual stream.
fn split_outputs(linear: &LinearSpec, own: Range<usize>) -> LinearSpec {
    LinearSpec {
        n: own.len(),
        k: linear.k,
        bias: linear.bias.as_ref().map(|bias| with_rows(bias, linear.n, own.clone())),
        weight: with_rows(&linear.weight, linear.n, own),
    }
}

fn with_rows(piece: &TensorSlice, all: usize, own: Range<usize>) -> TensorSlice {
    TensorSlice {
        bounds: SliceBounds { rows: partial_range(all, own), ..piece.bounds.clone() },
        ..piece.clone()
    }
}

/// Returns the range, or `None` if it is everything.
fn partial_range(all: usize, own: Range<usize>) -> Option<Range<usize>> {
    (own != (0..all)).then_some(own)
}
