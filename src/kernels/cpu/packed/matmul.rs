//! y = x · wᵀ + bias, for x (rows, in) and packed w (out, in).
//!
//! x becomes codes, once. Few rows: a thread takes several strips of outs, one after another, from memory. More rows: it
//! takes the strips of one tile, cut where their codes fit the first-level cache, and lets all tiles of rows pass by.
//!
//! Invariant: what a thread takes, and the cuts, decide only when a block is added, never in which order.

use super::STRIP;
use super::fields::Fields;
use super::formats::{ForFormat, Format, with_format};
use super::input::{self, ROW_BYTES};
use super::product::Tile;
use super::store::Places;
use crate::backend::{DeviceError, Weight};
use crate::cpu::matmul::Tiles;
use crate::cpu::pool::{Parts, Pool};
use crate::cpu::simd::{IntKernel, Ints, LANES, Level};
use crate::host::HostBuf;
use crate::quant::INPUT_BLOCK;
use std::marker::PhantomData;
use std::ops::Range;

/// Columns between two cuts: a multiple of every block.
const CUT: usize = 1024;
/// Bytes of weights that one item takes where they stream.
const STREAM_BYTES: usize = 128 * 1024;
/// Strips of the largest tile.
const OUTS_MAX: usize = 2;
/// Products that are not worth a second thread.
const SMALL: usize = 64 * 1024;

/// Buffers that grow with the limits and the widest weight, and not during steps.
pub struct PackedScratch {
    /// x, packed.
    input: HostBuf,
    /// For each thread: the sums of all rows with the strips of a tile.
    sums: HostBuf,
    sums_len: usize,
}

impl PackedScratch {
    /// Room for `rows` rows of `inp` columns on `threads` threads.
    pub fn new(rows: usize, inp: usize, threads: usize) -> Result<PackedScratch, DeviceError> {
        let sums_len = rows * OUTS_MAX * LANES;
        Ok(PackedScratch {
            input: HostBuf::zeroed(rows * inp.div_ceil(INPUT_BLOCK) * ROW_BYTES)?,
            sums: HostBuf::zeroed(threads * sums_len * size_of::<f32>())?,
            sums_len,
        })
    }
}

/// y (rows, out) = x (rows, inp) · wᵀ + bias.
pub fn matmul(
    pool: &mut Pool,
    level: Level,
    scratch: &mut PackedScratch,
    w: &Weight<HostBuf>,
    bias: Option<&[f32]>,
    (x, y): (&[f32], &mut [f32]),
) {
    let rows = x.len() / w.inp;
    assert_eq!(y.len(), rows * w.out, "y is (rows, out); this is a bug");
    level.run_ints(Multiply { pool, level, scratch, w, bias, x, y, rows });
}

struct Multiply<'a> {
    pool: &'a mut Pool,
    level: Level,
    scratch: &'a mut PackedScratch,
    w: &'a Weight<HostBuf>,
    bias: Option<&'a [f32]>,
    x: &'a [f32],
    y: &'a mut [f32],
    rows: usize,
}

impl IntKernel for Multiply<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Ints>(self, simd: S) {
        with_format(self.w.ty, Typed { op: self, simd }).expect("the weight is packed; this is a bug")
    }
}

struct Typed<'a, S> {
    op: Multiply<'a>,
    simd: S,
}

impl<S: Ints> ForFormat for Typed<'_, S> {
    type Out = ();

    fn run<F: Format>(self) {
        let (simd, Multiply { pool, level, scratch, w, bias, x, y, rows }) = (self.simd, self.op);
        let tiles = Tiles::new(rows, S::CODE_ROWS);
        let packed = &mut scratch.input.bytes_mut()[..rows * (w.inp / INPUT_BLOCK) * ROW_BYTES];
        input::pack(pool, level, tiles.count(), |tile| tiles.rows_of(tile), (w.inp, x), packed);
        let y = Parts::new(y);
        let places = Places::of::<F>(w.out, w.inp);
        let product =
            Product::<F> { w, places, bias, input: packed, tiles, rows, y: &y, format: PhantomData };
        let sums = Parts::new(scratch.sums.f32_mut());
        // Two scales to a block take the registers of a second strip.
        match const { S::CODE_OUTS / F::Fields::RUNS } {
            2 => product.run::<S, 2>(simd, pool, &sums, scratch.sums_len),
            _ => product.run::<S, 1>(simd, pool, &sums, scratch.sums_len),
        }
    }
}

/// One multiplication, as the threads see it.
struct Product<'a, F> {
    w: &'a Weight<HostBuf>,
    places: Places,
    bias: Option<&'a [f32]>,
    input: &'a [u8],
    tiles: Tiles,
    rows: usize,
    /// (rows, out).
    y: &'a Parts<'a, f32>,
    format: PhantomData<F>,
}

// SAFETY: a format is a type only; what is shared is read, but for `y`, which is made for several threads.
unsafe impl<F> Sync for Product<'_, F> {}

impl<F: Format> Product<'_, F> {
    fn run<S: Ints, const O: usize>(&self, simd: S, pool: &mut Pool, sums: &Parts<f32>, sums_len: usize) {
        let strips = self.w.out.div_ceil(STRIP);
        let each = self.strips_each(pool.threads(), strips, O);
        let items = strips.div_ceil(each);
        pool.run(items, |worker, item| {
            // SAFETY: each worker has its own scratch and is in one item at a time.
            let sums = unsafe { sums.part(worker * sums_len..(worker + 1) * sums_len) };
            let first = (items - 1 - item) * each;
            for strip in (first..strips.min(first + each)).step_by(O) {
                self.strips::<S, O>(simd, strip, sums);
            }
        });
    }

    /// Strips of one work item: a multiple of `o`.
    fn strips_each(&self, threads: usize, strips: usize, o: usize) -> usize {
        if self.rows * self.w.out * self.w.inp <= SMALL {
            return strips.next_multiple_of(o).max(o);
        }
        let streamed = STREAM_BYTES / (self.places.codes + self.places.fields).min(STREAM_BYTES);
        let wanted = if self.tiles.count() == 1 { streamed } else { o };
        wanted.min(strips.div_ceil(4 * threads)).max(1).next_multiple_of(o)
    }

    /// All rows with O strips from `strip` on.
    fn strips<S: Ints, const O: usize>(&self, simd: S, strip: usize, sums: &mut [f32]) {
        let sums = &mut sums[..self.rows * O * LANES];
        sums.fill(0.0);
        let cut = if self.tiles.count() == 1 { self.places.blocks } else { CUT / F::NUMBERS };
        for first in (0..self.places.blocks).step_by(cut.max(1)) {
            let blocks = first..self.places.blocks.min(first + cut);
            for tile in 0..self.tiles.count() {
                self.tile::<S, O>(simd, strip, tile, blocks.clone(), sums);
            }
        }
        for o in 0..O.min(self.w.out.div_ceil(STRIP) - strip) {
            self.put((strip + o) * STRIP, o, O, sums);
        }
    }

    fn tile<S: Ints, const O: usize>(
        &self,
        simd: S,
        strip: usize,
        tile: usize,
        blocks: Range<usize>,
        sums: &mut [f32],
    ) {
        let rows = self.tiles.rows_of(tile);
        let sums = &mut sums[rows.start * O * LANES..rows.end * O * LANES];
        // The guards keep what a set does not use from being compiled for it.
        match rows.len() {
            0 => {}
            1 => simd.call_ints(self.tile_of::<1, O>(strip, rows, blocks, sums)),
            2 => simd.call_ints(self.tile_of::<2, O>(strip, rows, blocks, sums)),
            3 if const { S::CODE_ROWS >= 3 } => {
                simd.call_ints(self.tile_of::<3, O>(strip, rows, blocks, sums))
            }
            4 if const { S::CODE_ROWS >= 4 } => {
                simd.call_ints(self.tile_of::<4, O>(strip, rows, blocks, sums))
            }
            5 if const { S::CODE_ROWS >= 5 } => {
                simd.call_ints(self.tile_of::<5, O>(strip, rows, blocks, sums))
            }
            6 if const { S::CODE_ROWS >= 6 } => {
                simd.call_ints(self.tile_of::<6, O>(strip, rows, blocks, sums))
            }
            rows => unreachable!("no tile has {rows} rows; this is a bug"),
        }
    }

    /// Strips beyond the last repeat it.
    fn tile_of<'a, const R: usize, const O: usize>(
        &self,
        strip: usize,
        rows: Range<usize>,
        blocks: Range<usize>,
        sums: &'a mut [f32],
    ) -> Tile<'a, F, R, O> {
        let (bytes, places) = (self.w.buf.bytes(), &self.places);
        let last = self.w.out.div_ceil(STRIP) - 1;
        let codes = std::array::from_fn(|o| bytes[(strip + o).min(last) * places.codes..].as_ptr());
        let fields = std::array::from_fn(|o| {
            bytes[places.first_field + (strip + o).min(last) * places.fields..].as_ptr()
        });
        let row = self.w.inp / INPUT_BLOCK * ROW_BYTES;
        let input = self.input[rows.start * row..rows.end * row].as_ptr();
        // SAFETY: each begins in its slice where the strip's or the tile's part does, which reaches to the last block; and
        // weight and input outlive the multiplication.
        unsafe { Tile::new((codes, fields), input, blocks, sums) }
    }

    /// Writes the sums (rows, O, 16) of one strip, + bias, to y.
    fn put(&self, first: usize, o: usize, outs: usize, sums: &[f32]) {
        let count = STRIP.min(self.w.out - first);
        for row in 0..self.rows {
            let start = row * self.w.out + first;
            // SAFETY: a strip belongs to one item, so no other thread writes these elements.
            let y = unsafe { self.y.part(start..start + count) };
            let sums = &sums[(row * outs + o) * LANES..][..count];
            match self.bias {
                Some(bias) => {
                    for ((y, sum), bias) in y.iter_mut().zip(sums).zip(&bias[first..]) {
                        *y = sum + bias;
                    }
                }
                None => y.copy_from_slice(sums),
            }
        }
    }
}
