//! Blocks to packed weights, and back.
//!
//! Invariant: a row that is read back has the bytes it was packed from.

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

/// Where the parts of a weight lie, in bytes.
#[derive(Clone, Copy)]
pub struct Places {
    /// Blocks of a row.
    pub blocks: usize,
    /// Of a strip.
    pub codes: usize,
    pub fields: usize,
    /// Where fields begin.
    pub first_field: usize,
    /// All.
    pub bytes: usize,
}

impl Places {
    /// Those of a (out, inp) matrix.
    pub fn of<F: Format>(out: usize, inp: usize) -> Places {
        let (blocks, strips) = (inp / F::NUMBERS, out.div_ceil(STRIP));
        let (codes, fields) = (blocks * F::CODE_BYTES, blocks * F::FIELD_BYTES);
        let first_field = strips * codes;
        Places { blocks, codes, fields, first_field, bytes: first_field + strips * fields }
    }
}

/// Bytes that a (out, inp) matrix takes when it is packed; `None` if `ty` is not.
pub fn packed_bytes(ty: QuantType, out: usize, inp: usize) -> Option<usize> {
    struct Bytes(usize, usize);
    impl ForFormat for Bytes {
        type Out = usize;
        fn run<F: Format>(self) -> usize {
            Places::of::<F>(self.0, self.1).bytes
        }
    }
    with_format(ty, Bytes(out, inp))
}

/// Packs a (out, inp) matrix given in blocks. `to` is zero.
pub fn pack(pool: &mut Pool, ty: QuantType, (out, inp): (usize, usize), bytes: &[u8], to: &mut HostBuf) {
    with_format(ty, Pack { pool, ty, out, inp, bytes, to })
        .expect("it is a format that is packed; this is a bug")
}

struct Pack<'a> {
    pool: &'a mut Pool,
    ty: QuantType,
    out: usize,
    inp: usize,
    bytes: &'a [u8],
    to: &'a mut HostBuf,
}

impl ForFormat for Pack<'_> {
    type Out = ();

    fn run<F: Format>(self) {
        let Pack { pool, ty, out, inp, bytes, to } = self;
        let places = Places::of::<F>(out, inp);
        let (codes, fields) = to.bytes_mut().split_at_mut(places.first_field);
        let (codes, fields) = (Parts::new(codes), Parts::new(fields));
        let row = bytes.len() / out.max(1);
        pool.run(out.div_ceil(STRIP), |_, strip| {
            // SAFETY: each strip belongs to one item.
            let (codes, fields) = unsafe {
                (
                    codes.part(strip * places.codes..(strip + 1) * places.codes),
                    fields.part(strip * places.fields..(strip + 1) * places.fields),
                )
            };
            let rows = bytes[strip * STRIP * row..].chunks_exact(row).take(STRIP);
            for (lane, row) in rows.enumerate() {
                pack_row::<F>(ty, row, lane, codes, fields);
            }
        });
    }
}

fn pack_row<F: Format>(ty: QuantType, row: &[u8], lane: usize, codes: &mut [u8], fields: &mut [u8]) {
    let parts = ty.parts().expect("what is packed can be taken apart; this is a bug");
    let (mut numbers, mut head) = ([0; LARGEST], [0; 32]);
    let (numbers, head) = (&mut numbers[..F::NUMBERS], &mut head[..parts.head]);
    let blocks = row.chunks_exact(ty.row().block_bytes);
    let to = codes.chunks_exact_mut(F::CODE_BYTES).zip(fields.chunks_exact_mut(F::FIELD_BYTES));
    for (block, (codes, fields)) in blocks.zip(to) {
        (parts.split)(block, numbers, head);
        let runs = numbers.chunks_exact(F::Codes::NUMBERS).zip(codes.chunks_exact_mut(F::Codes::BYTES));
        for (numbers, codes) in runs {
            F::Codes::put(numbers, lane, codes);
        }
        each_field::<F>(lane, |in_head, in_fields, width| {
            fields[in_fields..][..width].copy_from_slice(&head[in_head..][..width]);
        });
    }
}

/// Calls `op` with the place of each field in a block's head, that of the out's in the strip's fields, and its bytes.
fn each_field<F: Format>(lane: usize, mut op: impl FnMut(usize, usize, usize)) {
    let mut before = 0;
    for width in F::Fields::WIDTHS {
        op(before, before * STRIP + lane * width, *width);
        before += width;
    }
}

/// The values of row `row` of a packed weight from column `column` on; they begin and end where blocks do.
pub fn read(w: &Weight<HostBuf>, row: usize, column: usize, values: &mut [f32]) {
    with_format(w.ty, Read { w, row, column, values }).expect("it is a format that is packed; this is a bug")
}

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
        let parts = w.ty.parts().expect("what is packed can be taken apart; this is a bug");
        let (places, strip, lane) = (Places::of::<F>(w.out, w.inp), row / STRIP, row % STRIP);
        let (mut numbers, mut head, mut bytes) = ([0; LARGEST], [0; 32], [0; LARGEST]);
        let (numbers, head) = (&mut numbers[..F::NUMBERS], &mut head[..parts.head]);
        let bytes = &mut bytes[..w.ty.row().block_bytes];
        for (block, values) in (column / F::NUMBERS..).zip(values.chunks_exact_mut(F::NUMBERS)) {
            let codes = &w.buf.bytes()[strip * places.codes + block * F::CODE_BYTES..][..F::CODE_BYTES];
            let fields = places.first_field + strip * places.fields + block * F::FIELD_BYTES;
            let fields = &w.buf.bytes()[fields..][..F::FIELD_BYTES];
            let runs = numbers.chunks_exact_mut(F::Codes::NUMBERS).zip(codes.chunks_exact(F::Codes::BYTES));
            for (numbers, codes) in runs {
                F::Codes::get(codes, lane, numbers);
            }
            each_field::<F>(lane, |in_head, in_fields, width| {
                head[in_head..][..width].copy_from_slice(&fields[in_fields..][..width]);
            });
            (parts.join)(numbers, head, bytes);
            w.ty.dequantize(bytes, values);
        }
    }
}
