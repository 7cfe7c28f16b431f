//! A panel: some strips with all rows, a number of columns at a time.
//!
//! Few rows take the strips as they are stored. For many these are unpacked, as many columns at once as leave a first-level cache
//! room for rows, whose tiles pass by one after another; while one is there, all strips of the panel do. Sums of later columns go
//! on where those of earlier ones ended.
//! Invariant: what passes by what decides only when a block is added, never in which order.

use super::STRIP;
use super::ahead::Ahead;
use super::fields::Fields;
#[cfg(target_arch = "x86_64")]
use super::fields::Zero;
use super::formats::{Format, Wide};
use super::matmul::{Packed, Way};
use super::product::{Strips, Tile, Unpack};
use super::store::Places;
#[cfg(target_arch = "x86_64")]
use super::tiles::{self, Columns, Whole};
#[cfg(target_arch = "x86_64")]
use crate::cpu::amx::{Amx, CodeTiles};
use crate::cpu::products::Product;
use crate::cpu::simd::{Ints, LANES};
use crate::quant::INPUT_BLOCK;
use std::marker::PhantomData;
use std::ops::Range;

/// Strips of a panel: their codes, unpacked, take a part of a second-level cache.
pub const STRIPS: usize = 8;
/// Columns between two cuts: a multiple of every block.
const CUT: usize = 512;
/// Bytes of a strip's codes between two cuts, unpacked, and numbers of its fields: of each 32 columns two vectors at most.
pub const CODES: usize = STRIP * CUT;
pub const FIELDS: usize = CUT / INPUT_BLOCK * 2 * LANES;

/// A thread's scratch.
pub struct Scratch<'a> {
    /// (rows, STRIPS, 16).
    pub sums: &'a mut [f32],
    /// Of each strip, [`CODES`] and [`FIELDS`].
    pub codes: &'a mut [u8],
    pub fields: &'a mut [f32],
}

/// Some strips of a weight, and the rows they are multiplied with.
pub struct Panel<'a, F> {
    rows: &'a Packed<'a>,
    product: &'a Product<'a>,
    places: Places,
    strips: Range<usize>,
    format: PhantomData<F>,
}

impl<'a, F: Format> Panel<'a, F> {
    /// Up to [`STRIPS`] of them.
    pub fn new(rows: &'a Packed<'a>, product: &'a Product<'a>, strips: Range<usize>) -> Panel<'a, F> {
        let places = Places::of::<F>(product.w.out, product.w.inp);
        Panel { rows, product, places, strips, format: PhantomData }
    }

    /// All rows with all strips.
    pub fn multiply<S: Ints>(&self, simd: S, scratch: &mut Scratch) {
        let count = self.places.blocks;
        scratch.sums[..self.rows.count * self.stride()].fill(0.0);
        let cut = if self.rows.streams() { count.max(1) } else { CUT / F::NUMBERS };
        for first in (0..count).step_by(cut) {
            let blocks = first..count.min(first + cut);
            // Two scales to a block take the registers of a second strip.
            match (self.rows.way, const { S::CODE_OUTS / F::Fields::RUNS }) {
                (Way::Stored, 2) => self.add_stored::<S, 2>(simd, blocks, scratch.sums),
                (Way::Stored, _) => self.add_stored::<S, 1>(simd, blocks, scratch.sums),
                (Way::Unpacked, 2) => self.add_unpacked::<S, 2>(simd, blocks, scratch),
                (Way::Unpacked, _) => self.add_unpacked::<S, 1>(simd, blocks, scratch),
                #[cfg(target_arch = "x86_64")]
                (Way::Amx(amx), _) => self.add_by_amx(simd, amx, blocks, scratch),
                #[cfg(not(target_arch = "x86_64"))]
                (Way::Amx(amx), _) => match amx {},
            }
        }
        self.put(scratch.sums);
    }

    /// Numbers from one row's sums to the next one's. A tile of two strips may have one that is repeated.
    fn stride(&self) -> usize {
        self.strips.len().next_multiple_of(2) * LANES
    }

    /// The panel's strips, O at a time: which of its sums are theirs, and their numbers.
    fn each<const O: usize>(&self) -> impl Iterator<Item = (usize, [usize; O])> {
        let last = self.strips.end - 1;
        self.strips.clone().step_by(O).map(move |strip| {
            ((strip - self.strips.start) * LANES, std::array::from_fn(|o| last.min(strip + o)))
        })
    }

    /// Where a strip's codes and fields begin.
    fn strip(&self, strip: usize) -> (*const u8, *const u8) {
        let (bytes, places) = (self.product.w.buf.bytes(), &self.places);
        let codes = &bytes[strip * places.codes..][..places.codes];
        let fields = &bytes[places.first_field + strip * places.fields..][..places.fields];
        (codes.as_ptr(), fields.as_ptr())
    }

    /// What is to be asked for, `times` times, while a tile of rows is multiplied with some unpacked blocks of a strip: a part of
    /// those that are unpacked next, of the same strip or of one that this thread is likely to take.
    fn ahead(&self, strip: usize, tile: usize, blocks: &Range<usize>, times: usize) -> Ahead {
        let places = &self.places;
        let (strip, first) = match blocks.end < places.blocks {
            true => (strip, blocks.end),
            false => (strip + self.rows.threads * self.strips.len(), 0),
        };
        if strip * STRIP >= self.product.w.out {
            return Ahead::NONE;
        }
        let count = (CUT / F::NUMBERS).min(places.blocks - first);
        let at = |offset| self.product.w.buf.bytes().as_ptr().wrapping_add(offset);
        let codes = at(strip * places.codes + first * F::CODE_BYTES);
        let fields = at(places.first_field + strip * places.fields + first * F::FIELD_BYTES);
        let bytes = ((codes, count * F::CODE_BYTES), (fields, count * F::FIELD_BYTES));
        Ahead::new(bytes, (tile, self.rows.tiles.count()), times)
    }

    /// Adds some blocks of the strips, as these are stored.
    fn add_stored<S: Ints, const O: usize>(&self, simd: S, blocks: Range<usize>, sums: &mut [f32]) {
        let stride = self.stride();
        for (first, strips) in self.each::<O>() {
            let (codes, fields) = (strips.map(|o| self.strip(o).0), strips.map(|o| self.strip(o).1));
            let strips = Strips { codes, fields, row: self.places.blocks, ahead: [Ahead::NONE; O] };
            for tile in 0..self.rows.tiles.count() {
                let (rows, input) = self.rows.tile(tile, 0);
                let sums = (&mut sums[rows.start * stride + first..rows.end * stride], stride);
                // SAFETY: strips and input are whole.
                unsafe { multiply::<S, F, O>(simd, rows.len(), strips, input, blocks.clone(), sums) };
            }
        }
    }

    /// Unpacks some blocks of the strips, their codes less `less`.
    fn unpack<S: Ints>(&self, simd: S, blocks: Range<usize>, less: u8, scratch: &mut Scratch) {
        let to = scratch.codes.chunks_exact_mut(CODES).zip(scratch.fields.chunks_exact_mut(FIELDS));
        for (strip, to) in self.strips.clone().zip(to) {
            // SAFETY: the strip is whole.
            simd.call_ints(unsafe { Unpack::<F>::new(self.strip(strip), blocks.clone(), less, to) });
        }
    }

    /// Adds some blocks of the strips, which are unpacked first.
    fn add_unpacked<S: Ints, const O: usize>(&self, simd: S, blocks: Range<usize>, scratch: &mut Scratch) {
        self.unpack(simd, blocks.clone(), 0, scratch);
        let stride = self.stride();
        let unpacked = 0..blocks.len() * (F::NUMBERS / INPUT_BLOCK);
        for tile in 0..self.rows.tiles.count() {
            let (rows, input) = self.rows.tile(tile, blocks.start * F::NUMBERS / INPUT_BLOCK);
            for (first, asked) in self.each::<O>() {
                let strips = asked.map(|strip| strip - self.strips.start);
                let codes = strips.map(|strip| scratch.codes[strip * CODES..].as_ptr());
                let fields = strips.map(|strip| scratch.fields[strip * FIELDS..].as_ptr().cast());
                let sums = (&mut scratch.sums[rows.start * stride + first..rows.end * stride], stride);
                let ahead = asked.map(|strip| self.ahead(strip, tile, &blocks, unpacked.len()));
                let strips = Strips { codes, fields, row: 0, ahead };
                // SAFETY: what was unpacked has as many blocks, and so has the input from there on.
                unsafe { multiply::<S, Wide<F>, O>(simd, rows.len(), strips, input, unpacked.clone(), sums) };
            }
        }
    }

    /// The same by AMX.
    #[cfg(target_arch = "x86_64")]
    fn add_by_amx<S: Ints>(&self, simd: S, amx: Amx, blocks: Range<usize>, scratch: &mut Scratch) {
        let less = if let Zero::Power(n) = F::Fields::ZERO { 1 << n } else { 0 };
        self.unpack(simd, blocks.clone(), less, scratch);
        let (stride, mut whole) = (self.stride(), Whole::NONE);
        let mut registers: Option<CodeTiles> = None;
        let (mut set_up_for, width) = (0, INPUT_BLOCK / F::Fields::RUNS);
        for tile in 0..self.rows.tiles.count() {
            let (rows, input) = self.rows.tile(tile, blocks.start * F::NUMBERS / INPUT_BLOCK);
            if set_up_for != rows.len() {
                // One must go before another comes.
                drop(registers.take());
                set_up_for = rows.len();
            }
            // SAFETY: there are none, and nothing else here has any.
            let new = || unsafe { CodeTiles::new(amx, rows.len(), width) };
            let registers = registers.get_or_insert_with(new);
            for strip in 0..self.strips.len() {
                let wide = blocks.len() * F::NUMBERS / INPUT_BLOCK;
                let times = tiles::steps(wide * F::Fields::RUNS);
                let columns = Columns {
                    input,
                    rows: rows.len(),
                    codes: scratch.codes[strip * CODES..].as_ptr(),
                    fields: scratch.fields[strip * FIELDS..].as_ptr(),
                    blocks: wide,
                    ahead: self.ahead(self.strips.start + strip, tile, &blocks, times),
                };
                let sums = &mut scratch.sums[rows.start * stride + strip * LANES..rows.end * stride];
                let (whole, sums) = (&mut whole, (sums, stride));
                // SAFETY: AMX has AVX-512; input and what was unpacked are there, and a tile has six rows.
                unsafe {
                    match (F::Fields::RUNS, F::Fields::ZERO) {
                        (2, _) => tiles::multiply::<2, false>(registers, &columns, whole, sums),
                        (_, Zero::Base) => tiles::multiply::<1, true>(registers, &columns, whole, sums),
                        _ => tiles::multiply::<1, false>(registers, &columns, whole, sums),
                    }
                }
            }
        }
    }

    /// Writes the sums.
    fn put(&self, sums: &[f32]) {
        let first = self.strips.start * STRIP;
        let count = (self.strips.len() * STRIP).min(self.product.w.out - first);
        for (row, sums) in sums.chunks_exact(self.stride()).take(self.rows.count).enumerate() {
            // SAFETY: a strip belongs to one item, so no other thread has these elements.
            unsafe { self.product.put(row, first, &sums[..count]) };
        }
    }
}

/// To `sums`, O times 16 of each row, go the products of a tile's rows with `blocks` of O strips.
///
/// # Safety
/// * As [`Tile::new`] has it.
unsafe fn multiply<S: Ints, F: Format, const O: usize>(
    simd: S,
    rows: usize,
    strips: Strips<O>,
    input: *const u8,
    blocks: Range<usize>,
    sums: (&mut [f32], usize),
) {
    // SAFETY: the caller's promise. The guards keep what a set does not use from being compiled for it.
    unsafe {
        match rows {
            0 => {}
            1 => simd.call_ints(Tile::<F, 1, O>::new(strips, input, blocks, sums)),
            2 => simd.call_ints(Tile::<F, 2, O>::new(strips, input, blocks, sums)),
            3 if const { S::CODE_ROWS >= 3 } => {
                simd.call_ints(Tile::<F, 3, O>::new(strips, input, blocks, sums))
            }
            4 if const { S::CODE_ROWS >= 4 } => {
                simd.call_ints(Tile::<F, 4, O>::new(strips, input, blocks, sums))
            }
            5 if const { S::CODE_ROWS >= 5 } => {
                simd.call_ints(Tile::<F, 5, O>::new(strips, input, blocks, sums))
            }
            6 if const { S::CODE_ROWS >= 6 } => {
                simd.call_ints(Tile::<F, 6, O>::new(strips, input, blocks, sums))
            }
            rows => unreachable!("no tile has {rows} rows; this is a bug"),
        }
    }
}
