//! GEMMs with weights in any storage format: of the same input with one weight or with several.
//!
//! The input is packed once for all weights that take it as the same kind of operand. Then the outputs of all
//! weights form one job for the threads, so that the threads synchronize once.
//!
//! Invariant: how a weight is stored and multiplied depends only on its format and the device's
//! [`ActivationPrecision`].

#![allow(unsafe_code)]

use super::amx::Amx;
use super::bf16::{Bf16Isa, Bf16Scratch};
use super::bf16_pairs::PairScratch;
use super::f32_gemm::F32Scratch;
use super::gemm_input::{GemmInput, InputValues, RowBuffers, Share};
use super::gemm_task::{GemmTask, PackedInput, SharedScratch};
use super::packed::Int8Scratch;
use super::pool::{SharedSlice, ThreadPool, Workers};
use super::scratch_memory::ScratchMemory;
use super::simd::{LANES, Level};
use crate::backend::{DeviceError, OutputColumns, Weight};
use crate::host::HostBuf;
use crate::quant::{ActivationPrecision, OperandFormat, QuantType};
use std::ops::Range;

/// Largest number of weights with the same input in one job.
pub const GEMMS_PER_JOB: usize = 16;
/// Number of multiplications that do not justify a second thread.
const SMALL_GEMM: usize = 64 * 1024;
/// Outputs of a panel of packed weights.
const PANEL_OUTPUTS: usize = LANES;
/// Most rows of a work item of the products of heads: they stay in a second-level cache with a matrix.
const HEAD_ROWS: usize = 96;
/// Rows of a work item are a multiple of this if there are as many: a multiple of the rows of every tile.
const HEAD_TILE_ROWS: usize = 48;
/// Outputs of a work item are a multiple of this unless it has all: the outputs that are multiplied at once.
const HEAD_OUTPUTS: usize = 64;
/// Minimum number of work items per thread when a weight is divided among threads.
const ITEMS_PER_THREAD: usize = 4;

/// Numbers of columns of the widest weights, by the kind of scratch that their GEMMs need.
#[derive(Clone, Copy, Default, PartialEq)]
pub struct ScratchWidths {
    /// Weights whose inputs stay F32.
    pub f32: usize,
    /// Weights among them that are dequantized first.
    pub dequantized: usize,
    /// Weights that are packed as quants for int8 dot products.
    pub int8: usize,
    /// Weights that are packed as BF16.
    pub bf16: usize,
    /// Weights that are multiplied as pairs of BF16.
    pub bf16_pairs: usize,
}

impl ScratchWidths {
    /// Returns the widths for one weight of `ty` with `k` columns.
    pub fn for_weight(precision: ActivationPrecision, ty: QuantType, k: usize) -> ScratchWidths {
        let none = ScratchWidths::default();
        match (ty.operand_format(precision), ty.is_blocked()) {
            (OperandFormat::Int8, _) => ScratchWidths { int8: k, ..none },
            (OperandFormat::Bf16, _) => ScratchWidths { bf16: k, ..none },
            (OperandFormat::Bf16Pair, _) => ScratchWidths { bf16_pairs: k, ..none },
            (OperandFormat::F32, false) => ScratchWidths { f32: k, ..none },
            (OperandFormat::F32, true) => ScratchWidths { f32: k, dequantized: k, ..none },
        }
    }

    /// Returns widths that are large enough for both.
    pub fn max(self, other: ScratchWidths) -> ScratchWidths {
        ScratchWidths {
            f32: self.f32.max(other.f32),
            dequantized: self.dequantized.max(other.dequantized),
            int8: self.int8.max(other.int8),
            bf16: self.bf16.max(other.bf16),
            bf16_pairs: self.bf16_pairs.max(other.bf16_pairs),
        }
    }
}

/// Scratch of all kinds of GEMMs.
pub struct GemmScratch<Buf = HostBuf> {
    activation_precision: ActivationPrecision,
    f32: F32Scratch<Buf>,
    int8: Int8Scratch<Buf>,
    bf16: Bf16Scratch<Buf>,
    bf16_pairs: PairScratch<Buf>,
    bf16_isa: Option<Bf16Isa>,
    /// A row buffer for each thread.
    row_buffers: Buf,
    row_buffer_len: usize,
}

impl<Buf> GemmScratch<Buf> {
    /// Allocates scratch for `rows` rows on `threads` threads.
    pub fn new<M: ScratchMemory<Buf = Buf>>(
        (precision, bf16_isa): (ActivationPrecision, Option<Bf16Isa>),
        rows: usize,
        widths: ScratchWidths,
        threads: usize,
        memory: &M,
    ) -> Result<GemmScratch<Buf>, DeviceError> {
        let row_len = widths.f32.max(widths.int8).max(widths.bf16).max(widths.bf16_pairs);
        Ok(GemmScratch {
            activation_precision: precision,
            bf16_isa,
            f32: F32Scratch::new(rows, widths.f32, widths.dequantized, threads, memory)?,
            int8: Int8Scratch::new(rows, widths.int8, threads, memory)?,
            bf16: Bf16Scratch::new(rows, widths.bf16, threads, memory)?,
            bf16_pairs: PairScratch::new(rows, widths.bf16_pairs, threads, memory)?,
            row_buffers: memory.zeroed(threads * row_len * size_of::<f32>())?,
            row_buffer_len: row_len,
        })
    }
}

impl GemmScratch {
    /// Computes all GEMMs, which share the input, at most [`GEMMS_PER_JOB`].
    pub fn multiply(
        &mut self,
        pool: &mut ThreadPool,
        level: Level,
        input: &GemmInput,
        gemms: &[Option<GemmTask>],
    ) {
        if input.rows == 0 {
            return;
        }
        let has_same_k = |gemm: &GemmTask| gemm.w.k == input.k;
        assert!(
            gemms.iter().flatten().all(has_same_k),
            "weights and input have the same number of columns; this is a bug"
        );
        let (precision, bf16_isa) = (self.activation_precision, self.bf16_isa);
        let operand_of = |gemm: &GemmTask| gemm.w.ty.operand_format(precision);
        let is_used = |operand| gemms.iter().flatten().any(|gemm| operand_of(gemm) == operand);
        let buffers = RowBuffers::new(self.row_buffers.f32_mut(), self.row_buffer_len);
        let f32 = is_used(OperandFormat::F32).then(|| self.f32.share(level));
        let int8 = is_used(OperandFormat::Int8).then(|| self.int8.share(level, bf16_isa, pool.threads()));
        let bf16 = is_used(OperandFormat::Bf16).then(|| self.bf16.share(level, with_bf16(bf16_isa)));
        let pairs =
            is_used(OperandFormat::Bf16Pair).then(|| self.bf16_pairs.share(level, with_amx(bf16_isa)));
        let f32 = f32.as_ref().map(|shared| pack_all(shared, pool, input, &buffers));
        let int8 = int8.as_ref().map(|shared| pack_all(shared, pool, input, &buffers));
        let bf16 = bf16.as_ref().map(|shared| pack_all(shared, pool, input, &buffers));
        let pairs = pairs.as_ref().map(|shared| pack_all(shared, pool, input, &buffers));
        let mut job = Job { parts: Default::default(), items: 0, multiplications: 0 };
        for gemm in gemms.iter().flatten() {
            let packed: Option<&dyn PackedInput> = match operand_of(gemm) {
                OperandFormat::F32 => f32.as_ref().map(|f32| f32 as _),
                OperandFormat::Int8 => int8.as_ref().map(|int8| int8 as _),
                OperandFormat::Bf16 => bf16.as_ref().map(|bf16| bf16 as _),
                OperandFormat::Bf16Pair => pairs.as_ref().map(|pairs| pairs as _),
            };
            let packed = packed.expect("the input was packed for it; this is a bug");
            job.add(pool.threads(), input.rows, gemm, packed);
        }
        job.run(pool);
    }

    /// Computes [`crate::Backend::matmul_heads`], as one job for the threads.
    pub fn multiply_heads(
        &mut self,
        pool: &mut ThreadPool,
        level: Level,
        (rows, heads): (usize, usize),
        w: (&Weight<HostBuf>, OutputColumns),
        x: &HostBuf,
        y: &mut HostBuf,
    ) {
        let y = SharedSlice::new(&mut y.f32_mut()[..rows * heads * w.1.of]);
        let job = HeadJob { rows, heads, w, x: &x.f32()[..rows * heads * w.0.k], y };
        let (isa, threads) = (self.bf16_isa, pool.threads());
        match w.0.ty.operand_format(self.activation_precision) {
            OperandFormat::F32 => job.run(pool, &self.f32.share(level)),
            OperandFormat::Int8 => job.run(pool, &self.int8.share(level, isa, threads)),
            OperandFormat::Bf16 => job.run(pool, &self.bf16.share(level, with_bf16(isa))),
            OperandFormat::Bf16Pair => job.run(pool, &self.bf16_pairs.share(level, with_amx(isa))),
        }
    }
}

/// Returns the BF16 instructions of a device that multiplies BF16 inputs.
fn with_bf16(isa: Option<Bf16Isa>) -> Bf16Isa {
    isa.expect("devices without BF16 instructions use F32 inputs; this is a bug")
}

/// Returns the AMX instructions of a device that multiplies pairs of BF16.
fn with_amx(isa: Option<Bf16Isa>) -> Amx {
    isa.and_then(Bf16Isa::amx).expect("devices without AMX use F32 inputs for F16 weights; this is a bug")
}

/// Packs an input on all threads.
fn pack_all<'s, S: SharedScratch>(
    shared: &'s S,
    pool: &mut ThreadPool,
    input: &GemmInput,
    buffers: &RowBuffers,
) -> S::Packed<'s> {
    // SAFETY: a GEMM packs one input, and borrows the scratch until it has been multiplied.
    unsafe { shared.pack(Share::WHOLE, Workers::All(pool), input, buffers) }
}

/// The products of heads with matrices of their own: see [`crate::Backend::matmul_heads`].
struct HeadJob<'a> {
    rows: usize,
    heads: usize,
    w: (&'a Weight<HostBuf>, OutputColumns),
    /// (rows, heads, k)
    x: &'a [f32],
    /// (rows, heads, columns)
    y: SharedSlice<'a, f32>,
}

impl HeadJob<'_> {
    /// Computes all work items: some rows of one head, with all outputs or, if there are fewer items than
    /// keep the threads busy, with some. A thread packs the rows of its item in its share of the scratch.
    fn run<S: SharedScratch>(&self, pool: &mut ThreadPool, scratch: &S) {
        let HeadJob { rows, heads, w: (w, _), .. } = *self;
        let (threads, n, k) = (pool.threads(), w.n / heads, w.k);
        if rows == 0 || n == 0 {
            return;
        }
        let most = scratch.rows_of(Share { number: 0, of: threads }, k).min(HEAD_ROWS);
        assert!(most > 0, "a thread's share of the scratch holds a row; this is a bug");
        let whole_tiles = if most < rows { most / HEAD_TILE_ROWS * HEAD_TILE_ROWS } else { rows };
        let rows_each = if whole_tiles > 0 { whole_tiles } else { most };
        let pieces = heads * rows.div_ceil(rows_each);
        let wanted = if threads > 1 { (ITEMS_PER_THREAD * threads).div_ceil(pieces) } else { 1 };
        let outputs_each = n.div_ceil(wanted).next_multiple_of(HEAD_OUTPUTS);
        let parts = n.div_ceil(outputs_each);
        let work = |worker: usize, item: usize| {
            let (piece, part) = (item / parts, item % parts);
            let (head, first) = (piece % heads, piece / heads * rows_each);
            let outputs = part * outputs_each..n.min((part + 1) * outputs_each);
            self.item(scratch, (worker, threads), head, first..rows.min(first + rows_each), outputs);
        };
        match heads * rows * n * k <= SMALL_GEMM {
            true => (0..pieces * parts).for_each(|item| work(0, item)),
            false => pool.run(pieces * parts, |worker, item| work(worker, pieces * parts - 1 - item)),
        }
    }

    /// Computes some outputs of some rows of a head.
    fn item<S: SharedScratch>(
        &self,
        scratch: &S,
        (worker, threads): (usize, usize),
        head: usize,
        rows: Range<usize>,
        outputs: Range<usize>,
    ) {
        let HeadJob { heads, w: (w, columns), x, y, .. } = *self;
        let values = InputValues::Head { x: &x[rows.start * heads * w.k..], heads, head };
        let input = GemmInput { rows: rows.len(), k: w.k, values };
        let (share, none) = (Share { number: worker, of: threads }, RowBuffers::new(&mut [], 0));
        // SAFETY: each worker has its own share and is in one item at a time.
        let packed = unsafe { scratch.pack(share, Workers::One(worker), &input, &none) };
        let task =
            GemmTask::of_head((w, columns), (heads, head), outputs, y.skip(rows.start * heads * columns.of));
        let start = task.outputs.start / PANEL_OUTPUTS * PANEL_OUTPUTS;
        let each = packed.outputs_per_item(w, task.outputs.end - start);
        for first in (start..task.outputs.end).step_by(each) {
            packed.multiply(worker, &task, first..task.outputs.end.min(first + each));
        }
    }
}

/// The work items of several GEMMs.
struct Job<'a> {
    parts: [Option<JobPart<'a>>; GEMMS_PER_JOB],
    items: usize,
    /// Number of multiplications.
    multiplications: usize,
}

/// The work items of one GEMM.
struct JobPart<'a> {
    gemm: &'a GemmTask<'a>,
    packed: &'a dyn PackedInput,
    /// The first output.
    start: usize,
    /// Outputs of a work item.
    outputs_per_item: usize,
    items: Range<usize>,
}

impl<'a> Job<'a> {
    fn add(&mut self, threads: usize, rows: usize, gemm: &'a GemmTask<'a>, packed: &'a dyn PackedInput) {
        // Items begin at a panel of packed weights.
        let start = gemm.outputs.start / PANEL_OUTPUTS * PANEL_OUTPUTS;
        let (n, k) = (gemm.outputs.end - start, gemm.w.k);
        if n == 0 {
            return;
        }
        let is_divided = threads > 1 && rows * n * k > SMALL_GEMM;
        let max = if is_divided { n.div_ceil(ITEMS_PER_THREAD * threads) } else { n };
        let outputs_per_item = packed.outputs_per_item(gemm.w, max.max(1));
        let items = self.items..self.items + n.div_ceil(outputs_per_item);
        (self.items, self.multiplications) = (items.end, self.multiplications + rows * n * k);
        let part = self.parts.iter_mut().find(|part| part.is_none());
        *part.expect("a job has a part for every GEMM; this is a bug") =
            Some(JobPart { gemm, packed, start, outputs_per_item, items });
    }

    /// Runs all items. Threads claim items from the last to the first, and memory is read from the first to
    /// the last, hence the reversal.
    fn run(&self, pool: &mut ThreadPool) {
        let work = |worker, item| self.item(worker, self.items - 1 - item);
        match self.multiplications <= SMALL_GEMM {
            true => (0..self.items).rev().for_each(|item| work(0, item)),
            false => pool.run(self.items, work),
        }
    }

    fn item(&self, worker: usize, item: usize) {
        let part = self.parts.iter().flatten().find(|part| part.items.contains(&item));
        let JobPart { gemm, packed, start, outputs_per_item, items } =
            part.expect("every item belongs to a part; this is a bug");
        let first = start + (item - items.start) * outputs_per_item;
        packed.multiply(worker, gemm, first..gemm.outputs.end.min(first + outputs_per_item));
    }
}
