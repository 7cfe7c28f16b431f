//! Tests of the verification of drafts: a span of generated tokens that samples at every row.

use super::Bounds;
use super::family::ModelFamily;
use super::inputs::*;
use super::properties::step_of;
use super::rig::*;
use super::spans::*;
use super::tiny::{ModelStep, TinyModel};
use mainstem_kernels::backend::Backend;
use mainstem_kernels::batch::SamplingParams;
use mainstem_kernels::quant::QuantType;
use mainstem_kernels::reference::sample;

/// Returns the sampling parameters of a row, which differ from those of every other row.
fn params(sequence: u32, position: usize) -> SamplingParams {
    SamplingParams {
        position: position as u32,
        seed: u64::from(sequence) << 40 | 17,
        temperature: 1.5,
        top_k: [0, 20][position % 2],
        top_p: [1.0, 0.9, 1.0][position % 3],
        ..SamplingParams::GREEDY
    }
}

/// A sampled token of each row (sequence, position).
type RowTokens = Vec<((u32, usize), u32)>;

/// Runs the steps; returns the logits and the sampled tokens of all rows, and the last tokens of slots 0 and
/// 1.
fn run<B: Backend>(
    backend: B,
    case: (ModelFamily, QuantType),
    steps: &[Vec<TestSpan>],
) -> (RowResults, RowTokens, Vec<u32>) {
    let mut tiny = TinyModel::new(backend, case, 32);
    tiny.sampling = Some(params);
    let steps: Vec<ModelStep> = steps.iter().map(|spans| step_of(case.0, spans)).collect();
    let logits = tiny.run(&steps);
    let sampled = tiny.sampled.iter().filter(|(row, _)| logits.contains_key(row));
    (logits.clone(), sampled.map(|(row, token)| (*row, *token)).collect(), tiny.rig.last_tokens(&[0, 1]))
}

/// Tests that every row of a span of drafts has the logits and the token of a separate step, and that the
/// last row determines the last token of the slot.
pub fn verification<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    for case in ModelFamily::with_formats() {
        let what = format!("{} model, {}, drafts", case.1, case.0.name);
        let prompts = || vec![TestSpan::given(0, 0, 30), TestSpan::given(1, 0, 17)];
        let alone = |i: usize| vec![TestSpan::generated(0, 30 + i, 1), TestSpan::generated(1, 17 + i, 1)];
        let separate: Vec<_> = std::iter::once(prompts()).chain((0..5).map(alone)).collect();
        let (logits, tokens, last) = run(make(), case, &separate);
        // The spans of slot 0 are of K + 1 = 5 rows, those of slot 1 of 2 and 3.
        let verified = vec![
            prompts(),
            vec![TestSpan::generated(0, 30, 5), TestSpan::hole(6), TestSpan::generated(1, 17, 2)],
            vec![TestSpan::generated(1, 19, 3)],
        ];
        let (got, got_tokens, got_last) = run(make(), case, &verified);
        assert_same_rows(format_args!("{what}"), &got, &logits, bounds);
        assert_eq!(got.len(), logits.len(), "{what}: rows");
        for ((sequence, at), token) in &got_tokens {
            let expected = sample(&got[&(*sequence, *at)], &[], None, &params(*sequence, *at));
            assert_eq!(Ok(*token), expected, "{what}: token after position {at} of sequence {sequence}");
        }
        let of_row = |row| got_tokens.iter().find(|entry| entry.0 == row).map(|entry| entry.1);
        assert_eq!(
            got_last.iter().copied().map(Some).collect::<Vec<_>>(),
            [of_row((0, 34)), of_row((1, 21))]
        );
        if bounds.batch_invariance == 0.0 {
            assert_eq!((got_tokens, got_last), (tokens, last), "{what}: tokens of separate steps");
        }
    }
}
