//! Row operations: embedding lookup, gathering, selecting columns, sums.
//!
//! Invariant: each row is computed by one thread, from that row alone; a product is rounded before it is
//! added.

use super::pool::Pool;
use super::simd::{Code, ForCode, with_code};
use super::step::Step;
use super::{halves, packed};
use crate::backend::Weight;
use crate::host::HostBuf;
use crate::quant::{Inputs, Operand};
use std::ops::Range;

/// Numbers, in whole blocks of any type, that are decoded at a time when they are added to what is there.
const DECODED: usize = 256;

/// Sets x (rows, width) to the rows of `table` for the step's tokens. The table begins with token `first`;
/// rows of tokens outside it become zero.
pub fn embed(
    pool: &mut Pool,
    step: &Step,
    (precision, table): (Inputs, &Weight<HostBuf>),
    first: usize,
    x: &mut [f32],
) {
    let rows = step.rows();
    pool.for_rows(x, table.inp, |row, x| {
        match (rows[row].token as usize).checked_sub(first).filter(|at| *at < table.out) {
            Some(at) => read(precision, table, at, 0, x),
            None => x.fill(0.0),
        }
    });
}

/// Adds to x (rows, width) the rows of `table` for the positions of the rows, plus `offset`.
pub fn embed_positions(
    pool: &mut Pool,
    step: &Step,
    (precision, table): (Inputs, &Weight<HostBuf>),
    offset: usize,
    x: &mut [f32],
) {
    let rows = step.rows();
    pool.for_rows(x, table.inp, |row, x| {
        let at = rows[row].position + offset;
        assert!(at < table.out, "position {} has no embedding", rows[row].position);
        let mut values = [0.0; DECODED];
        for (number, x) in x.chunks_mut(DECODED).enumerate() {
            let values = &mut values[..x.len()];
            read(precision, table, at, number * DECODED, values);
            x.iter_mut().zip(values).for_each(|(x, value)| *x += *value);
        }
    });
}

/// Decodes a part of row `row`, from column `column` on. It must begin and end at block boundaries.
fn read(precision: Inputs, table: &Weight<HostBuf>, row: usize, column: usize, values: &mut [f32]) {
    match table.ty.operand(precision) {
        Operand::F32 => {}
        Operand::Codes => return packed::read(table, row, column, values),
        Operand::Bf16 => return halves::read(table, row, column, values),
    }
    let first = row * table.inp + column;
    if !table.ty.is_blocked() {
        return with_code(table.ty, Read { buf: &table.buf, first, values });
    }
    let bytes = |numbers: usize| table.ty.bytes(numbers).expect("rows are whole blocks; this is a bug");
    table.ty.dequantize(&table.buf.bytes()[bytes(first)..][..bytes(values.len())], values);
}

/// Decodes numbers of a format that is not blocked.
struct Read<'a> {
    buf: &'a HostBuf,
    first: usize,
    values: &'a mut [f32],
}

impl ForCode for Read<'_> {
    type Out = ();

    fn run<C: Code>(self) {
        C::decode(&C::of(self.buf)[self.first..][..self.values.len()], self.values);
    }
}

/// Copies the rows of x (rows, width) with the numbers `wanted` to y (wanted rows, width).
pub fn gather(pool: &mut Pool, wanted: &[u32], width: usize, x: &[f32], y: &mut [f32]) {
    pool.for_rows(y, width, |i, y| y.copy_from_slice(&x[wanted[i] as usize * width..][..width]));
}

/// Copies the given columns of x (rows, width) to y (rows, columns.len()).
pub fn columns(pool: &mut Pool, width: usize, columns: Range<usize>, x: &[f32], y: &mut [f32]) {
    pool.for_rows(y, columns.len(), |row, y| y.copy_from_slice(&x[row * width..][columns.clone()]));
}

/// Adds factor * y to x, both (rows, width).
pub fn add(pool: &mut Pool, width: usize, factor: f32, x: &mut [f32], y: &[f32]) {
    pool.for_rows(x, width, |row, x| {
        for (x, y) in x.iter_mut().zip(&y[row * width..][..width]) {
            *x += factor * y;
        }
    });
}

/// Multiplies x (rows, width) by `factor`.
pub fn scale(pool: &mut Pool, width: usize, factor: f32, x: &mut [f32]) {
    pool.for_rows(x, width, |_, x| x.iter_mut().for_each(|x| *x *= factor));
}
