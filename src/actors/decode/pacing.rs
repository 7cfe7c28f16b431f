//! The number of prompt rows of a step, so that running streams get their next token in time.
//!
//! Invariant: only speed depends on it; a prompt gives the same tokens however it is divided.

use super::DecodeLoop;
use super::running::RunningSequence;
use crate::actors::prefill::Budget;
use crate::decoding::time_fit::{TimeFit, dot};
use crate::request::Class;
use std::time::{Duration, Instant};

/// Prompt rows that a step may always have.
const LEAST_ROWS: usize = 16;

/// Fraction of a step's time that prompts may always take.
const LEAST_FRACTION: f64 = 0.1;

/// Ratio of the time of a step with prompt rows to that of one without, if the latter exceeds the target.
const SLOW_FACTOR: f64 = 1.25;

/// Prompt rows of the first step whose time shows what they cost.
const FIRST_ROWS: usize = 64;

/// Weights of the fit for time per step, row, prompt row and attended position.
const RIDGE: [f64; 4] = [1e-6, 1e-4, 1e-4, 1e-4];

/// The work of a step, as far as its time depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct PacedWork {
    /// Rows of sequences that decode, drafts and forced tokens included.
    pub(super) decoding: usize,
    pub(super) prompt: usize,
    /// Sum of the positions before each prompt row, which it attends to.
    pub(super) attended: usize,
}

/// Chooses how many prompt rows a step may have.
///
/// The time of a step is fitted as t = a + b decoding + c prompt + e attended. The time between two tokens of
/// a stream is that of a step, and one step in a hundred takes more than `spread` times its estimate, so the
/// estimate is kept at the target divided by it.
#[derive(Debug)]
pub(super) struct PromptPacing {
    /// The time between two tokens that 99 % of the steps keep to; `None` is no limit.
    target: Option<Duration>,
    fit: TimeFit<4>,
    coefficients: [f64; 4],
    /// The ratio of time and estimate that is exceeded by one step in a hundred.
    spread: f64,
    /// Most prompt rows of the last steps. The next one has at most twice as many, because what more of them
    /// cost is not known.
    largest: usize,
}

impl PacedWork {
    /// Returns the work with `rows` rows of a prompt after its first `position` positions.
    fn with_prompt(self, rows: usize, position: usize) -> PacedWork {
        let attended = rows * position + rows * rows.saturating_sub(1) / 2;
        PacedWork { prompt: self.prompt + rows, attended: self.attended + attended, ..self }
    }

    /// Adds a chunk of a prompt, which begins at `start`.
    pub(super) fn add_chunk(&mut self, start: usize, len: usize) {
        *self = self.with_prompt(len, start);
    }

    fn features(&self) -> [f64; 4] {
        [1.0, self.decoding as f64, self.prompt as f64, self.attended as f64]
    }
}

impl PromptPacing {
    /// Creates the choice for a target of the time between two tokens; without one, there is no limit.
    pub(super) fn new(target: Option<Duration>) -> PromptPacing {
        PromptPacing {
            target,
            fit: TimeFit::new(RIDGE),
            coefficients: [0.0; 4],
            spread: 1.0,
            largest: FIRST_ROWS / 2,
        }
    }

    /// Takes note of the time from the results of one step to those of the next.
    pub(super) fn observe(&mut self, work: &PacedWork, time: Duration) {
        if self.target.is_none() {
            return;
        }
        let estimate = self.seconds(work);
        if work.prompt > 0 && work.decoding > 0 {
            if estimate > 0.0 {
                // Moves to the quantile: up once where it moves down 99 times.
                let exceeds = time.as_secs_f64() > self.spread * estimate;
                self.spread = (self.spread + if exceeds { 0.0495 } else { -0.0005 }).clamp(1.0, 3.0);
            }
            self.largest = work.prompt.max(self.largest - self.largest / 64);
        }
        self.fit.decay();
        self.fit.add(work.features(), time);
        self.coefficients = self.fit.solve();
    }

    /// Returns how many rows of prompts, at most `most`, a step may have that decodes `decoding` rows.
    /// `position` is the first one of the prompt that is computed next.
    pub(super) fn rows(&self, decoding: usize, position: usize, most: usize) -> usize {
        let Some(target) = self.target.filter(|_| decoding > 0) else { return most };
        let decode = PacedWork { decoding, ..PacedWork::default() };
        let alone = self.seconds(&decode);
        let within = |seconds: f64| {
            let (mut fits, mut exceeds) = (0, most.min(2 * self.largest) + 1);
            while exceeds - fits > 1 {
                let rows = fits.midpoint(exceeds);
                match self.seconds(&decode.with_prompt(rows, position)) <= seconds {
                    true => fits = rows,
                    false => exceeds = rows,
                }
            }
            fits
        };
        let limit = (target.as_secs_f64() / self.spread).max(SLOW_FACTOR * alone);
        let least = LEAST_ROWS.max(within(alone / (1.0 - LEAST_FRACTION)));
        within(limit).max(least).min(most)
    }

    fn seconds(&self, work: &PacedWork) -> f64 {
        dot(&work.features(), &self.coefficients)
    }
}

impl DecodeLoop {
    /// Returns how many rows of prompts the next step may have, beside `decoding` rows. Nobody waits for the
    /// tokens of batch requests, so interactive prompts need not spare their streams.
    pub(super) fn prompt_budget(&self, decoding: usize) -> Budget {
        let begun = self.running.iter().filter(|running| !running.prompt_scheduled);
        let position = begun.map(|running| running.sent_positions).max().unwrap_or(0);
        let most = self.config.token_budget.saturating_sub(decoding);
        let all = self.pacing.rows(decoding, position, most);
        let is_watched = |running: &RunningSequence| {
            running.is_decoding() && running.sequence.request.class == Class::Interactive
        };
        let interactive = if self.running.iter().any(is_watched) { all } else { most };
        Budget { all, interactive }
    }

    /// Takes note of a completed step, whose results came at `now` and which was begun at `began`.
    pub(super) fn observe_pace(&mut self, work: Option<PacedWork>, began: Instant, now: Instant) {
        let before = self.results_at.replace(now);
        if let Some(work) = work {
            self.pacing.observe(&work, now - before.map_or(began, |before| before.min(began)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mainstem_kernels::random::philox;

    const TARGET: Duration = Duration::from_millis(50);

    /// Runs steps of a device with a prompt that never ends. Returns the prompt rows and the time of each.
    fn run(decoding: usize, costs: [f64; 4], noise: f64, steps: usize) -> Vec<(usize, f64)> {
        let mut pacing = PromptPacing::new(Some(TARGET));
        let mut position = 0;
        (0..steps)
            .map(|step| {
                let rows = pacing.rows(decoding, position, 512);
                let work = PacedWork { decoding, ..PacedWork::default() }.with_prompt(rows, position);
                position = (position + rows) % 4000;
                let random = f64::from(philox([step as u32, 0, 0, 0], [7, 0])[0]) / 2f64.powi(32);
                let busy = 1.0 + noise * random;
                let seconds = busy * dot(&work.features(), &costs);
                pacing.observe(&work, Duration::from_secs_f64(seconds));
                (rows, seconds)
            })
            .collect()
    }

    #[test]
    fn steps_keep_to_the_target_and_use_it() {
        for noise in [0.0, 0.3] {
            let steps = run(4, [0.005, 0.0005, 0.0004, 1e-8], noise, 2000);
            let late = steps[200..].iter().filter(|(_, seconds)| *seconds > TARGET.as_secs_f64()).count();
            assert!(late <= 30, "{late} of 1800 steps took longer, noise {noise}");
            let mean = steps[200..].iter().map(|(_, seconds)| seconds).sum::<f64>() / 1800.0;
            assert!(mean > 0.7 * TARGET.as_secs_f64(), "{mean} s on average, noise {noise}");
            assert!(steps[..20].iter().all(|(_, seconds)| *seconds < 2.0 * TARGET.as_secs_f64()));
        }
    }

    /// Prompts go on where decoding takes longer than the target, with rows that make steps a quarter slower,
    /// and at least 16.
    #[test]
    fn prompts_go_on_beside_slow_decoding() {
        let steps = run(32, [0.1, 0.003, 0.001, 0.0], 0.0, 300);
        let (rows, seconds) = steps[299];
        assert!((rows as f64 - 49.0).abs() <= 4.0 && (seconds / 0.196 - 1.25).abs() < 0.03, "{rows}");
        let (rows, _) = run(32, [0.1, 0.003, 0.01, 0.0], 0.0, 300)[299];
        assert_eq!(rows, LEAST_ROWS);
    }

    #[test]
    fn nothing_is_limited_without_streams_or_without_a_target() {
        let mut pacing = PromptPacing::new(Some(TARGET));
        assert_eq!((pacing.rows(0, 0, 512), pacing.rows(1, 0, 512)), (512, FIRST_ROWS));
        for (prompt, ms) in [(0, 10), (64, 1000)] {
            let work = PacedWork { decoding: 1, prompt, attended: 0 };
            pacing.observe(&work, Duration::from_millis(ms));
        }
        assert_eq!((pacing.rows(0, 0, 512), pacing.rows(1, 0, 512), pacing.rows(1, 0, 3)), (512, 16, 3));
        assert_eq!(PromptPacing::new(None).rows(1, 0, 512), 512);
    }
}
