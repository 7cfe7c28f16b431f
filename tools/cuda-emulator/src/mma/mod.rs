//! `mma.sync`: which lane's register holds which element (PTX ISA, 9.7.14.5), and how products are summed.
//!
//! A register of A holds `E` elements (2 of 16 bits, 4 of 8, 1 of TF32). With `g = lane / 4` and `t = lane
//! % 4`, element `e` of register `r` is row `g + 8 (r & 1)`, column `t E + e + 4 E (r >> 1)`; that of B is
//! row `t E + e + 4 E r`, column `g`. Accumulators are rows `g` and `g + 8`, columns `2 t` and `2 t + 1`.

mod sum;

use crate::arith::Plane;
use sum::{Line, Model, Number};

/// A type of matrix elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Element {
    F16,
    Bf16,
    Tf32,
    S8,
    U8,
}

/// The shape m16n8k, by `k`, and its types.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) k: usize,
    pub(crate) a: Element,
    pub(crate) b: Element,
    /// Whether accumulators are F16; else they are F32, or S32 for integers.
    pub(crate) half: bool,
    /// Whether sums of integers saturate.
    pub(crate) saturate: bool,
}

impl Shape {
    /// Elements in a register.
    fn packed(self) -> usize {
        match self.a {
            Element::F16 | Element::Bf16 => 2,
            Element::Tf32 => 1,
            Element::S8 | Element::U8 => 4,
        }
    }

    /// Registers of A; those of B are half as many.
    pub(crate) fn a_registers(self) -> usize {
        self.k / (2 * self.packed())
    }

    /// Registers of C and D.
    pub(crate) fn accumulators(self) -> usize {
        if self.half { 2 } else { 4 }
    }
}

/// A matrix instruction, by the planes of its registers.
#[derive(Clone, Debug)]
pub(crate) struct Mma {
    pub(crate) shape: Shape,
    pub(crate) d: Vec<u32>,
    pub(crate) a: Vec<u32>,
    pub(crate) b: Vec<u32>,
    pub(crate) c: Vec<u32>,
}

/// Rows of A, columns of B.
const M: usize = 16;
const N: usize = 8;

/// D = A B + C on an architecture (`80` for compute capability 8.0).
pub(crate) fn multiply(shape: Shape, arch: u32, a: &[&Plane], b: &[&Plane], c: &[&Plane], d: &mut [Plane]) {
    if matches!(shape.a, Element::S8 | Element::U8) {
        return integers(shape, a, b, c, d);
    }
    let (mut am, mut bm) = ([Line::new(); M], [Line::new(); N]);
    gather(
        shape,
        a,
        b,
        |row, k, element, bits| am[row].set(k, value(element, bits)),
        |col, k, element, bits| {
            bm[col].set(k, value(element, bits));
        },
    );
    let model = Model::of(arch, shape.a);
    for lane in 0..32 {
        let (g, t) = (lane / 4, lane % 4);
        for at in 0..4 {
            let (row, col) = (g + 8 * (at >> 1), 2 * t + (at & 1));
            if shape.half {
                let shift = 16 * (at & 1);
                let start = c[at >> 1][lane] >> shift & 0xffff;
                let sum = model.dot_half(&am[row], &bm[col], shape.k, start);
                d[at >> 1][lane] = (d[at >> 1][lane] & !(0xffff << shift)) | sum << shift;
            } else {
                let start = f32::from_bits(c[at][lane]);
                let sum = model.dot(&am[row], &bm[col], shape.k, start);
                d[at][lane] = if sum.is_nan() { 0x7fff_ffff } else { sum.to_bits() };
            }
        }
    }
}

/// Gives every element of A (row, k) and B (column, k) with its bits.
fn gather(
    shape: Shape,
    a: &[&Plane],
    b: &[&Plane],
    mut put_a: impl FnMut(usize, usize, Element, u32),
    mut put_b: impl FnMut(usize, usize, Element, u32),
) {
    let packed = shape.packed();
    let bits = 32 / packed;
    let mask = if bits == 32 { u32::MAX } else { (1 << bits) - 1 };
    for lane in 0..32 {
        let (g, t) = (lane / 4, lane % 4);
        for e in 0..packed {
            for (r, plane) in a.iter().enumerate() {
                let k = t * packed + e + 4 * packed * (r >> 1);
                put_a(g + 8 * (r & 1), k, shape.a, plane[lane] >> (bits * e) & mask);
            }
            for (r, plane) in b.iter().enumerate() {
                put_b(g, t * packed + e + 4 * packed * r, shape.b, plane[lane] >> (bits * e) & mask);
            }
        }
    }
}

/// The value of a floating-point element. TF32 has the upper 19 bits of a register.
fn value(element: Element, bits: u32) -> Number {
    match element {
        Element::F16 => Number::decode(bits, 5, 10),
        Element::Bf16 => Number::decode(bits, 8, 7),
        _ => Number::decode(bits >> 13, 8, 10),
    }
}

fn integers(shape: Shape, a: &[&Plane], b: &[&Plane], c: &[&Plane], d: &mut [Plane]) {
    let (mut am, mut bm) = ([[0i32; 32]; M], [[0i32; 32]; N]);
    let value = |element, bits: u32| match element {
        Element::S8 => i32::from(bits as u8 as i8),
        _ => bits as i32,
    };
    gather(
        shape,
        a,
        b,
        |row, k, element, bits| am[row][k] = value(element, bits),
        |col, k, element, bits| {
            bm[col][k] = value(element, bits);
        },
    );
    for lane in 0..32 {
        let (g, t) = (lane / 4, lane % 4);
        for at in 0..4 {
            let (row, col) = (&am[g + 8 * (at >> 1)], &bm[2 * t + (at & 1)]);
            // 32 products of 8 bits each fit.
            let sum: i32 = row.iter().zip(col).map(|(x, y)| x * y).sum();
            let start = c[at][lane] as i32;
            d[at][lane] =
                if shape.saturate { start.saturating_add(sum) } else { start.wrapping_add(sum) } as u32;
        }
    }
}
