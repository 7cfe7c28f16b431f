//! The time of a step, given what its layers compute, and what is moved from and to slower memories.
//!
//! The next layers are read while one computes, into buffers for two of them, so a step takes about the
//! longest of computing and of moving data on each route; what neither a layer nor its reading overlaps with
//! is counted, too.
//!
//! Invariant: slower routes, more to move, and more to compute are never faster.

use super::traffic::{ROUTES, StepPolicy};

/// Number of passes over which the time of a step is averaged.
const PASSES: usize = 16;

/// The work of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepWork {
    /// Rows of prompts; of a model with an encoder, rows of that.
    pub prompt_rows: f64,
    /// Positions that such a row attends to, on average.
    pub prompt_context: f64,
    /// Rows of generated tokens, each of another sequence.
    pub decode_rows: f64,
    /// Positions that such a row attends to, on average.
    pub decode_context: f64,
    /// Positions of each sequence's encoder input.
    pub encoder_len: f64,
    /// Prompts that have rows in the step, and the positions of these that steps before have computed.
    pub prompts: f64,
    pub prompt_start: f64,
    /// Rows whose logits are computed.
    pub outputs: f64,
}

impl StepWork {
    /// Returns the positions whose K and V the step needs in each layer, and those of the pages that it
    /// changes, with pages of so many positions.
    fn cached_positions(&self, page: f64) -> [f64; 2] {
        // Sequences end anywhere in a page, which is moved as a whole.
        let half = page / 2.0;
        let begun = if self.prompt_start > 0.0 { 1.0 } else { 0.0 };
        let loaded = self.decode_rows * (self.decode_context + self.encoder_len + half)
            + self.prompt_start
            + begun * half;
        let stored = self.decode_rows * page + self.prompt_rows + self.prompts * half;
        [loaded, stored]
    }
}

/// The predicted time of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StepTime {
    pub seconds: f64,
    /// Seconds of computing, without waiting for what is moved.
    pub compute: f64,
    /// Seconds of moving data on each route, without waiting for buffers.
    pub moved: [f64; ROUTES],
}

impl StepTime {
    /// Returns the seconds of the route that takes longest.
    pub fn longest_move(&self) -> f64 {
        self.moved.into_iter().fold(0.0, f64::max)
    }
}

/// The cost of a step, apart from what depends on the places of weights and caches.
#[derive(Clone, Debug)]
pub struct StepCost {
    pub(super) stacks: Vec<StackWork>,
    /// Seconds beside the layers.
    pub(super) around: f64,
    pub(super) work: StepWork,
}

/// The work of a stack in a step.
#[derive(Clone, Debug)]
pub(super) struct StackWork {
    /// By kind of layer, with the number of such layers.
    pub(super) layers: Vec<(LayerWork, f64)>,
    /// The kind of each layer.
    pub(super) order: Vec<usize>,
    /// The part of the caches that each layer has.
    pub(super) caches: f64,
}

/// The work of a layer in a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerWork {
    pub(super) compute: f64,
    /// The part of the model's matrices that is read if none are on the device: with the experts that the
    /// rows choose, and with all.
    pub(super) read: [f64; 2],
}

impl LayerWork {
    /// Returns the seconds of moving data on each route. `caches` are those of all layers together.
    fn moved(&self, policy: &StepPolicy, caches: [f64; ROUTES]) -> [f64; ROUTES] {
        let part = self.read[usize::from(policy.whole_experts)];
        std::array::from_fn(|route| policy.weights[route] * part + caches[route])
    }
}

impl StepCost {
    /// Returns the time of the step.
    pub fn time(&self, policy: &StepPolicy) -> StepTime {
        let mut seconds = self.around;
        let caches = self.caches(policy);
        for stack in &self.stacks {
            let own = caches.map(|seconds| seconds * stack.caches);
            let layers: Vec<_> =
                stack.layers.iter().map(|(layer, _)| (layer.compute, layer.moved(policy, own))).collect();
            // What is computed around a stack gives its readers time.
            seconds = pass_seconds(&layers, &stack.order, seconds);
        }
        // Stacks share what data is moved on.
        let bound = self.bound(policy);
        StepTime { seconds: seconds.max(bound.seconds), ..bound }
    }

    /// Returns the time of the step if everything overlaps with everything: never longer than it is.
    pub fn bound(&self, policy: &StepPolicy) -> StepTime {
        let caches = self.caches(policy);
        let mut time = StepTime { compute: self.around, ..StepTime::default() };
        for stack in &self.stacks {
            let own = caches.map(|seconds| seconds * stack.caches);
            for (layer, count) in &stack.layers {
                let moved = layer.moved(policy, own);
                time.compute += count * layer.compute;
                time.moved.iter_mut().zip(moved).for_each(|(sum, moved)| *sum += count * moved);
            }
        }
        StepTime { seconds: time.compute.max(time.longest_move()), ..time }
    }

    /// Returns the seconds of moving the caches of all layers on each route.
    fn caches(&self, policy: &StepPolicy) -> [f64; ROUTES] {
        let [loaded, stored] = self.work.cached_positions(policy.page);
        std::array::from_fn(|route| policy.load[route] * loaded + policy.store[route] * stored)
    }
}

/// Returns the seconds of a pass through layers of these kinds, with `around` seconds of other work, if what
/// is moved for layers has buffers for two of them: the average over several passes. A kind has the seconds
/// of computing it, and of moving its data on each route.
pub(super) fn pass_seconds(kinds: &[(f64, [f64; ROUTES])], order: &[usize], around: f64) -> f64 {
    let layers = || order.iter().map(|kind| &kinds[*kind]);
    if kinds.iter().all(|(_, moved)| *moved == [0.0; ROUTES]) {
        return layers().map(|(compute, _)| *compute).sum::<f64>() + around;
    }
    let (mut is_moved, mut ended, mut before) = ([0.0f64; ROUTES], 0.0f64, 0.0f64);
    for _ in 0..PASSES {
        for (compute, moved) in layers() {
            let mut ready = ended;
            for (is_moved, seconds) in is_moved.iter_mut().zip(moved) {
                // A buffer is free when the layer before the last one has ended.
                *is_moved = is_moved.max(before) + seconds;
                ready = ready.max(*is_moved);
            }
            before = ended;
            ended = ready + compute;
        }
        ended += around;
    }
    ended / PASSES as f64
}
