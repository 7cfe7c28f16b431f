//! The formulas of the reference backend, in F64: attention, norms, RoPE, activation functions, mixtures of
//! experts.
//!
//! Invariant: sums run in index order, and values that are stored between two operations are F32.

use super::sample::{ids_descending, nan_to_lowest};
use crate::backend::{
    Activation, AttentionShape, DeviceError, DistanceScores, DynamicNtk, Expert, ExpertGroups, Experts,
    Fraction, GroupScore, KvLayer, MoeShape, Norm, NormKind, RelativeBias, Rope, Scoring, Weight, Xielu,
};
use crate::host::HostBuf;
use crate::quant::{ActivationPrecision, Int8Block, OperandFormat, QuantType};
use half::bf16;
use std::borrow::Cow;
use std::f64::consts::{FRAC_2_SQRT_PI, PI, SQRT_2};

/// Reads K (positions, k_dim) and V (positions, v_dim) of one KV head at the given positions of the cache.
pub(super) fn read_history(
    cache: &KvLayer<HostBuf>,
    kv_head: usize,
    positions: impl ExactSizeIterator<Item = usize>,
) -> (Vec<f32>, Vec<f32>) {
    let layout = cache.layout;
    let mut keys = vec![0.0; positions.len() * layout.k_dim];
    let mut values = vec![0.0; positions.len() * layout.v_dim];
    let rows = keys.chunks_exact_mut(layout.k_dim).zip(values.chunks_exact_mut(layout.v_dim));
    for (position, (key, value)) in positions.zip(rows) {
        read_run(layout.ty, &cache.k, position * layout.kv_heads + kv_head, key);
        match layout.v_in_k {
            true => value.copy_from_slice(&key[..layout.v_dim]),
            false => read_run(layout.ty, &cache.v, position * layout.kv_heads + kv_head, value),
        }
    }
    (keys, values)
}

/// Returns the scaled and capped scores of q (k_dim) with keys (k_dim), each with what is added to the dot
/// product.
pub(super) fn scores<'a>(
    shape: &AttentionShape<HostBuf>,
    q: &[f32],
    keys: impl Iterator<Item = (&'a [f32], f64)>,
) -> Vec<f64> {
    let scaled = keys.map(|(key, added)| (dot(q, key) + added) * f64::from(shape.scale));
    match shape.softcap {
        Some(cap) => scaled.map(|score| softcap_value(score, cap)).collect(),
        None => scaled.collect(),
    }
}

/// Returns what the distance of two positions adds to the dot product of a key and a query; `at` is the index
/// of the query among those of all rows and heads.
pub(super) fn distance_score(shape: &AttentionShape<HostBuf>, at: usize, key: usize, query: usize) -> f64 {
    let Some(DistanceScores { of_queries, of_keys, buckets }) = &shape.distances else { return 0.0 };
    let number = (key + buckets.reach - 1).checked_sub(query).filter(|at| *at < 2 * buckets.reach - 1);
    let bucket = buckets.table.f32()[number.expect("there is a bucket for every distance; this is a bug")];
    // The rows of a span are neighbors.
    let at_key = at + key * shape.heads - query * shape.heads;
    let product = |of: &HostBuf, at: usize| f64::from(of.f32()[at * buckets.count + bucket as usize]);
    product(of_queries, at) + product(of_keys, at_key)
}

/// Returns the relative position bias of a key for a query.
pub(super) fn relative_bias(bias: &RelativeBias<HostBuf>, head: usize, key: usize, query: usize) -> f64 {
    let at = (key + bias.reach - 1).checked_sub(query).filter(|at| *at < 2 * bias.reach - 1);
    let at = at.expect("the bias covers every distance; this is a bug");
    f64::from(bias.table.f32()[head * (2 * bias.reach - 1) + at])
}

/// Returns the indices of that fraction of all scores but the last, those with the largest scores, ties by
/// index; and the index of the last score.
pub(super) fn select_top_k(scores: &[f64], fraction: Fraction) -> Vec<usize> {
    let Some(past) = scores.len().checked_sub(1) else { return Vec::new() };
    let key = |i: &usize| if scores[*i].is_nan() { f64::NEG_INFINITY } else { scores[*i] };
    let mut selected: Vec<usize> = (0..past).collect();
    selected.sort_by(|a, b| key(b).partial_cmp(&key(a)).expect("there is no NaN; this is a bug"));
    selected.truncate(fraction.floor_of(past));
    selected.sort_unstable();
    selected.push(past);
    selected
}

/// Computes out (v_dim) = softmax(scores) · values (n, v_dim), with the given values only; zeros if there are
/// no scores. A sink is one more score, without a value.
pub(super) fn weighted_sum(
    (scores, sink): (&[f64], Option<f64>),
    selected: impl Iterator<Item = usize>,
    values: &[f32],
    out: &mut [f32],
) {
    let largest = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
    let total = weights.iter().sum::<f64>() + sink.map_or(0.0, |sink| (sink - largest).exp());
    let mut sums = vec![0.0; out.len()];
    for i in selected {
        for (sum, v) in sums.iter_mut().zip(&values[i * out.len()..]) {
            *sum += weights[i] * f64::from(*v);
        }
    }
    for (out, sum) in out.iter_mut().zip(sums) {
        *out = if scores.is_empty() { 0.0 } else { (sum / total) as f32 };
    }
}

/// Normalizes one row, which has this number.
pub(super) fn normalize_row(norm: &Norm<HostBuf>, row: usize, x: &mut [f32]) {
    let width = norm.width as f64;
    let mean = match norm.kind {
        NormKind::Rms => 0.0,
        NormKind::Layer => x.iter().map(|x| f64::from(*x)).sum::<f64>() / width,
    };
    let variance = x.iter().map(|x| (f64::from(*x) - mean).powi(2)).sum::<f64>() / width;
    let deviation = (variance + f64::from(norm.eps)).sqrt();
    let first = row % norm.sets * norm.width;
    for (i, x) in (first..).zip(x) {
        let weight = norm.weight.as_ref().map_or(1.0, |weight| f64::from(weight.f32()[i]));
        let bias = norm.bias.as_ref().map_or(0.0, |bias| f64::from(bias.f32()[i]));
        *x = ((f64::from(*x) - mean) / deviation * weight + bias) as f32;
    }
}

/// Computes cosine and sine of each pair (dims / 2, 2) at a position of a sequence with `reserved` reserved
/// tokens.
pub(super) fn row_angles(rope: &Rope<HostBuf>, position: usize, reserved: usize, angles: &mut [f32]) {
    if let Some(stretch) = rope.dynamic_ntk.filter(|stretch| reserved > stretch.context) {
        let base = stretch.base(rope.dims, reserved);
        for (pair, cos_sin) in angles.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let angle = DynamicNtk::angle(base, rope.dims, pair, position);
            *cos_sin = [angle.cos() as f32, angle.sin() as f32];
        }
        return;
    }
    assert!(position < rope.positions, "the table does not cover position {position}");
    let table = rope.table(reserved);
    angles.copy_from_slice(&table.f32()[position * rope.dims..][..rope.dims]);
}

/// Applies an activation function to a number, the gate of gated ones.
pub fn apply_activation(act: Activation, x: f64) -> f64 {
    match act {
        Activation::Relu => x.max(0.0),
        Activation::SquaredRelu => x.max(0.0).powi(2),
        // Φ(x) = erfc(-x / √2) / 2, which avoids cancellation in the tail.
        Activation::Gelu => 0.5 * x * erfc(-x / SQRT_2),
        // (1 + tanh(y)) / 2 = sigmoid(2y), which avoids it too.
        Activation::GeluTanh => x * sigmoid(2.0 * (2.0 / PI).sqrt() * (x + 0.044715 * x.powi(3))),
        Activation::QuickGelu => x * sigmoid(1.702 * x),
        Activation::Silu => x * sigmoid(x),
        Activation::Tanh => x.tanh(),
        Activation::ClampedSwiglu => {
            let x = clamp(x, f64::NEG_INFINITY);
            x * sigmoid(1.702 * x)
        }
        Activation::Xielu(Xielu { positive, negative, linear, bound }) => {
            let [positive, negative, linear] = [positive, negative, linear].map(f64::from);
            let curved = match x > 0.0 {
                true => positive * x * x,
                false => negative * (x.min(f64::from(bound)).exp_m1() - x),
            };
            curved + linear * x
        }
    }
}

/// Returns the factor of an activated number for the number `up`.
pub(super) fn activation_factor(act: Activation, up: f64) -> f64 {
    match act {
        Activation::ClampedSwiglu => 1.0 + clamp(up, -f64::from(Activation::LIMIT)),
        _ => up,
    }
}

/// Limits a number to at least `lowest` and at most [`Activation::LIMIT`]. NaN stays NaN.
fn clamp(x: f64, lowest: f64) -> f64 {
    if x > f64::from(Activation::LIMIT) {
        f64::from(Activation::LIMIT)
    } else if x < lowest {
        lowest
    } else {
        x
    }
}

/// Returns 1 / (1 + e^-x).
pub(super) fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Returns cap * tanh(x / cap).
pub(super) fn softcap_value(x: f64, cap: f32) -> f64 {
    f64::from(cap) * (x / f64::from(cap)).tanh()
}

/// Returns 1 - erf(x), with the series of erf around zero, and a continued fraction for |x| >= 3. The error
/// is within 1e-10, relative to the result for positive x, and absolute for negative x.
pub(crate) fn erfc(x: f64) -> f64 {
    if x.abs() < 3.0 {
        return 1.0 - erf(x);
    }
    // e^(-x²) / √π · 1 / (x + 1/2 / (x + 1 / (x + 3/2 / (x + ...))))
    let magnitude = x.abs();
    let fraction = (1..60).rev().fold(0.0, |below, n| f64::from(n) / 2.0 / (magnitude + below));
    let tail = (-magnitude * magnitude).exp() / (PI.sqrt() * (magnitude + fraction));
    if x > 0.0 { tail } else { 2.0 - tail }
}

/// Returns erf(x) = 2/√π · Σ (-1)ⁿ x²ⁿ⁺¹ / (n! (2n+1)), computed as e^(-x²) · Σ 2ⁿ x²ⁿ⁺¹ / (2n+1)!!, whose
/// terms have the same sign.
fn erf(x: f64) -> f64 {
    let (mut term, mut sum, mut n) = (x, x, 0.0);
    while term.abs() > sum.abs() * 1e-17 {
        n += 1.0;
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        sum += term;
    }
    FRAC_2_SQRT_PI * (-x * x).exp() * sum
}

/// Returns the experts that a row with these router logits is routed to, ascending, with their scores.
pub fn route(shape: &MoeShape, logits: &[f32], correction: Option<&[f32]>) -> Vec<(usize, f64)> {
    let logits: Vec<f32> = logits.iter().map(|logit| nan_to_lowest(*logit)).collect();
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let scores: Vec<f64> = match shape.scoring {
        Scoring::Sigmoid => logits.iter().map(|logit| sigmoid(f64::from(*logit))).collect(),
        Scoring::Softmax => {
            let weights = logits.iter().map(|logit| (f64::from(*logit) - f64::from(largest)).exp());
            let weights: Vec<f64> = weights.collect();
            let total: f64 = weights.iter().sum();
            weights.iter().map(|weight| weight / total).collect()
        }
        Scoring::Nearby { .. } => (0..logits.len()).map(|it| nearby_score(shape, &logits, it)).collect(),
    };
    let choice: Vec<f32> = match shape.chooses_by_score(correction.is_some()) {
        false => logits,
        true => {
            let added = |expert: usize| correction.map_or(0.0, |correction| correction[expert]);
            let number = |(expert, score): (usize, &f64)| nan_to_lowest(*score as f32) + added(expert);
            scores.iter().enumerate().map(number).collect()
        }
    };
    let allowed = allowed_experts(shape, &choice);
    let mut selected: Vec<usize> = ids_descending(&choice).into_iter().map(|id| id as usize).collect();
    selected.retain(|expert| allowed[*expert]);
    selected.truncate(shape.top_k);
    selected.sort_unstable();
    let sum: f64 =
        if shape.normalize_scores { selected.iter().map(|expert| scores[*expert]).sum() } else { 1.0 };
    selected.into_iter().map(|expert| (expert, scores[expert] / sum * f64::from(shape.scale))).collect()
}

/// Returns the score of an expert: its softmax over the experts that are not chosen before it and whose
/// logits are near its own; 0 for a logit of minus infinity.
fn nearby_score(shape: &MoeShape, logits: &[f32], expert: usize) -> f64 {
    let own = logits[expert];
    if own == f32::NEG_INFINITY {
        return 0.0;
    }
    let counts = |(other, logit): &(usize, &f32)| {
        let is_before = **logit > own || **logit == own && *other < expert;
        !is_before && !shape.scoring.is_far(own, **logit)
    };
    let counted = logits.iter().enumerate().filter(counts);
    counted.map(|(_, logit)| (f64::from(*logit) - f64::from(own)).exp()).sum::<f64>().recip()
}

/// Returns for each expert whether it is in one of the groups with the largest scores, given the numbers by
/// which experts are chosen.
fn allowed_experts(shape: &MoeShape, choice: &[f32]) -> Vec<bool> {
    let Some(ExpertGroups { groups, top_groups, score }) = shape.groups else {
        return vec![true; choice.len()];
    };
    let size = choice.len() / groups;
    let score_of = |group: &[f32]| {
        let mut descending = group.to_vec();
        descending.sort_by(|a, b| b.total_cmp(a));
        match score {
            GroupScore::Max => descending[0],
            GroupScore::TopTwo => descending.iter().take(2).sum(),
        }
    };
    let scores: Vec<f32> = choice.chunks_exact(size).map(score_of).collect();
    let best = ids_descending(&scores);
    (0..choice.len()).map(|expert| best[..top_groups].contains(&((expert / size) as u32))).collect()
}

/// Returns the sums of the experts' results for x (rows, hidden), in F64 (rows, hidden). Fails if an expert
/// cannot be read.
pub(super) fn mixture(
    precision: ActivationPrecision,
    shape: &MoeShape,
    experts: &Experts<HostBuf>,
    logits: &[f32],
    x: &[f32],
) -> Result<Vec<f64>, DeviceError> {
    shape.check(experts.held.len());
    let hidden = experts.held[0].down.n;
    let correction = experts.correction.map(HostBuf::f32);
    let rows = logits.chunks_exact(shape.experts).map(|logits| route(shape, logits, correction));
    let rows: Vec<_> = rows.collect();
    let score_of = |row: &[(usize, f64)], index: usize| {
        row.iter().find(|(expert, _)| *expert == shape.first_expert + index).map(|(_, score)| *score)
    };
    let is_chosen = |index: &u32| rows.iter().any(|row| score_of(row, *index as usize).is_some());
    let chosen: Vec<u32> = (0..experts.held.len() as u32).filter(is_chosen).collect();
    let mut sums = vec![0.0; rows.len() * hidden];
    experts.for_each(&chosen, &mut |index, expert| {
        let biases = experts.biases_of(index);
        let each = rows.iter().zip(x.chunks_exact(hidden)).zip(sums.chunks_exact_mut(hidden));
        for ((row, x), sum) in each {
            if let Some(score) = score_of(row, index) {
                let (before, after) = if shape.weighs_input { (score, 1.0) } else { (1.0, score) };
                let x: Vec<f32> = x.iter().map(|x| (f64::from(*x) * before) as f32).collect();
                let output = expert_mlp(precision, (expert, biases), shape.activation, &x);
                sum.iter_mut().zip(output).for_each(|(sum, y)| *sum += after * f64::from(y));
            }
        }
    })?;
    Ok(sums)
}

/// Computes one expert for x (hidden).
fn expert_mlp(
    precision: ActivationPrecision,
    (expert, [gate_bias, up_bias, down_bias]): (&Expert<HostBuf>, [Option<&HostBuf>; 3]),
    act: Activation,
    x: &[f32],
) -> Vec<f32> {
    let gate = gemv(precision, &expert.gate, gate_bias, x);
    let gate = gate.into_iter().map(|x| apply_activation(act, f64::from(x)));
    let inner: Vec<f32> = match &expert.up {
        Some(up) => {
            let factors = gemv(precision, up, up_bias, x);
            let factors = factors.into_iter().map(|up| activation_factor(act, f64::from(up)));
            gate.zip(factors).map(|(gate, factor)| (gate * factor) as f32).collect()
        }
        None => gate.map(|gate| gate as f32).collect(),
    };
    gemv(precision, &expert.down, down_bias, &inner)
}

/// Returns w (n, k) · x (k), plus a bias (n) if given.
fn gemv(precision: ActivationPrecision, w: &Weight<HostBuf>, bias: Option<&HostBuf>, x: &[f32]) -> Vec<f32> {
    let x = &*round_input(w.ty.operand_format(precision), x);
    let mut weights = vec![0.0; w.k];
    let row = |o| {
        read_matrix_row(w.ty, &w.buf, o, &mut weights);
        (bias.map_or(0.0, |bias| f64::from(bias.f32()[o])) + dot(x, &weights)) as f32
    };
    (0..w.n).map(row).collect()
}

/// Rounds x to the precision of the operand.
pub(super) fn round_input(operand: OperandFormat, x: &[f32]) -> Cow<'_, [f32]> {
    match operand {
        OperandFormat::F32 | OperandFormat::Bf16Pair => Cow::Borrowed(x),
        OperandFormat::Int8 => {
            x.as_chunks().0.iter().flat_map(|x| Int8Block::quantize(x).dequantize()).collect()
        }
        OperandFormat::Bf16 => x.iter().map(|x| bf16::from_f32(*x).to_f32()).collect(),
    }
}

/// Returns the dot product.
pub(super) fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// Reads row number `index` of a matrix with `out.len()` columns.
pub(super) fn read_matrix_row(ty: QuantType, from: &HostBuf, index: usize, out: &mut [f32]) {
    let bytes = vector_bytes(ty, out.len());
    ty.dequantize(&from.bytes()[index * bytes..][..bytes], out);
}

/// Reads run number `index` of `out.len()` elements.
fn read_run(ty: QuantType, from: &HostBuf, index: usize, out: &mut [f32]) {
    let bytes = run_bytes(ty, out.len());
    ty.dequantize_run(&from.bytes()[index * bytes..][..bytes], out);
}

/// Writes run number `index` of `values.len()` elements.
pub(super) fn write_run(ty: QuantType, values: &[f32], to: &mut HostBuf, index: usize) {
    let bytes = run_bytes(ty, values.len());
    ty.quantize_run(values, &mut to.bytes_mut()[index * bytes..][..bytes]);
}

/// Returns the bytes of a run.
fn run_bytes(ty: QuantType, elements: usize) -> usize {
    ty.run_bytes(elements).expect("the cache was allocated, so its runs fit in memory; this is a bug")
}

/// Returns the bytes of a matrix row.
fn vector_bytes(ty: QuantType, elements: usize) -> usize {
    ty.bytes(elements).expect("rows are whole blocks; this is a bug")
}
