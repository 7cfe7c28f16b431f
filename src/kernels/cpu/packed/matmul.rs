//! Products x · wᵀ, for x (rows, in) and packed w (out, in).
//!
//! x becomes codes, once. Few rows: a thread takes several strips of outs, one after another, from memory. More rows: it
//! takes a panel of strips.
//!
//! Invariant: what a thread takes decides only when a block is added, never in which order.

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

/// From so many tiles of rows on, strips are unpacked for them.
const UNPACKED_TILES: usize = 3;
/// From so many rows on AMX is used: each of its tiles has six rows then.
#[cfg(target_arch = "x86_64")]
const AMX_ROWS_MIN: usize = 12;
/// Bytes of weights that one item takes where they stream.
const STREAM_BYTES: usize = 128 * 1024;
/// An item's strips come in multiples of this, the strips of the largest tile.
const OUTS_MAX: usize = 2;

/// Buffers that grow with the limits and the widest weight, and not during steps.
pub struct PackedScratch {
    /// x, packed.
    input: HostBuf,
    /// For each thread: the sums of all rows with a panel, and the panel's codes and fields, unpacked.
    sums: HostBuf,
    sums_len: usize,
    codes: HostBuf,
    fields: HostBuf,
}

impl PackedScratch {
    /// Room for `rows` rows of `inp` columns on `threads` threads.
    pub fn new(rows: usize, inp: usize, threads: usize) -> Result<PackedScratch, DeviceError> {
        let sums_len = rows * panel::STRIPS * LANES;
        let panels = if inp == 0 { 0 } else { threads * panel::STRIPS };
        Ok(PackedScratch {
            input: HostBuf::zeroed(rows * inp.div_ceil(INPUT_BLOCK) * ROW_BYTES)?,
            sums: HostBuf::zeroed(threads * sums_len * size_of::<f32>())?,
            sums_len,
            codes: HostBuf::zeroed(panels * CODES)?,
            fields: HostBuf::zeroed(panels * FIELDS * size_of::<f32>())?,
        })
    }

    /// Packs rows.
    pub fn pack(
        &mut self,
        pool: &mut Pool,
        (level, dots): (Level, Option<Dots>),
        source: &Source,
        rooms: &Rooms,
    ) -> Packed<'_> {
        let count = source.rows;
        let (way, tiles) = Way::of(level, dots, count);
        let input = &mut self.input.bytes_mut()[..count * (source.inp / INPUT_BLOCK) * ROW_BYTES];
        input::pack(pool, level, source, &tiles, rooms, input);
        let (sums, sums_len) = (Parts::new(self.sums.f32_mut()), self.sums_len);
        let (codes, fields) = (Parts::new(self.codes.bytes_mut()), Parts::new(self.fields.f32_mut()));
        Packed { level, threads: pool.threads(), way, tiles, count, input, sums, sums_len, codes, fields }
    }
}

/// How weights are multiplied with.
#[derive(Clone, Copy)]
pub enum Way {
    /// As they are stored.
    Stored,
    /// Unpacked.
    Unpacked,
    /// Unpacked, by AMX.
    #[cfg_attr(not(target_arch = "x86_64"), allow(dead_code))]
    Amx(Amx),
}

impl Way {
    /// That for so many rows, and how these are cut.
    fn of(level: Level, dots: Option<Dots>, rows: usize) -> (Way, Tiles) {
        #[cfg(target_arch = "x86_64")]
        if let Some(Dots::Amx(amx)) = dots
            && rows >= AMX_ROWS_MIN
        {
            return (Way::Amx(amx), Tiles::new(rows, amx::ROWS));
        }
        let _ = dots;
        let tiles = Tiles::new(rows, level.run_ints(TileRows));
        (if tiles.count() < UNPACKED_TILES { Way::Stored } else { Way::Unpacked }, tiles)
    }
}

/// Rows of a level's largest tile.
struct TileRows;

impl IntKernel for TileRows {
    type Out = usize;

    #[inline(always)]
    fn run<S: Ints>(self, _: S) -> usize {
        S::CODE_ROWS
    }
}

/// Packed rows, and each thread's scratch.
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
    /// Whether a weight is read once, as it is stored.
    pub fn streams(&self) -> bool {
        matches!(self.way, Way::Stored) && self.tiles.count() == 1
    }

    /// A tile's rows, and where they begin at that block of 32 columns.
    pub fn tile(&self, tile: usize, block: usize) -> (Range<usize>, *const u8) {
        let (rows, row) = (self.tiles.rows_of(tile), self.input.len() / self.count);
        let input = &self.input[rows.start * row..rows.end * row];
        let at = input[block * rows.len() * ROW_BYTES..].as_ptr();
        (rows, at)
    }
}

impl products::Packed for Packed<'_> {
    fn outs_each(&self, w: &Weight<HostBuf>, most: usize) -> usize {
        let strip = w.buf.len() / w.out.div_ceil(STRIP);
        let streamed = STREAM_BYTES / strip.clamp(1, STREAM_BYTES);
        let strips = if self.streams() { streamed } else { panel::STRIPS };
        strips.min(most.div_ceil(STRIP)).next_multiple_of(OUTS_MAX) * STRIP
    }

    fn multiply(&self, worker: usize, product: &Product, outs: Range<usize>) {
        let own = |each: usize| worker * each..(worker + 1) * each;
        // SAFETY: each worker has its own scratch and is in one item at a time.
        let scratch = unsafe {
            Scratch {
                sums: self.sums.part(own(self.sums_len)),
                codes: self.codes.part(own(panel::STRIPS * CODES)),
                fields: self.fields.part(own(panel::STRIPS * FIELDS)),
            }
        };
        self.level.run_ints(Item { rows: self, product, outs, scratch });
    }
}

/// All rows with some outs.
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

struct Typed<'a, S> {
    item: Item<'a>,
    simd: S,
}

impl<S: Ints> ForFormat for Typed<'_, S> {
    type Out = ();

    fn run<F: Format>(self) {
        let Item { rows, product, outs, mut scratch } = self.item;
        let end = outs.end.div_ceil(STRIP);
        for first in (outs.start / STRIP..end).step_by(panel::STRIPS) {
            let strips = first..end.min(first + panel::STRIPS);
            Panel::<F>::new(rows, product, strips).multiply(self.simd, &mut scratch);
        }
    }
}
