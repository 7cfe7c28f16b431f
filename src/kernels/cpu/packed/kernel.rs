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

use super::formats::{PackedFormat, UnpackedFormat};
use super::input::{ROW_BLOCK_BYTES, WORD_BYTES};
use super::prefetch::Prefetcher;
use super::quants::{HALF_VECTORS, QuantPacking};
use super::scales::{ScaleLayout, ZeroPoint};
use crate::cpu::simd::{BYTES, IntKernel, Ints, LANES, prefetch_l1};
use crate::quant::INT8_BLOCK_LEN;
use std::marker::PhantomData;
use std::ops::Range;

/// Prefetch distance: bytes of quants, at most, in whole blocks.
const PREFETCH_BYTES: usize = 4096;

/// O panels: the addresses of the quants and scales of each panel's first block.
#[derive(Clone, Copy)]
pub struct Panels<const O: usize> {
    pub quants: [*const u8; O],
    pub scales: [*const u8; O],
    /// Blocks of a row, if the panels are read from memory: the next panels begin after them.
    pub row_blocks: usize,
    /// Prefetchers of what comes next, if the panels are not read from memory.
    pub prefetchers: [Prefetcher; O],
}

/// Kernel that multiplies a tile of R rows with O panels.
pub struct TileKernel<'a, F, const R: usize, const O: usize> {
    panels: Panels<O>,
    input: *const u8,
    blocks: Range<usize>,
    sums: (&'a mut [f32], usize),
    format: PhantomData<F>,
}

impl<'a, F: PackedFormat, const R: usize, const O: usize> TileKernel<'a, F, R, O> {
    /// Creates the kernel, which adds the products of `blocks` to `sums`. Quants and scales are those of each
    /// panel's first block, and `input` holds the tile's R rows from the first block on. `sums` holds the
    /// results of earlier blocks: O times 16 for each row, rows a stride apart.
    ///
    /// # Safety
    /// * Quants, scales and input can be read up to the end of `blocks`, as long as the tile lives.
    pub unsafe fn new(
        panels: Panels<O>,
        input: *const u8,
        blocks: Range<usize>,
        sums: (&'a mut [f32], usize),
    ) -> TileKernel<'a, F, R, O> {
        TileKernel { panels, input, blocks, sums, format: PhantomData }
    }
}

/// Integer sums of R rows with O panels.
type IntSums<S, const R: usize, const O: usize> = [[<S as Ints>::I; O]; R];

impl<F: PackedFormat, const R: usize, const O: usize> IntKernel for TileKernel<'_, F, R, O> {
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
        let mut panels = self.panels;
        for block in self.blocks {
            if !F::STREAMS_FROM_MEMORY {
                panels.prefetchers.iter_mut().for_each(Prefetcher::step);
            }
            for chunk in (0..chunks_per_block::<F>()).step_by(chunks_per_step::<F>()) {
                if F::STREAMS_FROM_MEMORY {
                    panels.prefetch_from::<F>(block, chunk);
                }
                // SAFETY: the caller of `new` guarantees that the pointers cover the blocks. The two chunks
                // are written out, because then data that both need is read once, and offsets are constants.
                unsafe {
                    add_chunk::<F, S, R, O>(simd, &panels, self.input, (block, chunk, 0), &mut totals);
                    if chunks_per_step::<F>() == 2 {
                        add_chunk::<F, S, R, O>(simd, &panels, self.input, (block, chunk, 1), &mut totals);
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

impl<const O: usize> Panels<O> {
    /// Prefetches the data that comes some blocks after this one, for the step of chunk `chunk`.
    #[inline(always)]
    fn prefetch_from<F: PackedFormat>(&self, block: usize, chunk: usize) {
        let blocks = const { PREFETCH_BYTES / F::QUANT_BYTES };
        let (quant_lines, scale_lines) = const {
            (
                F::QUANT_BYTES / BYTES / steps_per_block::<F>(),
                F::SCALE_BYTES.div_ceil(BYTES * steps_per_block::<F>()),
            )
        };
        let (is_beyond, nth) = (block + blocks >= self.row_blocks, chunk / chunks_per_step::<F>());
        for o in 0..O {
            // Beyond the row: the next panels come after the last one of these.
            let quants = if is_beyond { self.quants[O - 1] as usize - self.quants[0] as usize } else { 0 };
            let scales = if is_beyond { self.scales[O - 1] as usize - self.scales[0] as usize } else { 0 };
            let quants = quants + (block + blocks) * F::QUANT_BYTES + nth * quant_lines * BYTES;
            let scales = scales + (block + blocks) * F::SCALE_BYTES + nth * scale_lines * BYTES;
            for line in 0..quant_lines {
                prefetch_l1(self.quants[o].wrapping_add(quants + line * BYTES));
            }
            for line in 0..scale_lines {
                prefetch_l1(self.scales[o].wrapping_add(scales + line * BYTES));
            }
        }
    }
}

/// Returns the number of 32-column chunks in a block.
const fn chunks_per_block<F: PackedFormat>() -> usize {
    F::BLOCK_LEN / INT8_BLOCK_LEN
}

/// Returns the number of chunks that one step processes.
const fn chunks_per_step<F: PackedFormat>() -> usize {
    2 - chunks_per_block::<F>() % 2
}

/// Returns the number of steps for a block.
const fn steps_per_block<F: PackedFormat>() -> usize {
    chunks_per_block::<F>() / chunks_per_step::<F>()
}

/// Adds the products of chunk `first + nth` of a block to `totals`.
///
/// # Safety
/// * Quants, scales and input can be read up to the end of the block.
#[inline(always)]
unsafe fn add_chunk<F: PackedFormat, S: Ints, const R: usize, const O: usize>(
    simd: S,
    panels: &Panels<O>,
    input: *const u8,
    (block, first, nth): (usize, usize, usize),
    totals: &mut [[S::V; O]; R],
) {
    let mut chunks = [PanelChunk::<S>::placeholder(simd); O];
    for o in 0..O {
        let (quants, scales) = (panels.quants[o], panels.scales[o]);
        // SAFETY: the caller's promise, here and below.
        chunks[o] = unsafe { PanelChunk::load::<F>(simd, quants, scales, block, (first, nth)) };
    }
    let at = (block * chunks_per_block::<F>() + first + nth) * R * ROW_BLOCK_BYTES;
    unsafe { add_chunk_products::<F, S, R, O>(simd, &chunks, input.add(at), totals) };
}

/// A 32-column chunk of a panel.
#[derive(Clone, Copy)]
struct PanelChunk<S: Ints> {
    /// Address of the quants that are stored together, and which 32 of them these are.
    quants: *const u8,
    index: usize,
    scales: [S::V; 2],
    minimum: S::V,
}

impl<S: Ints> PanelChunk<S> {
    /// Returns a placeholder without quants.
    #[inline(always)]
    fn placeholder(simd: S) -> PanelChunk<S> {
        let zero = simd.splat(0.0);
        PanelChunk { quants: std::ptr::null(), index: 0, scales: [zero; 2], minimum: zero }
    }

    /// Loads chunk `first + nth` of a block. Quants that are stored together begin with `first`.
    ///
    /// # Safety
    /// * `quants` and `scales` cover the block.
    #[inline(always)]
    unsafe fn load<F: PackedFormat>(
        simd: S,
        quants: *const u8,
        scales: *const u8,
        block: usize,
        (first, nth): (usize, usize),
    ) -> PanelChunk<S> {
        let together = const {
            let together = F::Quants::QUANTS / INT8_BLOCK_LEN;
            assert!(
                chunks_per_step::<F>().is_multiple_of(together),
                "a step processes all quants that are stored together"
            );
            together
        };
        let (group, within) = ((first + nth) / together, nth % together);
        // SAFETY: the caller's promise.
        unsafe {
            let quants = quants.add(block * F::QUANT_BYTES + group * F::Quants::BYTES);
            let (scales, minimum) = F::Scales::load(simd, scales.add(block * F::SCALE_BYTES), first + nth);
            PanelChunk { quants, index: within, scales, minimum }
        }
    }
}

/// Kernel that unpacks some blocks of a panel.
pub struct UnpackKernel<'a, F> {
    panel: (*const u8, *const u8),
    blocks: Range<usize>,
    offset: u8,
    quants: &'a mut [u8],
    scales: &'a mut [f32],
    format: PhantomData<F>,
}

impl<'a, F: PackedFormat> UnpackKernel<'a, F> {
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
    ) -> UnpackKernel<'a, F> {
        UnpackKernel { panel, blocks, offset, quants, scales, format: PhantomData }
    }
}

impl<F: PackedFormat> IntKernel for UnpackKernel<'_, F> {
    type Out = ();

    #[inline(always)]
    fn run<S: Ints>(self, simd: S) {
        let (chunks_per_block, chunks_per_step) = const { (chunks_per_block::<F>(), chunks_per_step::<F>()) };
        let quants = self.quants.as_chunks_mut::<BYTES>().0.as_chunks_mut::<{ 2 * HALF_VECTORS }>().0;
        let scales = self.scales.as_chunks_mut::<LANES>().0;
        let vectors = const { UnpackedFormat::<F>::SCALE_BYTES / (LANES * size_of::<f32>()) };
        for (i, (quants, scales)) in quants.iter_mut().zip(scales.chunks_exact_mut(vectors)).enumerate() {
            let (block, chunk) = (self.blocks.start + i / chunks_per_block, i % chunks_per_block);
            if block == self.blocks.end {
                break;
            }
            // SAFETY: the caller of `new` guarantees that the pointers cover the blocks; here and below.
            let panel = unsafe {
                PanelChunk::<S>::load::<F>(
                    simd,
                    self.panel.0,
                    self.panel.1,
                    block,
                    (chunk / chunks_per_step * chunks_per_step, chunk % chunks_per_step),
                )
            };
            for number in 0..HALF_VECTORS {
                let pair = unsafe { F::Quants::load_pair(simd, panel.quants, panel.index, number) };
                let pair = pair.map(|quants| simd.sub_bytes(quants, self.offset));
                simd.store_bytes(pair[0], &mut quants[number]);
                simd.store_bytes(pair[1], &mut quants[number + HALF_VECTORS]);
            }
            let last = if F::Scales::ZERO_POINT == ZeroPoint::Minimum {
                panel.minimum
            } else {
                panel.scales[vectors - 1]
            };
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
unsafe fn add_chunk_products<F: PackedFormat, S: Ints, const R: usize, const O: usize>(
    simd: S,
    panels: &[PanelChunk<S>; O],
    input: *const u8,
    totals: &mut [[S::V; O]; R],
) {
    // SAFETY: the caller's promise, here and below.
    let mut int_sums: [IntSums<S, R, O>; 2] = [[[simd.zero(); O]; R]; 2];
    if let ZeroPoint::PowerOfTwo(n) = F::Scales::ZERO_POINT {
        for r in 0..R {
            let both = unsafe { simd.broadcast_word(input_word::<R>(input, 2, r)) };
            let first = if F::Scales::SCALE_COUNT == 2 {
                unsafe { simd.broadcast_word(input_word::<R>(input, 3, r)) }
            } else {
                both
            };
            int_sums[0][r] = [simd.shift_left(first, n); O];
            int_sums[1][r] = [simd.shift_left(simd.sub_ints(both, first), n); O];
        }
    }
    for number in 0..HALF_VECTORS {
        let mut quants = [[simd.zero_bytes(); 2]; O];
        for o in 0..O {
            quants[o] = unsafe { F::Quants::load_pair(simd, panels[o].quants, panels[o].index, number) };
        }
        for half in 0..2 {
            let sub_block = half * (F::Scales::SCALE_COUNT - 1);
            for r in 0..R {
                let x = unsafe {
                    simd.broadcast_word(input.add(r * INT8_BLOCK_LEN + (number + half * HALF_VECTORS) * 4))
                };
                for o in 0..O {
                    int_sums[sub_block][r][o] = simd.dot(int_sums[sub_block][r][o], quants[o][half], x);
                }
            }
        }
    }
    for r in 0..R {
        let scale = simd.splat(unsafe { input_word::<R>(input, 0, r).cast::<f32>().read_unaligned() });
        for o in 0..O {
            for sub_block in 0..F::Scales::SCALE_COUNT {
                let both = simd.mul(panels[o].scales[sub_block], scale);
                totals[r][o] = simd.mul_add(simd.to_float(int_sums[sub_block][r][o]), both, totals[r][o]);
            }
        }
        if F::Scales::ZERO_POINT == ZeroPoint::Minimum {
            let sum = simd.splat(unsafe { input_word::<R>(input, 1, r).cast::<f32>().read_unaligned() });
            for o in 0..O {
                totals[r][o] = simd.mul_add(panels[o].minimum, sum, totals[r][o]);
            }
        }
    }
}

/// Returns the address of a word of row r: its scale, its scaled sum, its sum, or the sum of its first half.
#[inline(always)]
fn input_word<const R: usize>(input: *const u8, field: usize, r: usize) -> *const u8 {
    input.wrapping_add(R * INT8_BLOCK_LEN + (field * R + r) * WORD_BYTES)
}
