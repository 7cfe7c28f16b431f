//! Limits on the number of ranks of a stage, with their reasons.
//!
//! Invariant: everything that [`super::shard_spec`] splits has a limit here; within all limits each rank gets
//! a part of everything.

use super::heads::Deal;
use super::{ExpertSplit, Refusal, Shard, Types, layers};
use crate::model::spec::{
    AttentionSpec, DenseSpec, LayerSpec, LinearSpec, MlpSpec, ModelSpec, MoeSpec, StackSpec,
};
use std::ops::Range;

/// The maximum number of ranks that can share a part of the model, and the reason.
struct Bound {
    members: usize,
    reason: String,
}

/// Returns the maximum number of ranks that can share the shard's layers, whatever number the shard has. The
/// layers must exist.
pub fn members_max(spec: &ModelSpec, shard: &Shard, types: Types) -> usize {
    tightest(spec, shard, types).members
}

/// Checks that the shard's layers exist, that no share is 0, and that the ranks are not too many.
pub(super) fn check(spec: &ModelSpec, shard: &Shard, types: Types) -> Result<(), Refusal> {
    check_layers(spec, shard)?;
    if let Some(rank) = shard.shares.iter().position(|share| *share == 0) {
        return Err(Refusal::Share(rank));
    }
    let members = shard.members();
    if members == 1 {
        return Ok(());
    }
    let Bound { members: most, reason } = tightest(spec, shard, types);
    if members > most { Err(Refusal::Members { members, most, reason }) } else { Ok(()) }
}

fn check_layers(spec: &ModelSpec, shard: &Shard) -> Result<(), Refusal> {
    let (encoder, decoder) = (layers(spec.encoder.as_ref()), layers(spec.decoder.as_ref()));
    for (name, own, all) in [("encoder", &shard.encoder, encoder), ("decoder", &shard.decoder, decoder)] {
        if own.start > own.end || own.end > all {
            let reason = format!("layers {own:?} of the {name} are out of range, because it has {all}");
            return Err(Refusal::Layers(reason));
        }
    }
    if shard.encoder.is_empty() && shard.decoder.is_empty() {
        return Err(Refusal::Layers("a stage has no layers".to_owned()));
    }
    if !shard.decoder.is_empty() && !shard.encoder.is_empty() && shard.encoder.end < encoder {
        return Err(Refusal::Layers(
            "a stage has layers of the decoder before the encoder's last".to_owned(),
        ));
    }
    Ok(())
}

/// Returns the smallest limit, the first if several are equal.
fn tightest(spec: &ModelSpec, shard: &Shard, types: Types) -> Bound {
    let mut all = Vec::new();
    let stacks = [
        ("encoder", &spec.encoder, shard.encoder.clone()),
        ("decoder", &spec.decoder, shard.decoder.clone()),
    ];
    for (name, stack, own) in stacks {
        if let Some(stack) = stack.as_ref().filter(|_| !own.is_empty()) {
            of_stack(name, stack, own, shard.experts, types, &mut all);
        }
    }
    let vocab = Bound { members: spec.vocab, reason: format!("the vocabulary has {} tokens", spec.vocab) };
    all.push(vocab);
    all.into_iter().min_by_key(|bound| bound.members).expect("the vocabulary has a limit")
}

fn of_stack(
    name: &str,
    stack: &StackSpec,
    own: Range<usize>,
    experts: ExpertSplit,
    types: Types,
    all: &mut Vec<Bound>,
) {
    let block = head_block(&stack.layers[own.clone()], types);
    all.extend(of_heads_in_common(name, &stack.layers[own.clone()]));
    for (index, layer) in own.clone().zip(&stack.layers[own]) {
        let what = format!("layer {index} of the {name}");
        let Bound { members, reason } = match &layer.mlp {
            MlpSpec::Dense(dense) => of_dense(dense, types),
            MlpSpec::Experts(moe) => of_moe(moe, experts, types),
        };
        all.push(Bound { members, reason: format!("{what} has {reason}") });
        all.push(of_attention(&what, &layer.attention, block));
    }
}

/// Returns a limit of one rank if layers that share a cache or a relative position bias differ in their
/// heads.
fn of_heads_in_common(name: &str, layers: &[LayerSpec]) -> Option<Bound> {
    let shared = layers.iter().filter(|layer| name == "encoder" || layer.attention.by_distance);
    let mut heads = shared.map(|layer| (layer.attention.heads, layer.attention.kv_heads));
    let first = heads.next()?;
    let differ = heads.any(|other| other != first);
    differ.then(|| Bound { members: 1, reason: format!("the numbers of heads in the {name} differ") })
}

fn of_attention(what: &str, attention: &AttentionSpec, block: usize) -> Bound {
    let AttentionSpec { heads, kv_heads, v_dim, .. } = *attention;
    let blocks = match block {
        1 => String::new(),
        numbers => format!(" of width {v_dim}, and the output projections are stored in blocks of {numbers}"),
    };
    let shared = if kv_heads < heads { format!(" on {kv_heads} KV heads") } else { String::new() };
    let reason = format!("{what} has {heads} heads{shared}{blocks}");
    Bound { members: Deal::of(attention, block).members_max(), reason }
}

fn of_dense(dense: &DenseSpec, types: Types) -> Bound {
    of_width("an MLP", dense.width, block(&dense.down, types))
}

fn of_width(what: &str, width: usize, block: usize) -> Bound {
    let blocks = if block > 1 { format!(" stored in blocks of {block}") } else { String::new() };
    Bound { members: width.div_ceil(block), reason: format!("{what} of width {width}{blocks}") }
}

fn of_moe(moe: &MoeSpec, split: ExpertSplit, types: Types) -> Bound {
    let (experts, width) = (moe.experts.len(), moe.experts[0].width);
    let dealt = Bound { members: experts, reason: format!("{experts} experts") };
    let own = match split {
        ExpertSplit::Expert => dealt,
        ExpertSplit::Column => {
            let cut = of_width(&format!("{experts} experts"), width, expert_block(moe, types));
            if cut.members < dealt.members { dealt } else { cut }
        }
    };
    let shared = moe
        .shared
        .as_ref()
        .map(|shared| of_width("a shared expert", shared.width, block(&shared.down, types)));
    shared
        .into_iter()
        .fold(own, |smallest, bound| if bound.members < smallest.members { bound } else { smallest })
}

/// Returns the block size at whose multiples the columns of a projection can be split.
pub(super) fn block(linear: &LinearSpec, types: Types) -> usize {
    types(&linear.weight).row().block_elements
}

/// Returns the block size of all experts of a mixture, which are split in the same way.
pub(super) fn expert_block(moe: &MoeSpec, types: Types) -> usize {
    moe.experts.iter().map(|expert| block(&expert.down, types)).max().unwrap_or(1)
}

/// Returns the block size of the output projections of layers, whose heads are split in the same way.
pub(super) fn head_block(layers: &[LayerSpec], types: Types) -> usize {
    let attentions = layers
        .iter()
        .flat_map(|layer| [&layer.attention].into_iter().chain(layer.cross.as_ref().map(|(_, cross)| cross)));
    attentions.map(|attention| block(&attention.o, types)).max().unwrap_or(1)
}
