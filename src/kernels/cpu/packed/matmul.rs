//! Int8 GEMM: x · wᵀ, for x (m, k) and packed w (n, k).
//!
//! x is quantized to int8 once. With few rows, a thread streams several panels of outputs from memory, one
//! after another. With more rows, it takes a group of panels and processes the columns a slice at a time.
//!
//! Invariant: how work is divided decides only when a block is added, never in which order.

use super::STRIP;
use super::formats::{ForFormat, Format, with_format};
use super::input::{self, ROW_BYTES};
use super::panel::{self, CODES, FIELDS, Panel, Scratch};
use crate::backend::{DeviceError, Weight};
#[cfg(target_arch = "x86_64")]
use crate::cpu::amx;
use crate::cpu::amx::Amx;
use crate::cpu::halves::Dots;
use crate::cpu::pool::{Parts, Pool};
use crate::cpu::products::{self, Product};
use crate::cpu::simd::{IntKernel, Ints, LANES, Level};
use crate::cpu::source::{Rooms, Source, Tiles};
use crate::host::HostBuf;
use crate::quant::INPUT_BLOCK;
use std::ops::Range;

/// Smallest number of tiles of rows for which panels are unpacked.
const UNPACKED_TILES: usize = 3;
/// Smallest number of rows for which AMX is used; each of its tiles then has at least six rows.
#[cfg(target_arch = "x86_64")]
const AMX_ROWS_MIN: usize = 12;
/// Bytes of weights that one work item takes when the weights stream.
const STREAM_BYTES: usize = 128 * 1024;
/// The number of panels of a work item is a multiple of this, the number of panels of the largest tile.
const OUTS_MAX: usize = 2;

/// Buffers of the int8 GEMM. Their size follows from the step limits and the widest weight; they do not grow
/// during steps.
pub struct PackedScratch {
    /// The packed input.
    input: HostBuf,
    /// For each thread: the sums of all rows with a panel group, and the group's unpacked quants and scales.
    sums: HostBuf,
    sums_len: usize,
    codes: HostBuf,
    fields: HostBuf,
}

impl PackedScratch {
    /// Allocates scratch for `rows` rows of `k` columns on `threads` threads.
    pub fn new(rows: usize, k: usize, threads: usize) -> Result<PackedScratch, DeviceError> {
        let sums_len = rows * panel::STRIPS * LANES;
        let panels = if k == 0 { 0 } else { threads * panel::STRIPS };
        Ok(PackedScratch {
            input: HostBuf::zeroed(rows * k.div_ceil(INPUT_BLOCK) * ROW_BYTES)?,
            sums: HostBuf::zeroed(threads * sums_len * size_of::<f32>())?,
            sums_len,
            codes: HostBuf::zeroed(panels * CODES)?,
            fields: HostBuf::zeroed(panels * FIELDS * size_of::<f32>())?,
        })
    }

    /// Quantizes and packs the input.
    pub fn pack(
        &mut self,
        pool: &mut Pool,
        (level, bf16_isa): (Level, Option<Dots>),
        x: &Source,
        buffers: &Rooms,
    ) -> Packed<'_> {
        let rows = x.rows;
        let (path, tiles) = Way::of(level, bf16_isa, rows);
        let input = &mut self.input.bytes_mut()[..rows * (x.inp / INPUT_BLOCK) * ROW_BYTES];
        input::pack(pool, level, x, &tiles, buffers, input);
        let (sums, sums_len) = (Parts::new(self.sums.f32_mut()), self.sums_len);
        let (quants, scales) = (Parts::new(self.codes.bytes_mut()), Parts::new(self.fields.f32_mut()));
        Packed {
            level,
            threads: pool.threads(),
            way: path,
            tiles,
            count: rows,
            input,
            sums,
            sums_len,
            codes: quants,
            fields: scales,
        }
    }
}

/// The kernel path: how the weights are read and multiplied.
#[derive(Clone, Copy)]
pub enum Way {
    /// Directly from the stored panels.
    Stored,
    /// From panels that are unpacked first.
    Unpacked,
    /// From unpacked panels, with AMX.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    Amx(Amx),
}

impl Way {
    /// Returns the path for `rows` rows, and the tiles of rows for it.
    fn of(level: Level, bf16_isa: Option<Dots>, rows: usize) -> (Way, Tiles) {
        #[cfg(target_arch = "x86_64")]
        if let Some(Dots::Amx(amx)) = bf16_isa
            && rows >= AMX_ROWS_MIN
        {
            return (Way::Amx(amx), Tiles::new(rows, amx::ROWS));
        }
        let _ = bf16_isa;
        let tiles = Tiles::new(rows, level.run_ints(TileRows));
        (if tiles.count() < UNPACKED_TILES { Way::Stored } else { Way::Unpacked }, tiles)
    }
}

/// Kernel that returns the rows of the instruction set's largest tile.
struct TileRows;

impl IntKernel for TileRows {
    type Out = usize;

    #[inline(always)]
    fn run<S: Ints>(self, _: S) -> usize {
        S::CODE_ROWS
    }
}

/// A packed int8 input, and the scratch of each thread.
pub struct Packed<'a> {
    level: Level,
    pub threads: usize,
    pub way: Way,
    pub tiles: Tiles,
    pub count: usize,
    input: &'a [u8],
    sums: Parts<'a, f32>,
    sums_len: usize,
    codes: Parts<'a, u8>,
    fields: Parts<'a, f32>,
}

impl Packed<'_> {
    /// Returns whether a weight is read only once, as it is stored.
    pub fn streams(&self) -> bool {
        matches!(self.way, Way::Stored) && self.tiles.count() == 1
    }

    /// Returns a tile's rows, and the address of their block number `block` of 32 columns.
    pub fn tile(&self, tile: usize, block: usize) -> (Range<usize>, *const u8) {
        let (rows, row) = (self.tiles.rows_of(tile), self.input.len() / self.count);
        let input = &self.input[rows.start * row..rows.end * row];
        let at = input[block * rows.len() * ROW_BYTES..].as_ptr();
        (rows, at)
    }
}

impl products::Packed for Packed<'_> {
    fn outs_each(&self, w: &Weight<HostBuf>, max: usize) -> usize {
        let panel_bytes = w.buf.len() / w.out.div_ceil(STRIP);
        let streamed = STREAM_BYTES / panel_bytes.clamp(1, STREAM_BYTES);
        let panels = if self.streams() { streamed } else { panel::STRIPS };
        panels.min(max.div_ceil(STRIP)).next_multiple_of(OUTS_MAX) * STRIP
    }

    fn multiply(&self, worker: usize, gemm: &Product, outputs: Range<usize>) {
        let own = |each: usize| worker * each..(worker + 1) * each;
        // SAFETY: each worker has its own scratch and is in one item at a time.
        let scratch = unsafe {
            Scratch {
                sums: self.sums.part(own(self.sums_len)),
                codes: self.codes.part(own(panel::STRIPS * CODES)),
                fields: self.fields.part(own(panel::STRIPS * FIELDS)),
            }
        };
        self.level.run_ints(Item { rows: self, product: gemm, outs: outputs, scratch });
    }
}

/// A work item: all rows with a range of outputs.
struct Item<'a> {
    rows: &'a Packed<'a>,
    product: &'a Product<'a>,
    outs: Range<usize>,
    scratch: Scratch<'a>,
}

impl IntKernel for Item<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Ints>(self, simd: S) {
        with_format(self.product.w.ty, Typed { item: self, simd })
            .expect("the weight is packed; this is a bug")
    }
}

/// Runs a work item for the packed format of its weight.
struct Typed<'a, S> {
    item: Item<'a>,
    simd: S,
}

impl<S: Ints> ForFormat for Typed<'_, S> {
    type Out = ();

    fn run<F: Format>(self) {
        let Item { rows: input, product: gemm, outs: outputs, mut scratch } = self.item;
        let end = outputs.end.div_ceil(STRIP);
        for first in (outputs.start / STRIP..end).step_by(panel::STRIPS) {
            let panels = first..end.min(first + panel::STRIPS);
            Panel::<F>::new(input, gemm, panels).multiply(self.simd, &mut scratch);
        }
    }
}
