//! Tests of the passes of a draft model within a step: rows that are mapped again and again, drafts that are
//! rows of later passes and of the verification, and their logits.

use super::inputs::*;
use super::rig::*;
use super::spans::*;
use mainstem_kernels::backend::{Backend, SamplingInputs, StepLimits};
use mainstem_kernels::batch::{
    DraftSpan, SampleMode, SamplingParams, Span, SpanModel, SpanOutput, SpanStack, SpanTable, SpanTokens,
    StepBatch, StepOutput,
};
use mainstem_kernels::late::LateInputs;
use mainstem_kernels::quant::QuantType;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};

/// Returns a span of a draft model that makes `count` drafts.
fn draft_span(slot: u32, start: u32, tokens: SpanTokens, count: u32) -> DraftSpan {
    DraftSpan { slot, start, tokens, reserved: 100, count, sampling: SamplingParams::GREEDY }
}

/// Returns a span of the target that samples at every row.
fn target_span(slot: u32, start: u32, tokens: SpanTokens) -> Span {
    Span {
        model: SpanModel::Target,
        stack: SpanStack::Decoder,
        slot,
        start,
        tokens,
        table: SpanTable::Own,
        reserved: 100,
        encoder_len: 0,
        output: SpanOutput::All,
    }
}

/// Returns the batch of a pass.
fn pass_of(step: &StepBatch, number: u32) -> StepBatch {
    let spans = step.drafts.iter().filter(|span| number == 0 || span.count > number);
    let mut batch = StepBatch {
        spans: spans.map(|span| span.pass_span(number)).collect(),
        tokens: step.tokens.clone(),
        draft_logits: step.draft_logits,
        ..StepBatch::default()
    };
    sample_all_greedily(&mut batch);
    batch
}

/// Asserts the tokens and positions of the current rows.
fn assert_rows<B: Backend>(rig: &mut Rig<B>, what: &str, expected: &[(u32, u32)]) {
    let numbers: Vec<f32> = (0..57).map(|number| number as f32).collect();
    let table = rig.weight(QuantType::F32, 57, &numbers);
    assert_eq!(rig.backend.select_stack(SpanStack::Decoder), expected.len(), "{what}: rows");
    let mut x = rig.output(expected.len());
    rig.backend.embed(&table, 0, &mut x);
    let tokens: Vec<f32> = expected.iter().map(|row| row.0 as f32).collect();
    assert_eq!(rig.read(&x, expected.len(), format_args!("{what}: tokens")), tokens, "{what}: tokens");
    let mut x = rig.in_out(&vec![0.0; expected.len()]);
    rig.backend.embed_positions(&table, 0, 0, &mut x);
    let positions: Vec<f32> = expected.iter().map(|row| row.1 as f32).collect();
    assert_eq!(rig.read(&x, expected.len(), format_args!("positions")), positions, "{what}: positions");
}

/// Samples all rows of a pass from logits of this width; returns the tokens.
fn sample_pass<B: Backend>(rig: &mut Rig<B>, logits: &[f32], width: usize) -> Vec<u32> {
    let mut out = StepOutput::with_capacity(&rig.limits);
    let buf = rig.input(logits);
    let inputs = SamplingInputs { width: Some(width), ..SamplingInputs::default() };
    rig.backend.sample(0..logits.len() / width, &buf, inputs, &mut out);
    out.tokens.iter().map(|row| row.token).collect()
}

/// Returns random logits of rows whose largest ones belong to these tokens.
fn logits_for(tag: u32, width: usize, tokens: &[usize]) -> Vec<f32> {
    let mut logits = scaled(tag, tokens.len() * width, 1.0);
    (0..).step_by(width).zip(tokens).for_each(|(row, token): (usize, _)| logits[row + token] = 2.0);
    logits
}

/// Tests that drafts are the rows of the next passes and of their verification; that they do not change the
/// last tokens of slots; that a draft model may have another number of tokens; and that the host gets the
/// drafts and their logits with the rows that verify them.
pub fn drafts<B: Backend>(make: &impl Fn() -> B) {
    let mut rig = Rig::new(make(), StepLimits { drafts: 3, draft_logits: true, ..limits(32) });
    let rows = [0, 1, 2].map(|slot| TestSpan { sequence: 0, ..TestSpan::given(slot, 0, 1) });
    rig.sample_tokens(&rows, &[20, 21, 22], &[SamplingParams::GREEDY; 3], &[]);
    let host = SamplingParams { mode: SampleMode::Host, ..SamplingParams::GREEDY };
    let step = StepBatch {
        drafts: vec![
            draft_span(0, 8, SpanTokens::Generated { at: 0, len: 2 }, 2),
            draft_span(2, 4, SpanTokens::Given { at: 2, len: 2 }, 0),
            draft_span(1, 5, SpanTokens::Generated { at: 4, len: 1 }, 3),
        ],
        spans: vec![
            target_span(0, 9, SpanTokens::Drafted { at: 1, len: 3 }),
            target_span(1, 5, SpanTokens::Drafted { at: 4, len: 2 }),
            target_span(2, 1, SpanTokens::Last),
        ],
        tokens: vec![40, 41, 42, 43, 44],
        sampling: vec![host; 6],
        draft_logits: true,
        ..StepBatch::default()
    };
    rig.begin(step.clone());
    assert_rows(&mut rig, "before the drafts", &[]);
    // The largest logits of 60 belong to tokens that the target does not have.
    let mut wide = logits_for(70, 60, &[30, 31]);
    (wide[58], wide[119]) = (9.0, 9.0);
    let (few, last) = (logits_for(71, 40, &[33, 34]), logits_for(72, 57, &[56]));
    rig.backend.map_rows(&pass_of(&step, 0));
    assert_rows(&mut rig, "pass 0", &[(40, 8), (41, 9), (42, 4), (43, 5), (44, 5)]);
    assert_eq!(sample_pass(&mut rig, &wide, 60), [30, 31], "drafts of pass 0");
    rig.backend.map_rows(&pass_of(&step, 1));
    assert_rows(&mut rig, "pass 1", &[(30, 10), (31, 6)]);
    assert_eq!(sample_pass(&mut rig, &few, 40), [33, 34], "drafts of pass 1");
    rig.backend.map_rows(&pass_of(&step, 2));
    assert_rows(&mut rig, "pass 2", &[(34, 7)]);
    assert_eq!(sample_pass(&mut rig, &last, 57), [56], "drafts of pass 2");
    rig.backend.map_rows(&step);
    assert_rows(&mut rig, "verification", &[(41, 9), (30, 10), (33, 11), (44, 5), (31, 6), (22, 1)]);
    let padded = |row: &[f32]| [row, &[f32::NEG_INFINITY; 57][row.len()..]].concat();
    let expected = [
        (41, Some(30), Some(wide[..57].to_vec())),
        (30, Some(33), Some(padded(&few[..40]))),
        (33, None, None),
        (44, Some(31), Some(wide[60..117].to_vec())),
        (31, None, None),
        (22, None, None),
    ];
    let logits = scaled(73, 6 * 57, 4.0);
    let (seen, late) = (mpsc::channel(), Arc::new(LateInputs::default()));
    for row in 0..6 {
        let seen = seen.0.clone();
        late.draw_with(row, move |given, sender| {
            let kept = given.draft_logits.map(<[f32]>::to_vec);
            let row_of = (given.logits.to_vec(), (given.input_token, given.next_token, kept));
            seen.send(row_of).expect("the test receives it");
            sender.send(10 + row as u32);
        });
    }
    let mut out = StepOutput::with_capacity(&rig.limits);
    let inputs = SamplingInputs { late: Some(&late), ..SamplingInputs::default() };
    for block in [0..4, 4..6] {
        let buf = rig.input(&logits[block.start * 57..block.end * 57]);
        rig.backend.sample(block, &buf, inputs, &mut out);
    }
    let got: Vec<_> = seen.1.try_iter().collect();
    assert!(got.iter().map(|row| &row.0[..]).eq(logits.chunks_exact(57)), "logits of the rows");
    assert!(
        got.iter().map(|row| &row.1).eq(&expected),
        "{:?} is not {expected:?}",
        got.iter().map(|row| &row.1)
    );
    assert!(out.tokens.iter().map(|row| row.token).eq(10..16), "tokens of the host");
    assert_eq!(rig.last_tokens(&[0, 1, 2]), [12, 14, 15], "last tokens");
    rig.begin(step.clone());
    let stale = catch_unwind(AssertUnwindSafe(|| rig.backend.map_rows(&step)));
    assert!(stale.is_err(), "drafts of an earlier step are verified");
}
