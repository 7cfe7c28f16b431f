//! Several GEMMs with the same input, fused with the operation before them and the addition after them.
//!
//! Invariant: a fused call gives the results of the separate operations.

use super::{Activation, Backend, Norm, Weight};

/// The input (rows, k) of GEMMs, with the operation that produces it.
pub enum InputOperand<'a, Buf> {
    /// The rows as they are.
    Given(&'a Buf),
    /// The rows norm(x). `buffer` (rows, k) may be overwritten.
    Normed { norm: &'a Norm<Buf>, x: &'a Buf, buffer: &'a mut Buf },
    /// The rows act(gate) * up, or act(gate) without `up`. `gate` may be overwritten.
    Activated { act: Activation, gate: &'a mut Buf, up: Option<&'a Buf> },
}

/// One GEMM: input · wᵀ, plus `bias` if given, stored by `epilogue`.
pub struct Gemm<'a, Buf> {
    /// Weight (n, k).
    pub w: &'a Weight<Buf>,
    /// Bias (n), F32.
    pub bias: Option<&'a Buf>,
    pub epilogue: Epilogue<&'a mut Buf>,
}

/// The epilogue of a GEMM: the destination of its result (rows, n), of type `Y`, and what happens to the
/// values there.
#[derive(Clone, Copy)]
pub enum Epilogue<Y> {
    /// Overwrites y (rows, n).
    Set(Y),
    /// Adds to x (rows, n). `buffer` (rows, n) may be overwritten.
    Add { x: Y, buffer: Y },
}

impl<Y> Epilogue<Y> {
    /// Returns the epilogue with destinations of another type.
    pub fn map<Z>(self, mut convert: impl FnMut(Y) -> Z) -> Epilogue<Z> {
        match self {
            Epilogue::Set(y) => Epilogue::Set(convert(y)),
            Epilogue::Add { x, buffer } => Epilogue::Add { x: convert(x), buffer: convert(buffer) },
        }
    }
}

impl<Buf> Gemm<'_, Buf> {
    /// Borrows the GEMM with its destination.
    pub fn reborrow(&mut self) -> Gemm<'_, Buf> {
        let epilogue = match &mut self.epilogue {
            Epilogue::Set(y) => Epilogue::Set(&mut **y),
            Epilogue::Add { x, buffer } => Epilogue::Add { x: &mut **x, buffer: &mut **buffer },
        };
        Gemm { w: self.w, bias: self.bias, epilogue }
    }
}

impl<'a, Buf> InputOperand<'a, Buf> {
    /// Computes the input (rows, width) and returns the buffer that holds it.
    pub fn materialize<B: Backend<Buf = Buf> + ?Sized>(
        self,
        b: &mut B,
        rows: usize,
        width: usize,
    ) -> &'a Buf {
        match self {
            InputOperand::Given(x) => x,
            InputOperand::Normed { norm, x, buffer: room } => {
                b.norm(rows, norm, x, room);
                room
            }
            InputOperand::Activated { act, gate, up } => {
                b.activate(rows, width, act, gate, up);
                gate
            }
        }
    }
}

/// Implements [`Backend::gemms`] by the separate operations.
pub fn run_gemms_separately<B: Backend + ?Sized>(
    b: &mut B,
    rows: usize,
    input: InputOperand<B::Buf>,
    gemms: &mut [Gemm<B::Buf>],
) {
    let Some(k) = gemms.first().map(|gemm| gemm.w.k) else { return };
    let x = input.materialize(b, rows, k);
    for Gemm { w, bias, epilogue: to } in gemms {
        match to {
            Epilogue::Set(y) => b.matmul(rows, w, *bias, x, y),
            Epilogue::Add { x: sum, buffer: room } => {
                b.matmul(rows, w, *bias, x, room);
                b.add(rows, w.n, 1.0, sum, room);
            }
        }
    }
}
