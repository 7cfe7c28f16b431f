//! Resolves the mixture of experts of a layer.
//!
//! Invariant: the number of experts is limited before a list of them is built.

use super::context::{ResolveContext, activation};
use super::setting::OneOrMore;
use super::tensor_table::TensorTable;
use super::words::{ExpertLayout, GroupScoreName, ScoringName};
use super::{DenseSpec, MoeSpec, TensorPart, TensorSlice};
use anyhow::{Result, ensure};
use mainstem_kernels::{Activation, ExpertGroups, GroupScore, Scoring};

/// Maximum number of experts in a layer, checked before a list of them is built.
const EXPERTS_MAX: usize = 1 << 12;

type Names = Option<OneOrMore<String>>;

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
        ScoringName::Nearby => {
            let tolerance = look.required("moe.nearness", &table.nearness)? as f32;
            ensure!(tolerance >= 0.0, "'moe.nearness' is {tolerance}, which is below 0");
            Scoring::Nearby { tolerance }
        }
    };
    let groups = expert_groups(fill, experts, top_k)?;
    let look = &mut *fill.lookups;
    let normalize_scores = look.or_default("moe.normalize_scores", &table.normalize_scores, false)?;
    let scale = look.or_default("moe.scale", &table.scale, 1.0)? as f32;
    let weighs_input = look.or_default("moe.weigh_input", &table.weigh_input, false)?;
    let gated = look.or_default("moe.gated", &table.gated, true)?;
    let layout = look.or_default("moe.gate_up", &table.gate_up, ExpertLayout::Separate)?;
    let biased = look.or_default("moe.bias", &table.bias, false)?;
    let router_biased = look.or_default("moe.router_bias", &table.router_bias, false)?;
    let shared_width = look.or_default("moe.shared_width", &table.shared_width, 0)?;
    let shared_fused = look.or_default("mlp.fused", &fill.tables.mlp.fused, false)?;
    let has_shared_router = look.or_default("moe.shared_router", &table.shared_router, false)?;
    let activation = activation(fill)?;
    let sizes = (width, activation);
    let routed = ExpertTensors::routed(names, (gated, layout, biased));
    let specs = (0..experts).map(|index| routed.resolve(fill, Some(index), sizes)).collect::<Result<_>>()?;
    let layout = if shared_fused { ExpertLayout::Halves } else { ExpertLayout::Separate };
    let shared = match shared_width {
        0 => None,
        width => {
            Some(ExpertTensors::shared(names, (gated, layout)).resolve(fill, None, (width, activation))?)
        }
    };
    let shared_router = match has_shared_router {
        true => Some(fill.linear("shared_router", None, &names.shared_router, 1, hidden)?),
        false => None,
    };
    let router_bias = router_biased.then_some("router bias");
    let router = fill.linear("router", router_bias, &names.router, experts, hidden)?;
    let correction = correction(fill, experts)?;
    ensure!(
        !matches!(scoring, Scoring::Nearby { .. }) || groups.is_none() && correction.is_none(),
        "with 'moe.scoring' \"nearby\", experts have neither groups nor a correction"
    );
    Ok(MoeSpec {
        top_k,
        scoring,
        groups,
        normalize_scores,
        scale,
        weighs_input,
        router,
        correction,
        first_expert: 0,
        experts: specs,
        shared,
        shared_router,
    })
}

/// Resolves the correction of the scores of so many experts, if there is one.
fn correction(fill: &mut ResolveContext, experts: usize) -> Result<Option<TensorSlice>> {
    let (table, names) = (&fill.tables.moe, &fill.tables.tensors.router_correction);
    let is_corrected = fill.lookups.or_default("moe.correction", &table.correction, false)?;
    let slice = || fill.slice("router_correction", names, vec![experts], TensorPart::Whole, None);
    is_corrected.then(slice).transpose()
}

/// The tensors of experts: of each matrix its role, the role of its bias, and its names.
struct ExpertTensors<'a> {
    gate: (&'static str, &'static str, &'a Names),
    up: (&'static str, &'static str, &'a Names),
    gate_up: (&'static str, &'static str, &'a Names),
    down: (&'static str, &'static str, &'a Names),
    gated: bool,
    layout: ExpertLayout,
    biased: bool,
}

impl<'a> ExpertTensors<'a> {
    /// Returns the tensors of routed experts, given whether they have a gate and biases.
    fn routed(
        names: &'a TensorTable,
        (gated, layout, biased): (bool, ExpertLayout, bool),
    ) -> ExpertTensors<'a> {
        ExpertTensors {
            gate: ("expert_gate", "expert_gate bias", &names.expert_gate),
            up: ("expert_up", "expert_up bias", &names.expert_up),
            gate_up: ("expert_gate_up", "expert_gate_up bias", &names.expert_gate_up),
            down: ("expert_down", "expert_down bias", &names.expert_down),
            gated,
            layout,
            biased,
        }
    }

    /// Returns the tensors of the shared expert.
    fn shared(names: &'a TensorTable, (gated, layout): (bool, ExpertLayout)) -> ExpertTensors<'a> {
        ExpertTensors {
            gate: ("shared_gate", "shared_gate bias", &names.shared_gate),
            up: ("shared_up", "shared_up bias", &names.shared_up),
            gate_up: ("shared_gate_up", "shared_gate_up bias", &names.shared_gate_up),
            down: ("shared_down", "shared_down bias", &names.shared_down),
            gated,
            layout,
            biased: false,
        }
    }

    /// Resolves one of the routed experts, or the shared one.
    fn resolve(
        &self,
        fill: &mut ResolveContext,
        index: Option<usize>,
        (width, activation): (usize, Activation),
    ) -> Result<DenseSpec> {
        let hidden = fill.hidden;
        let mut linear = |(role, bias, names): (_, _, &Names), sizes: (usize, usize), rows| {
            fill.linear_part(role, self.biased.then_some(bias), names, sizes, rows, index)
        };
        let inner = (width, hidden);
        let whole = |rows| (rows, TensorPart::Whole);
        let rows =
            |groups, stride, first, count| (2 * width, TensorPart::Rows { groups, stride, first, count });
        let (gate, up) = match (self.gated, self.layout) {
            (false, _) => (linear(self.up, inner, whole(width))?, None),
            (true, ExpertLayout::Separate) => {
                (linear(self.gate, inner, whole(width))?, Some(linear(self.up, inner, whole(width))?))
            }
            (true, ExpertLayout::Halves) => (
                linear(self.gate_up, inner, rows(1, 2 * width, 0, width))?,
                Some(linear(self.gate_up, inner, rows(1, 2 * width, width, width))?),
            ),
            (true, ExpertLayout::Interleaved) => (
                linear(self.gate_up, inner, rows(width, 2, 0, 1))?,
                Some(linear(self.gate_up, inner, rows(width, 2, 1, 1))?),
            ),
        };
        let down = linear(self.down, (hidden, width), whole(hidden))?;
        Ok(DenseSpec { width, activation, activation_numbers: Vec::new(), gate, up, down })
    }
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
