//! A mixture of experts: each row's sum of its chosen experts' results.
//!
//! Rows are grouped by expert, so that those of one expert share each pass over its weights. Experts come in ascending
//! order and each adds its share to its rows, so only the rows of one expert are kept at a time.
//!
//! Invariant: what a row gets depends on its own logits and numbers alone, and is summed in the order of experts.

#![allow(unsafe_code)]

use super::pool::{Parts, Pool};
use super::products::{Product, Products, To};
use super::simd::{Kernel, LANES, Level, Simd, exp, sigmoid};
use super::source::{Of, Source};
use crate::backend::{DeviceError, Expert, MoeShape, Scoring};
use crate::host::HostBuf;
use std::ops::Range;

/// Rows that one thread routes at a time.
const ROUTED: usize = 16;

/// What the scratch is made for: the most of each, over all mixtures.
#[derive(Clone, Copy, Default, PartialEq)]
pub struct MoeSizes {
    pub experts: usize,
    pub top_k: usize,
    pub hidden: usize,
    pub width: usize,
}

impl MoeSizes {
    /// Enough for both.
    pub fn max(self, other: MoeSizes) -> MoeSizes {
        MoeSizes {
            experts: self.experts.max(other.experts),
            top_k: self.top_k.max(other.top_k),
            hidden: self.hidden.max(other.hidden),
            width: self.width.max(other.width),
        }
    }
}

/// Buffers for the rows of one expert, and for who goes where.
pub struct MoeScratch {
    /// (rows, top_k): each row's experts, ascending.
    choices: Vec<Choice>,
    /// The same by expert, each expert's by row; and where each expert's end.
    members: Vec<Member>,
    ends: Vec<usize>,
    /// (rows of an expert, hidden), before and after it.
    x: HostBuf,
    y: HostBuf,
    /// (rows of an expert, width)
    gate: HostBuf,
    up: HostBuf,
}

#[derive(Clone, Copy, Default)]
struct Choice {
    expert: u32,
    /// The logit at first.
    score: f32,
}

#[derive(Clone, Copy, Default)]
struct Member {
    row: u32,
    score: f32,
}

impl MoeScratch {
    /// Room for `rows` rows.
    pub fn new(rows: usize, sizes: MoeSizes) -> Result<MoeScratch, DeviceError> {
        let floats = |width: usize| HostBuf::zeroed(rows * width * size_of::<f32>());
        Ok(MoeScratch {
            choices: vec![Choice::default(); rows * sizes.top_k],
            members: vec![Member::default(); rows * sizes.top_k],
            ends: vec![0; sizes.experts],
            x: floats(sizes.hidden)?,
            y: floats(sizes.hidden)?,
            gate: floats(sizes.width)?,
            up: floats(sizes.width)?,
        })
    }
}

/// What a mixture reads.
pub struct Inputs<'a> {
    pub shape: &'a MoeShape,
    /// Logits, (rows, experts).
    pub router: &'a [f32],
    /// Those from `shape.first` on.
    pub experts: &'a [Expert<HostBuf>],
    /// (rows, hidden)
    pub x: &'a [f32],
}

/// y (rows, hidden).
pub fn moe(
    pool: &mut Pool,
    level: Level,
    (scratch, products): (&mut MoeScratch, &mut Products),
    inputs: Inputs,
    y: &mut [f32],
) {
    let Inputs { shape, router, experts, x } = inputs;
    let held = shape.first..shape.first + experts.len();
    assert!(
        held.end <= shape.experts && shape.top_k <= shape.experts,
        "{held:?} of {} experts",
        shape.experts
    );
    let (rows, hidden) = (router.len() / shape.experts, experts[0].down.out);
    let choices = &mut scratch.choices[..rows * shape.top_k];
    route(pool, level, shape, router, choices);
    group(shape, choices, &mut scratch.members, &mut scratch.ends);
    y.fill(0.0);
    let mut first = held.start.checked_sub(1).map_or(0, |before| scratch.ends[before]);
    for (number, expert) in held.zip(experts) {
        let members = first..scratch.ends[number];
        first = members.end;
        if !members.is_empty() {
            let mut pass = Pass { pool, level, products, scratch, members };
            pass.take(hidden, x);
            pass.run(shape, expert);
            pass.add(hidden, y);
        }
    }
}

/// Each row's choices, from its logits.
fn route(pool: &mut Pool, level: Level, shape: &MoeShape, router: &[f32], choices: &mut [Choice]) {
    pool.for_parts(choices, ROUTED * shape.top_k, |part, choices| {
        let logits = router[part * ROUTED * shape.experts..].chunks_exact(shape.experts);
        for (choices, logits) in choices.chunks_exact_mut(shape.top_k).zip(logits) {
            choose(logits, choices);
            level.run(Score { shape, logits, choices });
        }
    });
}

/// The largest logits, ties by index, in the order of experts; NaN counts as negative infinity.
fn choose(logits: &[f32], choices: &mut [Choice]) {
    let mut chosen = 0;
    for (expert, &logit) in logits.iter().enumerate() {
        let logit = if logit.is_nan() { f32::NEG_INFINITY } else { logit };
        let place = choices[..chosen].partition_point(|other| other.score >= logit);
        if place < choices.len() {
            chosen = choices.len().min(chosen + 1);
            choices[place..chosen].rotate_right(1);
            choices[place] = Choice { expert: expert as u32, score: logit };
        }
    }
    choices.sort_unstable_by_key(|choice| choice.expert);
}

/// Turns the chosen logits of a row to scores.
struct Score<'a> {
    shape: &'a MoeShape,
    /// All of them.
    logits: &'a [f32],
    choices: &'a mut [Choice],
}

impl Kernel for Score<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Score { shape, logits, choices } = self;
        for choices in choices.chunks_mut(LANES) {
            let mut lanes = [0.0; LANES];
            for (lane, choice) in lanes.iter_mut().zip(&*choices) {
                *lane = choice.score;
            }
            let scores = match shape.scoring {
                Scoring::Sigmoid => sigmoid(simd, simd.load(&lanes)),
                Scoring::Softmax => softmax(simd, logits, simd.load(&lanes)),
            };
            simd.store(scores, &mut lanes);
            for (lane, choice) in lanes.iter().zip(choices) {
                choice.score = *lane;
            }
        }
        let mut sum = 0.0;
        for choice in choices.iter() {
            sum += choice.score;
        }
        let factor = if shape.renormalise { shape.scale / sum } else { shape.scale };
        for choice in choices {
            choice.score *= factor;
        }
    }
}

/// The softmax over `logits` at `some` of them.
#[inline(always)]
fn softmax<S: Simd>(simd: S, logits: &[f32], some: S::V) -> S::V {
    let lowest = simd.splat(f32::NEG_INFINITY);
    let mut largest = lowest;
    for logits in logits.chunks(LANES) {
        largest = simd.max(load_or_lowest(simd, logits), largest);
    }
    let largest = simd.splat(simd.largest(largest));
    let mut sum = simd.splat(0.0);
    for logits in logits.chunks(LANES) {
        sum = simd.add(sum, exp(simd, simd.sub(load_or_lowest(simd, logits), largest)));
    }
    simd.div(exp(simd, simd.sub(some, largest)), simd.splat(simd.sum(sum)))
}

/// Up to 16 logits; negative infinity for a NaN, and beyond them.
#[inline(always)]
fn load_or_lowest<S: Simd>(simd: S, logits: &[f32]) -> S::V {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    lanes[..logits.len()].copy_from_slice(logits);
    simd.max(simd.load(&lanes), simd.splat(f32::NEG_INFINITY))
}

/// Orders the choices by expert, each expert's by row.
fn group(shape: &MoeShape, choices: &[Choice], members: &mut [Member], ends: &mut [usize]) {
    let ends = &mut ends[..shape.experts];
    ends.fill(0);
    for choice in choices {
        ends[choice.expert as usize] += 1;
    }
    let mut begin = 0;
    for end in ends.iter_mut() {
        // Where it begins, until its members are placed.
        begin += std::mem::replace(end, begin);
    }
    for (i, choice) in choices.iter().enumerate() {
        let end = &mut ends[choice.expert as usize];
        members[*end] = Member { row: (i / shape.top_k) as u32, score: choice.score };
        *end += 1;
    }
}

/// One expert's rows on their way through it.
struct Pass<'a> {
    pool: &'a mut Pool,
    level: Level,
    products: &'a mut Products,
    scratch: &'a mut MoeScratch,
    /// Which members are the expert's.
    members: Range<usize>,
}

impl Pass<'_> {
    /// Brings the expert's rows of x (rows, hidden) together.
    fn take(&mut self, hidden: usize, x: &[f32]) {
        let members = &self.scratch.members[self.members.clone()];
        let to = &mut self.scratch.x.f32_mut()[..members.len() * hidden];
        self.pool.for_rows(to, hidden, |i, to| {
            to.copy_from_slice(&x[members[i].row as usize * hidden..][..hidden]);
        });
    }

    fn run(&mut self, shape: &MoeShape, expert: &Expert<HostBuf>) {
        let Pass { pool, level, products, scratch, members } = self;
        let (rows, hidden) = (members.len(), expert.gate.inp);
        let MoeScratch { x, y, gate, up, .. } = &mut **scratch;
        let x = Source { rows, inp: hidden, of: Of::Given(&x.f32()[..rows * hidden]) };
        let both = [
            Some(Product::new(&expert.gate, None, (To::Set, gate), rows)),
            expert.up.as_ref().map(|w| Product::new(w, None, (To::Set, up), rows)),
            None,
            None,
        ];
        products.multiply(pool, *level, &x, &both);
        let up = expert.up.as_ref().map(|_| up.f32());
        let of = Of::Activated(shape.activation, gate.f32(), up);
        let x = Source { rows, inp: shape.width, of };
        let down = Product::new(&expert.down, None, (To::Set, y), rows);
        products.multiply(pool, *level, &x, &[Some(down), None, None, None]);
    }

    /// y (rows, hidden) += the members' results, each times its score.
    fn add(&mut self, hidden: usize, y: &mut [f32]) {
        let members = &self.scratch.members[self.members.clone()];
        let results = &mut self.scratch.y.f32_mut()[..members.len() * hidden];
        let y = Parts::new(y);
        self.pool.for_rows(results, hidden, |i, result| {
            let Member { row, score } = members[i];
            // SAFETY: a row is an expert's member once, so no other thread has it.
            let y = unsafe { y.part(row as usize * hidden..(row as usize + 1) * hidden) };
            y.iter_mut().zip(result).for_each(|(y, result)| *y += score * *result);
        });
    }
}
