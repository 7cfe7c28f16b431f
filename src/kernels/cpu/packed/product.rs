//! Int8 kernel of one tile: R rows with O panels of outputs.
//!
//! For each block of 32 columns, the products of quants are summed exactly, as integers. That sum, multiplied
//! by the product of the two scales, is added to the result of earlier blocks with one rounding; so is the
//! minimum, if there is one, multiplied by the sum of the input block. A format with two scales for 32
//! columns does this for 16 and 16 columns.
//! Invariant: the sums of an element run over blocks in ascending order, whatever R, O and the slices of
//! blocks.

// These loops index several arrays at once, which is clearer than iterating over one of them.
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

/// Prefetch distance: bytes of quants, at most, in whole blocks.
const AHEAD: usize = 4096;

/// O panels: the addresses of the quants and scales of each panel's first block.
#[derive(Clone, Copy)]
pub struct Strips<const O: usize> {
    pub codes: [*const u8; O],
    pub fields: [*const u8; O],
    /// Blocks of a row, if the panels are read from memory: the next panels begin after them.
    pub row: usize,
    /// What to prefetch meanwhile, if the panels are not read from memory.
    pub ahead: [Ahead; O],
}

/// Kernel that multiplies a tile of R rows with O panels.
pub struct Tile<'a, F, const R: usize, const O: usize> {
    strips: Strips<O>,
    input: *const u8,
    blocks: Range<usize>,
    sums: (&'a mut [f32], usize),
    format: PhantomData<F>,
}

impl<'a, F: Format, const R: usize, const O: usize> Tile<'a, F, R, O> {
    /// Creates the kernel, which adds the products of `blocks` to `sums`. Quants and scales are those of each
    /// panel's first block, and `input` holds the tile's R rows from the first block on. `sums` holds the
    /// results of earlier blocks: O times 16 for each row, rows a stride apart.
    ///
    /// # Safety
    /// * Quants, scales and input can be read up to the end of `blocks`, as long as the tile lives.
    pub unsafe fn new(
        panels: Strips<O>,
        input: *const u8,
        blocks: Range<usize>,
        sums: (&'a mut [f32], usize),
    ) -> Tile<'a, F, R, O> {
        Tile { strips: panels, input, blocks, sums, format: PhantomData }
    }
}

/// Integer sums of R rows with O panels.
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
        let mut panels = self.strips;
        for block in self.blocks {
            if !F::STREAMS {
                panels.ahead.iter_mut().for_each(Ahead::ask);
            }
            for chunk in (0..parts::<F>()).step_by(step::<F>()) {
                if F::STREAMS {
                    panels.ask_from::<F>(block, chunk);
                }
                // SAFETY: the caller of `new` guarantees that the pointers cover the blocks. The two chunks
                // are written out, because then data that both need is read once, and offsets are constants.
                unsafe {
                    add_part::<F, S, R, O>(simd, &panels, self.input, (block, chunk, 0), &mut totals);
                    if step::<F>() == 2 {
                        add_part::<F, S, R, O>(simd, &panels, self.input, (block, chunk, 1), &mut totals);
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
    /// Prefetches the data that comes some blocks after this one, for the step of chunk `chunk`.
    #[inline(always)]
    fn ask_from<F: Format>(&self, block: usize, chunk: usize) {
        let blocks = const { AHEAD / F::CODE_BYTES };
        let (quant_lines, scale_lines) =
            const { (F::CODE_BYTES / BYTES / steps::<F>(), F::FIELD_BYTES.div_ceil(BYTES * steps::<F>())) };
        let (is_beyond, nth) = (block + blocks >= self.row, chunk / step::<F>());
        for o in 0..O {
            // Beyond the row: the next panels come after the last one of these.
            let quants = if is_beyond { self.codes[O - 1] as usize - self.codes[0] as usize } else { 0 };
            let scales = if is_beyond { self.fields[O - 1] as usize - self.fields[0] as usize } else { 0 };
            let quants = quants + (block + blocks) * F::CODE_BYTES + nth * quant_lines * BYTES;
            let scales = scales + (block + blocks) * F::FIELD_BYTES + nth * scale_lines * BYTES;
            for line in 0..quant_lines {
                prefetch_first(self.codes[o].wrapping_add(quants + line * BYTES));
            }
            for line in 0..scale_lines {
                prefetch_first(self.fields[o].wrapping_add(scales + line * BYTES));
            }
        }
    }
}

/// Returns the number of 32-column chunks in a block.
const fn parts<F: Format>() -> usize {
    F::NUMBERS / INPUT_BLOCK
}

/// Returns the number of chunks that one step processes.
const fn step<F: Format>() -> usize {
    2 - parts::<F>() % 2
}

/// Returns the number of steps for a block.
const fn steps<F: Format>() -> usize {
    parts::<F>() / step::<F>()
}

/// Adds the products of chunk `first + nth` of a block to `totals`.
///
/// # Safety
/// * Quants, scales and input can be read up to the end of the block.
#[inline(always)]
unsafe fn add_part<F: Format, S: Ints, const R: usize, const O: usize>(
    simd: S,
    panels: &Strips<O>,
    input: *const u8,
    (block, first, nth): (usize, usize, usize),
    totals: &mut [[S::V; O]; R],
) {
    let mut chunks = [Strip::<S>::default_of(simd); O];
    for o in 0..O {
        let (quants, scales) = (panels.codes[o], panels.fields[o]);
        // SAFETY: the caller's promise, here and below.
        chunks[o] = unsafe { Strip::of::<F>(simd, quants, scales, block, (first, nth)) };
    }
    let at = (block * parts::<F>() + first + nth) * R * ROW_BYTES;
    unsafe { add_block::<F, S, R, O>(simd, &chunks, input.add(at), totals) };
}

/// A 32-column chunk of a panel.
#[derive(Clone, Copy)]
struct Strip<S: Ints> {
    /// Address of the quants that are stored together, and which 32 of them these are.
    codes: *const u8,
    within: usize,
    scales: [S::V; 2],
    base: S::V,
}

impl<S: Ints> Strip<S> {
    /// Returns a placeholder without quants.
    #[inline(always)]
    fn default_of(simd: S) -> Strip<S> {
        let zero = simd.splat(0.0);
        Strip { codes: std::ptr::null(), within: 0, scales: [zero; 2], base: zero }
    }

    /// Loads chunk `first + nth` of a block. Quants that are stored together begin with `first`.
    ///
    /// # Safety
    /// * `quants` and `scales` cover the block.
    #[inline(always)]
    unsafe fn of<F: Format>(
        simd: S,
        quants: *const u8,
        scales: *const u8,
        block: usize,
        (first, nth): (usize, usize),
    ) -> Strip<S> {
        let together = const {
            let together = F::Codes::NUMBERS / INPUT_BLOCK;
            assert!(
                step::<F>().is_multiple_of(together),
                "a step processes all quants that are stored together"
            );
            together
        };
        let (group, within) = ((first + nth) / together, nth % together);
        // SAFETY: the caller's promise.
        unsafe {
            let quants = quants.add(block * F::CODE_BYTES + group * F::Codes::BYTES);
            let (scales, minimum) = F::Fields::scales(simd, scales.add(block * F::FIELD_BYTES), first + nth);
            Strip { codes: quants, within, scales, base: minimum }
        }
    }
}

/// Kernel that unpacks some blocks of a panel.
pub struct Unpack<'a, F> {
    strip: (*const u8, *const u8),
    blocks: Range<usize>,
    less: u8,
    codes: &'a mut [u8],
    fields: &'a mut [f32],
    format: PhantomData<F>,
}

impl<'a, F: Format> Unpack<'a, F> {
    /// Creates the kernel. Quants and scales are those of the panel's first block. `blocks` are unpacked to
    /// `quants`, each quant minus `offset`, and to `scales`, in the layout of [`UnpackedFormat`].
    ///
    /// # Safety
    /// * Quants and scales can be read up to the end of `blocks`.
    pub unsafe fn new(
        panel: (*const u8, *const u8),
        blocks: Range<usize>,
        offset: u8,
        (quants, scales): (&'a mut [u8], &'a mut [f32]),
    ) -> Unpack<'a, F> {
        Unpack { strip: panel, blocks, less: offset, codes: quants, fields: scales, format: PhantomData }
    }
}

impl<F: Format> IntKernel for Unpack<'_, F> {
    type Out = ();

    #[inline(always)]
    fn run<S: Ints>(self, simd: S) {
        let (chunks_per_block, chunks_per_step) = const { (parts::<F>(), step::<F>()) };
        let quants = self.codes.as_chunks_mut::<BYTES>().0.as_chunks_mut::<{ 2 * HALF }>().0;
        let scales = self.fields.as_chunks_mut::<LANES>().0;
        let vectors = const { Wide::<F>::FIELD_BYTES / (LANES * size_of::<f32>()) };
        for (i, (quants, scales)) in quants.iter_mut().zip(scales.chunks_exact_mut(vectors)).enumerate() {
            let (block, chunk) = (self.blocks.start + i / chunks_per_block, i % chunks_per_block);
            if block == self.blocks.end {
                break;
            }
            // SAFETY: the caller of `new` guarantees that the pointers cover the blocks; here and below.
            let panel = unsafe {
                Strip::<S>::of::<F>(
                    simd,
                    self.strip.0,
                    self.strip.1,
                    block,
                    (chunk / chunks_per_step * chunks_per_step, chunk % chunks_per_step),
                )
            };
            for number in 0..HALF {
                let pair = unsafe { F::Codes::pair(simd, panel.codes, panel.within, number) };
                let pair = pair.map(|quants| simd.less(quants, self.less));
                simd.put_bytes(pair[0], &mut quants[number]);
                simd.put_bytes(pair[1], &mut quants[number + HALF]);
            }
            let last = if F::Fields::ZERO == Zero::Base { panel.base } else { panel.scales[vectors - 1] };
            simd.store(panel.scales[0], &mut scales[0]);
            simd.store(last, &mut scales[vectors - 1]);
        }
    }
}

/// Adds the products of 32 columns to `totals`.
///
/// # Safety
/// * The panels' quants can be read, and R rows of `input`.
#[inline(always)]
unsafe fn add_block<F: Format, S: Ints, const R: usize, const O: usize>(
    simd: S,
    panels: &[Strip<S>; O],
    input: *const u8,
    totals: &mut [[S::V; O]; R],
) {
    // SAFETY: the caller's promise, here and below.
    let mut int_sums: [Whole<S, R, O>; 2] = [[[simd.zero(); O]; R]; 2];
    if let Zero::Power(n) = F::Fields::ZERO {
        for r in 0..R {
            let both = unsafe { simd.word(word::<R>(input, 2, r)) };
            let first =
                if F::Fields::RUNS == 2 { unsafe { simd.word(word::<R>(input, 3, r)) } } else { both };
            int_sums[0][r] = [simd.times_power(first, n); O];
            int_sums[1][r] = [simd.times_power(simd.sub_ints(both, first), n); O];
        }
    }
    for number in 0..HALF {
        let mut quants = [[simd.no_bytes(); 2]; O];
        for o in 0..O {
            quants[o] = unsafe { F::Codes::pair(simd, panels[o].codes, panels[o].within, number) };
        }
        for half in 0..2 {
            let sub_block = half * (F::Fields::RUNS - 1);
            for r in 0..R {
                let x = unsafe { simd.word(input.add(r * INPUT_BLOCK + (number + half * HALF) * 4)) };
                for o in 0..O {
                    int_sums[sub_block][r][o] = simd.dot(int_sums[sub_block][r][o], quants[o][half], x);
                }
            }
        }
    }
    for r in 0..R {
        let scale = simd.splat(unsafe { word::<R>(input, 0, r).cast::<f32>().read_unaligned() });
        for o in 0..O {
            for sub_block in 0..F::Fields::RUNS {
                let both = simd.mul(panels[o].scales[sub_block], scale);
                totals[r][o] = simd.mul_add(simd.to_float(int_sums[sub_block][r][o]), both, totals[r][o]);
            }
        }
        if F::Fields::ZERO == Zero::Base {
            let sum = simd.splat(unsafe { word::<R>(input, 1, r).cast::<f32>().read_unaligned() });
            for o in 0..O {
                totals[r][o] = simd.mul_add(panels[o].base, sum, totals[r][o]);
            }
        }
    }
}

/// Returns the address of a word of row r: its scale, its scaled sum, its sum, or the sum of its first half.
#[inline(always)]
fn word<const R: usize>(input: *const u8, field: usize, r: usize) -> *const u8 {
    input.wrapping_add(R * INPUT_BLOCK + (field * R + r) * WORD)
}
