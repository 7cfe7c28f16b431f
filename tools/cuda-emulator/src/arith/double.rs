//! Arithmetic in double precision (PTX ISA, 9.7.3).

use super::rounding::{Rounding, two_sum};
use super::{Relation, WideFn, WideTest, by_relation, wide, wide_test};

#[inline(always)]
fn f(x: u64) -> f64 {
    f64::from_bits(x)
}

/// `s`, rounded to nearest from an exact value `s + e`, rounded as asked instead.
#[inline(always)]
fn directed(s: f64, e: f64, rounding: Rounding) -> u64 {
    let e = if s.is_finite() && !e.is_nan() { e } else { 0.0 };
    let x = match rounding {
        Rounding::Down if e < 0.0 => s.next_down(),
        Rounding::Up if e > 0.0 => s.next_up(),
        Rounding::Zero if e < 0.0 && s > 0.0 => s.next_down(),
        Rounding::Zero if e > 0.0 && s < 0.0 => s.next_up(),
        _ => s,
    };
    x.to_bits()
}

#[inline(always)]
fn add(a: u64, b: u64, rounding: Rounding) -> u64 {
    let (s, e) = two_sum(f(a), f(b));
    directed(s, e, rounding)
}

#[inline(always)]
fn mul(a: u64, b: u64, rounding: Rounding) -> u64 {
    let p = f(a) * f(b);
    directed(p, f(a).mul_add(f(b), -p), rounding)
}

#[inline(always)]
fn fma(a: u64, b: u64, c: u64, rounding: Rounding) -> u64 {
    let (a, b, c) = (f(a), f(b), f(c));
    let x = a.mul_add(b, c);
    let p = a * b;
    let low = a.mul_add(b, -p);
    let (s, t) = two_sum(p, c);
    directed(x, (s - x) + (t + low), rounding)
}

#[inline(always)]
fn div(a: u64, b: u64, rounding: Rounding) -> u64 {
    let q = f(a) / f(b);
    directed(q, (-q).mul_add(f(b), f(a)) / f(b), rounding)
}

#[inline(always)]
fn sqrt(a: u64, rounding: Rounding) -> u64 {
    let s = f(a).sqrt();
    directed(s, (-s).mul_add(s, f(a)), rounding)
}

const ONE: u64 = 0x3ff0_0000_0000_0000;

/// The function of `add`, `sub`, `mul`, `fma`, `div`, `sqrt` or `rcp`.
pub(crate) fn arithmetic(op: &str, rounding: Rounding) -> Option<WideFn> {
    use Rounding::{Down, Nearest, Up, Zero};
    const SIGN: u64 = 1 << 63;
    macro_rules! modes {
        ($nearest:expr, $make:ident) => {
            match rounding {
                Nearest => $nearest,
                Zero => $make!(Zero),
                Down => $make!(Down),
                Up => $make!(Up),
                Rounding::NearestAway => return None,
            }
        };
    }
    macro_rules! add {
        ($r:expr) => {
            wide!(|a, b| add(a, b, $r))
        };
    }
    macro_rules! sub {
        ($r:expr) => {
            wide!(|a, b| add(a, b ^ SIGN, $r))
        };
    }
    macro_rules! mul {
        ($r:expr) => {
            wide!(|a, b| mul(a, b, $r))
        };
    }
    macro_rules! fma {
        ($r:expr) => {
            wide!(|a, b, c| fma(a, b, c, $r))
        };
    }
    macro_rules! div {
        ($r:expr) => {
            wide!(|a, b| div(a, b, $r))
        };
    }
    macro_rules! sqrt {
        ($r:expr) => {
            wide!(|a| sqrt(a, $r))
        };
    }
    macro_rules! rcp {
        ($r:expr) => {
            wide!(|a| div(ONE, a, $r))
        };
    }
    Some(match op {
        "add" => modes!(wide!(|a, b| (f(a) + f(b)).to_bits()), add),
        "sub" => modes!(wide!(|a, b| (f(a) - f(b)).to_bits()), sub),
        "mul" => modes!(wide!(|a, b| (f(a) * f(b)).to_bits()), mul),
        "fma" | "mad" => modes!(wide!(|a, b, c| f(a).mul_add(f(b), f(c)).to_bits()), fma),
        "div" => modes!(wide!(|a, b| (f(a) / f(b)).to_bits()), div),
        "sqrt" => modes!(wide!(|a| f(a).sqrt().to_bits()), sqrt),
        "rcp" => modes!(wide!(|a| (1.0 / f(a)).to_bits()), rcp),
        _ => return None,
    })
}

fn min(a: f64, b: f64) -> f64 {
    if a.is_nan() {
        b
    } else if b.is_nan() || a < b || (a == b && a.is_sign_negative()) {
        a
    } else {
        b
    }
}

/// The function of `min`, `max`, `abs`, `neg`, `copysign`, or of the approximations `rcp` and `rsqrt`,
/// whose results have 20 bits of mantissa (PTX ISA, 9.7.3.14 and 9.7.3.18).
pub(crate) fn other(op: &str) -> Option<WideFn> {
    const SIGN: u64 = 1 << 63;
    const HIGH: u64 = 0xffff_ffff_0000_0000;
    #[inline(always)]
    fn flushed(x: u64) -> f64 {
        if f(x).is_subnormal() { f(x & SIGN) } else { f(x) }
    }
    Some(match op {
        "min" => wide!(|a, b| min(f(a), f(b)).to_bits()),
        "max" => wide!(|a, b| (-min(-f(a), -f(b))).to_bits()),
        "abs" => wide!(|a| a & !SIGN),
        "neg" => wide!(|a| a ^ SIGN),
        "copysign" => wide!(|a, b| (a & SIGN) | (b & !SIGN)),
        "rcp.approx" => wide!(|a| flushed((1.0 / flushed(a)).to_bits()).to_bits() & HIGH),
        "rsqrt.approx" => wide!(|a| (1.0 / flushed(a).sqrt()).to_bits() & HIGH),
        _ => return None,
    })
}

/// The comparison of two values.
pub(crate) fn compare(relation: Relation) -> WideTest {
    by_relation!(relation, wide_test, |a, b| f(a).partial_cmp(&f(b)))
}

/// The comparison of `testp`.
pub(crate) fn property(name: &str) -> Option<WideTest> {
    Some(match name {
        "finite" => wide_test!(|a, _b| f(a).is_finite()),
        "infinite" => wide_test!(|a, _b| f(a).is_infinite()),
        "number" => wide_test!(|a, _b| !f(a).is_nan()),
        "notanumber" => wide_test!(|a, _b| f(a).is_nan()),
        "normal" => wide_test!(|a, _b| f(a).is_normal()),
        "subnormal" => wide_test!(|a, _b| f(a).is_subnormal()),
        _ => return None,
    })
}
