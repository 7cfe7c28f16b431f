//! y = x · wᵀ + bias, for x (rows, inp) and packed w (out, inp).
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
use crate::cpu::matmul::Tiles;
use crate::cpu::pool::{Parts, Pool};
use crate::host::HostBuf;
use std::ops::Range;

/// Strips that AVX-512 multiplies at once, and AMX.
const STRIPS: usize = 4;
const AMX_STRIPS: usize = 2;
/// Rows of a tile.
const TILE_ROWS: usize = 6;
const AMX_ROWS: usize = 16;
/// Blocks between two cuts.
const CUT: usize = 8;
/// Bytes of weights that an item takes at least where they stream, and at most.
const STREAM_BYTES: usize = 128 * 1024;
const PANEL_BYTES: usize = 512 * 1024;
/// Products that are not worth a second thread.
const SMALL: usize = 64 * 1024;

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
}

/// y (rows, out) = x (rows, inp) · wᵀ + bias.
pub fn matmul(
    pool: &mut Pool,
    dots: Dots,
    scratch: &mut HalvesScratch,
    w: &Weight<HostBuf>,
    bias: Option<&[f32]>,
    (x, y): (&[f32], &mut [f32]),
) {
    let rows = x.len() / w.inp;
    assert_eq!(y.len(), rows * w.out, "y is (rows, out); this is a bug");
    if rows == 0 {
        return;
    }
    let tiles = Tiles::new(rows, if let Dots::Amx(_) = dots { AMX_ROWS } else { TILE_ROWS });
    let packed = &mut scratch.input.bytes_mut()[..rows * input::row_bytes(w.inp)];
    input::pack(pool, &tiles, (w.inp, x), packed);
    let y = Parts::new(y);
    let product = Product { w, bias, input: packed, tiles, rows, y: &y };
    product.run(pool, dots, &Parts::new(scratch.sums.f32_mut()), scratch.sums_len);
}

/// One multiplication, as the threads see it.
struct Product<'a> {
    w: &'a Weight<HostBuf>,
    bias: Option<&'a [f32]>,
    input: &'a [u8],
    tiles: Tiles,
    rows: usize,
    /// (rows, out).
    y: &'a Parts<'a, f32>,
}

impl Product<'_> {
    fn run(&self, pool: &mut Pool, dots: Dots, sums: &Parts<f32>, sums_len: usize) {
        let strips = self.w.out.div_ceil(STRIP);
        let each = self.strips_each(pool.threads(), strips);
        let items = strips.div_ceil(each);
        pool.run(items, |worker, item| {
            // SAFETY: each worker has its own scratch and is in one item at a time.
            let sums = unsafe { sums.part(worker * sums_len..(worker + 1) * sums_len) };
            let first = (items - 1 - item) * each;
            let strips = first..strips.min(first + each);
            match dots {
                #[cfg(target_arch = "x86_64")]
                Dots::Amx(amx) => self.multiply_tiles(amx, strips, sums),
                #[cfg(target_arch = "x86_64")]
                Dots::Avx512(simd) => self.multiply_rows(simd, strips, sums),
            }
        });
    }

    /// Strips of one work item: a multiple of those that are multiplied at once.
    fn strips_each(&self, threads: usize, strips: usize) -> usize {
        if self.rows * self.w.out * self.w.inp <= SMALL {
            return strips.next_multiple_of(STRIPS);
        }
        let bytes = if self.tiles.count() == 1 { STREAM_BYTES } else { PANEL_BYTES };
        let wanted = bytes / strip_bytes(self.w.inp).min(bytes);
        wanted.min(strips.div_ceil(4 * threads)).next_multiple_of(STRIPS)
    }

    #[cfg(target_arch = "x86_64")]
    fn multiply_tiles(&self, amx: Amx, strips: Range<usize>, sums: &mut [f32]) {
        let blocks = self.w.inp.div_ceil(BLOCK);
        for tile in (0..self.tiles.count()).step_by(2) {
            let rows = self.tiles.rows_of(tile);
            let more =
                if tile + 1 < self.tiles.count() { self.tiles.rows_of(tile + 1) } else { rows.end..rows.end };
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
        let blocks = self.w.inp.div_ceil(BLOCK);
        let cut = if self.tiles.count() == 1 { blocks } else { CUT };
        let sums = &mut sums[..self.rows * STRIPS * STRIP];
        for strip in strips.clone().step_by(STRIPS) {
            sums.fill(0.0);
            let at = std::array::from_fn::<_, STRIPS, _>(|o| self.strip(strip + o));
            for first in (0..blocks).step_by(cut.max(1)) {
                for tile in 0..self.tiles.count() {
                    let rows = self.tiles.rows_of(tile);
                    let sums = &mut sums[rows.start * STRIPS * STRIP..rows.end * STRIPS * STRIP];
                    let operands = Operands { strips: at, input: self.input_of(&rows).0, rows: rows.len() };
                    // SAFETY: input and strips are whole.
                    unsafe { simd.multiply(&operands, first..blocks.min(first + cut), sums) };
                }
            }
            for o in 0..STRIPS.min(strips.end - strip) {
                self.put(0..self.rows, (strip + o) * STRIP, (o, STRIPS), sums);
            }
        }
    }

    /// Where a strip begins; those beyond the last repeat it.
    fn strip(&self, strip: usize) -> *const u8 {
        let each = strip_bytes(self.w.inp);
        let last = self.w.out.div_ceil(STRIP) - 1;
        self.w.buf.bytes()[strip.min(last) * each..][..each].as_ptr()
    }

    /// Where a tile's rows begin, and their number.
    fn input_of(&self, rows: &Range<usize>) -> (*const u8, usize) {
        let row = input::row_bytes(self.w.inp);
        debug_assert_eq!(row % BLOCK_BYTES, 0);
        (self.input[rows.start * row..rows.end * row].as_ptr(), rows.len())
    }

    /// Writes the sums (rows, outs, 16) of strip `o` of `outs`, which begins with out `first`, + bias, to those rows of y.
    fn put(&self, rows: Range<usize>, first: usize, (o, outs): (usize, usize), sums: &[f32]) {
        let count = STRIP.min(self.w.out - first);
        for (row, sums) in rows.zip(sums.chunks_exact(outs * STRIP)) {
            let start = row * self.w.out + first;
            // SAFETY: a strip belongs to one item, so no other thread writes these elements.
            let y = unsafe { self.y.part(start..start + count) };
            let sums = &sums[o * STRIP..][..count];
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
