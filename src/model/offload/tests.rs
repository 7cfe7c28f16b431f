//! Tests of executors whose weights and KV caches are in the memory of the host, in a store or in a file, of
//! what happens if the disk is slow, hangs or fails, and of experts that are read when rows choose them.

use super::testing::{Access, Gate, Hooked, mixture, mixtures};
use super::{
    Activity, ByStream, CacheOffload, Offload, Residency, SpreadRule, StorePlace, Stream, Tier, TierRules,
    TransferTotals, Transfers,
};
use crate::model::executor::{KvCacheConfig, estimate_report};
use crate::model::spec::MlpSpec;
use crate::model::{Executor, ModelExecutor, ModelRef, ModelSource, Shard};
use crate::testing::Scratch;
use mainstem_kernels::cpu::{CpuBackend, CpuConfig, Isa};
use mainstem_kernels::reference::ReferenceSizes;
use mainstem_kernels::{
    Abort, ActivationPrecision, Fraction, HandoffPorts, KvTable, PageCopy, QuantType, SamplingParams,
    SlotMove, Span, SpanModel, SpanOutput, SpanStack, SpanTable, SpanTokens, StepBatch, StepLimits,
    StepOutput, TableUpdate,
};
use std::collections::HashSet;
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

/// Small enough to divide the matrices of most fixtures.
const SLAB: usize = 4 << 10;
const SLOTS: usize = 4;
const PAGE: usize = 32;
const PAGES: usize = 24;

fn executor(source: &ModelSource, ty: QuantType, batch_rows: usize) -> ModelExecutor<CpuBackend> {
    try_executor(source, ty, limits(source, batch_rows), usize::MAX).unwrap()
}

/// Creates an executor on a device with a memory of so many bytes.
fn try_executor(
    source: &ModelSource,
    ty: QuantType,
    limits: StepLimits,
    memory: usize,
) -> anyhow::Result<ModelExecutor<CpuBackend>> {
    let config = CpuConfig { threads: 1, isa: Isa::Auto, activation_precision: ActivationPrecision::Int8 };
    let kv = KvCacheConfig { ty, pages: PAGES, window_pages: 0 };
    let backend = CpuBackend::new(config).unwrap().with_memory(memory);
    ModelExecutor::new(backend, source, &Shard::whole(&source.spec), kv, limits)
}

fn limits(source: &ModelSource, batch_rows: usize) -> StepLimits {
    StepLimits {
        slots: SLOTS,
        rows: 160,
        batch_rows,
        logit_rows: 4,
        positions: source.spec.context.min(128),
        encoder_positions: 0,
        page_positions: PAGE,
        window: None,
        top_logprobs: 0,
        vocab: source.spec.vocab,
        hidden: 0,
        drafts: 0,
        draft_logits: false,
        counts_tokens: false,
        opening_rows: 0,
        attended_fraction: Fraction::ONE,
    }
}

/// Sequences that come and go, share pages and copy them, and move between slots.
struct Schedule {
    /// State of the random number generator.
    random: u64,
    context: usize,
    vocab: u32,
    /// The pages of each slot's sequence, and its number of positions.
    slots: Vec<Option<(Vec<u32>, usize)>>,
    /// Their state before the step, from which others can begin.
    before: Vec<Option<(Vec<u32>, usize)>>,
    /// Whether the sequence of a slot has a generated token.
    has_token: [bool; SLOTS],
}

impl Schedule {
    fn below(&mut self, end: usize) -> usize {
        self.random = self.random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.random >> 33) as usize % end
    }

    fn free_page(&self, taken: &[u32]) -> Option<u32> {
        let used = |page: &u32| {
            taken.contains(page) || self.slots.iter().flatten().any(|(pages, _)| pages.contains(page))
        };
        (1..PAGES as u32).find(|page| !used(page))
    }

    /// Begins a sequence in a free slot: with all full pages of another one and a copy of the next, or alone.
    fn begin(&mut self, slot: usize, batch: &mut StepBatch) {
        let (mut pages, mut len) = (Vec::new(), 0);
        let from = self.below(SLOTS);
        if let Some((others, known)) = self.before[from].clone() {
            len = self.below(known + 1).min(self.context - 1);
            pages.extend_from_slice(&others[..len / PAGE]);
            if len % PAGE > 0 {
                let Some(to) = self.free_page(&pages) else { return };
                batch.page_copies.push(PageCopy { table: KvTable::Own, from: others[len / PAGE], to });
                pages.push(to);
            }
        }
        let entries = (0..).zip(&pages);
        batch.table_updates.extend(entries.map(|(index, page)| TableUpdate {
            slot: slot as u32,
            table: KvTable::Own,
            index,
            page: *page,
        }));
        self.slots[slot] = Some((pages, len));
        self.has_token[slot] = false;
    }

    /// Adds a chunk of tokens to a sequence, as far as there are pages.
    fn extend(&mut self, slot: usize, batch: &mut StepBatch) {
        let wanted = if self.below(2) == 0 { 1 } else { 1 + self.below(38) };
        let Some((mut pages, start)) = self.slots[slot].clone() else { return };
        let end = (start + wanted).min(self.context);
        while pages.len() * PAGE < end {
            let Some(page) = self.free_page(&pages) else { break };
            let (slot, index) = (slot as u32, pages.len() as u32);
            batch.table_updates.push(TableUpdate { slot, table: KvTable::Own, index, page });
            pages.push(page);
        }
        let end = end.min(pages.len() * PAGE);
        self.slots[slot] = Some((pages, end));
        if end == start {
            return;
        }
        let (at, len) = (batch.tokens.len() as u32, (end - start) as u32);
        let is_generated = std::mem::replace(&mut self.has_token[slot], true) && len == 1;
        let tokens = if is_generated { SpanTokens::Last } else { SpanTokens::Given { at, len } };
        for _ in 0..if is_generated { 0 } else { len } {
            let token = self.below(self.vocab as usize) as u32;
            batch.tokens.push(token);
        }
        batch.spans.push(Span {
            model: SpanModel::Target,
            stack: SpanStack::Decoder,
            slot: slot as u32,
            start: start as u32,
            tokens,
            table: SpanTable::Own,
            reserved: self.context as u32,
            encoder_len: 0,
            output: SpanOutput::Last,
        });
        batch.sampling.push(SamplingParams::GREEDY);
    }

    fn step(&mut self) -> StepBatch {
        let mut batch = StepBatch { return_logits: true, ..StepBatch::default() };
        let [from, to] = [0, 1].map(|_| self.below(SLOTS));
        if self.slots[from].is_some() && self.slots[to].is_none() {
            batch.moves.push(SlotMove { from: from as u32, to: to as u32 });
            self.slots.swap(from, to);
            self.has_token.swap(from, to);
        }
        // Their pages are not taken by others before the next step.
        self.before = self.slots.clone();
        let ends: Vec<usize> = (0..SLOTS).filter(|_| self.below(9) == 0).collect();
        let chunks = self.below(8) > 0;
        for slot in 0..SLOTS {
            if self.slots[slot].is_none() && self.below(2) == 0 {
                self.begin(slot, &mut batch);
            }
            // Some steps have copies only.
            if chunks && self.below(4) > 0 {
                self.extend(slot, &mut batch);
            }
        }
        ends.into_iter().for_each(|slot| self.slots[slot] = None);
        batch
    }
}

fn run(executor: &mut ModelExecutor<CpuBackend>, batch: &StepBatch) -> Result<Vec<u8>, String> {
    let mut out = StepOutput::default();
    let ran = executor.run(batch, HandoffPorts::default(), &mut out);
    ran.map(|()| out.logits).map_err(|error| error.to_string())
}

fn open(fixture: &str) -> ModelSource {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(fixture);
    ModelSource::open(&ModelRef::Path(path), None).unwrap()
}

/// Checks that the results are those of caches in memory, with these parts of them in memory.
fn assert_alike(what: &str, mut source: ModelSource, ty: QuantType, fractions: &[f64], seed: u64) {
    let folder = Scratch::new();
    let mut resident = executor(&source, ty, usize::MAX);
    let mut streamed: Vec<_> = fractions
        .iter()
        .map(|fraction| {
            let resident = Residency(*fraction);
            source.cache_offload = Some(CacheOffload {
                resident,
                host: 0.0,
                folder: folder.path().to_owned(),
                overlaps: *fraction < 0.2,
                attends_on_host: false,
            });
            let executor = executor(&source, ty, 7);
            assert!(executor.report().cache_offload.is_some_and(|caches| caches.file_bytes > 0), "{what}");
            executor
        })
        .collect();
    let (context, vocab) = (source.spec.context.min(128), source.spec.vocab as u32);
    let mut schedule = Schedule {
        random: seed,
        context,
        vocab,
        slots: vec![None; SLOTS],
        before: Vec::new(),
        has_token: [false; SLOTS],
    };
    let mut copies = 0;
    for step in 0..30 {
        let batch = schedule.step();
        copies += batch.page_copies.len();
        let expected = run(&mut resident, &batch).unwrap();
        for (executor, fraction) in streamed.iter_mut().zip(fractions) {
            assert!(run(executor, &batch).unwrap() == expected, "{what}, {fraction} in memory, step {step}");
        }
    }
    assert!(copies > 0, "{what}");
    assert_eq!(folder.path().read_dir().unwrap().count(), 0, "{what}: the file has no name");
}

/// Every kind of decoder layer.
#[test]
fn caches_of_every_family_in_a_file_give_the_same_results() {
    let families = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families");
    let mut count = 0;
    for path in families.read_dir().unwrap().map(|entry| entry.unwrap().path()) {
        if !path.join("config.json").exists() {
            continue;
        }
        let source = ModelSource::open(&ModelRef::Path(path.clone()), None).unwrap();
        if source.spec.encoder.is_none() {
            assert_alike(&path.display().to_string(), source, QuantType::F16, &[0.0, 0.4], count);
            count += 1;
        }
    }
    assert!(count > 30, "{count} models");
}

/// Pages of every size, also such as direct reads and writes cannot have.
#[test]
fn caches_of_every_type_in_a_file_give_the_same_results() {
    for ty in QuantType::kv_cache_types() {
        for (fixture, seed) in [("gqa", 1), ("odd_head_dim", 2), ("gqa", 3)] {
            assert_alike(&format!("{fixture} with {ty}"), open(fixture), ty, &[0.0], seed);
        }
    }
}

/// The step fails with the cause.
#[test]
fn a_cache_that_cannot_be_read_fails_a_step() {
    let (folder, is_broken) = (Scratch::new(), Arc::new(AtomicBool::new(false)));
    let state = is_broken.clone();
    let _hook = Hooked::new(folder.path(), move |access, _| match access {
        Access::Read if state.load(Ordering::SeqCst) => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(()),
    });
    let mut source = open("gqa");
    Parts::new([1.0, 0.0], [0.0, 0.0]).place(&mut source, folder.path(), true);
    let mut executor = executor(&source, QuantType::F16, usize::MAX);
    let mut steps = schedule(&source, 5);
    (0..6).for_each(|_| _ = run(&mut executor, &steps.step()).unwrap());
    is_broken.store(true, Ordering::SeqCst);
    let failed = (0..3).find_map(|_| run(&mut executor, &steps.step()).err()).unwrap();
    assert!(failed.starts_with("device fault: cannot read the KV cache from its file: "), "{failed}");
}

/// The fractions of weights and of KV caches on the device and in the memory of the host; the rest is on
/// disk.
#[derive(Clone, Copy, Debug)]
struct Parts {
    weights: [f64; 2],
    caches: [f64; 2],
    rule: SpreadRule,
    attends_on_host: bool,
}

impl Parts {
    fn new(weights: [f64; 2], caches: [f64; 2]) -> Parts {
        Parts { weights, caches, rule: SpreadRule::Even, attends_on_host: false }
    }

    fn attending_on_host(self) -> Parts {
        Parts { attends_on_host: true, ..self }
    }

    /// Places a model's weights and caches, with stores and files in `folder`, and counts anew.
    fn place(self, source: &mut ModelSource, folder: &Path, overlaps: bool) {
        let ([device, host], [kv_device, kv_host]) = (self.weights, self.caches);
        let tiers = TierRules { host, uses_host: host > 0.0, rule: self.rule, overrides: Vec::new() };
        let place = StorePlace(folder.join("stores"));
        source.offload = (device < 1.0).then(|| Offload {
            resident: Residency(device),
            tiers,
            place,
            overlaps,
            max_slab: SLAB,
        });
        source.cache_offload = (kv_device < 1.0).then(|| CacheOffload {
            resident: Residency(kv_device),
            host: kv_host,
            folder: folder.to_owned(),
            overlaps,
            attends_on_host: self.attends_on_host,
        });
        source.link_rate = overlaps.then_some(1e12);
        source.transfers = Default::default();
    }
}

#[test]
fn fractions_are_exact_to_half_a_percent_because_matrices_are_divided() {
    for shape in ["110M", "1.1B", "7B"] {
        let model = ModelRef::parse(&format!("synthetic:{shape}")).unwrap();
        let mut source = ModelSource::open(&model, None).unwrap();
        for percent in [1, 20, 50, 93] {
            let wanted = f64::from(percent) / 100.0;
            source.offload = Some(Offload {
                resident: Residency(wanted),
                tiers: TierRules::default(),
                place: StorePlace("/nowhere".into()),
                overlaps: true,
                max_slab: Offload::MAX_SLAB,
            });
            let kv = KvCacheConfig { ty: QuantType::F16, pages: PAGES, window_pages: 0 };
            let (shard, limits) = (Shard::whole(&source.spec), limits(&source, usize::MAX));
            let places =
                estimate_report(&ReferenceSizes, &source, &shard, kv, limits).unwrap().offload.unwrap();
            let all = places.resident_bytes + places.streamed_bytes;
            let actual = places.resident_bytes as f64 / all as f64;
            assert!(actual <= wanted && wanted - actual < 0.005, "{percent} % of {shape}: {actual}");
        }
    }
}

/// Checks that the results with some placements are those with everything on the device, and that each device
/// allocates what was counted.
fn assert_placed_alike(
    fixture: &str,
    (ty, fraction): (QuantType, Fraction),
    placements: &[(Parts, usize)],
    seed: u64,
) {
    let (folder, mut source) = (Scratch::new(), open(fixture));
    let limits_of = |source: &ModelSource, batch_rows| StepLimits {
        opening_rows: 0,
        attended_fraction: fraction,
        ..limits(source, batch_rows)
    };
    let whole = limits_of(&source, usize::MAX);
    let mut resident = try_executor(&source, ty, whole, usize::MAX).unwrap();
    let (context, vocab) = (source.spec.context.min(128), source.spec.vocab as u32);
    let mut schedule = Schedule {
        random: seed,
        context,
        vocab,
        slots: vec![None; SLOTS],
        before: Vec::new(),
        has_token: [false; SLOTS],
    };
    let steps: Vec<StepBatch> = (0..8).map(|_| schedule.step()).collect();
    let expected: Vec<_> = steps.iter().map(|step| run(&mut resident, step).unwrap()).collect();
    for (number, (parts, batch_rows)) in placements.iter().enumerate() {
        let what = format!("{fixture}, {ty}, {parts:?}, {batch_rows} rows");
        parts.place(&mut source, folder.path(), number % 3 > 0);
        let limits = limits_of(&source, *batch_rows);
        let counted = try_executor(&source, ty, limits, usize::MAX).unwrap().report().total_bytes();
        let mut placed = try_executor(&source, ty, limits, counted).expect(&what);
        for (step, expected) in steps.iter().zip(&expected) {
            assert!(run(&mut placed, step).unwrap() == *expected, "{what}");
        }
        let moved = source.transfers.totals().bytes;
        let [device, host] = parts.weights;
        for (tier, is_used) in Tier::BELOW.into_iter().zip([host, 1.0 - device - host]) {
            let moved = moved[Stream::LoadWeights as usize][usize::from(tier == Tier::Disk)];
            assert!(is_used > 0.0 || moved == 0, "{what}: {moved} bytes from {tier:?}");
            // By the other rule, a part may vanish.
            let is_exact = parts.rule == SpreadRule::Even;
            assert!(is_used < 0.3 || !is_exact || moved > 0, "{what}: nothing from {tier:?}");
        }
    }
}

/// The placements of FlexGen's functional tests: weights and caches on the device (G), in the memory of the
/// host (C) and on disk (D).
#[test]
fn the_placements_of_flexgens_tests_give_the_same_results() {
    const G: [f64; 2] = [1.0, 0.0];
    const C: [f64; 2] = [0.0, 1.0];
    const D: [f64; 2] = [0.0, 0.0];
    let half = [0.5, 0.5];
    let exact = [(G, G), (C, G), (G, C), (C, C), (D, G), (G, D), (half, G), (G, half)];
    let mut exact: Vec<_> = exact.map(|(w, c)| (Parts::new(w, c), usize::MAX)).into();
    // Two batches per step.
    exact.push((Parts::new(G, G), 7));
    // With FlexGen's cpu_cache_compute.
    let on_host = [(G, C), (C, C), (G, half), (D, half)];
    exact.extend(on_host.map(|(w, c)| (Parts::new(w, c).attending_on_host(), 9)));
    let on_disk = [(Parts::new(G, D), usize::MAX)];
    for fixture in ["gqa", "gguf/q4_0.gguf"] {
        assert_placed_alike(fixture, (QuantType::F16, Fraction::ONE), &exact, 3);
        assert_placed_alike(fixture, (QuantType::F16, Fraction::new(0.1).unwrap()), &on_disk, 4);
        assert_placed_alike(fixture, (QuantType::G4_B64, Fraction::ONE), &on_disk, 5);
    }
}

#[test]
fn any_placement_gives_the_same_results() {
    let mut random: u64 = 9;
    let mut tenths = || {
        random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let (device, more) = ((random >> 33) % 11, (random >> 45) % 11);
        [device as f64 / 10.0, more.min(10 - device) as f64 / 10.0]
    };
    for (fixture, seed) in [("gqa", 1), ("odd_head_dim", 2), (&mixture(), 3), ("tied", 4)] {
        let placement = |number: usize| {
            let rule = if number.is_multiple_of(2) { SpreadRule::Even } else { SpreadRule::MidPoint };
            let attends_on_host = !number.is_multiple_of(3);
            let parts = Parts { weights: tenths(), caches: tenths(), rule, attends_on_host };
            (parts, [usize::MAX, 5][number % 2])
        };
        let placements: Vec<_> = (0..8).map(placement).collect();
        assert_placed_alike(fixture, (QuantType::F16, Fraction::ONE), &placements, seed);
    }
}

/// Returns a step with tokens of one sequence at the positions from `start` to `end`, the last one of which
/// was generated if the flag is set.
fn step_of_one(start: usize, end: usize, is_generated: bool) -> StepBatch {
    let entry = |index| TableUpdate { slot: 0, table: KvTable::Own, index, page: 1 + index };
    let len = (end - start) as u32;
    let span = Span {
        model: SpanModel::Target,
        stack: SpanStack::Decoder,
        slot: 0,
        start: start as u32,
        tokens: if is_generated { SpanTokens::Last } else { SpanTokens::Given { at: 0, len } },
        table: SpanTable::Own,
        reserved: end as u32,
        encoder_len: 0,
        output: SpanOutput::Last,
    };
    StepBatch {
        table_updates: (0..end.div_ceil(PAGE) as u32).map(entry).collect(),
        tokens: (0..len).map(|at| 5 + at % 50).collect(),
        spans: vec![span],
        sampling: vec![SamplingParams::GREEDY],
        return_logits: true,
        ..StepBatch::default()
    }
}

/// An opening attends to keys and values of all heads, whose matrix is not divided in a store. Shorter chunks
/// attend to latents.
#[test]
fn openings_of_layers_that_are_read_give_the_same_results() {
    let families = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families");
    let mut tried = 0;
    for path in families.read_dir().unwrap().map(|entry| entry.unwrap().path()) {
        let source = ModelSource::open(&ModelRef::Path(path.clone()), None);
        let Ok(mut source) = source else { continue };
        if source.spec.open_with_heads().is_err() {
            continue;
        }
        let of = |source: &ModelSource, opening_rows| {
            let limits = StepLimits { opening_rows, ..limits(source, usize::MAX) };
            try_executor(source, QuantType::F16, limits, usize::MAX).unwrap()
        };
        let [long, short] = [40, 31].map(|len| step_of_one(0, len, false));
        let of_latents = [&long, &short].map(|step| run(&mut of(&source, 0), step).unwrap());
        let expected = [&long, &short].map(|step| run(&mut of(&source, 48), step).unwrap());
        assert_ne!(expected[0], of_latents[0], "{}", path.display());
        assert_eq!(expected[1], of_latents[1], "{}", path.display());
        let folder = Scratch::new();
        source.offload = Some(Offload {
            resident: Residency(0.0),
            tiers: TierRules::default(),
            place: StorePlace(folder.path().to_owned()),
            overlaps: true,
            max_slab: 256,
        });
        assert_eq!(run(&mut of(&source, 48), &long).unwrap(), expected[0], "{}", path.display());
        tried += 1;
    }
    assert!(tried >= 4, "{tried}");
}

/// Steps without openings do not read what only these use, and steps with openings find it.
#[test]
fn what_only_openings_use_is_read_for_them_only() {
    const STEPS: u64 = 100;
    let open_family = || {
        let families = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families/deepseek_v2_lite");
        ModelSource::open(&ModelRef::Path(families), None).unwrap()
    };
    let of = |source: &ModelSource| {
        let limits = StepLimits { opening_rows: 48, ..limits(source, usize::MAX) };
        try_executor(source, QuantType::F16, limits, usize::MAX).unwrap()
    };
    let place = |source: &mut ModelSource, folder: &Scratch| {
        source.offload = Some(Offload {
            resident: Residency(0.0),
            tiers: TierRules::default(),
            place: StorePlace(folder.path().to_owned()),
            overlaps: true,
            max_slab: Offload::MAX_SLAB,
        });
    };
    let [long, short] = [40, 1].map(|len| step_of_one(0, len, false));
    let mut with_openings = open_family();
    with_openings.spec.open_with_heads().unwrap();
    let expected = [&long, &short].map(|step| run(&mut of(&with_openings), step).unwrap());
    let read = [with_openings, open_family()].map(|mut source| {
        let folder = Scratch::new();
        place(&mut source, &folder);
        let mut placed = of(&source);
        if source.spec.opens_with_heads() {
            for step in [0, 1, 1, 0, 0, 1] {
                assert_eq!(run(&mut placed, [&long, &short][step]).unwrap(), expected[step], "{step}");
            }
        }
        run(&mut placed, &short).unwrap();
        let before = source.transfers.totals();
        (0..STEPS).for_each(|_| _ = run(&mut placed, &short).unwrap());
        drop(placed);
        source.transfers.totals().since(&before).bytes[Stream::LoadWeights as usize].iter().sum::<u64>()
    });
    // What is read ahead is at most what a step reads.
    assert!(read[0] * (STEPS - 1) <= read[1] * (STEPS + 1), "{read:?}");
    assert!(read[1] > 0, "{read:?}");
}

/// Returns what a step with a generated token moves after so many positions.
fn moved_after(source: &mut ModelSource, parts: Parts, positions: usize) -> ByStream<u64> {
    let folder = Scratch::new();
    parts.place(source, folder.path(), true);
    let mut placed = executor(source, QuantType::F16, usize::MAX);
    run(&mut placed, &step_of_one(0, positions, false)).unwrap();
    let before = source.transfers.totals();
    run(&mut placed, &step_of_one(positions, positions + 1, true)).unwrap();
    drop(placed);
    source.transfers.totals().since(&before).bytes
}

/// Queries, keys, values and outputs of one row, whatever comes before it.
#[test]
fn rows_that_cross_the_link_to_attention_on_the_host_do_not_grow_with_the_context() {
    let mut source = open("gqa");
    let on_device = Parts::new([1.0, 0.0], [0.0, 1.0]);
    let of = |bytes: ByStream<u64>, streams: &[Stream]| {
        streams.iter().map(|stream| bytes[*stream as usize].iter().sum::<u64>()).collect::<Vec<_>>()
    };
    let pages = [Stream::LoadCache, Stream::StoreCache];
    let rows = [Stream::LoadRows, Stream::StoreRows];
    let layers = source.spec.decoder.as_ref().unwrap().layers.clone();
    let expected = layers.iter().fold([0, 0], |[loaded, stored], layer| {
        let it = &layer.attention;
        [loaded + 4 * it.out_width(), stored + 4 * (it.q_width() + it.k_width() + it.v_width())]
    });
    let mut of_pages = Vec::new();
    for positions in [10, 60, 120] {
        let on_host = moved_after(&mut source, on_device.attending_on_host(), positions);
        assert_eq!(of(on_host, &rows), expected.map(|bytes| bytes as u64), "{positions}");
        assert_eq!(of(on_host, &pages), [0, 0], "{positions}");
        let on_device = moved_after(&mut source, on_device, positions);
        assert_eq!(of(on_device, &rows), [0, 0], "{positions}");
        // A step waits for its reads, while its writes may end after it.
        of_pages.push(on_device[Stream::LoadCache as usize].iter().sum::<u64>());
    }
    assert!(of_pages.is_sorted_by(|a, b| a < b), "{of_pages:?}");
    assert!(expected.iter().sum::<usize>() < of_pages[1] as usize / 4, "{expected:?}, {of_pages:?}");
}

/// Neither the caches nor buffers for them are on the device.
#[test]
fn attention_on_the_host_leaves_no_pages_on_the_device() {
    let (folder, mut source) = (Scratch::new(), open("gqa"));
    let parts = Parts::new([1.0, 0.0], [0.0, 1.0]);
    let places = [parts, parts.attending_on_host()].map(|parts| {
        parts.place(&mut source, folder.path(), true);
        let report = executor(&source, QuantType::F16, usize::MAX).report();
        (report.kv_bytes, report.cache_offload.unwrap())
    });
    let [(with_buffers, on_device), (without, on_host)] = places;
    assert!(on_device.buffer_bytes == with_buffers && with_buffers > 0, "{on_device:?}");
    assert_eq!((without, on_host.buffer_bytes, on_host.file_bytes), (0, 0, 0));
    assert_eq!((on_host.host_bytes, on_host.attended_bytes), (on_device.host_bytes, on_device.host_bytes));
}

/// The group is given up while a row is on its way.
#[test]
fn an_abort_ends_the_wait_for_a_slow_link() {
    let (folder, mut source) = (Scratch::new(), open("gqa"));
    Parts::new([1.0, 0.0], [0.0, 1.0]).attending_on_host().place(&mut source, folder.path(), true);
    source.link_rate = Some(1e-3);
    let mut placed = executor(&source, QuantType::F16, usize::MAX);
    let abort = Abort::new();
    placed.stop_on_abort(&abort);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| run(&mut placed, &step_of_one(0, 5, false)));
        abort.abort();
        waits.join().unwrap().unwrap();
    });
}

/// Some steps have only rows that attend sparsely, others have dense rows, too, which may see the same pages.
#[test]
fn sparse_attention_gives_the_same_results_wherever_the_caches_are() {
    let caches = [[0.0, 1.0], [0.5, 0.5], [0.0, 0.5], [0.0, 0.0]];
    let mut placements = Vec::new();
    for (number, caches) in caches.into_iter().enumerate() {
        let parts = Parts::new([1.0, 0.0], caches);
        placements.extend([(parts, [usize::MAX, 3][number % 2]), (parts.attending_on_host(), usize::MAX)]);
    }
    for (number, ty) in QuantType::kv_cache_types().enumerate() {
        let fixture = ["gqa", "odd_head_dim"][number % 2];
        for (seed, fraction) in [(11, 0.1), (12, 0.5), (13, 1e-6)] {
            let fraction = Fraction::new(fraction).unwrap();
            assert_placed_alike(fixture, (ty, fraction), &placements, seed + number as u64);
        }
    }
}

/// Returns the bytes of KV caches that are read in a step with a generated token after so many others, given
/// the fraction of them that it attends to.
fn read_after(source: &mut ModelSource, positions: usize, fraction: f64) -> u64 {
    let folder = Scratch::new();
    Parts::new([1.0, 0.0], [0.0, 1.0]).place(source, folder.path(), true);
    let attended_fraction = Fraction::new(fraction).unwrap();
    let limits = StepLimits { positions: PAGE * (PAGES - 1), attended_fraction, ..limits(source, 40) };
    let mut placed = try_executor(source, QuantType::F16, limits, usize::MAX).unwrap();
    for start in (0..positions).step_by(limits.rows) {
        run(&mut placed, &step_of_one(start, positions.min(start + limits.rows), false)).unwrap();
    }
    let before = source.transfers.totals();
    run(&mut placed, &step_of_one(positions, positions + 1, true)).unwrap();
    drop(placed);
    let moved = source.transfers.totals().since(&before);
    moved.bytes[Stream::LoadCache as usize].iter().sum()
}

/// Of V, each query head reads its fraction of the rows, and the page of the new position is read whole, as
/// it is written whole. Query heads that share a KV head choose other rows at worst.
#[test]
fn sparse_attention_reads_few_values() {
    const POSITIONS: usize = 700;
    let pages = POSITIONS.div_ceil(PAGE);
    let row_bytes = |dim: usize| 2 * dim.next_multiple_of(16);
    // One query head for each KV head, and four.
    for (fixture, part) in [("mha", 0.15), ("gqa", 0.45)] {
        let mut source = open(fixture);
        let (mut keys, mut values, mut most) = (0, 0, 0);
        for layer in &source.spec.decoder.as_ref().unwrap().layers {
            let it = &layer.attention;
            keys += pages * PAGE * it.kv_heads * 2 * it.k_dim;
            values += pages * PAGE * it.kv_heads * row_bytes(it.v_dim);
            most += (it.heads * (POSITIONS / 10) + PAGE * it.kv_heads) * row_bytes(it.v_dim);
        }
        let dense = read_after(&mut source, POSITIONS, 1.0) as usize;
        assert_eq!(dense, keys + values, "{fixture}");
        let of_values = read_after(&mut source, POSITIONS, 0.1) as usize - keys;
        assert!(of_values > values / 20 && of_values <= most, "{fixture}: {of_values} of {values} bytes");
        assert!((most as f64) < part * values as f64, "{fixture}: at most {most} of {values} bytes");
    }
}

/// The sizes are in the error of a device with a byte less.
#[test]
fn a_memory_that_is_too_small_fails_the_start() {
    let (folder, mut source) = (Scratch::new(), open("gqa"));
    Parts::new([0.3, 0.3], [0.5, 0.2]).place(&mut source, folder.path(), true);
    let start = |memory| try_executor(&source, QuantType::F16, limits(&source, usize::MAX), memory);
    let bytes = start(usize::MAX).unwrap().report().total_bytes();
    start(bytes).unwrap();
    for memory in [0, bytes / 2, bytes - 1] {
        let error = format!("{:#}", start(memory).err().unwrap());
        let part = format!("the device has a memory of {memory} bytes, of which ");
        assert!(error.contains("out of memory: ") && error.contains(&part), "{error}");
    }
}

/// Returns a fixture with no weights of layers in memory, and no caches.
fn on_disk(fixture: &str, folder: &Path) -> ModelSource {
    let mut source = open(fixture);
    Parts::new([0.0, 0.0], [0.0, 0.0]).place(&mut source, folder, true);
    source
}

fn schedule(source: &ModelSource, random: u64) -> Schedule {
    let (context, vocab) = (source.spec.context.min(128), source.spec.vocab as u32);
    Schedule {
        random,
        context,
        vocab,
        slots: vec![None; SLOTS],
        before: Vec::new(),
        has_token: [false; SLOTS],
    }
}

/// Only one read or write is done at a time, in any order.
#[test]
fn a_slow_disk_gives_the_same_results() {
    for fixture in ["gqa", &mixture()] {
        let (folder, gate) = (Scratch::new(), Arc::new(Gate::default()));
        let on_gate = gate.clone();
        let _hook = Hooked::new(folder.path(), move |_, _| {
            on_gate.pass();
            Ok(())
        });
        let source = on_disk(fixture, folder.path());
        let mut streamed = executor(&source, QuantType::F16, 7);
        let mut resident = executor(&open(fixture), QuantType::F16, usize::MAX);
        let mut steps = schedule(&source, 11);
        gate.slow_down(|| {
            for step in 0..8 {
                let batch = steps.step();
                let expected = run(&mut resident, &batch).unwrap();
                assert!(run(&mut streamed, &batch).unwrap() == expected, "{fixture}, step {step}");
            }
        });
        let totals = source.transfers.totals();
        assert!(totals.occupancy().is_some_and(|ready| (0.0..=1.0).contains(&ready)), "{totals:?}");
    }
}

/// A place that cannot be read once is read again; one that cannot be read twice fails the step, and the next
/// ones go on.
#[test]
fn a_disk_that_fails_now_and_then_fails_no_step_unless_it_fails_twice() {
    let (folder, state) = (Scratch::new(), Arc::new((Mutex::new(HashSet::new()), AtomicBool::new(false))));
    let on_disk_state = state.clone();
    let _hook = Hooked::new(folder.path(), move |access, offset| {
        let (known, is_broken) = &*on_disk_state;
        let is_new = known.lock().unwrap().insert((access == Access::Read, offset));
        let fails = access != Access::Pack && (is_new || is_broken.load(Ordering::SeqCst));
        if fails { Err(io::Error::other("a bad sector")) } else { Ok(()) }
    });
    let source = on_disk("gqa", folder.path());
    let mut streamed = executor(&source, QuantType::F16, usize::MAX);
    let mut resident = executor(&open("gqa"), QuantType::F16, usize::MAX);
    let mut steps = schedule(&source, 3);
    let mut results = |batch: &StepBatch| (run(&mut streamed, batch), run(&mut resident, batch).unwrap());
    for step in 0..10 {
        let (found, expected) = results(&steps.step());
        assert!(found.unwrap() == expected, "step {step}");
    }
    assert!(state.0.lock().unwrap().iter().any(|(is_read, _)| !is_read), "writes failed, too");
    state.1.store(true, Ordering::SeqCst);
    let failed = (0..9).find_map(|_| results(&steps.step()).0.err()).unwrap();
    assert!(failed.contains("a bad sector"), "{failed}");
    state.1.store(false, Ordering::SeqCst);
    // A step that failed has not written its part of the caches: sequences begin anew. Writes that failed
    // meanwhile may fail another step.
    let has_recovered = (0..4).any(|_| {
        let mut steps = schedule(&source, 4);
        (0..10).all(|step| match results(&steps.step()) {
            (Ok(found), expected) => {
                assert!(found == expected, "step {step} after the failure");
                true
            }
            (Err(_), _) => false,
        })
    });
    assert!(has_recovered);
}

/// Aborts a step that waits for a disk on which some accesses hang, and builds the device again.
fn abort_step_that_waits(
    (fixture, folder): (&str, &Path),
    steps_before: usize,
    hangs: impl Fn(Access, u64) -> bool + Send + Sync + 'static,
) {
    let gate = Arc::new(Gate::default());
    let on_gate = gate.clone();
    let _hook = Hooked::new(folder, move |access, offset| {
        if hangs(access, offset) {
            on_gate.pass();
        }
        Ok(())
    });
    let source = on_disk(fixture, folder);
    let mut streamed = executor(&source, QuantType::F16, usize::MAX);
    let abort = Abort::new();
    streamed.stop_on_abort(&abort);
    let mut steps = schedule(&source, 6);
    (0..steps_before).for_each(|_| _ = run(&mut streamed, &steps.step()).unwrap());
    gate.shut();
    let failed = std::thread::scope(|scope| {
        let waits = scope.spawn(|| (0..9).find_map(|_| run(&mut streamed, &steps.step()).err()));
        gate.wait_for(2);
        abort.abort();
        waits.join().unwrap()
    });
    assert_eq!(failed.unwrap(), "device fault: the stage was aborted", "{fixture}");
    drop(streamed);
    gate.open();
    let mut rebuilt = executor(&source, QuantType::F16, usize::MAX);
    let mut resident = executor(&open(fixture), QuantType::F16, usize::MAX);
    let batch = schedule(&source, 7).step();
    assert!(run(&mut rebuilt, &batch) == run(&mut resident, &batch));
}

/// Threads that wait for a disk hold little: copies in the memory of the host are freed at once, and
/// a device is not built while threads of two builds wait.
#[test]
fn a_disk_that_hangs_again_and_again_takes_no_more_and_more_memory() {
    let (folder, gates) = (Scratch::new(), [0, 1].map(|_| Arc::new(Gate::default())));
    let (current, at_gate) = (Arc::new(Mutex::new(gates[0].clone())), gates.clone());
    let on_gate = current.clone();
    let _hook = Hooked::new(folder.path(), move |access, _| {
        let gate = on_gate.lock().unwrap().clone();
        if access == Access::Write {
            gate.pass();
        }
        Ok(())
    });
    let mut source = open("gqa");
    Parts::new([0.2, 0.6], [0.0, 0.5]).place(&mut source, folder.path(), true);
    let held = source.transfers.held_by(&Shard::whole(&source.spec));
    let build = || try_executor(&source, QuantType::F16, limits(&source, usize::MAX), usize::MAX);
    for gate in &at_gate {
        // Threads that wait at the gate before wait on.
        *current.lock().unwrap() = gate.clone();
        let mut streamed = build().unwrap();
        let [weights, caches] = streamed.report().host_bytes();
        assert!(weights > 0 && caches > 0);
        assert_eq!(held.copies(), weights + caches, "copies of earlier builds are freed");
        let abort = Abort::new();
        streamed.stop_on_abort(&abort);
        gate.shut();
        std::thread::scope(|scope| {
            let mut steps = schedule(&source, 6);
            let streamed = &mut streamed;
            let waits = scope.spawn(move || (0..20).find_map(|_| run(streamed, &steps.step()).err()));
            gate.wait_for(1);
            abort.abort();
            assert!(waits.join().unwrap().is_some());
        });
        drop(streamed);
        assert_eq!(held.copies(), 0);
    }
    let refused = format!("{:#}", build().err().unwrap());
    assert!(refused.contains("tiers.disk_path: the disk has hung twice"), "{refused}");
    gates[0].open();
    while build().is_err() {
        std::thread::yield_now();
    }
    gates[1].open();
}

/// Steps that wait for weights or caches end when the group is given up, and nobody waits for the disk.
#[test]
fn a_disk_that_hangs_holds_up_no_aborted_step() {
    for access in [Access::Read, Access::Write] {
        abort_step_that_waits(("gqa", Scratch::new().path()), 4, move |kind, _| kind == access);
    }
}

/// Steps that wait for experts end, too, while other weights can be read.
#[test]
fn a_disk_that_hangs_at_experts_holds_up_no_aborted_step() {
    let (folder, fixture) = (Scratch::new(), mixture());
    let fixture = &*fixture;
    let source = on_disk(fixture, folder.path());
    let written = executor(&source, QuantType::F16, usize::MAX).report().offload.unwrap();
    let experts = expert_offsets(&written.stores[0]);
    let hangs = move |access, offset| access == Access::Read && experts.contains(&offset);
    abort_step_that_waits((fixture, folder.path()), 0, hangs);
}

/// The times of a step name its matrices, those of experts included, its caches and its layers.
#[test]
fn a_traced_step_has_its_reads_writes_and_layers() {
    for (fixture, part) in [("gqa", "layers.0."), (&*mixture(), ".experts.")] {
        let folder = Scratch::new();
        let source = on_disk(fixture, folder.path());
        source.transfers.start_trace();
        let mut streamed = executor(&source, QuantType::F16, usize::MAX);
        let mut steps = schedule(&source, 6);
        // What a step needs may have been read during the step before.
        let timelines = (0..6).map(|_| {
            run(&mut streamed, &steps.step()).unwrap();
            source.transfers.trace().and_then(|trace| trace.last_step()).unwrap()
        });
        let timelines: Vec<_> = timelines.collect();
        let names = |activity: Activity| {
            let rows = timelines.iter().flat_map(|timeline| &timeline.rows);
            let rows = rows.filter(move |row| row.activity == activity);
            rows.flat_map(|row| &row.spans).map(|span| span.name.as_str()).collect::<HashSet<_>>()
        };
        let layers = source.spec.decoder.as_ref().unwrap().layers.len();
        assert_eq!(names(Activity::Compute).len(), layers, "{timelines:?}");
        let matrices = names(Activity::LoadWeights);
        let is_there = matrices.iter().any(|name| name.contains(part));
        assert!(is_there, "{fixture}: no {part} in {matrices:?}");
        assert!(names(Activity::LoadCache).contains("K of layer 1"), "{timelines:?}");
    }
}

/// Returns an executor with this part of the layers' weights in memory, and what it moves.
fn with_experts_on_disk(
    (source, folder): (&mut ModelSource, &Scratch),
    fraction: f64,
    batch_rows: usize,
) -> (ModelExecutor<CpuBackend>, Arc<Transfers>) {
    let place = StorePlace(folder.path().to_owned());
    let (resident, tiers, overlaps) = (Residency(fraction), TierRules::default(), batch_rows > 5);
    source.offload = Some(Offload { resident, tiers, place, overlaps, max_slab: SLAB });
    source.transfers = Arc::default();
    (executor(source, QuantType::F16, batch_rows), source.transfers.clone())
}

/// Returns the offsets of the matrices of experts in a store.
fn expert_offsets(store: &Path) -> Vec<u64> {
    let index = std::fs::read(store.join("index.json")).unwrap();
    let index: serde_json::Value = serde_json::from_slice(&index).unwrap();
    let (mut offsets, mut offset) = (Vec::new(), 0);
    for matrix in index["key"]["matrices"].as_array().unwrap() {
        if matrix["name"].as_str().unwrap().contains(".experts.") {
            offsets.push(offset);
        }
        offset += matrix["bytes"].as_u64().unwrap().next_multiple_of(4096);
    }
    offsets
}

/// Rows choose experts at random, in one row batch or several, and the pool has a layer's experts, up to
/// nearly all.
#[test]
fn experts_that_are_read_when_chosen_give_the_same_results() {
    let mixtures = mixtures();
    assert!(mixtures.len() >= 5, "{} mixtures", mixtures.len());
    let mut are_small = 0;
    for (seed, (what, mut source)) in (10..).zip(mixtures) {
        let folder = Scratch::new();
        let mut resident = executor(&source, QuantType::F16, usize::MAX);
        let cases = [(0.0, usize::MAX), (0.3, 7), (0.6, 1), (0.9, 5), (0.99, usize::MAX)];
        let mut offloaded =
            cases.map(|(fraction, rows)| with_experts_on_disk((&mut source, &folder), fraction, rows));
        for (executor, _) in &offloaded {
            let places = executor.report().offload.unwrap();
            assert!(places.pool_experts <= places.experts && places.expert_bytes > 0, "{what}: {places:?}");
            are_small += usize::from(places.pool_experts < places.experts);
        }
        let (context, vocab) = (source.spec.context.min(128), source.spec.vocab as u32);
        let mut schedule = Schedule {
            random: seed,
            context,
            vocab,
            slots: vec![None; SLOTS],
            before: Vec::new(),
            has_token: [false; SLOTS],
        };
        for step in 0..25 {
            let batch = schedule.step();
            let expected = run(&mut resident, &batch).unwrap();
            for ((executor, _), case) in offloaded.iter_mut().zip(cases) {
                assert!(run(executor, &batch).unwrap() == expected, "{what}, {case:?}, step {step}");
            }
        }
        let misses = offloaded.each_ref().map(|(executor, transfers)| {
            (executor.report().offload.unwrap().pool_experts, transfers.totals().expert_misses)
        });
        let (least, most) = (misses[0], misses[4]);
        assert!(least.0 == most.0 || least.1 > most.1, "{what}: a larger pool has more of them: {misses:?}");
    }
    assert!(are_small > 10, "{are_small} pools do not have all experts");
}

/// One row reads the experts that it chose, and no others; the next one those that are not there yet.
#[test]
fn a_step_reads_only_experts_that_rows_chose() {
    for (what, mut source) in mixtures() {
        let folder = Scratch::new();
        let layers = source.spec.decoder.iter().flat_map(|stack| &stack.layers);
        let chosen: usize = layers
            .map(|layer| match &layer.mlp {
                MlpSpec::Experts(moe) => moe.shape().top_k,
                MlpSpec::Dense(_) => 0,
            })
            .sum();
        let (mut executor, transfers) = with_experts_on_disk((&mut source, &folder), 0.99, usize::MAX);
        let mut before = TransferTotals::default();
        for token in 0..6 {
            let table_updates = vec![TableUpdate { slot: 0, table: KvTable::Own, index: 0, page: 1 }];
            let span = Span {
                model: SpanModel::Target,
                stack: SpanStack::Decoder,
                slot: 0,
                start: token,
                tokens: SpanTokens::Given { at: 0, len: 1 },
                table: SpanTable::Own,
                reserved: 8,
                encoder_len: 0,
                output: SpanOutput::Last,
            };
            let sampling = vec![SamplingParams::GREEDY];
            let (tokens, spans) = (vec![5 + 3 * token], vec![span]);
            let batch = StepBatch { tokens, spans, table_updates, sampling, ..StepBatch::default() };
            run(&mut executor, &batch).unwrap();
            let totals = transfers.totals();
            let new = totals.since(&before);
            before = totals;
            let (hits, misses) = (new.expert_hits as usize, new.expert_misses as usize);
            assert_eq!(hits + misses, chosen, "{what}");
            assert!(token > 0 || misses == chosen, "{what}: nothing is in an empty pool");
        }
    }
}

/// The step fails with the cause, and the next start writes the store anew.
#[test]
fn an_expert_that_has_changed_fails_the_step() {
    let (folder, mut source) = (Scratch::new(), open(&mixture()));
    let (context, vocab) = (source.spec.context.min(128), source.spec.vocab as u32);
    let mut schedule = Schedule {
        random: 5,
        context,
        vocab,
        slots: vec![None; SLOTS],
        before: Vec::new(),
        has_token: [false; SLOTS],
    };
    let batch = std::iter::repeat_with(|| schedule.step()).find(|batch| !batch.spans.is_empty()).unwrap();
    let mut start = || with_experts_on_disk((&mut source, &folder), 0.0, usize::MAX).0;
    let mut right = start();
    let expected = run(&mut right, &batch).unwrap();
    let store = right.report().offload.unwrap().stores[0].clone();
    // Its threads would read from the file while that is empty, and remove the store.
    drop(right);
    let mut data = std::fs::read(store.join("weights.bin")).unwrap();
    expert_offsets(&store).into_iter().for_each(|offset| data[offset as usize] ^= 1);
    std::fs::write(store.join("weights.bin"), data).unwrap();
    let failed = run(&mut start(), &batch).unwrap_err();
    assert!(failed.contains(".experts.") && failed.contains("has changed"), "{failed}");
    assert!(run(&mut start(), &batch).unwrap() == expected);
}
