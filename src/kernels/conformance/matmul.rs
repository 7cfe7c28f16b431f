//! Tests of GEMM, against the reference backend and for batch invariance.

use super::Bounds;
use super::answers::NUMBERS;
use super::inputs::*;
use super::rig::*;
use crate::backend::Backend;
use crate::quant::QuantType;
use crate::reference::Reference;
use std::sync::Arc;

/// Tests GEMMs with every weight format at odd sizes, with and without bias, and with a large inner
/// dimension.
pub fn matmul<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let (device, oracle) = &mut rigs(make, 32);
    for ty in QuantType::all() {
        let square = heights(ty).iter().flat_map(|&n| widths(ty).into_iter().map(move |k| (n, k)));
        let long = [(9, whole(ty, 4100)), (700, whole(ty, 65))];
        for (shape, (n, k)) in square.chain(long).enumerate() {
            let whole = Product::new(ty, 64, n, k, (shape + ty as usize).is_multiple_of(2));
            let (want, magnitudes) = (whole.of_oracle(oracle), whole.magnitudes_of(oracle));
            for rows in ROWS {
                let case = whole.rows(64 - rows, rows);
                let (got, first) = (case.on(device), (64 - rows) * n);
                close(format_args!("{case}"), &got, &want[first..], (bounds.matmul)(ty), |i| {
                    magnitudes[first + i]
                });
            }
        }
    }
}

/// Tests that the result of a row does not depend on the number of rows in the GEMM.
pub fn matmul_company<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let mut rig = Rig::new(make(), limits(32));
    for (n, k) in [(33, 300), (172, 64), (9, 4100), (300, 7)] {
        for ty in few_types().chain([QuantType::Q4_K]) {
            let whole = Product::new(ty, 150, n, whole(ty, k), n % 2 == 0);
            let want = whole.on(&mut rig);
            for rows in ROWS {
                for first in [0, 1, 63, 150 - rows] {
                    let part = whole.rows(first, rows);
                    let got = part.on(&mut rig);
                    let what = format_args!("{part}, rows {first}.. of 150");
                    same(what, &got, &want[first * n..][..rows * n], bounds.company);
                }
            }
        }
    }
}

/// A GEMM with its inputs.
struct Product {
    ty: QuantType,
    out: usize,
    inp: usize,
    codes: Vec<u8>,
    bias: Option<Vec<f32>>,
    x: Vec<f32>,
}

impl Product {
    fn new(ty: QuantType, rows: usize, n: usize, k: usize, with_bias: bool) -> Product {
        let codes = codes(ty, &noise(11, n * k));
        Product { ty, out: n, inp: k, codes, bias: with_bias.then(|| noise(12, n)), x: noise(13, rows * k) }
    }

    /// Returns the number of rows.
    fn count(&self) -> usize {
        self.x.len() / self.inp
    }

    /// Returns the GEMM with some of its rows.
    fn rows(&self, first: usize, rows: usize) -> Product {
        let x = self.x[first * self.inp..][..rows * self.inp].to_vec();
        Product { codes: self.codes.clone(), bias: self.bias.clone(), x, ..*self }
    }

    /// Returns the GEMM of the absolute values, whose results are the sums of the magnitudes of the terms.
    fn magnitudes(&self) -> Product {
        let mut weights = vec![0.0; self.out * self.inp];
        self.ty.dequantize(&self.codes, &mut weights);
        let abs = |values: &[f32]| -> Vec<f32> { values.iter().map(|v| v.abs()).collect() };
        let codes = codes(QuantType::F32, &abs(&weights));
        Product { ty: QuantType::F32, codes, bias: self.bias.as_deref().map(abs), x: abs(&self.x), ..*self }
    }

    fn of_oracle(&self, oracle: &mut Rig<Reference>) -> Arc<Vec<f32>> {
        NUMBERS.get(oracle.question(format_args!("{self}")), || self.on(oracle))
    }

    fn magnitudes_of(&self, oracle: &mut Rig<Reference>) -> Arc<Vec<f32>> {
        let key = oracle.question(format_args!("magnitudes of {self}"));
        NUMBERS.get(key, || self.magnitudes().on(oracle))
    }

    fn on<B: Backend>(&self, rig: &mut Rig<B>) -> Vec<f32> {
        let rows = self.count();
        rig.begin_rows(rows);
        let w = rig.coded(self.ty, self.out, self.inp, &self.codes);
        let bias = self.bias.as_ref().map(|bias| rig.constant(bias));
        let (x, mut y) = (rig.put(&self.x), rig.output(rows * self.out));
        rig.backend.matmul(rows, &w, bias.as_ref(), &x, &mut y);
        rig.read(&y, rows * self.out, format_args!("{self}"))
    }
}

impl std::fmt::Display for Product {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Product { ty, out: n, inp: k, .. } = self;
        write!(f, "matmul {ty}, {} x {k} by {n} x {k}, bias {}", self.count(), self.bias.is_some())
    }
}
