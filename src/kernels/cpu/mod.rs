//! The CPU backend: SIMD kernels that run on a thread pool, over buffers in host memory.
//!
//! This file implements [`Backend`] by dispatching to the modules named below, listed in reading order.
//! Invariant: the result of an operation depends neither on the number of threads nor, among instruction sets
//! with fused multiply-add, on the instruction set, except for the products of 16-bit numbers that some have.
//! No step allocates.

mod config;

#[cfg_attr(not(target_arch = "x86_64"), path = "no_amx.rs")]
mod amx;
mod gemm_input;
mod gemm_task;
mod gemms;
mod pool;
pub(crate) mod simd;

mod activation;
mod attention;
mod bf16;
mod bf16_pairs;
mod f32_gemm;
mod kv;
mod moe;
mod norm;
mod packed;
mod roofline;
mod rope;
mod rows;
mod sample;
mod scratch;
mod scratch_memory;
mod sizes;

pub use config::{CpuConfig, Isa};
pub use roofline::{Roofline, RooflineMeter};
pub use sizes::CpuSizes;

use crate::backend::{
    Activation, AttentionShape, Backend, DeviceError, DeviceSizes, Epilogue, Experts, Gemm, InputOperand,
    KvLayer, KvLayout, KvTable, MoeShape, Norm, OutputColumns, PackedLayout, Rope, SamplingInputs,
    StepLimits, ValueSource, Weight,
};
use crate::batch::{Page, PageCopy, SpanStack, StepBatch, StepOutput, StepState, StepTimes};
use crate::clock::StepClock;
use crate::collective::Collective;
use crate::host::{HostBuf, HostMemory};
use crate::quant::{ActivationPrecision, OperandFormat, QuantType};
use crate::stage::StageCollective;
use attention::{AttentionInputs, SpanItems};
use gemm_input::{GemmInput, InputValues};
use gemm_task::GemmTask;
use gemms::GEMMS_PER_JOB;
use pool::ThreadPool;
use sample::SampleScratch;
use scratch::{CpuScratch, ScratchSizes};
use simd::Level;
use std::ops::Range;

/// Bytes of a weight that one work item copies during an upload.
const UPLOAD_ITEM_BYTES: usize = 1 << 22;

/// The backend that computes on the CPU.
pub struct CpuBackend {
    sizes: CpuSizes,
    level: Level,
    pool: ThreadPool,
    stage: StageCollective,
    step: Option<StepState>,
    sample_scratch: Option<SampleScratch>,
    scratch: CpuScratch,
    /// Attention's map from work items to spans.
    span_items: Vec<SpanItems>,
    memory: HostMemory,
    /// Memory that is not the device's, if it has one of its own.
    host: HostMemory,
    clock: StepClock,
}

impl CpuBackend {
    /// Creates device number 0 and starts its worker threads.
    ///
    /// Fails when the configuration has no threads or the CPU lacks the requested instruction set.
    pub fn new(config: CpuConfig) -> Result<CpuBackend, DeviceError> {
        CpuBackend::with_number(0, config)
    }

    /// Creates device `number` of this kind and starts its worker threads, whose names begin with the number
    /// (`cpu3-1`).
    ///
    /// Fails as [`CpuBackend::new`] does.
    pub fn with_number(number: u32, config: CpuConfig) -> Result<CpuBackend, DeviceError> {
        let sizes = CpuSizes::new(config)?;
        Ok(CpuBackend {
            sizes,
            level: sizes.level,
            pool: ThreadPool::new(number, config.threads)?,
            stage: StageCollective::default(),
            step: None,
            sample_scratch: None,
            scratch: CpuScratch::default(),
            span_items: Vec::new(),
            memory: HostMemory::default(),
            host: HostMemory::default(),
            clock: StepClock::default(),
        })
    }

    /// Returns this device, on which nothing is allocated yet, with a memory of its own of `bytes` bytes:
    /// what it allocates beyond them fails with [`DeviceError::OutOfMemory`].
    pub fn with_memory(mut self, bytes: usize) -> CpuBackend {
        self.memory = HostMemory::limited(bytes);
        self
    }

    /// Returns the instruction set in use; never `Auto`.
    pub fn isa(&self) -> Isa {
        self.sizes.isa()
    }

    fn step(&self) -> &StepState {
        self.step.as_ref().expect(NOT_PREPARED)
    }

    /// Reallocates the scratch buffers that are too small for `to`. Before `prepare` has set the number of
    /// rows, only records the sizes.
    fn grow_scratch(&mut self, to: ScratchSizes) -> Result<(), DeviceError> {
        self.scratch.grow(self.sizes.threads_and_operands(), to, &self.memory)
    }

    /// Copies packed bytes to the buffer of a weight, on all threads.
    fn copy_packed(pool: &mut ThreadPool, packed: &[u8], to: &mut HostBuf) {
        pool.for_chunks(to.bytes_mut(), UPLOAD_ITEM_BYTES, |part, to| {
            to.copy_from_slice(&packed[part * UPLOAD_ITEM_BYTES..][..to.len()]);
        });
    }
}

const NOT_PREPARED: &str = "prepare must be called before the first step; this is a bug";

impl Backend for CpuBackend {
    type Buf = HostBuf;

    fn sizes(&self) -> &dyn DeviceSizes {
        &self.sizes
    }

    fn threads(&self) -> usize {
        self.pool.threads()
    }

    fn allocated_bytes(&self) -> usize {
        self.memory.used()
    }

    fn activation_precision(&self) -> ActivationPrecision {
        self.sizes.precision
    }

    fn join_stage(&mut self, stage: Box<dyn Collective>) {
        self.stage = StageCollective::new(stage);
    }

    fn rank_and_count(&self) -> (usize, usize) {
        self.stage.rank_and_count()
    }

    fn alloc(&mut self, bytes: usize) -> Result<HostBuf, DeviceError> {
        self.memory.zeroed(bytes)
    }

    fn upload(&mut self, to: &mut HostBuf, offset: usize, bytes: &[u8]) {
        to.bytes_mut()[offset..][..bytes.len()].copy_from_slice(bytes);
    }

    fn download(&mut self, from: &HostBuf, offset: usize, bytes: &mut [u8]) {
        bytes.copy_from_slice(&from.bytes()[offset..][..bytes.len()]);
    }

    fn upload_weight(
        &mut self,
        ty: QuantType,
        n: usize,
        k: usize,
        bytes: &[u8],
    ) -> Result<Weight<HostBuf>, DeviceError> {
        let expected = ty.bytes(k).and_then(|row| row.checked_mul(n));
        assert_eq!(Some(bytes.len()), expected, "size of a {n} x {k} matrix of {ty}");
        self.grow_scratch(self.sizes.weight_scratch(ty, k))?;
        let mut buf = self.memory.zeroed(self.sizes.packed_layout(ty, n, k).bytes)?;
        match ty.operand_format(self.sizes.precision) {
            OperandFormat::Int8 => packed::pack(&mut self.pool, ty, (n, k), bytes, &mut buf),
            OperandFormat::Bf16 => bf16::pack(&mut self.pool, (n, k), bytes, &mut buf),
            OperandFormat::Bf16Pair => bf16_pairs::pack(&mut self.pool, (n, k), bytes, &mut buf),
            OperandFormat::F32 => CpuBackend::copy_packed(&mut self.pool, bytes, &mut buf),
        }
        Ok(Weight { id: None, buf, ty, n, k })
    }

    fn prepare_weight(&mut self, ty: QuantType, k: usize) -> Result<(), DeviceError> {
        self.grow_scratch(self.sizes.weight_scratch(ty, k))
    }

    fn host_bytes(buf: &mut HostBuf) -> Option<&mut [u8]> {
        Some(buf.bytes_mut())
    }

    fn refill_weight(
        &mut self,
        w: &mut Weight<HostBuf>,
        layout: &PackedLayout,
        packed: &[u8],
    ) -> Result<(), DeviceError> {
        w.packed_layout(&self.sizes).check(layout, packed)?;
        CpuBackend::copy_packed(&mut self.pool, packed, &mut w.buf);
        Ok(())
    }

    fn alloc_kv(&mut self, layout: KvLayout) -> Result<KvLayer<HostBuf>, DeviceError> {
        self.alloc_kv_in(&self.memory.clone(), layout)
    }

    /// The threads that compute for the device also compute in host memory.
    fn alloc_host_kv(&mut self, layout: KvLayout) -> Result<KvLayer<HostBuf>, DeviceError> {
        self.alloc_kv_in(&self.host.clone(), layout)
    }

    fn prepare(&mut self, limits: &StepLimits) -> Result<(), DeviceError> {
        self.grow_scratch(self.sizes.step_scratch(limits))?;
        self.step = Some(StepState::new(limits));
        self.span_items = Vec::with_capacity(limits.rows_at_once());
        let threads = (self.pool.threads(), self.level);
        self.sample_scratch = Some(SampleScratch::new(limits, threads, self.memory.lists()));
        // Lists are counted only after they are allocated.
        self.memory.check(0)
    }

    fn begin_step(&mut self, batch: &StepBatch) {
        self.clock.begin();
        self.sample_scratch.as_mut().expect(NOT_PREPARED).begin(batch);
        self.step.as_mut().expect(NOT_PREPARED).begin(batch);
    }

    fn map_rows(&mut self, batch: &StepBatch) {
        self.step.as_mut().expect(NOT_PREPARED).map(batch);
    }

    fn end_step(&mut self) -> StepTimes {
        self.clock.end()
    }

    fn row_batches(&self, stack: SpanStack) -> usize {
        self.step().row_batches(stack)
    }

    fn select_rows(&mut self, stack: SpanStack, batch: usize) -> Range<usize> {
        self.step.as_mut().expect(NOT_PREPARED).select(stack, batch)
    }

    fn copy_pages(&mut self, table: KvTable, copies: &[PageCopy], cache: &mut KvLayer<HostBuf>) {
        attention::copy_pages(table, copies, cache);
    }

    fn embed(&mut self, table: &Weight<HostBuf>, first: usize, x: &mut HostBuf) {
        let step = self.step.as_ref().expect(NOT_PREPARED);
        let x = &mut x.f32_mut()[..step.rows().len() * table.k];
        rows::embed(&mut self.pool, step, (self.sizes.precision, table), first, x);
    }

    fn embed_positions(&mut self, table: &Weight<HostBuf>, offset: usize, type_rows: usize, x: &mut HostBuf) {
        let step = self.step.as_ref().expect(NOT_PREPARED);
        let x = &mut x.f32_mut()[..step.rows().len() * table.k];
        rows::embed_positions(&mut self.pool, step, (self.sizes.precision, table), (offset, type_rows), x);
    }

    fn matmul_to(
        &mut self,
        rows: usize,
        w: (&Weight<HostBuf>, OutputColumns),
        bias: Option<&HostBuf>,
        x: &HostBuf,
        y: &mut HostBuf,
    ) {
        let input = GemmInput { rows, k: w.0.k, values: InputValues::Given(x.f32()) };
        let task = GemmTask::new(w, bias, Epilogue::Set(y), rows);
        let scratch = self.scratch.gemm.as_mut().expect(NOT_PREPARED);
        assert!(rows <= self.scratch.sizes.rows, "{rows} rows exceed the limits");
        scratch.multiply(&mut self.pool, self.level, &input, &[Some(task)]);
    }

    fn matmul_heads(
        &mut self,
        rows: usize,
        heads: usize,
        w: (&Weight<HostBuf>, OutputColumns),
        x: &HostBuf,
        y: &mut HostBuf,
    ) {
        assert!(rows <= self.scratch.sizes.rows, "{rows} rows exceed the limits");
        let scratch = self.scratch.gemm.as_mut().expect(NOT_PREPARED);
        scratch.multiply_heads(&mut self.pool, self.level, (rows, heads), w, x, y);
    }

    fn gemms(&mut self, rows: usize, input: InputOperand<HostBuf>, gemms: &mut [Gemm<HostBuf>]) {
        assert!(rows <= self.scratch.sizes.rows, "{rows} rows exceed the limits");
        let Some(k) = gemms.first().map(|gemm| gemm.w.k) else { return };
        let input = match input {
            InputOperand::Given(_) => input,
            computed if gemm_input::should_materialize(rows, k, self.pool.threads()) => {
                InputOperand::Given(computed.materialize(self, rows, k))
            }
            computed => computed,
        };
        let values = match input {
            InputOperand::Given(x) => InputValues::Given(x.f32()),
            InputOperand::Normed { norm, x, .. } => InputValues::Normed(norm, x.f32()),
            InputOperand::Activated { act, gate, up } => {
                InputValues::Activated(act, gate.f32(), up.map(HostBuf::f32))
            }
        };
        let input = GemmInput { rows, k, values };
        let scratch = self.scratch.gemm.as_mut().expect(NOT_PREPARED);
        let mut tasks = gemms.iter_mut().flat_map(|gemm| GemmTask::of(gemm.reborrow(), rows)).peekable();
        while tasks.peek().is_some() {
            let job: [Option<GemmTask>; GEMMS_PER_JOB] = std::array::from_fn(|_| tasks.next());
            scratch.multiply(&mut self.pool, self.level, &input, &job);
        }
    }

    fn norm(&mut self, rows: usize, norm: &Norm<HostBuf>, x: &HostBuf, y: &mut HostBuf) {
        let len = rows * norm.width;
        norm::norm_to(&mut self.pool, self.level, norm, &x.f32()[..len], &mut y.f32_mut()[..len]);
    }

    fn norm_in_place(&mut self, rows: usize, norm: &Norm<HostBuf>, x: &mut HostBuf) {
        norm::norm(&mut self.pool, self.level, norm, &mut x.f32_mut()[..rows * norm.width]);
    }

    fn rope_angles(&mut self, rope: &Rope<HostBuf>, angles: &mut HostBuf) {
        let step = self.step.as_ref().expect(NOT_PREPARED);
        let angles = &mut angles.f32_mut()[..step.rows().len() * rope.dims];
        rope::angles(&mut self.pool, step, rope, angles);
    }

    fn rope(
        &mut self,
        rope: &Rope<HostBuf>,
        angles: &HostBuf,
        heads: usize,
        head_dim: usize,
        x: &mut HostBuf,
    ) {
        let x = &mut x.f32_mut()[..self.step.as_ref().expect(NOT_PREPARED).rows().len() * heads * head_dim];
        rope::rope(&mut self.pool, rope, angles.f32(), heads, head_dim, x);
    }

    fn store_kv(&mut self, table: KvTable, k: &HostBuf, v: &HostBuf, cache: &mut KvLayer<HostBuf>) {
        let step = self.step.as_ref().expect(NOT_PREPARED);
        attention::store_kv(&mut self.pool, step, table, k.f32(), v.f32(), cache);
    }

    fn attention(
        &mut self,
        shape: &AttentionShape<HostBuf>,
        q: &HostBuf,
        cache: &KvLayer<HostBuf>,
        out: &mut HostBuf,
    ) {
        self.attend(AttentionInputs { shape, q: q.f32(), cache, values: None }, out);
    }

    fn fetches_values(&self) -> bool {
        true
    }

    fn attention_fetching_values(
        &mut self,
        shape: &AttentionShape<HostBuf>,
        q: &HostBuf,
        (cache, values): (&KvLayer<HostBuf>, &dyn ValueSource),
        out: &mut HostBuf,
    ) {
        self.attend(AttentionInputs { shape, q: q.f32(), cache, values: Some(values) }, out);
    }

    fn activate(
        &mut self,
        rows: usize,
        width: usize,
        act: Activation,
        gate: &mut HostBuf,
        up: Option<&HostBuf>,
    ) {
        let gate = &mut gate.f32_mut()[..rows * width];
        activation::activate(&mut self.pool, self.level, act, width, gate, up.map(HostBuf::f32));
    }

    fn add(&mut self, rows: usize, width: usize, factor: f32, x: &mut HostBuf, y: &HostBuf) {
        rows::add(&mut self.pool, width, factor, &mut x.f32_mut()[..rows * width], y.f32());
    }

    fn scale(&mut self, rows: usize, width: usize, factor: f32, x: &mut HostBuf) {
        rows::scale(&mut self.pool, width, factor, &mut x.f32_mut()[..rows * width]);
    }

    fn softcap(&mut self, rows: usize, width: usize, cap: f32, x: &mut HostBuf) {
        activation::softcap(&mut self.pool, self.level, width, cap, &mut x.f32_mut()[..rows * width]);
    }

    fn clamp(&mut self, rows: usize, width: usize, bound: f32, x: &mut HostBuf) {
        activation::clamp(&mut self.pool, width, bound, &mut x.f32_mut()[..rows * width]);
    }

    fn gate_rows(&mut self, rows: usize, width: usize, gate: &HostBuf, x: &mut HostBuf) {
        let x = &mut x.f32_mut()[..rows * width];
        activation::gate_rows(&mut self.pool, self.level, width, &gate.f32()[..rows], x);
    }

    fn prepare_moe(&mut self, shape: &MoeShape, hidden: usize) -> Result<(), DeviceError> {
        self.grow_scratch(self.sizes.moe_scratch(shape, hidden))
    }

    fn moe(
        &mut self,
        rows: usize,
        shape: &MoeShape,
        router: &HostBuf,
        experts: Experts<HostBuf>,
        x: &HostBuf,
        y: &mut HostBuf,
    ) -> Result<(), DeviceError> {
        assert!(rows <= self.scratch.sizes.rows, "{rows} rows exceed the limits");
        let scratch = self
            .scratch
            .moe
            .as_mut()
            .expect("prepare_moe must be called before the first step; this is a bug");
        let gemms = self.scratch.gemm.as_mut().expect(NOT_PREPARED);
        let hidden = experts.held[0].down.n;
        let (router, x) = (&router.f32()[..rows * shape.experts], &x.f32()[..rows * hidden]);
        let inputs = moe::MoeInputs { shape, router, experts, x };
        moe::moe(&mut self.pool, self.level, (scratch, gemms), inputs, &mut y.f32_mut()[..rows * hidden])
    }

    fn all_reduce(&mut self, rows: usize, width: usize, x: &mut HostBuf) {
        self.stage.all_reduce(&mut x.f32_mut()[..rows * width]);
    }

    fn all_gather(&mut self, rows: usize, widths: &[usize], own: &HostBuf, all: &mut HostBuf) {
        self.stage.all_gather(rows, widths, own.f32(), all.f32_mut());
    }

    fn copy_columns(
        &mut self,
        (rows, copies): (usize, usize),
        (width, columns, x): (usize, Range<usize>, &HostBuf),
        (to, y): (OutputColumns, &mut HostBuf),
    ) {
        let y = &mut y.f32_mut()[..rows * copies * to.of];
        rows::columns(&mut self.pool, copies, (width, columns, x.f32()), (to, y));
    }

    fn gather_output_rows(&mut self, wanted: Range<usize>, width: usize, x: &HostBuf, y: &mut HostBuf) {
        let wanted = &self.step.as_ref().expect(NOT_PREPARED).wanted()[wanted];
        let y = &mut y.f32_mut()[..wanted.len() * width];
        rows::gather(&mut self.pool, wanted, width, x.f32(), y);
    }

    fn append_hidden(&mut self, rows: Range<usize>, width: usize, x: &HostBuf, out: &mut StepOutput) {
        out.hidden.extend_from_slice(&x.f32()[rows.start * width..rows.end * width]);
    }

    fn sample(
        &mut self,
        wanted: Range<usize>,
        logits: &HostBuf,
        inputs: SamplingInputs<'_>,
        out: &mut StepOutput,
    ) {
        let step = self.step.as_mut().expect(NOT_PREPARED);
        let scratch = self.sample_scratch.as_mut().expect(NOT_PREPARED);
        let clock = &mut self.clock;
        clock.sample(|| scratch.sample(&mut self.pool, step, wanted, (logits.f32(), inputs), out));
    }

    fn page_table(&self, slot: u32, table: KvTable) -> &[Page] {
        self.step().table(slot as usize, table)
    }
}
