//! Tests that all memory is allocated at start, in the announced amount: between `Run` and its answer, no
//! thread allocates from the global allocator, which is counted here, or in device buffers. This is a
//! separate binary because the global allocator is per process.

#[path = "group.rs"]
mod group;
#[path = "tokenizing.rs"]
mod tokenizing;

use mainstem::model::Shard;
use mainstem::model::executor::{
    Executor, ExecutorReport, KvCacheConfig, ModelExecutor, estimate_report, page_bytes,
};
use mainstem::model::offload::{CacheOffload, Offload, Residency, StorePlace, TierRules};
use mainstem::model::{ModelRef, ModelSource};
use mainstem::quantize::WeightRules;
use mainstem_kernels::ActivationPrecision;
use mainstem_kernels::cpu::{CpuBackend, CpuConfig, Isa};
use mainstem_kernels::reference::Reference;
use mainstem_kernels::{
    Aborted, ActivationHandoff, Backend, Collective, DraftSpan, Fraction, HandoffPorts, HostBuf, KvTable,
    LateInputs, PageCopy, QuantType, SampleMode, SamplingParams, SlotMove, Span, SpanModel, SpanOutput,
    SpanStack, SpanTable, SpanTokens, StepBatch, StepLimits, StepOutput, TableUpdate,
};
use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is forwarded unchanged to the system allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
        group::allocated();
        tokenizing::allocated(layout.size());
        // SAFETY: the caller's promise is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        tokenizing::freed(layout.size());
        // SAFETY: the caller's promise is the same.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const SLOTS: u32 = 4;
const KV: KvCacheConfig =
    KvCacheConfig { ty: QuantType::F16, pages: 1 + SLOTS as usize * 4, window_pages: 0 };

fn span(slot: u32, start: u32, tokens: SpanTokens, table: SpanTable, want: SpanOutput) -> Span {
    let (model, stack) = (SpanModel::Target, SpanStack::Decoder);
    Span { model, stack, slot, start, tokens, table, reserved: 128, encoder_len: 0, output: want }
}

/// Whole prompts, chunks, decoded rows, a hole, a move, scores and all sampling modes, with and without
/// biases and late inputs.
fn steps(limits: &StepLimits) -> Vec<StepBatch> {
    let greedy = SamplingParams { logprob: true, top_logprobs: 5, ..SamplingParams::GREEDY };
    let random = SamplingParams { temperature: 0.8, top_k: 30, top_p: 0.9, min_p: 0.01, seed: 3, ..greedy };
    let plain = SamplingParams { temperature: 1.0, ..SamplingParams::GREEDY };
    let mut first = StepBatch::with_capacity(limits);
    for slot in 0..SLOTS {
        let entry = |index| TableUpdate { slot, table: KvTable::Own, index, page: 1 + slot * 4 + index };
        first.table_updates.extend((0..4).map(entry));
    }
    first.tokens.extend(3..83);
    let given = |at, len| SpanTokens::Given { at, len };
    first.spans.push(span(0, 0, given(0, 40), SpanTable::Own, SpanOutput::Last));
    first.spans.push(span(1, 0, given(40, 30), SpanTable::Own, SpanOutput::All));
    first.spans.push(span(2, 0, given(70, 10), SpanTable::Own, SpanOutput::None));
    first.sampling.push(random);
    first.sampling.extend((0..29).map(|i| SamplingParams { mode: SampleMode::Score(5 + i), ..greedy }));
    first.sampling.push(greedy);
    let mut second = StepBatch::with_capacity(limits);
    second.moves.push(SlotMove { from: 1, to: 3 });
    second.tokens.extend([9, 8, 7]);
    second.spans.push(span(0, 40, SpanTokens::Last, SpanTable::Own, SpanOutput::Last));
    second.spans.push(span(1, 0, SpanTokens::Last, SpanTable::Null, SpanOutput::Last));
    second.spans.push(span(3, 30, SpanTokens::Last, SpanTable::Own, SpanOutput::Last));
    second.spans.push(span(2, 10, given(0, 3), SpanTable::Own, SpanOutput::Last));
    second.logit_biases.extend((0..2 * limits.vocab as u32).map(|id| (id / 2, 1.0 - id as f32)));
    let biased = |row, bias_at| SamplingParams { bias_at, bias_len: limits.vocab as u32, ..row };
    second.sampling.extend([plain, SamplingParams::GREEDY, biased(random, 0), biased(greedy, 8)]);
    let masked = SamplingParams { masked: true, ..random };
    let host = SamplingParams { mode: SampleMode::Host, ..greedy };
    let third = StepBatch {
        sampling: vec![masked, host, SamplingParams { masked: true, ..biased(greedy, 9) }, greedy],
        moves: Vec::new(),
        ..second.clone()
    };
    vec![first, second, third]
}

fn open(fixture: &str) -> ModelSource {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(fixture);
    ModelSource::open(&ModelRef::Path(folder), None).expect("the fixture opens")
}

fn limits(source: &ModelSource) -> StepLimits {
    StepLimits {
        slots: SLOTS as usize,
        rows: 96,
        batch_rows: usize::MAX,
        logit_rows: 8,
        positions: 128,
        encoder_positions: 0,
        page_positions: 32,
        window: None,
        top_logprobs: 5,
        vocab: source.spec.vocab,
        hidden: 0,
        drafts: 0,
        draft_logits: false,
        counts_tokens: false,
        attended_fraction: Fraction::ONE,
    }
}

fn main() {
    a_step_allocates_nothing();
    println!("test a_step_allocates_nothing ... ok");
    what_is_allocated_is_what_the_formulas_say();
    println!("test what_is_allocated_is_what_the_formulas_say ... ok");
    every_family_allocates_what_was_estimated();
    println!("test every_family_allocates_what_was_estimated ... ok");
    a_step_of_a_model_with_an_encoder_allocates_nothing();
    println!("test a_step_of_a_model_with_an_encoder_allocates_nothing ... ok");
    group::devices_of_a_group_allocate_nothing_for_a_step(limits(&open("gqa")));
    println!("test devices_of_a_group_allocate_nothing_for_a_step ... ok");
    parts_of_a_model_allocate_what_was_foretold_and_nothing_in_a_step();
    println!("test parts_of_a_model_allocate_what_was_foretold_and_nothing_in_a_step ... ok");
    weights_read_from_disk_are_in_the_forecast_and_allocate_nothing_in_a_step();
    println!("test weights_read_from_disk_are_in_the_forecast_and_allocate_nothing_in_a_step ... ok");
    drafts_allocate_what_was_foretold_and_nothing_in_a_step();
    println!("test drafts_allocate_what_was_foretold_and_nothing_in_a_step ... ok");
    tokenizing::texts_take_no_more_than_is_counted();
    println!("test texts_take_no_more_than_is_counted ... ok");
}

/// The forecast sizes equal the actual allocations to the byte, for the fast backend, whose pages have
/// padding in one of these fixtures, and for the oracle.
fn what_is_allocated_is_what_the_formulas_say() {
    for fixture in ["f16", "gqa", "gguf/q4_0.gguf"] {
        let source = open(fixture);
        check_report(fixture, cpu, &source, KV);
    }
    for ty in [QuantType::Q8_0, QuantType::G4_B64] {
        check_report(&format!("a cache of {ty}"), cpu, &open("odd_head_dim"), KvCacheConfig { ty, ..KV });
    }
    check_report("f16 on the oracle", Reference::new, &open("f16"), KV);
}

/// Neither the device's threads nor those that read weights, or read and write the KV cache, allocate. The
/// first executor writes the store.
fn weights_read_from_disk_are_in_the_forecast_and_allocate_nothing_in_a_step() {
    let folder = std::env::temp_dir().join(format!("mainstem-allocator-{}", std::process::id()));
    for (fixture, fraction) in
        [("gqa", 0.0), ("gqa", 0.5), ("gguf/q4_0.gguf", 0.2), ("gqa", 1.0), ("families/qwen2_moe", 0.1)]
    {
        let (what, mut source) = (format!("{fixture}, {fraction} in memory"), open(fixture));
        source.offload = Some(Offload {
            resident: Residency(fraction),
            tiers: TierRules { host: 0.4, ..TierRules::default() },
            place: StorePlace(folder.clone()),
            overlaps: true,
            max_slab: 4 << 10,
        });
        source.link_rate = Some(1e12);
        source.cache_offload = Some(CacheOffload {
            resident: Residency(fraction / 2.0),
            host: 0.6,
            folder: folder.clone(),
            overlaps: true,
            attends_on_host: fraction == 0.5,
        });
        // Generated tokens fetch V of caches in host memory.
        let attended_fraction = Fraction::new(1.0 - fraction / 2.0 - 0.1).expect("a valid fraction");
        let limits = StepLimits { batch_rows: 16, attended_fraction, ..limits(&source) };
        assert_estimated(&what, cpu(), &source);
        let whole = Shard::whole(&source.spec);
        let mut executor = ModelExecutor::new(cpu(), &source, &whole, KV, limits).expect("the fixture loads");
        let mut output = StepOutput::with_capacity(&limits);
        for (number, mut batch) in (1..).zip(steps(&limits).into_iter().take(2).cycle().take(6)) {
            batch.step = number;
            let before = ALLOCATIONS.load(Ordering::SeqCst);
            executor.run(&batch, HandoffPorts::default(), &mut output).expect("the step runs");
            assert_eq!(ALLOCATIONS.load(Ordering::SeqCst) - before, 0, "{what}, step {number}");
        }
    }
    std::fs::remove_dir_all(&folder).expect("it was written");
}

fn check_report<B: Backend>(what: &str, backend: fn() -> B, source: &ModelSource, kv: KvCacheConfig) {
    let limits = limits(source);
    let page = page_bytes(&source.spec, kv.ty, &limits).expect("a page is small");
    let (report, all) = report_of(backend(), source, kv);
    // Matrices as stored, vectors in F32, and a cosine and a sine for each pair of a head.
    let tensors = report.tensors.iter().map(|tensor| match tensor.shape.as_slice() {
        [width] => width * size_of::<f32>(),
        _ => tensor.bytes,
    });
    let rope = limits.positions * source.spec.last_stack().ropes[0].dims * size_of::<f32>();
    assert_eq!(report.weight_bytes, tensors.sum::<usize>() + rope, "{what}: weights");
    assert_eq!(report.kv_bytes, page.of(kv.pages, kv.window_pages), "{what}: cache");
    let parts = report.weight_bytes + report.kv_bytes + report.activation_bytes + report.step_bytes;
    assert_eq!(parts, all, "{what}: all of it");
    let forecast = estimate_report(backend().sizes(), source, &Shard::whole(&source.spec), kv, limits)
        .expect("the fixture is open");
    assert_eq!(forecast, report, "{what}: the forecast");
}

fn cpu() -> CpuBackend {
    cpu_with(ActivationPrecision::Int8)
}

fn cpu_in_f32() -> CpuBackend {
    cpu_with(ActivationPrecision::F32)
}

fn cpu_with(activation_precision: ActivationPrecision) -> CpuBackend {
    CpuBackend::new(CpuConfig { threads: 2, isa: Isa::Auto, activation_precision }).expect("the CPU is there")
}

/// Returns a model's report, and the bytes of all its buffers.
fn report_of<B: Backend>(backend: B, source: &ModelSource, kv: KvCacheConfig) -> (ExecutorReport, usize) {
    let before = HostBuf::total_allocated();
    let executor = ModelExecutor::new(backend, source, &Shard::whole(&source.spec), kv, limits(source))
        .expect("the fixture loads");
    (executor.report(), HostBuf::total_allocated() - before)
}

/// The estimates of every family, and of matrices that are converted at loading, equal the allocations to the
/// byte, on CPU devices with both precisions of activations and on the oracle.
fn every_family_allocates_what_was_estimated() {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let models = |folder: &str, is_model: fn(&Path) -> bool| {
        let entries = fixtures.join(folder).read_dir().expect("the fixtures are there");
        entries.map(|entry| entry.expect("it is listed").path()).filter(move |path| is_model(path))
    };
    let files = models("gguf", |path| path.extension().is_some_and(|extension| extension == "gguf"));
    let mut count = 0;
    for path in models("families", |path| path.join("config.json").exists()).chain(files) {
        let mut source = ModelSource::open(&ModelRef::Path(path.clone()), None).expect("the fixture opens");
        for rules in ["", "*=q8_0", "*=bf16"] {
            source.weight_rules = WeightRules::parse(rules).expect("a valid rule");
            let what = format!("{} with '{rules}'", path.display());
            assert_estimated(&what, cpu(), &source);
            assert_estimated(&what, cpu_in_f32(), &source);
            assert_estimated(&what, Reference::new(), &source);
            count += 1;
        }
    }
    assert!(count > 100, "only {count} models were found");
}

fn assert_estimated<B: Backend>(what: &str, backend: B, source: &ModelSource) {
    let limits = StepLimits {
        positions: if source.spec.decoder.is_some() { 64 } else { 0 },
        encoder_positions: if source.spec.encoder.is_some() { 40 } else { 0 },
        ..limits(source)
    };
    let shard = Shard::whole(&source.spec);
    let estimate = estimate_report(backend.sizes(), source, &shard, KV, limits).expect("it is counted");
    let before = HostBuf::total_allocated();
    let executor = ModelExecutor::new(backend, source, &shard, KV, limits).expect("the fixture loads");
    assert_eq!(estimate, executor.report(), "{what}");
    // Of the host's memory, these are buffers.
    let on_host = estimate.cache_offload.map_or(0, |caches| caches.attended_bytes);
    assert_eq!(estimate.total_bytes() + on_host, HostBuf::total_allocated() - before, "{what}");
}

fn a_step_of_a_model_with_an_encoder_allocates_nothing() {
    for fixture in ["families/bert", "families/deberta_v3", "families/m2m100"] {
        let source = open(fixture);
        let has_decoder = source.spec.decoder.is_some();
        let limits = StepLimits {
            positions: if has_decoder { 64 } else { 0 },
            encoder_positions: 40,
            hidden: if has_decoder { 0 } else { source.spec.hidden },
            ..limits(&source)
        };
        let mut executor = ModelExecutor::new(cpu(), &source, &Shard::whole(&source.spec), KV, limits)
            .expect("the fixture loads");
        let mut output = StepOutput::with_capacity(&limits);
        let mut batch = encoder_batch(&limits, has_decoder);
        for step in 1..10 {
            batch.step = step;
            let before = ALLOCATIONS.load(Ordering::SeqCst);
            executor.run(&batch, HandoffPorts::default(), &mut output).expect("the step runs");
            assert_eq!(ALLOCATIONS.load(Ordering::SeqCst) - before, 0, "{fixture}, step {step}");
        }
    }
}

/// Two encoder inputs, with the rows of a decoder or of an encoder-only model.
fn encoder_batch(limits: &StepLimits, has_decoder: bool) -> StepBatch {
    let mut batch = StepBatch::with_capacity(limits);
    batch.tokens.extend(3..73);
    let mut add = |stack, slot, at, len, table, want| {
        let own = span(slot, 0, SpanTokens::Given { at, len }, table, want);
        batch.spans.push(Span { stack, reserved: 64, encoder_len: 35, ..own });
    };
    let wants = [SpanOutput::Hidden, SpanOutput::Selected { at: 0, len: 2 }];
    for (slot, want) in wants.into_iter().enumerate() {
        let want = if has_decoder { SpanOutput::None } else { want };
        add(SpanStack::Encoder, slot as u32, slot as u32 * 35, 35, SpanTable::Scratch, want);
    }
    if has_decoder {
        add(SpanStack::Decoder, 0, 0, 9, SpanTable::Own, SpanOutput::Last);
        add(SpanStack::Decoder, 1, 9, 5, SpanTable::Own, SpanOutput::All);
    }
    batch.selected_rows.extend([3, 30]);
    let entry = |(slot, table)| TableUpdate { slot, table, index: 0, page: 1 + slot };
    let tables = [(0, KvTable::Own), (1, KvTable::Own), (0, KvTable::Cross), (1, KvTable::Cross)];
    batch.table_updates.extend(tables.map(entry).into_iter().filter(|_| has_decoder));
    let row = SamplingParams { mode: SampleMode::Score(7), top_logprobs: 5, ..SamplingParams::GREEDY };
    batch.sampling.extend(vec![row; if has_decoder { 6 } else { 2 }]);
    batch
}

/// A collective without other ranks: the results are meaningless, but the memory use is the same.
struct Deaf {
    rank: usize,
}

/// Ranks per stage.
const RANKS: usize = 2;

impl Collective for Deaf {
    fn rank(&self) -> usize {
        self.rank
    }

    fn rank_count(&self) -> usize {
        RANKS
    }

    fn all_reduce(&mut self, _: &mut [f32]) -> Result<(), Aborted> {
        Ok(())
    }

    fn all_gather(&mut self, _: usize, _: &[usize], _: &[f32], _: &mut [f32]) -> Result<(), Aborted> {
        Ok(())
    }
}

/// Grouped heads, norms over all of them, experts with a shared one, an embedding of another width, an
/// encoder, latent attention.
const PARTED: [&str; 6] = [
    "gqa",
    "families/invented_one",
    "families/qwen2_moe",
    "families/opt_350m",
    "families/m2m100",
    "families/deepseek_v2",
];

/// Two stages of two ranks.
fn parts_of_a_model_allocate_what_was_foretold_and_nothing_in_a_step() {
    for fixture in PARTED {
        let source = open(fixture);
        let has_encoder = source.spec.encoder.is_some();
        let limits = match has_encoder {
            true => StepLimits { positions: 64, encoder_positions: 40, ..limits(&source) },
            false => limits(&source),
        };
        let batches = if has_encoder { vec![encoder_batch(&limits, true)] } else { steps(&limits) };
        let carried = |_| ActivationHandoff::with_capacity(&limits, 4 * source.spec.hidden);
        let mut carried: Vec<ActivationHandoff> = batches.iter().map(carried).collect();
        for (stage, rank) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let what = format!("{fixture}, member {rank} of stage {stage}");
            let shard = shard(&source, stage, rank);
            let mut executor = rank_executor(&what, &source, &shard, limits);
            let mut output = StepOutput::with_capacity(&limits);
            for at in (0..batches.len()).cycle().take(3 * batches.len()) {
                let (batch, carried) = (&batches[at], &mut carried[at]);
                let flow = match (stage, rank) {
                    (0, 0) => HandoffPorts { output: Some(carried), ..HandoffPorts::default() },
                    (0, _) => HandoffPorts::default(),
                    _ => HandoffPorts { input: Some(carried), ..HandoffPorts::default() },
                };
                let before = ALLOCATIONS.load(Ordering::SeqCst);
                executor.run(batch, flow, &mut output).expect("the step runs");
                assert_eq!(ALLOCATIONS.load(Ordering::SeqCst) - before, 0, "{what}");
                let answers = if (stage, rank) == (1, 0) { batch.sampling.len() } else { 0 };
                assert_eq!(output.tokens.len(), answers, "{what}");
            }
        }
    }
}

/// Returns all layers except the last layer of the decoder, or only that one.
fn shard(source: &ModelSource, stage: usize, rank: usize) -> Shard {
    let whole = Shard::whole(&source.spec);
    let (layers, encoder_layers) = (whole.decoder.end, whole.encoder.end);
    let (encoder, decoder) = match stage {
        0 => (0..encoder_layers, 0..layers - 1),
        _ => (encoder_layers..encoder_layers, layers - 1..layers),
    };
    Shard { encoder, decoder, rank, shares: vec![1; RANKS], ..whole }
}

/// Checks that the report of a rank equals its forecast.
fn rank_executor(
    what: &str,
    source: &ModelSource,
    shard: &Shard,
    limits: StepLimits,
) -> ModelExecutor<CpuBackend> {
    let forecast = estimate_report(cpu().sizes(), source, shard, KV, limits).expect("the fixture is open");
    let mut backend = cpu();
    backend.join_stage(Box::new(Deaf { rank: shard.rank }));
    let before = HostBuf::total_allocated();
    let executor = ModelExecutor::new(backend, source, shard, KV, limits).expect("the part loads");
    let report = executor.report();
    assert_eq!(report.total_bytes(), HostBuf::total_allocated() - before, "{what}: all of it");
    assert_eq!(forecast, report, "{what}: the forecast");
    executor
}

fn a_step_allocates_nothing() {
    for fixture in ["gqa", "gguf/q8_0.gguf"] {
        steps_allocate_nothing(fixture);
    }
}

fn steps_allocate_nothing(fixture: &str) {
    let source = open(fixture);
    let limits = limits(&source);
    let mut executor = ModelExecutor::new(cpu(), &source, &Shard::whole(&source.spec), KV, limits)
        .expect("the fixture loads");
    let mut output = StepOutput::with_capacity(&limits);
    let mut batches = steps(&limits);
    let buffers = HostBuf::total_allocated();
    for round in 0..20 {
        for (number, batch) in batches.iter_mut().enumerate() {
            batch.step = 1 + round * 3 + number as u64;
            let late = late_inputs(batch, &limits);
            let flow = HandoffPorts { late: Some(&late), ..HandoffPorts::default() };
            let before = ALLOCATIONS.load(Ordering::SeqCst);
            executor.run(batch, flow, &mut output).expect("the step runs");
            let made = ALLOCATIONS.load(Ordering::SeqCst) - before;
            assert_eq!(
                (made, HostBuf::total_allocated()),
                (0, buffers),
                "{fixture}, round {round}, step {number}"
            );
            assert_eq!(output.tokens.len(), batch.sampling.len());
            assert!(output.tokens.iter().all(|row| row.failure.is_none()));
        }
    }
}

/// A draft model with fewer tokens than its target, and one with quantized weights.
fn drafts_allocate_what_was_foretold_and_nothing_in_a_step() {
    for (target, draft) in [("gqa", "mqa"), ("gguf/q8_0.gguf", "gguf/q8_0.gguf")] {
        let mut source = open(target);
        source.attach_draft(open(draft)).expect("a decoder-only model");
        let limits = StepLimits { drafts: 4, draft_logits: true, ..limits(&source) };
        for (stage, rank) in [(0, 0), (0, 1), (1, 0), (1, 1)] {
            let what = format!("{target} with drafts, member {rank} of stage {stage}");
            rank_executor(&what, &source, &shard(&source, stage, rank), limits);
        }
        let whole = Shard::whole(&source.spec);
        let estimate = estimate_report(cpu().sizes(), &source, &whole, KV, limits).expect("it is counted");
        let before = HostBuf::total_allocated();
        let mut executor = ModelExecutor::new(cpu(), &source, &whole, KV, limits).expect("the fixture loads");
        assert_eq!(estimate, executor.report(), "{target} with drafts");
        assert_eq!(estimate.total_bytes(), HostBuf::total_allocated() - before, "{target} with drafts");
        let mut output = StepOutput::with_capacity(&limits);
        let mut batches = draft_steps(&limits);
        for step in 0..20 {
            let batch = &mut batches[step % 2];
            batch.step = 1 + step as u64;
            let late = late_inputs(batch, &limits);
            let flow = HandoffPorts { late: Some(&late), ..HandoffPorts::default() };
            let before = ALLOCATIONS.load(Ordering::SeqCst);
            executor.run(batch, flow, &mut output).expect("the step runs");
            assert_eq!(ALLOCATIONS.load(Ordering::SeqCst) - before, 0, "{target} with drafts, step {step}");
            assert_eq!(
                (output.tokens.len(), output.drafts.len()),
                (batch.sampling.len(), batch.draft_count())
            );
        }
    }
}

/// Prompts; and drafts of two slots, beside the prompt chunk of another one and a slot without drafts, with
/// biases, a page copy, and rows of all sampling modes that verify them.
fn draft_steps(limits: &StepLimits) -> [StepBatch; 2] {
    let plain = SamplingParams { temperature: 1.0, bias_len: 8, ..SamplingParams::GREEDY };
    let [mut first, mut second] = [(); 2].map(|()| StepBatch::with_capacity(limits));
    let draft =
        |slot, start, tokens, count| DraftSpan { slot, start, tokens, reserved: 128, count, sampling: plain };
    let given = |at, len| SpanTokens::Given { at, len };
    first.tokens.extend(3..83);
    for slot in 0..SLOTS {
        let entry = |index| TableUpdate { slot, table: KvTable::Own, index, page: 1 + slot * 4 + index };
        first.table_updates.extend((0..4).map(entry));
        first.spans.push(span(slot, 0, given(slot * 20, 20), SpanTable::Own, SpanOutput::Last));
        first.drafts.push(draft(slot, 0, given(slot * 20, 20), 0));
        first.sampling.push(SamplingParams::GREEDY);
    }
    second.logit_biases.extend((0..8).map(|id| (id * 30, 1.0)));
    second.draft_logits = true;
    second.page_copies.push(PageCopy { table: KvTable::Own, from: 1, to: 1 + SLOTS * 4 - 1 });
    second.tokens.extend(3..13);
    let generated = |at, len| SpanTokens::Generated { at, len };
    let drafts =
        [(0, generated(0, 2), 4), (1, generated(2, 1), 2), (2, given(4, 6), 0), (3, generated(3, 1), 0)];
    second.drafts.extend(drafts.map(|(slot, tokens, count)| draft(slot, 20, tokens, count)));
    let drafted = |at, len| SpanTokens::Drafted { at, len };
    let spans =
        [(0, 21, drafted(1, 5)), (1, 20, drafted(2, 3)), (2, 20, given(4, 6)), (3, 20, generated(3, 1))];
    for (slot, start, tokens) in spans {
        second.spans.push(span(slot, start, tokens, SpanTable::Own, SpanOutput::All));
    }
    let host = SamplingParams { mode: SampleMode::Host, ..plain };
    let masked = SamplingParams { masked: true, ..plain };
    second.sampling.extend([host, plain, masked].into_iter().cycle().take(15));
    [first, second]
}

/// Supplies the late inputs of a batch.
fn late_inputs(batch: &StepBatch, limits: &StepLimits) -> Arc<LateInputs> {
    let late: Arc<LateInputs> = Arc::default();
    for (row, params) in batch.sampling.iter().enumerate() {
        match params.mode {
            SampleMode::Host => late.draw_with(row, |row, sender| sender.send(row.logits.len() as u32 - 1)),
            _ if params.is_masked() => late.mask_sender(row).send(vec![0xf0; limits.mask_words()].into()),
            _ => {}
        }
    }
    late
}
