//! Between `Run` and its answer nothing is allocated, on any thread: a counting allocator watches whole steps
//! of a real model. A binary of its own, because the allocator is the process's.

use mainstem::model::ModelSource;
use mainstem::model::executor::{Executor, KvPlan, ModelExecutor};
use mainstem_kernels::cpu::{CpuBackend, CpuConfig, Isa};
use mainstem_kernels::{
    QuantType, SampleMode, SampleRow, SlotMove, Span, SpanModel, SpanTable, SpanTokens, StepBatch,
    StepLimits, StepOutput, TableUpdate, Want,
};
use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is handed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the caller's promise is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is the same.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const SLOTS: u32 = 4;

fn span(slot: u32, start: u32, tokens: SpanTokens, table: SpanTable, want: Want) -> Span {
    Span { model: SpanModel::Target, slot, start, tokens, table, want }
}

/// Whole prompts, chunks, decoded rows, a hole, a move, scores and draws of every kind.
fn steps(limits: &StepLimits) -> Vec<StepBatch> {
    let greedy = SampleRow { logprob: true, top_logprobs: 5, ..SampleRow::GREEDY };
    let drawn = SampleRow { temperature: 0.8, top_k: 30, top_p: 0.9, min_p: 0.01, seed: 3, ..greedy };
    let plain = SampleRow { temperature: 1.0, ..SampleRow::GREEDY };
    let mut first = StepBatch::with_capacity(limits);
    for slot in 0..SLOTS {
        first.tables.extend((0..4).map(|index| TableUpdate { slot, index, page: 1 + slot * 4 + index }));
    }
    first.tokens.extend(3..83);
    let given = |at, len| SpanTokens::Given { at, len };
    first.spans.push(span(0, 0, given(0, 40), SpanTable::Own, Want::Last));
    first.spans.push(span(1, 0, given(40, 30), SpanTable::Own, Want::All));
    first.spans.push(span(2, 0, given(70, 10), SpanTable::Own, Want::None));
    first.samples.push(drawn);
    first.samples.extend((0..29).map(|i| SampleRow { mode: SampleMode::Score(5 + i), ..greedy }));
    first.samples.push(greedy);
    let mut second = StepBatch::with_capacity(limits);
    second.moves.push(SlotMove { from: 1, to: 3 });
    second.tokens.extend([9, 8, 7]);
    second.spans.push(span(0, 40, SpanTokens::Last, SpanTable::Own, Want::Last));
    second.spans.push(span(1, 0, SpanTokens::Last, SpanTable::Sink, Want::Last));
    second.spans.push(span(3, 30, SpanTokens::Last, SpanTable::Own, Want::Last));
    second.spans.push(span(2, 10, given(0, 3), SpanTable::Own, Want::Last));
    second.samples.extend([plain, SampleRow::GREEDY, drawn, greedy]);
    vec![first, second]
}

fn main() {
    a_step_allocates_nothing();
    println!("test a_step_allocates_nothing ... ok");
}

fn a_step_allocates_nothing() {
    let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/gqa");
    let source = ModelSource::open(&fixture, None).expect("the fixture opens");
    let limits = StepLimits {
        slots: SLOTS as usize,
        rows: 96,
        logit_rows: 8,
        positions: 128,
        page_positions: 32,
        top_logprobs: 5,
        vocab: source.spec.vocab,
    };
    let backend = CpuBackend::new(CpuConfig { threads: 2, isa: Isa::Auto }).expect("the CPU is there");
    let kv = KvPlan { ty: QuantType::F16, pages: 1 + SLOTS as usize * 4 };
    let mut executor = ModelExecutor::new(backend, &source, kv, limits).expect("the fixture loads");
    let mut output = StepOutput::with_capacity(&limits);
    let mut batches = steps(&limits);
    for round in 0..20 {
        for (number, batch) in batches.iter_mut().enumerate() {
            batch.step = 1 + round * 2 + number as u64;
            let before = ALLOCATIONS.load(Ordering::SeqCst);
            executor.run(batch, &mut output).expect("the step runs");
            let made = ALLOCATIONS.load(Ordering::SeqCst) - before;
            assert_eq!(made, 0, "round {round}, step {number}");
            assert_eq!(output.rows.len(), batch.samples.len());
        }
    }
}
