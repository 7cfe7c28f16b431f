//! Limits on the number of ranks of a stage, with their reasons.
//!
//! Invariant: everything that [`super::shard_spec`] splits has a limit here; within all limits each rank gets
//! a part of everything.

use super::heads::HeadSplit;
use super::{ExpertSplit, Shard, ShardError, TypeLookup, layer_count};
use crate::model::spec::{
    AttentionSpec, DenseSpec, LayerSpec, LinearSpec, MlpSpec, ModelSpec, MoeSpec, StackSpec,
};
use std::ops::Range;

/// The maximum number of ranks that can share a part of the model, and the reason.
struct RankLimit {
    ranks: usize,
    reason: String,
}

/// Returns the maximum number of ranks that can share the shard's layers, whatever number the shard has. The
/// layers must exist.
pub fn max_ranks(spec: &ModelSpec, shard: &Shard, types: TypeLookup) -> usize {
    smallest_limit(spec, shard, types).ranks
}

/// Checks that the shard's layers exist, that no share is 0, and that the ranks are not too many.
pub(super) fn check(spec: &ModelSpec, shard: &Shard, types: TypeLookup) -> Result<(), ShardError> {
    check_layers(spec, shard)?;
    if let Some(rank) = shard.shares.iter().position(|share| *share == 0) {
        return Err(ShardError::ZeroShare(rank));
    }
    let ranks = shard.rank_count();
    if ranks == 1 {
        return Ok(());
    }
    let RankLimit { ranks: most, reason } = smallest_limit(spec, shard, types);
    if ranks > most { Err(ShardError::TooManyRanks { ranks, most, reason }) } else { Ok(()) }
}

fn check_layers(spec: &ModelSpec, shard: &Shard) -> Result<(), ShardError> {
    let (encoder, decoder) = (layer_count(spec.encoder.as_ref()), layer_count(spec.decoder.as_ref()));
    for (name, own, all) in [("encoder", &shard.encoder, encoder), ("decoder", &shard.decoder, decoder)] {
        if own.start > own.end || own.end > all {
            let reason = format!("layers {own:?} of the {name} are out of range, because it has {all}");
            return Err(ShardError::InvalidLayers(reason));
        }
    }
    if shard.encoder.is_empty() && shard.decoder.is_empty() {
        return Err(ShardError::InvalidLayers("a stage has no layers".to_owned()));
    }
    if !shard.decoder.is_empty() && !shard.encoder.is_empty() && shard.encoder.end < encoder {
        return Err(ShardError::InvalidLayers(
            "a stage has layers of the decoder before the encoder's last".to_owned(),
        ));
    }
    Ok(())
}

/// Returns the smallest limit, the first if several are equal.
fn smallest_limit(spec: &ModelSpec, shard: &Shard, types: TypeLookup) -> RankLimit {
    let mut all = Vec::new();
    let stacks = [
        ("encoder", &spec.encoder, shard.encoder.clone()),
        ("decoder", &spec.decoder, shard.decoder.clone()),
    ];
    for (name, stack, own) in stacks {
        if let Some(stack) = stack.as_ref().filter(|_| !own.is_empty()) {
            stack_limits(name, stack, own, shard.experts, types, &mut all);
        }
    }
    let vocab = spec.vocab.min(spec.source_vocab);
    let vocab = RankLimit { ranks: vocab, reason: format!("the vocabulary has {vocab} tokens") };
    all.push(vocab);
    all.into_iter().min_by_key(|bound| bound.ranks).expect("the vocabulary has a limit")
}

fn stack_limits(
    name: &str,
    stack: &StackSpec,
    own: Range<usize>,
    experts: ExpertSplit,
    types: TypeLookup,
    all: &mut Vec<RankLimit>,
) {
    let block = head_block(&stack.layers[own.clone()], types);
    all.extend(shared_head_limit(name, &stack.layers[own.clone()]));
    for (index, layer) in own.clone().zip(&stack.layers[own]) {
        let what = format!("layer {index} of the {name}");
        let RankLimit { ranks, reason } = match &layer.mlp {
            MlpSpec::Dense(dense) => dense_limit(dense, types),
            MlpSpec::Experts(moe) => moe_limit(moe, experts, types),
        };
        all.push(RankLimit { ranks, reason: format!("{what} has {reason}") });
        all.push(attention_limit(&what, &layer.attention, block));
    }
}

/// Returns a limit of one rank if layers that share a cache or a relative position bias differ in their
/// heads.
fn shared_head_limit(name: &str, layers: &[LayerSpec]) -> Option<RankLimit> {
    let shared = layers.iter().filter(|layer| name == "encoder" || layer.attention.relative_bias.is_some());
    let mut heads = shared.map(|layer| (layer.attention.heads, layer.attention.kv_heads));
    let first = heads.next()?;
    let differ = heads.any(|other| other != first);
    differ.then(|| RankLimit { ranks: 1, reason: format!("the numbers of heads in the {name} differ") })
}

fn attention_limit(what: &str, attention: &AttentionSpec, block: usize) -> RankLimit {
    let AttentionSpec { heads, kv_heads, .. } = *attention;
    let v_dim = attention.head_output_dim();
    let blocks = match block {
        1 => String::new(),
        numbers => format!(" of width {v_dim}, and the output projections are stored in blocks of {numbers}"),
    };
    let shared = if kv_heads < heads { format!(" on {kv_heads} KV heads") } else { String::new() };
    let reason = format!("{what} has {heads} heads{shared}{blocks}");
    RankLimit { ranks: HeadSplit::for_attention(attention, block).max_ranks(), reason }
}

fn dense_limit(dense: &DenseSpec, types: TypeLookup) -> RankLimit {
    width_limit("an MLP", dense.width, column_block(&dense.down, types))
}

fn width_limit(what: &str, width: usize, block: usize) -> RankLimit {
    let blocks = if block > 1 { format!(" stored in blocks of {block}") } else { String::new() };
    RankLimit { ranks: width.div_ceil(block), reason: format!("{what} of width {width}{blocks}") }
}

fn moe_limit(moe: &MoeSpec, split: ExpertSplit, types: TypeLookup) -> RankLimit {
    let (experts, width) = (moe.experts.len(), moe.experts[0].width);
    let dealt = RankLimit { ranks: experts, reason: format!("{experts} experts") };
    let own = match split {
        ExpertSplit::Expert => dealt,
        ExpertSplit::Column => {
            let cut = width_limit(&format!("{experts} experts"), width, expert_block(moe, types));
            if cut.ranks < dealt.ranks { dealt } else { cut }
        }
    };
    let shared = moe
        .shared
        .as_ref()
        .map(|shared| width_limit("a shared expert", shared.width, column_block(&shared.down, types)));
    shared
        .into_iter()
        .fold(own, |smallest, bound| if bound.ranks < smallest.ranks { bound } else { smallest })
}

/// Returns the block size at whose multiples the columns of a projection can be split.
pub(super) fn column_block(linear: &LinearSpec, types: TypeLookup) -> usize {
    types(&linear.weight).row().block_elements
}

/// Returns the block size of all experts of a mixture, which are split in the same way.
pub(super) fn expert_block(moe: &MoeSpec, types: TypeLookup) -> usize {
    moe.experts.iter().map(|expert| column_block(&expert.down, types)).max().unwrap_or(1)
}

/// Returns the block size of the output projections of layers, whose heads are split in the same way.
pub(super) fn head_block(layers: &[LayerSpec], types: TypeLookup) -> usize {
    let attentions = layers
        .iter()
        .flat_map(|layer| [&layer.attention].into_iter().chain(layer.cross.as_ref().map(|(_, cross)| cross)));
    attentions.map(|attention| column_block(&attention.o, types)).max().unwrap_or(1)
}
