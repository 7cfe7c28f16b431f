//! Converts rows of a matrix from one number format to another, on several threads.
//!
//! Invariant: a row's quants depend only on its own values, not on the threads or on other rows. So a matrix
//! can be converted whole or in parts with the same result.

use anyhow::{Result, anyhow, ensure};
use mainstem_kernels::QuantType;
use std::thread::Builder;

/// Minimum number of elements for one thread.
const MIN_ELEMENTS_PER_THREAD: usize = 1 << 15;

/// Method of rounding values to quants.
#[derive(Clone, Copy, Debug)]
pub enum Rounding<'a> {
    /// Round to nearest, by the format's own equations.
    RoundToNearest,
    /// Minimize the squared error, weighted by column if weights are given.
    LeastSquares(Option<&'a [f32]>),
}

/// Complete rows of a matrix in their stored format.
#[derive(Clone, Copy)]
pub struct SourceRows<'a> {
    pub ty: QuantType,
    /// Number of elements in a row.
    pub width: usize,
    pub bytes: &'a [u8],
}

/// Converts rows to another number format. Fails if a row is not a whole number of blocks of either format.
pub fn requantize(rows: SourceRows, ty: QuantType, rounding: Rounding, threads: usize) -> Result<Vec<u8>> {
    let (stored, coded) = (row_bytes(rows.ty, rows.width)?, row_bytes(ty, rows.width)?);
    if let Rounding::LeastSquares(Some(columns)) = rounding {
        let (weights, width) = (columns.len(), rows.width);
        ensure!(weights == width, "{weights} column weights for {width} columns; this is a bug");
    }
    let count = rows.bytes.len() / stored.max(1);
    let mut quants = vec![0; count * coded];
    let min_rows = (MIN_ELEMENTS_PER_THREAD / rows.width.max(1)).max(1);
    let each = count.div_ceil(threads.max(1)).max(min_rows);
    std::thread::scope(|scope| {
        let parts = rows.bytes.chunks((each * stored).max(1)).zip(quants.chunks_mut((each * coded).max(1)));
        // All threads are started before any is joined, and all are joined even if one fails.
        let mut threads = Vec::new();
        for (bytes, quants) in parts {
            let part = SourceRows { bytes, ..rows };
            threads.push(
                Builder::new().spawn_scoped(scope, move || requantize_rows(part, ty, rounding, quants)),
            );
        }
        let ends: Vec<_> = threads.into_iter().map(|thread| Ok(thread?.join())).collect();
        ends.into_iter().try_for_each(|end: Result<_, std::io::Error>| {
            end?.map_err(|_| anyhow!("a thread that converts values to {ty} has panicked"))
        })
    })?;
    Ok(quants)
}

fn requantize_rows(rows: SourceRows, ty: QuantType, rounding: Rounding, quants: &mut [u8]) {
    let (stored, coded) = (rows.ty.bytes(rows.width), ty.bytes(rows.width));
    let (Some(stored @ 1..), Some(coded @ 1..)) = (stored, coded) else { return };
    let mut values = vec![0.0; rows.width];
    for (bytes, quants) in rows.bytes.chunks_exact(stored).zip(quants.chunks_exact_mut(coded)) {
        rows.ty.dequantize(bytes, &mut values);
        match rounding {
            Rounding::RoundToNearest => ty.quantize(&values, quants),
            Rounding::LeastSquares(columns) => ty.quantize_least_squares(&values, columns, quants),
        }
    }
}

fn row_bytes(ty: QuantType, width: usize) -> Result<usize> {
    ty.bytes(width).ok_or_else(|| anyhow!("rows of {width} values are not whole {ty} blocks"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns some values in F32.
    fn numbers(count: usize) -> Vec<u8> {
        (0..count).flat_map(|i| ((i * 7919 % 1009) as f32 / 500.0 - 1.0).to_le_bytes()).collect()
    }

    #[test]
    fn rows_have_the_same_quants_together_apart_and_on_any_number_of_threads() {
        let (width, count) = (512, 130);
        let bytes = numbers(width * count);
        let rows = SourceRows { ty: QuantType::F32, width, bytes: &bytes };
        let columns: Vec<f32> = (0..width).map(|column| (column % 7) as f32).collect();
        let ways =
            [Rounding::RoundToNearest, Rounding::LeastSquares(None), Rounding::LeastSquares(Some(&columns))];
        let types = [QuantType::Q4_K, QuantType::Q6_B64T1, QuantType::BF16];
        for (ty, by) in types.into_iter().flat_map(|ty| ways.map(|by| (ty, by))) {
            let whole = requantize(rows, ty, by, 1).unwrap();
            for threads in [0, 2, 3, 1000] {
                assert!(requantize(rows, ty, by, threads).unwrap() == whole, "{ty}, {threads} threads");
            }
            let each = bytes
                .chunks(3 * width * 4)
                .map(|bytes| requantize(SourceRows { bytes, ..rows }, ty, by, 2).unwrap());
            assert!(each.collect::<Vec<_>>().concat() == whole, "{ty} in pieces");
        }
    }

    #[test]
    fn what_cannot_be_coded_is_an_error() {
        let bytes = numbers(96);
        let rows = SourceRows { ty: QuantType::F32, width: 48, bytes: &bytes };
        assert!(
            requantize(rows, QuantType::Q4_0, Rounding::RoundToNearest, 1)
                .unwrap_err()
                .to_string()
                .contains("rows of 48 values")
        );
        // A read-only format cannot be written: the thread panics, and the panic becomes an error.
        let panicked =
            requantize(SourceRows { width: 32, ..rows }, QuantType::IQ4_NL, Rounding::RoundToNearest, 2)
                .unwrap_err()
                .to_string();
        assert!(panicked.contains("iq4_nl has panicked"), "{panicked}");
    }
}
