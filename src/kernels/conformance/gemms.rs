//! Tests of several GEMMs with the same input, against separate operations.

use super::Bounds;
use super::inputs::*;
use super::rig::*;
use mainstem_kernels::backend::{
    Activation, Backend, Epilogue, Gemm, InputOperand, Norm, NormKind, Weight, run_gemms_separately,
};
use mainstem_kernels::quant::QuantType::{self, *};
use std::ops::Range;

/// Formats of the weights of one input: equal ones, of every kind of operand, and many.
const WEIGHT_FORMATS: [&[QuantType]; 6] = [
    &[F16],
    &[Q8_0, Q8_0, Q8_0],
    &[F32, Q4_0, BF16],
    &[BF16, BF16],
    &[Q2_K, Q4_K, Q6_K, F16],
    &[Q8_0, F16, Q4_0, BF16, F32, Q8_0, Q4_0],
];
/// Numbers of outputs, in turn: less than a tile, several tiles and an odd remainder, many.
const OUTPUT_COUNTS: [usize; 3] = [3, 172, 67];
/// Inputs of every weight: whole blocks in every format, but no multiple of what is unpacked at once.
const COLUMNS: usize = 768;

/// Tests that fused GEMMs give the results of separate operations: for given, normalized and activated
/// inputs, with both epilogues, with and without bias.
pub fn gemms<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let rig = &mut Rig::new(make(), limits(32));
    for (mix, types) in WEIGHT_FORMATS.iter().enumerate() {
        let weights = upload_weights(rig, types);
        let weights: Vec<_> = weights.iter().map(std::slice::from_ref).collect();
        for rows in ROWS {
            for made in [InputKind::Given, InputKind::Normed, InputKind::Activated, InputKind::Gated] {
                let case = GemmsCase { input: made, rows, accumulates: (mix + rows) % 2 == 0 };
                let (got, want) =
                    (case.run(rig, &weights, Execution::Fused), case.run(rig, &weights, Execution::Separate));
                for (number, (got, want)) in got.iter().zip(&want).enumerate() {
                    let what = format_args!("{case:?}, GEMM {number} of {types:?}");
                    assert_same(what, got, want, bounds.batch_invariance);
                }
            }
        }
    }
}

/// Tests that a GEMM with weights that have ranges of a matrix' rows gives the result of the whole matrix, in
/// every kind of operand, fused and separate. The ranges are more than fit into one job.
pub fn divided_gemms<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let rig = &mut Rig::new(make(), limits(32));
    for ty in [F32, F16, BF16, Q8_0, Q4_0, Q4_K] {
        let values = noise(55, 171 * COLUMNS);
        let mut weight = |rows: Range<usize>| {
            rig.weight(ty, rows.len(), &values[rows.start * COLUMNS..rows.end * COLUMNS])
        };
        let (whole, other) = ([weight(0..171)], [weight(3..40)]);
        let divided: Vec<_> = (0..171).step_by(9).map(|row| weight(row..row + 9)).collect();
        for (number, rows) in ROWS.into_iter().enumerate() {
            let case = GemmsCase { input: InputKind::Normed, rows, accumulates: number % 2 == 0 };
            let want = case.run(rig, &[&whole, &other], Execution::Fused);
            for execution in [Execution::Fused, Execution::Separate] {
                let got = case.run(rig, &[&divided, &other], execution);
                for (got, want) in got.iter().zip(&want) {
                    assert_same(format_args!("{case:?} of {ty:?}"), got, want, bounds.batch_invariance);
                }
            }
        }
    }
}

/// Uploads one weight of each format.
fn upload_weights<B: Backend>(rig: &mut Rig<B>, types: &[QuantType]) -> Vec<Weight<B::Buf>> {
    let weight = |(number, ty): (usize, &QuantType)| {
        let n = OUTPUT_COUNTS[number % OUTPUT_COUNTS.len()];
        rig.weight(*ty, n, &noise(40 + number as u32, n * COLUMNS))
    };
    types.iter().enumerate().map(weight).collect()
}

/// The kind of input.
#[derive(Clone, Copy, Debug)]
enum InputKind {
    Given,
    Normed,
    Activated,
    Gated,
}

/// Fused or separate execution.
enum Execution {
    Fused,
    Separate,
}

/// A test case.
#[derive(Debug)]
struct GemmsCase {
    input: InputKind,
    rows: usize,
    accumulates: bool,
}

impl GemmsCase {
    /// Runs GEMMs, each with a matrix or with ranges of its rows, and returns their results.
    fn run<B: Backend>(
        &self,
        rig: &mut Rig<B>,
        weights: &[&[Weight<B::Buf>]],
        execution: Execution,
    ) -> Vec<Vec<f32>> {
        let (rows, len) = (self.rows, self.rows * COLUMNS);
        rig.begin_rows(rows);
        let (x, up) = (rig.input(&scaled(50, len, 3.0)), rig.input(&noise(51, len)));
        let (mut gate, mut buffer) = (rig.in_out(&scaled(50, len, 3.0)), rig.output(len));
        let weight = Some(rig.constant(&noise(52, COLUMNS)));
        let norm = Norm { kind: NormKind::Layer, weight, bias: None, sets: 1, width: COLUMNS, eps: 1e-5 };
        let input = match self.input {
            InputKind::Given => InputOperand::Given(&x),
            InputKind::Normed => InputOperand::Normed { norm: &norm, x: &x, buffer: &mut buffer },
            InputKind::Activated => {
                InputOperand::Activated { act: Activation::Silu, gate: &mut gate, up: None }
            }
            InputKind::Gated => {
                InputOperand::Activated { act: Activation::GeluTanh, gate: &mut gate, up: Some(&up) }
            }
        };
        let outputs = weights.iter().map(|parts| parts.iter().map(|w| w.n).sum());
        let outputs: Vec<usize> = outputs.collect();
        let biases: Vec<_> = outputs.iter().map(|n| rig.constant(&noise(53, *n))).collect();
        let mut results: Vec<_> = outputs.iter().map(|n| rig.in_out(&noise(54, rows * n))).collect();
        let mut buffers: Vec<_> = outputs.iter().map(|n| rig.output(rows * n)).collect();
        let epilogues = results.iter_mut().zip(&mut buffers).map(|(x, buffer)| match self.accumulates {
            true => Epilogue::Add { x, buffer },
            false => Epilogue::Set(x),
        });
        let with_bias = biases.iter().enumerate().map(|(number, bias)| (number % 2 == 0).then_some(bias));
        let each = weights.iter().zip(with_bias).zip(epilogues);
        let gemm = |((parts, bias), epilogue)| {
            let parts: &&[Weight<B::Buf>] = parts;
            Gemm { w: &parts[0], rest: &parts[1..], bias, epilogue }
        };
        let mut gemms: Vec<_> = each.map(gemm).collect();
        match execution {
            Execution::Separate => run_gemms_separately(&mut rig.backend, rows, input, &mut gemms),
            Execution::Fused => rig.backend.gemms(rows, input, &mut gemms),
        }
        let read = |(result, n): (&B::Buf, &usize)| rig.read(result, rows * n, format_args!("{self:?}"));
        results.iter().zip(&outputs).map(read).collect()
    }
}
