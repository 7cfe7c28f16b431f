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

/// One GEMM: input · wᵀ, plus `bias` if given, stored by `epilogue`, with n outputs of all weights together.
pub struct Gemm<'a, Buf> {
    /// Weight (n, k), or the first rows of a weight that is divided.
    pub w: &'a Weight<Buf>,
    /// The rows of a divided weight that follow, in order: each part has the next outputs.
    pub rest: &'a [Weight<Buf>],
    /// Bias (outputs of all parts), F32.
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
        Gemm { w: self.w, rest: self.rest, bias: self.bias, epilogue }
    }
}

/// The columns of a result (rows, `of`) that are written: as many as there are outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutputColumns {
    /// The first of these columns.
    pub first: usize,
    /// Number of all columns of the result.
    pub of: usize,
}

impl OutputColumns {
    /// Returns all of so many columns.
    pub fn all(columns: usize) -> OutputColumns {
        OutputColumns { first: 0, of: columns }
    }
}

/// Returns the weights of a GEMM, each with the columns of the result that have its outputs.
pub fn weights_of<'a, Buf>(
    w: &'a Weight<Buf>,
    rest: &'a [Weight<Buf>],
) -> impl Iterator<Item = (&'a Weight<Buf>, OutputColumns)> {
    let of = w.n + rest.iter().map(|w| w.n).sum::<usize>();
    let mut first = 0;
    std::iter::once(w).chain(rest).map(move |w| {
        let columns = OutputColumns { first, of };
        first += w.n;
        (w, columns)
    })
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
    for gemm in gemms {
        let mut width = 0;
        let y = match &mut gemm.epilogue {
            Epilogue::Set(y) | Epilogue::Add { buffer: y, .. } => &mut **y,
        };
        for (w, columns) in weights_of(gemm.w, gemm.rest) {
            b.matmul_to(rows, (w, columns), gemm.bias, x, y);
            width = columns.of;
        }
        if let Epilogue::Add { x: sum, buffer } = &mut gemm.epilogue {
            b.add(rows, width, 1.0, sum, buffer);
        }
    }
}
