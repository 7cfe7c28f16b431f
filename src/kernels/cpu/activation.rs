//! Activation functions, element by element, and their product with a second input.
//!
//! Invariant: each row is computed by one thread, from that row alone.

use super::pool::ThreadPool;
use super::simd::{
    F32, Kernel, LANES, Level, Simd, exp, exp_excess, load_partial, normal_tail, sigmoid, store_partial, tanh,
};
use crate::backend::{Activation, Xielu};

/// Sets gate to act(gate) * up, both (rows, width); without `up`, to act(gate).
pub fn activate(
    pool: &mut ThreadPool,
    level: Level,
    act: Activation,
    width: usize,
    gate: &mut [f32],
    up: Option<&[f32]>,
) {
    pool.for_rows(gate, width, |row, gate| {
        activate_row(level, act, gate, up.map(|up| &up[row * width..][..width]));
    });
}

/// Applies an activation to one row, like [`activate`].
pub fn activate_row(level: Level, act: Activation, gate: &mut [f32], up: Option<&[f32]>) {
    dispatch_activation(act, ActivateRow { level, gate, up });
}

/// Sets x (rows, width) to cap * tanh(x / cap).
pub fn softcap(pool: &mut ThreadPool, level: Level, width: usize, cap: f32, x: &mut [f32]) {
    pool.for_rows(x, width, |_, x| level.run(SoftcapRow { cap, x }));
}

/// Limits x (rows, width) to the range from `-bound` to `bound`.
pub fn clamp(pool: &mut ThreadPool, width: usize, bound: f32, x: &mut [f32]) {
    pool.for_rows(x, width, |_, x| x.iter_mut().for_each(|x| *x = x.clamp(-bound, bound)));
}

/// Multiplies x (rows, width) by sigmoid(gate), for gate (rows).
pub fn gate_rows(pool: &mut ThreadPool, level: Level, width: usize, gate: &[f32], x: &mut [f32]) {
    pool.for_rows(x, width, |row, x| level.run(GateRow { gate: gate[row], x }));
}

/// An [`Activation`] as a type: a kernel is compiled for each.
trait ActivationFn: Copy + Sync {
    /// Applies the activation to each lane. Must be `#[inline(always)]`.
    fn apply<S: Simd>(self, simd: S, x: S::V) -> S::V;

    /// Returns the factor of each activated lane for the number `up`. Must be `#[inline(always)]`.
    #[inline(always)]
    fn factor<S: Simd>(self, _: S, up: S::V) -> S::V {
        up
    }
}

/// An operation that is generic over the [`ActivationFn`], which is known only at run time.
trait ActivationOp {
    fn run<F: ActivationFn>(self, f: F);
}

/// Calls `op` with the [`ActivationFn`] for `act`.
fn dispatch_activation<O: ActivationOp>(act: Activation, op: O) {
    match act {
        Activation::Relu => op.run(Relu),
        Activation::SquaredRelu => op.run(SquaredRelu),
        Activation::Gelu => op.run(Gelu),
        Activation::GeluTanh => op.run(GeluTanh),
        Activation::QuickGelu => op.run(QuickGelu),
        Activation::Silu => op.run(Silu),
        Activation::Tanh => op.run(Tanh),
        Activation::ClampedSwiglu => op.run(ClampedSwiglu),
        Activation::Xielu(numbers) => op.run(numbers),
    }
}

#[derive(Clone, Copy)]
struct Relu;

impl ActivationFn for Relu {
    #[inline(always)]
    fn apply<S: Simd>(self, simd: S, x: S::V) -> S::V {
        // With this order of operands, NaN stays NaN.
        simd.max(simd.splat(0.0), x)
    }
}

#[derive(Clone, Copy)]
struct SquaredRelu;

impl ActivationFn for SquaredRelu {
    #[inline(always)]
    fn apply<S: Simd>(self, simd: S, x: S::V) -> S::V {
        let x = Relu.apply(simd, x);
        simd.mul(x, x)
    }
}

#[derive(Clone, Copy)]
struct Gelu;

impl ActivationFn for Gelu {
    /// Computes x Φ(x) = max(x, 0) - |x| (1 - Φ(|x|)), which has no cancellation. Beyond 16 the tail is zero.
    #[inline(always)]
    fn apply<S: Simd>(self, simd: S, x: S::V) -> S::V {
        let magnitude = simd.min(simd.splat(16.0), simd.max(x, simd.sub(simd.splat(0.0), x)));
        let tail = simd.mul(magnitude, normal_tail(simd, magnitude));
        simd.sub(simd.max(simd.splat(0.0), x), tail)
    }
}

#[derive(Clone, Copy)]
struct GeluTanh;

impl ActivationFn for GeluTanh {
    /// Uses (1 + tanh y) / 2 = sigmoid(2y), for y = √(2/π) (x + 0.044715 x³).
    #[inline(always)]
    fn apply<S: Simd>(self, simd: S, x: S::V) -> S::V {
        const TWICE: f64 = 2.0 * 0.797_884_560_802_865_4;
        let factor =
            simd.mul_add(simd.mul(x, x), simd.splat((TWICE * 0.044715) as f32), simd.splat(TWICE as f32));
        times_sigmoid(simd, x, simd.mul(x, factor))
    }
}

#[derive(Clone, Copy)]
struct QuickGelu;

impl ActivationFn for QuickGelu {
    #[inline(always)]
    fn apply<S: Simd>(self, simd: S, x: S::V) -> S::V {
        times_sigmoid(simd, x, simd.mul(x, simd.splat(1.702)))
    }
}

#[derive(Clone, Copy)]
struct Silu;

impl ActivationFn for Silu {
    #[inline(always)]
    fn apply<S: Simd>(self, simd: S, x: S::V) -> S::V {
        times_sigmoid(simd, x, x)
    }
}

#[derive(Clone, Copy)]
struct Tanh;

impl ActivationFn for Tanh {
    #[inline(always)]
    fn apply<S: Simd>(self, simd: S, x: S::V) -> S::V {
        tanh(simd, x)
    }
}

#[derive(Clone, Copy)]
struct ClampedSwiglu;

impl ActivationFn for ClampedSwiglu {
    #[inline(always)]
    fn apply<S: Simd>(self, simd: S, x: S::V) -> S::V {
        // With this order of operands, NaN stays NaN.
        QuickGelu.apply(simd, simd.min(simd.splat(Activation::LIMIT), x))
    }

    #[inline(always)]
    fn factor<S: Simd>(self, simd: S, up: S::V) -> S::V {
        let up = simd.max(simd.splat(-Activation::LIMIT), simd.min(simd.splat(Activation::LIMIT), up));
        simd.add(simd.splat(1.0), up)
    }
}

impl ActivationFn for Xielu {
    #[inline(always)]
    fn apply<S: Simd>(self, simd: S, x: S::V) -> S::V {
        let [positive, negative, linear] =
            [self.positive, self.negative, self.linear].map(|it| simd.splat(it));
        let above = simd.mul(simd.mul_add(positive, x, linear), x);
        // With this order of operands, NaN stays NaN.
        let bounded = simd.min(simd.splat(self.bound), x);
        let excess = simd.add(exp_excess(simd, bounded), simd.sub(bounded, x));
        let below = simd.mul_add(negative, excess, simd.mul(linear, x));
        simd.where_less(simd.splat(0.0), x, above, below)
    }
}

/// Returns x * sigmoid(y), computed as x / (1 + e^-y).
#[inline(always)]
fn times_sigmoid<S: Simd>(simd: S, x: S::V, y: S::V) -> S::V {
    simd.div(x, simd.add(simd.splat(1.0), exp(simd, simd.sub(simd.splat(0.0), y))))
}

/// Applies an activation to one row, multiplied by `up` if given.
struct ActivateRow<'a> {
    level: Level,
    gate: &'a mut [f32],
    up: Option<&'a [f32]>,
}

impl ActivationOp for ActivateRow<'_> {
    fn run<F: ActivationFn>(self, f: F) {
        let ActivateRow { level, gate, up } = self;
        match up {
            Some(up) => level.run(GatedRow { gate, up, f }),
            None => level.run(UngatedRow { x: gate, f }),
        }
    }
}

/// Kernel for gate = F(gate) * up, one row.
struct GatedRow<'a, F> {
    gate: &'a mut [f32],
    up: &'a [f32],
    f: F,
}

impl<F: ActivationFn> Kernel for GatedRow<'_, F> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let GatedRow { gate, up, f } = self;
        let (gate, gate_rest) = gate.as_chunks_mut::<LANES>();
        let (up, up_rest) = up.as_chunks::<LANES>();
        for i in 0..gate.len() {
            let activated = f.apply(simd, simd.load(&gate[i]));
            let factor = f.factor(simd, simd.load(&up[i]));
            simd.store(simd.mul(activated, factor), &mut gate[i]);
        }
        let activated = f.apply(simd, load_partial::<S, F32>(simd, gate_rest));
        let up = f.factor(simd, load_partial::<S, F32>(simd, up_rest));
        store_partial(simd, simd.mul(activated, up), gate_rest);
    }
}

/// Kernel for x = F(x), one row.
struct UngatedRow<'a, F> {
    x: &'a mut [f32],
    f: F,
}

impl<F: ActivationFn> Kernel for UngatedRow<'_, F> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let UngatedRow { x, f } = self;
        let (x, rest) = x.as_chunks_mut::<LANES>();
        for x in x {
            simd.store(f.apply(simd, simd.load(x)), x);
        }
        store_partial(simd, f.apply(simd, load_partial::<S, F32>(simd, rest)), rest);
    }
}

/// Kernel for x = cap * tanh(x / cap), one row.
struct SoftcapRow<'a> {
    cap: f32,
    x: &'a mut [f32],
}

/// Returns cap * tanh(x / cap) in each lane.
#[inline(always)]
pub fn softcap_lanes<S: Simd>(simd: S, cap: S::V, x: S::V) -> S::V {
    simd.mul(cap, tanh(simd, simd.div(x, cap)))
}

impl Kernel for SoftcapRow<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let cap = simd.splat(self.cap);
        let (x, rest) = self.x.as_chunks_mut::<LANES>();
        for x in x {
            simd.store(softcap_lanes(simd, cap, simd.load(x)), x);
        }
        store_partial(simd, softcap_lanes(simd, cap, load_partial::<S, F32>(simd, rest)), rest);
    }
}

/// Kernel for x *= sigmoid(gate), one row.
struct GateRow<'a> {
    gate: f32,
    x: &'a mut [f32],
}

impl Kernel for GateRow<'_> {
    type Out = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let gate = sigmoid(simd, simd.splat(self.gate));
        let (x, rest) = self.x.as_chunks_mut::<LANES>();
        for x in x {
            simd.store(simd.mul(simd.load(x), gate), x);
        }
        store_partial(simd, simd.mul(load_partial::<S, F32>(simd, rest), gate), rest);
    }
}
