//! Rotary position embedding: the angles of a step, computed once for all layers, and the rotation of heads
//! by them.
//!
//! Invariant: the angles of a row depend only on its position and on the reserved length of its sequence.

use super::pool::ThreadPool;
use crate::backend::{DynamicNtk, Rope, RopeStyle};
use crate::batch::StepState;
use crate::host::HostBuf;

/// Writes the cosine and sine of each row's pairs to angles (rows, dims / 2, 2).
pub fn angles(pool: &mut ThreadPool, step: &StepState, rope: &Rope<HostBuf>, angles: &mut [f32]) {
    let dims = rope.dims;
    pool.for_rows(angles, dims, |row, angles| {
        let row = &step.rows()[row];
        let reserved = step.span_of(row).reserved;
        match rope.dynamic_ntk.filter(|stretch| reserved > stretch.context) {
            Some(stretch) => compute_angles(stretch.base(dims, reserved), row.position, angles),
            None => {
                assert!(row.position < rope.positions, "position {} has no angle", row.position);
                angles.copy_from_slice(&rope.table(reserved).f32()[row.position * dims..][..dims]);
            }
        }
    });
}

/// Computes the angles at a position for a base without a precomputed table.
fn compute_angles(base: f64, position: usize, angles: &mut [f32]) {
    let dims = angles.len();
    for (pair, cos_sin) in angles.as_chunks_mut::<2>().0.iter_mut().enumerate() {
        let angle = DynamicNtk::angle(base, dims, pair, position);
        *cos_sin = [angle.cos() as f32, angle.sin() as f32];
    }
}

/// Rotates the first `rope.dims` dimensions of each head of x (rows, heads, head_dim) by the `angles` of its
/// row.
pub fn rope(
    pool: &mut ThreadPool,
    rope: &Rope<HostBuf>,
    angles: &[f32],
    heads: usize,
    head_dim: usize,
    x: &mut [f32],
) {
    assert!(rope.dims <= head_dim && rope.dims.is_multiple_of(2), "{} of {head_dim} dims", rope.dims);
    pool.for_rows(x, heads * head_dim, |row, x| {
        let angles = &angles[row * rope.dims..][..rope.dims];
        for head in x.chunks_exact_mut(head_dim) {
            rotate(rope.style, angles, &mut head[..rope.dims]);
        }
    });
}

/// Rotates one head; `angles` holds (cosine, sine) for each of its pairs.
fn rotate(style: RopeStyle, angles: &[f32], head: &mut [f32]) {
    let (angles, _) = angles.as_chunks::<2>();
    match style {
        RopeStyle::NeoX => {
            let (first, second) = head.split_at_mut(head.len() / 2);
            for ((a, b), [cos, sin]) in first.iter_mut().zip(second).zip(angles) {
                (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
            }
        }
        RopeStyle::GptJ => {
            for ([a, b], [cos, sin]) in head.as_chunks_mut::<2>().0.iter_mut().zip(angles) {
                (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
            }
        }
    }
}
