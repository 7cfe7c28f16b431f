//! Tests of norms, against the reference backend.

use super::Bounds;
use super::inputs::*;
use super::rig::*;
use mainstem_kernels::backend::{Backend, Norm, NormKind};

/// Tests both kinds of norms, with and without weight and bias, for small, large and shifted values and a row
/// of zeros. In-place norms must give the same bits.
pub fn norm<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let (device, oracle) = &mut rigs(make, 32);
    for (case, (rows, width)) in sizes().chain([(3, 4099), (1, 5000)]).enumerate() {
        for kind in [NormKind::Rms, NormKind::Layer] {
            let case = NormCase::new(kind, case, rows, width);
            let (got, want) = (case.run(device), case.run(oracle));
            let magnitudes = case.magnitudes();
            assert_close(format_args!("{case}"), &got, &want, bounds.elementwise, |i| magnitudes[i]);
            assert_same(format_args!("{case} in place"), &case.run_in_place(device), &got, 0.0);
        }
    }
}

/// A test case.
struct NormCase {
    kind: NormKind,
    x: Vec<f32>,
    weight: Option<Vec<f32>>,
    bias: Option<Vec<f32>>,
    /// Number of rows of weights.
    sets: usize,
    width: usize,
    eps: f32,
}

impl NormCase {
    fn new(kind: NormKind, case: usize, rows: usize, width: usize) -> NormCase {
        let mut x = scaled(8, rows * width, [1.0, 1e-3, 1e3][case % 3]);
        if case % 5 == 4 {
            x.iter_mut().for_each(|x| *x += 7.0);
        }
        x[(rows - 1) * width..].fill(if rows > 1 { 0.0 } else { 0.5 });
        // In some cases, rows are heads with weights of their own.
        let sets = if case % 6 == 5 { rows.min(3) } else { 1 };
        let weight = (!case.is_multiple_of(4)).then(|| noise(9, sets * width));
        let bias = (case / 3 % 2 == 1).then(|| noise(20, sets * width));
        NormCase { kind, x, weight, bias, sets, width, eps: [1e-5, 1e-6][case % 2] }
    }

    /// Returns the magnitudes of the terms of each element: its number and those of the mean, divided by the
    /// deviation, times the weight; plus the bias.
    fn magnitudes(&self) -> Vec<f32> {
        let rows = self.x.chunks_exact(self.width).enumerate();
        rows.flat_map(|(number, row)| self.magnitudes_of(number, row)).collect()
    }

    fn magnitudes_of(&self, number: usize, row: &[f32]) -> Vec<f32> {
        let mean_of =
            |of: &dyn Fn(f64) -> f64| row.iter().map(|x| of(f64::from(*x))).sum::<f64>() / self.width as f64;
        let (mean, terms) = match self.kind {
            NormKind::Rms => (0.0, 0.0),
            NormKind::Layer => (mean_of(&|x| x), mean_of(&f64::abs)),
        };
        let deviation = (mean_of(&|x| (x - mean).powi(2)) + f64::from(self.eps)).sqrt();
        let magnitude = |(column, x): (usize, &f32)| {
            let size = (f64::from(*x).abs() + terms) / deviation;
            let weight = self.weight.as_ref().map_or(1.0, |weight| weight[column].abs());
            size as f32 * weight + self.bias.as_ref().map_or(0.0, |bias| bias[column].abs())
        };
        (number % self.sets * self.width..).zip(row).map(magnitude).collect()
    }

    fn norm<B: Backend>(&self, rig: &mut Rig<B>) -> Norm<B::Buf> {
        let mut vector = |values: &Option<Vec<f32>>| values.as_ref().map(|values| rig.constant(values));
        let (weight, bias) = (vector(&self.weight), vector(&self.bias));
        Norm { kind: self.kind, weight, bias, sets: self.sets, width: self.width, eps: self.eps }
    }

    fn run<B: Backend>(&self, rig: &mut Rig<B>) -> Vec<f32> {
        let (norm, rows) = (self.norm(rig), self.x.len() / self.width);
        rig.begin_rows(rows);
        let (x, mut y) = (rig.input(&self.x), rig.output(self.x.len()));
        rig.backend.norm(rows, &norm, &x, &mut y);
        rig.read(&y, self.x.len(), format_args!("{self}"))
    }

    fn run_in_place<B: Backend>(&self, rig: &mut Rig<B>) -> Vec<f32> {
        let (norm, rows) = (self.norm(rig), self.x.len() / self.width);
        rig.begin_rows(rows);
        let mut x = rig.in_out(&self.x);
        rig.backend.norm_in_place(rows, &norm, &mut x);
        rig.read(&x, self.x.len(), format_args!("{self} in place"))
    }
}

impl std::fmt::Display for NormCase {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (rows, width) = (self.x.len() / self.width, self.width);
        let (weight, bias) = (self.weight.is_some(), self.bias.is_some());
        write!(f, "{:?} norm of {rows} rows of {width}, weight {weight}, bias {bias}", self.kind)
    }
}
