//! Approximate functions (PTX ISA, 9.7.3): computed in double precision and rounded once, which is within
//! every documented error. Hardware differs in the last bits.

use super::single::{bits, flush};
use super::{NarrowFn, narrow};

#[inline(always)]
fn f(x: u32) -> f32 {
    f32::from_bits(x)
}

#[inline(always)]
fn d(x: u32) -> f64 {
    f64::from(f32::from_bits(x))
}

#[inline(always)]
fn z(x: u32) -> f64 {
    f64::from(flush(f32::from_bits(x)))
}

/// `a / b` as `div.approx` computes it: divisors above 2^126 give 0, or NaN for infinite `a`.
#[inline(always)]
fn quotient(a: f32, b: f32) -> f32 {
    if b.abs() > 2f32.powi(126) && b.is_finite() {
        return if a.is_infinite() { f32::NAN } else { a * 0.0 * b.signum() };
    }
    (f64::from(a) / f64::from(b)) as f32
}

/// The function of `ex2`, `lg2`, `rcp`, `rsqrt`, `sqrt`, `sin`, `cos`, `tanh` or `div`, with `.approx`.
pub(crate) fn function(op: &str, ftz: bool) -> Option<NarrowFn> {
    Some(match (op, ftz) {
        ("ex2", false) => narrow!(|a| bits(d(a).exp2() as f32)),
        ("ex2", true) => narrow!(|a| bits(flush(z(a).exp2() as f32))),
        ("lg2", false) => narrow!(|a| bits(d(a).log2() as f32)),
        ("lg2", true) => narrow!(|a| bits(flush(z(a).log2() as f32))),
        ("rcp", false) => narrow!(|a| bits((1.0 / d(a)) as f32)),
        ("rcp", true) => narrow!(|a| bits(flush((1.0 / z(a)) as f32))),
        ("rsqrt", false) => narrow!(|a| bits((1.0 / d(a).sqrt()) as f32)),
        ("rsqrt", true) => narrow!(|a| bits(flush((1.0 / z(a).sqrt()) as f32))),
        ("sqrt", false) => narrow!(|a| bits(d(a).sqrt() as f32)),
        ("sqrt", true) => narrow!(|a| bits(flush(z(a).sqrt() as f32))),
        ("sin", false) => narrow!(|a| bits(d(a).sin() as f32)),
        ("sin", true) => narrow!(|a| bits(flush(z(a).sin() as f32))),
        ("cos", false) => narrow!(|a| bits(d(a).cos() as f32)),
        ("cos", true) => narrow!(|a| bits(flush(z(a).cos() as f32))),
        ("tanh", false) => narrow!(|a| bits(d(a).tanh() as f32)),
        ("div", false) => narrow!(|a, b| bits(quotient(f(a), f(b)))),
        ("div", true) => narrow!(|a, b| bits(flush(quotient(flush(f(a)), flush(f(b)))))),
        ("div.full", false) => narrow!(|a, b| bits((d(a) / d(b)) as f32)),
        ("div.full", true) => narrow!(|a, b| bits(flush((z(a) / z(b)) as f32))),
        _ => return None,
    })
}
