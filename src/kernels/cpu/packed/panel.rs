//! A panel group: some panels with all rows, one slice of columns at a time.
//!
//! With few rows, the panels are used as they are stored. With many, they are unpacked, as many columns at
//! once as leave space in a first-level cache for the rows. The tiles of rows are processed one after
//! another; each is multiplied with all panels of the group. Sums of a later slice continue from those of the
//! earlier ones.
//! Invariant: the order of the loops decides only when a block is added, never in which order.

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

/// Panels of a group: their unpacked quants take a part of a second-level cache.
pub const STRIPS: usize = 8;
/// Columns of a slice: a multiple of every block.
const CUT: usize = 512;
/// Bytes of the unpacked quants of a panel's slice.
pub const CODES: usize = STRIP * CUT;
/// F32 numbers of the unpacked scales of a panel's slice: at most two vectors for each 32 columns.
pub const FIELDS: usize = CUT / INPUT_BLOCK * 2 * LANES;

/// The scratch of one thread.
pub struct Scratch<'a> {
    /// (rows, GROUP_PANELS, 16).
    pub sums: &'a mut [f32],
    /// Unpacked quants: [`SLICE_QUANT_BYTES`] for each panel.
    pub codes: &'a mut [u8],
    /// Unpacked scales: [`SLICE_SCALES`] for each panel.
    pub fields: &'a mut [f32],
}

/// Some panels of a weight, and the input they are multiplied with.
pub struct Panel<'a, F> {
    rows: &'a Packed<'a>,
    product: &'a Product<'a>,
    places: Places,
    strips: Range<usize>,
    format: PhantomData<F>,
}

impl<'a, F: Format> Panel<'a, F> {
    /// Creates a group of up to [`GROUP_PANELS`] panels.
    pub fn new(input: &'a Packed<'a>, gemm: &'a Product<'a>, panels: Range<usize>) -> Panel<'a, F> {
        let layout = Places::of::<F>(gemm.w.out, gemm.w.inp);
        Panel { rows: input, product: gemm, places: layout, strips: panels, format: PhantomData }
    }

    /// Multiplies all rows with all panels and writes the results.
    pub fn multiply<S: Ints>(&self, simd: S, scratch: &mut Scratch) {
        let count = self.places.blocks;
        scratch.sums[..self.rows.count * self.stride()].fill(0.0);
        let slice = if self.rows.streams() { count.max(1) } else { CUT / F::NUMBERS };
        for first in (0..count).step_by(slice) {
            let blocks = first..count.min(first + slice);
            // Two scales to a block take the registers of a second panel.
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

    /// Returns the distance between the sums of two rows. A tile of two panels may have one that is repeated.
    fn stride(&self) -> usize {
        self.strips.len().next_multiple_of(2) * LANES
    }

    /// Iterates over the group's panels, O at a time: the offset of their sums, and their numbers.
    fn each<const O: usize>(&self) -> impl Iterator<Item = (usize, [usize; O])> {
        let last = self.strips.end - 1;
        self.strips.clone().step_by(O).map(move |panel| {
            ((panel - self.strips.start) * LANES, std::array::from_fn(|o| last.min(panel + o)))
        })
    }

    /// Returns the addresses of a panel's quants and scales.
    fn strip(&self, panel: usize) -> (*const u8, *const u8) {
        let (bytes, layout) = (self.product.w.buf.bytes(), &self.places);
        let quants = &bytes[panel * layout.codes..][..layout.codes];
        let scales = &bytes[layout.first_field + panel * layout.fields..][..layout.fields];
        (quants.as_ptr(), scales.as_ptr())
    }

    /// Returns what to prefetch, in `times` steps, while a tile of rows is multiplied with some unpacked
    /// blocks of a panel: a part of the blocks that are unpacked next, of the same panel or of one that this
    /// thread is likely to take.
    fn ahead(&self, panel: usize, tile: usize, blocks: &Range<usize>, times: usize) -> Ahead {
        let layout = &self.places;
        let (panel, first) = match blocks.end < layout.blocks {
            true => (panel, blocks.end),
            false => (panel + self.rows.threads * self.strips.len(), 0),
        };
        if panel * STRIP >= self.product.w.out {
            return Ahead::NONE;
        }
        let count = (CUT / F::NUMBERS).min(layout.blocks - first);
        let at = |offset| self.product.w.buf.bytes().as_ptr().wrapping_add(offset);
        let quants = at(panel * layout.codes + first * F::CODE_BYTES);
        let scales = at(layout.first_field + panel * layout.fields + first * F::FIELD_BYTES);
        let bytes = ((quants, count * F::CODE_BYTES), (scales, count * F::FIELD_BYTES));
        Ahead::new(bytes, (tile, self.rows.tiles.count()), times)
    }

    /// Adds the products of some blocks of the stored panels.
    fn add_stored<S: Ints, const O: usize>(&self, simd: S, blocks: Range<usize>, sums: &mut [f32]) {
        let stride = self.stride();
        for (first, numbers) in self.each::<O>() {
            let (quants, scales) = (numbers.map(|o| self.strip(o).0), numbers.map(|o| self.strip(o).1));
            let (row, ahead) = (self.places.blocks, [Ahead::NONE; O]);
            let panels = Strips { codes: quants, fields: scales, row, ahead };
            for tile in 0..self.rows.tiles.count() {
                let (rows, input) = self.rows.tile(tile, 0);
                let sums = (&mut sums[rows.start * stride + first..rows.end * stride], stride);
                // SAFETY: panels and input are complete.
                unsafe { multiply::<S, F, O>(simd, rows.len(), panels, input, blocks.clone(), sums) };
            }
        }
    }

    /// Unpacks some blocks of the panels, each quant minus `offset`.
    fn unpack<S: Ints>(&self, simd: S, blocks: Range<usize>, offset: u8, scratch: &mut Scratch) {
        let to = scratch.codes.chunks_exact_mut(CODES).zip(scratch.fields.chunks_exact_mut(FIELDS));
        for (panel, to) in self.strips.clone().zip(to) {
            // SAFETY: the panel is complete.
            simd.call_ints(unsafe { Unpack::<F>::new(self.strip(panel), blocks.clone(), offset, to) });
        }
    }

    /// Unpacks some blocks of the panels and adds their products.
    fn add_unpacked<S: Ints, const O: usize>(&self, simd: S, blocks: Range<usize>, scratch: &mut Scratch) {
        self.unpack(simd, blocks.clone(), 0, scratch);
        let stride = self.stride();
        let unpacked = 0..blocks.len() * (F::NUMBERS / INPUT_BLOCK);
        for tile in 0..self.rows.tiles.count() {
            let (rows, input) = self.rows.tile(tile, blocks.start * F::NUMBERS / INPUT_BLOCK);
            for (first, numbers) in self.each::<O>() {
                let panels = numbers.map(|panel| panel - self.strips.start);
                let quants = panels.map(|panel| scratch.codes[panel * CODES..].as_ptr());
                let scales = panels.map(|panel| scratch.fields[panel * FIELDS..].as_ptr().cast());
                let sums = (&mut scratch.sums[rows.start * stride + first..rows.end * stride], stride);
                let ahead = numbers.map(|panel| self.ahead(panel, tile, &blocks, unpacked.len()));
                let panels = Strips { codes: quants, fields: scales, row: 0, ahead };
                // SAFETY: the unpacked data has as many blocks, and so has the input from there on.
                unsafe { multiply::<S, Wide<F>, O>(simd, rows.len(), panels, input, unpacked.clone(), sums) };
            }
        }
    }

    /// Unpacks some blocks of the panels and adds their products with AMX.
    #[cfg(target_arch = "x86_64")]
    fn add_by_amx<S: Ints>(&self, simd: S, amx: Amx, blocks: Range<usize>, scratch: &mut Scratch) {
        let offset = if let Zero::Power(n) = F::Fields::ZERO { 1 << n } else { 0 };
        self.unpack(simd, blocks.clone(), offset, scratch);
        let (stride, mut int_sums) = (self.stride(), Whole::NONE);
        let mut registers: Option<CodeTiles> = None;
        let (mut set_up_for, width) = (0, INPUT_BLOCK / F::Fields::RUNS);
        for tile in 0..self.rows.tiles.count() {
            let (rows, input) = self.rows.tile(tile, blocks.start * F::NUMBERS / INPUT_BLOCK);
            if set_up_for != rows.len() {
                // The old configuration must be released before a new one is set up.
                drop(registers.take());
                set_up_for = rows.len();
            }
            // SAFETY: no tiles are set up, and nothing else here sets up any.
            let new = || unsafe { CodeTiles::new(amx, rows.len(), width) };
            let registers = registers.get_or_insert_with(new);
            for panel in 0..self.strips.len() {
                let chunks = blocks.len() * F::NUMBERS / INPUT_BLOCK;
                let times = tiles::steps(chunks * F::Fields::RUNS);
                let columns = Columns {
                    input,
                    rows: rows.len(),
                    codes: scratch.codes[panel * CODES..].as_ptr(),
                    fields: scratch.fields[panel * FIELDS..].as_ptr(),
                    blocks: chunks,
                    ahead: self.ahead(self.strips.start + panel, tile, &blocks, times),
                };
                let sums = &mut scratch.sums[rows.start * stride + panel * LANES..rows.end * stride];
                let (int_sums, sums) = (&mut int_sums, (sums, stride));
                // SAFETY: `amx` proves AVX-512; the input and the unpacked data are complete, and a tile has
                // at least six rows.
                unsafe {
                    match (F::Fields::RUNS, F::Fields::ZERO) {
                        (2, _) => tiles::multiply::<2, false>(registers, &columns, int_sums, sums),
                        (_, Zero::Base) => tiles::multiply::<1, true>(registers, &columns, int_sums, sums),
                        _ => tiles::multiply::<1, false>(registers, &columns, int_sums, sums),
                    }
                }
            }
        }
    }

    /// Writes the sums to the output.
    fn put(&self, sums: &[f32]) {
        let first = self.strips.start * STRIP;
        let count = (self.strips.len() * STRIP).min(self.product.w.out - first);
        for (row, sums) in sums.chunks_exact(self.stride()).take(self.rows.count).enumerate() {
            // SAFETY: a panel belongs to one item, so no other thread writes these elements.
            unsafe { self.product.put(row, first, &sums[..count]) };
        }
    }
}

/// Adds the products of a tile's rows with `blocks` of O panels to `sums`, O times 16 for each row.
///
/// # Safety
/// * The conditions of [`TileKernel::new`].
unsafe fn multiply<S: Ints, F: Format, const O: usize>(
    simd: S,
    rows: usize,
    panels: Strips<O>,
    input: *const u8,
    blocks: Range<usize>,
    sums: (&mut [f32], usize),
) {
    // SAFETY: the caller's promise. The guards keep tile sizes that an instruction set does not use from
    // being compiled for it.
    unsafe {
        match rows {
            0 => {}
            1 => simd.call_ints(Tile::<F, 1, O>::new(panels, input, blocks, sums)),
            2 => simd.call_ints(Tile::<F, 2, O>::new(panels, input, blocks, sums)),
            3 if const { S::CODE_ROWS >= 3 } => {
                simd.call_ints(Tile::<F, 3, O>::new(panels, input, blocks, sums))
            }
            4 if const { S::CODE_ROWS >= 4 } => {
                simd.call_ints(Tile::<F, 4, O>::new(panels, input, blocks, sums))
            }
            5 if const { S::CODE_ROWS >= 5 } => {
                simd.call_ints(Tile::<F, 5, O>::new(panels, input, blocks, sums))
            }
            6 if const { S::CODE_ROWS >= 6 } => {
                simd.call_ints(Tile::<F, 6, O>::new(panels, input, blocks, sums))
            }
            rows => unreachable!("no tile has {rows} rows; this is a bug"),
        }
    }
}
