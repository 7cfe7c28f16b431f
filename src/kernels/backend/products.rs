//! Several products of the same rows, with what comes right before and behind them.
//!
//! Invariant: what is asked for together gives what the operations give one by one.

use super::{Activation, Backend, Norm, Weight};

/// The rows (rows, in) that weights are multiplied with.
pub enum Factor<'a, Buf> {
    /// As they are.
    Given(&'a Buf),
    /// norm(x). `room` (rows, in) may be written to.
    Normed { norm: &'a Norm<Buf>, x: &'a Buf, room: &'a mut Buf },
    /// act(gate) * up, or without `up` act(gate). `gate` may be written to.
    Activated { act: Activation, gate: &'a mut Buf, up: Option<&'a Buf> },
}

/// One of the products.
pub struct Product<'a, Buf> {
    /// (out, in)
    pub w: &'a Weight<Buf>,
    /// (out)
    pub bias: Option<&'a Buf>,
    pub to: To<'a, Buf>,
}

/// What becomes of a product's result (rows, out).
pub enum To<'a, Buf> {
    /// y = it.
    Set(&'a mut Buf),
    /// x += it. `room` (rows, out) may be written to.
    Add { x: &'a mut Buf, room: &'a mut Buf },
}

impl<'a, Buf> Factor<'a, Buf> {
    /// The rows (rows, width), in memory.
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

/// [`Backend::products`], by the operations that each device has.
pub(crate) fn one_by_one<B: Backend + ?Sized>(
    b: &mut B,
    rows: usize,
    factor: Factor<B::Buf>,
    products: &mut [Product<B::Buf>],
) {
    let Some(inp) = products.first().map(|product| product.w.inp) else { return };
    let x = factor.made(b, rows, inp);
    for Product { w, bias, to } in products {
        match to {
            To::Set(y) => b.matmul(rows, w, *bias, x, y),
            To::Add { x: sum, room } => {
                b.matmul(rows, w, *bias, x, room);
                b.add(rows, w.out, 1.0, sum, room);
            }
        }
    }
}
