//! GEMMs of linear layers.
//!
//! Invariant: linear layers with the same input are one operation of the backend.

use super::weights::Linear;
use mainstem_kernels::{Backend, Epilogue, Gemm, InputOperand};

/// A weight, and the epilogue of its GEMM.
pub type GemmTerm<'a, Buf> = (&'a Linear<Buf>, Epilogue<&'a mut Buf>);

/// Runs several GEMMs with the same input.
pub fn run_gemms<B: Backend, const N: usize>(
    b: &mut B,
    rows: usize,
    input: InputOperand<B::Buf>,
    terms: [GemmTerm<B::Buf>; N],
) {
    let mut gemms = terms.map(|(Linear { weight, rest, bias }, epilogue)| Gemm {
        w: weight,
        rest,
        bias: bias.as_ref(),
        epilogue,
    });
    b.gemms(rows, input, &mut gemms);
}
