//! A device without arithmetic, which responds at once or after a set time, to measure everything except the
//! model. As a rank of a stage it synchronizes with the others in each step and contributes nothing.
//!
//! Invariant: a token depends only on its row's seed, position and mask: it is one of the list that the mask
//! allows, or the lowest that it allows if none of the list is. Neither the prompt nor the other sampling
//! parameters, including logit biases, change it. Hidden states are all ones.

use super::executor::{Executor, ExecutorReport};
use mainstem_kernels::batch::{is_allowed, lowest_allowed};
use mainstem_kernels::random::philox;
use mainstem_kernels::{
    Aborted, Collective, DeviceError, HandoffPorts, HostRow, RowFailure, SampleMode, SampledToken,
    SamplingInputs, SamplingParams, SingleRank, SpanStack, StepBatch, StepLimits, StepOutput,
};
use std::panic::resume_unwind;
use std::thread;
use std::time::{Duration, Instant};

/// The duration of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTime {
    pub step: Duration,
    /// Added for each row of the step, including holes.
    pub row: Duration,
}

impl StepTime {
    fn for_rows(self, rows: usize) -> Duration {
        self.step + self.row * rows as u32
    }

    /// Returns the part of a step's time until the last layer is computed.
    fn until_last_layer(time: Duration) -> Duration {
        time - time / HEAD_FRACTION
    }

    fn describe(self) -> String {
        match (self.step.is_zero(), self.row.is_zero()) {
            (true, true) => "answers at once".to_owned(),
            (false, true) => format!("{:?} a step", self.step),
            (true, false) => format!("{:?} a row", self.row),
            (false, false) => format!("{:?} a step and {:?} a row", self.step, self.row),
        }
    }
}

/// The final norm, the head and sampling take one part of this many of a step's time.
const HEAD_FRACTION: u32 = 20;

/// Returns the report of a [`FakeExecutor`] with this step time: it allocates nothing.
pub fn estimate_report(time: StepTime) -> ExecutorReport {
    ExecutorReport { device: format!("fake ({})", time.describe()), ..ExecutorReport::default() }
}

/// An executor that samples uniformly from a list of tokens, by seed and position alone. So its drafts are
/// what it samples itself. The host gets only the logits of the rows that it draws.
pub struct FakeExecutor {
    tokens: Vec<u32>,
    limits: StepLimits,
    time: StepTime,
    collective: Box<dyn Collective>,
    /// The logits of every row (vocabulary), for draws of the host: 0 for the listed tokens, negative
    /// infinity for the others.
    logits: Vec<f32>,
    mask: Vec<u32>,
}

impl FakeExecutor {
    /// Creates a device whose model has only `tokens` (at least one, in the vocabulary), for steps within
    /// `limits`. Without an end-of-sequence token among them, every request runs to its maximum length.
    pub fn new(tokens: Vec<u32>, limits: StepLimits) -> FakeExecutor {
        assert!(!tokens.is_empty(), "there must be at least one token");
        let mut logits = vec![f32::NEG_INFINITY; limits.vocab];
        for token in &tokens {
            logits[*token as usize] = 0.0;
        }
        let mask = vec![0; limits.mask_words()];
        let (time, collective) = (StepTime::default(), Box::new(SingleRank));
        FakeExecutor { tokens, limits, time, collective, logits, mask }
    }

    /// Returns the device as a rank of a stage, with that stage's collective.
    pub fn with_collective(self, stage: Box<dyn Collective>) -> FakeExecutor {
        FakeExecutor { collective: stage, ..self }
    }

    /// Returns the device with steps of this duration.
    pub fn with_step_time(self, time: StepTime) -> FakeExecutor {
        FakeExecutor { time, ..self }
    }

    fn sample_row(
        &mut self,
        (number, row): (usize, &SamplingParams),
        inputs: SamplingInputs<'_>,
        top: &mut Vec<(u32, f32)>,
    ) -> SampledToken {
        let token = match row.mode {
            SampleMode::Sample if row.masked => match inputs.wait_mask(number, &mut self.mask) {
                true => self.sample_masked(row).ok_or(RowFailure::EmptyMask),
                false => Err(RowFailure::NoLateInput),
            },
            SampleMode::Sample => Ok(self.sample(row)),
            SampleMode::Host => inputs.wait_token(number, self.limits.vocab).ok_or(RowFailure::NoLateInput),
            SampleMode::Score(token) => Ok(token),
        };
        let top_at = top.len() as u32;
        let token = match token {
            Ok(token) => token,
            Err(failure) => return SampledToken { top_at, ..SampledToken::failed(failure) },
        };
        let likely = -(self.tokens.len() as f32).ln();
        top.extend(self.tokens.iter().take(row.top_logprobs.into()).map(|token| (*token, likely)));
        let logprob = if row.logprob { likely } else { f32::NAN };
        let rank = match row.mode {
            // Tokens that are not listed share a rank.
            SampleMode::Score(token) if row.logprob => {
                1 + self.tokens.iter().take_while(|listed| **listed != token).count() as u32
            }
            _ => 0,
        };
        SampledToken { logprob, rank, top_at, top_len: top.len() as u32 - top_at, ..SampledToken::new(token) }
    }

    fn sample(&self, row: &SamplingParams) -> u32 {
        self.tokens[random_word(row) % self.tokens.len()]
    }

    fn sample_masked(&self, row: &SamplingParams) -> Option<u32> {
        let allowed = || self.tokens.iter().copied().filter(|token| is_allowed(&self.mask, *token));
        let chosen = random_word(row).checked_rem(allowed().count()).and_then(|at| allowed().nth(at));
        chosen.or_else(|| lowest_allowed(&self.mask, self.limits.vocab))
    }
}

/// Returns the random number of a row.
fn random_word(row: &SamplingParams) -> usize {
    philox([row.position, 0, 0, 0], [row.seed as u32, (row.seed >> 32) as u32])[0] as usize
}

impl Executor for FakeExecutor {
    fn run(
        &mut self,
        batch: &StepBatch,
        ports: HandoffPorts<'_>,
        out: &mut StepOutput,
    ) -> Result<(), DeviceError> {
        let began = Instant::now();
        assert!(batch.rows() <= self.limits.rows, "{} rows exceed the limits", batch.rows());
        out.clear();
        out.step = batch.step;
        let time = self.time.for_rows(batch.rows());
        wait_until(began + StepTime::until_last_layer(time));
        if batch.rows_of(SpanStack::Decoder) > 0 {
            ports.last_layer.send();
        }
        wait_until(began + time);
        self.collective.all_reduce(&mut [0.0]).unwrap_or_else(|Aborted| resume_unwind(Box::new(Aborted)));
        out.times.forward = began.elapsed();
        for span in &batch.drafts {
            let params = |draft| SamplingParams { position: span.sampling.position + draft, ..span.sampling };
            out.drafts.extend((0..span.count).map(|draft| self.sample(&params(draft))));
        }
        let inputs = SamplingInputs { biases: &batch.logit_biases, late: ports.late, width: None };
        let rows = || batch.sampling.iter().enumerate();
        for (number, _) in rows().filter(|(_, row)| row.mode == SampleMode::Host) {
            inputs.begin_draw(number, HostRow::of_logits(&self.logits));
        }
        for row in rows() {
            let result = self.sample_row(row, inputs, &mut out.top_logprobs);
            out.tokens.push(result);
        }
        let of_stack = |stack| batch.hidden_rows(stack).map(|rows| rows.len()).sum::<usize>();
        let hidden = of_stack(SpanStack::Encoder) + of_stack(SpanStack::Decoder);
        out.hidden.resize(hidden * self.limits.hidden, 1.0);
        out.times.sample = began.elapsed() - out.times.forward;
        Ok(())
    }

    fn report(&self) -> ExecutorReport {
        estimate_report(self.time)
    }
}

/// Maximum time by which a sleep is expected to overrun.
const OVERSLEEP: Duration = Duration::from_micros(100);

/// Waits until the deadline: sleeps for most of the time and spins for the rest, because a sleep may overrun.
pub fn wait_until(deadline: Instant) {
    let left = deadline.saturating_duration_since(Instant::now());
    if left > OVERSLEEP {
        thread::sleep(left - OVERSLEEP);
    }
    while Instant::now() < deadline {
        std::hint::spin_loop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use mainstem_kernels::{
        DraftSpan, Fraction, LateInputs, Span, SpanModel, SpanOutput, SpanTable, SpanTokens,
    };
    use std::sync::Arc;

    const LIMITS: StepLimits = StepLimits {
        slots: 4,
        rows: 8,
        batch_rows: usize::MAX,
        logit_rows: 4,
        positions: 64,
        encoder_positions: 0,
        page_positions: 32,
        window: None,
        top_logprobs: 2,
        vocab: 100,
        hidden: 0,
        drafts: 0,
        draft_logits: false,
        counts_tokens: false,
        opening_rows: 0,
        attended_fraction: Fraction::ONE,
    };

    #[test]
    fn tokens_come_from_the_list_by_seed_and_position_alone() {
        let mut device = FakeExecutor::new(vec![7, 8, 9], LIMITS);
        let row = |position, seed| SamplingParams { position, seed, ..SamplingParams::GREEDY };
        let scored =
            SamplingParams { mode: SampleMode::Score(55), logprob: true, top_logprobs: 2, ..row(3, 3) };
        let mut ids = |samples: Vec<SamplingParams>| {
            let mut out = StepOutput::default();
            device
                .run(
                    &StepBatch { sampling: samples, ..StepBatch::default() },
                    HandoffPorts::default(),
                    &mut out,
                )
                .expect("it never fails");
            out
        };
        let one = ids((0..40).map(|position| row(position, 1)).collect());
        let token_ids = |out: &StepOutput| out.tokens.iter().map(|row| row.token).collect::<Vec<_>>();
        assert!([7, 8, 9].iter().all(|token| token_ids(&one).contains(token)));
        assert_eq!(token_ids(&ids(vec![row(17, 1)])), token_ids(&one)[17..18]);
        assert_ne!(token_ids(&ids((0..40).map(|position| row(position, 2)).collect())), token_ids(&one));
        let out = ids(vec![row(0, 0), scored, row(1, 0)]);
        assert!(out.tokens[0].logprob.is_nan() && out.tokens[1].token == 55);
        assert!((out.tokens[1].logprob.exp() - 1.0 / 3.0).abs() < 1e-6);
        assert_eq!((out.tokens[0].rank, out.tokens[1].rank), (0, 4));
        assert_eq!(out.top_logprobs_of(&out.tokens[1]).iter().map(|top| top.0).collect::<Vec<_>>(), [7, 8]);
        assert_eq!((out.top_logprobs_of(&out.tokens[2]).len(), out.top_logprobs.len()), (0, 2));
        let draft = DraftSpan {
            slot: 0,
            start: 16,
            tokens: SpanTokens::Generated { at: 0, len: 1 },
            reserved: 50,
            count: 5,
            sampling: row(17, 1),
        };
        let mut out = StepOutput::default();
        let batch = StepBatch { drafts: vec![draft], ..StepBatch::default() };
        device.run(&batch, HandoffPorts::default(), &mut out).expect("it never fails");
        assert_eq!(out.drafts, token_ids(&one)[17..22]);
    }

    /// A masked row gets an allowed token of the list, or the lowest allowed one, and none if the mask allows
    /// none. A row of the host gets the host's token, and none if the host gives up.
    #[test]
    fn late_inputs_are_used() {
        let mut device = FakeExecutor::new(vec![7, 8, 39], LIMITS);
        let masked = |position| SamplingParams { masked: true, position, ..SamplingParams::GREEDY };
        let host = SamplingParams { mode: SampleMode::Host, logprob: true, ..SamplingParams::GREEDY };
        let mut sampling: Vec<SamplingParams> = (0..20).map(masked).collect();
        sampling.extend([host; 3]);
        sampling.push(masked(0));
        let late: Arc<LateInputs> = Arc::default();
        // Bits of tokens 8 and 39; of 9 and 32, which are not in the list; and of 100, beyond the vocabulary.
        (0..19).for_each(|row| late.mask_sender(row).send([1 << 8, 1 << 7, 0, 0].into()));
        late.mask_sender(19).send([1 << 9, 1, 0, 0].into());
        late.mask_sender(23).send([0, 0, 0, 1 << 4].into());
        late.draw_with(20, |row, sender| {
            assert_eq!((row.logits.len(), row.logits[39], row.logits[40]), (100, 0.0, f32::NEG_INFINITY));
            sender.send(50);
        });
        late.draw_with(21, |_, sender| sender.send(100));
        let batch = StepBatch { sampling, ..StepBatch::default() };
        let mut out = StepOutput::default();
        let flow = HandoffPorts { late: Some(&late), ..HandoffPorts::default() };
        device.run(&batch, flow, &mut out).expect("it never fails");
        let tokens: Vec<u32> = out.tokens.iter().map(|row| row.token).collect();
        assert!([8, 39].iter().all(|token| tokens[..19].contains(token)) && !tokens[..19].contains(&7));
        assert_eq!((tokens[19], out.tokens[23].failure), (9, Some(RowFailure::EmptyMask)));
        assert_eq!((tokens[20], out.tokens[20].failure), (50, None));
        assert!(out.tokens[20].logprob.is_finite() && out.tokens[21].logprob.is_nan());
        // The vocabulary has 100 tokens, and row 22 is not registered.
        assert_eq!([21, 22].map(|row: usize| out.tokens[row].failure), [Some(RowFailure::NoLateInput); 2]);
    }

    /// The step's time is attributed to the forward pass in the reported times.
    #[test]
    fn a_step_takes_its_time_and_that_of_its_rows() {
        let time = StepTime { step: Duration::from_millis(2), row: Duration::from_micros(500) };
        let mut device = FakeExecutor::new(vec![7], LIMITS).with_step_time(time);
        let span = Span {
            model: SpanModel::Target,
            stack: SpanStack::Decoder,
            slot: 0,
            start: 0,
            tokens: SpanTokens::Given { at: 0, len: 4 },
            table: SpanTable::Own,
            reserved: 4,
            encoder_len: 0,
            output: SpanOutput::Last,
        };
        let samples = vec![SamplingParams::GREEDY];
        let batch =
            StepBatch { spans: vec![span], tokens: vec![7; 4], sampling: samples, ..StepBatch::default() };
        let mut out = StepOutput::default();
        let began = Instant::now();
        device.run(&batch, HandoffPorts::default(), &mut out).expect("it never fails");
        let minimum = Duration::from_millis(4);
        assert!(began.elapsed() >= minimum && out.times.forward >= minimum, "{:?}", out.times.forward);
        assert_eq!(out.tokens.len(), 1);
        assert_eq!(device.report().device, "fake (2ms a step and 500µs a row)");
    }
}
