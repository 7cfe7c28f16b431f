//! The CPU backend: vector kernels on a pool of threads, over buffers in host memory.
//!
//! This file is the list of operations; what they do is in the files named below, in reading order.
//! Invariant: what an operation computes depends neither on the number of threads nor, among instruction sets
//! with fused multiply-add, on the instruction set; and no step allocates.

mod config;

#[cfg_attr(not(target_arch = "x86_64"), path = "no_amx.rs")]
mod amx;
mod pool;
mod products;
mod simd;
mod source;
mod step;

mod activation;
mod attention;
mod ceilings;
mod halves;
mod matmul;
mod moe;
mod norm;
mod packed;
mod rope;
mod rows;
mod sample;

pub use ceilings::{Ceilings, Meter};
pub use config::{CpuConfig, Isa};

use crate::backend::{
    Activation, AttentionShape, Backend, DeviceError, Expert, Factor, KvLayer, KvLayout, KvTable, MoeShape,
    Norm, Product, Rope, StepLimits, To, Weight,
};
use crate::batch::{Page, PageCopy, SpanStack, StepBatch, StepOutput};
use crate::collective::Collective;
use crate::host::HostBuf;
use crate::quant::{Inputs, Operand, QuantType};
use crate::stage::Stage;
use halves::Dots;
use moe::{MoeScratch, MoeSizes};
use pool::Pool;
use products::{Products, TOGETHER, Widths};
use sample::SampleScratch;
use simd::Level;
use source::{Of, Source};
use std::ops::Range;
use step::Step;

/// Bytes of a weight that one thread copies at a time.
const UPLOAD_BYTES: usize = 1 << 22;

/// The CPU as a device.
pub struct CpuBackend {
    level: Level,
    pool: Pool,
    stage: Stage,
    step: Option<Step>,
    sampling: Option<SampleScratch>,
    inputs: Inputs,
    dots: Option<Dots>,
    products: Option<Products>,
    attention: Option<HostBuf>,
    moe: Option<MoeScratch>,
    sizes: Sizes,
}

/// What the scratch buffers are made for: rows of a step, the widest weights, the widest heads, the largest mixture.
#[derive(Clone, Copy, Default)]
struct Sizes {
    rows: usize,
    widths: Widths,
    /// Numbers of attention's scratch for each thread, by the cache and by the positions.
    attention: usize,
    sparse: usize,
    /// Numbers of a partial result of attention, by the cache, and how many there may be, by the positions.
    partial: usize,
    partials: usize,
    moe: MoeSizes,
}

impl Sizes {
    /// Enough for both.
    fn max(self, other: Sizes) -> Sizes {
        Sizes {
            rows: self.rows.max(other.rows),
            widths: self.widths.max(other.widths),
            attention: self.attention.max(other.attention),
            sparse: self.sparse.max(other.sparse),
            partial: self.partial.max(other.partial),
            partials: self.partials.max(other.partials),
            moe: self.moe.max(other.moe),
        }
    }

    /// F32 numbers of attention's scratch.
    fn attention_len(&self, threads: usize) -> usize {
        threads * (self.attention + self.sparse) + self.partials * self.partial
    }
}

impl CpuBackend {
    /// Starts the threads. Fails without any, or when the CPU lacks the instruction set asked for.
    pub fn new(config: CpuConfig) -> Result<CpuBackend, DeviceError> {
        if config.threads == 0 {
            return Err(DeviceError::Unsupported("a CPU device needs at least one thread".into()));
        }
        let dots = Dots::new(config.isa);
        if config.isa == Isa::Amx && dots.is_none() {
            return Err(DeviceError::Unsupported("this CPU, or its system, has no amx".into()));
        }
        Ok(CpuBackend {
            level: Level::new(config.isa)?,
            pool: Pool::new(config.threads)?,
            stage: Stage::default(),
            step: None,
            sampling: None,
            inputs: if dots.is_some() { config.inputs.with_halves() } else { config.inputs },
            dots,
            products: None,
            attention: None,
            moe: None,
            sizes: Sizes::default(),
        })
    }

    fn isa(&self) -> Isa {
        match self.dots {
            #[cfg(target_arch = "x86_64")]
            Some(Dots::Amx(_)) => Isa::Amx,
            #[cfg(target_arch = "x86_64")]
            Some(Dots::Avx512(_)) => Isa::Avx512,
            _ => self.level.isa(),
        }
    }

    fn step(&self) -> &Step {
        self.step.as_ref().expect(UNPREPARED)
    }

    /// Makes scratch anew where it has become too small. Before `prepare` has told the rows, sizes are only noted.
    fn grow_scratch(&mut self, to: Sizes) -> Result<(), DeviceError> {
        let from = self.sizes;
        let sizes = from.max(to);
        self.sizes = sizes;
        if sizes.rows == 0 {
            return Ok(());
        }
        let (threads, more_rows) = (self.pool.threads(), sizes.rows > from.rows);
        if self.products.is_none() || more_rows || sizes.widths != from.widths {
            self.products = Some(Products::new((self.inputs, self.dots), sizes.rows, sizes.widths, threads)?);
        }
        let attention = sizes.attention_len(threads);
        if self.attention.is_none() || attention > from.attention_len(threads) {
            self.attention = Some(HostBuf::zeroed(attention * size_of::<f32>())?);
        }
        let has_moe = sizes.moe != MoeSizes::default();
        if has_moe && (self.moe.is_none() || more_rows || sizes.moe != from.moe) {
            self.moe = Some(MoeScratch::new(sizes.rows, sizes.moe)?);
        }
        Ok(())
    }
}

const UNPREPARED: &str = "prepare comes before the first step; this is a bug";

/// A product as threads take it.
fn taken<'a>(product: &'a mut Product<HostBuf>, rows: usize) -> products::Product<'a> {
    let to = match &mut product.to {
        To::Set(y) => (products::To::Set, &mut **y),
        To::Add { x, .. } => (products::To::Add, &mut **x),
    };
    products::Product::new(product.w, product.bias, to, rows)
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

    fn inputs(&self) -> Inputs {
        self.inputs
    }

    fn join(&mut self, stage: Box<dyn Collective>) {
        self.stage = Stage::of(stage);
    }

    fn place(&self) -> (usize, usize) {
        self.stage.place()
    }

    fn alloc(&mut self, bytes: usize) -> Result<HostBuf, DeviceError> {
        HostBuf::zeroed(bytes)
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
        out: usize,
        inp: usize,
        bytes: &[u8],
    ) -> Result<Weight<HostBuf>, DeviceError> {
        let expected = ty.bytes(inp).and_then(|row| row.checked_mul(out));
        assert_eq!(Some(bytes.len()), expected, "{ty} codes of a {out} x {inp} matrix");
        self.grow_scratch(Sizes { widths: Widths::of(self.inputs, ty, inp), ..Sizes::default() })?;
        let mut buf = HostBuf::zeroed(self.weight_bytes(ty, out, inp))?;
        match ty.operand(self.inputs) {
            Operand::Codes => packed::pack(&mut self.pool, ty, (out, inp), bytes, &mut buf),
            Operand::Bf16 => halves::pack(&mut self.pool, (out, inp), bytes, &mut buf),
            Operand::F32 => self.pool.for_parts(buf.bytes_mut(), UPLOAD_BYTES, |part, to| {
                to.copy_from_slice(&bytes[part * UPLOAD_BYTES..][..to.len()]);
            }),
        }
        Ok(Weight { buf, ty, out, inp })
    }

    fn weight_bytes(&self, ty: QuantType, out: usize, inp: usize) -> usize {
        match ty.operand(self.inputs) {
            Operand::Codes => packed::packed_bytes(ty, out, inp).expect("it has codes; this is a bug"),
            Operand::Bf16 => halves::packed_bytes(out, inp),
            Operand::F32 => ty.bytes(inp).expect("rows are whole blocks; this is a bug") * out,
        }
    }

    fn alloc_kv(&mut self, layout: KvLayout) -> Result<KvLayer<HostBuf>, DeviceError> {
        layout.check_type()?;
        self.grow_scratch(Sizes {
            attention: attention::scratch_len(&layout),
            partial: attention::partial_len(&layout),
            ..Sizes::default()
        })?;
        attention::alloc_kv(layout)
    }

    fn prepare(&mut self, limits: &StepLimits) -> Result<(), DeviceError> {
        self.grow_scratch(Sizes {
            rows: limits.rows.max(limits.logit_rows),
            sparse: attention::sparse_scratch_len(limits),
            partials: attention::partials(limits, self.pool.threads()),
            ..Sizes::default()
        })?;
        self.step = Some(Step::new(limits));
        self.sampling = Some(SampleScratch::new(limits, self.pool.threads()));
        Ok(())
    }

    fn begin(&mut self, batch: &StepBatch) {
        self.step.as_mut().expect(UNPREPARED).begin(batch);
    }

    fn select(&mut self, stack: SpanStack) -> usize {
        self.step.as_mut().expect(UNPREPARED).select(stack)
    }

    fn copy_pages(&mut self, copies: &[PageCopy], cache: &mut KvLayer<HostBuf>) {
        attention::copy_pages(copies, cache);
    }

    fn embed(&mut self, table: &Weight<HostBuf>, first: usize, x: &mut HostBuf) {
        let step = self.step.as_ref().expect(UNPREPARED);
        let x = &mut x.f32_mut()[..step.rows().len() * table.inp];
        rows::embed(&mut self.pool, step, (self.inputs, table), first, x);
    }

    fn embed_positions(&mut self, table: &Weight<HostBuf>, offset: usize, x: &mut HostBuf) {
        let step = self.step.as_ref().expect(UNPREPARED);
        let x = &mut x.f32_mut()[..step.rows().len() * table.inp];
        rows::embed_positions(&mut self.pool, step, (self.inputs, table), offset, x);
    }

    fn matmul(
        &mut self,
        rows: usize,
        w: &Weight<HostBuf>,
        bias: Option<&HostBuf>,
        x: &HostBuf,
        y: &mut HostBuf,
    ) {
        self.products(rows, Factor::Given(x), &mut [Product { w, bias, to: To::Set(y) }]);
    }

    fn products(&mut self, rows: usize, factor: Factor<HostBuf>, products: &mut [Product<HostBuf>]) {
        assert!(rows <= self.sizes.rows, "{rows} rows exceed the limits");
        let Some(inp) = products.first().map(|product| product.w.inp) else { return };
        let factor = match factor {
            Factor::Given(_) => factor,
            made if source::is_made_apart(rows, inp, self.pool.threads()) => {
                Factor::Given(made.made(self, rows, inp))
            }
            made => made,
        };
        let of = match factor {
            Factor::Given(x) => Of::Given(x.f32()),
            Factor::Normed { norm, x, .. } => Of::Normed(norm, x.f32()),
            Factor::Activated { act, gate, up } => Of::Activated(act, gate.f32(), up.map(HostBuf::f32)),
        };
        let (source, scratch) = (Source { rows, inp, of }, self.products.as_mut().expect(UNPREPARED));
        for products in products.chunks_mut(TOGETHER) {
            let mut each = products.iter_mut();
            let together = std::array::from_fn(|_| each.next().map(|product| taken(product, rows)));
            scratch.multiply(&mut self.pool, self.level, &source, &together);
        }
    }

    fn norm(&mut self, rows: usize, norm: &Norm<HostBuf>, x: &HostBuf, y: &mut HostBuf) {
        let len = rows * norm.width;
        norm::norm_to(&mut self.pool, self.level, norm, &x.f32()[..len], &mut y.f32_mut()[..len]);
    }

    fn norm_in_place(&mut self, rows: usize, norm: &Norm<HostBuf>, x: &mut HostBuf) {
        norm::norm(&mut self.pool, self.level, norm, &mut x.f32_mut()[..rows * norm.width]);
    }

    fn angles(&mut self, rope: &Rope<HostBuf>, angles: &mut HostBuf) {
        let step = self.step.as_ref().expect(UNPREPARED);
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
        let x = &mut x.f32_mut()[..self.step.as_ref().expect(UNPREPARED).rows().len() * heads * head_dim];
        rope::rope(&mut self.pool, rope, angles.f32(), heads, head_dim, x);
    }

    fn store_kv(&mut self, table: KvTable, k: &HostBuf, v: &HostBuf, cache: &mut KvLayer<HostBuf>) {
        let step = self.step.as_ref().expect(UNPREPARED);
        attention::store_kv(&mut self.pool, step, table, k.f32(), v.f32(), cache);
    }

    fn attention(
        &mut self,
        shape: &AttentionShape<HostBuf>,
        q: &HostBuf,
        cache: &KvLayer<HostBuf>,
        out: &mut HostBuf,
    ) {
        let step = self.step.as_mut().expect(UNPREPARED);
        let scratch = self.attention.as_mut().expect("alloc_kv made the cache; this is a bug").f32_mut();
        let inputs = attention::Inputs { shape, q: q.f32(), cache };
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
        let moe = MoeSizes { experts: shape.experts, top_k: shape.top_k, hidden, width: shape.width };
        self.grow_scratch(Sizes { moe, ..Sizes::default() })
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
        assert!(rows <= self.sizes.rows, "{rows} rows exceed the limits");
        let scratch = self.moe.as_mut().expect("prepare_moe comes before the first step; this is a bug");
        let products = self.products.as_mut().expect(UNPREPARED);
        let hidden = experts[0].down.out;
        let (router, x) = (&router.f32()[..rows * shape.experts], &x.f32()[..rows * hidden]);
        let inputs = moe::Inputs { shape, router, experts, x };
        moe::moe(&mut self.pool, self.level, (scratch, products), inputs, &mut y.f32_mut()[..rows * hidden]);
    }

    fn reduce(&mut self, rows: usize, width: usize, x: &mut HostBuf) {
        self.stage.sum(&mut x.f32_mut()[..rows * width]);
    }

    fn all_gather(&mut self, rows: usize, widths: &[usize], own: &HostBuf, all: &mut HostBuf) {
        self.stage.gather(rows, widths, own.f32(), all.f32_mut());
    }

    fn columns(&mut self, rows: usize, width: usize, columns: Range<usize>, x: &HostBuf, y: &mut HostBuf) {
        let y = &mut y.f32_mut()[..rows * columns.len()];
        rows::columns(&mut self.pool, width, columns, x.f32(), y);
    }

    fn gather(&mut self, wanted: Range<usize>, width: usize, x: &HostBuf, y: &mut HostBuf) {
        let wanted = &self.step.as_ref().expect(UNPREPARED).wanted()[wanted];
        let y = &mut y.f32_mut()[..wanted.len() * width];
        rows::gather(&mut self.pool, wanted, width, x.f32(), y);
    }

    fn hidden(&mut self, rows: Range<usize>, width: usize, x: &HostBuf, out: &mut StepOutput) {
        out.hidden.extend_from_slice(&x.f32()[rows.start * width..rows.end * width]);
    }

    fn sample(&mut self, wanted: Range<usize>, logits: &HostBuf, out: &mut StepOutput) {
        let step = self.step.as_mut().expect(UNPREPARED);
        let scratch = self.sampling.as_mut().expect(UNPREPARED);
        sample::sample(&mut self.pool, scratch, step, wanted, logits.f32(), out);
    }

    fn table(&self, slot: u32, table: KvTable) -> &[Page] {
        self.step().table(slot as usize, table)
    }
}

#[cfg(test)]
mod tests;
