//! Tests that every option of a model specification is used by some model that is checked against its
//! reference.

use crate::common::fixture;
use crate::families::{decoders, family, others};
use mainstem::model::spec::distances::DistanceSpec;
use mainstem::model::spec::words::{
    ActivationName, AttentionKind, ExpertLayout, HeadKind, Kind, MaskName, MlpKind, NormName, Placement,
    PositionKind, QkNorm, QkvLayout, RopeStyleName, ScoringName, SinusoidFrequencies, SinusoidLayout, Wiring,
};
use mainstem::model::spec::{
    AttentionSpec, HeadSpec, LayerSpec, MlpSpec, ModelSpec, Norms, PositionEmbeddingSpec, RelativeBiasKind,
    StackSpec, TensorPart,
};
use mainstem::model::{ModelRef, ModelSource};
use mainstem_kernels::{Mask, NormKind, Scoring};
use serde::Serialize;
use std::collections::BTreeSet;

/// Options, each as `name: value`.
type Seen = BTreeSet<String>;

fn word(value: impl Serialize) -> String {
    serde_json::to_value(value).expect("a choice is a word").as_str().expect("a choice is a word").to_owned()
}

fn see(seen: &mut Seen, what: &str, which: impl Serialize) {
    seen.insert(format!("{what}: {}", word(which)));
}

fn of_model(spec: &ModelSpec, seen: &mut Seen) {
    see(seen, "kind", spec.kind);
    for stack in spec.stacks() {
        of_stack(stack, seen);
        stack.layers.iter().for_each(|layer| of_layer(layer, seen));
        of_head(stack.head.as_ref(), seen);
    }
}

fn of_stack(stack: &StackSpec, seen: &mut Seen) {
    let embedding = stack.embedding.as_ref().expect("the model is whole");
    for (what, is_there) in [
        ("embedding: scale", embedding.scale != 1.0),
        ("embedding: norm", embedding.norm.is_some()),
        ("embedding: norm first", embedding.norm_first),
        ("embedding: token types", embedding.token_types.is_some()),
        ("embedding: of another width", embedding.project_in.is_some()),
        ("embedding: projected last", embedding.projects_last && embedding.project_in.is_some()),
        ("rope: part of a head", stack.ropes.iter().any(|rope| rope.dims < stack.layers[0].attention.k_dim)),
        ("rope: several", stack.ropes.len() > 1),
    ] {
        seen.extend(is_there.then(|| what.to_owned()));
    }
    match &stack.position_embedding {
        Some(PositionEmbeddingSpec::Learned { offset, .. }) => {
            see(seen, "positions", PositionKind::Learned);
            seen.insert(format!("learned: offset {}", *offset > 0));
        }
        Some(PositionEmbeddingSpec::Sinusoidal { layout, frequencies, offset, scale }) => {
            see(seen, "positions", PositionKind::Sinusoidal);
            see(seen, "sinusoids", *layout);
            see(seen, "frequencies", *frequencies);
            seen.insert(format!("sinusoids: offset {}", *offset > 0));
            seen.insert(format!("sinusoids: scaled {}", *scale != 1.0));
        }
        None => {}
    }
    seen.extend((stack.relative_biases.len() > 1).then(|| "relative: by layer".to_owned()));
    for bias in &stack.relative_biases {
        match &bias.kind {
            RelativeBiasKind::Alibi { max, .. } => {
                see(seen, "positions", PositionKind::Alibi);
                seen.insert(format!("alibi: power of two {}", bias.heads.is_power_of_two()));
                seen.insert(format!("alibi: its own maximum {}", *max != 8.0));
            }
            RelativeBiasKind::Learned { bidirectional: both_ways, .. } => {
                see(seen, "positions", PositionKind::RelativeBias);
                seen.insert(format!("relative: both ways {both_ways}"));
            }
        }
    }
    for rope in &stack.ropes {
        if rope.growth.is_some() {
            seen.insert("attention: growth".into());
            continue;
        }
        see(seen, "positions", PositionKind::Rope);
        seen.insert(format!("rope: {}", format!("{:?}", rope.style).to_lowercase()));
        seen.insert(format!("scaling: {}", word(&rope.config.scaling.to_json()["kind"])));
    }
}

fn of_layer(layer: &LayerSpec, seen: &mut Seen) {
    see(seen, "wiring", layer.wiring);
    of_norms(&layer.attention_norms, seen);
    of_attention(&layer.attention, seen);
    seen.extend((layer.residual_scale != 1.0).then(|| "residual: scale".to_owned()));
    if let Some((_, cross)) = &layer.cross {
        seen.insert(format!("cross: bias {}", cross.q.bias.is_some()));
    }
    let dense = match &layer.mlp {
        MlpSpec::Dense(dense) => dense,
        MlpSpec::Experts(moe) => {
            see(seen, "mlp", MlpKind::Experts);
            see(
                seen,
                "scoring",
                match moe.scoring {
                    Scoring::Softmax => ScoringName::Softmax,
                    Scoring::Sigmoid => ScoringName::Sigmoid,
                    Scoring::Nearby { .. } => ScoringName::Nearby,
                },
            );
            seen.insert(format!("experts: normalized scores {}", moe.normalize_scores));
            for (what, is_there) in [
                ("experts: correction", moe.correction.is_some()),
                ("experts: groups", moe.groups.is_some()),
                ("experts: router bias", moe.router.bias.is_some()),
                ("experts: bias", moe.experts[0].down.bias.is_some()),
                ("experts: transposed", moe.experts[0].down.weight.transposed),
                ("experts: input weighed", moe.weighs_input),
                ("experts: stacked", moe.experts[0].down.weight.plane.is_some()),
            ] {
                seen.extend(is_there.then(|| what.to_owned()));
            }
            let layout = match moe.experts[0].gate.weight.part {
                TensorPart::Whole => ExpertLayout::Separate,
                TensorPart::Rows { groups: 1, .. } => ExpertLayout::Halves,
                _ => ExpertLayout::Interleaved,
            };
            see(seen, "experts", layout);
            if let Some(groups) = moe.groups {
                seen.insert(format!("group score: {:?}", groups.score));
            }
            seen.extend((moe.scale != 1.0).then(|| "experts: scale".to_owned()));
            let gate =
                moe.shared.as_ref().map(|_| format!("experts: shared, gate {}", moe.shared_router.is_some()));
            seen.extend(gate);
            &moe.experts[0]
        }
    };
    if matches!(layer.mlp, MlpSpec::Dense(_)) {
        see(seen, "mlp", if dense.up.is_some() { MlpKind::Gated } else { MlpKind::Ungated });
        seen.insert(format!("mlp: bias {}", dense.down.bias.is_some()));
        seen.insert(format!("mlp: fused {}", matches!(dense.gate.weight.part, TensorPart::Rows { .. })));
    }
    let activation = format!("{:?}", dense.activation).to_lowercase();
    seen.insert(format!("activation: {}", activation.split('(').next().unwrap_or_default()));
}

fn of_attention(attention: &AttentionSpec, seen: &mut Seen) {
    let kind = if attention.latent.is_some() { AttentionKind::Latent } else { AttentionKind::Heads };
    see(seen, "attention", kind);
    match &attention.distances {
        Some(distances) => {
            see(seen, "positions", PositionKind::Disentangled);
            let DistanceSpec { norm, growth_end, .. } = &**distances;
            seen.insert(format!("distances: norm {}, growth {}", norm.is_some(), growth_end.is_some()));
            seen.insert(format!("distances: shared {}", distances.k == attention.k));
        }
        None if attention.rope.is_none() && attention.relative_bias.is_none() => {
            see(seen, "positions", PositionKind::None);
        }
        None => {}
    }
    let AttentionSpec { heads, kv_heads, k_dim, v_dim, .. } = *attention;
    let groups = if kv_heads == heads {
        "all"
    } else if kv_heads == 1 {
        "one"
    } else {
        "some"
    };
    seen.insert(format!("kv heads: {groups}"));
    seen.insert(format!(
        "qkv bias: {}, out bias: {}",
        attention.q.bias.is_some(),
        attention.o.bias.is_some()
    ));
    see(
        seen,
        "qkv",
        match attention.q.weight.part {
            _ if attention.latent.is_some() => QkvLayout::Separate,
            TensorPart::Rows { groups: 1, .. } => QkvLayout::Fused,
            TensorPart::Rows { .. } => QkvLayout::FusedGrouped,
            _ => QkvLayout::Separate,
        },
    );
    see(
        seen,
        "qk norm",
        match &attention.qk_norms {
            None => QkNorm::None,
            Some((q, _)) if q.weights.len() > 1 => QkNorm::PerHeadWeights,
            Some((q, _)) if q.width == k_dim => QkNorm::PerHead,
            Some(_) => QkNorm::Full,
        },
    );
    let (mask, window) = match attention.mask {
        Mask::Causal { .. } | Mask::Chunked { .. } => (MaskName::Causal, attention.mask.causal_window()),
        Mask::Bidirectional { window } => (MaskName::Bidirectional, window),
    };
    see(seen, "mask", mask);
    seen.extend(window.map(|_| format!("window: {}", word(mask))));
    for (what, is_there) in [
        ("attention: transposed", attention.q.weight.transposed),
        ("attention: softcap", attention.softcap.is_some()),
        ("attention: sinks", attention.sinks.is_some()),
        ("attention: chunks", matches!(attention.mask, Mask::Chunked { .. })),
        ("attention: clip", attention.clip.is_some()),
        ("attention: norms last", attention.qk_norms_last),
        ("attention: its own scale", (attention.scale - 1.0 / (k_dim as f32).sqrt()).abs() > 1e-6),
        ("attention: values of another width", v_dim != k_dim),
        ("attention: heads of their own width", heads * k_dim != attention.q.k),
    ] {
        seen.extend(is_there.then(|| what.to_owned()));
    }
}

fn of_norms(norms: &Norms, seen: &mut Seen) {
    see(
        seen,
        "placement",
        match norms {
            Norms { pre: Some(_), out: Some(_), .. } => Placement::Sandwich,
            Norms { out: Some(_), .. } => Placement::Output,
            Norms { post: Some(_), .. } => Placement::Post,
            Norms { pre: Some(_), .. } => Placement::Pre,
            _ => Placement::None,
        },
    );
    for norm in norms.pre.iter().chain(&norms.post) {
        see(
            seen,
            "norm",
            match norm.kind {
                NormKind::Rms => NormName::Rms,
                NormKind::Layer => NormName::Layer,
            },
        );
        seen.insert(format!("norm: {:?} with bias {}", norm.kind, !norm.biases.is_empty()));
        seen.extend(norm.weights.is_empty().then(|| "norm: without weights".to_owned()));
        seen.extend((norm.offset != 0.0).then(|| "norm: offset".to_owned()));
    }
}

fn of_head(head: Option<&HeadSpec>, seen: &mut Seen) {
    let Some(head) = head else {
        return see(seen, "head", HeadKind::None);
    };
    see(seen, "head", HeadKind::Lm);
    seen.insert(format!("head: tied {}", head.tied));
    for (what, is_there) in [
        ("head: bias", head.bias.is_some()),
        ("head: normalized rows", head.normalize_rows),
        ("head: scale", head.scale != 1.0),
        ("head: softcap", head.softcap.is_some()),
        ("head: transform", head.transform.is_some()),
        ("head: of another width", head.project_out.is_some()),
    ] {
        seen.extend(is_there.then(|| what.to_owned()));
    }
}

/// Returns all possible options.
fn choices() -> Seen {
    let mut all = Seen::new();
    fn each<T: Serialize + Copy>(all: &mut Seen, what: &str, words: &[T]) {
        words.iter().for_each(|which| see(all, what, *which));
    }
    each(&mut all, "kind", Kind::ALL);
    each(&mut all, "positions", PositionKind::ALL);
    each(&mut all, "rope", RopeStyleName::ALL);
    each(&mut all, "sinusoids", SinusoidLayout::ALL);
    each(&mut all, "frequencies", SinusoidFrequencies::ALL);
    each(&mut all, "norm", NormName::ALL);
    each(&mut all, "placement", Placement::ALL);
    each(&mut all, "wiring", Wiring::ALL);
    each(&mut all, "attention", AttentionKind::ALL);
    each(&mut all, "qkv", QkvLayout::ALL);
    each(&mut all, "qk norm", QkNorm::ALL);
    each(&mut all, "mask", MaskName::ALL);
    each(&mut all, "mlp", MlpKind::ALL);
    each(&mut all, "scoring", ScoringName::ALL);
    each(&mut all, "experts", ExpertLayout::ALL);
    each(&mut all, "head", HeadKind::ALL);
    let activations = ActivationName::ALL.iter().filter(|name| **name != ActivationName::Tanh);
    all.extend(activations.map(|name| format!("activation: {}", word(*name).replace('_', ""))));
    all.extend(
        ["none", "linear", "dynamic", "llama3", "yarn", "longrope"].map(|kind| format!("scaling: {kind}")),
    );
    let others = [
        "alibi: its own maximum true",
        "alibi: power of two false",
        "alibi: power of two true",
        "attention: chunks",
        "attention: clip",
        "attention: growth",
        "attention: heads of their own width",
        "attention: its own scale",
        "attention: norms last",
        "attention: sinks",
        "attention: softcap",
        "attention: transposed",
        "attention: values of another width",
        "cross: bias false",
        "cross: bias true",
        "distances: norm false, growth false",
        "distances: norm true, growth true",
        "distances: shared false",
        "distances: shared true",
        "embedding: norm",
        "embedding: norm first",
        "embedding: of another width",
        "embedding: projected last",
        "embedding: scale",
        "embedding: token types",
        "experts: bias",
        "experts: correction",
        "experts: groups",
        "experts: input weighed",
        "experts: normalized scores false",
        "experts: normalized scores true",
        "experts: router bias",
        "experts: scale",
        "experts: shared, gate false",
        "experts: shared, gate true",
        "experts: stacked",
        "experts: transposed",
        "group score: Max",
        "group score: TopTwo",
        "head: bias",
        "head: normalized rows",
        "head: of another width",
        "head: scale",
        "head: softcap",
        "head: tied false",
        "head: tied true",
        "head: transform",
        "kv heads: all",
        "kv heads: one",
        "kv heads: some",
        "learned: offset false",
        "learned: offset true",
        "mlp: bias false",
        "mlp: bias true",
        "mlp: fused false",
        "mlp: fused true",
        "norm: Layer with bias false",
        "norm: Layer with bias true",
        "norm: offset",
        "norm: without weights",
        "qkv bias: false, out bias: false",
        "qkv bias: true, out bias: false",
        "qkv bias: true, out bias: true",
        "relative: both ways false",
        "relative: both ways true",
        "relative: by layer",
        "residual: scale",
        "rope: part of a head",
        "rope: several",
        "sinusoids: offset false",
        "sinusoids: offset true",
        "sinusoids: scaled true",
        "window: bidirectional",
        "window: causal",
    ];
    all.extend(others.map(str::to_owned));
    all
}

#[test]
fn every_choice_of_a_specification_is_checked_by_some_model() {
    let mut seen = Seen::new();
    let families = decoders().iter().copied().chain(others()).map(|name| family(name, "coverage"));
    let families: Vec<_> = families.collect();
    let older = ["gqa", "biased", "rope_linear", "rope_llama3"].map(fixture);
    for folder in families.iter().map(|model| model.0.clone()).chain(older) {
        let source = ModelSource::open(&ModelRef::Path(folder), None).expect("the model opens");
        of_model(&source.spec, &mut seen);
    }
    let missing: Vec<_> = choices().difference(&seen).cloned().collect();
    assert!(missing.is_empty(), "no model has {missing:?}");
}
