//! The CPU backend: vector kernels on a pool of threads, over buffers in host memory.
//!
//! This file is the list of operations; what they do is in the files named below, in reading order.
//! Invariant: what an operation computes depends neither on the number of threads nor, among instruction sets
//! with fused multiply-add, on the instruction set; and no step allocates.

mod attention;
mod elementwise;
mod matmul;
mod pool;
mod sample;
mod simd;
mod step;

use crate::backend::{
    Activation, AttentionShape, Backend, DeviceError, KvLayer, KvLayout, Norm, Rope, StepLimits, Weight,
};
use crate::batch::{Page, PageCopy, StepBatch, StepOutput};
use crate::host::HostBuf;
use crate::quant::QuantType;
use matmul::MatmulScratch;
use pool::Pool;
use sample::SampleScratch;
use simd::Level;
use std::ops::Range;
use step::Step;

/// Bytes of a weight that one thread copies at a time.
const UPLOAD_BYTES: usize = 1 << 22;

/// How to make a [`CpuBackend`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuConfig {
    /// Threads that work on a step, the driving one counted; at least 1.
    pub threads: usize,
    pub isa: Isa,
}

/// An instruction set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Isa {
    /// The best this CPU has.
    Auto,
    /// AVX-512F, with what AVX2 needs.
    Avx512,
    /// AVX2, FMA and F16C.
    Avx2,
    /// Nothing in particular. Its products are not fused, so its bits differ from the others'.
    Portable,
}

impl Isa {
    /// The name used in configuration and logs.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Auto => "auto",
            Isa::Avx512 => "avx512",
            Isa::Avx2 => "avx2",
            Isa::Portable => "portable",
        }
    }
}

/// The CPU as a device.
pub struct CpuBackend {
    level: Level,
    pool: Pool,
    step: Option<Step>,
    sampling: Option<SampleScratch>,
    matmul: Option<MatmulScratch>,
    attention: Option<HostBuf>,
    /// What the scratch buffers are made for: rows of a step, the widest weight, the widest head of V.
    rows: usize,
    inp_max: usize,
    v_dim_max: usize,
}

impl CpuBackend {
    /// Starts the threads. Fails without any, or when the CPU lacks the instruction set asked for.
    pub fn new(config: CpuConfig) -> Result<CpuBackend, DeviceError> {
        if config.threads == 0 {
            return Err(DeviceError::Unsupported("a CPU device needs at least one thread".into()));
        }
        Ok(CpuBackend {
            level: Level::new(config.isa)?,
            pool: Pool::new(config.threads)?,
            step: None,
            sampling: None,
            matmul: None,
            attention: None,
            rows: 0,
            inp_max: 0,
            v_dim_max: 0,
        })
    }

    fn step(&self) -> &Step {
        self.step.as_ref().expect(UNPREPARED)
    }

    /// Makes the scratch of matmul and attention anew, where it has become too small. Before `prepare` has
    /// told the rows, sizes are only noted.
    fn grow_scratch(&mut self, rows: usize, inp: usize, v_dim: usize) -> Result<(), DeviceError> {
        if rows > self.rows || inp > self.inp_max {
            (self.rows, self.inp_max) = (self.rows.max(rows), self.inp_max.max(inp));
            self.matmul = None;
        }
        if v_dim > self.v_dim_max {
            self.v_dim_max = v_dim;
            self.attention = None;
        }
        if self.rows == 0 {
            return Ok(());
        }
        let threads = self.pool.threads();
        if self.matmul.is_none() {
            self.matmul = Some(MatmulScratch::new(self.rows, self.inp_max, threads)?);
        }
        if self.attention.is_none() {
            let len = threads * attention::scratch_len(self.v_dim_max);
            self.attention = Some(HostBuf::zeroed(len * size_of::<f32>())?);
        }
        Ok(())
    }
}

const UNPREPARED: &str = "prepare comes before the first step; this is a bug";

impl Backend for CpuBackend {
    type Buf = HostBuf;

    fn describe(&self) -> String {
        let threads = self.pool.threads();
        format!(
            "cpu ({}, {threads} {})",
            self.level.isa().name(),
            if threads == 1 { "thread" } else { "threads" }
        )
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
        self.grow_scratch(0, inp, 0)?;
        let mut buf = HostBuf::zeroed(bytes.len())?;
        self.pool.for_parts(buf.bytes_mut(), UPLOAD_BYTES, |part, to| {
            to.copy_from_slice(&bytes[part * UPLOAD_BYTES..][..to.len()]);
        });
        Ok(Weight { buf, ty, out, inp })
    }

    fn alloc_kv(&mut self, layout: KvLayout) -> Result<KvLayer<HostBuf>, DeviceError> {
        self.grow_scratch(0, 0, layout.v_dim)?;
        attention::alloc_kv(layout)
    }

    fn prepare(&mut self, limits: &StepLimits) -> Result<(), DeviceError> {
        self.grow_scratch(limits.rows.max(limits.logit_rows), 0, 0)?;
        self.step = Some(Step::new(limits));
        self.sampling = Some(SampleScratch::new(limits, self.pool.threads()));
        Ok(())
    }

    fn begin(&mut self, batch: &StepBatch) {
        self.step.as_mut().expect(UNPREPARED).begin(batch);
    }

    fn copy_pages(&mut self, copies: &[PageCopy], cache: &mut KvLayer<HostBuf>) {
        attention::copy_pages(copies, cache);
    }

    fn embed(&mut self, table: &Weight<HostBuf>, x: &mut HostBuf) {
        let step = self.step.as_ref().expect(UNPREPARED);
        elementwise::embed(&mut self.pool, step, table, &mut x.f32_mut()[..step.rows.len() * table.inp]);
    }

    fn matmul(
        &mut self,
        rows: usize,
        w: &Weight<HostBuf>,
        bias: Option<&HostBuf>,
        x: &HostBuf,
        y: &mut HostBuf,
    ) {
        let scratch = self.matmul.as_mut().expect(UNPREPARED);
        assert!(rows <= self.rows, "{rows} rows exceed the limits");
        let (x, y) = (&x.f32()[..rows * w.inp], &mut y.f32_mut()[..rows * w.out]);
        let bias = bias.map(|bias| &bias.f32()[..w.out]);
        matmul::matmul(&mut self.pool, self.level, scratch, w, bias, x, y);
    }

    fn norm(&mut self, rows: usize, norm: &Norm<HostBuf>, x: &HostBuf, y: &mut HostBuf) {
        let len = rows * norm.width;
        elementwise::norm(&mut self.pool, self.level, norm, &x.f32()[..len], &mut y.f32_mut()[..len]);
    }

    fn rope(&mut self, rope: &Rope<HostBuf>, heads: usize, head_dim: usize, x: &mut HostBuf) {
        let step = self.step.as_ref().expect(UNPREPARED);
        let x = &mut x.f32_mut()[..step.rows.len() * heads * head_dim];
        elementwise::rope(&mut self.pool, step, rope, heads, head_dim, x);
    }

    fn store_kv(&mut self, k: &HostBuf, v: &HostBuf, cache: &mut KvLayer<HostBuf>) {
        let step = self.step.as_ref().expect(UNPREPARED);
        attention::store_kv(&mut self.pool, step, k.f32(), v.f32(), cache);
    }

    fn attention(
        &mut self,
        shape: &AttentionShape,
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
        elementwise::activate(&mut self.pool, self.level, act, width, gate, up.map(HostBuf::f32));
    }

    fn add(&mut self, rows: usize, width: usize, x: &mut HostBuf, y: &HostBuf) {
        elementwise::add(&mut self.pool, width, &mut x.f32_mut()[..rows * width], y.f32());
    }

    fn reduce(&mut self, _rows: usize, _width: usize, _x: &mut HostBuf) {
        // A stage of one member: x is its own sum.
    }

    fn gather(&mut self, wanted: Range<usize>, width: usize, x: &HostBuf, y: &mut HostBuf) {
        let wanted = &self.step.as_ref().expect(UNPREPARED).wanted[wanted];
        let y = &mut y.f32_mut()[..wanted.len() * width];
        elementwise::gather(&mut self.pool, wanted, width, x.f32(), y);
    }

    fn sample(&mut self, wanted: Range<usize>, logits: &HostBuf, out: &mut StepOutput) {
        let step = self.step.as_mut().expect(UNPREPARED);
        let scratch = self.sampling.as_mut().expect(UNPREPARED);
        sample::sample(&mut self.pool, scratch, step, wanted, logits.f32(), out);
    }

    fn table(&self, slot: u32) -> &[Page] {
        self.step().table(slot as usize)
    }
}

#[cfg(test)]
mod tests;
