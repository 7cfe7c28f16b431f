//! The CPU backend: SIMD kernels that run on a thread pool, over buffers in host memory.
//!
//! This file implements [`Backend`] by dispatching to the modules named below, listed in reading order.
//! Invariant: the result of an operation depends neither on the number of threads nor, among instruction sets
//! with fused multiply-add, on the instruction set. No step allocates.

mod config;

#[cfg_attr(not(target_arch = "x86_64"), path = "no_amx.rs")]
mod amx;
mod gemm_input;
mod gemms;
mod pool;
mod simd;
mod step;

mod activation;
mod attention;
mod bf16;
mod f32_gemm;
mod moe;
mod norm;
mod packed;
mod roofline;
mod rope;
mod rows;
mod sample;
mod scratch;

pub use config::{CpuConfig, Isa};
pub use roofline::{Roofline, RooflineMeter};

use crate::backend::{
    Activation, AttentionShape, Backend, DeviceError, Epilogue, Expert, Gemm, InputOperand, KvLayer,
    KvLayout, KvTable, MoeShape, Norm, Rope, SamplingInputs, StepLimits, Weight,
};
use crate::batch::{Page, PageCopy, SpanStack, StepBatch, StepOutput, StepTimes};
use crate::clock::StepClock;
use crate::collective::Collective;
use crate::host::{HostBuf, HostMemory};
use crate::quant::{ActivationPrecision, OperandFormat, QuantType};
use crate::stage::StageCollective;
use bf16::Bf16Isa;
use gemm_input::{GemmInput, InputValues};
use gemms::{GEMMS_PER_JOB, GemmScratch, ScratchWidths};
use moe::{MoeScratch, MoeScratchSizes};
use pool::ThreadPool;
use sample::SampleScratch;
use scratch::ScratchSizes;
use simd::Level;
use std::ops::Range;
use step::StepState;

/// Bytes of a weight that one work item copies during an upload.
const UPLOAD_ITEM_BYTES: usize = 1 << 22;

/// The backend that computes on the CPU.
pub struct CpuBackend {
    level: Level,
    pool: ThreadPool,
    stage: StageCollective,
    step: Option<StepState>,
    sample_scratch: Option<SampleScratch>,
    activation_precision: ActivationPrecision,
    bf16_isa: Option<Bf16Isa>,
    gemm_scratch: Option<GemmScratch>,
    attention_scratch: Option<HostBuf>,
    moe_scratch: Option<MoeScratch>,
    scratch_sizes: ScratchSizes,
    memory: HostMemory,
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
        if config.threads == 0 {
            return Err(DeviceError::Unsupported("a CPU device needs at least one thread".into()));
        }
        let bf16_isa = Bf16Isa::new(config.isa);
        if config.isa == Isa::Amx && bf16_isa.is_none() {
            return Err(DeviceError::Unsupported(
                "this CPU or its operating system does not support amx".into(),
            ));
        }
        Ok(CpuBackend {
            level: Level::new(config.isa)?,
            pool: ThreadPool::new(number, config.threads)?,
            stage: StageCollective::default(),
            step: None,
            sample_scratch: None,
            activation_precision: if bf16_isa.is_some() {
                config.activation_precision.with_bf16()
            } else {
                config.activation_precision
            },
            bf16_isa,
            gemm_scratch: None,
            attention_scratch: None,
            moe_scratch: None,
            scratch_sizes: ScratchSizes::default(),
            memory: HostMemory::default(),
            clock: StepClock::default(),
        })
    }

    /// Returns the instruction set in use; never `Auto`.
    pub fn isa(&self) -> Isa {
        match self.bf16_isa {
            #[cfg(target_arch = "x86_64")]
            Some(Bf16Isa::Amx(_)) => Isa::Amx,
            #[cfg(target_arch = "x86_64")]
            Some(Bf16Isa::Avx512(_)) => Isa::Avx512,
            _ => self.level.isa(),
        }
    }

    fn step(&self) -> &StepState {
        self.step.as_ref().expect(NOT_PREPARED)
    }

    /// Reallocates the scratch buffers that are too small for `to`. Before `prepare` has set the number of
    /// rows, only records the sizes.
    fn grow_scratch(&mut self, to: ScratchSizes) -> Result<(), DeviceError> {
        let from = self.scratch_sizes;
        let sizes = from.max(to);
        self.scratch_sizes = sizes;
        if sizes.rows == 0 {
            return Ok(());
        }
        let (threads, more_rows) = (self.pool.threads(), sizes.rows > from.rows);
        if self.gemm_scratch.is_none() || more_rows || sizes.widths != from.widths {
            self.gemm_scratch = Some(GemmScratch::new(
                (self.activation_precision, self.bf16_isa),
                sizes.rows,
                sizes.widths,
                threads,
                &self.memory,
            )?);
        }
        let attention = sizes.attention_len(threads);
        if self.attention_scratch.is_none() || attention > from.attention_len(threads) {
            self.attention_scratch = Some(self.memory.zeroed(attention * size_of::<f32>())?);
        }
        let has_moe = sizes.moe != MoeScratchSizes::default();
        if has_moe && (self.moe_scratch.is_none() || more_rows || sizes.moe != from.moe) {
            self.moe_scratch = Some(MoeScratch::new(sizes.rows, sizes.moe, &self.memory)?);
        }
        Ok(())
    }
}

const NOT_PREPARED: &str = "prepare must be called before the first step; this is a bug";

/// Converts a backend GEMM to the form that the kernels' threads use.
fn gemm_task<'a>(gemm: &'a mut Gemm<HostBuf>, rows: usize) -> gemms::GemmTask<'a> {
    let to = match &mut gemm.epilogue {
        Epilogue::Set(y) => (gemms::RowEpilogue::Set, &mut **y),
        Epilogue::Add { x, .. } => (gemms::RowEpilogue::Add, &mut **x),
    };
    gemms::GemmTask::new(gemm.w, gemm.bias, to, rows)
}

impl Backend for CpuBackend {
    type Buf = HostBuf;

    fn describe(&self) -> String {
        let threads = self.pool.threads();
        format!("cpu ({}, {threads} {})", self.isa().name(), if threads == 1 { "thread" } else { "threads" })
    }

    fn threads(&self) -> usize {
        self.pool.threads()
    }

    fn allocated_bytes(&self) -> usize {
        self.memory.used()
    }

    fn activation_precision(&self) -> ActivationPrecision {
        self.activation_precision
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
        self.grow_scratch(ScratchSizes {
            widths: ScratchWidths::for_weight(self.activation_precision, ty, k),
            ..ScratchSizes::default()
        })?;
        let mut buf = self.memory.zeroed(self.weight_bytes(ty, n, k))?;
        match ty.operand_format(self.activation_precision) {
            OperandFormat::Int8 => packed::pack(&mut self.pool, ty, (n, k), bytes, &mut buf),
            OperandFormat::Bf16 => bf16::pack(&mut self.pool, (n, k), bytes, &mut buf),
            OperandFormat::F32 => self.pool.for_chunks(buf.bytes_mut(), UPLOAD_ITEM_BYTES, |part, to| {
                to.copy_from_slice(&bytes[part * UPLOAD_ITEM_BYTES..][..to.len()]);
            }),
        }
        Ok(Weight { buf, ty, n, k })
    }

    fn weight_bytes(&self, ty: QuantType, n: usize, k: usize) -> usize {
        match ty.operand_format(self.activation_precision) {
            OperandFormat::Int8 => {
                packed::packed_bytes(ty, n, k).expect("the format is packed; this is a bug")
            }
            OperandFormat::Bf16 => bf16::packed_bytes(n, k),
            OperandFormat::F32 => ty.bytes(k).expect("rows are whole blocks; this is a bug") * n,
        }
    }

    fn alloc_kv(&mut self, layout: KvLayout) -> Result<KvLayer<HostBuf>, DeviceError> {
        layout.check_type()?;
        self.grow_scratch(ScratchSizes {
            attention_per_thread: attention::scratch_len(&layout),
            partial_len: attention::partial_len(&layout),
            ..ScratchSizes::default()
        })?;
        attention::alloc_kv(layout, &self.memory)
    }

    fn prepare(&mut self, limits: &StepLimits) -> Result<(), DeviceError> {
        self.grow_scratch(ScratchSizes {
            rows: limits.rows.max(limits.logit_rows),
            sparse_per_thread: attention::sparse_scratch_len(limits),
            partial_count: attention::partial_capacity(limits, self.pool.threads()),
            ..ScratchSizes::default()
        })?;
        self.step = Some(StepState::new(limits));
        self.sample_scratch = Some(SampleScratch::new(limits, self.pool.threads()));
        Ok(())
    }

    fn begin_step(&mut self, batch: &StepBatch) {
        self.clock.begin();
        self.step.as_mut().expect(NOT_PREPARED).begin(batch);
    }

    fn end_step(&mut self) -> StepTimes {
        self.clock.end()
    }

    fn select_stack(&mut self, stack: SpanStack) -> usize {
        self.step.as_mut().expect(NOT_PREPARED).select(stack)
    }

    fn copy_pages(&mut self, copies: &[PageCopy], cache: &mut KvLayer<HostBuf>) {
        attention::copy_pages(copies, cache);
    }

    fn embed(&mut self, table: &Weight<HostBuf>, first: usize, x: &mut HostBuf) {
        let step = self.step.as_ref().expect(NOT_PREPARED);
        let x = &mut x.f32_mut()[..step.rows().len() * table.k];
        rows::embed(&mut self.pool, step, (self.activation_precision, table), first, x);
    }

    fn embed_positions(&mut self, table: &Weight<HostBuf>, offset: usize, x: &mut HostBuf) {
        let step = self.step.as_ref().expect(NOT_PREPARED);
        let x = &mut x.f32_mut()[..step.rows().len() * table.k];
        rows::embed_positions(&mut self.pool, step, (self.activation_precision, table), offset, x);
    }

    fn matmul(
        &mut self,
        rows: usize,
        w: &Weight<HostBuf>,
        bias: Option<&HostBuf>,
        x: &HostBuf,
        y: &mut HostBuf,
    ) {
        self.gemms(rows, InputOperand::Given(x), &mut [Gemm { w, bias, epilogue: Epilogue::Set(y) }]);
    }

    fn gemms(&mut self, rows: usize, input: InputOperand<HostBuf>, gemms: &mut [Gemm<HostBuf>]) {
        assert!(rows <= self.scratch_sizes.rows, "{rows} rows exceed the limits");
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
        let scratch = self.gemm_scratch.as_mut().expect(NOT_PREPARED);
        for gemms in gemms.chunks_mut(GEMMS_PER_JOB) {
            let mut gemms = gemms.iter_mut();
            let job = std::array::from_fn(|_| gemms.next().map(|gemm| gemm_task(gemm, rows)));
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
        let step = self.step.as_mut().expect(NOT_PREPARED);
        let scratch = self
            .attention_scratch
            .as_mut()
            .expect("attention scratch exists once alloc_kv has allocated a cache; this is a bug")
            .f32_mut();
        let inputs = attention::AttentionInputs { shape, q: q.f32(), cache };
        attention::attention(&mut self.pool, self.level, step, inputs, out.f32_mut(), scratch);
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

    fn gate_rows(&mut self, rows: usize, width: usize, gate: &HostBuf, x: &mut HostBuf) {
        let x = &mut x.f32_mut()[..rows * width];
        activation::gate_rows(&mut self.pool, self.level, width, &gate.f32()[..rows], x);
    }

    fn prepare_moe(&mut self, shape: &MoeShape, hidden: usize) -> Result<(), DeviceError> {
        let moe = MoeScratchSizes { experts: shape.experts, top_k: shape.top_k, hidden, width: shape.width };
        self.grow_scratch(ScratchSizes { moe, ..ScratchSizes::default() })
    }

    fn moe(
        &mut self,
        rows: usize,
        shape: &MoeShape,
        router: &HostBuf,
        experts: &[Expert<HostBuf>],
        x: &HostBuf,
        y: &mut HostBuf,
    ) {
        assert!(rows <= self.scratch_sizes.rows, "{rows} rows exceed the limits");
        let scratch = self
            .moe_scratch
            .as_mut()
            .expect("prepare_moe must be called before the first step; this is a bug");
        let gemms = self.gemm_scratch.as_mut().expect(NOT_PREPARED);
        let hidden = experts[0].down.n;
        let (router, x) = (&router.f32()[..rows * shape.experts], &x.f32()[..rows * hidden]);
        let inputs = moe::MoeInputs { shape, router, experts, x };
        moe::moe(&mut self.pool, self.level, (scratch, gemms), inputs, &mut y.f32_mut()[..rows * hidden]);
    }

    fn all_reduce(&mut self, rows: usize, width: usize, x: &mut HostBuf) {
        self.stage.all_reduce(&mut x.f32_mut()[..rows * width]);
    }

    fn all_gather(&mut self, rows: usize, widths: &[usize], own: &HostBuf, all: &mut HostBuf) {
        self.stage.all_gather(rows, widths, own.f32(), all.f32_mut());
    }

    fn copy_columns(
        &mut self,
        rows: usize,
        width: usize,
        columns: Range<usize>,
        x: &HostBuf,
        y: &mut HostBuf,
    ) {
        let y = &mut y.f32_mut()[..rows * columns.len()];
        rows::columns(&mut self.pool, width, columns, x.f32(), y);
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

    fn read_page_table(&self, slot: u32, table: KvTable) -> Vec<Page> {
        self.step().table(slot as usize, table).to_vec()
    }
}
