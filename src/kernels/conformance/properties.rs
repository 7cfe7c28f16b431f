//! Properties that every backend must have, tested with small models: above all batch invariance, which means
//! that the bits of a row do not depend on the rest of the batch.

use super::Bounds;
use super::family::ModelFamily;
use super::inputs::*;
use super::rig::*;
use super::spans::*;
use super::tiny::{ModelStep, TinyModel};
use mainstem_kernels::backend::Backend;
use mainstem_kernels::batch::{SlotMove, SpanOutput};
use mainstem_kernels::quant::QuantType;

/// Tests that the result of a row depends neither on the other rows nor on their number or order.
pub fn batch_invariance<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    for case in ModelFamily::with_formats() {
        let (what, want) = (describe_case(case), expected_results(make, case));
        let got = TinyModel::new(make(), case, 64).run(&mixed_steps(case.0));
        assert_same_rows(format_args!("{what}, several sequences"), &got, &want, bounds);
        assert_eq!(got.len(), want.len(), "rows served");
        let single = (0..LENGTHS.len() as u32).flat_map(|slot| token_by_token(case.0, slot));
        let got = TinyModel::new(make(), case, 64).run(&single.collect::<Vec<_>>());
        assert_same_rows(format_args!("{what}, token by token"), &got, &want, bounds);
        assert_eq!(got.len(), want.len(), "rows served");
    }
}

/// Tests that a prompt that is divided anywhere gives the results of the whole prompt. Every model is cut at
/// the edges of pages and of groups of rows, and all models together everywhere.
pub fn chunking<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    const EDGES: [usize; 7] = [1, 15, 16, 31, 32, 33, 64];
    let models = ModelFamily::with_formats().count();
    for (i, case) in ModelFamily::with_formats().enumerate() {
        let (what, want) = (describe_case(case), expected_results(make, case));
        let mut tiny = TinyModel::new(make(), case, 32);
        for cut in (1..LENGTHS[0]).filter(|cut| EDGES.contains(cut) || cut % models == i) {
            tiny.book = PageBook::scattered(32);
            let halves = [TestSpan::given(0, 0, cut), TestSpan::given(0, cut, LENGTHS[0] - cut)];
            let steps = halves.map(|piece| step_of(case.0, &[piece]));
            assert_same_rows(format_args!("{what}, prompt cut at {cut}"), &tiny.run(&steps), &want, bounds);
        }
    }
}

/// Tests that sequences continue unchanged after their slots were moved.
pub fn moves<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    for case in ModelFamily::with_formats() {
        let (family, want) = (case.0, expected_results(make, case));
        let in_slot = |slot, piece: TestSpan| TestSpan { slot, ..piece };
        let moved = |moves: &[(u32, u32)], pieces: &[TestSpan]| ModelStep {
            moves: moves.iter().map(|&(from, to)| SlotMove { from, to }).collect(),
            ..step_of(family, pieces)
        };
        let steps = [
            moved(&[], &[TestSpan::given(0, 0, 40), TestSpan::given(1, 0, 30)]),
            moved(&[(0, 6), (1, 3)], &[in_slot(6, TestSpan::last(0, 40)), in_slot(3, TestSpan::last(1, 30))]),
            // Another sequence takes a vacated slot, and the moved sequences move again.
            moved(&[(6, 1)], &[in_slot(0, TestSpan::given(3, 0, 45)), in_slot(1, TestSpan::last(0, 41))]),
            moved(&[], &[in_slot(3, TestSpan::last(1, 31)), in_slot(1, TestSpan::given(0, 42, 28))]),
        ];
        let got = TinyModel::new(make(), case, 32).run(&steps);
        assert_same_rows(format_args!("{}, slots moved", describe_case(case)), &got, &want, bounds);
    }
}

/// Tests that results depend neither on the page size nor on the location of pages. Contiguous pages, which
/// are the simpler ones, have one size in each model.
pub fn paging<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    for (i, case) in ModelFamily::with_formats().enumerate() {
        let (what, want) = (describe_case(case), expected_results(make, case));
        for (at, page_positions) in PAGE_POSITIONS.into_iter().enumerate() {
            let contiguous = (i % PAGE_POSITIONS.len() == at).then(|| PageBook::contiguous(page_positions));
            for book in [PageBook::scattered(page_positions)].into_iter().chain(contiguous) {
                let mut tiny = TinyModel::new(make(), case, page_positions);
                let what =
                    format_args!("{what}, pages of {page_positions}: {:?}", &book.free[POOL_PAGES - 4..]);
                tiny.book = book.clone();
                assert_same_rows(what, &tiny.run(&mixed_steps(case.0)), &want, bounds);
            }
        }
    }
}

/// Tests that old contents of a page never leak, not even a NaN after the last position.
pub fn stale_pages<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    for case in ModelFamily::with_formats() {
        let (what, want) = (describe_case(case), expected_results(make, case));
        for page_positions in PAGE_POSITIONS {
            let mut tiny = TinyModel::new(make(), case, page_positions);
            tiny.poison();
            let what = format_args!("{what}, pages of {page_positions} that held NaN");
            assert_same_rows(what, &tiny.run(&mixed_steps(case.0)), &want, bounds);
        }
    }
}

/// Tests that logits and hidden states do not depend on which of them are requested.
pub fn output_selection<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    for case in ModelFamily::with_formats() {
        let logits = expected_results(make, case);
        let hidden = expected_outputs(make, case, SpanOutput::Hidden);
        let mut tiny = TinyModel::new(make(), case, 64);
        let mixed = step_of(case.0, &[0, 1, 2, 3].map(whole_sequence));
        let encoder_outputs = vec![SpanOutput::Hidden; mixed.spans.len() - 4];
        let selected = |at| SpanOutput::Selected { at, len: 2 };
        for (round, decoder_outputs) in [
            [SpanOutput::Hidden, SpanOutput::Last, SpanOutput::All, selected(0)],
            [selected(0), SpanOutput::Hidden, SpanOutput::Last, SpanOutput::None],
            [SpanOutput::Last, selected(2), SpanOutput::Hidden, SpanOutput::Hidden],
        ]
        .into_iter()
        .enumerate()
        {
            let outputs = encoder_outputs.iter().copied().chain(decoder_outputs).collect();
            tiny.book = PageBook::scattered(64);
            let got = tiny.run(&[ModelStep { outputs, selected_rows: vec![7, 44, 0, 31], ..mixed.clone() }]);
            let (got_logits, got_hidden): (RowResults, RowResults) =
                got.into_iter().partition(|(key, _)| logits.contains_key(key));
            let what = format_args!("{}, outputs {round}", describe_case(case));
            assert_eq!(got_logits.len(), [4, 3, 3][round], "{what}: rows with logits");
            assert_same_rows(what, &got_logits, &logits, bounds);
            assert_same_rows(what, &got_hidden, &hidden, bounds);
        }
    }
}

/// Lengths of the test sequences. The slot of a sequence is its number, unless moved.
const LENGTHS: [usize; 4] = [70, 33, 1, 45];

/// Describes a case.
fn describe_case((family, ty): (ModelFamily, QuantType)) -> String {
    format!("{ty} model, {}", family.name)
}

/// Returns a span of the whole sequence of a slot.
fn whole_sequence(slot: u32) -> TestSpan {
    TestSpan::given(slot, 0, LENGTHS[slot as usize])
}

/// Returns the expected results: each sequence alone, in one span, on pages of 64.
fn expected_results<B: Backend>(make: &impl Fn() -> B, case: (ModelFamily, QuantType)) -> RowResults {
    expected_outputs(make, case, SpanOutput::All)
}

/// Returns the results of each sequence alone, with the given output.
fn expected_outputs<B: Backend>(
    make: &impl Fn() -> B,
    case: (ModelFamily, QuantType),
    output: SpanOutput,
) -> RowResults {
    let steps: Vec<ModelStep> = (0..4)
        .map(|slot| step_of(case.0, &[whole_sequence(slot)]))
        .map(|step| ModelStep { outputs: vec![output; step.spans.len()], ..step })
        .collect();
    TinyModel::new(make(), case, 64).run(&steps)
}

/// Returns a step of these spans. In a model with an encoder, the first span of a sequence is preceded by its
/// encoder input.
pub(super) fn step_of(family: ModelFamily, pieces: &[TestSpan]) -> ModelStep {
    let is_first = |piece: &&TestSpan| piece.start == 0 && piece.kind == TestSpanKind::Given;
    let encoder_inputs = pieces.iter().filter(is_first).map(|piece| TestSpan {
        len: encoder_len(piece.sequence),
        kind: TestSpanKind::EncoderInput,
        ..*piece
    });
    let encoder_inputs = encoder_inputs.filter(|input| family.has_encoder && input.len > 0);
    ModelStep { spans: encoder_inputs.chain(pieces.iter().copied()).collect(), ..ModelStep::default() }
}

/// Returns steps with all sequences: chunks, generated tokens and holes together, in varying order.
pub(super) fn mixed_steps(family: ModelFamily) -> Vec<ModelStep> {
    let steps = [
        vec![TestSpan::given(3, 0, 32), TestSpan::given(0, 0, 33), TestSpan::hole(6)],
        vec![TestSpan::given(1, 0, 31), TestSpan::given(0, 33, 31), TestSpan::last(3, 32)],
        vec![
            TestSpan::last(0, 64),
            TestSpan::last(1, 31),
            TestSpan::hole(7),
            TestSpan::given(2, 0, 1),
            TestSpan::last(3, 33),
        ],
        vec![TestSpan::given(3, 34, 11), TestSpan::last(1, 32), TestSpan::given(0, 65, 4)],
        vec![TestSpan::last(0, 69)],
    ];
    steps.map(|pieces| step_of(family, &pieces)).into()
}

/// Returns steps with one sequence, one token at a time.
fn token_by_token(family: ModelFamily, slot: u32) -> impl Iterator<Item = ModelStep> {
    let first = TestSpan::given(slot, 0, 1);
    let rest = (1..LENGTHS[slot as usize]).map(move |position| TestSpan::last(slot, position));
    std::iter::once(first).chain(rest).map(move |piece| step_of(family, &[piece]))
}
