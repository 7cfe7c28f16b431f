//! Resolves the mixture of experts of a layer.
//!
//! Invariant: the number of experts is limited before a list of them is built.

use super::context::{ResolveContext, activation};
use super::layer::Names;
use super::words::{GroupScoreName, ScoringName};
use super::{DenseSpec, MoeSpec, TensorPart};
use anyhow::{Result, ensure};
use mainstem_kernels::{ExpertGroups, GroupScore, Scoring};

/// Maximum number of experts in a layer, checked before a list of them is built.
const EXPERTS_MAX: usize = 1 << 12;

/// Resolves the mixture of experts of the current layer.
pub(super) fn moe(fill: &mut ResolveContext) -> Result<MoeSpec> {
    let (table, names, hidden) = (&fill.tables.moe, &fill.tables.tensors, fill.hidden);
    let look = &mut *fill.lookups;
    let experts = look.required("moe.experts", &table.experts)?;
    let top_k = look.required("moe.top_k", &table.top_k)?;
    let width = look.required("moe.width", &table.width)?;
    super::check::check_sizes(&[("number of experts", experts), ("width of an expert", width)])?;
    ensure!(experts <= EXPERTS_MAX, "{experts} experts are more than {EXPERTS_MAX}");
    ensure!(
        (1..=experts).contains(&top_k),
        "top_k is {top_k}, but must be between 1 and {experts}, the number of experts"
    );
    let scoring = match look.or_default("moe.scoring", &table.scoring, ScoringName::Softmax)? {
        ScoringName::Softmax => Scoring::Softmax,
        ScoringName::Sigmoid => Scoring::Sigmoid,
    };
    let groups = expert_groups(fill, experts, top_k)?;
    let look = &mut *fill.lookups;
    let normalize_scores = look.or_default("moe.normalize_scores", &table.normalize_scores, false)?;
    let scale = look.or_default("moe.scale", &table.scale, 1.0)? as f32;
    let is_corrected = look.or_default("moe.correction", &table.correction, false)?;
    let gated = look.or_default("moe.gated", &table.gated, true)?;
    let shared_width = look.or_default("moe.shared_width", &table.shared_width, 0)?;
    let has_shared_router = look.or_default("moe.shared_router", &table.shared_router, false)?;
    let activation = activation(fill)?;
    let mut expert = |index: Option<usize>, width: usize, names: [&Names; 3], roles: [&'static str; 3]| {
        let mut linear = |at: usize, n: usize, k: usize| {
            fill.linear_part(roles[at], None, names[at], (n, k), (n, TensorPart::Whole), index)
        };
        let down = linear(2, hidden, width)?;
        let (gate, up) = match gated {
            true => (linear(0, width, hidden)?, Some(linear(1, width, hidden)?)),
            false => (linear(1, width, hidden)?, None),
        };
        anyhow::Ok(DenseSpec { width, activation, gate, up, down })
    };
    let all = [&names.expert_gate, &names.expert_up, &names.expert_down];
    let roles = ["expert_gate", "expert_up", "expert_down"];
    let specs = (0..experts).map(|index| expert(Some(index), width, all, roles)).collect::<Result<_>>()?;
    let shared = match shared_width {
        0 => None,
        width => {
            let all = [&names.shared_gate, &names.shared_up, &names.shared_down];
            Some(expert(None, width, all, ["shared_gate", "shared_up", "shared_down"])?)
        }
    };
    let shared_router = match has_shared_router {
        true => Some(fill.linear("shared_router", None, &names.shared_router, 1, hidden)?),
        false => None,
    };
    let router = fill.linear("router", None, &names.router, experts, hidden)?;
    let correction = match is_corrected {
        true => {
            let (role, names, shape) = ("router_correction", &names.router_correction, vec![experts]);
            Some(fill.slice(role, names, shape, TensorPart::Whole, None)?)
        }
        false => None,
    };
    Ok(MoeSpec {
        top_k,
        scoring,
        groups,
        normalize_scores,
        scale,
        router,
        correction,
        first_expert: 0,
        experts: specs,
        shared,
        shared_router,
    })
}

/// Resolves the division of so many experts into groups.
fn expert_groups(fill: &mut ResolveContext, experts: usize, top_k: usize) -> Result<Option<ExpertGroups>> {
    let (table, look) = (&fill.tables.moe, &mut *fill.lookups);
    let groups = look.or_default("moe.groups", &table.groups, 1)?;
    ensure!(
        groups > 0 && experts.is_multiple_of(groups),
        "the number of experts, {experts}, is not a multiple of the {groups} groups"
    );
    let top_groups = look.or_derived("moe.top_groups", &table.top_groups, "moe.groups", groups)?;
    ensure!(
        (1..=groups).contains(&top_groups),
        "top_groups is {top_groups}, but must be between 1 and {groups}, the number of groups"
    );
    let choice = experts / groups * top_groups;
    ensure!(top_k <= choice, "top_k is {top_k}, but {top_groups} groups have only {choice} experts");
    let score = match look.or_default("moe.group_score", &table.group_score, GroupScoreName::TopTwo)? {
        GroupScoreName::Max => GroupScore::Max,
        GroupScoreName::TopTwo => GroupScore::TopTwo,
    };
    // Choosing all groups has no effect.
    Ok((top_groups < groups).then_some(ExpertGroups { groups, top_groups, score }))
}
