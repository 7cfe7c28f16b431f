//! Normalization: y = (x - mean) / deviation * weight + bias, row by row.
//!
//! Sums run in 16 lanes over the columns, in order, and the lanes are added as [`Simd::sum`] does. RMS norm
//! is the special case with mean zero.
//! Invariant: each row is computed by one thread, from that row alone.

use super::pool::ThreadPool;
use super::simd::{F32, Kernel, LANES, Level, Simd, load_partial, store_partial};
use crate::backend::{Norm, NormKind};
use crate::host::HostBuf;

/// Normalizes x (rows, width) in place.
pub fn norm(pool: &mut ThreadPool, level: Level, norm: &Norm<HostBuf>, x: &mut [f32]) {
    pool.for_rows(x, norm.width, |row, x| norm_row(level, norm, row, x));
}

/// Normalizes one row in place, which has this number.
pub fn norm_row(level: Level, norm: &Norm<HostBuf>, row: usize, x: &mut [f32]) {
    level.run(NormRow::new(norm, row, x));
}

/// Writes norm(x) to y, both (rows, width).
pub fn norm_to(pool: &mut ThreadPool, level: Level, norm: &Norm<HostBuf>, x: &[f32], y: &mut [f32]) {
    pool.for_rows(y, norm.width, |row, y| {
        y.copy_from_slice(&x[row * norm.width..][..norm.width]);
        norm_row(level, norm, row, y);
    });
}

/// A vector (width), as chunks of 16 lanes and the remainder.
type ChunkedVector<'a> = (&'a [[f32; LANES]], &'a [f32]);

/// Kernel that normalizes one row in place.
struct NormRow<'a> {
    kind: NormKind,
    weight: Option<ChunkedVector<'a>>,
    bias: Option<ChunkedVector<'a>>,
    eps: f32,
    x: &'a mut [f32],
}

impl<'a> NormRow<'a> {
    fn new(norm: &'a Norm<HostBuf>, row: usize, x: &'a mut [f32]) -> NormRow<'a> {
        let first = row % norm.sets * norm.width;
        let vector = |buf: &'a HostBuf| buf.f32()[first..][..norm.width].as_chunks::<LANES>();
        let (weight, bias) = (norm.weight.as_ref().map(vector), norm.bias.as_ref().map(vector));
        NormRow { kind: norm.kind, weight, bias, eps: norm.eps, x }
    }

    /// Returns the mean to subtract: 0 for RMS norm.
    #[inline(always)]
    fn mean<S: Simd>(&self, simd: S) -> f32 {
        if self.kind == NormKind::Rms {
            return 0.0;
        }
        let (x, rest) = self.x.as_chunks::<LANES>();
        let mut sum = simd.splat(0.0);
        for x in x {
            sum = simd.add(sum, simd.load(x));
        }
        simd.sum(simd.add(sum, load_partial::<S, F32>(simd, rest))) / self.x.len() as f32
    }

    /// Returns the mean of the squared distances from `mean`.
    #[inline(always)]
    fn variance<S: Simd>(&self, simd: S, mean: S::V) -> f32 {
        let (x, rest) = self.x.as_chunks::<LANES>();
        let mut squares = simd.splat(0.0);
        for x in x {
            let x = simd.sub(simd.load(x), mean);
            squares = simd.mul_add(x, x, squares);
        }
        let last = simd.sub(load_partial::<S, F32>(simd, rest), mean);
        let last = simd.select_first(rest.len(), last, simd.splat(0.0));
        simd.sum(simd.mul_add(last, last, squares)) / self.x.len() as f32
    }
}

impl Kernel for NormRow<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let mean = simd.splat(self.mean(simd));
        let deviation = (self.variance(simd, mean) + self.eps).sqrt();
        let inverse = simd.splat(1.0 / deviation);
        let (x, rest) = self.x.as_chunks_mut::<LANES>();
        for (i, x) in x.iter_mut().enumerate() {
            let mut y = simd.mul(simd.sub(simd.load(x), mean), inverse);
            if let Some((weight, _)) = self.weight {
                y = simd.mul(y, simd.load(&weight[i]));
            }
            if let Some((bias, _)) = self.bias {
                y = simd.add(y, simd.load(&bias[i]));
            }
            simd.store(y, x);
        }
        let mut y = simd.mul(simd.sub(load_partial::<S, F32>(simd, rest), mean), inverse);
        if let Some((_, weight)) = self.weight {
            y = simd.mul(y, load_partial::<S, F32>(simd, weight));
        }
        if let Some((_, bias)) = self.bias {
            y = simd.add(y, load_partial::<S, F32>(simd, bias));
        }
        store_partial(simd, y, rest);
    }
}
