//! Products with weights, however these are stored: of the same rows with one weight or with several.
//!
//! Rows are packed once for all weights that take them as the same kind of operand. Then the outs of all weights are one job
//! for the threads, so that these wait for each other once.
//!
//! Invariant: a weight's format and the device's [`Inputs`] decide how it is stored and multiplied, nothing else.

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

/// Products of the same rows that are one job.
pub const TOGETHER: usize = 4;
/// Products of numbers that are not worth a second thread.
const SMALL: usize = 64 * 1024;
/// Items of a weight for each thread, at least, where weights are cut.
const ITEMS_EACH: usize = 4;

/// The widest weights, by what their products need room for: columns.
#[derive(Clone, Copy, Default, PartialEq)]
pub struct Widths {
    /// Of those whose inputs stay F32.
    pub plain: usize,
    /// Of those among them that are written out.
    pub written: usize,
    /// Of those that are packed, as codes and as BF16.
    pub packed: usize,
    pub halves: usize,
}

impl Widths {
    /// Of one weight of `ty` with `inp` columns.
    pub fn of(inputs: Inputs, ty: QuantType, inp: usize) -> Widths {
        let none = Widths::default();
        match (ty.operand(inputs), ty.is_blocked()) {
            (Operand::Codes, _) => Widths { packed: inp, ..none },
            (Operand::Bf16, _) => Widths { halves: inp, ..none },
            (Operand::F32, false) => Widths { plain: inp, ..none },
            (Operand::F32, true) => Widths { plain: inp, written: inp, ..none },
        }
    }

    /// Enough for both.
    pub fn max(self, other: Widths) -> Widths {
        Widths {
            plain: self.plain.max(other.plain),
            written: self.written.max(other.written),
            packed: self.packed.max(other.packed),
            halves: self.halves.max(other.halves),
        }
    }
}

/// One of several products of the same rows, as the threads see it.
pub struct Product<'a> {
    pub w: &'a Weight<HostBuf>,
    bias: Option<&'a [f32]>,
    to: To,
    /// (rows, out).
    y: Parts<'a, f32>,
}

/// What becomes of a result.
#[derive(Clone, Copy)]
pub enum To {
    Set,
    Add,
}

impl<'a> Product<'a> {
    /// To y (rows, out) goes, or is added, the product with w, + bias if given.
    pub fn new(
        w: &'a Weight<HostBuf>,
        bias: Option<&'a HostBuf>,
        (to, y): (To, &'a mut HostBuf),
        rows: usize,
    ) -> Product<'a> {
        let bias = bias.map(|bias| &bias.f32()[..w.out]);
        Product { w, bias, to, y: Parts::new(&mut y.f32_mut()[..rows * w.out]) }
    }

    /// Writes the sums of outs from `first` on of one row.
    ///
    /// # Safety
    /// * No other thread has these outs of this row.
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

/// Rows that are packed for one kind of products.
pub trait Packed: Sync {
    /// Outs of one item: of so many bytes as it should have, no more than `most`, in whole tiles.
    fn outs_each(&self, w: &Weight<HostBuf>, most: usize) -> usize;

    /// All rows with some outs, an item's. `worker` is in no other item.
    fn multiply(&self, worker: usize, product: &Product, outs: Range<usize>);
}

/// What products need beside their operands.
pub struct Products {
    inputs: Inputs,
    plain: MatmulScratch,
    packed: PackedScratch,
    halves: HalvesScratch,
    dots: Option<Dots>,
    /// A row for each thread.
    rooms: HostBuf,
    room: usize,
}

impl Products {
    /// Room for `rows` rows on `threads` threads.
    pub fn new(
        (inputs, dots): (Inputs, Option<Dots>),
        rows: usize,
        widths: Widths,
        threads: usize,
    ) -> Result<Products, DeviceError> {
        let room = widths.plain.max(widths.packed).max(widths.halves);
        Ok(Products {
            inputs,
            dots,
            plain: MatmulScratch::new(rows, widths.plain, widths.written, threads)?,
            packed: PackedScratch::new(rows, widths.packed, threads)?,
            halves: HalvesScratch::new(rows, widths.halves, threads)?,
            rooms: HostBuf::zeroed(threads * room * size_of::<f32>())?,
            room,
        })
    }

    /// All products, of the same rows.
    pub fn multiply(
        &mut self,
        pool: &mut Pool,
        level: Level,
        source: &Source,
        products: &[Option<Product>; TOGETHER],
    ) {
        if source.rows == 0 {
            return;
        }
        let is_wide = |product: &Product| product.w.inp == source.inp;
        assert!(
            products.iter().flatten().all(is_wide),
            "weights and rows have the same columns; this is a bug"
        );
        let (inputs, dots) = (self.inputs, self.dots);
        let takes = |product: &Product| product.w.ty.operand(inputs);
        let is_taken = |operand| products.iter().flatten().any(|product| takes(product) == operand);
        let rooms = Rooms::new(self.rooms.f32_mut(), self.room);
        let plain = is_taken(Operand::F32).then(|| self.plain.pack(pool, level, source, &rooms));
        let codes = is_taken(Operand::Codes).then(|| self.packed.pack(pool, (level, dots), source, &rooms));
        let halves = is_taken(Operand::Bf16).then(|| {
            const HAS: &str = "a device without them takes F32; this is a bug";
            self.halves.pack(pool, (level, dots.expect(HAS)), source, &rooms)
        });
        let mut job = Job { parts: Default::default(), items: 0, products: 0 };
        for product in products.iter().flatten() {
            let packed: Option<&dyn Packed> = match takes(product) {
                Operand::F32 => plain.as_ref().map(|plain| plain as _),
                Operand::Codes => codes.as_ref().map(|codes| codes as _),
                Operand::Bf16 => halves.as_ref().map(|halves| halves as _),
            };
            let packed = packed.expect("rows were packed for it; this is a bug");
            job.add(pool.threads(), source.rows, product, packed);
        }
        job.run(pool);
    }
}

/// The items of several products.
struct Job<'a> {
    parts: [Option<Part<'a>>; TOGETHER],
    items: usize,
    /// Of numbers.
    products: usize,
}

/// Those of one.
struct Part<'a> {
    product: &'a Product<'a>,
    packed: &'a dyn Packed,
    /// Outs of an item.
    each: usize,
    items: Range<usize>,
}

impl<'a> Job<'a> {
    fn add(&mut self, threads: usize, rows: usize, product: &'a Product<'a>, packed: &'a dyn Packed) {
        let Weight { out, inp, .. } = *product.w;
        if out == 0 {
            return;
        }
        let is_cut = threads > 1 && rows * out * inp > SMALL;
        let most = if is_cut { out.div_ceil(ITEMS_EACH * threads) } else { out };
        let each = packed.outs_each(product.w, most.max(1));
        let items = self.items..self.items + out.div_ceil(each);
        (self.items, self.products) = (items.end, self.products + rows * out * inp);
        let place = self.parts.iter_mut().find(|part| part.is_none());
        *place.expect("there are as many places as products; this is a bug") =
            Some(Part { product, packed, each, items });
    }

    /// Claims go from the last item to the first, and memory is read from the first to the last.
    fn run(&self, pool: &mut Pool) {
        let work = |worker, item| self.item(worker, self.items - 1 - item);
        match self.products <= SMALL {
            true => (0..self.items).rev().for_each(|item| work(0, item)),
            false => pool.run(self.items, work),
        }
    }

    fn item(&self, worker: usize, item: usize) {
        let part = self.parts.iter().flatten().find(|part| part.items.contains(&item));
        let Part { product, packed, each, items } = part.expect("every item is of a part; this is a bug");
        let first = (item - items.start) * each;
        packed.multiply(worker, product, first..product.w.out.min(first + each));
    }
}
