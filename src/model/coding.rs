//! Rows of a matrix from one number format to another, on several threads.
//!
//! Invariant: a row's codes depend on its own numbers, on neither the threads nor the rows beside it; so it does not matter
//! whether a matrix is coded whole or in pieces.

use anyhow::{Result, anyhow, ensure};
use mainstem_kernels::QuantType;
use std::thread::Builder;

/// Numbers that are worth a thread.
const NUMBERS_EACH_MIN: usize = 1 << 15;

/// How codes are chosen.
#[derive(Clone, Copy, Debug)]
pub enum Codes<'a> {
    /// By the format's own equations.
    Equations,
    /// By least squares: an error counts by its column, if there is a number for each, else as any other.
    LeastSquares(Option<&'a [f32]>),
}

/// Whole rows of a matrix as they are stored.
#[derive(Clone, Copy)]
pub struct Rows<'a> {
    pub ty: QuantType,
    /// Numbers of a row.
    pub width: usize,
    pub bytes: &'a [u8],
}

/// The rows in another number format, whose blocks they are whole numbers of.
pub fn coded(rows: Rows, ty: QuantType, by: Codes, threads: usize) -> Result<Vec<u8>> {
    let (stored, coded) = (row_bytes(rows.ty, rows.width)?, row_bytes(ty, rows.width)?);
    if let Codes::LeastSquares(Some(columns)) = by {
        let (told, width) = (columns.len(), rows.width);
        ensure!(told == width, "{told} columns count, of {width}; this is a bug");
    }
    let count = rows.bytes.len() / stored.max(1);
    let mut codes = vec![0; count * coded];
    let least = (NUMBERS_EACH_MIN / rows.width.max(1)).max(1);
    let each = count.div_ceil(threads.max(1)).max(least);
    std::thread::scope(|scope| {
        let parts = rows.bytes.chunks((each * stored).max(1)).zip(codes.chunks_mut((each * coded).max(1)));
        // All are started, then all are waited for, whatever becomes of one.
        let mut threads = Vec::new();
        for (bytes, codes) in parts {
            let part = Rows { bytes, ..rows };
            threads.push(Builder::new().spawn_scoped(scope, move || code_rows(part, ty, by, codes)));
        }
        let ends: Vec<_> = threads.into_iter().map(|thread| Ok(thread?.join())).collect();
        ends.into_iter().try_for_each(|end: Result<_, std::io::Error>| {
            end?.map_err(|_| anyhow!("a thread that codes numbers as {ty} has panicked"))
        })
    })?;
    Ok(codes)
}

fn code_rows(rows: Rows, ty: QuantType, by: Codes, codes: &mut [u8]) {
    let (stored, coded) = (rows.ty.bytes(rows.width), ty.bytes(rows.width));
    let (Some(stored @ 1..), Some(coded @ 1..)) = (stored, coded) else { return };
    let mut values = vec![0.0; rows.width];
    for (bytes, codes) in rows.bytes.chunks_exact(stored).zip(codes.chunks_exact_mut(coded)) {
        rows.ty.dequantize(bytes, &mut values);
        match by {
            Codes::Equations => ty.quantize(&values, codes),
            Codes::LeastSquares(columns) => ty.fit(&values, columns, codes),
        }
    }
}

fn row_bytes(ty: QuantType, width: usize) -> Result<usize> {
    ty.bytes(width).ok_or_else(|| anyhow!("rows of {width} numbers are no whole number of {ty} blocks"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Some numbers in F32.
    fn numbers(count: usize) -> Vec<u8> {
        (0..count).flat_map(|i| ((i * 7919 % 1009) as f32 / 500.0 - 1.0).to_le_bytes()).collect()
    }

    #[test]
    fn rows_have_the_same_codes_together_apart_and_on_any_number_of_threads() {
        let (width, count) = (512, 130);
        let bytes = numbers(width * count);
        let rows = Rows { ty: QuantType::F32, width, bytes: &bytes };
        let columns: Vec<f32> = (0..width).map(|column| (column % 7) as f32).collect();
        let ways = [Codes::Equations, Codes::LeastSquares(None), Codes::LeastSquares(Some(&columns))];
        let types = [QuantType::Q4_K, QuantType::Q6_B64T1, QuantType::BF16];
        for (ty, by) in types.into_iter().flat_map(|ty| ways.map(|by| (ty, by))) {
            let whole = coded(rows, ty, by, 1).unwrap();
            for threads in [0, 2, 3, 1000] {
                assert!(coded(rows, ty, by, threads).unwrap() == whole, "{ty}, {threads} threads");
            }
            let each =
                bytes.chunks(3 * width * 4).map(|bytes| coded(Rows { bytes, ..rows }, ty, by, 2).unwrap());
            assert!(each.collect::<Vec<_>>().concat() == whole, "{ty} in pieces");
        }
    }

    #[test]
    fn what_cannot_be_coded_is_an_error() {
        let bytes = numbers(96);
        let rows = Rows { ty: QuantType::F32, width: 48, bytes: &bytes };
        assert!(
            coded(rows, QuantType::Q4_0, Codes::Equations, 1)
                .unwrap_err()
                .to_string()
                .contains("rows of 48 numbers")
        );
        // A format that is only read has no way to be written: a panic on a thread, which ends there.
        let panicked = coded(Rows { width: 32, ..rows }, QuantType::IQ4_NL, Codes::Equations, 2)
            .unwrap_err()
            .to_string();
        assert!(panicked.contains("iq4_nl has panicked"), "{panicked}");
    }
}
