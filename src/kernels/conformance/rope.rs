//! Tests of RoPE, against the reference backend.

use super::Bounds;
use super::inputs::*;
use super::memo::ORACLE_VALUES;
use super::rig::*;
use super::spans::*;
use mainstem_kernels::backend::{Backend, DynamicNtk, Rope, RopeStyle};
use mainstem_kernels::batch::SpanOutput;

/// Tests the angles of one table, of tables by reserved length, and of dynamic NTK scaling, for rows of
/// several sequences at any position.
pub fn angles<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let (device, oracle) = &mut rigs(make, 32);
    for dims in [2, 10, 64] {
        for lengths in [LengthDependence::Independent, LengthDependence::Tables, LengthDependence::DynamicNtk]
        {
            if dims == 2 && lengths == LengthDependence::DynamicNtk {
                continue; // A single pair has no base to scale.
            }
            let (got, want) = (angles_on(device, dims, lengths), angles_on(oracle, dims, lengths));
            let what = format_args!("angles of {dims} dims, {lengths:?}");
            assert_close(what, &got, &want, bounds.elementwise, |_| 1.0);
        }
    }
}

/// The dependence of angles on the reserved length of a sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum LengthDependence {
    /// None.
    Independent,
    /// Tables for up to 200 reserved positions and for more.
    Tables,
    /// Dynamic NTK scaling for more than 120 reserved positions.
    DynamicNtk,
}

/// Returns RoPE with the given dependence on the reserved length.
pub(super) fn rope_with_dependence<B: Backend>(
    rig: &mut Rig<B>,
    dims: usize,
    style: RopeStyle,
    lengths: LengthDependence,
) -> Rope<B::Buf> {
    let stretch = DynamicNtk { theta: 10_000.0, factor: 2.0, context: 120 };
    match lengths {
        LengthDependence::Independent => rig.rope(dims, style),
        LengthDependence::Tables => rig.rope_with_tables(dims, style, &[(200, 100.0), (400, 5e4)]),
        LengthDependence::DynamicNtk => Rope { dynamic_ntk: Some(stretch), ..rig.rope(dims, style) },
    }
}

/// Returns spans of sequences with every reserved length.
fn pieces() -> [TestSpan; 6] {
    let encoder_span = TestSpan::encoder_input(1);
    let (first, second) = (TestSpan::given(2, 100, 5), TestSpan::last(0, 511));
    [encoder_span, first, second, TestSpan::hole(4), TestSpan::given(1, 0, 10), TestSpan::given(3, 300, 5)]
}

fn angles_on<B: Backend>(rig: &mut Rig<B>, dims: usize, lengths: LengthDependence) -> Vec<f32> {
    let rope = rope_with_dependence(rig, dims, RopeStyle::NeoX, lengths);
    rig.begin(build_batch(&pieces(), SpanOutput::None, &mut PageBook::scattered(32)));
    let mut angles = rig.output(22 * dims);
    rig.backend.rope_angles(&rope, &mut angles);
    rig.read(&angles, 22 * dims, format_args!("angles of {dims} dims, {lengths:?}"))
}

/// Tests rotations of both styles, of whole and partial heads, for rows of several sequences at any position.
pub fn rope<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let (device, oracle) = &mut rigs(make, 32);
    for head_dim in HEAD_DIMS {
        for heads in [1, 3, 8] {
            for dims in [2, head_dim / 4 * 2, head_dim] {
                for style in [RopeStyle::NeoX, RopeStyle::GptJ] {
                    let case = RopeCase { head_dim, heads, dims, style };
                    let (x, got) = case.run(device);
                    let want = ORACLE_VALUES.get(oracle.memo_key(case), || case.run(oracle).1);
                    assert_close(format_args!("{case:?}"), &got, &want, bounds.elementwise, |_| 2.0);
                    let rest = |values: &[f32]| -> Vec<f32> {
                        values.chunks_exact(head_dim).flat_map(|head| &head[dims..]).copied().collect()
                    };
                    assert_same(format_args!("{case:?}, dims not rotated"), &rest(&got), &rest(&x), 0.0);
                }
            }
        }
    }
}

/// A test case.
#[derive(Clone, Copy, Debug)]
struct RopeCase {
    head_dim: usize,
    heads: usize,
    dims: usize,
    style: RopeStyle,
}

impl RopeCase {
    /// Applies RoPE; returns the input and the output.
    fn run<B: Backend>(&self, rig: &mut Rig<B>) -> (Vec<f32>, Vec<f32>) {
        rig.begin(build_batch(&pieces(), SpanOutput::None, &mut PageBook::scattered(32)));
        let x = noise(10, 22 * self.heads * self.head_dim);
        let rope = rig.rope(self.dims, self.style);
        let (mut angles, mut buf) = (rig.output(22 * self.dims), rig.in_out(&x));
        rig.backend.rope_angles(&rope, &mut angles);
        rig.backend.rope(&rope, &angles, self.heads, self.head_dim, &mut buf);
        let got = rig.read(&buf, x.len(), format_args!("{self:?}"));
        (x, got)
    }
}
