//! Integers and bits of up to 32 bits (PTX ISA, 9.7.1, 9.7.8).
//!
//! Invariant: 16-bit results have no bits above the lower 16.

use super::{NarrowFn, NarrowTest, Relation, by_relation, narrow, test};
use crate::ptx::Type;

#[inline(always)]
fn s(x: u32) -> i32 {
    x as i32
}

#[inline(always)]
fn h(x: u32) -> i32 {
    i32::from(x as u16 as i16)
}

#[inline(always)]
fn low(x: u32) -> u32 {
    x & 0xffff
}

/// A quotient; that of a division by zero is all ones, as hardware gives it (PTX ISA leaves it open).
#[inline(always)]
fn div_u(a: u32, b: u32) -> u32 {
    a.checked_div(b).unwrap_or(u32::MAX)
}

#[inline(always)]
fn div_s(a: i32, b: i32) -> u32 {
    if b == 0 { u32::MAX } else { a.wrapping_div(b) as u32 }
}

#[inline(always)]
fn rem_s(a: i32, b: i32) -> u32 {
    if b == 0 { a as u32 } else { a.wrapping_rem(b) as u32 }
}

#[inline(always)]
fn rem_u(a: u32, b: u32) -> u32 {
    a.checked_rem(b).unwrap_or(a)
}

/// The function of an arithmetic instruction; `op` has the modifiers that change its meaning.
pub(crate) fn arithmetic(op: &str, ty: Type) -> Option<NarrowFn> {
    match ty {
        Type::U16 | Type::B16 | Type::S16 => arithmetic16(op, ty.signed()),
        Type::U32 | Type::B32 | Type::S32 => {
            if ty.signed() {
                signed32(op).or_else(|| either32(op))
            } else {
                unsigned32(op).or_else(|| either32(op))
            }
        }
        _ => None,
    }
}

fn arithmetic16(op: &str, signed: bool) -> Option<NarrowFn> {
    Some(match (op, signed) {
        ("add", _) => narrow!(|a, b| low(a.wrapping_add(b))),
        ("sub", _) => narrow!(|a, b| low(a.wrapping_sub(b))),
        ("mul.lo", _) => narrow!(|a, b| low(a.wrapping_mul(b))),
        ("mul.hi", false) => narrow!(|a, b| low((low(a) * low(b)) >> 16)),
        ("mul.hi", true) => narrow!(|a, b| low(((h(a) * h(b)) >> 16) as u32)),
        ("mul.wide", false) => narrow!(|a, b| low(a) * low(b)),
        ("mul.wide", true) => narrow!(|a, b| (h(a) * h(b)) as u32),
        ("mad.wide", false) => narrow!(|a, b, c| (low(a) * low(b)).wrapping_add(c)),
        ("mad.wide", true) => narrow!(|a, b, c| ((h(a) * h(b)) as u32).wrapping_add(c)),
        ("mad.lo", _) => narrow!(|a, b, c| low(a.wrapping_mul(b).wrapping_add(c))),
        ("div", false) => narrow!(|a, b| low(div_u(low(a), low(b)))),
        ("div", true) => narrow!(|a, b| low(div_s(h(a), h(b)))),
        ("rem", false) => narrow!(|a, b| low(rem_u(low(a), low(b)))),
        ("rem", true) => narrow!(|a, b| low(rem_s(h(a), h(b)))),
        ("min", false) => narrow!(|a, b| low(a).min(low(b))),
        ("min", true) => narrow!(|a, b| low(h(a).min(h(b)) as u32)),
        ("max", false) => narrow!(|a, b| low(a).max(low(b))),
        ("max", true) => narrow!(|a, b| low(h(a).max(h(b)) as u32)),
        ("abs", true) => narrow!(|a| low(h(a).unsigned_abs())),
        ("neg", true) => narrow!(|a| low(a.wrapping_neg())),
        ("sad", false) => narrow!(|a, b, c| low(low(a).abs_diff(low(b)).wrapping_add(c))),
        ("sad", true) => narrow!(|a, b, c| low(h(a).abs_diff(h(b)).wrapping_add(c))),
        _ => return None,
    })
}

fn either32(op: &str) -> Option<NarrowFn> {
    Some(match op {
        "add" => narrow!(|a, b| a.wrapping_add(b)),
        "sub" => narrow!(|a, b| a.wrapping_sub(b)),
        "mul.lo" => narrow!(|a, b| a.wrapping_mul(b)),
        "mad.lo" => narrow!(|a, b, c| a.wrapping_mul(b).wrapping_add(c)),
        "neg" => narrow!(|a| a.wrapping_neg()),
        _ => return None,
    })
}

/// The upper half of a signed product.
#[inline(always)]
fn high_s(a: u32, b: u32) -> i32 {
    ((i64::from(s(a)) * i64::from(s(b))) >> 32) as i32
}

/// Twice 24 bits make 48; these are the upper or lower 32 of them.
#[inline(always)]
fn mul24(a: u32, b: u32, hi: bool) -> u32 {
    let p = u64::from(a & 0xff_ffff) * u64::from(b & 0xff_ffff);
    if hi { (p >> 16) as u32 } else { p as u32 }
}

#[inline(always)]
fn mul24_s(a: u32, b: u32, hi: bool) -> u32 {
    let p = i64::from(s(a << 8) >> 8) * i64::from(s(b << 8) >> 8);
    if hi { (p >> 16) as u32 } else { p as u32 }
}

fn unsigned32(op: &str) -> Option<NarrowFn> {
    Some(match op {
        "mul.hi" => narrow!(|a, b| ((u64::from(a) * u64::from(b)) >> 32) as u32),
        "mad.hi" => narrow!(|a, b, c| (((u64::from(a) * u64::from(b)) >> 32) as u32).wrapping_add(c)),
        "mul24.lo" => narrow!(|a, b| mul24(a, b, false)),
        "mul24.hi" => narrow!(|a, b| mul24(a, b, true)),
        "mad24.lo" => narrow!(|a, b, c| mul24(a, b, false).wrapping_add(c)),
        "mad24.hi" => narrow!(|a, b, c| mul24(a, b, true).wrapping_add(c)),
        "div" => narrow!(|a, b| div_u(a, b)),
        "rem" => narrow!(|a, b| rem_u(a, b)),
        "min" => narrow!(|a, b| a.min(b)),
        "max" => narrow!(|a, b| a.max(b)),
        "sad" => narrow!(|a, b, c| a.abs_diff(b).wrapping_add(c)),
        _ => return None,
    })
}

fn signed32(op: &str) -> Option<NarrowFn> {
    Some(match op {
        "add.sat" => narrow!(|a, b| s(a).saturating_add(s(b)) as u32),
        "sub.sat" => narrow!(|a, b| s(a).saturating_sub(s(b)) as u32),
        "mul.hi" => narrow!(|a, b| ((i64::from(s(a)) * i64::from(s(b))) >> 32) as u32),
        "mad.hi" => {
            narrow!(|a, b, c| (((i64::from(s(a)) * i64::from(s(b))) >> 32) as u32).wrapping_add(c))
        }
        "mad.hi.sat" => {
            narrow!(|a, b, c| high_s(a, b).saturating_add(s(c)) as u32)
        }
        "mul24.lo" => narrow!(|a, b| mul24_s(a, b, false)),
        "mul24.hi" => narrow!(|a, b| mul24_s(a, b, true)),
        "mad24.lo" => narrow!(|a, b, c| mul24_s(a, b, false).wrapping_add(c)),
        "mad24.hi" => narrow!(|a, b, c| mul24_s(a, b, true).wrapping_add(c)),
        "div" => narrow!(|a, b| div_s(s(a), s(b))),
        "rem" => narrow!(|a, b| rem_s(s(a), s(b))),
        "min" => narrow!(|a, b| s(a).min(s(b)) as u32),
        "max" => narrow!(|a, b| s(a).max(s(b)) as u32),
        "abs" => narrow!(|a| s(a).unsigned_abs()),
        "sad" => narrow!(|a, b, c| s(a).abs_diff(s(b)).wrapping_add(c)),
        _ => return None,
    })
}

/// The bits of `a` from `pos`, `len` of them; signed fields repeat their highest bit (PTX ISA, 9.7.1.19).
#[inline(always)]
fn bfe(a: u32, pos: u32, len: u32, signed: bool) -> u32 {
    let (pos, len) = (pos & 0xff, len & 0xff);
    let fill = if signed && len != 0 {
        let top = (pos + len - 1).min(31);
        (a >> top & 1).wrapping_neg()
    } else {
        0
    };
    let bits = if pos < 32 { a >> pos } else { 0 };
    let mask = if len >= 32 { u32::MAX } else { (1 << len) - 1 };
    let mask = mask & if pos == 0 { u32::MAX } else { (u64::from(u32::MAX) >> pos.min(63)) as u32 };
    (bits & mask) | (fill & !mask)
}

/// `b` with the lower `len` bits of `a` at `pos` (PTX ISA, 9.7.1.20).
#[inline(always)]
fn bfi(a: u32, b: u32, pos: u32, len: u32) -> u32 {
    let (pos, len) = (pos & 0xff, len & 0xff);
    if pos > 31 {
        return b;
    }
    let mask = (if len >= 32 { u32::MAX } else { (1 << len) - 1 }) << pos;
    (a << pos & mask) | (b & !mask)
}

#[inline(always)]
fn bfind(a: u32) -> u32 {
    if a == 0 { u32::MAX } else { 31 - a.leading_zeros() }
}

#[inline(always)]
fn significant(a: u32) -> u32 {
    if s(a) < 0 { !a } else { a }
}

#[inline(always)]
fn shift_amount(a: u32) -> u32 {
    if a == u32::MAX { a } else { 31 - a }
}

/// The position of the `offset`-th set bit of `mask`, from `base` (PTX ISA, 9.7.1.18).
fn fns(mask: u32, base: u32, offset: i32) -> u32 {
    if offset == 0 {
        return if mask >> (base & 31) & 1 == 1 { base } else { u32::MAX };
    }
    let (mut at, mut left) = (base as i32, offset.unsigned_abs());
    while (0..32).contains(&at) {
        if mask >> at & 1 == 1 {
            left -= 1;
            if left == 0 {
                return at as u32;
            }
        }
        at += offset.signum();
    }
    u32::MAX
}

/// A result of each bit by the table `lut` (PTX ISA, 9.7.8.6).
#[inline(always)]
fn lop3(a: u32, b: u32, c: u32, lut: u32) -> u32 {
    let mut result = 0;
    for row in 0..8 {
        let take = (lut >> row & 1).wrapping_neg();
        let a = if row & 4 != 0 { a } else { !a };
        let b = if row & 2 != 0 { b } else { !b };
        let c = if row & 1 != 0 { c } else { !c };
        result |= a & b & c & take;
    }
    result
}

/// The byte that a selector takes, with its sign repeated if the selector's highest bit is set.
#[inline(always)]
fn selected(bytes: u64, selector: u32) -> u32 {
    let byte = (bytes >> (8 * (selector & 7))) as u8;
    u32::from(if selector & 8 != 0 { (byte as i8 >> 7) as u8 } else { byte })
}

/// Four bytes of `a` and `b` (PTX ISA, 9.7.9.7).
#[inline(always)]
fn prmt(a: u32, b: u32, selectors: [u32; 4]) -> u32 {
    let bytes = u64::from(a) | u64::from(b) << 32;
    (0..4).fold(0, |all, at| all | selected(bytes, selectors[at]) << (8 * at))
}

/// The function of a bit instruction on 32 bits.
pub(crate) fn bits32(op: &str) -> Option<NarrowFn> {
    Some(match op {
        "and" => narrow!(|a, b| a & b),
        "or" => narrow!(|a, b| a | b),
        "xor" => narrow!(|a, b| a ^ b),
        "not" => narrow!(|a| !a),
        "cnot" => narrow!(|a| u32::from(a == 0)),
        "lop3" => narrow!(|a, b, c, d| lop3(a, b, c, d)),
        "shl" => narrow!(|a, b| if b > 31 { 0 } else { a << b }),
        "shr" => narrow!(|a, b| if b > 31 { 0 } else { a >> b }),
        "shr.s" => narrow!(|a, b| (s(a) >> b.min(31)) as u32),
        "shf.l.wrap" => narrow!(|a, b, c| shf_left(a, b, c & 31)),
        "shf.l.clamp" => narrow!(|a, b, c| shf_left(a, b, c.min(32))),
        "shf.r.wrap" => narrow!(|a, b, c| shf_right(a, b, c & 31)),
        "shf.r.clamp" => narrow!(|a, b, c| shf_right(a, b, c.min(32))),
        "popc" => narrow!(|a| a.count_ones()),
        "clz" => narrow!(|a| a.leading_zeros()),
        "brev" => narrow!(|a| a.reverse_bits()),
        "bfind.u" => narrow!(|a| bfind(a)),
        "bfind.s" => narrow!(|a| bfind(significant(a))),
        "bfind.shiftamt.u" => narrow!(|a| shift_amount(bfind(a))),
        "bfind.shiftamt.s" => narrow!(|a| shift_amount(bfind(significant(a)))),
        "fns" => narrow!(|a, b, c| fns(a, b, s(c))),
        "bfe.u" => narrow!(|a, b, c| bfe(a, b, c, false)),
        "bfe.s" => narrow!(|a, b, c| bfe(a, b, c, true)),
        "bfi" => narrow!(|a, b, c, d| bfi(a, b, c, d)),
        "bmsk.clamp" => narrow!(|a, b| bmsk(a, b)),
        "bmsk.wrap" => narrow!(|a, b| bmsk(a & 31, b & 31)),
        "szext.clamp.u" => narrow!(|a, b| bfe(a, 0, b.min(32), false)),
        "szext.clamp.s" => narrow!(|a, b| bfe(a, 0, b.min(32), true)),
        "szext.wrap.u" => narrow!(|a, b| bfe(a, 0, b & 31, false)),
        "szext.wrap.s" => narrow!(|a, b| bfe(a, 0, b & 31, true)),
        _ => return None,
    })
}

#[inline(always)]
fn shf_left(a: u32, b: u32, n: u32) -> u32 {
    (((u64::from(b) << 32 | u64::from(a)) << n) >> 32) as u32
}

#[inline(always)]
fn shf_right(a: u32, b: u32, n: u32) -> u32 {
    ((u64::from(b) << 32 | u64::from(a)) >> n) as u32
}

#[inline(always)]
fn bmsk(pos: u32, len: u32) -> u32 {
    if pos > 31 {
        return 0;
    }
    (if len > 31 { u32::MAX } else { (1 << len) - 1 }) << pos
}

/// The function of a bit instruction on 16 bits.
pub(crate) fn bits16(op: &str) -> Option<NarrowFn> {
    Some(match op {
        "and" => narrow!(|a, b| low(a & b)),
        "or" => narrow!(|a, b| low(a | b)),
        "xor" => narrow!(|a, b| low(a ^ b)),
        "not" => narrow!(|a| low(!a)),
        "cnot" => narrow!(|a| u32::from(low(a) == 0)),
        "shl" => narrow!(|a, b| if b > 15 { 0 } else { low(a << b) }),
        "shr" => narrow!(|a, b| if b > 15 { 0 } else { low(a) >> b }),
        "shr.s" => narrow!(|a, b| low((h(a) >> b.min(15)) as u32)),
        _ => return None,
    })
}

/// The function of `prmt` in a mode, whose name is empty for the general one.
pub(crate) fn permute(mode: &str) -> Option<NarrowFn> {
    Some(match mode {
        "" => narrow!(|a, b, c| prmt(a, b, [c & 15, c >> 4 & 15, c >> 8 & 15, c >> 12 & 15])),
        "f4e" => narrow!(|a, b, c| {
            let c = c & 3;
            prmt(a, b, [c, c + 1, c + 2, c + 3])
        }),
        "b4e" => narrow!(|a, b, c| {
            let c = c & 3;
            prmt(a, b, [c, (c + 7) & 7, (c + 6) & 7, (c + 5) & 7])
        }),
        "rc8" => narrow!(|a, b, c| prmt(a, b, [c & 3; 4])),
        "ecl" => narrow!(|a, b, c| {
            let c = c & 3;
            prmt(a, b, [c, c.max(1), c.max(2), 3])
        }),
        "ecr" => narrow!(|a, b, c| {
            let c = c & 3;
            prmt(a, b, [0, c.min(1), c.min(2), c])
        }),
        "rc16" => narrow!(|a, b, c| {
            let c = (c & 1) * 2;
            prmt(a, b, [c, c + 1, c, c + 1])
        }),
        _ => return None,
    })
}

/// Byte `at` of `x`, with or without sign.
#[inline(always)]
fn byte(x: u32, at: u32, signed: bool) -> i32 {
    let byte = (x >> (8 * at)) as u8;
    if signed { i32::from(byte as i8) } else { i32::from(byte) }
}

#[inline(always)]
fn dp4a(a: u32, b: u32, c: u32, a_signed: bool, b_signed: bool) -> u32 {
    (0..4).fold(c, |sum, at| sum.wrapping_add((byte(a, at, a_signed) * byte(b, at, b_signed)) as u32))
}

#[inline(always)]
fn dp2a(a: u32, b: u32, c: u32, a_signed: bool, b_signed: bool, high: u32) -> u32 {
    let half = |at: u32| {
        let x = (a >> (16 * at)) as u16;
        if a_signed { i64::from(x as i16) } else { i64::from(x) }
    };
    (0..2)
        .fold(c, |sum, at| sum.wrapping_add((half(at) * i64::from(byte(b, at + 2 * high, b_signed))) as u32))
}

/// The function of `dp4a`, `dp2a.lo` or `dp2a.hi` (PTX ISA, 9.7.1.23 and 9.7.1.24).
pub(crate) fn dot(op: &str, a_signed: bool, b_signed: bool) -> Option<NarrowFn> {
    Some(match (op, a_signed, b_signed) {
        ("dp4a", true, true) => narrow!(|a, b, c| dp4a(a, b, c, true, true)),
        ("dp4a", true, false) => narrow!(|a, b, c| dp4a(a, b, c, true, false)),
        ("dp4a", false, true) => narrow!(|a, b, c| dp4a(a, b, c, false, true)),
        ("dp4a", false, false) => narrow!(|a, b, c| dp4a(a, b, c, false, false)),
        ("dp2a.lo", true, true) => narrow!(|a, b, c| dp2a(a, b, c, true, true, 0)),
        ("dp2a.lo", true, false) => narrow!(|a, b, c| dp2a(a, b, c, true, false, 0)),
        ("dp2a.lo", false, true) => narrow!(|a, b, c| dp2a(a, b, c, false, true, 0)),
        ("dp2a.lo", false, false) => narrow!(|a, b, c| dp2a(a, b, c, false, false, 0)),
        ("dp2a.hi", true, true) => narrow!(|a, b, c| dp2a(a, b, c, true, true, 1)),
        ("dp2a.hi", true, false) => narrow!(|a, b, c| dp2a(a, b, c, true, false, 1)),
        ("dp2a.hi", false, true) => narrow!(|a, b, c| dp2a(a, b, c, false, true, 1)),
        ("dp2a.hi", false, false) => narrow!(|a, b, c| dp2a(a, b, c, false, false, 1)),
        _ => return None,
    })
}

/// The comparison of two values of up to 32 bits.
pub(crate) fn compare(relation: Relation, ty: Type) -> Option<NarrowTest> {
    Some(match ty {
        Type::S32 => by_relation!(relation, test, |a, b| Some(s(a).cmp(&s(b)))),
        Type::U32 | Type::B32 => by_relation!(relation, test, |a, b| Some(a.cmp(&b))),
        Type::S16 => by_relation!(relation, test, |a, b| Some(h(a).cmp(&h(b)))),
        Type::U16 | Type::B16 => by_relation!(relation, test, |a, b| Some(low(a).cmp(&low(b)))),
        _ => return None,
    })
}
