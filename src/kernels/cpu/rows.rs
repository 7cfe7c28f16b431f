//! Row operations: embedding lookup, gathering, selecting columns, sums.
//!
//! Invariant: each row is computed by one thread, from that row alone; a product is rounded before it is
//! added.

use super::pool::ThreadPool;
use super::simd::{FloatFormat, FloatFormatOp, dispatch_float_format};
use super::{bf16, bf16_pairs, packed};
use crate::backend::{OutputColumns, Weight};
use crate::batch::StepState;
use crate::host::HostBuf;
use crate::quant::{ActivationPrecision, OperandFormat};
use std::ops::Range;

/// Numbers, in whole blocks of any type, that are decoded at a time when they are added to what is there.
const CHUNK_LEN: usize = 256;

/// Sets x (rows, width) to the rows of `table` for the step's tokens. The table begins with token `first`;
/// rows of tokens outside it become zero.
pub fn embed(
    pool: &mut ThreadPool,
    step: &StepState,
    (precision, table): (ActivationPrecision, &Weight<HostBuf>),
    first: usize,
    x: &mut [f32],
) {
    let rows = step.rows();
    pool.for_rows(x, table.k, |row, x| {
        match (rows[row].token as usize).checked_sub(first).filter(|at| *at < table.n) {
            Some(at) => read_row(precision, table, at, 0, x),
            None => x.fill(0.0),
        }
    });
}

/// Adds to x (rows, width) the rows of `table` for the positions of the rows, plus `offset`, and `type_rows`
/// for each type of tokens before theirs.
pub fn embed_positions(
    pool: &mut ThreadPool,
    step: &StepState,
    (precision, table): (ActivationPrecision, &Weight<HostBuf>),
    (offset, type_rows): (usize, usize),
    x: &mut [f32],
) {
    let rows = step.rows();
    pool.for_rows(x, table.k, |row, x| {
        let at = rows[row].position_row(offset, type_rows);
        assert!(at < table.n, "position {} has no embedding", rows[row].position);
        let mut values = [0.0; CHUNK_LEN];
        for (number, x) in x.chunks_mut(CHUNK_LEN).enumerate() {
            let values = &mut values[..x.len()];
            read_row(precision, table, at, number * CHUNK_LEN, values);
            x.iter_mut().zip(values).for_each(|(x, value)| *x += *value);
        }
    });
}

/// Decodes a part of row `row`, from column `column` on. It must begin and end at block boundaries.
fn read_row(
    precision: ActivationPrecision,
    table: &Weight<HostBuf>,
    row: usize,
    column: usize,
    values: &mut [f32],
) {
    match table.ty.operand_format(precision) {
        OperandFormat::F32 => {}
        OperandFormat::Int8 => return packed::read(table, row, column, values),
        OperandFormat::Bf16 => return bf16::read(table, row, column, values),
        OperandFormat::Bf16Pair => return bf16_pairs::read(table, row, column, values),
    }
    let first = row * table.k + column;
    if !table.ty.is_blocked() {
        return dispatch_float_format(table.ty, DecodeRow { buf: &table.buf, first, values });
    }
    let bytes = |numbers: usize| table.ty.bytes(numbers).expect("rows are whole blocks; this is a bug");
    table.ty.dequantize(&table.buf.bytes()[bytes(first)..][..bytes(values.len())], values);
}

/// Decodes numbers of a format that is not blocked.
struct DecodeRow<'a> {
    buf: &'a HostBuf,
    first: usize,
    values: &'a mut [f32],
}

impl FloatFormatOp for DecodeRow<'_> {
    type Out = ();

    fn run<C: FloatFormat>(self) {
        C::decode(&C::values(self.buf)[self.first..][..self.values.len()], self.values);
    }
}

/// Copies the rows of x (rows, width) with the numbers `wanted` to y (wanted rows, width).
pub fn gather(pool: &mut ThreadPool, wanted: &[u32], width: usize, x: &[f32], y: &mut [f32]) {
    pool.for_rows(y, width, |i, y| y.copy_from_slice(&x[wanted[i] as usize * width..][..width]));
}

/// Copies the given columns of x (rows, width) to y (rows * copies, `to.of`), from column `to.first` on.
pub fn columns(
    pool: &mut ThreadPool,
    copies: usize,
    (width, columns, x): (usize, Range<usize>, &[f32]),
    (to, y): (OutputColumns, &mut [f32]),
) {
    pool.for_rows(y, to.of, |row, y| {
        y[to.first..][..columns.len()].copy_from_slice(&x[row / copies * width..][columns.clone()]);
    });
}

/// Adds factor * y to x, both (rows, width).
pub fn add(pool: &mut ThreadPool, width: usize, factor: f32, x: &mut [f32], y: &[f32]) {
    pool.for_rows(x, width, |row, x| {
        for (x, y) in x.iter_mut().zip(&y[row * width..][..width]) {
            *x += factor * y;
        }
    });
}

/// Multiplies x (rows, width) by `factor`.
pub fn scale(pool: &mut ThreadPool, width: usize, factor: f32, x: &mut [f32]) {
    pool.for_rows(x, width, |_, x| x.iter_mut().for_each(|x| *x *= factor));
}
