//! Tests of embeddings, sums and activation functions, against the reference backend.

use super::Bounds;
use super::inputs::*;
use super::memo::ORACLE_VALUES;
use super::rig::*;
use super::spans::*;
use mainstem_kernels::backend::{Activation, Backend, Xielu};
use mainstem_kernels::batch::{SpanOutput, typed_token};
use mainstem_kernels::quant::QuantType;

/// Tests that embedding rows are dequantized exactly, and are zero for tokens outside the part of the table
/// that a device has.
pub fn embed<B: Backend>(make: &impl Fn() -> B) {
    let (device, oracle) = &mut rigs(make, 32);
    for ty in QuantType::all() {
        for width in valid_widths(ty) {
            for rows in ROWS {
                let values = noise(2, device.limits.vocab * width);
                for (first, end) in [(0, device.limits.vocab), (0, 20), (20, 37), (37, device.limits.vocab)] {
                    let part = &values[first * width..end * width];
                    let got = embed_on(device, ty, (first, width), part, rows);
                    let key = oracle.memo_key(("embed", ty, first, end, width, rows));
                    let want = ORACLE_VALUES.get(key, || embed_on(oracle, ty, (first, width), part, rows));
                    let what = format_args!("embed {ty}, {rows} rows of {width}, tokens {first}..{end}");
                    assert_same(what, &got, &want, 0.0);
                }
            }
        }
    }
}

fn embed_on<B: Backend>(
    rig: &mut Rig<B>,
    ty: QuantType,
    (first, width): (usize, usize),
    values: &[f32],
    rows: usize,
) -> Vec<f32> {
    let table = rig.weight(ty, values.len() / width, values);
    rig.begin_rows(rows);
    let mut x = rig.output(rows * width);
    rig.backend.embed(&table, first, &mut x);
    rig.read(&x, rows * width, format_args!("embed {ty}, {rows} rows of {width}"))
}

/// Tests that position embeddings are added by position, each sum rounded once, in every format.
pub fn embed_positions<B: Backend>(make: &impl Fn() -> B) {
    let (device, oracle) = &mut rigs(make, 32);
    for ty in QuantType::all() {
        let widths = match few_types().any(|few| few == ty) {
            true => valid_widths(ty).into_iter().chain([round_to_blocks(ty, 700)]).collect(),
            false => vec![ty.row().block_elements],
        };
        for width in widths {
            for offset in [0, 2] {
                let got = embed_positions_on(device, ty, width, offset);
                let key = oracle.memo_key(("positions", ty, width, offset));
                let want = ORACLE_VALUES.get(key, || embed_positions_on(oracle, ty, width, offset));
                assert_same(format_args!("{ty} positions from {offset} on, width {width}"), &got, &want, 0.0);
            }
        }
    }
}

fn embed_positions_on<B: Backend>(rig: &mut Rig<B>, ty: QuantType, width: usize, offset: usize) -> Vec<f32> {
    let positions = rig.limits.positions + offset;
    let table = rig.weight(ty, 2 * positions, &noise(16, 2 * positions * width));
    let pieces =
        [TestSpan::given(2, 100, 5), TestSpan::last(0, 511), TestSpan::hole(4), TestSpan::given(1, 0, 10)];
    let mut batch = build_batch(&pieces, SpanOutput::None, &mut PageBook::scattered(32));
    // Some tokens are of another type, whose rows come after those of the first.
    batch.tokens.iter_mut().step_by(3).for_each(|token| *token = typed_token(*token, 1));
    rig.begin(batch);
    let mut x = rig.in_out(&noise(17, 17 * width));
    rig.backend.embed_positions(&table, offset, positions, &mut x);
    rig.read(&x, 17 * width, format_args!("{ty} positions from {offset} on, width {width}"))
}

/// Tests sums and factors: a plain sum is rounded once, one with a factor at most twice. An all-reduce with
/// one rank changes nothing.
pub fn sums<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let mut rig = Rig::new(make(), limits(32));
    for (case, (rows, width)) in sizes().enumerate() {
        rig.begin_rows(rows);
        let (n, factor) = (rows * width, [1.0, -0.37, 22.5][case % 3]);
        let (a, b) = (noise(4, n), noise(5, n));
        let (mut x, y) = (rig.in_out(&a), rig.input(&b));
        rig.backend.add(rows, width, factor, &mut x, &y);
        let what = format_args!("add of {rows} rows of {width}, times {factor}");
        let want: Vec<f32> = a.iter().zip(&b).map(|(a, b)| a + factor * b).collect();
        let got = rig.read(&x, n, what);
        let bound = if factor == 1.0 { 0.0 } else { bounds.elementwise };
        assert_close(what, &got, &want, bound, |i| a[i].abs() + (factor * b[i]).abs());
        rig.backend.all_reduce(rows, width, &mut x);
        let what = format_args!("reduce of {rows} rows of {width}");
        assert_same(what, &rig.read(&x, n, what), &got, 0.0);
        rig.backend.scale(rows, width, factor, &mut x);
        let what = format_args!("scale of {rows} rows of {width} by {factor}");
        let want: Vec<f32> = got.iter().map(|x| x * factor).collect();
        assert_same(what, &rig.read(&x, n, what), &want, 0.0);
    }
}

/// Tests softcaps and bounds from far below the cap to far above it, and row gates.
pub fn caps_and_gates<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let (device, oracle) = &mut rigs(make, 32);
    for (case, (rows, width)) in sizes().enumerate() {
        let cap = [30.0, 1.0, 0.7][case % 3];
        let x = with_extremes(18, rows * width, [1.0, 100.0, 1e-3][case % 3], case);
        let what = format_args!("{rows} rows of {width} capped at {cap}");
        let [got, want] = [softcap_on(device, rows, cap, &x), softcap_on(oracle, rows, cap, &x)];
        assert_close(what, &got, &want, bounds.elementwise, |i| want[i].abs());

        let what = format_args!("{rows} rows of {width} clamped to {cap}");
        let [got, want] = [clamped_on(device, rows, cap, &x), clamped_on(oracle, rows, cap, &x)];
        assert_same(what, &got, &want, 0.0);

        let gate = with_extremes(19, rows, [1.0, 10.0, 80.0][case % 3], case);
        let what = format_args!("{rows} rows of {width} gated");
        let [got, want] = [gated_on(device, &gate, &x), gated_on(oracle, &gate, &x)];
        assert_close(what, &got, &want, bounds.elementwise, |i| want[i].abs());
    }
}

fn softcap_on<B: Backend>(rig: &mut Rig<B>, rows: usize, cap: f32, x: &[f32]) -> Vec<f32> {
    rig.begin_rows(rows);
    let mut buf = rig.in_out(x);
    rig.backend.softcap(rows, x.len() / rows, cap, &mut buf);
    rig.read(&buf, x.len(), format_args!("softcap {cap}"))
}

fn clamped_on<B: Backend>(rig: &mut Rig<B>, rows: usize, bound: f32, x: &[f32]) -> Vec<f32> {
    rig.begin_rows(rows);
    let mut buf = rig.in_out(x);
    rig.backend.clamp(rows, x.len() / rows, bound, &mut buf);
    rig.read(&buf, x.len(), format_args!("clamp {bound}"))
}

fn gated_on<B: Backend>(rig: &mut Rig<B>, gate: &[f32], x: &[f32]) -> Vec<f32> {
    rig.begin_rows(gate.len());
    let (gates, mut buf) = (rig.input(gate), rig.in_out(x));
    rig.backend.gate_rows(gate.len(), x.len() / gate.len(), &gates, &mut buf);
    rig.read(&buf, x.len(), format_args!("{} gated rows", gate.len()))
}

/// All activation functions.
pub(super) const ACTIVATIONS: [Activation; 9] = [
    Activation::Relu,
    Activation::SquaredRelu,
    Activation::Gelu,
    Activation::GeluTanh,
    Activation::QuickGelu,
    Activation::Silu,
    Activation::Tanh,
    Activation::ClampedSwiglu,
    Activation::Xielu(Xielu { positive: 0.8, negative: 1.1, linear: 0.5, bound: -1e-4 }),
];

/// Tests every activation function, with and without a factor, far into the tails.
pub fn activate<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let (device, oracle) = &mut rigs(make, 32);
    for act in ACTIVATIONS {
        for (case, (rows, width)) in sizes().enumerate() {
            let gate = with_extremes(6, rows * width, [1.0, 10.0, 60.0][case % 3], case);
            let up = (case % 2 == 0).then(|| scaled(7, rows * width, [1.0, 9.0][case / 2 % 2]));
            let got = activate_on(device, rows, act, &gate, up.as_deref());
            let want = activate_on(oracle, rows, act, &gate, up.as_deref());
            let what = format_args!("{act:?} of {rows} rows of {width}, factor {}", up.is_some());
            assert_close(what, &got, &want, bounds.elementwise, |i| {
                error_scale(act, gate[i], up.as_ref().map_or(1.0, |up| up[i]), want[i])
            });
        }
    }
}

/// Returns the magnitude that the bound of an activation is relative to. It is the result itself; but if e is
/// raised to a computed power y, the rounding error of y counts |y| times. A power that overflows gives zero
/// instead of a result below 1e-35. Terms that cancel count each, times the factor `up`.
fn error_scale(act: Activation, x: f32, up: f32, result: f32) -> f32 {
    let power = match act {
        Activation::Relu | Activation::SquaredRelu | Activation::Silu | Activation::Tanh => 0.0,
        Activation::Gelu => x * x / 2.0,
        Activation::GeluTanh => 1.6 * x * (1.0 + 0.0448 * x * x),
        Activation::QuickGelu => 1.702 * x,
        Activation::ClampedSwiglu => 1.702 * x.min(Activation::LIMIT),
        Activation::Xielu(Xielu { positive, negative, linear, bound }) => {
            let curved = if x > 0.0 { positive * x * x } else { negative * (x.abs() + bound.abs()) };
            return (curved + linear * x.abs()) * up.abs();
        }
    };
    let error = if result == 0.0 { 0.0 } else { power.abs() };
    result.abs() * (1.0 + error) + 1e-29
}

/// Returns numbers of magnitude up to `factor`, the first ones extreme.
fn with_extremes(tag: u32, n: usize, factor: f32, case: usize) -> Vec<f32> {
    let mut values = scaled(tag, n, factor);
    let edges = [-1000.0, 1000.0, 0.0, -88.0, 88.0, -0.0, -104.0, -5.5, 1e-20, -1e-4];
    for (value, edge) in values.iter_mut().zip(edges.into_iter().skip(case % edges.len())) {
        *value = edge;
    }
    values
}

pub(super) fn activate_on<B: Backend>(
    rig: &mut Rig<B>,
    rows: usize,
    act: Activation,
    gate: &[f32],
    up: Option<&[f32]>,
) -> Vec<f32> {
    rig.begin_rows(rows);
    let width = gate.len() / rows;
    let mut x = rig.in_out(gate);
    let up = up.map(|up| rig.input(up));
    rig.backend.activate(rows, width, act, &mut x, up.as_ref());
    rig.read(&x, gate.len(), format_args!("{act:?} of {rows} rows of {width}"))
}
