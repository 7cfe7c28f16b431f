//! Tests of several GEMMs with the same input, against separate operations.

use super::Bounds;
use super::inputs::*;
use super::rig::*;
use crate::backend::{Activation, Backend, Factor, Norm, NormKind, Product, To, Weight, one_by_one};
use crate::quant::QuantType::{self, *};

/// Formats of the weights of one input: equal ones, of every kind of operand, and more than fit into one job.
const MIXES: [&[QuantType]; 6] = [
    &[F16],
    &[Q8_0, Q8_0, Q8_0],
    &[F32, Q4_0, BF16],
    &[BF16, BF16],
    &[Q2_K, Q4_K, Q6_K, F16],
    &[Q8_0, F16, Q4_0, BF16, F32, Q8_0, Q4_0],
];
/// Numbers of outputs, in turn: less than a tile, several tiles and an odd remainder, many.
const OUTS: [usize; 3] = [3, 172, 67];
/// Inputs of every weight: whole blocks in every format, but no multiple of what is unpacked at once.
const COLUMNS: usize = 768;

/// Tests that fused GEMMs give the results of separate operations: for given, normalized and activated
/// inputs, with both epilogues, with and without bias.
pub fn products<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let rig = &mut Rig::new(make(), limits(32));
    for (mix, types) in MIXES.iter().enumerate() {
        let weights = weights(rig, types);
        for rows in ROWS {
            for made in [Made::Given, Made::Normed, Made::Activated, Made::Gated] {
                let case = Case { made, rows, adds: (mix + rows) % 2 == 0 };
                let (got, want) = (case.on(rig, &weights, Way::Together), case.on(rig, &weights, Way::Apart));
                for (number, (got, want)) in got.iter().zip(&want).enumerate() {
                    let what = format_args!("{case:?}, GEMM {number} of {types:?}");
                    same(what, got, want, bounds.company);
                }
            }
        }
    }
}

/// Uploads one weight of each format.
fn weights<B: Backend>(rig: &mut Rig<B>, types: &[QuantType]) -> Vec<Weight<B::Buf>> {
    let weight = |(number, ty): (usize, &QuantType)| {
        let n = OUTS[number % OUTS.len()];
        rig.weight(*ty, n, &noise(40 + number as u32, n * COLUMNS))
    };
    types.iter().enumerate().map(weight).collect()
}

/// The kind of input.
#[derive(Clone, Copy, Debug)]
enum Made {
    Given,
    Normed,
    Activated,
    Gated,
}

/// Fused or separate execution.
enum Way {
    Together,
    Apart,
}

/// A test case.
#[derive(Debug)]
struct Case {
    made: Made,
    rows: usize,
    adds: bool,
}

impl Case {
    /// Runs the GEMMs and returns their results.
    fn on<B: Backend>(&self, rig: &mut Rig<B>, weights: &[Weight<B::Buf>], execution: Way) -> Vec<Vec<f32>> {
        let (rows, len) = (self.rows, self.rows * COLUMNS);
        rig.begin_rows(rows);
        let (x, up) = (rig.put(&scaled(50, len, 3.0)), rig.put(&noise(51, len)));
        let (mut gate, mut buffer) = (rig.put_mut(&scaled(50, len, 3.0)), rig.output(len));
        let weight = Some(rig.constant(&noise(52, COLUMNS)));
        let norm = Norm { kind: NormKind::Layer, weight, bias: None, width: COLUMNS, eps: 1e-5 };
        let input = match self.made {
            Made::Given => Factor::Given(&x),
            Made::Normed => Factor::Normed { norm: &norm, x: &x, room: &mut buffer },
            Made::Activated => Factor::Activated { act: Activation::Silu, gate: &mut gate, up: None },
            Made::Gated => Factor::Activated { act: Activation::GeluTanh, gate: &mut gate, up: Some(&up) },
        };
        let biases: Vec<_> = weights.iter().map(|w| rig.constant(&noise(53, w.out))).collect();
        let mut results: Vec<_> = weights.iter().map(|w| rig.put_mut(&noise(54, rows * w.out))).collect();
        let mut buffers: Vec<_> = weights.iter().map(|w| rig.output(rows * w.out)).collect();
        let epilogues = results.iter_mut().zip(&mut buffers).map(|(x, buffer)| match self.adds {
            true => To::Add { x, room: buffer },
            false => To::Set(x),
        });
        let with_bias = biases.iter().enumerate().map(|(number, bias)| (number % 2 == 0).then_some(bias));
        let each = weights.iter().zip(with_bias).zip(epilogues);
        let mut gemms: Vec<_> = each.map(|((w, bias), epilogue)| Product { w, bias, to: epilogue }).collect();
        match execution {
            Way::Apart => one_by_one(&mut rig.backend, rows, input, &mut gemms),
            Way::Together => rig.backend.products(rows, input, &mut gemms),
        }
        let read = |(result, w): (&B::Buf, &Weight<B::Buf>)| {
            rig.read(result, rows * w.out, format_args!("{self:?}"))
        };
        results.iter().zip(weights).map(read).collect()
    }
}
