//! Products x · wᵀ, for x (rows, inp) and packed w (out, inp).
//!
//! x becomes BF16, once. A thread takes some strips, and lets all rows pass by. AMX takes 2 x 16 rows with 2 strips, all
//! columns at once: its sums stay in registers, and the strips of an item, with two tiles of rows, in the second-level cache.
//! AVX-512 takes up to 6 rows with 4 strips, columns cut where strips and rows fit the first-level cache.
//!
//! Invariant: what a thread takes, and the cuts, decide only when a block is added, never in which order.

#[cfg(target_arch = "x86_64")]
use super::product::{Avx512Bf16, multiply_tiles};
use super::product::{Dots, Operands};
use super::store::strip_bytes;
use super::{BLOCK, BLOCK_BYTES, STRIP, input};
use crate::backend::{DeviceError, Weight};
#[cfg(target_arch = "x86_64")]
use crate::cpu::amx::{self, Amx};
use crate::cpu::pool::{Parts, Pool};
use crate::cpu::products::{Packed, Product};
use crate::cpu::simd::Level;
use crate::cpu::source::{Rooms, Source, Tiles};
use crate::host::HostBuf;
use std::ops::Range;

/// Strips that AVX-512 multiplies at once, and AMX.
const STRIPS: usize = 4;
const AMX_STRIPS: usize = 2;
/// Blocks between two cuts.
const CUT: usize = 8;
/// Bytes of weights that an item takes at least where they stream, and at most.
const STREAM_BYTES: usize = 128 * 1024;
const PANEL_BYTES: usize = 512 * 1024;

/// Buffers that grow with the limits and the widest weight, and not during steps.
pub struct HalvesScratch {
    /// x, packed.
    input: HostBuf,
    /// For each thread: sums of rows with the strips that are multiplied at once.
    sums: HostBuf,
    sums_len: usize,
}

impl HalvesScratch {
    /// Room for `rows` rows of `inp` columns on `threads` threads.
    pub fn new(rows: usize, inp: usize, threads: usize) -> Result<HalvesScratch, DeviceError> {
        let sums_len = rows * STRIPS * STRIP;
        Ok(HalvesScratch {
            input: HostBuf::zeroed(rows * input::row_bytes(inp))?,
            sums: HostBuf::zeroed(threads * sums_len * size_of::<f32>())?,
            sums_len,
        })
    }

    /// Packs rows.
    pub fn pack(
        &mut self,
        pool: &mut Pool,
        (level, dots): (Level, Dots),
        source: &Source,
        rooms: &Rooms,
    ) -> Halves<'_> {
        let tiles = Tiles::new(source.rows, dots.tile_rows());
        let input = &mut self.input.bytes_mut()[..source.rows * input::row_bytes(source.inp)];
        input::pack(pool, level, source, &tiles, rooms, input);
        let (sums, sums_len) = (Parts::new(self.sums.f32_mut()), self.sums_len);
        Halves { dots, tiles, rows: source.rows, input, sums, sums_len }
    }
}

/// Packed rows, and each thread's scratch.
pub struct Halves<'a> {
    dots: Dots,
    tiles: Tiles,
    rows: usize,
    input: &'a [u8],
    sums: Parts<'a, f32>,
    sums_len: usize,
}

impl Packed for Halves<'_> {
    fn outs_each(&self, w: &Weight<HostBuf>, most: usize) -> usize {
        let bytes = if self.tiles.count() == 1 { STREAM_BYTES } else { PANEL_BYTES };
        let wanted = bytes / strip_bytes(w.inp).clamp(1, bytes);
        wanted.min(most.div_ceil(STRIP)).next_multiple_of(STRIPS) * STRIP
    }

    fn multiply(&self, worker: usize, product: &Product, outs: Range<usize>) {
        // SAFETY: each worker has its own scratch and is in one item at a time.
        let sums = unsafe { self.sums.part(worker * self.sums_len..(worker + 1) * self.sums_len) };
        let weight = Strips { packed: self, product };
        let strips = outs.start / STRIP..outs.end.div_ceil(STRIP);
        match self.dots {
            #[cfg(target_arch = "x86_64")]
            Dots::Amx(amx) => weight.multiply_tiles(amx, strips, sums),
            #[cfg(target_arch = "x86_64")]
            Dots::Avx512(simd) => weight.multiply_rows(simd, strips, sums),
        }
    }
}

/// A weight, and the rows it is multiplied with.
struct Strips<'a> {
    packed: &'a Halves<'a>,
    product: &'a Product<'a>,
}

impl Strips<'_> {
    fn w(&self) -> &Weight<HostBuf> {
        self.product.w
    }

    #[cfg(target_arch = "x86_64")]
    fn multiply_tiles(&self, amx: Amx, strips: Range<usize>, sums: &mut [f32]) {
        let blocks = self.w().inp.div_ceil(BLOCK);
        for tile in (0..self.packed.tiles.count()).step_by(2) {
            let rows = self.packed.tiles.rows_of(tile);
            let more = if tile + 1 < self.packed.tiles.count() {
                self.packed.tiles.rows_of(tile + 1)
            } else {
                rows.end..rows.end
            };
            let inputs = [self.input_of(&rows), self.input_of(&more)];
            // SAFETY: the one before has been dropped, and nothing else here has any.
            let mut registers = unsafe { amx::Tiles::new(amx, [rows.len(), more.len()]) };
            let rows = rows.start..more.end;
            for strip in strips.clone().step_by(AMX_STRIPS) {
                let at = [strip, strip + 1].map(|strip| self.strip(strip));
                // SAFETY: inputs and strips are whole.
                unsafe { multiply_tiles(&mut registers, at, inputs, blocks, sums) };
                for o in 0..AMX_STRIPS.min(strips.end - strip) {
                    self.put(rows.clone(), (strip + o) * STRIP, (o, AMX_STRIPS), sums);
                }
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn multiply_rows(&self, simd: Avx512Bf16, strips: Range<usize>, sums: &mut [f32]) {
        let blocks = self.w().inp.div_ceil(BLOCK);
        let cut = if self.packed.tiles.count() == 1 { blocks } else { CUT };
        let sums = &mut sums[..self.packed.rows * STRIPS * STRIP];
        for strip in strips.clone().step_by(STRIPS) {
            sums.fill(0.0);
            let at = std::array::from_fn::<_, STRIPS, _>(|o| self.strip(strip + o));
            for first in (0..blocks).step_by(cut.max(1)) {
                for tile in 0..self.packed.tiles.count() {
                    let rows = self.packed.tiles.rows_of(tile);
                    let sums = &mut sums[rows.start * STRIPS * STRIP..rows.end * STRIPS * STRIP];
                    let operands = Operands { strips: at, input: self.input_of(&rows).0, rows: rows.len() };
                    // SAFETY: input and strips are whole.
                    unsafe { simd.multiply(&operands, first..blocks.min(first + cut), sums) };
                }
            }
            for o in 0..STRIPS.min(strips.end - strip) {
                self.put(0..self.packed.rows, (strip + o) * STRIP, (o, STRIPS), sums);
            }
        }
    }

    /// Where a strip begins; those beyond the last repeat it.
    fn strip(&self, strip: usize) -> *const u8 {
        let each = strip_bytes(self.w().inp);
        let last = self.w().out.div_ceil(STRIP) - 1;
        self.w().buf.bytes()[strip.min(last) * each..][..each].as_ptr()
    }

    /// Where a tile's rows begin, and their number.
    fn input_of(&self, rows: &Range<usize>) -> (*const u8, usize) {
        let row = input::row_bytes(self.w().inp);
        debug_assert_eq!(row % BLOCK_BYTES, 0);
        (self.packed.input[rows.start * row..rows.end * row].as_ptr(), rows.len())
    }

    /// Writes the sums (rows, outs, 16) of strip `o` of `outs`, which begins with out `first`, of those rows.
    fn put(&self, rows: Range<usize>, first: usize, (o, outs): (usize, usize), sums: &[f32]) {
        let count = STRIP.min(self.w().out - first);
        for (row, sums) in rows.zip(sums.chunks_exact(outs * STRIP)) {
            // SAFETY: a strip belongs to one item, so no other thread has these elements.
            unsafe { self.product.put(row, first, &sums[o * STRIP..][..count]) };
        }
    }
}
