//! One tile: R rows with O strips of outs.
//!
//! Of each block of 32 columns the products of codes are summed exactly, as whole numbers; that sum, times the product of the
//! two scales, is added to what earlier blocks gave, in one rounding; and so is the base, if there is one, times the sum of
//! the input's block. A format with two scales in 32 columns does this for 16 and 16.
//! Invariant: an element's sums run over blocks in ascending order, whatever R, O and the cuts between blocks.

// Arrays in step: what they are indexed by says more than iterators over one of them.
#![allow(clippy::needless_range_loop)]

use super::ahead::Ahead;
use super::codes::{Codes, HALF};
use super::fields::{Fields, Zero};
use super::formats::{Format, Wide};
use super::input::{ROW_BYTES, WORD};
use crate::cpu::simd::{BYTES, IntKernel, Ints, LANES, prefetch_first};
use crate::quant::INPUT_BLOCK;
use std::marker::PhantomData;
use std::ops::Range;

/// How far ahead of the codes at hand others are asked for: bytes, at most, in whole blocks.
const AHEAD: usize = 4096;

/// Some strips: where the codes and fields of each one's first block are.
#[derive(Clone, Copy)]
pub struct Strips<const O: usize> {
    pub codes: [*const u8; O],
    pub fields: [*const u8; O],
    /// Blocks of a row, where they come from memory: behind them the strips begin that come next.
    pub row: usize,
    /// What to ask for meanwhile, where these do not.
    pub ahead: [Ahead; O],
}

/// What to multiply.
pub struct Tile<'a, F, const R: usize, const O: usize> {
    strips: Strips<O>,
    input: *const u8,
    blocks: Range<usize>,
    sums: (&'a mut [f32], usize),
    format: PhantomData<F>,
}

impl<'a, F: Format, const R: usize, const O: usize> Tile<'a, F, R, O> {
    /// Codes and fields are those of each strip's first block, `input` the tile's R rows from the first block on. To `sums`,
    /// what earlier blocks gave, O times 16 of each row, rows a stride apart, go the products of `blocks`.
    ///
    /// # Safety
    /// * Codes, fields and input can be read up to the end of `blocks`, as long as the tile lives.
    pub unsafe fn new(
        strips: Strips<O>,
        input: *const u8,
        blocks: Range<usize>,
        sums: (&'a mut [f32], usize),
    ) -> Tile<'a, F, R, O> {
        Tile { strips, input, blocks, sums, format: PhantomData }
    }
}

/// Whole sums of R rows with O strips.
type Whole<S, const R: usize, const O: usize> = [[<S as Ints>::I; O]; R];

impl<F: Format, const R: usize, const O: usize> IntKernel for Tile<'_, F, R, O> {
    type Out = ();

    #[inline(always)]
    fn run<S: Ints>(self, simd: S) {
        let (sums, stride) = (self.sums.0.as_chunks_mut::<LANES>().0, self.sums.1 / LANES);
        let mut totals = [[simd.splat(0.0); O]; R];
        for r in 0..R {
            for o in 0..O {
                totals[r][o] = simd.load(&sums[r * stride + o]);
            }
        }
        let mut strips = self.strips;
        for block in self.blocks {
            if !F::STREAMS {
                strips.ahead.iter_mut().for_each(Ahead::ask);
            }
            for part in (0..parts::<F>()).step_by(step::<F>()) {
                if F::STREAMS {
                    strips.ask_from::<F>(block, part);
                }
                // SAFETY: who made the tile promised that its pointers cover the blocks. Two parts are spelled out, for
                // then what both read is read once, and places are constants.
                unsafe {
                    add_part::<F, S, R, O>(simd, &strips, self.input, (block, part, 0), &mut totals);
                    if step::<F>() == 2 {
                        add_part::<F, S, R, O>(simd, &strips, self.input, (block, part, 1), &mut totals);
                    }
                }
            }
        }
        for r in 0..R {
            for o in 0..O {
                simd.store(totals[r][o], &mut sums[r * stride + o]);
            }
        }
    }
}

impl<const O: usize> Strips<O> {
    /// Asks for what comes some blocks after one step from part `part` of this one.
    #[inline(always)]
    fn ask_from<F: Format>(&self, block: usize, part: usize) {
        let blocks = const { AHEAD / F::CODE_BYTES };
        let (codes, fields) =
            const { (F::CODE_BYTES / BYTES / steps::<F>(), F::FIELD_BYTES.div_ceil(BYTES * steps::<F>())) };
        let (is_behind, nth) = (block + blocks >= self.row, part / step::<F>());
        for o in 0..O {
            // Behind the row: the strips that come next lie behind the last one of these.
            let code = if is_behind { self.codes[O - 1] as usize - self.codes[0] as usize } else { 0 };
            let field = if is_behind { self.fields[O - 1] as usize - self.fields[0] as usize } else { 0 };
            let code = code + (block + blocks) * F::CODE_BYTES + nth * codes * BYTES;
            let field = field + (block + blocks) * F::FIELD_BYTES + nth * fields * BYTES;
            for line in 0..codes {
                prefetch_first(self.codes[o].wrapping_add(code + line * BYTES));
            }
            for line in 0..fields {
                prefetch_first(self.fields[o].wrapping_add(field + line * BYTES));
            }
        }
    }
}

/// Runs of 32 columns in a block.
const fn parts<F: Format>() -> usize {
    F::NUMBERS / INPUT_BLOCK
}

/// Those that are dealt with in one step.
const fn step<F: Format>() -> usize {
    2 - parts::<F>() % 2
}

/// Steps of a block.
const fn steps<F: Format>() -> usize {
    parts::<F>() / step::<F>()
}

/// totals += the products of part `first + nth` of a block.
///
/// # Safety
/// * Codes, fields and input can be read up to the end of the block.
#[inline(always)]
unsafe fn add_part<F: Format, S: Ints, const R: usize, const O: usize>(
    simd: S,
    strips: &Strips<O>,
    input: *const u8,
    (block, first, nth): (usize, usize, usize),
    totals: &mut [[S::V; O]; R],
) {
    let mut parts_of = [Strip::<S>::default_of(simd); O];
    for o in 0..O {
        let (codes, fields) = (strips.codes[o], strips.fields[o]);
        // SAFETY: the caller's promise, here and below.
        parts_of[o] = unsafe { Strip::of::<F>(simd, codes, fields, block, (first, nth)) };
    }
    let at = (block * parts::<F>() + first + nth) * R * ROW_BYTES;
    unsafe { add_block::<F, S, R, O>(simd, &parts_of, input.add(at), totals) };
}

/// 32 columns of a strip.
#[derive(Clone, Copy)]
struct Strip<S: Ints> {
    /// Where the codes lie that are stored together, and which 32 of those these are.
    codes: *const u8,
    within: usize,
    scales: [S::V; 2],
    base: S::V,
}

impl<S: Ints> Strip<S> {
    #[inline(always)]
    fn default_of(simd: S) -> Strip<S> {
        let zero = simd.splat(0.0);
        Strip { codes: std::ptr::null(), within: 0, scales: [zero; 2], base: zero }
    }

    /// Those of part `first + nth` of a block. With `first` codes begin that are stored together.
    ///
    /// # Safety
    /// * `codes` and `fields` cover the block.
    #[inline(always)]
    unsafe fn of<F: Format>(
        simd: S,
        codes: *const u8,
        fields: *const u8,
        block: usize,
        (first, nth): (usize, usize),
    ) -> Strip<S> {
        let together = const {
            let together = F::Codes::NUMBERS / INPUT_BLOCK;
            assert!(step::<F>().is_multiple_of(together), "a step has all codes that are stored together");
            together
        };
        let (runs, within) = ((first + nth) / together, nth % together);
        // SAFETY: the caller's promise.
        unsafe {
            let codes = codes.add(block * F::CODE_BYTES + runs * F::Codes::BYTES);
            let (scales, base) = F::Fields::scales(simd, fields.add(block * F::FIELD_BYTES), first + nth);
            Strip { codes, within, scales, base }
        }
    }
}

/// Some blocks of a strip, to be unpacked.
pub struct Unpack<'a, F> {
    strip: (*const u8, *const u8),
    blocks: Range<usize>,
    less: u8,
    codes: &'a mut [u8],
    fields: &'a mut [f32],
    format: PhantomData<F>,
}

impl<'a, F: Format> Unpack<'a, F> {
    /// Codes and fields are those of the strip's first block. `blocks` go to `codes`, each code less `less`, and `fields`, as
    /// [`Wide`] has them.
    ///
    /// # Safety
    /// * Codes and fields can be read up to the end of `blocks`.
    pub unsafe fn new(
        strip: (*const u8, *const u8),
        blocks: Range<usize>,
        less: u8,
        (codes, fields): (&'a mut [u8], &'a mut [f32]),
    ) -> Unpack<'a, F> {
        Unpack { strip, blocks, less, codes, fields, format: PhantomData }
    }
}

impl<F: Format> IntKernel for Unpack<'_, F> {
    type Out = ();

    #[inline(always)]
    fn run<S: Ints>(self, simd: S) {
        let (parts, step) = const { (parts::<F>(), step::<F>()) };
        let codes = self.codes.as_chunks_mut::<BYTES>().0.as_chunks_mut::<{ 2 * HALF }>().0;
        let fields = self.fields.as_chunks_mut::<LANES>().0;
        let each = const { Wide::<F>::FIELD_BYTES / (LANES * size_of::<f32>()) };
        for (i, (codes, fields)) in codes.iter_mut().zip(fields.chunks_exact_mut(each)).enumerate() {
            let (block, part) = (self.blocks.start + i / parts, i % parts);
            if block == self.blocks.end {
                break;
            }
            // SAFETY: who made this promised that its pointers cover the blocks; here and below.
            let strip = unsafe {
                Strip::<S>::of::<F>(
                    simd,
                    self.strip.0,
                    self.strip.1,
                    block,
                    (part / step * step, part % step),
                )
            };
            for number in 0..HALF {
                let pair = unsafe { F::Codes::pair(simd, strip.codes, strip.within, number) };
                let pair = pair.map(|codes| simd.less(codes, self.less));
                simd.put_bytes(pair[0], &mut codes[number]);
                simd.put_bytes(pair[1], &mut codes[number + HALF]);
            }
            let last = if F::Fields::ZERO == Zero::Base { strip.base } else { strip.scales[each - 1] };
            simd.store(strip.scales[0], &mut fields[0]);
            simd.store(last, &mut fields[each - 1]);
        }
    }
}

/// totals += the products of 32 columns.
///
/// # Safety
/// * The strips' codes can be read, and R rows of `input`.
#[inline(always)]
unsafe fn add_block<F: Format, S: Ints, const R: usize, const O: usize>(
    simd: S,
    strips: &[Strip<S>; O],
    input: *const u8,
    totals: &mut [[S::V; O]; R],
) {
    // SAFETY: the caller's promise, here and below.
    let mut whole: [Whole<S, R, O>; 2] = [[[simd.zero(); O]; R]; 2];
    if let Zero::Power(n) = F::Fields::ZERO {
        for r in 0..R {
            let both = unsafe { simd.word(word::<R>(input, 2, r)) };
            let first =
                if F::Fields::RUNS == 2 { unsafe { simd.word(word::<R>(input, 3, r)) } } else { both };
            whole[0][r] = [simd.times_power(first, n); O];
            whole[1][r] = [simd.times_power(simd.sub_ints(both, first), n); O];
        }
    }
    for number in 0..HALF {
        let mut codes = [[simd.no_bytes(); 2]; O];
        for o in 0..O {
            codes[o] = unsafe { F::Codes::pair(simd, strips[o].codes, strips[o].within, number) };
        }
        for half in 0..2 {
            let run = half * (F::Fields::RUNS - 1);
            for r in 0..R {
                let x = unsafe { simd.word(input.add(r * INPUT_BLOCK + (number + half * HALF) * 4)) };
                for o in 0..O {
                    whole[run][r][o] = simd.dot(whole[run][r][o], codes[o][half], x);
                }
            }
        }
    }
    for r in 0..R {
        let scale = simd.splat(unsafe { word::<R>(input, 0, r).cast::<f32>().read_unaligned() });
        for o in 0..O {
            for run in 0..F::Fields::RUNS {
                let both = simd.mul(strips[o].scales[run], scale);
                totals[r][o] = simd.mul_add(simd.to_float(whole[run][r][o]), both, totals[r][o]);
            }
        }
        if F::Fields::ZERO == Zero::Base {
            let sum = simd.splat(unsafe { word::<R>(input, 1, r).cast::<f32>().read_unaligned() });
            for o in 0..O {
                totals[r][o] = simd.mul_add(strips[o].base, sum, totals[r][o]);
            }
        }
    }
}

/// Where a word of row r lies: its scale, its scaled sum, its sum, or the sum of its first half.
#[inline(always)]
fn word<const R: usize>(input: *const u8, field: usize, r: usize) -> *const u8 {
    input.wrapping_add(R * INPUT_BLOCK + (field * R + r) * WORD)
}
