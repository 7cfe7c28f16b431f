//! Packing of quantized blocks, and unpacking of rows.
//!
//! Invariant: a row that is unpacked has the bytes it was packed from.

use super::STRIP;
use super::codes::Codes;
use super::fields::Fields;
use super::formats::{ForFormat, Format, with_format};
use crate::backend::Weight;
use crate::cpu::pool::{Parts, Pool};
use crate::host::HostBuf;
use crate::quant::QuantType;

/// Numbers of the largest block.
const LARGEST: usize = 256;

/// Layout of a packed weight, in bytes.
#[derive(Clone, Copy)]
pub struct Places {
    /// Blocks of a row.
    pub blocks: usize,
    /// Bytes of a panel's quants.
    pub codes: usize,
    /// Bytes of a panel's scales.
    pub fields: usize,
    /// Offset of the scales.
    pub first_field: usize,
    /// Total bytes.
    pub bytes: usize,
}

impl Places {
    /// Computes the layout of a (n, k) matrix.
    pub fn of<F: Format>(n: usize, k: usize) -> Places {
        let (blocks, panels) = (k / F::NUMBERS, n.div_ceil(STRIP));
        let (quants, scales) = (blocks * F::CODE_BYTES, blocks * F::FIELD_BYTES);
        let scales_start = panels * quants;
        let bytes = scales_start + panels * scales;
        Places { blocks, codes: quants, fields: scales, first_field: scales_start, bytes }
    }
}

/// Returns the bytes of a packed (n, k) matrix; `None` if `ty` is not packed.
pub fn packed_bytes(ty: QuantType, n: usize, k: usize) -> Option<usize> {
    struct Bytes(usize, usize);
    impl ForFormat for Bytes {
        type Out = usize;
        fn run<F: Format>(self) -> usize {
            Places::of::<F>(self.0, self.1).bytes
        }
    }
    with_format(ty, Bytes(n, k))
}

/// Packs a (n, k) matrix of quantized blocks. `to` must be zero.
pub fn pack(pool: &mut Pool, ty: QuantType, (n, k): (usize, usize), bytes: &[u8], to: &mut HostBuf) {
    with_format(ty, Pack { pool, ty, n, k, bytes, to }).expect("the format is packed; this is a bug")
}

/// Packs a matrix of a packed format.
struct Pack<'a> {
    pool: &'a mut Pool,
    ty: QuantType,
    n: usize,
    k: usize,
    bytes: &'a [u8],
    to: &'a mut HostBuf,
}

impl ForFormat for Pack<'_> {
    type Out = ();

    fn run<F: Format>(self) {
        let Pack { pool, ty, n, k, bytes, to } = self;
        let layout = Places::of::<F>(n, k);
        let (quants, scales) = to.bytes_mut().split_at_mut(layout.first_field);
        let (quants, scales) = (Parts::new(quants), Parts::new(scales));
        let row = bytes.len() / n.max(1);
        pool.run(n.div_ceil(STRIP), |_, panel| {
            // SAFETY: each panel belongs to one item.
            let (quants, scales) = unsafe {
                (
                    quants.part(panel * layout.codes..(panel + 1) * layout.codes),
                    scales.part(panel * layout.fields..(panel + 1) * layout.fields),
                )
            };
            let rows = bytes[panel * STRIP * row..].chunks_exact(row).take(STRIP);
            for (lane, row) in rows.enumerate() {
                pack_row::<F>(ty, row, lane, quants, scales);
            }
        });
    }
}

/// Packs one row as output `lane` of its panel.
fn pack_row<F: Format>(ty: QuantType, row: &[u8], lane: usize, quants: &mut [u8], scales: &mut [u8]) {
    let parts = ty.parts().expect("a packed format has parts; this is a bug");
    let (mut numbers, mut header) = ([0; LARGEST], [0; 32]);
    let (numbers, header) = (&mut numbers[..F::NUMBERS], &mut header[..parts.head]);
    let blocks = row.chunks_exact(ty.row().block_bytes);
    let to = quants.chunks_exact_mut(F::CODE_BYTES).zip(scales.chunks_exact_mut(F::FIELD_BYTES));
    for (block, (quants, scales)) in blocks.zip(to) {
        (parts.split)(block, numbers, header);
        let groups = numbers.chunks_exact(F::Codes::NUMBERS).zip(quants.chunks_exact_mut(F::Codes::BYTES));
        for (numbers, quants) in groups {
            F::Codes::put(numbers, lane, quants);
        }
        each_field::<F>(lane, |in_header, in_scales, width| {
            scales[in_scales..][..width].copy_from_slice(&header[in_header..][..width]);
        });
    }
}

/// Calls `op(offset in the block's header, offset in the panel's scales, bytes)` for each field of output
/// `lane`.
fn each_field<F: Format>(lane: usize, mut op: impl FnMut(usize, usize, usize)) {
    let mut before = 0;
    for width in F::Fields::WIDTHS {
        op(before, before * STRIP + lane * width, *width);
        before += width;
    }
}

/// Decodes row `row` of a packed weight from column `column` on. The columns must begin and end at block
/// boundaries.
pub fn read(w: &Weight<HostBuf>, row: usize, column: usize, values: &mut [f32]) {
    with_format(w.ty, Read { w, row, column, values }).expect("the format is packed; this is a bug")
}

/// Decodes a part of a row of a packed weight.
struct Read<'a> {
    w: &'a Weight<HostBuf>,
    row: usize,
    column: usize,
    values: &'a mut [f32],
}

impl ForFormat for Read<'_> {
    type Out = ();

    fn run<F: Format>(self) {
        let Read { w, row, column, values } = self;
        let parts = w.ty.parts().expect("a packed format has parts; this is a bug");
        let (layout, panel, lane) = (Places::of::<F>(w.out, w.inp), row / STRIP, row % STRIP);
        let (mut numbers, mut header, mut bytes) = ([0; LARGEST], [0; 32], [0; LARGEST]);
        let (numbers, header) = (&mut numbers[..F::NUMBERS], &mut header[..parts.head]);
        let bytes = &mut bytes[..w.ty.row().block_bytes];
        for (block, values) in (column / F::NUMBERS..).zip(values.chunks_exact_mut(F::NUMBERS)) {
            let quants = &w.buf.bytes()[panel * layout.codes + block * F::CODE_BYTES..][..F::CODE_BYTES];
            let scales = layout.first_field + panel * layout.fields + block * F::FIELD_BYTES;
            let scales = &w.buf.bytes()[scales..][..F::FIELD_BYTES];
            let groups =
                numbers.chunks_exact_mut(F::Codes::NUMBERS).zip(quants.chunks_exact(F::Codes::BYTES));
            for (numbers, quants) in groups {
                F::Codes::get(quants, lane, numbers);
            }
            each_field::<F>(lane, |in_header, in_scales, width| {
                header[in_header..][..width].copy_from_slice(&scales[in_scales..][..width]);
            });
            (parts.join)(numbers, header, bytes);
            w.ty.dequantize(bytes, values);
        }
    }
}
