//! Arithmetic in single precision (PTX ISA, 9.7.3): rounding modes, `.ftz`, `.sat`. Results that are NaN
//! are 0x7fffffff.

use super::rounding::{Rounding, to_single, two_sum};
use super::{NarrowFn, NarrowTest, Plane, Relation, by_relation, narrow, test};

/// NaN as instructions make it.
pub(crate) const NAN: u32 = 0x7fff_ffff;

/// Subnormal numbers become zeros of the same sign.
#[inline(always)]
pub(crate) fn flush(x: f32) -> f32 {
    if x.is_subnormal() { f32::from_bits(x.to_bits() & 0x8000_0000) } else { x }
}

/// The bits of a result.
#[inline(always)]
pub(crate) fn bits(x: f32) -> u32 {
    if x.is_nan() { NAN } else { x.to_bits() }
}

/// A value between 0 and 1; NaN becomes 0.
#[inline(always)]
pub(crate) fn saturate(x: f32) -> f32 {
    if x > 0.0 { x.min(1.0) } else { 0.0 }
}

/// An operation, by its result to nearest and by its exact result: a sum of two doubles, or a double and
/// its error.
trait Operation {
    fn nearest(a: f32, b: f32, c: f32) -> f32;
    fn exact(a: f64, b: f64, c: f64) -> (f64, f64);
    /// Whether an exact zero is a difference, which is -0 when rounded down.
    fn cancelled(_: f32, _: f32, _: f32) -> bool {
        false
    }
}

struct Add;
impl Operation for Add {
    fn nearest(a: f32, b: f32, _: f32) -> f32 {
        a + b
    }
    fn exact(a: f64, b: f64, _: f64) -> (f64, f64) {
        two_sum(a, b)
    }
    fn cancelled(a: f32, b: f32, _: f32) -> bool {
        a == -b && (a.is_sign_negative() != b.is_sign_negative())
    }
}

struct Sub;
impl Operation for Sub {
    fn nearest(a: f32, b: f32, _: f32) -> f32 {
        a - b
    }
    fn exact(a: f64, b: f64, _: f64) -> (f64, f64) {
        two_sum(a, -b)
    }
    fn cancelled(a: f32, b: f32, _: f32) -> bool {
        Add::cancelled(a, -b, 0.0)
    }
}

struct Mul;
impl Operation for Mul {
    fn nearest(a: f32, b: f32, _: f32) -> f32 {
        a * b
    }
    fn exact(a: f64, b: f64, _: f64) -> (f64, f64) {
        (a * b, 0.0)
    }
}

struct Fma;
impl Operation for Fma {
    fn nearest(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
    fn exact(a: f64, b: f64, c: f64) -> (f64, f64) {
        two_sum(a * b, c)
    }
    fn cancelled(a: f32, b: f32, c: f32) -> bool {
        let negative = a.is_sign_negative() != b.is_sign_negative();
        f64::from(a) * f64::from(b) == -f64::from(c) && negative != c.is_sign_negative()
    }
}

struct Div;
impl Operation for Div {
    fn nearest(a: f32, b: f32, _: f32) -> f32 {
        a / b
    }
    fn exact(a: f64, b: f64, _: f64) -> (f64, f64) {
        let q = a / b;
        let rest = (-q).mul_add(b, a);
        (q, if rest.is_nan() { 0.0 } else { rest / b })
    }
}

struct Sqrt;
impl Operation for Sqrt {
    fn nearest(a: f32, _: f32, _: f32) -> f32 {
        a.sqrt()
    }
    fn exact(a: f64, _: f64, _: f64) -> (f64, f64) {
        let s = a.sqrt();
        let rest = (-s).mul_add(s, a);
        (s, if rest.is_nan() { 0.0 } else { rest })
    }
}

struct Rcp;
impl Operation for Rcp {
    fn nearest(a: f32, _: f32, _: f32) -> f32 {
        1.0 / a
    }
    fn exact(a: f64, b: f64, c: f64) -> (f64, f64) {
        let _ = b;
        Div::exact(1.0, a, c)
    }
}

const NEAREST: u8 = 0;
const ZERO: u8 = 1;
const DOWN: u8 = 2;
const UP: u8 = 3;

#[inline(always)]
fn one<O: Operation, const R: u8, const FTZ: bool, const SAT: bool>(a: u32, b: u32, c: u32) -> u32 {
    let prepare = |x| if FTZ { flush(f32::from_bits(x)) } else { f32::from_bits(x) };
    let (a, b, c) = (prepare(a), prepare(b), prepare(c));
    let x = if R == NEAREST {
        O::nearest(a, b, c)
    } else {
        let (s, e) = O::exact(f64::from(a), f64::from(b), f64::from(c));
        let mode = [Rounding::Nearest, Rounding::Zero, Rounding::Down, Rounding::Up][R as usize];
        if R == DOWN && s == 0.0 && O::cancelled(a, b, c) { -0.0 } else { to_single(s, e, mode) }
    };
    let x = if FTZ { flush(x) } else { x };
    bits(if SAT { saturate(x) } else { x })
}

fn all<O: Operation, const R: u8, const FTZ: bool, const SAT: bool>(s: &[&Plane; 4], o: &mut Plane) {
    for l in 0..32 {
        o[l] = one::<O, R, FTZ, SAT>(s[0][l], s[1][l], s[2][l]);
    }
}

fn pick<O: Operation>(rounding: Rounding, ftz: bool, sat: bool) -> Option<NarrowFn> {
    Some(match (rounding, ftz, sat) {
        (Rounding::Nearest, false, false) => all::<O, NEAREST, false, false>,
        (Rounding::Nearest, false, true) => all::<O, NEAREST, false, true>,
        (Rounding::Nearest, true, false) => all::<O, NEAREST, true, false>,
        (Rounding::Nearest, true, true) => all::<O, NEAREST, true, true>,
        (Rounding::Zero, false, false) => all::<O, ZERO, false, false>,
        (Rounding::Zero, false, true) => all::<O, ZERO, false, true>,
        (Rounding::Zero, true, false) => all::<O, ZERO, true, false>,
        (Rounding::Zero, true, true) => all::<O, ZERO, true, true>,
        (Rounding::Down, false, false) => all::<O, DOWN, false, false>,
        (Rounding::Down, false, true) => all::<O, DOWN, false, true>,
        (Rounding::Down, true, false) => all::<O, DOWN, true, false>,
        (Rounding::Down, true, true) => all::<O, DOWN, true, true>,
        (Rounding::Up, false, false) => all::<O, UP, false, false>,
        (Rounding::Up, false, true) => all::<O, UP, false, true>,
        (Rounding::Up, true, false) => all::<O, UP, true, false>,
        (Rounding::Up, true, true) => all::<O, UP, true, true>,
        (Rounding::NearestAway, ..) => return None,
    })
}

/// The function of `add`, `sub`, `mul`, `fma`, `div`, `sqrt` or `rcp` with IEEE rounding.
pub(crate) fn arithmetic(op: &str, rounding: Rounding, ftz: bool, sat: bool) -> Option<NarrowFn> {
    match op {
        "add" => pick::<Add>(rounding, ftz, sat),
        "sub" => pick::<Sub>(rounding, ftz, sat),
        "mul" => pick::<Mul>(rounding, ftz, sat),
        "fma" | "mad" => pick::<Fma>(rounding, ftz, sat),
        "div" => pick::<Div>(rounding, ftz, sat),
        "sqrt" => pick::<Sqrt>(rounding, ftz, sat),
        "rcp" => pick::<Rcp>(rounding, ftz, sat),
        _ => None,
    }
}

#[inline(always)]
fn f(x: u32) -> f32 {
    f32::from_bits(x)
}

/// The smaller value; -0 is smaller than +0; a number wins over NaN.
#[inline(always)]
pub(crate) fn min(a: f32, b: f32) -> f32 {
    if a.is_nan() {
        b
    } else if b.is_nan() || a < b || (a == b && a.is_sign_negative()) {
        a
    } else {
        b
    }
}

/// The larger value; +0 is larger than -0; a number wins over NaN.
#[inline(always)]
pub(crate) fn max(a: f32, b: f32) -> f32 {
    -min(-a, -b)
}

#[inline(always)]
fn if_numbers(a: f32, b: f32, x: f32) -> f32 {
    if a.is_nan() || b.is_nan() { f32::NAN } else { x }
}

#[inline(always)]
fn xorsign(a: u32, b: u32, x: f32) -> u32 {
    if x.is_nan() { NAN } else { x.to_bits() | ((a ^ b) & 0x8000_0000) }
}

/// The function of `min` or `max`; `xorsign` takes the sign of the operands' product, and the magnitudes'
/// minimum.
pub(crate) fn extremum(max_of: bool, ftz: bool, nan: bool, xor: bool) -> NarrowFn {
    match (max_of, ftz, nan, xor) {
        (false, false, false, false) => narrow!(|a, b| bits(min(f(a), f(b)))),
        (true, false, false, false) => narrow!(|a, b| bits(max(f(a), f(b)))),
        (false, true, false, false) => narrow!(|a, b| bits(min(flush(f(a)), flush(f(b))))),
        (true, true, false, false) => narrow!(|a, b| bits(max(flush(f(a)), flush(f(b))))),
        (false, false, true, false) => narrow!(|a, b| bits(if_numbers(f(a), f(b), min(f(a), f(b))))),
        (true, false, true, false) => narrow!(|a, b| bits(if_numbers(f(a), f(b), max(f(a), f(b))))),
        (false, true, true, false) => {
            narrow!(|a, b| bits(if_numbers(f(a), f(b), min(flush(f(a)), flush(f(b))))))
        }
        (true, true, true, false) => {
            narrow!(|a, b| bits(if_numbers(f(a), f(b), max(flush(f(a)), flush(f(b))))))
        }
        (false, _, false, true) => narrow!(|a, b| xorsign(a, b, min(f(a).abs(), f(b).abs()))),
        (true, _, false, true) => narrow!(|a, b| xorsign(a, b, max(f(a).abs(), f(b).abs()))),
        (false, _, true, true) => {
            narrow!(|a, b| xorsign(a, b, if_numbers(f(a), f(b), min(f(a).abs(), f(b).abs()))))
        }
        (true, _, true, true) => {
            narrow!(|a, b| xorsign(a, b, if_numbers(f(a), f(b), max(f(a).abs(), f(b).abs()))))
        }
    }
}

/// The function of `abs`, `neg` or `copysign`, which change the sign alone.
pub(crate) fn sign(op: &str, ftz: bool) -> Option<NarrowFn> {
    Some(match (op, ftz) {
        ("abs", false) => narrow!(|a| a & 0x7fff_ffff),
        ("abs", true) => narrow!(|a| flush(f(a)).to_bits() & 0x7fff_ffff),
        ("neg", false) => narrow!(|a| a ^ 0x8000_0000),
        ("neg", true) => narrow!(|a| flush(f(a)).to_bits() ^ 0x8000_0000),
        // Copies the sign of `a` into `b` (PTX ISA, 9.7.3.2).
        ("copysign", false) => narrow!(|a, b| (a & 0x8000_0000) | (b & 0x7fff_ffff)),
        _ => return None,
    })
}

/// The comparison of two values.
pub(crate) fn compare(relation: Relation, ftz: bool) -> NarrowTest {
    if ftz {
        by_relation!(relation, test, |a, b| flush(f(a)).partial_cmp(&flush(f(b))))
    } else {
        by_relation!(relation, test, |a, b| f(a).partial_cmp(&f(b)))
    }
}

/// The comparison of `testp`: `finite`, `infinite`, `number`, `notanumber`, `normal` or `subnormal`.
pub(crate) fn property(name: &str) -> Option<NarrowTest> {
    Some(match name {
        "finite" => test!(|a, _b| f(a).is_finite()),
        "infinite" => test!(|a, _b| f(a).is_infinite()),
        "number" => test!(|a, _b| !f(a).is_nan()),
        "notanumber" => test!(|a, _b| f(a).is_nan()),
        "normal" => test!(|a, _b| f(a).is_normal()),
        "subnormal" => test!(|a, _b| f(a).is_subnormal()),
        _ => return None,
    })
}
