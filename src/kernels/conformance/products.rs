//! Products that are asked for together, against the operations one by one.

use super::Bounds;
use super::inputs::*;
use super::rig::*;
use crate::backend::{Activation, Backend, Factor, Norm, NormKind, Product, To, Weight, one_by_one};
use crate::quant::QuantType::{self, *};

/// What weights of one input are stored as: alike, of every kind of operand, and more of them than fit together.
const MIXES: [&[QuantType]; 6] = [
    &[F16],
    &[Q8_0, Q8_0, Q8_0],
    &[F32, Q4_0, BF16],
    &[BF16, BF16],
    &[Q2_K, Q4_K, Q6_K, F16],
    &[Q8_0, F16, Q4_0, BF16, F32, Q8_0, Q4_0],
];
/// Outs of each in turn: fewer than a tile, a few tiles with an odd end, many.
const OUTS: [usize; 3] = [3, 172, 67];
/// Whole blocks of all, and no whole number of what is unpacked at once.
const COLUMNS: usize = 768;

/// The same numbers as one by one: of given, normed and activated rows; set, and added; with bias and without.
pub fn products<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let rig = &mut Rig::new(make(), limits(32));
    for (mix, types) in MIXES.iter().enumerate() {
        let weights = weights(rig, types);
        for rows in ROWS {
            for made in [Made::Given, Made::Normed, Made::Activated, Made::Gated] {
                let case = Case { made, rows, adds: (mix + rows) % 2 == 0 };
                let (got, want) = (case.on(rig, &weights, Way::Together), case.on(rig, &weights, Way::Apart));
                for (number, (got, want)) in got.iter().zip(&want).enumerate() {
                    let what = format_args!("{case:?}, product {number} of {types:?}");
                    same(what, got, want, bounds.company);
                }
            }
        }
    }
}

fn weights<B: Backend>(rig: &mut Rig<B>, types: &[QuantType]) -> Vec<Weight<B::Buf>> {
    let weight = |(number, ty): (usize, &QuantType)| {
        let out = OUTS[number % OUTS.len()];
        rig.weight(*ty, out, &noise(40 + number as u32, out * COLUMNS))
    };
    types.iter().enumerate().map(weight).collect()
}

/// How rows are made.
#[derive(Clone, Copy, Debug)]
enum Made {
    Given,
    Normed,
    Activated,
    Gated,
}

/// How they are asked for.
enum Way {
    Together,
    Apart,
}

#[derive(Debug)]
struct Case {
    made: Made,
    rows: usize,
    adds: bool,
}

impl Case {
    /// Each product's results.
    fn on<B: Backend>(&self, rig: &mut Rig<B>, weights: &[Weight<B::Buf>], way: Way) -> Vec<Vec<f32>> {
        let (rows, len) = (self.rows, self.rows * COLUMNS);
        rig.begin_rows(rows);
        let (x, up) = (rig.put(&scaled(50, len, 3.0)), rig.put(&noise(51, len)));
        let (mut gate, mut room) = (rig.put_mut(&scaled(50, len, 3.0)), rig.output(len));
        let weight = Some(rig.constant(&noise(52, COLUMNS)));
        let norm = Norm { kind: NormKind::Layer, weight, bias: None, width: COLUMNS, eps: 1e-5 };
        let factor = match self.made {
            Made::Given => Factor::Given(&x),
            Made::Normed => Factor::Normed { norm: &norm, x: &x, room: &mut room },
            Made::Activated => Factor::Activated { act: Activation::Silu, gate: &mut gate, up: None },
            Made::Gated => Factor::Activated { act: Activation::GeluTanh, gate: &mut gate, up: Some(&up) },
        };
        let biases: Vec<_> = weights.iter().map(|w| rig.constant(&noise(53, w.out))).collect();
        let mut results: Vec<_> = weights.iter().map(|w| rig.put_mut(&noise(54, rows * w.out))).collect();
        let mut rooms: Vec<_> = weights.iter().map(|w| rig.output(rows * w.out)).collect();
        let to = results.iter_mut().zip(&mut rooms).map(|(x, room)| match self.adds {
            true => To::Add { x, room },
            false => To::Set(x),
        });
        let with_bias = biases.iter().enumerate().map(|(number, bias)| (number % 2 == 0).then_some(bias));
        let each = weights.iter().zip(with_bias).zip(to);
        let mut products: Vec<_> = each.map(|((w, bias), to)| Product { w, bias, to }).collect();
        match way {
            Way::Apart => one_by_one(&mut rig.backend, rows, factor, &mut products),
            Way::Together => rig.backend.products(rows, factor, &mut products),
        }
        let read = |(result, w): (&B::Buf, &Weight<B::Buf>)| {
            rig.read(result, rows * w.out, format_args!("{self:?}"))
        };
        results.iter().zip(weights).map(read).collect()
    }
}
