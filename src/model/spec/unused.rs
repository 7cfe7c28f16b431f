//! Finds settings of a specification file that cannot have an effect, because nothing in the file selects the
//! block that they belong to, and formulas with names that no value has.
//!
//! Invariant: only the file is looked at, so that it is accepted or refused whatever the model.

use super::formula;
use super::setting::Setting;
use super::setting_names::{given, names};
use super::tables::{SpecText, Tables};
use super::words::{
    ActivationName, AttentionKind, ExpertLayout, HeadKind, Kind, MlpKind, Placement, PositionKind, QkNorm,
    QkvLayout, ScoringName, Wiring,
};
use anyhow::{Result, bail};

/// Settings with the condition under which they have an effect.
struct Group {
    /// Whether anything in the file can meet the condition.
    is_possible: bool,
    condition: &'static str,
    settings: &'static [&'static str],
}

/// Checks that all settings of a file can have an effect.
pub fn check(text: &SpecText) -> Result<()> {
    let all = all_tables(text);
    let stacks = [(&text.encoder, "encoder", Kind::Decoder), (&text.decoder, "decoder", Kind::Encoder)];
    for (own, name, without) in stacks {
        if let Some(key) = given(own).first().filter(|_| text.kind == without) {
            bail!("'{name}.{key}' has no effect: the model has no {name}, according to 'kind'");
        }
    }
    for group in groups(text.kind, &all).into_iter().filter(|group| !group.is_possible) {
        let key = all.iter().flat_map(given).find(|key| group.settings.contains(&key.as_str()));
        if let Some(key) = key {
            bail!("'{key}' has no effect without {}", group.condition);
        }
    }
    Ok(())
}

/// Returns the settings, as `table.name`, of blocks that nothing in the file selects.
pub fn without_block(text: &SpecText) -> Vec<&'static str> {
    let groups = groups(text.kind, &all_tables(text));
    groups.iter().filter(|group| !group.is_possible).flat_map(|group| group.settings).copied().collect()
}

/// Returns the tables for all models and layers, followed by those for some.
fn all_tables(text: &SpecText) -> Vec<Tables> {
    let mut all = vec![text.tables(), text.encoder.clone(), text.decoder.clone()];
    all.extend(text.overrides.iter().map(|given| given.tables()));
    all
}

/// Checks that each name with `$` in a formula is that of a setting.
pub fn check_formulas(table: &toml::Table) -> Result<()> {
    for (key, value) in table {
        match value {
            toml::Value::String(text) if key == "formula" => check_formula(text)?,
            toml::Value::Table(inner) => check_formulas(inner)?,
            toml::Value::Array(items) => {
                items.iter().filter_map(toml::Value::as_table).try_for_each(check_formulas)?;
            }
            _ => {}
        }
    }
    Ok(())
}

fn check_formula(text: &str) -> Result<()> {
    for name in formula::names(text) {
        let Some(wanted) = name.strip_prefix('$') else { continue };
        let known = || names().flat_map(|(table, field)| [format!("{table}.{field}"), field.to_owned()]);
        if known().all(|known| known != wanted) {
            let nearest = known().min_by_key(|known| strsim::levenshtein(known, wanted)).unwrap_or_default();
            bail!("formula '{text}': there is no value '{name}'; did you mean '${nearest}'?");
        }
    }
    Ok(())
}

/// Whether some setting of the file can have one of the `wanted` values: the first of `all` is for all
/// models, so that its default counts only if it does not have the setting.
fn can_be<T: PartialEq>(
    all: &[Tables],
    setting: impl Fn(&Tables) -> &Option<Setting<T>>,
    default: T,
    wanted: &[T],
) -> bool {
    let by_default = all.first().is_none_or(|base| setting(base).is_none()) && wanted.contains(&default);
    let mut settings = all.iter().filter_map(|tables| setting(tables).as_ref());
    by_default || settings.any(|setting| wanted.iter().any(|wanted| may_be(setting, wanted)))
}

/// Whether a setting can have the value. One that is looked up without cases can have any.
fn may_be<T: PartialEq>(setting: &Setting<T>, wanted: &T) -> bool {
    match setting {
        Setting::Fixed(value) => value == wanted,
        Setting::Lookup(lookup) => {
            let by_case = lookup.cases.as_ref().map(|cases| cases.values().any(|value| value == wanted));
            let by_key = lookup.key.is_some() && by_case.unwrap_or(true);
            let by_default = lookup.default.as_ref().is_some_and(|default| may_be(default, wanted));
            by_key || lookup.formula.is_some() || by_default
        }
    }
}

fn groups(kind: Kind, all: &[Tables]) -> Vec<Group> {
    let group = |is_possible, condition, settings| Group { is_possible, condition, settings };
    let mut groups = vec![group(
        kind == Kind::EncoderDecoder,
        "an encoder and a decoder",
        &[
            "cross.bias",
            "cross.scale",
            "tensors.cross_norm",
            "tensors.cross_out_norm",
            "tensors.cross_q",
            "tensors.cross_k",
            "tensors.cross_v",
            "tensors.cross_kv",
            "tensors.cross_o",
        ],
    )];
    groups.extend(groups_of_positions(all));
    groups.extend(groups_of_attention(all));
    groups.extend(groups_of_kinds(all));
    groups.extend(groups_of_mlp(all));
    groups.extend(groups_of_experts(all));
    groups.extend(groups_of_head(all));
    groups
}

fn groups_of_positions(all: &[Tables]) -> Vec<Group> {
    use PositionKind::{Alibi, Disentangled, Learned, RelativeBias, Rope, Sinusoidal};
    let is = |kinds: &[PositionKind]| can_be(all, |it| &it.position.kind, PositionKind::None, kinds);
    let group = |is_possible, condition, settings| Group { is_possible, condition, settings };
    vec![
        group(
            is(&[Rope]),
            "position.kind = \"rope\"",
            &["position.style", "position.dims", "position.theta", "position.scaling"],
        ),
        group(is(&[Learned]), "position.kind = \"learned\"", &["position.rows", "tensors.positions"]),
        group(
            is(&[Learned, Sinusoidal]),
            "position.kind = \"learned\" or \"sinusoidal\"",
            &["position.offset"],
        ),
        group(
            is(&[Sinusoidal]),
            "position.kind = \"sinusoidal\"",
            &["position.layout", "position.frequencies"],
        ),
        group(is(&[Alibi]), "position.kind = \"alibi\"", &["position.alibi_max"]),
        group(is(&[Sinusoidal, Alibi]), "position.kind = \"sinusoidal\" or \"alibi\"", &["position.scale"]),
        group(is(&[RelativeBias]), "position.kind = \"relative_bias\"", &["tensors.relative_bias"]),
        group(
            is(&[RelativeBias, Disentangled]),
            "position.kind = \"relative_bias\" or \"disentangled\"",
            &["position.buckets", "position.max_distance"],
        ),
        group(
            is(&[Disentangled]),
            "position.kind = \"disentangled\"",
            &[
                "position.norm",
                "position.shared",
                "tensors.distances",
                "tensors.distance_norm",
                "tensors.distance_q",
                "tensors.distance_k",
            ],
        ),
    ]
}

/// Settings of fused projections in groups.
const GROUPED_QKV: &[&str] = &["attention.qkv_groups"];

fn groups_of_attention(all: &[Tables]) -> Vec<Group> {
    let qkv = |layouts: &[QkvLayout]| can_be(all, |it| &it.attention.qkv, QkvLayout::Separate, layouts);
    let placed = |places: &[Placement]| can_be(all, |it| &it.norm.placement, Placement::Pre, places);
    let is = |kind| can_be(all, |it| &it.attention.kind, AttentionKind::Heads, &[kind]);
    let qk_norms = [QkNorm::PerHead, QkNorm::PerHeadWeights, QkNorm::Full];
    let has_qk_norm = can_be(all, |it| &it.attention.qk_norm, QkNorm::None, &qk_norms);
    let group = |is_possible, condition, settings| Group { is_possible, condition, settings };
    vec![
        group(
            has_qk_norm,
            "attention.qk_norm",
            &[
                "attention.qk_norm_weight",
                "attention.qk_norm_bias",
                "attention.qk_norm_last",
                "tensors.q_norm",
                "tensors.k_norm",
            ],
        ),
        group(
            has_qk_norm || is(AttentionKind::Latent),
            "attention.qk_norm",
            &["attention.qk_norm_kind", "attention.qk_norm_eps"],
        ),
        group(
            all.iter().any(|it| it.attention.growth.is_some()),
            "attention.growth",
            &["attention.growth_interval"],
        ),
        group(
            can_be(all, |it| &it.attention.sinks, false, &[true]),
            "attention.sinks = true",
            &["tensors.sinks"],
        ),
        group(
            qkv(&[QkvLayout::Fused, QkvLayout::FusedGrouped]),
            "attention.qkv = \"fused\" or \"fused_grouped\"",
            &["attention.qkv_order", "tensors.qkv"],
        ),
        group(qkv(&[QkvLayout::FusedGrouped]), "attention.qkv = \"fused_grouped\"", GROUPED_QKV),
        group(
            qkv(&[QkvLayout::Separate]),
            "attention.qkv = \"separate\"",
            &["tensors.q", "tensors.k", "tensors.v"],
        ),
        group(
            placed(&[Placement::Sandwich, Placement::Output]),
            "norm.placement = \"sandwich\" or \"output\"",
            &["tensors.attention_out_norm", "tensors.mlp_out_norm", "tensors.cross_out_norm"],
        ),
        group(
            placed(&[Placement::Pre, Placement::Post, Placement::Sandwich]),
            "norm.placement = \"pre\", \"post\" or \"sandwich\"",
            &["tensors.attention_norm", "tensors.mlp_norm", "tensors.cross_norm"],
        ),
        group(
            can_be(
                all,
                |it| &it.residual.wiring,
                Wiring::Sequential,
                &[Wiring::Sequential, Wiring::ParallelTwoNorms],
            ),
            "a residual.wiring other than \"parallel\"",
            &["tensors.mlp_norm"],
        ),
    ]
}

fn has_mlp(all: &[Tables], kind: MlpKind) -> bool {
    // There is no default, so another kind stands for it.
    can_be(all, |it| &it.mlp.kind, MlpKind::Ungated, &[kind])
}

fn has_shared_expert(all: &[Tables]) -> bool {
    has_mlp(all, MlpKind::Experts) && all.iter().any(|it| it.moe.shared_width.is_some())
}

fn groups_of_kinds(all: &[Tables]) -> Vec<Group> {
    let is = |kind| can_be(all, |it| &it.attention.kind, AttentionKind::Heads, &[kind]);
    let group = |is_possible, condition, settings| Group { is_possible, condition, settings };
    vec![
        group(
            is(AttentionKind::Latent),
            "attention.kind = \"latent\"",
            &[
                "attention.q_rank",
                "attention.kv_rank",
                "attention.nope_dim",
                "attention.rope_dim",
                "tensors.q_a",
                "tensors.q_a_norm",
                "tensors.kv_a",
                "tensors.kv_a_norm",
                "tensors.kv_b",
                "tensors.k_b",
                "tensors.v_b",
            ],
        ),
        group(
            is(AttentionKind::Heads),
            "attention.kind = \"heads\"",
            &[
                "attention.kv_heads",
                "attention.head_dim",
                "attention.qkv",
                "attention.qk_norm",
                "attention.softcap",
                "attention.growth",
                "attention.growth_interval",
                "attention.sinks",
                "tensors.sinks",
                "tensors.k",
                "tensors.v",
            ],
        ),
    ]
}

fn groups_of_mlp(all: &[Tables]) -> Vec<Group> {
    let is = |kind| has_mlp(all, kind);
    let fused = |fused| is(MlpKind::Gated) && can_be(all, |it| &it.mlp.fused, false, &[fused]);
    let has_shared = has_shared_expert(all);
    let group = |is_possible, condition, settings| Group { is_possible, condition, settings };
    vec![
        group(is(MlpKind::Gated) || has_shared, "mlp.kind = \"gated\"", &["mlp.fused"]),
        group(fused(false), "mlp.kind = \"gated\" and mlp.fused = false", &["tensors.gate"]),
        group(
            can_be(all, |it| &it.mlp.activation, ActivationName::Relu, &[ActivationName::Xielu]),
            "mlp.activation = \"xielu\"",
            &[
                "tensors.xielu_positive",
                "tensors.xielu_negative",
                "tensors.xielu_linear",
                "tensors.xielu_bound",
            ],
        ),
        group(fused(true), "mlp.kind = \"gated\" and mlp.fused = true", &["tensors.gate_up"]),
        group(
            is(MlpKind::Ungated) || fused(false),
            "mlp.kind = \"ungated\", or \"gated\" and mlp.fused = false",
            &["tensors.up"],
        ),
    ]
}

/// Settings of every mixture.
const EXPERTS: &[&str] = &[
    "moe.experts",
    "moe.top_k",
    "moe.width",
    "moe.scoring",
    "moe.normalize_scores",
    "moe.scale",
    "moe.correction",
    "moe.groups",
    "moe.weigh_input",
    "moe.gate_up",
    "moe.transposed",
    "moe.bias",
    "moe.router_bias",
    "moe.gated",
    "moe.shared_width",
    "moe.shared_router",
    "tensors.router",
    "tensors.expert_gate",
    "tensors.expert_gate_up",
    "tensors.expert_up",
    "tensors.expert_down",
];

fn groups_of_experts(all: &[Tables]) -> Vec<Group> {
    let has_experts = has_mlp(all, MlpKind::Experts);
    let has_shared = has_shared_expert(all);
    let group = |is_possible, condition, settings| Group { is_possible, condition, settings };
    vec![
        group(has_experts, "mlp.kind = \"experts\"", EXPERTS),
        group(
            can_be(all, |it| &it.moe.gated, true, &[true]),
            "moe.gated = true",
            &["tensors.expert_gate", "tensors.shared_gate"],
        ),
        group(
            can_be(
                all,
                |it| &it.moe.gate_up,
                ExpertLayout::Separate,
                &[ExpertLayout::Halves, ExpertLayout::Interleaved],
            ),
            "moe.gate_up = \"halves\" or \"interleaved\"",
            &["tensors.expert_gate_up"],
        ),
        group(
            has_shared,
            "moe.shared_width",
            &["tensors.shared_gate_up", "tensors.shared_gate", "tensors.shared_up", "tensors.shared_down"],
        ),
        group(
            all.iter().any(|it| it.moe.groups.is_some()),
            "moe.groups",
            &["moe.top_groups", "moe.group_score"],
        ),
        group(
            can_be(all, |it| &it.moe.scoring, ScoringName::Softmax, &[ScoringName::Nearby]),
            "moe.scoring = \"nearby\"",
            &["moe.nearness"],
        ),
        group(
            can_be(all, |it| &it.moe.correction, false, &[true]),
            "moe.correction = true",
            &["tensors.router_correction"],
        ),
        group(
            can_be(all, |it| &it.moe.shared_router, false, &[true]),
            "moe.shared_router = true",
            &["tensors.shared_router"],
        ),
    ]
}

fn groups_of_head(all: &[Tables]) -> Vec<Group> {
    let has = |setting: fn(&Tables) -> &Option<Setting<bool>>| can_be(all, setting, false, &[true]);
    let has_last_norm = can_be(all, |it| &it.norm.last, true, &[true]);
    let group = |is_possible, condition, settings| Group { is_possible, condition, settings };
    vec![
        group(
            can_be(all, |it| &it.head.kind, HeadKind::Lm, &[HeadKind::Lm]),
            "head.kind = \"lm\"",
            &[
                "head.tied",
                "head.bias",
                "head.normalize_rows",
                "head.scale",
                "head.softcap",
                "head.transform",
                "tensors.head",
            ],
        ),
        group(
            has(|it| &it.head.transform),
            "head.transform = true",
            &[
                "head.transform_bias",
                "head.activation",
                "tensors.head_transform",
                "tensors.head_transform_norm",
            ],
        ),
        group(has(|it| &it.head.bias), "head.bias = true", &["tensors.head_bias"]),
        group(
            has(|it| &it.classifier.dense),
            "classifier.dense = true",
            &[
                "classifier.dense_tokens",
                "classifier.activation",
                "classifier.norm",
                "tensors.classifier_dense",
            ],
        ),
        group(has(|it| &it.classifier.norm), "classifier.norm = true", &["tensors.classifier_norm"]),
        group(has_last_norm, "norm.last = true", &["tensors.norm"]),
        group(
            has(|it| &it.embedding.norm),
            "embedding.norm = true",
            &["embedding.norm_first", "tensors.embedding_norm"],
        ),
        group(
            all.iter().any(|it| it.embedding.token_types.is_some()),
            "embedding.token_types",
            &["tensors.token_types"],
        ),
        group(
            all.iter().any(|it| it.embedding.width.is_some()),
            "embedding.width",
            &[
                "embedding.project_last",
                "embedding.project_bias",
                "tensors.project_in",
                "tensors.project_out",
            ],
        ),
    ]
}
