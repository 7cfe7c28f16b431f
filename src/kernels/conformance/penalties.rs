//! Tests of penalties against the definition in [`mainstem_kernels::reference`], and of the counts of tokens
//! that they use.

use super::inputs::*;
use super::rig::*;
use super::sampling::{logits_row, row_biases, row_mask, sampling_params};
use super::spans::*;
use mainstem_kernels::Penalties;
use mainstem_kernels::backend::{Backend, SamplingInputs, StepLimits};
use mainstem_kernels::batch::{
    IN_PROMPT, RowFailure, SampleMode, SamplingParams, SlotMove, SpanOutput, StepBatch, StepOutput,
    with_generated,
};
use mainstem_kernels::late::LateInputs;
use mainstem_kernels::random::philox;
use mainstem_kernels::reference::{is_finite_row, sample_counted};
use std::sync::Arc;

/// The tokens of the sequence in a slot.
#[derive(Clone, Default)]
struct History {
    prompt: Vec<u32>,
    generated: Vec<u32>,
}

impl History {
    /// Returns the tokens of a new sequence, of which some occur several times. A preempted one has generated
    /// some of them before.
    fn new(step: u32, slot: u32, vocab: usize) -> History {
        let tokens = |part: u32, most: u32| {
            let [len, ..] = philox([step, slot, part, 0], [91, 0]);
            let token = move |i| philox([step, slot, part, i], [92, 0])[0] as usize % vocab.min(20);
            (0..len % most).map(move |i| (token(i) * vocab.div_ceil(20) % vocab) as u32).collect()
        };
        History { prompt: tokens(0, 40), generated: tokens(1, 12) }
    }

    fn counts(&self, vocab: usize) -> Vec<u16> {
        let mut counts = vec![0; vocab];
        self.prompt.iter().for_each(|token| counts[*token as usize] |= IN_PROMPT);
        for token in &self.generated {
            counts[*token as usize] = with_generated(counts[*token as usize]);
        }
        counts
    }
}

/// Tests that tokens of rows with penalties are exactly those of `reference::sample_counted`, while sequences
/// take the slots of others, return, and move; that the tokens of these rows are counted, and no others.
pub fn penalties<B: Backend>(make: &impl Fn() -> B) {
    for (vocab, steps) in [(5, 8), (57, 24), (1003, 12)] {
        let limits = StepLimits { vocab, counts_tokens: true, ..limits(32) };
        let mut rig = Rig::new(make(), limits);
        let mut slots = vec![History::default(); limits.slots];
        for step in 0..steps {
            assert_step(&mut rig, step, &mut slots);
        }
    }
    full_counts(make);
}

/// Returns a row of each slot. A slot in four has none that step, and one is a hole.
fn spans(step: u32, slots: u32) -> Vec<TestSpan> {
    let order = (0..slots).map(|i| (i * 3 + step) % slots);
    let kept = order.filter(|slot| !philox([step, *slot, 2, 0], [93, 0])[0].is_multiple_of(4));
    let span = |slot: u32| match slot == step % 11 {
        true => TestSpan::hole(slot),
        false => TestSpan { sequence: 0, ..TestSpan::last(slot, 1) },
    };
    kept.map(span).collect()
}

fn row_penalties(step: u32, slot: u32) -> Penalties {
    let [kind, a, b, c] = philox([step, slot, 3, 0], [94, 0]);
    let pick = |word: u32, values: [f32; 4]| values[word as usize % 4];
    match kind % 5 {
        0 => Penalties::NONE,
        _ => Penalties {
            repetition: pick(a, [1.0, 1.3, 0.7, 3e38]),
            presence: pick(b, [0.0, 0.4, -1.5, 2.0]),
            frequency: pick(c, [0.0, 0.35, 1.7, -0.3]),
        },
    }
}

/// Tests one step: moves and new sequences, and then a row of each slot.
fn assert_step<B: Backend>(rig: &mut Rig<B>, step: u32, slots: &mut [History]) {
    let vocab = rig.limits.vocab;
    let spans = spans(step, slots.len() as u32);
    let mut batch = build_batch(&spans, SpanOutput::All, &mut PageBook::scattered(32));
    if step % 3 == 2 {
        let moved = |i: u32| SlotMove { from: (step + i) % 4, to: 4 + (step + 2 * i) % 4 };
        batch.moves = [0, 1].map(moved).to_vec();
    }
    for moved in &batch.moves {
        slots[moved.to as usize] = slots[moved.from as usize].clone();
    }
    for slot in (0..slots.len() as u32).filter(|slot| step == 0 || (slot + step).is_multiple_of(5)) {
        let history = History::new(step, slot, vocab);
        batch.replace_counts(slot, (&history.prompt, &history.generated), vocab);
        slots[slot as usize] = history;
    }
    let late = Arc::new(LateInputs::default());
    let mut rows = Vec::new();
    for (row, span) in spans.iter().enumerate() {
        let mut params = sampling_params(step, span.slot, vocab);
        let is_hole = span.kind == TestSpanKind::Hole;
        params.penalties = if is_hole { Penalties::NONE } else { row_penalties(step, span.slot) };
        let biases = row_biases(step, span.slot, vocab);
        (params.bias_at, params.bias_len) = (batch.logit_biases.len() as u32, biases.len() as u32);
        batch.logit_biases.extend(&biases);
        let mask = params.is_masked().then(|| row_mask(step, span.slot, vocab));
        mask.iter().for_each(|mask| late.mask_sender(row).send(mask.as_slice().into()));
        rows.push((logits_row(step, span.slot + step, vocab), params, biases, mask));
    }
    batch.sampling = rows.iter().map(|(_, params, ..)| *params).collect();
    let logits: Vec<&[f32]> = rows.iter().map(|(logits, ..)| logits.as_slice()).collect();
    let out = sample(rig, batch, &logits, &late);
    for ((span, result), (logits, params, biases, mask)) in spans.iter().zip(out.tokens).zip(&rows) {
        let history = &mut slots[span.slot as usize];
        let counts = if params.is_penalized() { history.counts(vocab) } else { Vec::new() };
        let expected = match params.mode {
            _ if !is_finite_row(logits) => Err(RowFailure::NotFinite),
            SampleMode::Score(token) => Ok(token),
            _ => sample_counted(logits, biases, &counts, mask.as_deref(), params),
        };
        let got = result.failure.map_or(Ok(result.token), Err);
        assert_eq!(got, expected, "penalties, vocabulary {vocab}, step {step}, {span:?}, {params:?}");
        if params.is_penalized() {
            history.generated.extend(got);
        }
    }
}

/// Begins a step, and samples its rows in two blocks.
fn sample<B: Backend>(
    rig: &mut Rig<B>,
    batch: StepBatch,
    logits: &[&[f32]],
    late: &Arc<LateInputs>,
) -> StepOutput {
    let mut out = StepOutput::with_capacity(&rig.limits);
    let biases = batch.logit_biases.clone();
    rig.begin(batch);
    for block in [0..1, 1..logits.len()] {
        let buf = rig.input(&logits[block.clone()].concat());
        let inputs = SamplingInputs { biases: &biases, late: Some(late), width: None };
        rig.backend.sample(block, &buf, inputs, &mut out);
    }
    out
}

/// Tests that counts stay at their largest value. A negative penalty raises the token that was generated
/// most.
fn full_counts<B: Backend>(make: &impl Fn() -> B) {
    let mut rig = Rig::new(make(), StepLimits { counts_tokens: true, ..limits(32) });
    let vocab = rig.limits.vocab;
    let logits: Vec<f32> = (0..vocab).map(|id| if id == 6 { 32_764.5 } else { 0.0 }).collect();
    let penalties = Penalties { frequency: -1.0, ..Penalties::NONE };
    for (step, in_prompt) in [(0, &[][..]), (1, &[]), (2, &[]), (3, &[5]), (4, &[]), (5, &[])] {
        let spans = [0, 1].map(|slot| TestSpan { sequence: 0, ..TestSpan::last(slot, 1) });
        let mut batch = build_batch(&spans, SpanOutput::All, &mut PageBook::scattered(32));
        batch.sampling = vec![SamplingParams { penalties, ..SamplingParams::GREEDY }; 2];
        if step % 3 == 0 {
            batch.replace_counts(0, (in_prompt, &[5; 32_766]), vocab);
            batch.replace_counts(1, (in_prompt, &[5; 40_000]), vocab);
        }
        let out = sample(&mut rig, batch, &[&logits, &logits], &Arc::default());
        let tokens: Vec<u32> = out.tokens.iter().map(|row| row.token).collect();
        assert_eq!(tokens, [5, 5], "full counts, step {step}");
    }
}
