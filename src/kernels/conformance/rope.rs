//! Tests of RoPE, against the reference backend.

use super::Bounds;
use super::answers::NUMBERS;
use super::inputs::*;
use super::pieces::*;
use super::rig::*;
use crate::backend::{Backend, Rope, RopeStretch, RopeStyle};
use crate::batch::Want;

/// Tests the angles of one table, of tables by reserved length, and of dynamic NTK scaling, for rows of
/// several sequences at any position.
pub fn angles<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let (device, oracle) = &mut rigs(make, 32);
    for dims in [2, 10, 64] {
        for lengths in [Lengths::One, Lengths::Some, Lengths::Stretched] {
            if dims == 2 && lengths == Lengths::Stretched {
                continue; // A single pair has no base to scale.
            }
            let (got, want) = (angles_on(device, dims, lengths), angles_on(oracle, dims, lengths));
            let what = format_args!("angles of {dims} dims, {lengths:?}");
            close(what, &got, &want, bounds.elementwise, |_| 1.0);
        }
    }
}

/// The dependence of angles on the reserved length of a sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Lengths {
    /// None.
    One,
    /// Tables for up to 200 reserved positions and for more.
    Some,
    /// Dynamic NTK scaling for more than 120 reserved positions.
    Stretched,
}

/// Returns RoPE with the given dependence on the reserved length.
pub(super) fn rope_by<B: Backend>(
    rig: &mut Rig<B>,
    dims: usize,
    style: RopeStyle,
    lengths: Lengths,
) -> Rope<B::Buf> {
    let stretch = RopeStretch { theta: 10_000.0, factor: 2.0, context: 120 };
    match lengths {
        Lengths::One => rig.rope(dims, style),
        Lengths::Some => rig.rope_of(dims, style, &[(200, 100.0), (400, 5e4)]),
        Lengths::Stretched => Rope { stretch: Some(stretch), ..rig.rope(dims, style) },
    }
}

/// Returns spans of sequences with every reserved length.
fn pieces() -> [Piece; 6] {
    let source = Piece::source(1);
    let (first, second) = (Piece::given(2, 100, 5), Piece::last(0, 511));
    [source, first, second, Piece::sink(4), Piece::given(1, 0, 10), Piece::given(3, 300, 5)]
}

fn angles_on<B: Backend>(rig: &mut Rig<B>, dims: usize, lengths: Lengths) -> Vec<f32> {
    let rope = rope_by(rig, dims, RopeStyle::Halves, lengths);
    rig.begin(batch_of(&pieces(), Want::None, &mut Book::scattered(32)));
    let mut angles = rig.output(22 * dims);
    rig.backend.angles(&rope, &mut angles);
    rig.read(&angles, 22 * dims, format_args!("angles of {dims} dims, {lengths:?}"))
}

/// Tests rotations of both styles, of whole and partial heads, for rows of several sequences at any position.
pub fn rope<B: Backend>(make: &impl Fn() -> B, bounds: &Bounds) {
    let (device, oracle) = &mut rigs(make, 32);
    for head_dim in HEAD_DIMS {
        for heads in [1, 3, 8] {
            for dims in [2, head_dim / 4 * 2, head_dim] {
                for style in [RopeStyle::Halves, RopeStyle::Interleaved] {
                    let case = RopeCase { head_dim, heads, dims, style };
                    let (x, got) = case.on(device);
                    let want = NUMBERS.get(oracle.question(case), || case.on(oracle).1);
                    close(format_args!("{case:?}"), &got, &want, bounds.elementwise, |_| 2.0);
                    let rest = |values: &[f32]| -> Vec<f32> {
                        values.chunks_exact(head_dim).flat_map(|head| &head[dims..]).copied().collect()
                    };
                    same(format_args!("{case:?}, dims not rotated"), &rest(&got), &rest(&x), 0.0);
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
    fn on<B: Backend>(&self, rig: &mut Rig<B>) -> (Vec<f32>, Vec<f32>) {
        rig.begin(batch_of(&pieces(), Want::None, &mut Book::scattered(32)));
        let x = noise(10, 22 * self.heads * self.head_dim);
        let rope = rig.rope(self.dims, self.style);
        let (mut angles, mut buf) = (rig.output(22 * self.dims), rig.put_mut(&x));
        rig.backend.angles(&rope, &mut angles);
        rig.backend.rope(&rope, &angles, self.heads, self.head_dim, &mut buf);
        let got = rig.read(&buf, x.len(), format_args!("{self:?}"));
        (x, got)
    }
}
