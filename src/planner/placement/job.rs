//! The time of a whole job: requests of the same size that share steps as in the scheduler.
//!
//! Invariant: slower steps never give a faster job.

use super::step::StepWork;
use std::collections::VecDeque;

/// Requests of equal sizes, all there from the beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Workload {
    pub requests: usize,
    /// Tokens of a prompt; of a model with an encoder, of its input. At least 1.
    pub prompt: usize,
    /// Tokens to generate per request; 0 for a model that generates none.
    pub output: usize,
}

/// The sizes of steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepSizes {
    /// Sequences at once.
    pub slots: usize,
    /// Maximum rows of prompts and generated tokens of a step.
    pub token_budget: usize,
    /// Whether a prompt is computed in one step, because an encoder does.
    pub is_prompt_whole: bool,
}

/// Maximum number of steps with prompts that are simulated. Jobs with more are scaled.
const PROMPT_STEPS: usize = 200;

/// Minimum and maximum number of times that all slots are filled in the simulation.
const WAVES: [usize; 2] = [2, 8];

/// Requests that began in the same step.
struct Running {
    count: usize,
    began: usize,
    /// The first step that they have no row in.
    end: usize,
}

impl Workload {
    /// Returns the steps of the job, each with the number of times that its time counts.
    pub fn steps(&self, sizes: &StepSizes) -> Vec<(StepWork, f64)> {
        let slots = sizes.slots.min(self.requests).max(1);
        let rows = sizes.token_budget.saturating_sub(slots).max(1);
        let steps = (slots * self.prompt).div_ceil(rows);
        let waves = (PROMPT_STEPS / steps.max(1)).clamp(WAVES[0], WAVES[1]);
        let last = self.requests % slots;
        let simulated = if self.requests / slots > waves { waves * slots + last } else { self.requests };
        let mut steps = Simulation::new(self, sizes, simulated).run();
        let scale = self.requests as f64 / simulated.max(1) as f64;
        steps.iter_mut().for_each(|(_, count)| *count *= scale);
        steps
    }
}

struct Simulation<'a> {
    workload: &'a Workload,
    sizes: &'a StepSizes,
    /// Requests that have no slot yet.
    waiting: usize,
    /// Requests whose prompts are being computed, and their rows that are left.
    prompting: usize,
    prompt_rows: usize,
    running: VecDeque<Running>,
    /// The next step.
    now: usize,
    /// The steps so far, each with the number of times that its time counts.
    steps: Vec<(StepWork, f64)>,
}

impl Simulation<'_> {
    fn new<'a>(workload: &'a Workload, sizes: &'a StepSizes, requests: usize) -> Simulation<'a> {
        let (waiting, running, steps) = (requests, VecDeque::new(), Vec::new());
        let (prompting, prompt_rows, now) = (0, 0, 0);
        Simulation { workload, sizes, waiting, prompting, prompt_rows, running, now, steps }
    }

    fn run(mut self) -> Vec<(StepWork, f64)> {
        loop {
            while self.running.front().is_some_and(|first| first.end <= self.now) {
                self.running.pop_front();
            }
            let free = self.sizes.slots.max(1).saturating_sub(self.prompting + self.decoding());
            let admitted = self.waiting.min(free);
            self.waiting -= admitted;
            self.prompting += admitted;
            self.prompt_rows += admitted * self.workload.prompt;
            match self.running.front() {
                _ if self.prompting > 0 => self.prompt_step(),
                Some(first) => {
                    let end = first.end;
                    self.decode_until(end);
                }
                None => return self.steps,
            }
        }
    }

    fn decoding(&self) -> usize {
        self.running.iter().map(|running| running.count).sum()
    }

    /// Returns the work of decoding in a step.
    fn decode_work(&self, step: usize) -> StepWork {
        let decoding = self.decoding();
        let tokens: usize = self.running.iter().map(|running| running.count * (step - running.began)).sum();
        let generated = tokens as f64 / decoding.max(1) as f64;
        let (prompt, is_whole) = (self.workload.prompt as f64, self.sizes.is_prompt_whole);
        StepWork {
            decode_rows: decoding as f64,
            // The prompt of an encoder is in a table of its own.
            decode_context: generated + if is_whole { 0.0 } else { prompt },
            encoder_len: if is_whole { prompt } else { 0.0 },
            outputs: decoding as f64,
            ..StepWork::default()
        }
    }

    /// Computes a step with prompts.
    fn prompt_step(&mut self) {
        let Workload { prompt, output, .. } = *self.workload;
        let decode = self.decode_work(self.now);
        let budget = self.sizes.token_budget.saturating_sub(self.decoding()).max(1);
        let budget = if self.sizes.is_prompt_whole { (budget / prompt).max(1) * prompt } else { budget };
        let rows = self.prompt_rows.min(budget);
        let before = self.prompting;
        let begun = (prompt - self.prompt_rows % prompt) % prompt;
        self.prompt_rows -= rows;
        let left = self.prompt_rows.div_ceil(prompt);
        let ended = self.prompting - left;
        self.prompting = left;
        let is_whole = self.sizes.is_prompt_whole;
        let work = StepWork {
            prompt_rows: rows as f64,
            prompt_context: if is_whole { prompt as f64 } else { (prompt as f64 + 1.0) / 2.0 },
            prompts: (before - self.prompt_rows / prompt) as f64,
            prompt_start: begun as f64,
            outputs: decode.outputs + if output > 0 { ended as f64 } else { 0.0 },
            ..decode
        };
        self.steps.push((work, 1.0));
        if ended > 0 && output > 1 {
            self.running.push_back(Running { count: ended, began: self.now, end: self.now + output });
        }
        self.now += 1;
    }

    /// Computes steps without prompts. Their times grow with the contexts, about linearly.
    fn decode_until(&mut self, end: usize) {
        let each = (end - self.now) as f64 / 2.0;
        let works = [self.now, end - 1].map(|step| (self.decode_work(step), each));
        self.steps.extend(works);
        self.now = end;
    }
}
