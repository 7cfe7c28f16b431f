//! Matrix products against the oracle, and against themselves in other company.

use super::Bounds;
use super::answers::NUMBERS;
use super::inputs::*;
use super::rig::*;
use crate::backend::Backend;
use crate::quant::QuantType;
use crate::reference::Reference;
use std::sync::Arc;

/// Products of every weight type at odd sizes, with and without bias, and with a long inner dimension.
pub fn matmul<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let (device, oracle) = &mut rigs(make, 32);
    for ty in QuantType::all() {
        let square = heights(ty).iter().flat_map(|&out| widths(ty).into_iter().map(move |inp| (out, inp)));
        let long = [(9, whole(ty, 4100)), (700, whole(ty, 65))];
        for (shape, (out, inp)) in square.chain(long).enumerate() {
            let whole = Product::new(ty, 64, out, inp, (shape + ty as usize).is_multiple_of(2));
            let (want, magnitudes) = (whole.of_oracle(oracle), whole.magnitudes_of(oracle));
            for rows in ROWS {
                let case = whole.rows(64 - rows, rows);
                let (got, first) = (case.on(device), (64 - rows) * out);
                close(format_args!("{case}"), &got, &want[first..], (bounds.matmul)(ty), |i| {
                    magnitudes[first + i]
                });
            }
        }
    }
}

/// A row's product is the same whatever the number of rows beside it.
pub fn matmul_company<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let mut rig = Rig::new(make(), limits(32));
    for (out, inp) in [(33, 300), (172, 64), (9, 4100), (300, 7)] {
        for ty in few_types().chain([QuantType::Q4_K]) {
            let whole = Product::new(ty, 150, out, whole(ty, inp), out % 2 == 0);
            let want = whole.on(&mut rig);
            for rows in ROWS {
                for first in [0, 1, 63, 150 - rows] {
                    let part = whole.rows(first, rows);
                    let got = part.on(&mut rig);
                    let what = format_args!("{part}, rows {first}.. of 150");
                    same(what, &got, &want[first * out..][..rows * out], bounds.company);
                }
            }
        }
    }
}

struct Product {
    ty: QuantType,
    out: usize,
    inp: usize,
    codes: Vec<u8>,
    bias: Option<Vec<f32>>,
    x: Vec<f32>,
}

impl Product {
    fn new(ty: QuantType, rows: usize, out: usize, inp: usize, with_bias: bool) -> Product {
        let codes = codes(ty, &noise(11, out * inp));
        Product { ty, out, inp, codes, bias: with_bias.then(|| noise(12, out)), x: noise(13, rows * inp) }
    }

    fn count(&self) -> usize {
        self.x.len() / self.inp
    }

    /// The same product of some of its rows.
    fn rows(&self, first: usize, rows: usize) -> Product {
        let x = self.x[first * self.inp..][..rows * self.inp].to_vec();
        Product { codes: self.codes.clone(), bias: self.bias.clone(), x, ..*self }
    }

    /// The sum of the terms' magnitudes in place of the sum of the terms.
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
        let question = oracle.question(format_args!("magnitudes of {self}"));
        NUMBERS.get(question, || self.magnitudes().on(oracle))
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
        let Product { ty, out, inp, .. } = self;
        write!(f, "matmul {ty}, {} x {inp} by {out} x {inp}, bias {}", self.count(), self.bias.is_some())
    }
}
