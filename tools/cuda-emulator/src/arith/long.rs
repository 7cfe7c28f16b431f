//! Integers and bits of 64 bits, and products that have as many (PTX ISA, 9.7.1, 9.7.8).

use super::{Relation, WideFn, WideTest, by_relation, wide, wide_test};

#[inline(always)]
fn s(x: u64) -> i64 {
    x as i64
}

#[inline(always)]
fn s32(x: u64) -> i64 {
    i64::from(x as u32 as i32)
}

#[inline(always)]
fn u32_(x: u64) -> u64 {
    u64::from(x as u32)
}

#[inline(always)]
fn high(a: u64, b: u64) -> u64 {
    ((u128::from(a) * u128::from(b)) >> 64) as u64
}

#[inline(always)]
fn high_s(a: u64, b: u64) -> u64 {
    ((i128::from(s(a)) * i128::from(s(b))) >> 64) as u64
}

/// The function of an arithmetic instruction on 64 bits, or of one that widens 32 bits.
pub(crate) fn arithmetic(op: &str, signed: bool) -> Option<WideFn> {
    Some(match (op, signed) {
        ("add", _) => wide!(|a, b| a.wrapping_add(b)),
        ("sub", _) => wide!(|a, b| a.wrapping_sub(b)),
        ("mul.lo", _) => wide!(|a, b| a.wrapping_mul(b)),
        ("mul.hi", false) => wide!(|a, b| high(a, b)),
        ("mul.hi", true) => wide!(|a, b| high_s(a, b)),
        ("mul.wide", false) => wide!(|a, b| u32_(a) * u32_(b)),
        ("mul.wide", true) => wide!(|a, b| (s32(a) * s32(b)) as u64),
        ("mad.lo", _) => wide!(|a, b, c| a.wrapping_mul(b).wrapping_add(c)),
        ("mad.hi", false) => wide!(|a, b, c| high(a, b).wrapping_add(c)),
        ("mad.hi", true) => wide!(|a, b, c| high_s(a, b).wrapping_add(c)),
        ("mad.wide", false) => wide!(|a, b, c| (u32_(a) * u32_(b)).wrapping_add(c)),
        ("mad.wide", true) => wide!(|a, b, c| ((s32(a) * s32(b)) as u64).wrapping_add(c)),
        ("div", false) => wide!(|a, b| a.checked_div(b).unwrap_or(u64::MAX)),
        ("div", true) => wide!(|a, b| if b == 0 { u64::MAX } else { s(a).wrapping_div(s(b)) as u64 }),
        ("rem", false) => wide!(|a, b| a.checked_rem(b).unwrap_or(a)),
        ("rem", true) => wide!(|a, b| if b == 0 { a } else { s(a).wrapping_rem(s(b)) as u64 }),
        ("min", false) => wide!(|a, b| a.min(b)),
        ("min", true) => wide!(|a, b| s(a).min(s(b)) as u64),
        ("max", false) => wide!(|a, b| a.max(b)),
        ("max", true) => wide!(|a, b| s(a).max(s(b)) as u64),
        ("abs", true) => wide!(|a| s(a).unsigned_abs()),
        ("neg", true) => wide!(|a| a.wrapping_neg()),
        ("sad", false) => wide!(|a, b, c| a.abs_diff(b).wrapping_add(c)),
        ("sad", true) => wide!(|a, b, c| s(a).abs_diff(s(b)).wrapping_add(c)),
        _ => return None,
    })
}

#[inline(always)]
fn bfe(a: u64, pos: u64, len: u64, signed: bool) -> u64 {
    let (pos, len) = (pos & 0xff, len & 0xff);
    let fill = if signed && len != 0 { (a >> (pos + len - 1).min(63) & 1).wrapping_neg() } else { 0 };
    let bits = if pos < 64 { a >> pos } else { 0 };
    let mask = if len >= 64 { u64::MAX } else { (1 << len) - 1 };
    let mask = mask & if pos < 64 { u64::MAX >> pos } else { 0 };
    (bits & mask) | (fill & !mask)
}

#[inline(always)]
fn bfi(a: u64, b: u64, pos: u64, len: u64) -> u64 {
    let (pos, len) = (pos & 0xff, len & 0xff);
    if pos > 63 {
        return b;
    }
    let mask = (if len >= 64 { u64::MAX } else { (1 << len) - 1 }) << pos;
    (a << pos & mask) | (b & !mask)
}

#[inline(always)]
fn bfind(a: u64) -> u64 {
    if a == 0 { u64::from(u32::MAX) } else { 63 - u64::from(a.leading_zeros()) }
}

#[inline(always)]
fn significant(a: u64) -> u64 {
    if s(a) < 0 { !a } else { a }
}

#[inline(always)]
fn shift_amount(a: u64) -> u64 {
    if a == u64::from(u32::MAX) { a } else { 63 - a }
}

/// The function of a bit instruction on 64 bits. Amounts of shifts have 32 bits.
pub(crate) fn bits(op: &str) -> Option<WideFn> {
    Some(match op {
        "and" => wide!(|a, b| a & b),
        "or" => wide!(|a, b| a | b),
        "xor" => wide!(|a, b| a ^ b),
        "not" => wide!(|a| !a),
        "cnot" => wide!(|a| u64::from(a == 0)),
        "shl" => wide!(|a, b| if u32_(b) > 63 { 0 } else { a << u32_(b) }),
        "shr" => wide!(|a, b| if u32_(b) > 63 { 0 } else { a >> u32_(b) }),
        "shr.s" => wide!(|a, b| (s(a) >> u32_(b).min(63)) as u64),
        "popc" => wide!(|a| u64::from(a.count_ones())),
        "clz" => wide!(|a| u64::from(a.leading_zeros())),
        "brev" => wide!(|a| a.reverse_bits()),
        "bfind.u" => wide!(|a| bfind(a)),
        "bfind.s" => wide!(|a| bfind(significant(a))),
        "bfind.shiftamt.u" => wide!(|a| shift_amount(bfind(a))),
        "bfind.shiftamt.s" => wide!(|a| shift_amount(bfind(significant(a)))),
        "bfe.u" => wide!(|a, b, c| bfe(a, b, c, false)),
        "bfe.s" => wide!(|a, b, c| bfe(a, b, c, true)),
        "bfi" => wide!(|a, b, c, d| bfi(a, b, c, d)),
        _ => return None,
    })
}

/// The comparison of two integers of 64 bits.
pub(crate) fn compare(relation: Relation, signed: bool) -> WideTest {
    if signed {
        by_relation!(relation, wide_test, |a, b| Some(s(a).cmp(&s(b))))
    } else {
        by_relation!(relation, wide_test, |a, b| Some(a.cmp(&b)))
    }
}
