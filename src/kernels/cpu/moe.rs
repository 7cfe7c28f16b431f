//! Mixture of experts: for each row, the weighted sum of the results of its top-k experts.
//!
//! Rows are grouped by expert, so that the rows of one expert share each pass over its weights. Experts run
//! in ascending order and each adds its weighted results to its rows, so only the rows of one expert are
//! buffered at a time.
//!
//! Invariant: the result of a row depends only on its own logits and values, and is summed in the order of
//! experts.

#![allow(unsafe_code)]

use super::gemm_input::{GemmInput, InputValues};
use super::gemm_task::GemmTask;
use super::gemms::GemmScratch;
use super::pool::{SharedSlice, ThreadPool};
use super::scratch_memory::ScratchMemory;
use super::simd::{Kernel, LANES, Level, Simd, exp, sigmoid};
use crate::backend::{
    DeviceError, Epilogue, Expert, ExpertGroups, Experts, GroupScore, MoeShape, OutputColumns, Scoring,
    Weight,
};
use crate::host::HostBuf;
use std::ops::Range;

/// Rows that one work item routes.
const ROWS_PER_ITEM: usize = 16;

/// Dimensions that the scratch is sized for: the maximum of each over all mixtures.
#[derive(Clone, Copy, Default, PartialEq)]
pub struct MoeScratchSizes {
    pub experts: usize,
    pub top_k: usize,
    pub hidden: usize,
    pub width: usize,
    /// Numbers of a row by which experts and groups are chosen.
    pub choices: usize,
}

impl MoeScratchSizes {
    /// Returns sizes that are large enough for both.
    pub fn max(self, other: MoeScratchSizes) -> MoeScratchSizes {
        MoeScratchSizes {
            experts: self.experts.max(other.experts),
            top_k: self.top_k.max(other.top_k),
            hidden: self.hidden.max(other.hidden),
            width: self.width.max(other.width),
            choices: self.choices.max(other.choices),
        }
    }
}

/// Buffers for the rows of one expert, and for the assignment of rows to experts.
pub struct MoeScratch<Buf = HostBuf> {
    /// The experts of each row, ascending: (rows, top_k).
    routed_experts: Vec<RoutedExpert>,
    /// Assignments of rows to experts, grouped by expert, ascending by row within an expert.
    expert_rows: Vec<ExpertRow>,
    /// End of each expert's assignments in `expert_rows`.
    expert_ends: Vec<usize>,
    /// The experts of this device that rows are routed to, ascending, by their index on it.
    chosen: Vec<u32>,
    /// The numbers by which experts are chosen: a number for each expert, then one for each group.
    choices: Buf,
    /// Input and result of an expert: (rows of the expert, hidden).
    x: Buf,
    y: Buf,
    /// Gate and up projections: (rows of the expert, width).
    gate: Buf,
    up: Buf,
}

/// An expert that a row is routed to, with its score.
#[derive(Clone, Copy, Default)]
struct RoutedExpert {
    expert: u32,
    /// The logit until the score is computed.
    score: f32,
}

/// A row that is routed to an expert, with its score.
#[derive(Clone, Copy, Default)]
struct ExpertRow {
    row: u32,
    score: f32,
}

impl<Buf> MoeScratch<Buf> {
    /// Allocates scratch for `rows` rows.
    pub fn new<M: ScratchMemory<Buf = Buf>>(
        rows: usize,
        sizes: MoeScratchSizes,
        memory: &M,
    ) -> Result<MoeScratch<Buf>, DeviceError> {
        let floats = |width: usize| memory.zeroed(rows * width * size_of::<f32>());
        Ok(MoeScratch {
            routed_experts: vec![RoutedExpert::default(); rows * sizes.top_k],
            expert_rows: vec![ExpertRow::default(); rows * sizes.top_k],
            expert_ends: vec![0; sizes.experts],
            chosen: Vec::with_capacity(sizes.experts),
            choices: floats(sizes.choices)?,
            x: floats(sizes.hidden)?,
            y: floats(sizes.hidden)?,
            gate: floats(sizes.width)?,
            up: floats(sizes.width)?,
        })
    }
}

impl MoeScratch {
    /// Returns the range of an expert's assignments in `expert_rows`.
    fn rows_of(&self, expert: usize) -> Range<usize> {
        expert.checked_sub(1).map_or(0, |before| self.expert_ends[before])..self.expert_ends[expert]
    }
}

/// Inputs of a mixture of experts.
pub struct MoeInputs<'a> {
    pub shape: &'a MoeShape,
    /// Router logits (rows, experts).
    pub router: &'a [f32],
    /// The experts from `shape.first_expert` on that this device holds.
    pub experts: Experts<'a, HostBuf>,
    /// (rows, hidden)
    pub x: &'a [f32],
}

/// Computes a mixture's output y (rows, hidden) from the experts of this device. Fails if one cannot be read.
pub fn moe(
    pool: &mut ThreadPool,
    level: Level,
    (scratch, gemms): (&mut MoeScratch, &mut GemmScratch),
    inputs: MoeInputs,
    y: &mut [f32],
) -> Result<(), DeviceError> {
    let MoeInputs { shape, router, experts, x } = inputs;
    shape.check(experts.held.len());
    let (rows, hidden) = (router.len() / shape.experts, experts.held[0].down.n);
    let selected = &mut scratch.routed_experts[..rows * shape.top_k];
    let routing = Routing { shape, level, router, correction: experts.correction.map(HostBuf::f32) };
    routing.route(pool, scratch.choices.f32_mut(), selected);
    group_by_expert(shape, selected, &mut scratch.expert_rows, &mut scratch.expert_ends);
    y.fill(0.0);
    let mut chosen = std::mem::take(&mut scratch.chosen);
    chosen.clear();
    let indices = 0..experts.held.len() as u32;
    chosen.extend(indices.filter(|index| !scratch.rows_of(shape.first_expert + *index as usize).is_empty()));
    let outcome = experts.for_each(&chosen, &mut |index, expert| {
        let range = scratch.rows_of(shape.first_expert + index);
        let mut pass = ExpertPass { pool, level, gemms, scratch, range };
        pass.gather_rows(shape, hidden, x);
        pass.run(shape, (expert, experts.biases_of(index)));
        pass.accumulate(shape, hidden, y);
    });
    scratch.chosen = chosen;
    outcome
}

/// The numbers by which rows choose their experts.
struct Routing<'a> {
    shape: &'a MoeShape,
    level: Level,
    /// Router logits (rows, experts).
    router: &'a [f32],
    correction: Option<&'a [f32]>,
}

impl Routing<'_> {
    /// Selects the experts of each row from its logits. `choices` has a part for each row, if it is used.
    fn route(&self, pool: &mut ThreadPool, choices: &mut [f32], selected: &mut [RoutedExpert]) {
        let MoeShape { experts, top_k, .. } = *self.shape;
        let width = choice_width(self.shape);
        let choices = SharedSlice::new(choices);
        pool.for_chunks(selected, ROWS_PER_ITEM * top_k, |part, selected| {
            for (row, selected) in (part * ROWS_PER_ITEM..).zip(selected.chunks_exact_mut(top_k)) {
                let logits = &self.router[row * experts..][..experts];
                // SAFETY: each row has a part of its own.
                let choice = unsafe { choices.slice_mut(row * width..(row + 1) * width) };
                self.select(logits, choice, selected);
                self.level.run(ScoreRow { shape: self.shape, logits, selected });
            }
        });
    }

    /// Selects the experts of a row, with their logits, ascending.
    fn select(&self, logits: &[f32], choice: &mut [f32], selected: &mut [RoutedExpert]) {
        if self.shape.groups.is_none() && self.correction.is_none() {
            select_top_k(logits.iter().map(|logit| lowest(*logit)), selected);
        } else {
            let (choice, groups) = choice.split_at_mut(logits.len());
            match self.shape.chooses_by_score(self.correction.is_some()) {
                true => self.level.run(ScoreAll { routing: self, logits, choice }),
                false => choice.iter_mut().zip(logits).for_each(|(to, logit)| *to = lowest(*logit)),
            }
            if let Some(division) = self.shape.groups {
                exclude_groups(division, choice, groups);
            }
            select_top_k(choice.iter().copied(), selected);
            selected.iter_mut().for_each(|chosen| chosen.score = lowest(logits[chosen.expert as usize]));
        }
        selected.sort_unstable_by_key(|expert| expert.expert);
    }
}

/// Returns the length of a row's part of the scratch for choices: a number for each expert and each group.
pub fn choice_width(shape: &MoeShape) -> usize {
    shape.experts + shape.groups.map_or(0, |division| division.groups)
}

/// Replaces the numbers of experts that are not in the groups with the largest scores by NaN. `scores` has a
/// number for each group.
fn exclude_groups(division: ExpertGroups, choice: &mut [f32], scores: &mut [f32]) {
    let size = choice.len() / division.groups;
    for (score, group) in scores.iter_mut().zip(choice.chunks_exact(size)) {
        let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        for number in group {
            if *number > first {
                (first, second) = (*number, first);
            } else if *number > second {
                second = *number;
            }
        }
        let is_sum = division.score == GroupScore::TopTwo && size > 1;
        *score = if is_sum { first + second } else { first };
    }
    for (index, group) in choice.chunks_exact_mut(size).enumerate() {
        let precedes = |(other, score): &(usize, &f32)| {
            **score > scores[index] || **score == scores[index] && *other < index
        };
        if scores.iter().enumerate().filter(precedes).count() >= division.top_groups {
            group.fill(f32::NAN);
        }
    }
}

/// Selects the experts with the largest numbers, ties by index. Those whose number is NaN are not selected.
fn select_top_k(numbers: impl Iterator<Item = f32>, selected: &mut [RoutedExpert]) {
    let mut chosen = 0;
    for (expert, number) in numbers.enumerate().filter(|(_, number)| !number.is_nan()) {
        let place = selected[..chosen].partition_point(|other| other.score >= number);
        if place < selected.len() {
            chosen = selected.len().min(chosen + 1);
            selected[place..chosen].rotate_right(1);
            selected[place] = RoutedExpert { expert: expert as u32, score: number };
        }
    }
}

/// Returns a number, or negative infinity for NaN, which would not be chosen otherwise.
fn lowest(number: f32) -> f32 {
    if number.is_nan() { f32::NEG_INFINITY } else { number }
}

/// Kernel that computes the scores of all experts of a row, plus the correction.
struct ScoreAll<'a> {
    routing: &'a Routing<'a>,
    logits: &'a [f32],
    choice: &'a mut [f32],
}

impl Kernel for ScoreAll<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let ScoreAll { routing, logits, choice } = self;
        let mut at = 0;
        for (logits_of, choice) in logits.chunks(LANES).zip(choice.chunks_mut(LANES)) {
            let mut lanes = [0.0; LANES];
            simd.store(scores_at(simd, routing.shape, logits, load_logits(simd, logits_of)), &mut lanes);
            choice.iter_mut().zip(lanes).for_each(|(to, score)| *to = lowest(score));
            if let Some(correction) = routing.correction {
                choice.iter_mut().zip(&correction[at..]).for_each(|(to, added)| *to += added);
            }
            at += LANES;
        }
    }
}

/// Returns the scores of the logits `some` of a row.
#[inline(always)]
fn scores_at<S: Simd>(simd: S, shape: &MoeShape, logits: &[f32], some: S::V) -> S::V {
    match shape.scoring {
        Scoring::Sigmoid => sigmoid(simd, some),
        Scoring::Softmax => softmax_at(simd, logits, some),
        Scoring::Nearby { .. } => unreachable!("experts are not chosen by such scores; this is a bug"),
    }
}

/// Kernel that turns the selected logits of a row into scores.
struct ScoreRow<'a> {
    shape: &'a MoeShape,
    /// All logits of the row.
    logits: &'a [f32],
    selected: &'a mut [RoutedExpert],
}

impl Kernel for ScoreRow<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let ScoreRow { shape, logits, selected } = self;
        let is_nearby = matches!(shape.scoring, Scoring::Nearby { .. });
        for selected in selected.chunks_mut(LANES) {
            if is_nearby {
                selected.iter_mut().for_each(|it| it.score = nearby_score(simd, shape.scoring, logits, *it));
                continue;
            }
            let mut lanes = [0.0; LANES];
            for (lane, expert) in lanes.iter_mut().zip(&*selected) {
                *lane = expert.score;
            }
            let scores = scores_at(simd, shape, logits, simd.load(&lanes));
            simd.store(scores, &mut lanes);
            for (lane, expert) in lanes.iter().zip(selected) {
                expert.score = *lane;
            }
        }
        let mut sum = 0.0;
        for expert in selected.iter() {
            sum += expert.score;
        }
        let factor = if shape.normalize_scores { shape.scale / sum } else { shape.scale };
        for expert in selected {
            expert.score *= factor;
        }
    }
}

/// Returns the softmax at a selected logit over those that are not chosen before it and are near it; 0 at
/// minus infinity.
#[inline(always)]
fn nearby_score<S: Simd>(simd: S, scoring: Scoring, logits: &[f32], selected: RoutedExpert) -> f32 {
    let RoutedExpert { expert, score: own } = selected;
    if own == f32::NEG_INFINITY {
        return 0.0;
    }
    let mut sum = simd.splat(0.0);
    let mut other = 0;
    for some in logits.chunks(LANES) {
        let mut lanes = [f32::NEG_INFINITY; LANES];
        for (lane, logit) in lanes.iter_mut().zip(some) {
            let logit = lowest(*logit);
            let is_before = logit > own || logit == own && other < expert;
            if !is_before && !scoring.is_far(own, logit) {
                *lane = logit - own;
            }
            other += 1;
        }
        sum = simd.add(sum, exp(simd, simd.load(&lanes)));
    }
    1.0 / simd.sum(sum)
}

/// Returns the softmax over `logits`, evaluated at the logits `some`.
#[inline(always)]
fn softmax_at<S: Simd>(simd: S, logits: &[f32], some: S::V) -> S::V {
    let lowest = simd.splat(f32::NEG_INFINITY);
    let mut largest = lowest;
    for logits in logits.chunks(LANES) {
        largest = simd.max(load_logits(simd, logits), largest);
    }
    let largest = simd.splat(simd.largest(largest));
    let mut sum = simd.splat(0.0);
    for logits in logits.chunks(LANES) {
        sum = simd.add(sum, exp(simd, simd.sub(load_logits(simd, logits), largest)));
    }
    simd.div(exp(simd, simd.sub(some, largest)), simd.splat(simd.sum(sum)))
}

/// Loads up to 16 logits; NaN becomes negative infinity, and so do the lanes beyond them.
#[inline(always)]
fn load_logits<S: Simd>(simd: S, logits: &[f32]) -> S::V {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    lanes[..logits.len()].copy_from_slice(logits);
    simd.max(simd.load(&lanes), simd.splat(f32::NEG_INFINITY))
}

/// Groups the assignments by expert, ascending by row within an expert.
fn group_by_expert(
    shape: &MoeShape,
    selected: &[RoutedExpert],
    expert_rows: &mut [ExpertRow],
    ends: &mut [usize],
) {
    let ends = &mut ends[..shape.experts];
    ends.fill(0);
    for expert in selected {
        ends[expert.expert as usize] += 1;
    }
    let mut begin = 0;
    for end in ends.iter_mut() {
        // Holds the expert's start until its rows are placed.
        begin += std::mem::replace(end, begin);
    }
    for (i, expert) in selected.iter().enumerate() {
        let end = &mut ends[expert.expert as usize];
        expert_rows[*end] = ExpertRow { row: (i / shape.top_k) as u32, score: expert.score };
        *end += 1;
    }
}

/// The pass of one expert over its rows.
struct ExpertPass<'a> {
    pool: &'a mut ThreadPool,
    level: Level,
    gemms: &'a mut GemmScratch,
    scratch: &'a mut MoeScratch,
    /// The expert's range of `scratch.expert_rows`.
    range: Range<usize>,
}

impl ExpertPass<'_> {
    /// Copies the expert's rows of x (rows, hidden) to contiguous rows of the scratch, multiplied by their
    /// scores if these weigh inputs.
    fn gather_rows(&mut self, shape: &MoeShape, hidden: usize, x: &[f32]) {
        let expert_rows = &self.scratch.expert_rows[self.range.clone()];
        let to = &mut self.scratch.x.f32_mut()[..expert_rows.len() * hidden];
        self.pool.for_rows(to, hidden, |i, to| {
            let ExpertRow { row, score } = expert_rows[i];
            to.copy_from_slice(&x[row as usize * hidden..][..hidden]);
            if shape.weighs_input {
                to.iter_mut().for_each(|x| *x *= score);
            }
        });
    }

    /// Computes the expert for the gathered rows.
    fn run(
        &mut self,
        shape: &MoeShape,
        (expert, [gate_bias, up_bias, down_bias]): (&Expert<HostBuf>, [Option<&HostBuf>; 3]),
    ) {
        let ExpertPass { pool, level, gemms, scratch, range } = self;
        let (rows, hidden) = (range.len(), expert.gate.k);
        let MoeScratch { x, y, gate, up, .. } = &mut **scratch;
        let x = GemmInput { rows, k: hidden, values: InputValues::Given(&x.f32()[..rows * hidden]) };
        let both = [
            Some(gemm_to((&expert.gate, gate_bias), gate, rows)),
            expert.up.as_ref().map(|w| gemm_to((w, up_bias), up, rows)),
            None,
            None,
        ];
        gemms.multiply(pool, *level, &x, &both);
        let up = expert.up.as_ref().map(|_| up.f32());
        let values = InputValues::Activated(shape.activation, gate.f32(), up);
        let x = GemmInput { rows, k: shape.width, values };
        let down = gemm_to((&expert.down, down_bias), y, rows);
        gemms.multiply(pool, *level, &x, &[Some(down)]);
    }

    /// Adds the expert's results, each multiplied by its row's score unless this weighed the input, to y
    /// (rows, hidden).
    fn accumulate(&mut self, shape: &MoeShape, hidden: usize, y: &mut [f32]) {
        let expert_rows = &self.scratch.expert_rows[self.range.clone()];
        let results = &mut self.scratch.y.f32_mut()[..expert_rows.len() * hidden];
        let y = SharedSlice::new(y);
        self.pool.for_rows(results, hidden, |i, result| {
            let ExpertRow { row, score } = expert_rows[i];
            let score = if shape.weighs_input { 1.0 } else { score };
            // SAFETY: an expert has each row at most once, so no other thread writes it.
            let y = unsafe { y.slice_mut(row as usize * hidden..(row as usize + 1) * hidden) };
            y.iter_mut().zip(result).for_each(|(y, result)| *y += score * *result);
        });
    }
}

/// Returns the GEMM of an expert's weight, with its bias, that overwrites y (rows, n).
fn gemm_to<'a>(
    (w, bias): (&'a Weight<HostBuf>, Option<&'a HostBuf>),
    y: &'a mut HostBuf,
    rows: usize,
) -> GemmTask<'a> {
    GemmTask::new((w, OutputColumns { first: 0, of: w.n }), bias, Epilogue::Set(y), rows)
}
