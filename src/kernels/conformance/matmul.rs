//! Tests of GEMM, against the reference backend and for batch invariance.

use super::Bounds;
use super::inputs::*;
use super::memo::ORACLE_VALUES;
use super::rig::*;
use mainstem_kernels::backend::Backend;
use mainstem_kernels::quant::QuantType;
use mainstem_kernels::reference::Reference;
use std::sync::Arc;

/// Tests GEMMs with every weight format at odd sizes, with and without bias, and with a large inner
/// dimension.
pub fn matmul<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let (device, oracle) = &mut rigs(make, 32);
    for ty in QuantType::all() {
        let square =
            output_counts(ty).iter().flat_map(|&n| valid_widths(ty).into_iter().map(move |k| (n, k)));
        let long = [(9, round_to_blocks(ty, 4100)), (700, round_to_blocks(ty, 65))];
        for (shape, (n, k)) in square.chain(long).enumerate() {
            let whole = MatmulCase::new(ty, 64, n, k, (shape + ty as usize).is_multiple_of(2));
            let (want, magnitudes) = (whole.oracle_result(oracle), whole.oracle_magnitudes(oracle));
            for rows in ROWS {
                let case = whole.with_rows(64 - rows, rows);
                let (got, first) = (case.run(device), (64 - rows) * n);
                assert_close(format_args!("{case}"), &got, &want[first..], (bounds.matmul)(ty), |i| {
                    magnitudes[first + i]
                });
            }
        }
    }
}

/// Tests that the result of a row does not depend on the number of rows in the GEMM.
pub fn matmul_batch_invariance<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let mut rig = Rig::new(make(), limits(32));
    for (n, k) in [(33, 300), (172, 64), (9, 4100), (300, 7)] {
        for ty in few_types().chain([QuantType::Q4_K]) {
            let whole = MatmulCase::new(ty, 150, n, round_to_blocks(ty, k), n % 2 == 0);
            let want = whole.run(&mut rig);
            for rows in ROWS {
                for first in [0, 1, 63, 150 - rows] {
                    let part = whole.with_rows(first, rows);
                    let got = part.run(&mut rig);
                    let what = format_args!("{part}, rows {first}.. of 150");
                    assert_same(what, &got, &want[first * n..][..rows * n], bounds.batch_invariance);
                }
            }
        }
    }
}

/// A GEMM with its inputs.
struct MatmulCase {
    ty: QuantType,
    n: usize,
    k: usize,
    quantized: Vec<u8>,
    bias: Option<Vec<f32>>,
    x: Vec<f32>,
}

impl MatmulCase {
    fn new(ty: QuantType, rows: usize, n: usize, k: usize, with_bias: bool) -> MatmulCase {
        let quantized = quantize_values(ty, &noise(11, n * k));
        MatmulCase { ty, n, k, quantized, bias: with_bias.then(|| noise(12, n)), x: noise(13, rows * k) }
    }

    /// Returns the number of rows.
    fn row_count(&self) -> usize {
        self.x.len() / self.k
    }

    /// Returns the GEMM with some of its rows.
    fn with_rows(&self, first: usize, rows: usize) -> MatmulCase {
        let x = self.x[first * self.k..][..rows * self.k].to_vec();
        MatmulCase { quantized: self.quantized.clone(), bias: self.bias.clone(), x, ..*self }
    }

    /// Returns the GEMM of the absolute values, whose results are the sums of the magnitudes of the terms.
    fn magnitudes(&self) -> MatmulCase {
        let mut weights = vec![0.0; self.n * self.k];
        self.ty.dequantize(&self.quantized, &mut weights);
        let abs = |values: &[f32]| -> Vec<f32> { values.iter().map(|v| v.abs()).collect() };
        let quantized = quantize_values(QuantType::F32, &abs(&weights));
        MatmulCase {
            ty: QuantType::F32,
            quantized,
            bias: self.bias.as_deref().map(abs),
            x: abs(&self.x),
            ..*self
        }
    }

    fn oracle_result(&self, oracle: &mut Rig<Reference>) -> Arc<Vec<f32>> {
        ORACLE_VALUES.get(oracle.memo_key(format_args!("{self}")), || self.run(oracle))
    }

    fn oracle_magnitudes(&self, oracle: &mut Rig<Reference>) -> Arc<Vec<f32>> {
        let key = oracle.memo_key(format_args!("magnitudes of {self}"));
        ORACLE_VALUES.get(key, || self.magnitudes().run(oracle))
    }

    fn run<B: Backend>(&self, rig: &mut Rig<B>) -> Vec<f32> {
        let rows = self.row_count();
        rig.begin_rows(rows);
        let w = rig.quantized_weight(self.ty, self.n, self.k, &self.quantized);
        let bias = self.bias.as_ref().map(|bias| rig.constant(bias));
        let (x, mut y) = (rig.input(&self.x), rig.output(rows * self.n));
        rig.backend.matmul(rows, &w, bias.as_ref(), &x, &mut y);
        rig.read(&y, rows * self.n, format_args!("{self}"))
    }
}

impl std::fmt::Display for MatmulCase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let MatmulCase { ty, n, k, .. } = self;
        write!(f, "matmul {ty}, {} x {k} by {n} x {k}, bias {}", self.row_count(), self.bias.is_some())
    }
}
