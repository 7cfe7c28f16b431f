//! The predicted speed of policies: jobs and single steps of a model that is divided among stages.
//!
//! The steps of a choice are the same wherever weights and caches are, so what they cost apart from that is
//! computed once.
//!
//! Invariant: a bound is never slower than the prediction.

use super::choices::Choice;
use super::cost::ModelCost;
use super::job::{StepSizes, Workload};
use super::rates::MachineRates;
use super::step::{StepCost, StepTime, StepWork};
use super::traffic::{Route, StepPolicy};

/// A model as it is loaded with some number formats, and divided among devices.
#[derive(Clone, Debug)]
pub struct Variant {
    /// Rule of the formats of weights; `None` keeps those that are configured.
    pub weights: Option<&'static str>,
    /// The part of each device: stages that compute one after another.
    pub stages: Vec<ModelCost>,
    /// Maximum number of steps in flight, each of its own part of the slots.
    pub lanes: usize,
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
    /// Moving weights or caches.
    Route(Route),
    /// Reading weights from the device's memory: more sequences would take hardly longer.
    Memory,
    Compute,
}

/// More time of a step with all rows than with one, by which it is still bound by reading memory.
const MEMORY_BOUND: f64 = 1.25;

/// The costs of the steps of a choice, wherever weights and caches are.
pub struct Predictor {
    /// Steps in flight.
    lanes: f64,
    /// The steps of a lane's part of the job, each with the number of times that its time counts.
    job: Vec<(Step, f64)>,
    prefill: Step,
    /// `None` if there is no decoding.
    decode: Option<Step>,
    /// The main kind of step with one row.
    alone: Step,
    /// Rows of all lanes in a step of prompts, and in one of decoding.
    prefill_rows: f64,
    decode_rows: f64,
    /// Steps of a request's prompt, and those after them.
    prompt_steps: f64,
    later_steps: f64,
}

/// The costs of a step on each stage.
struct Step(Vec<StepCost>);

impl Step {
    /// Returns the time of a step if there are as many in flight as lanes: stages then compute at the same
    /// time, each the step of another lane, and share the disk.
    fn time(
        &self,
        lanes: f64,
        policies: &[StepPolicy],
        of: fn(&StepCost, &StepPolicy) -> StepTime,
    ) -> StepTime {
        let times: Vec<StepTime> =
            self.0.iter().zip(policies).map(|(cost, policy)| of(cost, policy)).collect();
        let all = |part: &dyn Fn(&StepTime) -> f64| times.iter().map(part).sum::<f64>();
        let passed = |part: &dyn Fn(&StepTime) -> f64| {
            let longest = times.iter().map(part).fold(0.0, f64::max);
            all(part).max(lanes * longest)
        };
        let moved = Route::ALL.map(|route| match route {
            Route::Disk => lanes * all(&|time| time.moved[route as usize]),
            _ => passed(&|time| time.moved[route as usize]),
        });
        let seconds = passed(&|time| time.seconds).max(moved[Route::Disk as usize]);
        StepTime { seconds, compute: passed(&|time| time.compute), moved }
    }
}

impl Predictor {
    /// Creates the predictor of a workload with the numbers of sequences and rows of `choice`.
    pub fn new(variant: &Variant, rates: &MachineRates, choice: &Choice, workload: &Workload) -> Predictor {
        let step = |work: &StepWork| {
            Step(variant.stages.iter().map(|stage| stage.prepare(rates, choice.kv, work)).collect())
        };
        let Workload { requests, prompt, output } = *workload;
        let (prompt, token_budget) = (prompt.max(1), choice.token_budget.max(1));
        let generates = variant.stages.iter().any(ModelCost::generates);
        let output = if generates { output.max(1) } else { 0 };
        // Each lane has a part of the slots, and of the requests.
        let lanes = variant.lanes.clamp(1, choice.slots.max(1));
        let workload = Workload { requests: requests.div_ceil(lanes), prompt, output };
        let is_prompt_whole = variant.stages.iter().any(ModelCost::has_both) || !generates;
        let sizes = StepSizes { slots: choice.slots.div_ceil(lanes), token_budget, is_prompt_whole };
        let job = workload.steps(&sizes).iter().map(|(work, count)| (step(work), *count)).collect();

        let slots = sizes.slots.min(workload.requests).max(1);
        let (tokens, own) = (prompt as f64, output as f64 / 2.0);
        let rows = (slots * prompt).min(token_budget);
        let prompt_context = if is_prompt_whole { tokens } else { (tokens + 1.0) / 2.0 };
        let outputs = if output > 0 { rows as f64 / tokens } else { 0.0 };
        let begun =
            if rows % prompt > 0 && !is_prompt_whole { tokens - tokens.min(rows as f64) } else { 0.0 };
        let prefill = StepWork {
            prompt_rows: rows as f64,
            prompt_context,
            prompts: rows.div_ceil(prompt) as f64,
            prompt_start: begun / 2.0,
            outputs,
            ..StepWork::default()
        };
        let decode = |rows: f64| StepWork {
            decode_rows: rows,
            decode_context: own + if is_prompt_whole { 0.0 } else { tokens },
            encoder_len: if is_prompt_whole { tokens } else { 0.0 },
            outputs: rows,
            ..StepWork::default()
        };
        let decodes = output > 1;
        let one = StepWork { prompt_rows: 1.0, prompt_context, ..StepWork::default() };
        Predictor {
            lanes: lanes as f64,
            job,
            prefill: step(&prefill),
            decode: decodes.then(|| step(&decode(slots as f64))),
            alone: step(&if decodes { decode(1.0) } else { one }),
            prefill_rows: (lanes * rows) as f64,
            decode_rows: if decodes { (lanes * slots) as f64 } else { 0.0 },
            prompt_steps: (tokens / token_budget as f64).ceil(),
            later_steps: output.saturating_sub(1) as f64,
        }
    }

    /// Predicts the speed with the policies of each stage.
    pub fn predict(&self, policies: &[StepPolicy]) -> Prediction {
        self.predict_by(policies, StepCost::time)
    }

    /// Predicts the speed if everything overlapped with everything.
    pub fn bound(&self, policies: &[StepPolicy]) -> Prediction {
        self.predict_by(policies, StepCost::bound)
    }

    fn predict_by(&self, policies: &[StepPolicy], of: fn(&StepCost, &StepPolicy) -> StepTime) -> Prediction {
        let time = |step: &Step| step.time(self.lanes, policies, of);
        let job_seconds = self.job.iter().map(|(step, count)| count * time(step).seconds).sum();
        let (prefill, alone) = (time(&self.prefill), time(&self.alone));
        let decode = self.decode.as_ref().map(time);
        let main = decode.unwrap_or(prefill);
        let slowest = |route: &Route| main.moved[*route as usize] == main.longest_move();
        let bound = match Route::ALL.iter().rev().find(|route| slowest(route)) {
            Some(route) if main.longest_move() > main.compute => Bound::Route(*route),
            _ if main.compute < MEMORY_BOUND * alone.compute => Bound::Memory,
            _ => Bound::Compute,
        };
        let decode = decode.unwrap_or_default();
        let rate = |rows: f64, time: StepTime| if rows > 0.0 { rows / time.seconds } else { 0.0 };
        Prediction {
            prefill_rate: rate(self.prefill_rows, prefill),
            decode_rate: rate(self.decode_rows, decode),
            job_seconds,
            request_seconds: self.prompt_steps * prefill.seconds + self.later_steps * decode.seconds,
            prefill,
            decode,
            bound,
        }
    }
}
