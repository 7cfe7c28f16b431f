//! The search for the best policy: sequences at once, rows of a step, formats, and what stays in memory.
//!
//! Whatever else is chosen, weights in memory make no step slower, so the memory that is left is theirs. A
//! choice is at most as good as with all weights in memory, so choices are tried in that order, until none
//! that is left can be among the best.
//!
//! Invariant: of the given choices, the best ones are found.

use super::cost::{ModelCost, StepPolicy, StepTime, StepWork};
use super::job::{StepSizes, Workload};
use super::rates::MachineRates;
use mainstem_kernels::QuantType;
use std::cmp::Ordering;

/// A memory that holds weights. The first one of a list is that of the device; the others are slower, from
/// which weights are read for each step.
#[derive(Clone, Debug, PartialEq)]
pub struct Tier {
    pub name: &'static str,
    /// Bytes that may be used; infinite if there is no limit.
    pub bytes: f64,
    /// Bytes per second that the device can read from it.
    pub read: f64,
}

/// Objectives of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Objective {
    /// Most tokens per second of the whole job.
    Throughput,
    /// Least time of a request.
    Latency,
}

/// A model as it is loaded with some number formats.
#[derive(Clone, Debug)]
pub struct Variant {
    /// Rule of the formats of weights; `None` keeps those that are configured.
    pub weights: Option<&'static str>,
    pub cost: ModelCost,
}

/// A choice of what a plan is free to choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Choice {
    /// Index of the variant.
    pub variant: usize,
    pub kv: QuantType,
    pub slots: usize,
    pub token_budget: usize,
}

impl Choice {
    /// Returns whether its formats are those of `other`, and its steps are not smaller.
    fn is_at_least(&self, other: &Choice) -> bool {
        let is_alike = (self.variant, self.kv) == (other.variant, other.kv);
        is_alike && self.slots >= other.slots && self.token_budget >= other.token_budget
    }
}

/// The bytes of a choice with as many matrices of layers in the first tier as fit into it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MemoryFit {
    /// Bytes that are used of the first tier.
    pub memory: f64,
    /// Matrices of layers in the first tier.
    pub resident: f64,
    /// Matrices of layers in slower tiers.
    pub streamed: f64,
}

/// The problem of a plan.
pub struct PlacementProblem<'a> {
    pub variants: &'a [Variant],
    pub choices: Vec<Choice>,
    pub workload: Workload,
    pub objective: Objective,
    /// Maximum seconds of a step of decoding.
    pub max_token_seconds: Option<f64>,
    pub rates: &'a MachineRates,
    pub tiers: &'a [Tier],
}

/// Predicted speed of a policy.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// A step of prompts only, as long as the token budget allows.
    pub prefill: StepTime,
    /// Prompt tokens per second in such steps.
    pub prefill_rate: f64,
    /// A step that decodes all sequences, at half of their output.
    pub decode: StepTime,
    /// Generated tokens per second in such steps.
    pub decode_rate: f64,
    /// Seconds of the whole job.
    pub job_seconds: f64,
    /// Seconds of one request among others.
    pub request_seconds: f64,
    /// The bound of steps of decoding, or of prompts if there is no decoding.
    pub bound: Bound,
}

/// The bound of the rate of steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// Reading weights from a slower memory, by its index among the tiers.
    Tier(usize),
    /// Reading weights from the device's memory: more sequences would take hardly longer.
    Memory,
    Compute,
}

/// A policy with its predictions.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedPolicy {
    pub choice: Choice,
    /// Bytes of the matrices of layers in each tier.
    pub layers: Vec<f64>,
    /// Bytes of the first tier that are used.
    pub memory: f64,
    pub prediction: Prediction,
}

/// More time of a step with all rows than with one, by which it is still bound by reading memory.
const MEMORY_BOUND: f64 = 1.25;

impl PlacementProblem<'_> {
    /// Returns the `keep` best policies that fit, the best first. `fit` returns the memory of a choice in a
    /// first tier of so many bytes; `None` if it does not fit or is impossible.
    pub fn search(
        &self,
        keep: usize,
        mut fit: impl FnMut(&Choice, f64) -> Option<MemoryFit>,
    ) -> Vec<PlannedPolicy> {
        let first = self.tiers.first().map_or(0.0, |tier| tier.bytes);
        let with_bound = |choice: &Choice| (*choice, self.predict(choice, &[]));
        let mut choices: Vec<(Choice, Prediction)> = self.choices.iter().map(with_bound).collect();
        choices.sort_by(|a, b| self.compare((&a.0, &a.1), (&b.0, &b.1)));
        let mut best: Vec<PlannedPolicy> = Vec::new();
        let mut too_large: Vec<Choice> = Vec::new();
        for (choice, bound) in choices {
            let last = best.get(keep.max(1) - 1).map(|last| (&last.choice, &last.prediction));
            if last.is_some_and(|last| self.compare(last, (&choice, &bound)).is_lt()) {
                break;
            }
            // What has more sequences and rows than something that does not fit does not fit either.
            if too_large.iter().any(|other| choice.is_at_least(other)) {
                continue;
            }
            let placed = fit(&choice, first).and_then(|fit| Some((self.place(&fit)?, fit.memory)));
            let Some((layers, memory)) = placed else {
                too_large.push(choice);
                continue;
            };
            let prediction = self.predict(&choice, &layers);
            if self.is_too_slow(&prediction) {
                continue;
            }
            let place = best.partition_point(|other| {
                self.compare((&other.choice, &other.prediction), (&choice, &prediction)).is_le()
            });
            best.insert(place, PlannedPolicy { choice, layers, memory, prediction });
            best.truncate(keep);
        }
        best
    }

    fn is_too_slow(&self, prediction: &Prediction) -> bool {
        self.max_token_seconds.is_some_and(|most| prediction.decode.seconds > most)
    }

    /// Orders choices: the better one first; of equal ones the one without compression, and the smaller one.
    fn compare(&self, a: (&Choice, &Prediction), b: (&Choice, &Prediction)) -> Ordering {
        let (first, second) = match self.objective {
            Objective::Throughput => (a.1.job_seconds, b.1.job_seconds),
            Objective::Latency => (a.1.request_seconds, b.1.request_seconds),
        };
        let bits = |choice: &Choice| (choice.kv.bits_per_element() * -1e3) as i64;
        let size = |choice: &Choice| (choice.variant, bits(choice), choice.slots, choice.token_budget);
        let by_job = a.1.job_seconds.total_cmp(&b.1.job_seconds);
        first.total_cmp(&second).then(by_job).then_with(|| size(a.0).cmp(&size(b.0)))
    }

    /// Returns the bytes of the matrices of layers in each tier: those that are not in the first one are in
    /// the next, as many as possible. `None` if they do not fit.
    pub fn place(&self, fit: &MemoryFit) -> Option<Vec<f64>> {
        let below = self.tiers.get(1..)?;
        let mut left = fit.streamed;
        let mut placed = vec![fit.resident];
        for tier in below {
            placed.push(left.min(tier.bytes));
            left -= left.min(tier.bytes);
        }
        (left <= 0.5).then_some(placed)
    }

    /// Predicts the speed of a choice with these bytes of layers in each tier; with none, all are in memory.
    pub fn predict(&self, choice: &Choice, layers: &[f64]) -> Prediction {
        let below = layers.iter().zip(self.tiers).skip(1);
        let read_seconds =
            below.map(|(bytes, tier)| if *bytes > 0.0 { bytes / tier.read } else { 0.0 }).sum();
        let policy = StepPolicy { kv: choice.kv, read_seconds };
        let cost = &self.variants[choice.variant].cost;
        let slowest = layers.iter().skip(1).position(|bytes| *bytes > 0.0).map_or(0, |tier| tier + 1);
        Predictor { cost, rates: self.rates, policy, slowest }.predict(choice, &self.workload)
    }
}

/// Predicts the speed of a policy.
pub struct Predictor<'a> {
    pub cost: &'a ModelCost,
    pub rates: &'a MachineRates,
    pub policy: StepPolicy,
    /// Index of the tier that weights are read from, if any are.
    pub slowest: usize,
}

impl Predictor<'_> {
    /// Predicts the speed of a workload with the numbers of sequences and rows of `choice`.
    pub fn predict(&self, choice: &Choice, workload: &Workload) -> Prediction {
        let Predictor { cost, rates, policy, .. } = *self;
        let step = |work: &StepWork| cost.step(rates, &policy, work);
        let Workload { requests, prompt, output } = *workload;
        let (prompt, token_budget) = (prompt.max(1), choice.token_budget.max(1));
        let output = if cost.generates() { output.max(1) } else { 0 };
        let workload = Workload { requests, prompt, output };
        let is_prompt_whole = cost.has_both() || !cost.generates();
        let sizes = StepSizes { slots: choice.slots, token_budget, is_prompt_whole };
        let job_seconds = workload.seconds(&sizes, &|work| step(work).seconds);

        let slots = choice.slots.min(requests).max(1);
        let (tokens, own) = (prompt as f64, output as f64 / 2.0);
        let rows = (slots * prompt).min(token_budget) as f64;
        let prompt_context = if is_prompt_whole { tokens } else { (tokens + 1.0) / 2.0 };
        let outputs = if output > 0 { rows / tokens } else { 0.0 };
        let prefill = step(&StepWork { prompt_rows: rows, prompt_context, outputs, ..StepWork::default() });
        let decode_work = |rows: f64| StepWork {
            decode_rows: rows,
            decode_context: own + if is_prompt_whole { 0.0 } else { tokens },
            encoder_len: if is_prompt_whole { tokens } else { 0.0 },
            outputs: rows,
            ..StepWork::default()
        };
        let decode_rows = if output > 1 { slots as f64 } else { 0.0 };
        let decode = if output > 1 { step(&decode_work(decode_rows)) } else { StepTime::default() };
        let (main, alone) = match output > 1 {
            true => (decode, step(&decode_work(1.0))),
            false => (prefill, step(&StepWork { prompt_rows: 1.0, prompt_context, ..StepWork::default() })),
        };
        let bound = match main {
            StepTime { compute, read, .. } if read > compute => Bound::Tier(self.slowest),
            StepTime { compute, .. } if compute < MEMORY_BOUND * alone.compute => Bound::Memory,
            _ => Bound::Compute,
        };
        let prompt_steps = (tokens / token_budget as f64).ceil();
        let rate = |rows: f64, time: StepTime| if rows > 0.0 { rows / time.seconds } else { 0.0 };
        Prediction {
            prefill_rate: rate(rows, prefill),
            decode_rate: rate(decode_rows, decode),
            job_seconds,
            request_seconds: prompt_steps * prefill.seconds
                + output.saturating_sub(1) as f64 * decode.seconds,
            prefill,
            decode,
            bound,
        }
    }
}
