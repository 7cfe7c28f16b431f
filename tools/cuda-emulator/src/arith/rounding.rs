//! Rounding of exact values to narrower formats.

/// A rounding mode (PTX ISA, 6.5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rounding {
    Nearest,
    Zero,
    Down,
    Up,
    /// Ties go away from zero: `.rna` of TF32.
    NearestAway,
}

impl Rounding {
    /// The mode of that name: `rn`, `rz`, `rm`, `rp` or `rna`.
    pub(crate) fn named(name: &str) -> Option<Rounding> {
        Some(match name {
            "rn" => Rounding::Nearest,
            "rz" => Rounding::Zero,
            "rm" => Rounding::Down,
            "rp" => Rounding::Up,
            "rna" => Rounding::NearestAway,
            _ => return None,
        })
    }
}

/// A binary floating-point format with infinities.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Format {
    pub(crate) exponent: u32,
    pub(crate) mantissa: u32,
    /// Whether subnormal results become zeros: `.ftz`.
    pub(crate) flush: bool,
}

pub(crate) const F16: Format = Format { exponent: 5, mantissa: 10, flush: false };
pub(crate) const BF16: Format = Format { exponent: 8, mantissa: 7, flush: false };
pub(crate) const TF32: Format = Format { exponent: 8, mantissa: 10, flush: false };
pub(crate) const F32: Format = Format { exponent: 8, mantissa: 23, flush: false };
pub(crate) const F32_FTZ: Format = Format { exponent: 8, mantissa: 23, flush: true };
pub(crate) const E4M3: Format = Format { exponent: 4, mantissa: 3, flush: false };
pub(crate) const E5M2: Format = Format { exponent: 5, mantissa: 2, flush: false };

/// The sum and its rounding error (Knuth): `s + e = a + b` exactly.
#[inline(always)]
pub(crate) fn two_sum(a: f64, b: f64) -> (f64, f64) {
    let s = a + b;
    let t = s - a;
    (s, (a - (s - t)) + (b - t))
}

/// `s + e` rounded to odd: the last bit tells that something was cut off, so that rounding once more, to at
/// most 51 bits, is right.
#[inline(always)]
pub(crate) fn to_odd(s: f64, e: f64) -> f64 {
    if e == 0.0 || !s.is_finite() || e.is_nan() {
        return s;
    }
    let bits = s.to_bits();
    let toward_zero = if (e < 0.0) == (s < 0.0) { bits } else { bits - 1 };
    f64::from_bits(toward_zero | 1)
}

/// The code of `x` in `format`; NaN is all ones but the sign.
#[inline]
pub(crate) fn encode(x: f64, format: Format, rounding: Rounding) -> u32 {
    let Format { exponent: e_bits, mantissa: m_bits, flush } = format;
    let bits = x.to_bits();
    let negative = bits >> 63 == 1;
    let sign = u32::from(negative) << (e_bits + m_bits);
    let infinity = ((1 << e_bits) - 1) << m_bits;
    if x.is_nan() {
        return infinity | ((1 << m_bits) - 1);
    }
    if x.is_infinite() {
        return sign | infinity;
    }
    if x == 0.0 {
        return sign;
    }
    let bias = (1i32 << (e_bits - 1)) - 1;
    let exponent = ((bits >> 52 & 0x7ff) as i32 - 1023).max(-1023);
    let significand = (bits & ((1 << 52) - 1)) | 1 << 52;
    // Anything larger overflows like this one.
    let exponent = exponent.min(bias + 1);
    let subnormal = exponent < 1 - bias;
    let shift = (52 - m_bits as i32 + if subnormal { 1 - bias - exponent } else { 0 }).min(62) as u32;
    let (kept, cut, half) = (significand >> shift, significand & ((1 << shift) - 1), 1u64 << (shift - 1));
    let up = match rounding {
        Rounding::Nearest => cut > half || (cut == half && kept & 1 == 1),
        Rounding::NearestAway => cut >= half,
        Rounding::Zero => false,
        Rounding::Down => negative && cut != 0,
        Rounding::Up => !negative && cut != 0,
    };
    let kept = kept as u32 + u32::from(up);
    let code = if subnormal { kept } else { (((exponent + bias - 1) as u32) << m_bits) + kept };
    if flush && code >> m_bits == 0 {
        return sign;
    }
    if code < infinity {
        return sign | code;
    }
    let finite = match rounding {
        Rounding::Zero => true,
        Rounding::Down => !negative,
        Rounding::Up => negative,
        _ => false,
    };
    sign | if finite { infinity - 1 } else { infinity }
}

/// `s + e` in single precision.
#[inline]
pub(crate) fn to_single(s: f64, e: f64, rounding: Rounding) -> f32 {
    f32::from_bits(encode(to_odd(s, e), F32, rounding))
}

/// The value of an E4M3 code (OCP 8-bit floating point: no infinities, NaN is 0x7f).
pub(crate) fn decode_e4m3(code: u8) -> f32 {
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7));
    let magnitude = match (exponent, code & 7) {
        (15, 7) => return f32::NAN,
        (0, _) => mantissa * 2f32.powi(-9),
        _ => (8.0 + mantissa) * 2f32.powi(exponent - 10),
    };
    if code & 0x80 != 0 { -magnitude } else { magnitude }
}

/// The E4M3 code nearest to `x`; larger values saturate to 448.
pub(crate) fn encode_e4m3(x: f32) -> u8 {
    if x.is_nan() {
        return 0x7f;
    }
    let sign = if x.is_sign_negative() { 0x80 } else { 0 };
    // All codes with the largest exponent but the last are numbers, so the bound is no infinity of `encode`.
    let magnitude = x.abs();
    if magnitude >= 240.0 {
        let step = ((magnitude / 32.0).round_ties_even() as u32).clamp(8, 14) as u8;
        return sign | if magnitude < 248.0 { 0x77 } else { 0x70 + step };
    }
    sign | (encode(f64::from(magnitude), E4M3, Rounding::Nearest) as u8)
}
