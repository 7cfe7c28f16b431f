//! What treats rows, or elements, one by one: norm, rope, activation, addition, embedding, gathering.
//!
//! Invariant: each row is computed by one thread, from that row alone.

use super::pool::Pool;
use super::simd::{Code, F32, ForCode, Kernel, LANES, Level, Simd, exp, load_part, store_part, with_code};
use super::step::Step;
use crate::backend::{Activation, Norm, Rope, RopeStyle, Weight};
use crate::host::HostBuf;

/// y = x / rms(x) * weight, by row.
pub fn norm(pool: &mut Pool, level: Level, norm: &Norm<HostBuf>, x: &[f32], y: &mut [f32]) {
    let (width, eps, weight) = (norm.width, norm.eps, &norm.weight.f32()[..norm.width]);
    pool.for_rows(y, width, |row, y| {
        level.run(NormRow { x: &x[row * width..][..width], weight, eps, y });
    });
}

struct NormRow<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    y: &'a mut [f32],
}

impl Kernel for NormRow<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (x, x_rest) = self.x.as_chunks::<LANES>();
        let (weight, weight_rest) = self.weight.as_chunks::<LANES>();
        let (y, y_rest) = self.y.as_chunks_mut::<LANES>();
        let last = load_part::<S, F32>(simd, x_rest);
        let mut squares = simd.splat(0.0);
        for x in x {
            let x = simd.load(x);
            squares = simd.mul_add(x, x, squares);
        }
        let sum = simd.sum(simd.mul_add(last, last, squares));
        let rms = (sum / self.x.len() as f32 + self.eps).sqrt();
        let inverse = simd.splat(1.0 / rms);
        for i in 0..y.len() {
            let scaled = simd.mul(simd.load(&x[i]), inverse);
            simd.store(simd.mul(scaled, simd.load(&weight[i])), &mut y[i]);
        }
        let weight = load_part::<S, F32>(simd, weight_rest);
        store_part(simd, simd.mul(simd.mul(last, inverse), weight), y_rest);
    }
}

/// Rotates the first `dims` of each head of x (rows, heads, head_dim) by its row's position.
pub fn rope(
    pool: &mut Pool,
    step: &Step,
    rope: &Rope<HostBuf>,
    heads: usize,
    head_dim: usize,
    x: &mut [f32],
) {
    assert!(rope.dims <= head_dim && rope.dims.is_multiple_of(2), "{} of {head_dim} dims", rope.dims);
    let table = &rope.cos_sin.f32()[..rope.positions * rope.dims];
    pool.for_rows(x, heads * head_dim, |row, x| {
        let angles = &table[step.rows[row].position * rope.dims..][..rope.dims];
        for head in x.chunks_exact_mut(head_dim) {
            rotate(rope.style, angles, &mut head[..rope.dims]);
        }
    });
}

/// `angles` holds (cosine, sine) for each pair of `head`.
fn rotate(style: RopeStyle, angles: &[f32], head: &mut [f32]) {
    let (angles, _) = angles.as_chunks::<2>();
    match style {
        RopeStyle::Halves => {
            let (first, second) = head.split_at_mut(head.len() / 2);
            for ((a, b), [cos, sin]) in first.iter_mut().zip(second).zip(angles) {
                (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
            }
        }
        RopeStyle::Interleaved => {
            for ([a, b], [cos, sin]) in head.as_chunks_mut::<2>().0.iter_mut().zip(angles) {
                (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
            }
        }
    }
}

/// gate = act(gate) * up, both (rows, width); without `up`, gate = act(gate).
pub fn activate(
    pool: &mut Pool,
    level: Level,
    act: Activation,
    width: usize,
    gate: &mut [f32],
    up: Option<&[f32]>,
) {
    let Activation::Silu = act;
    pool.for_rows(gate, width, |row, gate| match up {
        Some(up) => level.run(SiluGated { gate, up: &up[row * width..][..width] }),
        None => level.run(SiluPlain { gate }),
    });
}

struct SiluGated<'a> {
    gate: &'a mut [f32],
    up: &'a [f32],
}

struct SiluPlain<'a> {
    gate: &'a mut [f32],
}

/// x * sigmoid(x) = x / (1 + e^-x).
#[inline(always)]
fn silu<S: Simd>(simd: S, x: S::V) -> S::V {
    let one = simd.splat(1.0);
    simd.div(x, simd.add(one, exp(simd, simd.sub(simd.splat(0.0), x))))
}

impl Kernel for SiluGated<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (gate, gate_rest) = self.gate.as_chunks_mut::<LANES>();
        let (up, up_rest) = self.up.as_chunks::<LANES>();
        for i in 0..gate.len() {
            let activated = silu(simd, simd.load(&gate[i]));
            simd.store(simd.mul(activated, simd.load(&up[i])), &mut gate[i]);
        }
        let activated = silu(simd, load_part::<S, F32>(simd, gate_rest));
        let up = load_part::<S, F32>(simd, up_rest);
        store_part(simd, simd.mul(activated, up), gate_rest);
    }
}

impl Kernel for SiluPlain<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (gate, rest) = self.gate.as_chunks_mut::<LANES>();
        for gate in gate {
            simd.store(silu(simd, simd.load(gate)), gate);
        }
        store_part(simd, silu(simd, load_part::<S, F32>(simd, rest)), rest);
    }
}

/// x += y, both (rows, width).
pub fn add(pool: &mut Pool, width: usize, x: &mut [f32], y: &[f32]) {
    pool.for_rows(x, width, |row, x| {
        for (x, y) in x.iter_mut().zip(&y[row * width..][..width]) {
            *x += y;
        }
    });
}

/// x (rows, width) = the rows of `table` that the step's tokens name.
pub fn embed(pool: &mut Pool, step: &Step, table: &Weight<HostBuf>, x: &mut [f32]) {
    with_code(table.ty, Embed { pool, step, table, x });
}

struct Embed<'a> {
    pool: &'a mut Pool,
    step: &'a Step,
    table: &'a Weight<HostBuf>,
    x: &'a mut [f32],
}

impl ForCode for Embed<'_> {
    type Out = ();

    fn run<C: Code>(self) {
        let (step, width, codes) = (self.step, self.table.inp, C::of(&self.table.buf));
        self.pool.for_rows(self.x, width, |row, x| {
            C::decode(&codes[step.rows[row].token as usize * width..][..width], x);
        });
    }
}

/// y (wanted rows, width) = the rows of x (rows, width) that `wanted` numbers.
pub fn gather(pool: &mut Pool, wanted: &[u32], width: usize, x: &[f32], y: &mut [f32]) {
    pool.for_rows(y, width, |i, y| y.copy_from_slice(&x[wanted[i] as usize * width..][..width]));
}
