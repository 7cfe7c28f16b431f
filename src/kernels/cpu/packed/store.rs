//! Packing of quantized blocks, and unpacking of rows.
//!
//! Invariant: a row that is unpacked has the bytes it was packed from.

use super::PANEL_OUTPUTS;
use super::formats::{PackedFormat, PackedFormatOp, dispatch_format};
use super::quants::QuantPacking;
use super::scales::ScaleLayout;
use crate::backend::Weight;
use crate::cpu::pool::{SharedSlice, ThreadPool};
use crate::host::HostBuf;
use crate::quant::QuantType;

/// Numbers of the largest block.
const MAX_BLOCK_LEN: usize = 256;

/// Layout of a packed weight, in bytes.
#[derive(Clone, Copy)]
pub struct PackedLayout {
    /// Blocks of a row.
    pub row_blocks: usize,
    /// Bytes of a panel's quants.
    pub panel_quant_bytes: usize,
    /// Bytes of a panel's scales.
    pub panel_scale_bytes: usize,
    /// Offset of the scales.
    pub scales_start: usize,
    /// Total bytes.
    pub bytes: usize,
}

impl PackedLayout {
    /// Computes the layout of a (n, k) matrix.
    pub fn new<F: PackedFormat>(n: usize, k: usize) -> PackedLayout {
        let (blocks, panels) = (k / F::BLOCK_LEN, n.div_ceil(PANEL_OUTPUTS));
        let (quants, scales) = (blocks * F::QUANT_BYTES, blocks * F::SCALE_BYTES);
        let scales_start = panels * quants;
        let bytes = scales_start + panels * scales;
        PackedLayout {
            row_blocks: blocks,
            panel_quant_bytes: quants,
            panel_scale_bytes: scales,
            scales_start,
            bytes,
        }
    }
}

/// Returns the bytes of a packed (n, k) matrix; `None` if `ty` is not packed.
pub fn packed_bytes(ty: QuantType, n: usize, k: usize) -> Option<usize> {
    struct Bytes(usize, usize);
    impl PackedFormatOp for Bytes {
        type Out = usize;
        fn run<F: PackedFormat>(self) -> usize {
            PackedLayout::new::<F>(self.0, self.1).bytes
        }
    }
    dispatch_format(ty, Bytes(n, k))
}

/// Packs a (n, k) matrix of quantized blocks. `to` must be zero.
pub fn pack(pool: &mut ThreadPool, ty: QuantType, (n, k): (usize, usize), bytes: &[u8], to: &mut HostBuf) {
    dispatch_format(ty, PackWeight { pool, ty, n, k, bytes, to })
        .expect("the format is packed; this is a bug")
}

/// Packs a matrix of a packed format.
struct PackWeight<'a> {
    pool: &'a mut ThreadPool,
    ty: QuantType,
    n: usize,
    k: usize,
    bytes: &'a [u8],
    to: &'a mut HostBuf,
}

impl PackedFormatOp for PackWeight<'_> {
    type Out = ();

    fn run<F: PackedFormat>(self) {
        let PackWeight { pool, ty, n, k, bytes, to } = self;
        let layout = PackedLayout::new::<F>(n, k);
        let (quants, scales) = to.bytes_mut().split_at_mut(layout.scales_start);
        let (quants, scales) = (SharedSlice::new(quants), SharedSlice::new(scales));
        let row = bytes.len() / n.max(1);
        pool.run(n.div_ceil(PANEL_OUTPUTS), |_, panel| {
            // SAFETY: each panel belongs to one item.
            let (quants, scales) = unsafe {
                (
                    quants
                        .slice_mut(panel * layout.panel_quant_bytes..(panel + 1) * layout.panel_quant_bytes),
                    scales
                        .slice_mut(panel * layout.panel_scale_bytes..(panel + 1) * layout.panel_scale_bytes),
                )
            };
            let rows = bytes[panel * PANEL_OUTPUTS * row..].chunks_exact(row).take(PANEL_OUTPUTS);
            for (lane, row) in rows.enumerate() {
                pack_row::<F>(ty, row, lane, quants, scales);
            }
        });
    }
}

/// Packs one row as output `lane` of its panel.
fn pack_row<F: PackedFormat>(ty: QuantType, row: &[u8], lane: usize, quants: &mut [u8], scales: &mut [u8]) {
    let parts = ty.block_split().expect("a packed format has parts; this is a bug");
    let (mut numbers, mut header) = ([0; MAX_BLOCK_LEN], [0; 32]);
    let (numbers, header) = (&mut numbers[..F::BLOCK_LEN], &mut header[..parts.param_bytes]);
    let blocks = row.chunks_exact(ty.row().block_bytes);
    let to = quants.chunks_exact_mut(F::QUANT_BYTES).zip(scales.chunks_exact_mut(F::SCALE_BYTES));
    for (block, (quants, scales)) in blocks.zip(to) {
        (parts.split)(block, numbers, header);
        let groups = numbers.chunks_exact(F::Quants::QUANTS).zip(quants.chunks_exact_mut(F::Quants::BYTES));
        for (numbers, quants) in groups {
            F::Quants::pack(numbers, lane, quants);
        }
        for_each_field::<F>(lane, |in_header, in_scales, width| {
            scales[in_scales..][..width].copy_from_slice(&header[in_header..][..width]);
        });
    }
}

/// Calls `op(offset in the block's header, offset in the panel's scales, bytes)` for each field of output
/// `lane`.
fn for_each_field<F: PackedFormat>(lane: usize, mut op: impl FnMut(usize, usize, usize)) {
    let mut before = 0;
    for width in F::Scales::FIELD_WIDTHS {
        op(before, before * PANEL_OUTPUTS + lane * width, *width);
        before += width;
    }
}

/// Decodes row `row` of a packed weight from column `column` on. The columns must begin and end at block
/// boundaries.
pub fn read(w: &Weight<HostBuf>, row: usize, column: usize, values: &mut [f32]) {
    dispatch_format(w.ty, ReadRow { w, row, column, values }).expect("the format is packed; this is a bug")
}

/// Decodes a part of a row of a packed weight.
struct ReadRow<'a> {
    w: &'a Weight<HostBuf>,
    row: usize,
    column: usize,
    values: &'a mut [f32],
}

impl PackedFormatOp for ReadRow<'_> {
    type Out = ();

    fn run<F: PackedFormat>(self) {
        let ReadRow { w, row, column, values } = self;
        let parts = w.ty.block_split().expect("a packed format has parts; this is a bug");
        let (layout, panel, lane) =
            (PackedLayout::new::<F>(w.n, w.k), row / PANEL_OUTPUTS, row % PANEL_OUTPUTS);
        let (mut numbers, mut header, mut bytes) = ([0; MAX_BLOCK_LEN], [0; 32], [0; MAX_BLOCK_LEN]);
        let (numbers, header) = (&mut numbers[..F::BLOCK_LEN], &mut header[..parts.param_bytes]);
        let bytes = &mut bytes[..w.ty.row().block_bytes];
        for (block, values) in (column / F::BLOCK_LEN..).zip(values.chunks_exact_mut(F::BLOCK_LEN)) {
            let quants =
                &w.buf.bytes()[panel * layout.panel_quant_bytes + block * F::QUANT_BYTES..][..F::QUANT_BYTES];
            let scales = layout.scales_start + panel * layout.panel_scale_bytes + block * F::SCALE_BYTES;
            let scales = &w.buf.bytes()[scales..][..F::SCALE_BYTES];
            let groups =
                numbers.chunks_exact_mut(F::Quants::QUANTS).zip(quants.chunks_exact(F::Quants::BYTES));
            for (numbers, quants) in groups {
                F::Quants::unpack(quants, lane, numbers);
            }
            for_each_field::<F>(lane, |in_header, in_scales, width| {
                header[in_header..][..width].copy_from_slice(&scales[in_scales..][..width]);
            });
            (parts.join)(numbers, header, bytes);
            w.ty.dequantize(bytes, values);
        }
    }
}
