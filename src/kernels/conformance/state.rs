//! Tests of buffers, slots and output rows.

use super::inputs::*;
use super::rig::*;
use super::spans::*;
use mainstem_kernels::backend::{Backend, KvTable, SamplingInputs};
use mainstem_kernels::batch::{
    SampleMode, SamplingParams, SlotMove, SpanOutput, SpanStack, StepBatch, StepOutput, TableUpdate,
};
use mainstem_kernels::late::LateInputs;
use mainstem_kernels::quant::QuantType;
use std::sync::Arc;

/// Tests that new buffers are zero, and that downloads return uploads, at any offset.
pub fn buffers<B: Backend>(make: &impl Fn() -> B) {
    let mut backend = make();
    assert!(!backend.describe().is_empty());
    for len in [1, 3, 64, 4097, 1 << 20] {
        let mut buf = backend.alloc(len).expect("memory for a small buffer");
        let mut expected = vec![0u8; len];
        let mut got = vec![1u8; len];
        backend.download(&buf, 0, &mut got);
        assert!(got == expected, "alloc of {len} bytes: not zero");
        for (round, offset) in [0, len / 3, len - 1].into_iter().enumerate() {
            let count = (len - offset).div_ceil(round + 1);
            let bytes: Vec<u8> = (0..count).map(|i| (i * 7 + round + 1) as u8).collect();
            expected[offset..][..count].copy_from_slice(&bytes);
            backend.upload(&mut buf, offset, &bytes);
            backend.download(&buf, 0, &mut got);
            assert!(got == expected, "upload of {count} bytes to {offset} of {len}");
            let mut part = vec![0; count];
            backend.download(&buf, offset, &mut part);
            assert!(part == bytes, "download of {count} bytes from {offset} of {len}");
        }
    }
}

/// Tests that a backend counts the memory of live buffers, its own scratch included, and of no others.
pub fn allocated_bytes<B: Backend>(make: &impl Fn() -> B) {
    let mut backend = make();
    let before = backend.allocated_bytes();
    let other = make().alloc(1 << 16).expect("memory for a small buffer");
    let [small, large] = [1000, 1 << 20].map(|bytes| backend.alloc(bytes).expect("memory for a buffer"));
    assert_eq!(backend.allocated_bytes() - before, 1000 + (1 << 20));
    drop((other, large));
    assert_eq!(backend.allocated_bytes() - before, 1000);
    let matrix = vec![0; QuantType::Q8_0.bytes(64).expect("whole blocks") * 24];
    let weight = backend.upload_weight(QuantType::Q8_0, 24, 64, &matrix).expect("memory for a small matrix");
    assert_eq!(backend.allocated_bytes() - before - 1000, weight.packed_layout(backend.sizes()).bytes);
    drop((small, weight));
    assert_eq!(backend.allocated_bytes(), before);
}

/// Tests that steps begin and end in turn: a step that begins within another, or ends twice, is a bug.
pub fn step_brackets<B: Backend>(make: &impl Fn() -> B) {
    let rig = || {
        let mut rig = Rig::new(make(), limits(32));
        rig.begin_rows(1);
        rig.backend
    };
    let panics = |misuse: fn(&mut B)| {
        let mut backend = rig();
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| misuse(&mut backend))).is_err()
    };
    assert!(panics(|backend| backend.begin_step(&StepBatch::default())), "a step within a step");
    assert!(panics(|backend| _ = [backend.end_step(), backend.end_step()]), "a step that ends twice");
    let mut backend = rig();
    backend.end_step();
    backend.begin_step(&StepBatch::default());
    let times = backend.end_step();
    assert_eq!(times.sample, std::time::Duration::ZERO, "nothing was sampled in this step");
}

/// Tests that the last token of a slot follows sampling and moves, but neither scoring nor holes; and that
/// page tables follow updates and moves.
pub fn slot_state<B: Backend>(make: &impl Fn() -> B) {
    let mut rig = Rig::new(make(), limits(32));
    let width = 7;
    let vocab = rig.limits.vocab;
    let table = rig.weight(QuantType::F32, vocab, &noise(1, vocab * width));
    let scored =
        |token| SamplingParams { mode: SampleMode::Score(token), logprob: true, ..SamplingParams::GREEDY };

    let first: Vec<TestSpan> = (0..4).map(|slot| TestSpan::given(slot, 0, 1)).collect();
    rig.sample_tokens(&first, &[10, 11, 12, 13], &[SamplingParams::GREEDY; 4], &[]);
    let second =
        [TestSpan::given(0, 1, 1), TestSpan::last(1, 1), TestSpan::hole(2), TestSpan::given(3, 1, 3)];
    let mut samples = [SamplingParams::GREEDY; 6];
    samples[1] = scored(21);
    let out = rig.sample_tokens(&second, &[20, 30, 22, 23, 24, 25], &samples, &[]);
    let tokens: Vec<u32> = out.tokens.iter().map(|row| row.token).collect();
    assert_eq!(tokens, [20, 21, 22, 23, 24, 25], "tokens of a step that samples and scores");

    let move_to = |from, to| SlotMove { from, to };
    let third = [TestSpan::last(2, 2), TestSpan::last(7, 2), TestSpan::last(6, 2), TestSpan::last(3, 4)];
    rig.sample_tokens(&third, &[0; 4], &[SamplingParams::GREEDY; 4], &[move_to(0, 7), move_to(1, 6)]);
    let mut x = rig.output(4 * width);
    rig.backend.embed(&table, 0, &mut x);
    let x = rig.read(&x, 4 * width, format_args!("embed of last tokens"));
    for (row, token) in [12, 20, 11, 25].into_iter().enumerate() {
        let expected = &noise(1, vocab * width)[token * width..][..width];
        assert_eq!(
            &x[row * width..][..width],
            expected,
            "embedded last token of row {row}, {token} expected"
        );
    }
    page_tables(&mut rig);
}

/// Tests page tables. Own tables have 16 entries here, cross tables 4.
fn page_tables<B: Backend>(rig: &mut Rig<B>) {
    let (own, cross) = (KvTable::Own, KvTable::Cross);
    let update = |(slot, table, index, page)| TableUpdate { slot, table, index, page };
    let updates = [(1, own, 0, 9), (1, own, 3, 4), (1, cross, 3, 5), (5, own, 15, 63), (5, cross, 0, 62)];
    let tables = updates.into_iter().chain([(1, own, 0, 8)]).map(update).collect();
    let batch = || build_batch(&[TestSpan::hole(7)], SpanOutput::None, &mut PageBook::contiguous(32));
    rig.begin(StepBatch { table_updates: tables, ..batch() });
    let moves = vec![SlotMove { from: 1, to: 2 }];
    // Updates are applied after moves, so these are for the target.
    let tables = [(2, own, 1, 33), (2, cross, 0, 34)].map(update).to_vec();
    rig.begin(StepBatch { moves, table_updates: tables, ..batch() });
    let moved = [(2, own, 0, 8), (2, own, 1, 33), (2, own, 3, 4), (2, cross, 0, 34), (2, cross, 3, 5)];
    for (slot, table, index, page) in updates[1..].iter().copied().chain(moved) {
        let got = rig.backend.page_table(slot, table)[index as usize];
        assert_eq!(got, page, "{table:?} table of slot {slot}, entry {index}");
    }
}

/// Returns a batch with spans of both stacks and outputs of every kind.
fn mixed_outputs() -> StepBatch {
    let selected = |at, len| SpanOutput::Selected { at, len };
    let spans = [
        (TestSpan::encoder_input(1), selected(3, 2)),
        (TestSpan::encoder_input(0), SpanOutput::Hidden),
        (TestSpan::given(3, 7, 5), SpanOutput::Last),
        (TestSpan::hole(1), SpanOutput::None),
        (TestSpan::given(0, 0, 20), selected(0, 3)),
        (TestSpan::last(2, 9), SpanOutput::All),
        (TestSpan::given(5, 0, 9), SpanOutput::Hidden),
    ];
    let mut batch =
        build_batch(&spans.map(|(piece, _)| piece), SpanOutput::None, &mut PageBook::scattered(32));
    for (span, (_, output)) in batch.spans.iter_mut().zip(spans) {
        span.output = output;
    }
    batch.selected_rows = vec![0, 7, 19, 3, 69];
    sample_all_greedily(&mut batch);
    batch
}

/// Tests that blocks of output rows are gathered unchanged, whatever spans they belong to, stack by stack;
/// and that a step begins with the rows of the decoder, whichever stack was selected last.
pub fn gather<B: Backend>(make: &impl Fn() -> B) {
    let mut rig = Rig::new(make(), limits(32));
    for width in WIDTHS {
        rig.begin(mixed_outputs());
        assert_gather(&mut rig, width, "decoder", 36, &[4, 6, 13, 25, 26]);
        assert_eq!(rig.backend.select_stack(SpanStack::Decoder), 36, "rows of the decoder");
        assert_eq!(rig.backend.select_stack(SpanStack::Encoder), 115, "rows of the encoder");
        assert_gather(&mut rig, width, "encoder", 115, &[3, 69]);
    }
}

/// Tests the gathering of output rows `outputs` among `rows` current rows.
fn assert_gather<B: Backend>(rig: &mut Rig<B>, width: usize, stack: &str, rows: usize, outputs: &[usize]) {
    let values = noise(3, rows * width);
    let x = rig.input(&values);
    for range in [0..outputs.len(), 0..1, 1..outputs.len(), 1..1] {
        let mut y = rig.output(range.len() * width);
        rig.backend.gather_output_rows(range.clone(), width, &x, &mut y);
        let what = format_args!("gather of output rows {range:?} of the {stack}, width {width}");
        let got = rig.read(&y, range.len() * width, what);
        let rows = outputs[range.clone()].iter().flat_map(|row| &values[row * width..][..width]);
        assert_same(what, &got, &rows.copied().collect::<Vec<f32>>(), 0.0);
    }
}

/// Tests that the output rows of each stack have their own sampling parameters and late inputs.
pub fn samples_by_stack<B: Backend>(make: &impl Fn() -> B) {
    let mut rig = Rig::new(make(), limits(32));
    let score = |token| SamplingParams { mode: SampleMode::Score(token), ..SamplingParams::GREEDY };
    let drawn = SamplingParams { mode: SampleMode::Host, ..SamplingParams::GREEDY };
    let logits = rig.input(&noise(14, 5 * rig.limits.vocab));
    for sampling in [(10..17).map(score).collect(), vec![drawn; 7]] {
        let late = Arc::new(LateInputs::default());
        (0..7).for_each(|row| late.draw_with(row, move |_, sender| sender.send(10 + row as u32)));
        rig.begin(StepBatch { sampling, ..mixed_outputs() });
        let tokens = [(SpanStack::Decoder, &[12, 13, 14, 15, 16][..]), (SpanStack::Encoder, &[10, 11])];
        for (stack, tokens) in tokens {
            let mut out = StepOutput::with_capacity(&rig.limits);
            let inputs = SamplingInputs { late: Some(&late), ..SamplingInputs::default() };
            rig.backend.select_stack(stack);
            rig.backend.sample(0..1, &logits, inputs, &mut out);
            rig.backend.sample(1..tokens.len(), &logits, inputs, &mut out);
            let got: Vec<u32> = out.tokens.iter().map(|row| row.token).collect();
            assert_eq!(got, tokens, "tokens of the {stack:?}");
        }
    }
}

/// Tests that hidden states are appended unchanged.
pub fn hidden<B: Backend>(make: &impl Fn() -> B) {
    let mut rig = Rig::new(make(), limits(32));
    let width = 33;
    rig.begin(mixed_outputs());
    let values = noise(15, 40 * width);
    let x = rig.input(&values);
    let mut out = StepOutput::with_capacity(&rig.limits);
    for rows in [27..36, 0..1, 5..5, 0..40] {
        rig.backend.append_hidden(rows, width, &x, &mut out);
    }
    let row = |row: usize| &values[row * width..][..width];
    let want: Vec<f32> = (27..36).chain([0]).chain(0..40).flat_map(row).copied().collect();
    assert_same(format_args!("hidden states"), &out.hidden, &want, 0.0);
}
