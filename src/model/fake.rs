//! A device that answers at once: for measuring everything around the model, and nothing of it.
//!
//! Invariant: a token depends on its row's seed and position alone. There are no logits, so neither a prompt
//! nor the rest of the row's parameters, biases among them, change it.

use super::executor::{Executor, ExecutorReport};
use mainstem_kernels::random::philox;
use mainstem_kernels::{DeviceError, SampleMode, SampleRow, SampledRow, StepBatch, StepLimits, StepOutput};
use std::time::Instant;

/// Draws from a list of tokens, each as likely as the others.
pub struct FakeExecutor {
    tokens: Vec<u32>,
    limits: StepLimits,
}

impl FakeExecutor {
    /// A device whose model knows `tokens` (at least one) and no others, for steps within `limits`. Without
    /// an end-of-sequence token among them, every request runs to its length.
    pub fn new(tokens: Vec<u32>, limits: StepLimits) -> FakeExecutor {
        assert!(!tokens.is_empty(), "a token is drawn from something");
        FakeExecutor { tokens, limits }
    }

    fn result(&self, row: &SampleRow, top: &mut Vec<(u32, f32)>) -> SampledRow {
        let token = match row.mode {
            SampleMode::Draw => self.draw(row),
            SampleMode::Score(token) => token,
        };
        let likely = -(self.tokens.len() as f32).ln();
        let top_at = top.len();
        top.extend(self.tokens.iter().take(row.top_logprobs.into()).map(|token| (*token, likely)));
        SampledRow {
            token,
            logprob: if row.logprob { likely } else { f32::NAN },
            top_at: top_at as u32,
            top_len: (top.len() - top_at) as u32,
        }
    }

    fn draw(&self, row: &SampleRow) -> u32 {
        let [word, ..] = philox([row.position, 0, 0, 0], [row.seed as u32, (row.seed >> 32) as u32]);
        self.tokens[word as usize % self.tokens.len()]
    }
}

impl Executor for FakeExecutor {
    fn run(&mut self, batch: &StepBatch, out: &mut StepOutput) -> Result<(), DeviceError> {
        let began = Instant::now();
        assert!(batch.rows() <= self.limits.rows, "{} rows exceed the limits", batch.rows());
        out.clear();
        out.step = batch.step;
        out.times.forward = began.elapsed();
        for row in &batch.samples {
            let result = self.result(row, &mut out.top);
            out.rows.push(result);
        }
        out.times.sample = began.elapsed() - out.times.forward;
        Ok(())
    }

    fn report(&self) -> ExecutorReport {
        ExecutorReport { device: "fake (answers at once)".to_owned(), ..ExecutorReport::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: StepLimits = StepLimits {
        slots: 4,
        rows: 8,
        logit_rows: 4,
        positions: 64,
        page_positions: 32,
        top_logprobs: 2,
        biases: 0,
        vocab: 100,
    };

    #[test]
    fn tokens_come_from_the_list_by_seed_and_position_alone() {
        let mut device = FakeExecutor::new(vec![7, 8, 9], LIMITS);
        let row = |position, seed| SampleRow { position, seed, ..SampleRow::GREEDY };
        let scored = SampleRow { mode: SampleMode::Score(55), logprob: true, top_logprobs: 2, ..row(3, 3) };
        let mut ids = |samples: Vec<SampleRow>| {
            let mut out = StepOutput::default();
            device.run(&StepBatch { samples, ..StepBatch::default() }, &mut out).expect("it never fails");
            out
        };
        let one = ids((0..40).map(|position| row(position, 1)).collect());
        let drawn = |out: &StepOutput| out.rows.iter().map(|row| row.token).collect::<Vec<_>>();
        assert!([7, 8, 9].iter().all(|token| drawn(&one).contains(token)));
        assert_eq!(drawn(&ids(vec![row(17, 1)])), drawn(&one)[17..18]);
        assert_ne!(drawn(&ids((0..40).map(|position| row(position, 2)).collect())), drawn(&one));
        let out = ids(vec![row(0, 0), scored, row(1, 0)]);
        assert!(out.rows[0].logprob.is_nan() && out.rows[1].token == 55);
        assert!((out.rows[1].logprob.exp() - 1.0 / 3.0).abs() < 1e-6);
        assert_eq!(out.top_of(&out.rows[1]).iter().map(|top| top.0).collect::<Vec<_>>(), [7, 8]);
        assert_eq!((out.top_of(&out.rows[2]).len(), out.top.len()), (0, 2));
    }
}
