//! Arithmetic in half precision and bfloat16, alone and in pairs (PTX ISA, 9.7.4). Results that are NaN are
//! 0x7fff.

use super::rounding::{BF16, F16, Format, Rounding, encode, to_odd, two_sum};
use super::single::{max, min};
use super::{NarrowFn, NarrowTest, Plane, Relation, by_relation, narrow, test};

/// The value of an F16 code.
#[inline(always)]
pub(crate) fn f16(code: u32) -> f32 {
    half::f16::from_bits(code as u16).to_f32()
}

/// The value of a BF16 code.
#[inline(always)]
pub(crate) fn bf16(code: u32) -> f32 {
    f32::from_bits(code << 16)
}

/// The F16 code nearest to `x`.
#[inline(always)]
pub(crate) fn to_f16(x: f32) -> u32 {
    if x.is_nan() { 0x7fff } else { u32::from(half::f16::from_f32(x).to_bits()) }
}

/// The BF16 code nearest to `x`.
#[inline(always)]
pub(crate) fn to_bf16(x: f32) -> u32 {
    if x.is_nan() {
        return 0x7fff;
    }
    let bits = x.to_bits();
    (bits + 0x7fff + (bits >> 16 & 1)) >> 16
}

trait Half {
    const FORMAT: Format;
    fn value(code: u32) -> f32;
    /// A subnormal number becomes a zero.
    fn flush(code: u32) -> u32 {
        let m = (1 << Self::FORMAT.mantissa) - 1;
        if code & (0x7fff & !m) == 0 { code & 0x8000 } else { code }
    }
}

struct Binary16;
impl Half for Binary16 {
    const FORMAT: Format = F16;
    fn value(code: u32) -> f32 {
        f16(code)
    }
}

struct Brain;
impl Half for Brain {
    const FORMAT: Format = BF16;
    fn value(code: u32) -> f32 {
        bf16(code)
    }
}

/// An operation on codes of one format.
trait Operation {
    fn apply<H: Half>(a: u32, b: u32, c: u32) -> u32;
}

fn rounded<H: Half>(s: f64, e: f64) -> u32 {
    encode(to_odd(s, e), H::FORMAT, Rounding::Nearest)
}

fn code<H: Half>(x: f32) -> u32 {
    encode(f64::from(x), H::FORMAT, Rounding::Nearest)
}

macro_rules! operation {
    ($name:ident, $h:ident, |$a:ident, $b:ident, $c:ident| $e:expr) => {
        struct $name;
        impl Operation for $name {
            #[inline(always)]
            fn apply<$h: Half>($a: u32, $b: u32, $c: u32) -> u32 {
                let _ = ($b, $c);
                $e
            }
        }
    };
}

fn d<H: Half>(code: u32) -> f64 {
    f64::from(H::value(code))
}

fn nan_or<H: Half>(a: u32, b: u32, x: u32) -> u32 {
    if H::value(a).is_nan() || H::value(b).is_nan() { 0x7fff } else { x }
}

operation!(Add, H, |a, b, c| {
    let (s, e) = two_sum(d::<H>(a), d::<H>(b));
    rounded::<H>(s, e)
});
operation!(Sub, H, |a, b, c| Add::apply::<H>(a, b ^ 0x8000, c));
operation!(Mul, H, |a, b, c| rounded::<H>(d::<H>(a) * d::<H>(b), 0.0));
operation!(Fma, H, |a, b, c| {
    let (s, e) = two_sum(d::<H>(a) * d::<H>(b), d::<H>(c));
    rounded::<H>(s, e)
});
operation!(Neg, H, |a, b, c| nan_or::<H>(a, a, a ^ 0x8000));
operation!(Abs, H, |a, b, c| nan_or::<H>(a, a, a & 0x7fff));
operation!(Min, H, |a, b, c| code::<H>(min(H::value(a), H::value(b))));
operation!(Max, H, |a, b, c| code::<H>(max(H::value(a), H::value(b))));
operation!(MinNan, H, |a, b, c| nan_or::<H>(a, b, Min::apply::<H>(a, b, c)));
operation!(MaxNan, H, |a, b, c| nan_or::<H>(a, b, Max::apply::<H>(a, b, c)));
operation!(Ex2, H, |a, b, c| code::<H>(d::<H>(a).exp2() as f32));
operation!(Tanh, H, |a, b, c| code::<H>(d::<H>(a).tanh() as f32));

const PLAIN: u8 = 0;
const FTZ: u8 = 1;
const SAT: u8 = 2;
const FTZ_SAT: u8 = 3;
const RELU: u8 = 4;

#[inline(always)]
fn one<O: Operation, H: Half, const MODE: u8>(a: u32, b: u32, c: u32) -> u32 {
    if MODE == FTZ || MODE == FTZ_SAT {
        return finish::<H, MODE>(H::flush(O::apply::<H>(H::flush(a), H::flush(b), H::flush(c))));
    }
    finish::<H, MODE>(O::apply::<H>(a, b, c))
}

#[inline(always)]
fn finish<H: Half, const MODE: u8>(x: u32) -> u32 {
    let value = H::value(x);
    match MODE {
        SAT | FTZ_SAT if value.is_nan() || value <= 0.0 => 0,
        SAT | FTZ_SAT if value > 1.0 => code::<H>(1.0),
        RELU if value < 0.0 || x == 0x8000 => 0,
        _ => x,
    }
}

fn scalar<O: Operation, H: Half, const MODE: u8>(s: &[&Plane; 4], o: &mut Plane) {
    for l in 0..32 {
        o[l] = one::<O, H, MODE>(s[0][l] & 0xffff, s[1][l] & 0xffff, s[2][l] & 0xffff);
    }
}

fn paired<O: Operation, H: Half, const MODE: u8>(s: &[&Plane; 4], o: &mut Plane) {
    for l in 0..32 {
        let low = one::<O, H, MODE>(s[0][l] & 0xffff, s[1][l] & 0xffff, s[2][l] & 0xffff);
        let high = one::<O, H, MODE>(s[0][l] >> 16, s[1][l] >> 16, s[2][l] >> 16);
        o[l] = low | high << 16;
    }
}

fn pick<O: Operation>(kind: Kind, ftz: bool, sat: bool, relu: bool) -> Option<NarrowFn> {
    macro_rules! modes {
        ($make:ident, $h:ty) => {
            match (ftz, sat, relu) {
                (false, false, false) => $make::<O, $h, PLAIN> as NarrowFn,
                (true, false, false) => $make::<O, $h, FTZ>,
                (false, true, false) => $make::<O, $h, SAT>,
                (true, true, false) => $make::<O, $h, FTZ_SAT>,
                (false, false, true) => $make::<O, $h, RELU>,
                _ => return None,
            }
        };
    }
    Some(match kind {
        Kind { brain: false, pair: false } => modes!(scalar, Binary16),
        Kind { brain: false, pair: true } => modes!(paired, Binary16),
        Kind { brain: true, pair: false } => modes!(scalar, Brain),
        Kind { brain: true, pair: true } => modes!(paired, Brain),
    })
}

/// A 16-bit type: `f16`, `f16x2`, `bf16` or `bf16x2`.
#[derive(Clone, Copy)]
pub(crate) struct Kind {
    pub(crate) brain: bool,
    pub(crate) pair: bool,
}

/// The function of `op` on values of `kind`.
pub(crate) fn arithmetic(op: &str, kind: Kind, ftz: bool, sat: bool, relu: bool) -> Option<NarrowFn> {
    match op {
        "add" => pick::<Add>(kind, ftz, sat, relu),
        "sub" => pick::<Sub>(kind, ftz, sat, relu),
        "mul" => pick::<Mul>(kind, ftz, sat, relu),
        "fma" => pick::<Fma>(kind, ftz, sat, relu),
        "neg" => pick::<Neg>(kind, ftz, sat, relu),
        "abs" => pick::<Abs>(kind, ftz, sat, relu),
        "min" => pick::<Min>(kind, ftz, sat, relu),
        "max" => pick::<Max>(kind, ftz, sat, relu),
        "min.NaN" => pick::<MinNan>(kind, ftz, sat, relu),
        "max.NaN" => pick::<MaxNan>(kind, ftz, sat, relu),
        "ex2" => pick::<Ex2>(kind, ftz, sat, relu),
        "tanh" => pick::<Tanh>(kind, ftz, sat, relu),
        _ => None,
    }
}

/// The comparison of two values of 16 bits.
pub(crate) fn compare(relation: Relation, brain: bool, ftz: bool) -> NarrowTest {
    match (brain, ftz) {
        (true, _) => by_relation!(relation, test, |a, b| bf16(a).partial_cmp(&bf16(b))),
        (false, false) => {
            by_relation!(relation, test, |a, b| f16(a & 0xffff).partial_cmp(&f16(b & 0xffff)))
        }
        (false, true) => by_relation!(relation, test, |a, b| {
            f16(Binary16::flush(a & 0xffff)).partial_cmp(&f16(Binary16::flush(b & 0xffff)))
        }),
    }
}

/// Both halves of a pair, as a function that gives one of them.
pub(crate) fn half_of_pair(high: bool) -> NarrowFn {
    if high { narrow!(|a| a >> 16) } else { narrow!(|a| a & 0xffff) }
}
