//! GEMMs with weights in any storage format: of the same input with one weight or with several.
//!
//! The input is packed once for all weights that take it as the same kind of operand. Then the outputs of all
//! weights form one job for the threads, so that the threads synchronize once.
//!
//! Invariant: how a weight is stored and multiplied depends only on its format and the device's
//! [`ActivationPrecision`].

#![allow(unsafe_code)]

use super::halves::{Dots, HalvesScratch};
use super::matmul::MatmulScratch;
use super::packed::PackedScratch;
use super::pool::{Parts, Pool};
use super::simd::Level;
use super::source::{Rooms, Source};
use crate::backend::{DeviceError, Weight};
use crate::host::HostBuf;
use crate::quant::{Inputs, Operand, QuantType};
use std::ops::Range;

/// Largest number of GEMMs with the same input in one job.
pub const TOGETHER: usize = 4;
/// Number of multiplications that do not justify a second thread.
const SMALL: usize = 64 * 1024;
/// Minimum number of work items per thread when a weight is divided among threads.
const ITEMS_EACH: usize = 4;

/// Numbers of columns of the widest weights, by the kind of scratch that their GEMMs need.
#[derive(Clone, Copy, Default, PartialEq)]
pub struct Widths {
    /// Weights whose inputs stay F32.
    pub plain: usize,
    /// Weights among them that are dequantized first.
    pub written: usize,
    /// Weights that are packed as quants for int8 dot products.
    pub packed: usize,
    /// Weights that are packed as BF16.
    pub halves: usize,
}

impl Widths {
    /// Returns the widths for one weight of `ty` with `k` columns.
    pub fn of(precision: Inputs, ty: QuantType, k: usize) -> Widths {
        let none = Widths::default();
        match (ty.operand(precision), ty.is_blocked()) {
            (Operand::Codes, _) => Widths { packed: k, ..none },
            (Operand::Bf16, _) => Widths { halves: k, ..none },
            (Operand::F32, false) => Widths { plain: k, ..none },
            (Operand::F32, true) => Widths { plain: k, written: k, ..none },
        }
    }

    /// Returns widths that are large enough for both.
    pub fn max(self, other: Widths) -> Widths {
        Widths {
            plain: self.plain.max(other.plain),
            written: self.written.max(other.written),
            packed: self.packed.max(other.packed),
            halves: self.halves.max(other.halves),
        }
    }
}

/// One of several GEMMs with the same input, whose output the threads share.
pub struct Product<'a> {
    pub w: &'a Weight<HostBuf>,
    bias: Option<&'a [f32]>,
    to: To,
    /// (m, n).
    y: Parts<'a, f32>,
}

/// What a GEMM does with a result: write it, or add it to what is there.
#[derive(Clone, Copy)]
pub enum To {
    Set,
    Add,
}

impl<'a> Product<'a> {
    /// Creates a GEMM that writes or adds x · wᵀ, plus `bias` if given, to y (m, n).
    pub fn new(
        w: &'a Weight<HostBuf>,
        bias: Option<&'a HostBuf>,
        (epilogue, y): (To, &'a mut HostBuf),
        rows: usize,
    ) -> Product<'a> {
        let bias = bias.map(|bias| &bias.f32()[..w.out]);
        Product { w, bias, to: epilogue, y: Parts::new(&mut y.f32_mut()[..rows * w.out]) }
    }

    /// Applies the epilogue to the sums of one row, for the outputs from `first` on.
    ///
    /// # Safety
    /// * No other thread writes these outputs of this row.
    #[inline(always)]
    pub unsafe fn put(&self, row: usize, first: usize, sums: &[f32]) {
        let start = row * self.w.out + first;
        // SAFETY: the caller's promise.
        let y = unsafe { self.y.part(start..start + sums.len()) };
        let zip = y.iter_mut().zip(sums);
        match (self.bias, self.to) {
            (None, To::Set) => zip.for_each(|(y, sum)| *y = *sum),
            (None, To::Add) => zip.for_each(|(y, sum)| *y += *sum),
            (Some(bias), To::Set) => {
                zip.zip(&bias[first..]).for_each(|((y, sum), bias)| *y = *sum + *bias);
            }
            (Some(bias), To::Add) => {
                zip.zip(&bias[first..]).for_each(|((y, sum), bias)| *y += *sum + *bias);
            }
        }
    }
}

/// An input that is packed for one kind of GEMM.
pub trait Packed: Sync {
    /// Returns the number of outputs of one work item: as many as give it a suitable number of bytes, at most
    /// `max`, rounded up to whole tiles.
    fn outs_each(&self, w: &Weight<HostBuf>, max: usize) -> usize;

    /// Computes a work item: all rows with a range of outputs. `worker` runs no other item meanwhile.
    fn multiply(&self, worker: usize, gemm: &Product, outputs: Range<usize>);
}

/// Scratch of all kinds of GEMMs.
pub struct Products {
    inputs: Inputs,
    plain: MatmulScratch,
    packed: PackedScratch,
    halves: HalvesScratch,
    dots: Option<Dots>,
    /// A row buffer for each thread.
    rooms: HostBuf,
    room: usize,
}

impl Products {
    /// Allocates scratch for `rows` rows on `threads` threads.
    pub fn new(
        (precision, bf16_isa): (Inputs, Option<Dots>),
        rows: usize,
        widths: Widths,
        threads: usize,
    ) -> Result<Products, DeviceError> {
        let row_len = widths.plain.max(widths.packed).max(widths.halves);
        Ok(Products {
            inputs: precision,
            dots: bf16_isa,
            plain: MatmulScratch::new(rows, widths.plain, widths.written, threads)?,
            packed: PackedScratch::new(rows, widths.packed, threads)?,
            halves: HalvesScratch::new(rows, widths.halves, threads)?,
            rooms: HostBuf::zeroed(threads * row_len * size_of::<f32>())?,
            room: row_len,
        })
    }

    /// Computes all GEMMs, which share the input.
    pub fn multiply(
        &mut self,
        pool: &mut Pool,
        level: Level,
        input: &Source,
        gemms: &[Option<Product>; TOGETHER],
    ) {
        if input.rows == 0 {
            return;
        }
        let has_same_k = |gemm: &Product| gemm.w.inp == input.inp;
        assert!(
            gemms.iter().flatten().all(has_same_k),
            "weights and input have the same number of columns; this is a bug"
        );
        let (precision, bf16_isa) = (self.inputs, self.dots);
        let operand_of = |gemm: &Product| gemm.w.ty.operand(precision);
        let is_used = |operand| gemms.iter().flatten().any(|gemm| operand_of(gemm) == operand);
        let buffers = Rooms::new(self.rooms.f32_mut(), self.room);
        let f32 = is_used(Operand::F32).then(|| self.plain.pack(pool, level, input, &buffers));
        let int8 =
            is_used(Operand::Codes).then(|| self.packed.pack(pool, (level, bf16_isa), input, &buffers));
        let bf16 = is_used(Operand::Bf16).then(|| {
            const HAS: &str = "devices without BF16 instructions use F32 inputs; this is a bug";
            self.halves.pack(pool, (level, bf16_isa.expect(HAS)), input, &buffers)
        });
        let mut job = Job { parts: Default::default(), items: 0, products: 0 };
        for gemm in gemms.iter().flatten() {
            let packed: Option<&dyn Packed> = match operand_of(gemm) {
                Operand::F32 => f32.as_ref().map(|f32| f32 as _),
                Operand::Codes => int8.as_ref().map(|int8| int8 as _),
                Operand::Bf16 => bf16.as_ref().map(|bf16| bf16 as _),
            };
            let packed = packed.expect("the input was packed for it; this is a bug");
            job.add(pool.threads(), input.rows, gemm, packed);
        }
        job.run(pool);
    }
}

/// The work items of several GEMMs.
struct Job<'a> {
    parts: [Option<Part<'a>>; TOGETHER],
    items: usize,
    /// Number of multiplications.
    products: usize,
}

/// The work items of one GEMM.
struct Part<'a> {
    product: &'a Product<'a>,
    packed: &'a dyn Packed,
    /// Outputs of a work item.
    each: usize,
    items: Range<usize>,
}

impl<'a> Job<'a> {
    fn add(&mut self, threads: usize, rows: usize, gemm: &'a Product<'a>, packed: &'a dyn Packed) {
        let Weight { out: n, inp: k, .. } = *gemm.w;
        if n == 0 {
            return;
        }
        let is_divided = threads > 1 && rows * n * k > SMALL;
        let max = if is_divided { n.div_ceil(ITEMS_EACH * threads) } else { n };
        let outputs_per_item = packed.outs_each(gemm.w, max.max(1));
        let items = self.items..self.items + n.div_ceil(outputs_per_item);
        (self.items, self.products) = (items.end, self.products + rows * n * k);
        let part = self.parts.iter_mut().find(|part| part.is_none());
        *part.expect("a job has a part for every GEMM; this is a bug") =
            Some(Part { product: gemm, packed, each: outputs_per_item, items });
    }

    /// Runs all items. Threads claim items from the last to the first, and memory is read from the first to
    /// the last, hence the reversal.
    fn run(&self, pool: &mut Pool) {
        let work = |worker, item| self.item(worker, self.items - 1 - item);
        match self.products <= SMALL {
            true => (0..self.items).rev().for_each(|item| work(0, item)),
            false => pool.run(self.items, work),
        }
    }

    fn item(&self, worker: usize, item: usize) {
        let part = self.parts.iter().flatten().find(|part| part.items.contains(&item));
        let Part { product: gemm, packed, each: outputs_per_item, items } =
            part.expect("every item belongs to a part; this is a bug");
        let first = (item - items.start) * outputs_per_item;
        packed.multiply(worker, gemm, first..gemm.w.out.min(first + outputs_per_item));
    }
}
