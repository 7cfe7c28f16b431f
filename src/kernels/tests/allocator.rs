//! Once prepared, no operation of the CPU backend allocates, on any thread, from its first step on. The test
//! is a binary of its own because it replaces the allocator of the process, and has no test harness because
//! that has threads of its own.
//!
//! Invariant: [`Everything::step`] runs every operation of a step.

use mainstem_kernels::ActivationPrecision;
use mainstem_kernels::batch::{CountChange, IN_PROMPT};
use mainstem_kernels::cpu::{CpuBackend, CpuConfig, Isa};
use mainstem_kernels::random::noise;
use mainstem_kernels::{
    Activation, AttentionShape, Backend, DistanceBuckets, DistanceScores, DynamicNtk, Epilogue, Expert,
    ExpertBiases, ExpertGroups, Experts, Fraction, Gemm, GroupScore, HostBuf, InputOperand, KvLayer,
    KvLayout, KvTable, LateInputs, Mask, MoeShape, Norm, NormKind, OutputColumns, PackedLayout, PageCopy,
    Penalties, QuantType, RelativeBias, Rope, RopeStyle, SamplingInputs, SamplingParams, Scoring, SlotMove,
    Span, SpanModel, SpanOutput, SpanStack, SpanTable, SpanTokens, StepBatch, StepLimits, StepOutput,
    TableUpdate, Weight,
};
use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// An allocator that counts allocations.
struct Counting;

static ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is forwarded to the system allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::SeqCst);
        // SAFETY: the contract of the caller is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the contract of the caller is the same.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const LIMITS: StepLimits = StepLimits {
    slots: 4,
    rows: 64,
    batch_rows: usize::MAX,
    logit_rows: 4,
    positions: 600,
    encoder_positions: 32,
    page_positions: 32,
    window: None,
    top_logprobs: 3,
    vocab: 50,
    hidden: WIDTH,
    drafts: 0,
    draft_logits: false,
    counts_tokens: true,
    opening_rows: 0,
    attended_fraction: Fraction::ONE,
};
/// Width of every row; number of heads and their dimension.
const WIDTH: usize = 64;
const HEADS: usize = 4;
const DIM: usize = WIDTH / HEADS;
const LAYOUT: KvLayout = KvLayout {
    ty: QuantType::BF16,
    pages: 16,
    page_positions: 32,
    kv_heads: HEADS,
    k_dim: DIM,
    v_dim: DIM,
    v_in_k: false,
};
const MIXTURE: MoeShape = MoeShape {
    experts: 6,
    first_expert: 0,
    top_k: 2,
    scoring: Scoring::Softmax,
    groups: None,
    normalize_scores: true,
    scale: 1.0,
    weighs_input: false,
    width: WIDTH,
    activation: Activation::Silu,
};
/// A mixture that chooses among groups, by corrected scores.
const GROUPED: MoeShape = MoeShape {
    groups: Some(ExpertGroups { groups: 2, top_groups: 1, score: GroupScore::TopTwo }),
    weighs_input: true,
    activation: Activation::ClampedSwiglu,
    ..MIXTURE
};
/// A cache with V in K.
const LATENT: KvLayout = KvLayout { kv_heads: 1, k_dim: WIDTH, v_in_k: true, ..LAYOUT };

fn main() {
    for ty in [QuantType::BF16, QuantType::Q8_0, QuantType::G4_B64] {
        no_operation_allocates(ty);
    }
    println!("test no_operation_allocates ... ok");
}

/// Runs steps with a KV cache of the given format. The prompt uses dense attention, the generated token top-k
/// sparse attention. Five threads, so that the two splits of the prompt are separate work items.
fn no_operation_allocates(ty: QuantType) {
    let cpu = CpuBackend::new(CpuConfig {
        threads: 5,
        isa: Isa::Auto,
        activation_precision: ActivationPrecision::Int8,
    })
    .expect("a CPU backend");
    let (mut everything, batch) = (Everything::new(cpu, ty), test_batch());
    let late: Arc<LateInputs> = Arc::default();
    late.mask_sender(0).send(vec![0xf0; LIMITS.mask_words()].into());
    let mut out = StepOutput::with_capacity(&LIMITS);
    let buffers = HostBuf::total_allocated();
    for round in 0..20 {
        out.clear();
        let before = ALLOCATIONS.load(Ordering::SeqCst);
        everything.step(&batch, &late, &mut out);
        let allocations = ALLOCATIONS.load(Ordering::SeqCst) - before;
        assert_eq!((allocations, HostBuf::total_allocated()), (0, buffers), "cache {ty}, round {round}");
        assert_eq!((out.tokens.len(), out.hidden.len()), (2, 22 * WIDTH), "round {round}");
    }
}

/// Returns a batch with two encoder inputs, a prompt that returns hidden states, a sampled token with
/// log-probabilities, a hole, a slot move and a page copy.
fn test_batch() -> StepBatch {
    let entry = |slot, table, index, page| TableUpdate { slot, table, index, page };
    let own = (0..3).flat_map(|slot| [0, 1].map(|i| entry(slot, KvTable::Own, i, 1 + 2 * slot + i)));
    let span = |stack, slot, start, len, table, want| Span {
        model: SpanModel::Target,
        stack,
        slot,
        start,
        tokens: if len == 1 { SpanTokens::Last } else { SpanTokens::Given { at: 0, len } },
        table,
        reserved: 60,
        encoder_len: if table == SpanTable::Null { 0 } else { 9 },
        output: want,
    };
    let (encoder, decoder) = (SpanStack::Encoder, SpanStack::Decoder);
    let reported = SamplingParams { logprob: true, top_logprobs: 3, ..SamplingParams::GREEDY };
    let penalties = Penalties { repetition: 1.2, presence: 0.5, frequency: 0.25 };
    let reported = SamplingParams { bias_len: 2, masked: true, penalties, ..reported };
    StepBatch {
        moves: vec![SlotMove { from: 0, to: 3 }],
        count_changes: vec![CountChange { slot: 1, at: 0, len: 2 }],
        token_counts: vec![(3, IN_PROMPT), (5, 2)],
        table_updates: own.chain((0..3).map(|slot| entry(slot, KvTable::Cross, 0, 10 + slot))).collect(),
        page_copies: vec![PageCopy { table: KvTable::Own, from: 1, to: 15 }],
        spans: vec![
            span(encoder, 0, 0, 9, SpanTable::Scratch, SpanOutput::None),
            span(encoder, 1, 0, 9, SpanTable::Scratch, SpanOutput::None),
            span(decoder, 0, 500, 22, SpanTable::Own, SpanOutput::Hidden),
            span(decoder, 1, 40, 1, SpanTable::Own, SpanOutput::Last),
            span(decoder, 2, 0, 1, SpanTable::Null, SpanOutput::Last),
        ],
        tokens: (0..22).collect(),
        sampling: vec![reported, SamplingParams { temperature: 1.0, top_k: 5, ..SamplingParams::GREEDY }],
        logit_biases: vec![(3, 1.0), (4, -1.0)],
        ..StepBatch::default()
    }
}

/// A CPU backend with the buffers and weights that each operation needs.
struct Everything {
    cpu: CpuBackend,
    /// A matrix (vocabulary or positions, width), used for everything.
    matrix: Weight<HostBuf>,
    /// Quantized matrices: one multiplied with int8 activations, one dequantized first.
    blocks: [Weight<HostBuf>; 2],
    /// The packed bytes of `matrix` and `blocks`, which they are refilled with in each step.
    packed: [(PackedLayout, Vec<u8>); 3],
    vector: HostBuf,
    norm: Norm<HostBuf>,
    rope: Rope<HostBuf>,
    bias: RelativeBias<HostBuf>,
    buckets: DistanceBuckets<HostBuf>,
    experts: Vec<Expert<HostBuf>>,
    biases: Vec<ExpertBiases<HostBuf>>,
    latent: KvLayer<HostBuf>,
    cache: KvLayer<HostBuf>,
    scratch: KvLayer<HostBuf>,
    x: HostBuf,
    y: HostBuf,
    angles: HostBuf,
    logits: HostBuf,
    more: [HostBuf; 3],
}

impl Everything {
    fn new(mut cpu: CpuBackend, ty: QuantType) -> Everything {
        let [x, y, angles] = [(); 3].map(|()| floats(&mut cpu, LIMITS.rows * WIDTH));
        let table = floats(&mut cpu, HEADS * (2 * LIMITS.positions - 1));
        let buckets = cpu.alloc(2 * LIMITS.positions * size_of::<f32>()).expect("memory is available");
        let floats16 = matrix(&mut cpu, QuantType::F16, LIMITS.positions, 1);
        let blocks = [QuantType::Q4_0, QuantType::Q5_0].map(|ty| matrix(&mut cpu, ty, LIMITS.positions, 1));
        let mut everything = Everything {
            packed: [&floats16, &blocks[0], &blocks[1]].map(|w| packed(&mut cpu, w)),
            matrix: floats16,
            blocks,
            vector: floats(&mut cpu, LIMITS.positions),
            norm: norm(&mut cpu),
            rope: rope(&mut cpu),
            bias: RelativeBias { table, heads: HEADS, reach: LIMITS.positions },
            buckets: DistanceBuckets { table: buckets, count: 1, reach: LIMITS.positions },
            experts: (0..MIXTURE.experts as u32).map(|number| expert(&mut cpu, number)).collect(),
            biases: (0..MIXTURE.experts).map(|_| biases(&mut cpu)).collect(),
            latent: cpu.alloc_kv(KvLayout { ty, ..LATENT }).expect("memory is available"),
            cache: cpu.alloc_kv(KvLayout { ty, ..LAYOUT }).expect("memory is available"),
            scratch: cpu
                .alloc_kv(KvLayout { pages: LIMITS.scratch_positions() / 32, ..LAYOUT })
                .expect("memory is available"),
            logits: floats(&mut cpu, LIMITS.rows * LIMITS.positions),
            more: [(); 3].map(|()| floats(&mut cpu, LIMITS.rows * LIMITS.positions)),
            x,
            y,
            angles,
            cpu,
        };
        for mixture in [&MIXTURE, &GROUPED] {
            everything.cpu.prepare_moe(mixture, WIDTH).expect("memory is available");
        }
        let columns = everything.cpu.sizes().columns_of_heads(HEADS, WIDTH);
        everything.cpu.prepare_weight(QuantType::F16, columns).expect("memory is available");
        let attended = Fraction::new(0.3).expect("a valid fraction");
        everything
            .cpu
            .prepare(&StepLimits { attended_fraction: attended, ..LIMITS })
            .expect("memory is available");
        everything
    }

    /// Runs every operation, for both stacks.
    fn step(&mut self, batch: &StepBatch, late: &Arc<LateInputs>, out: &mut StepOutput) {
        self.cpu.begin_step(batch);
        self.cpu.map_rows(batch);
        self.refill();
        self.cpu.copy_pages(KvTable::Own, &batch.page_copies, &mut self.cache);
        for stack in [SpanStack::Encoder, SpanStack::Decoder] {
            let rows = self.cpu.select_stack(stack);
            self.before_attention(rows);
            self.attention(stack, rows);
            self.after_attention(rows);
            for run in batch.hidden_rows(stack) {
                self.cpu.append_hidden(run, WIDTH, &self.y, out);
            }
        }
        self.cpu.gather_output_rows(0..2, WIDTH, &self.x, &mut self.y);
        let inputs = SamplingInputs { biases: &batch.logit_biases, late: Some(late), width: None };
        self.cpu.sample(0..2, &self.logits, inputs, out);
        self.cpu.end_step();
    }

    fn refill(&mut self) {
        let Everything { cpu, matrix, blocks: [four, five], packed, .. } = self;
        for (w, (layout, bytes)) in [matrix, four, five].into_iter().zip(packed) {
            cpu.refill_weight(w, layout, bytes).expect("the layout is the weight's own");
        }
    }

    fn before_attention(&mut self, rows: usize) {
        let Everything { cpu, matrix, blocks, vector, norm, rope, x, y, angles, logits, .. } = self;
        for blocks in blocks {
            cpu.embed(blocks, 7, x);
            cpu.matmul(rows, blocks, Some(vector), x, logits);
        }
        cpu.embed(matrix, 7, x);
        cpu.embed_positions(matrix, 2, 0, x);
        cpu.norm(rows, norm, x, y);
        cpu.norm_in_place(rows, norm, y);
        cpu.matmul(rows, matrix, Some(vector), y, logits);
        cpu.rope_angles(rope, angles);
        cpu.rope(rope, angles, HEADS, DIM, y);
        self.products(rows);
    }

    /// Runs GEMMs with every kind of operand at once, and with inputs that are computed by a fused operation.
    fn products(&mut self, rows: usize) {
        let Everything {
            cpu, matrix, blocks, vector, norm, x, y, logits, more: [first, second, third], ..
        } = self;
        let [four, five] = blocks;
        let vector = &*vector;
        let normed = InputOperand::Normed { norm, x, buffer: y };
        cpu.gemms(
            rows,
            normed,
            &mut [
                gemm_with_bias(matrix, vector, Epilogue::Set(first)),
                gemm_with_bias(four, vector, Epilogue::Set(second)),
                gemm_with_bias(five, vector, Epilogue::Set(third)),
            ],
        );
        let activated = InputOperand::Activated { act: Activation::Silu, gate: y, up: Some(x) };
        cpu.gemms(
            rows,
            activated,
            &mut [gemm_with_bias(four, vector, Epilogue::Add { x: logits, buffer: first })],
        );
    }

    fn attention(&mut self, stack: SpanStack, rows: usize) {
        let Everything {
            cpu, matrix, vector, bias, buckets, cache, latent, scratch, x, y, logits, more, ..
        } = self;
        let bidirectional = Mask::Bidirectional { window: Some(5) };
        let causal = Mask::Causal { window: Some(20) };
        let chunked = Mask::Chunked { chunk: 20 };
        let vector = &*vector;
        let shape = |mask, table, bias| AttentionShape {
            heads: HEADS,
            scale: 0.25,
            softcap: Some(4.0),
            mask,
            table,
            bias,
            sinks: Some(vector),
            distances: None,
        };
        match stack {
            SpanStack::Encoder => {
                cpu.store_kv(KvTable::Scratch, y, y, scratch);
                let distances = Some(DistanceScores { of_queries: &*logits, of_keys: &*logits, buckets });
                let with_distances =
                    AttentionShape { distances, ..shape(bidirectional, KvTable::Scratch, Some(bias)) };
                cpu.attention(&with_distances, y, scratch, x);
                cpu.store_kv(KvTable::Cross, y, y, cache);
            }
            SpanStack::Decoder => {
                cpu.store_kv(KvTable::Own, y, y, cache);
                cpu.attention(&shape(causal, KvTable::Own, Some(bias)), y, cache, x);
                cpu.attention(&shape(chunked, KvTable::Own, None), y, cache, x);
                let columns = OutputColumns::all(matrix.n / HEADS);
                cpu.matmul_heads(rows, HEADS, (matrix, columns), &more[0], logits);
                cpu.store_kv(KvTable::Own, y, y, latent);
                cpu.attention(&shape(causal, KvTable::Own, None), &more[0], latent, x);
                let bidirectional = Mask::Bidirectional { window: None };
                cpu.attention(&shape(bidirectional, KvTable::Cross, None), y, cache, x);
            }
        }
    }

    fn after_attention(&mut self, rows: usize) {
        let Everything { cpu, vector, experts, biases, x, y, logits, .. } = self;
        cpu.activate(rows, WIDTH, Activation::Gelu, x, Some(y));
        cpu.activate(rows, WIDTH, Activation::Tanh, x, None);
        cpu.moe(rows, &MIXTURE, logits, Experts::in_memory(experts), x, y).expect("they are in memory");
        let corrected = Experts { biases, correction: Some(vector), ..Experts::in_memory(experts) };
        cpu.moe(rows, &GROUPED, logits, corrected, x, y).expect("they are in memory");
        cpu.gate_rows(rows, WIDTH, logits, y);
        cpu.all_reduce(rows, WIDTH, y);
        cpu.all_gather(rows, &[WIDTH], x, y);
        cpu.copy_columns((rows, 1), (WIDTH, DIM..2 * DIM, y), (OutputColumns::all(DIM), logits));
        cpu.add(rows, WIDTH, 0.5, x, y);
        cpu.scale(rows, WIDTH, 2.0, x);
        cpu.softcap(rows, WIDTH, 30.0, x);
        cpu.clamp(rows, WIDTH, 30.0, x);
    }
}

/// Creates a GEMM with a bias.
fn gemm_with_bias<'a>(
    w: &'a Weight<HostBuf>,
    bias: &'a HostBuf,
    to: Epilogue<&'a mut HostBuf>,
) -> Gemm<'a, HostBuf> {
    Gemm { w, rest: &[], bias: Some(bias), epilogue: to }
}

fn floats(cpu: &mut CpuBackend, n: usize) -> HostBuf {
    let mut buf = cpu.alloc(n * size_of::<f32>()).expect("memory is available");
    cpu.upload(&mut buf, 0, &noise(1, n).iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>());
    buf
}

fn matrix(cpu: &mut CpuBackend, ty: QuantType, n: usize, tag: u32) -> Weight<HostBuf> {
    let mut quantized = vec![0; ty.bytes(n * WIDTH).expect("whole blocks")];
    ty.quantize(&noise(tag, n * WIDTH), &mut quantized);
    cpu.upload_weight(ty, n, WIDTH, &quantized).expect("memory is available")
}

/// Returns the layout and the packed bytes of a weight.
fn packed(cpu: &mut CpuBackend, w: &Weight<HostBuf>) -> (PackedLayout, Vec<u8>) {
    let layout = w.packed_layout(cpu.sizes());
    let mut bytes = vec![0; layout.bytes];
    cpu.download(&w.buf, 0, &mut bytes);
    (layout, bytes)
}

fn norm(cpu: &mut CpuBackend) -> Norm<HostBuf> {
    let (weight, bias) = (Some(floats(cpu, WIDTH)), Some(floats(cpu, WIDTH)));
    Norm { kind: NormKind::Layer, weight, bias, sets: 1, width: WIDTH, eps: 1e-5 }
}

/// Sequences exceed the context length of the dynamic scaling.
fn rope(cpu: &mut CpuBackend) -> Rope<HostBuf> {
    let tables = vec![(usize::MAX, floats(cpu, LIMITS.positions * DIM))];
    let stretch = Some(DynamicNtk { theta: 10_000.0, factor: 2.0, context: 30 });
    Rope { tables, positions: LIMITS.positions, dims: DIM, style: RopeStyle::GptJ, dynamic_ntk: stretch }
}

fn biases(cpu: &mut CpuBackend) -> ExpertBiases<HostBuf> {
    let [gate, up, down] = [(); 3].map(|()| Some(floats(cpu, WIDTH)));
    ExpertBiases { gate, up, down }
}

fn expert(cpu: &mut CpuBackend, number: u32) -> Expert<HostBuf> {
    let [gate, up, down] = [0, 1, 2].map(|part| matrix(cpu, QuantType::F16, WIDTH, 10 + 3 * number + part));
    Expert { gate, up: Some(up), down }
}
