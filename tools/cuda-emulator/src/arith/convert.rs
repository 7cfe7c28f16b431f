//! Conversions (PTX ISA, 9.7.9.21).
//!
//! Every source is read as 64 bits, of which its type's are valid; the result is extended, with its sign if
//! its type has one, so that a wider register takes it as it is.

use super::half::{bf16, f16, to_bf16, to_f16};
use super::rounding::{BF16, E5M2, F16, F32, F32_FTZ, Rounding, TF32, decode_e4m3, encode, encode_e4m3};
use super::single::{NAN, flush, saturate};
use super::{NarrowFn, WideFn, narrow, wide};
use crate::ptx::Type;

/// Integer rounding of a float: `rni`, `rzi`, `rmi` or `rpi`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Integral {
    Nearest,
    Zero,
    Down,
    Up,
}

impl Integral {
    /// The mode of that name.
    pub(crate) fn named(name: &str) -> Option<Integral> {
        Some(match name {
            "rni" => Integral::Nearest,
            "rzi" => Integral::Zero,
            "rmi" => Integral::Down,
            "rpi" => Integral::Up,
            _ => return None,
        })
    }

    #[inline(always)]
    fn apply(self, x: f64) -> f64 {
        match self {
            Integral::Nearest => x.round_ties_even(),
            Integral::Zero => x.trunc(),
            Integral::Down => x.floor(),
            Integral::Up => x.ceil(),
        }
    }
}

/// Picks the instance that is compiled for just one integer type.
macro_rules! by_integer {
    ($ty:expr, |$read:ident| $e:expr) => {
        match $ty {
            Type::U8 | Type::B8 => {
                #[inline(always)]
                fn $read(x: u64) -> i128 {
                    i128::from(x as u8)
                }
                $e
            }
            Type::S8 => {
                #[inline(always)]
                fn $read(x: u64) -> i128 {
                    i128::from(x as i8)
                }
                $e
            }
            Type::U16 | Type::B16 => {
                #[inline(always)]
                fn $read(x: u64) -> i128 {
                    i128::from(x as u16)
                }
                $e
            }
            Type::S16 => {
                #[inline(always)]
                fn $read(x: u64) -> i128 {
                    i128::from(x as i16)
                }
                $e
            }
            Type::U32 | Type::B32 => {
                #[inline(always)]
                fn $read(x: u64) -> i128 {
                    i128::from(x as u32)
                }
                $e
            }
            Type::S32 => {
                #[inline(always)]
                fn $read(x: u64) -> i128 {
                    i128::from(x as i32)
                }
                $e
            }
            Type::U64 | Type::B64 => {
                #[inline(always)]
                fn $read(x: u64) -> i128 {
                    i128::from(x)
                }
                $e
            }
            Type::S64 => {
                #[inline(always)]
                fn $read(x: u64) -> i128 {
                    i128::from(x as i64)
                }
                $e
            }
            _ => return None,
        }
    };
}

/// Between integers: truncation and extension, or, with `sat`, the nearest value of the result's type.
pub(crate) fn between_integers(to: Type, from: Type, sat: bool) -> Option<WideFn> {
    if !sat {
        let extended = |ty| -> Option<WideFn> { Some(by_integer!(ty, |read| wide!(|a| read(a) as u64))) };
        // Truncation to a narrower type, and extension from one: the narrower of both decides.
        return if to.bytes() <= from.bytes() { extended(to) } else { extended(from) };
    }
    macro_rules! clamp {
        ($low:expr, $high:expr) => {
            by_integer!(from, |read| wide!(|a| read(a).clamp($low as i128, $high as i128) as u64))
        };
    }
    Some(match to {
        Type::U8 => clamp!(u8::MIN, u8::MAX),
        Type::S8 => clamp!(i8::MIN, i8::MAX),
        Type::U16 => clamp!(u16::MIN, u16::MAX),
        Type::S16 => clamp!(i16::MIN, i16::MAX),
        Type::U32 => clamp!(u32::MIN, u32::MAX),
        Type::S32 => clamp!(i32::MIN, i32::MAX),
        Type::U64 => clamp!(u64::MIN, u64::MAX),
        Type::S64 => clamp!(i64::MIN, i64::MAX),
        _ => return None,
    })
}

#[inline(always)]
fn read_single(x: u64, ftz: bool) -> f64 {
    let x = f32::from_bits(x as u32);
    f64::from(if ftz { flush(x) } else { x })
}

/// Reads a float of a type.
macro_rules! by_float {
    ($ty:expr, $ftz:expr, |$read:ident| $e:expr) => {
        match ($ty, $ftz) {
            (Type::F32, false) => {
                #[inline(always)]
                fn $read(x: u64) -> f64 {
                    read_single(x, false)
                }
                $e
            }
            (Type::F32, true) => {
                #[inline(always)]
                fn $read(x: u64) -> f64 {
                    read_single(x, true)
                }
                $e
            }
            (Type::F64, _) => {
                #[inline(always)]
                fn $read(x: u64) -> f64 {
                    f64::from_bits(x)
                }
                $e
            }
            (Type::F16, _) => {
                #[inline(always)]
                fn $read(x: u64) -> f64 {
                    f64::from(f16(x as u32 & 0xffff))
                }
                $e
            }
            (Type::Bf16, _) => {
                #[inline(always)]
                fn $read(x: u64) -> f64 {
                    f64::from(bf16(x as u32 & 0xffff))
                }
                $e
            }
            _ => return None,
        }
    };
}

/// From floats to integers. Values out of range become the nearest one; NaN becomes 0, or for 64-bit results
/// 0x8000000000000000 (PTX ISA, 9.7.9.21: clamping is the default for integers).
pub(crate) fn to_integer(to: Type, from: Type, rounding: Integral, ftz: bool) -> Option<WideFn> {
    macro_rules! rounded {
        ($mode:expr) => {
            by_float!(from, ftz, |read| match to {
                Type::U8 => wide!(|a| $mode.apply(read(a)) as u8 as u64),
                Type::S8 => wide!(|a| $mode.apply(read(a)) as i8 as u64),
                Type::U16 => wide!(|a| $mode.apply(read(a)) as u16 as u64),
                Type::S16 => wide!(|a| $mode.apply(read(a)) as i16 as u64),
                Type::U32 => wide!(|a| $mode.apply(read(a)) as u32 as u64),
                Type::S32 => wide!(|a| $mode.apply(read(a)) as i32 as u64),
                Type::U64 => wide!(|a| nan_or(read(a), $mode.apply(read(a)) as u64)),
                Type::S64 => wide!(|a| nan_or(read(a), $mode.apply(read(a)) as i64 as u64)),
                _ => return None,
            })
        };
    }
    Some(match rounding {
        Integral::Nearest => rounded!(Integral::Nearest),
        Integral::Zero => rounded!(Integral::Zero),
        Integral::Down => rounded!(Integral::Down),
        Integral::Up => rounded!(Integral::Up),
    })
}

#[inline(always)]
fn nan_or(x: f64, integer: u64) -> u64 {
    if x.is_nan() { 1 << 63 } else { integer }
}

/// An integer as the nearest double, and what that leaves.
#[inline(always)]
fn as_sum(x: i128) -> (f64, f64) {
    let near = x as f64;
    (near, (x - near as i128) as f64)
}

/// From integers to floats.
pub(crate) fn from_integer(to: Type, from: Type, rounding: Rounding, sat: bool) -> Option<WideFn> {
    macro_rules! encoded {
        ($format:expr, $mode:expr) => {
            by_integer!(from, |read| wide!(|a| {
                let (s, e) = as_sum(read(a));
                u64::from(encode(super::rounding::to_odd(s, e), $format, $mode))
            }))
        };
    }
    macro_rules! modes {
        ($format:expr) => {
            match rounding {
                Rounding::Nearest => encoded!($format, Rounding::Nearest),
                Rounding::Zero => encoded!($format, Rounding::Zero),
                Rounding::Down => encoded!($format, Rounding::Down),
                Rounding::Up => encoded!($format, Rounding::Up),
                Rounding::NearestAway => return None,
            }
        };
    }
    if sat {
        return None;
    }
    Some(match to {
        Type::F32 if rounding == Rounding::Nearest => {
            by_integer!(from, |read| wide!(|a| u64::from((read(a) as f32).to_bits())))
        }
        Type::F64 if rounding == Rounding::Nearest => {
            by_integer!(from, |read| wide!(|a| (read(a) as f64).to_bits()))
        }
        Type::F32 => modes!(F32),
        Type::F16 => modes!(F16),
        Type::Bf16 => modes!(BF16),
        Type::F64 => by_integer!(from, |read| match rounding {
            Rounding::Zero => wide!(|a| directed(read(a), Rounding::Zero)),
            Rounding::Down => wide!(|a| directed(read(a), Rounding::Down)),
            _ => wide!(|a| directed(read(a), Rounding::Up)),
        }),
        _ => return None,
    })
}

fn directed(x: i128, rounding: Rounding) -> u64 {
    let (s, e) = as_sum(x);
    let down = e < 0.0 && (rounding == Rounding::Down || (rounding == Rounding::Zero && s > 0.0));
    let up = e > 0.0 && (rounding == Rounding::Up || (rounding == Rounding::Zero && s < 0.0));
    (if down {
        s.next_down()
    } else if up {
        s.next_up()
    } else {
        s
    })
    .to_bits()
}

/// Between floats. `integral` rounds to an integer in the result's format.
pub(crate) fn between_floats(
    to: Type,
    from: Type,
    rounding: Rounding,
    integral: Option<Integral>,
    ftz: bool,
    sat: bool,
) -> Option<WideFn> {
    #[inline(always)]
    fn clamp(x: f64, sat: bool) -> f64 {
        if sat { if x > 0.0 { x.min(1.0) } else { 0.0 } } else { x }
    }
    macro_rules! write {
        ($format:expr, $mode:expr, $sat:expr, $int:expr) => {
            by_float!(from, ftz, |read| wide!(|a| u64::from(encode(
                clamp(int(read(a), $int), $sat),
                $format,
                $mode
            ))))
        };
    }
    #[inline(always)]
    fn int(x: f64, integral: Option<Integral>) -> f64 {
        match integral {
            Some(mode) => mode.apply(x),
            None => x,
        }
    }
    macro_rules! modes {
        ($format:expr) => {
            match (integral, rounding, sat) {
                (None, Rounding::Nearest, false) => write!($format, Rounding::Nearest, false, None),
                (None, Rounding::Nearest, true) => write!($format, Rounding::Nearest, true, None),
                (None, Rounding::Zero, false) => write!($format, Rounding::Zero, false, None),
                (None, Rounding::Zero, true) => write!($format, Rounding::Zero, true, None),
                (None, Rounding::Down, _) => write!($format, Rounding::Down, false, None),
                (None, Rounding::Up, _) => write!($format, Rounding::Up, false, None),
                (None, Rounding::NearestAway, _) => write!($format, Rounding::NearestAway, false, None),
                (Some(Integral::Nearest), ..) => {
                    write!($format, Rounding::Nearest, false, Some(Integral::Nearest))
                }
                (Some(Integral::Zero), ..) => write!($format, Rounding::Nearest, false, Some(Integral::Zero)),
                (Some(Integral::Down), ..) => write!($format, Rounding::Nearest, false, Some(Integral::Down)),
                (Some(Integral::Up), ..) => write!($format, Rounding::Nearest, false, Some(Integral::Up)),
            }
        };
    }
    if sat && (integral.is_some() || !matches!(rounding, Rounding::Nearest | Rounding::Zero)) {
        return None;
    }
    Some(match to {
        Type::F16 => modes!(F16),
        Type::Bf16 => modes!(BF16),
        Type::F32 if ftz => modes!(F32_FTZ),
        Type::F32 => modes!(F32),
        Type::F64 => return to_double(from, integral, ftz),
        _ => return None,
    })
}

/// From floats to doubles, rounded to an integer if asked.
fn to_double(from: Type, integral: Option<Integral>, ftz: bool) -> Option<WideFn> {
    Some(match integral {
        None => by_float!(from, ftz, |read| wide!(|a| read(a).to_bits())),
        Some(Integral::Nearest) => {
            by_float!(from, ftz, |read| wide!(|a| Integral::Nearest.apply(read(a)).to_bits()))
        }
        Some(Integral::Zero) => {
            by_float!(from, ftz, |read| wide!(|a| Integral::Zero.apply(read(a)).to_bits()))
        }
        Some(Integral::Down) => {
            by_float!(from, ftz, |read| wide!(|a| Integral::Down.apply(read(a)).to_bits()))
        }
        Some(Integral::Up) => {
            by_float!(from, ftz, |read| wide!(|a| Integral::Up.apply(read(a)).to_bits()))
        }
    })
}

/// Conversions of 32 bits that are frequent enough for a loop of their own, by result, source and modifiers.
pub(crate) fn narrow_form(to: Type, from: Type, modifiers: &str) -> Option<NarrowFn> {
    use Type::{F16, F32};
    Some(match (to, from, modifiers) {
        (F32, F16, "") => narrow!(|a| {
            let x = f16(a & 0xffff);
            if x.is_nan() { NAN } else { x.to_bits() }
        }),
        (F32, Type::Bf16, "") => narrow!(|a| {
            let x = bf16(a & 0xffff);
            if x.is_nan() { NAN } else { x.to_bits() }
        }),
        (F16, F32, "rn") => narrow!(|a| to_f16(f32::from_bits(a))),
        (Type::Bf16, F32, "rn") => narrow!(|a| to_bf16(f32::from_bits(a))),
        (F32, Type::S32, "rn") => narrow!(|a| (a as i32 as f32).to_bits()),
        (F32, Type::U32, "rn") => narrow!(|a| (a as f32).to_bits()),
        (F32, Type::S16, "rn") => narrow!(|a| f32::from(a as i16).to_bits()),
        (F32, Type::U16, "rn") => narrow!(|a| f32::from(a as u16).to_bits()),
        (F32, Type::S8, "rn") => narrow!(|a| f32::from(a as i8).to_bits()),
        (F32, Type::U8, "rn") => narrow!(|a| f32::from(a as u8).to_bits()),
        (Type::S32, F32, "rni") => narrow!(|a| f32::from_bits(a).round_ties_even() as i32 as u32),
        (Type::S32, F32, "rzi") => narrow!(|a| f32::from_bits(a) as i32 as u32),
        (F32, F32, "sat") => narrow!(|a| saturate(f32::from_bits(a)).to_bits()),
        (F32, F32, "ftz.sat") => narrow!(|a| saturate(flush(f32::from_bits(a))).to_bits()),
        (Type::Tf32, F32, "rna") => narrow!(|a| tf32(a, Rounding::NearestAway)),
        (Type::Tf32, F32, "rn") => narrow!(|a| tf32(a, Rounding::Nearest)),
        (Type::Tf32, F32, "rz") => narrow!(|a| tf32(a, Rounding::Zero)),
        _ => return None,
    })
}

/// TF32 in a register of 32 bits; the bits below its mantissa are zeros.
fn tf32(a: u32, rounding: Rounding) -> u32 {
    let x = f32::from_bits(a);
    if x.is_nan() { NAN } else { encode(f64::from(x), TF32, rounding) << 13 }
}

/// Conversions of two F32 to a pair, the first operand to the upper half, and of a pair of 8-bit floats.
pub(crate) fn pairs(to: Type, from: Type, modifiers: &str) -> Option<NarrowFn> {
    #[inline(always)]
    fn relu(x: f32) -> f32 {
        if x < 0.0 { 0.0 } else { x }
    }
    #[inline(always)]
    fn e5m2(x: f32) -> u32 {
        let code = encode(f64::from(x), E5M2, Rounding::Nearest);
        // `.satfinite`: infinities and larger values become the largest number.
        if code & 0x7f == 0x7c { (code & 0x80) | 0x7b } else { code }
    }
    fn f(x: u32) -> f32 {
        f32::from_bits(x)
    }
    fn zero(x: u32, format: super::rounding::Format) -> u32 {
        encode(f64::from(f(x)), format, Rounding::Zero)
    }
    Some(match (to, from, modifiers) {
        (Type::F16x2, Type::F32, "rn") => narrow!(|a, b| to_f16(f(a)) << 16 | to_f16(f(b))),
        (Type::F16x2, Type::F32, "rn.relu") => narrow!(|a, b| to_f16(relu(f(a))) << 16 | to_f16(relu(f(b)))),
        (Type::F16x2, Type::F32, "rz") => narrow!(|a, b| zero(a, F16) << 16 | zero(b, F16)),
        (Type::Bf16x2, Type::F32, "rn") => narrow!(|a, b| to_bf16(f(a)) << 16 | to_bf16(f(b))),
        (Type::Bf16x2, Type::F32, "rn.relu") => {
            narrow!(|a, b| to_bf16(relu(f(a))) << 16 | to_bf16(relu(f(b))))
        }
        (Type::Bf16x2, Type::F32, "rz") => narrow!(|a, b| zero(a, BF16) << 16 | zero(b, BF16)),
        (Type::E4m3x2, Type::F32, "rn.satfinite") => {
            narrow!(|a, b| u32::from(encode_e4m3(f(a))) << 8 | u32::from(encode_e4m3(f(b))))
        }
        (Type::E5m2x2, Type::F32, "rn.satfinite") => narrow!(|a, b| e5m2(f(a)) << 8 | e5m2(f(b))),
        (Type::E4m3x2, Type::F16x2, "rn.satfinite") => narrow!(|a| {
            u32::from(encode_e4m3(f16(a >> 16))) << 8 | u32::from(encode_e4m3(f16(a & 0xffff)))
        }),
        (Type::E5m2x2, Type::F16x2, "rn.satfinite") => {
            narrow!(|a| e5m2(f16(a >> 16)) << 8 | e5m2(f16(a & 0xffff)))
        }
        (Type::F16x2, Type::E4m3x2, "rn") => {
            narrow!(|a| to_f16(decode_e4m3((a >> 8) as u8)) << 16 | to_f16(decode_e4m3(a as u8)))
        }
        (Type::F16x2, Type::E5m2x2, "rn") => narrow!(|a| (a & 0xff00) << 16 | (a & 0xff) << 8),
        _ => return None,
    })
}
