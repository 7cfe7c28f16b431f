//! Several GEMMs with the same input, fused with the operation before them and the addition after them.
//!
//! Invariant: a fused call gives the results of the separate operations.

use super::{Activation, Backend, Norm, Weight};

/// The input (rows, k) of GEMMs, with the operation that produces it.
pub enum Factor<'a, Buf> {
    /// The rows as they are.
    Given(&'a Buf),
    /// The rows norm(x). `buffer` (rows, k) may be overwritten.
    Normed { norm: &'a Norm<Buf>, x: &'a Buf, room: &'a mut Buf },
    /// The rows act(gate) * up, or act(gate) without `up`. `gate` may be overwritten.
    Activated { act: Activation, gate: &'a mut Buf, up: Option<&'a Buf> },
}

/// One GEMM: input · wᵀ, plus `bias` if given, stored by `epilogue`.
pub struct Product<'a, Buf> {
    /// Weight (n, k).
    pub w: &'a Weight<Buf>,
    /// Bias (n), F32.
    pub bias: Option<&'a Buf>,
    pub to: To<'a, Buf>,
}

/// The epilogue of a GEMM: the destination of its result (rows, n).
pub enum To<'a, Buf> {
    /// Overwrites y (rows, n).
    Set(&'a mut Buf),
    /// Adds to x (rows, n). `buffer` (rows, n) may be overwritten.
    Add { x: &'a mut Buf, room: &'a mut Buf },
}

impl<'a, Buf> Factor<'a, Buf> {
    /// Computes the input (rows, width) and returns the buffer that holds it.
    pub fn made<B: Backend<Buf = Buf> + ?Sized>(self, b: &mut B, rows: usize, width: usize) -> &'a Buf {
        match self {
            Factor::Given(x) => x,
            Factor::Normed { norm, x, room } => {
                b.norm(rows, norm, x, room);
                room
            }
            Factor::Activated { act, gate, up } => {
                b.activate(rows, width, act, gate, up);
                gate
            }
        }
    }
}

/// Implements [`Backend::gemms`] by the separate operations.
pub(crate) fn one_by_one<B: Backend + ?Sized>(
    b: &mut B,
    rows: usize,
    input: Factor<B::Buf>,
    gemms: &mut [Product<B::Buf>],
) {
    let Some(k) = gemms.first().map(|gemm| gemm.w.inp) else { return };
    let x = input.made(b, rows, k);
    for Product { w, bias, to } in gemms {
        match to {
            To::Set(y) => b.matmul(rows, w, *bias, x, y),
            To::Add { x: sum, room } => {
                b.matmul(rows, w, *bias, x, room);
                b.add(rows, w.out, 1.0, sum, room);
            }
        }
    }
}
