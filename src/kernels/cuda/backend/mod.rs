//! The CUDA backend: every operation as a kernel on one GPU.
//!
//! Operations queue kernels on one stream. The host waits only where results are copied to it: at samples,
//! hidden states, collectives and the experts that rows choose.
//!
//! Invariant: the arithmetic of a result is fixed by shapes and formats; neither the grid of a launch nor the
//! number of rows changes the order of a sum.

mod attention;

mod exchange;

mod launch;

mod masks;

mod mixture;

mod products;

mod program;

mod row_ops;

mod sample;

mod scratch;

mod sizes;

mod steps;

pub use program::all_programs;
pub use sizes::CudaSizes;

use super::{Context, CudaBuf, Driver, ProgramCache};
use crate::backend::{
    Activation, AttentionShape, Backend, DeviceError, DeviceSizes, Experts, Gemm, HeldShapes, InputOperand,
    KvLayer, KvLayout, KvTable, MoeShape, Norm, OutputColumns, Rope, SamplingInputs, StepLimits, Weight,
};
use crate::batch::{Page, PageCopy, SpanStack, StepBatch, StepOutput, StepTimes};
use crate::clock::StepClock;
use crate::collective::Collective;
use crate::quant::{ActivationPrecision, QuantType};
use exchange::Exchange;
use launch::{Device, f32_bytes, unwind};
use program::KernelName;
use sample::Sampler;
use scratch::Scratch;
use std::ops::Range;
use steps::Steps;

/// One GPU.
pub struct CudaBackend {
    device: Device,
    sizes: CudaSizes,
    exchange: Exchange,
    /// Shapes that the scratch memory is for.
    shapes: HeldShapes,
    product_scratch: Scratch<{ products::BUFFERS }>,
    attention_scratch: Scratch<{ attention::BUFFERS }>,
    mixture_scratch: Scratch<{ mixture::BUFFERS }>,
    choices: mixture::Choices,
    sample_scratch: Scratch<{ sample::BUFFERS }>,
    steps: Option<Steps>,
    sampler: Option<Sampler>,
    clock: StepClock,
}

impl CudaBackend {
    /// Takes GPU `number`, whose kernels are compiled by `programs`, with this precision of activations.
    /// Fails with [`DeviceError::Unsupported`] if there is no such GPU, or if its architecture is too old.
    pub fn new(
        driver: &Driver,
        number: u32,
        programs: ProgramCache,
        precision: ActivationPrecision,
    ) -> Result<CudaBackend, DeviceError> {
        let context = Context::new(driver, number, programs)?;
        let sizes = CudaSizes::new(&driver.supported_gpu(number)?, precision);
        Ok(CudaBackend {
            product_scratch: Scratch::new(&context)?,
            attention_scratch: Scratch::new(&context)?,
            mixture_scratch: Scratch::new(&context)?,
            choices: mixture::Choices::default(),
            sample_scratch: Scratch::new(&context)?,
            device: Device::new(context),
            sizes,
            exchange: Exchange::default(),
            shapes: HeldShapes::default(),
            steps: None,
            sampler: None,
            clock: StepClock::default(),
        })
    }

    /// Returns the state of the slots, and the device that works on it.
    fn parts(&mut self) -> (&mut Device, &mut Steps) {
        (&mut self.device, self.steps.as_mut().expect(NOT_PREPARED))
    }

    fn steps(&self) -> &Steps {
        self.steps.as_ref().expect(NOT_PREPARED)
    }

    /// Allocates scratch memory anew where the limits and the shapes that were added need more.
    fn grow(&mut self) -> Result<(), DeviceError> {
        let Some(steps) = &self.steps else { return Ok(()) };
        let (limits, shapes, context) = (&steps.state.limits, &self.shapes, &self.device.context);
        self.product_scratch.grow(context, products::scratch_bytes(limits, shapes, self.sizes.precision))?;
        self.attention_scratch.grow(context, attention::scratch_bytes(limits, shapes))?;
        self.mixture_scratch.grow(context, mixture::scratch_bytes(limits, shapes))?;
        self.choices.reserve(limits, shapes);
        self.sample_scratch.grow(context, sample::scratch_bytes(limits))
    }
}

const NOT_PREPARED: &str = "prepare must be called before the first step; this is a bug";

impl Backend for CudaBackend {
    type Buf = CudaBuf;

    fn sizes(&self) -> &dyn DeviceSizes {
        &self.sizes
    }

    fn allocated_bytes(&self) -> usize {
        self.device.context.allocated_bytes()
    }

    fn activation_precision(&self) -> ActivationPrecision {
        self.sizes.precision
    }

    fn join_stage(&mut self, stage: Box<dyn Collective>) {
        self.exchange = unwind(Exchange::new(stage));
    }

    fn rank_and_count(&self) -> (usize, usize) {
        self.exchange.rank_and_count()
    }

    fn alloc(&mut self, bytes: usize) -> Result<CudaBuf, DeviceError> {
        self.device.context.alloc(bytes)
    }

    fn upload(&mut self, to: &mut CudaBuf, offset: usize, bytes: &[u8]) {
        unwind(self.device.context.upload(to, offset, bytes));
    }

    fn download(&mut self, from: &CudaBuf, offset: usize, bytes: &mut [u8]) {
        unwind(self.device.context.download(from, offset, bytes));
    }

    fn upload_weight(
        &mut self,
        ty: QuantType,
        n: usize,
        k: usize,
        bytes: &[u8],
    ) -> Result<Weight<CudaBuf>, DeviceError> {
        assert_eq!(Some(bytes.len()), ty.bytes(k).map(|row| row * n), "size of a {n} x {k} matrix of {ty}");
        self.prepare_weight(ty, k)?;
        let mut buf = self.device.context.alloc(bytes.len())?;
        self.device.context.upload(&mut buf, 0, bytes)?;
        Ok(Weight { id: None, buf, ty, n, k })
    }

    fn prepare_weight(&mut self, ty: QuantType, k: usize) -> Result<(), DeviceError> {
        self.products().load(ty)?;
        self.shapes.add_weight(ty, k);
        self.grow()
    }

    fn alloc_kv(&mut self, layout: KvLayout) -> Result<KvLayer<CudaBuf>, DeviceError> {
        assert_eq!(layout.page_positions % KvLayout::BLOCK_POSITIONS, 0, "pages hold whole blocks");
        let [k, v] = self.sizes.kv_bytes(&layout)?;
        attention::load(&mut self.device, layout.ty)?;
        self.shapes.add_cache(layout);
        self.grow()?;
        Ok(KvLayer { k: self.device.context.alloc(k)?, v: self.device.context.alloc(v)?, layout })
    }

    fn prepare(&mut self, limits: &StepLimits) -> Result<(), DeviceError> {
        (self.steps, self.sampler) = (None, None);
        // The program of all kernels on rows, so that no step waits for the compiler.
        self.device.load(KernelName::rows("move_tables"))?;
        self.steps = Some(Steps::new(&self.device, limits)?);
        self.sampler = Some(Sampler::new(&mut self.device, limits)?);
        // The widest rows that are gathered are logits.
        let is_divided = self.rank_and_count().1 > 1;
        self.exchange.reserve(if is_divided { limits.vocab } else { 0 })?;
        self.grow()?;
        self.clear_masks()
    }

    fn begin_step(&mut self, batch: &StepBatch) {
        self.clock.begin();
        let (device, steps) = self.parts();
        unwind(steps.begin(device, batch));
        unwind(self.change_counts(batch));
    }

    fn map_rows(&mut self, batch: &StepBatch) {
        let (device, steps) = self.parts();
        unwind(steps.map(device, batch));
    }

    fn end_step(&mut self) -> StepTimes {
        unwind(self.device.context.synchronize());
        self.clock.end()
    }

    fn row_batches(&self, stack: SpanStack) -> usize {
        self.steps().state.row_batches(stack)
    }

    fn select_rows(&mut self, stack: SpanStack, batch: usize) -> Range<usize> {
        self.parts().1.select(stack, batch)
    }

    fn copy_pages(&mut self, table: KvTable, copies: &[PageCopy], cache: &mut KvLayer<CudaBuf>) {
        unwind(attention::copy_pages(&mut self.device, table, copies, cache));
    }

    fn embed(&mut self, table: &Weight<CudaBuf>, first: usize, x: &mut CudaBuf) {
        let (device, steps) = self.parts();
        unwind(row_ops::embed(device, steps, table, first, x));
    }

    fn embed_positions(&mut self, table: &Weight<CudaBuf>, offset: usize, type_rows: usize, x: &mut CudaBuf) {
        let (device, steps) = self.parts();
        unwind(row_ops::embed_positions(device, steps, table, (offset, type_rows), x));
    }

    fn matmul_to(
        &mut self,
        rows: usize,
        w: (&Weight<CudaBuf>, OutputColumns),
        bias: Option<&CudaBuf>,
        x: &CudaBuf,
        y: &mut CudaBuf,
    ) {
        unwind(self.product((rows, 1), w, bias, (x, y)));
    }

    fn matmul_heads(
        &mut self,
        rows: usize,
        heads: usize,
        w: (&Weight<CudaBuf>, OutputColumns),
        x: &CudaBuf,
        y: &mut CudaBuf,
    ) {
        unwind(self.product((rows, heads), w, None, (x, y)));
    }

    fn gemms(&mut self, rows: usize, input: InputOperand<CudaBuf>, gemms: &mut [Gemm<CudaBuf>]) {
        let Some(k) = gemms.first().map(|gemm| gemm.w.k) else { return };
        let x = input.materialize(self, rows, k);
        unwind(self.products().multiply_all(rows, x, gemms));
    }

    fn norm(&mut self, rows: usize, norm: &Norm<CudaBuf>, x: &CudaBuf, y: &mut CudaBuf) {
        unwind(row_ops::norm(&mut self.device, rows, norm, (x, y)));
    }

    fn norm_in_place(&mut self, rows: usize, norm: &Norm<CudaBuf>, x: &mut CudaBuf) {
        unwind(row_ops::norm(&mut self.device, rows, norm, (x, x)));
    }

    fn rope_angles(&mut self, rope: &Rope<CudaBuf>, angles: &mut CudaBuf) {
        let (device, steps) = self.parts();
        unwind(row_ops::rope_angles(device, steps, rope, angles));
    }

    fn rope(
        &mut self,
        rope: &Rope<CudaBuf>,
        angles: &CudaBuf,
        heads: usize,
        head_dim: usize,
        x: &mut CudaBuf,
    ) {
        let (device, steps) = self.parts();
        unwind(row_ops::rope(device, steps.row_count(), (rope, angles), (heads, head_dim), x));
    }

    fn store_kv(&mut self, table: KvTable, k: &CudaBuf, v: &CudaBuf, cache: &mut KvLayer<CudaBuf>) {
        let (device, steps) = self.parts();
        unwind(attention::store_kv(device, steps, table, (k, v), cache));
    }

    fn attention(
        &mut self,
        shape: &AttentionShape<CudaBuf>,
        q: &CudaBuf,
        cache: &KvLayer<CudaBuf>,
        out: &mut CudaBuf,
    ) {
        unwind(self.attend(shape, cache, (q, out)));
    }

    fn activate(
        &mut self,
        rows: usize,
        width: usize,
        act: Activation,
        gate: &mut CudaBuf,
        up: Option<&CudaBuf>,
    ) {
        unwind(row_ops::activate(&mut self.device, rows * width, act, gate, up));
    }

    fn add(&mut self, rows: usize, width: usize, factor: f32, x: &mut CudaBuf, y: &CudaBuf) {
        unwind(row_ops::add(&mut self.device, rows * width, factor, x, y));
    }

    fn scale(&mut self, rows: usize, width: usize, factor: f32, x: &mut CudaBuf) {
        unwind(row_ops::map("scale", &mut self.device, rows * width, factor, x));
    }

    fn softcap(&mut self, rows: usize, width: usize, cap: f32, x: &mut CudaBuf) {
        unwind(row_ops::map("softcap", &mut self.device, rows * width, cap, x));
    }

    fn clamp(&mut self, rows: usize, width: usize, bound: f32, x: &mut CudaBuf) {
        unwind(row_ops::map("clamp", &mut self.device, rows * width, bound, x));
    }

    fn gate_rows(&mut self, rows: usize, width: usize, gate: &CudaBuf, x: &mut CudaBuf) {
        unwind(row_ops::gate_rows(&mut self.device, rows, width, gate, x));
    }

    fn prepare_moe(&mut self, shape: &MoeShape, hidden: usize) -> Result<(), DeviceError> {
        mixture::load(&mut self.device)?;
        self.shapes.add_mixture(*shape, hidden);
        self.grow()
    }

    fn moe(
        &mut self,
        rows: usize,
        shape: &MoeShape,
        router: &CudaBuf,
        experts: Experts<CudaBuf>,
        x: &CudaBuf,
        y: &mut CudaBuf,
    ) -> Result<(), DeviceError> {
        self.mixture(rows, shape, (router, experts), (x, y))
    }

    fn all_reduce(&mut self, rows: usize, width: usize, x: &mut CudaBuf) {
        unwind(self.exchange.all_reduce(&mut self.device.context, rows * width, x));
    }

    fn all_gather(&mut self, rows: usize, widths: &[usize], own: &CudaBuf, all: &mut CudaBuf) {
        unwind(self.exchange.all_gather(&mut self.device.context, (rows, widths), own, all));
    }

    fn copy_columns(
        &mut self,
        rows: (usize, usize),
        x: (usize, Range<usize>, &CudaBuf),
        to: (OutputColumns, &mut CudaBuf),
    ) {
        unwind(row_ops::copy_columns(&mut self.device, rows, x, to));
    }

    fn gather_output_rows(&mut self, outputs: Range<usize>, width: usize, x: &CudaBuf, y: &mut CudaBuf) {
        let (device, steps) = self.parts();
        unwind(row_ops::gather(device, steps, outputs, width, (x, y)));
    }

    fn append_hidden(&mut self, rows: Range<usize>, width: usize, x: &CudaBuf, out: &mut StepOutput) {
        let numbers =
            |bytes: &[u8]| out.hidden.extend(bytes.as_chunks().0.iter().copied().map(f32::from_le_bytes));
        let (first, bytes) = (f32_bytes(rows.start * width), f32_bytes(rows.len() * width));
        unwind(self.device.context.read(x, first, bytes, numbers));
    }

    fn sample(
        &mut self,
        outputs: Range<usize>,
        logits: &CudaBuf,
        inputs: SamplingInputs<'_>,
        out: &mut StepOutput,
    ) {
        // The clock leaves its place, because sampling needs the whole backend.
        let mut clock = std::mem::take(&mut self.clock);
        clock.sample(|| unwind(self.sample_rows(outputs, logits, inputs, out)));
        self.clock = clock;
    }

    fn page_table(&self, slot: u32, table: KvTable) -> &[Page] {
        self.steps().state.table(slot as usize, table)
    }
}

impl CudaBackend {
    /// Returns the bytes that were copied to the GPU so far.
    pub fn uploaded_bytes(&self) -> u64 {
        self.device.context.uploaded_bytes()
    }
}
