//! Integer arithmetic: PTX ISA 9.7.1 and 9.7.2.

use crate::common::{check, eval};

const MIN32: u64 = 0x8000_0000;
const MIN64: u64 = 0x8000_0000_0000_0000;
const ONES: u64 = u64::MAX;

/// 9.7.1.1 `add`, 9.7.1.2 `sub`.
#[test]
fn sums() {
    check(&[
        ("add.s32 %r9, %r0, %r1;", 'r', &[(&[1, 2], 3), (&[0xffff_ffff, 1], 0), (&[0x7fff_ffff, 1], MIN32)]),
        ("add.u32 %r9, %r0, %r1;", 'r', &[(&[0xffff_ffff, 2], 1)]),
        (
            "add.sat.s32 %r9, %r0, %r1;",
            'r',
            &[(&[0x7fff_ffff, 1], 0x7fff_ffff), (&[MIN32, 0xffff_ffff], MIN32)],
        ),
        ("add.u16 %h9, %h0, %h1;", 'h', &[(&[0xffff, 2], 1)]),
        ("add.s16 %h9, %h0, %h1;", 'h', &[(&[0x7fff, 1], 0x8000)]),
        ("add.s64 %x9, %x0, %x1;", 'x', &[(&[0xffff_ffff, 1], 0x1_0000_0000), (&[ONES, 1], 0)]),
        ("add.u64 %x9, %x0, %x1;", 'x', &[(&[ONES, 2], 1)]),
        ("add.s64 %x9, %x0, -5;", 'x', &[(&[3], ONES - 1)]),
        ("sub.s32 %r9, %r0, %r1;", 'r', &[(&[1, 2], 0xffff_ffff)]),
        ("sub.u32 %r9, %r0, %r1;", 'r', &[(&[0, 1], 0xffff_ffff)]),
        ("sub.sat.s32 %r9, %r0, %r1;", 'r', &[(&[MIN32, 1], MIN32)]),
        ("sub.s16 %h9, %h0, %h1;", 'h', &[(&[0, 1], 0xffff)]),
        ("sub.s64 %x9, %x0, %x1;", 'x', &[(&[0, 1], ONES)]),
        ("sub.u64 %x9, %x0, %x1;", 'x', &[(&[5, 3], 2)]),
    ]);
}

/// 9.7.1.3 `mul`, 9.7.1.4 `mad`, 9.7.1.5 `mul24`, 9.7.1.6 `mad24`.
#[test]
fn products() {
    check(&[
        ("mul.lo.s32 %r9, %r0, %r1;", 'r', &[(&[0x10000, 0x10000], 0), (&[0xffff_ffff, 3], 0xffff_fffd)]),
        ("mul.lo.u32 %r9, %r0, %r1;", 'r', &[(&[7, 6], 42)]),
        (
            "mul.hi.s32 %r9, %r0, %r1;",
            'r',
            &[(&[0xffff_ffff, 1], 0xffff_ffff), (&[MIN32, MIN32], 0x4000_0000)],
        ),
        ("mul.hi.u32 %r9, %r0, %r1;", 'r', &[(&[0xffff_ffff, 0xffff_ffff], 0xffff_fffe)]),
        ("mul.wide.s32 %x9, %r0, %r1;", 'x', &[(&[0xffff_ffff, 5], ONES - 4)]),
        ("mul.wide.u32 %x9, %r0, %r1;", 'x', &[(&[0xffff_ffff, 5], 0x4_ffff_fffb)]),
        ("mul.wide.s32 %x9, %r0, 4;", 'x', &[(&[0xffff_ffff], ONES - 3)]),
        ("mul.wide.s16 %r9, %h0, %h1;", 'r', &[(&[0xffff, 5], 0xffff_fffb)]),
        ("mul.wide.u16 %r9, %h0, %h1;", 'r', &[(&[0xffff, 5], 0x4_fffb)]),
        ("mul.lo.s16 %h9, %h0, %h1;", 'h', &[(&[0x100, 0x101], 0x100)]),
        ("mul.hi.s16 %h9, %h0, %h1;", 'h', &[(&[0xffff, 1], 0xffff)]),
        ("mul.hi.u16 %h9, %h0, %h1;", 'h', &[(&[0xffff, 0xffff], 0xfffe)]),
        ("mul.lo.s64 %x9, %x0, %x1;", 'x', &[(&[ONES, 3], ONES - 2)]),
        ("mul.hi.s64 %x9, %x0, %x1;", 'x', &[(&[ONES, 1], ONES), (&[MIN64, MIN64], 0x4000_0000_0000_0000)]),
        ("mul.hi.u64 %x9, %x0, %x1;", 'x', &[(&[ONES, ONES], ONES - 1)]),
        ("mad.lo.s32 %r9, %r0, %r1, %r2;", 'r', &[(&[3, 4, 5], 17)]),
        ("mad.lo.u32 %r9, %r0, %r1, %r2;", 'r', &[(&[0xffff_ffff, 2, 3], 1)]),
        ("mad.hi.s32 %r9, %r0, %r1, %r2;", 'r', &[(&[0xffff_ffff, 1, 2], 1)]),
        ("mad.hi.u32 %r9, %r0, %r1, %r2;", 'r', &[(&[0xffff_ffff, 0xffff_ffff, 2], 0)]),
        ("mad.hi.sat.s32 %r9, %r0, %r1, %r2;", 'r', &[(&[MIN32, MIN32, 0x7fff_ffff], 0x7fff_ffff)]),
        ("mad.wide.s32 %x9, %r0, %r1, %x2;", 'x', &[(&[0xffff_ffff, 4, 10], 6)]),
        ("mad.wide.u32 %x9, %r0, %r1, %x2;", 'x', &[(&[0xffff_ffff, 4, 4], 0x4_0000_0000)]),
        ("mad.wide.u16 %r9, %h0, %h1, %r2;", 'r', &[(&[0xffff, 2, 2], 0x2_0000)]),
        ("mad.lo.s64 %x9, %x0, %x1, %x2;", 'x', &[(&[3, 4, ONES], 11)]),
        ("mul24.lo.s32 %r9, %r0, %r1;", 'r', &[(&[0xff_ffff, 2], 0xffff_fffe)]),
        ("mul24.lo.u32 %r9, %r0, %r1;", 'r', &[(&[0xff_ffff, 2], 0x1ff_fffe)]),
        ("mul24.hi.u32 %r9, %r0, %r1;", 'r', &[(&[0xff_ffff, 0x10000], 0xff_ffff)]),
        ("mad24.lo.u32 %r9, %r0, %r1, %r2;", 'r', &[(&[5, 6, 7], 37)]),
    ]);
}

/// 9.7.1.7 `sad`, 9.7.1.8 `div`, 9.7.1.9 `rem`. A division by zero has no defined result; it must not stop
/// the emulator.
#[test]
fn quotients() {
    check(&[
        ("sad.s32 %r9, %r0, %r1, %r2;", 'r', &[(&[0xffff_ffff, 2, 10], 13)]),
        ("sad.u32 %r9, %r0, %r1, %r2;", 'r', &[(&[2, 5, 10], 13)]),
        ("div.s32 %r9, %r0, %r1;", 'r', &[(&[0xffff_fff9, 2], 0xffff_fffd), (&[MIN32, 0xffff_ffff], MIN32)]),
        ("div.u32 %r9, %r0, %r1;", 'r', &[(&[7, 2], 3), (&[7, 0], 0xffff_ffff)]),
        ("div.s16 %h9, %h0, %h1;", 'h', &[(&[0xfff9, 2], 0xfffd)]),
        ("div.u16 %h9, %h0, %h1;", 'h', &[(&[0xfff9, 2], 0x7ffc)]),
        ("div.s64 %x9, %x0, %x1;", 'x', &[(&[ONES - 6, 2], ONES - 2), (&[MIN64, ONES], MIN64)]),
        ("div.u64 %x9, %x0, %x1;", 'x', &[(&[ONES, 16], ONES >> 4), (&[1, 0], ONES)]),
        ("rem.s32 %r9, %r0, %r1;", 'r', &[(&[0xffff_fff9, 2], 0xffff_ffff), (&[7, 0], 7)]),
        ("rem.u32 %r9, %r0, %r1;", 'r', &[(&[7, 4], 3)]),
        ("rem.s16 %h9, %h0, %h1;", 'h', &[(&[0xfff9, 2], 0xffff)]),
        ("rem.s64 %x9, %x0, %x1;", 'x', &[(&[ONES - 6, 4], ONES - 2)]),
        ("rem.u64 %x9, %x0, %x1;", 'x', &[(&[ONES, 16], 15)]),
    ]);
}

/// 9.7.1.10 `abs`, 9.7.1.11 `neg`, 9.7.1.12 `min`, 9.7.1.13 `max`.
#[test]
fn signs_and_extremes() {
    check(&[
        ("abs.s32 %r9, %r0;", 'r', &[(&[0xffff_fffb], 5), (&[MIN32], MIN32)]),
        ("abs.s16 %h9, %h0;", 'h', &[(&[0xfffb], 5)]),
        ("abs.s64 %x9, %x0;", 'x', &[(&[ONES - 4], 5)]),
        ("neg.s32 %r9, %r0;", 'r', &[(&[5], 0xffff_fffb)]),
        ("neg.s16 %h9, %h0;", 'h', &[(&[5], 0xfffb)]),
        ("neg.s64 %x9, %x0;", 'x', &[(&[5], ONES - 4)]),
        ("min.s32 %r9, %r0, %r1;", 'r', &[(&[0xffff_ffff, 1], 0xffff_ffff)]),
        ("min.u32 %r9, %r0, %r1;", 'r', &[(&[0xffff_ffff, 1], 1)]),
        ("min.s16 %h9, %h0, %h1;", 'h', &[(&[0xffff, 1], 0xffff)]),
        ("min.u16 %h9, %h0, %h1;", 'h', &[(&[0xffff, 1], 1)]),
        ("min.s64 %x9, %x0, %x1;", 'x', &[(&[ONES, 1], ONES)]),
        ("min.u64 %x9, %x0, %x1;", 'x', &[(&[ONES, 1], 1)]),
        ("max.s32 %r9, %r0, %r1;", 'r', &[(&[0xffff_ffff, 1], 1)]),
        ("max.u32 %r9, %r0, %r1;", 'r', &[(&[0xffff_ffff, 1], 0xffff_ffff)]),
        ("max.s16 %h9, %h0, %h1;", 'h', &[(&[0xffff, 1], 1)]),
        ("max.u16 %h9, %h0, %h1;", 'h', &[(&[0xffff, 1], 0xffff)]),
        ("max.s64 %x9, %x0, %x1;", 'x', &[(&[ONES, 1], 1)]),
        ("max.u64 %x9, %x0, %x1;", 'x', &[(&[ONES, 1], ONES)]),
    ]);
}

/// 9.7.1.14 `popc` to 9.7.1.22 `bmsk`, with fields that begin or end past the register.
#[test]
fn bit_fields() {
    check(&[
        ("popc.b32 %r9, %r0;", 'r', &[(&[0xf0f0_0001], 9)]),
        ("popc.b64 %r9, %x0;", 'r', &[(&[ONES], 64)]),
        ("clz.b32 %r9, %r0;", 'r', &[(&[0], 32), (&[1], 31)]),
        ("clz.b64 %r9, %x0;", 'r', &[(&[0], 64), (&[0xffff_ffff], 32)]),
        ("bfind.u32 %r9, %r0;", 'r', &[(&[0], 0xffff_ffff), (&[0x8000_0001], 31)]),
        ("bfind.s32 %r9, %r0;", 'r', &[(&[0xffff_ffff], 0xffff_ffff), (&[0xffff_fff0], 3)]),
        ("bfind.shiftamt.u32 %r9, %r0;", 'r', &[(&[1], 31), (&[0], 0xffff_ffff)]),
        ("bfind.u64 %r9, %x0;", 'r', &[(&[0x1_0000_0000], 32), (&[0], 0xffff_ffff)]),
        (
            "fns.b32 %r9, %r0, %r1, %r2;",
            'r',
            &[
                (&[0b1101_0100, 0, 1], 2),
                (&[0b1101_0100, 0, 3], 6),
                (&[0b1101_0100, 4, 0], 4),
                (&[0b1101_0100, 5, 0], 0xffff_ffff),
                (&[0b1101_0100, 5, 0xffff_ffff], 4),
                (&[0b1101_0100, 0, 9], 0xffff_ffff),
            ],
        ),
        ("brev.b32 %r9, %r0;", 'r', &[(&[1], MIN32)]),
        ("brev.b64 %x9, %x0;", 'x', &[(&[1], MIN64)]),
        (
            "bfe.u32 %r9, %r0, %r1, %r2;",
            'r',
            &[
                (&[0xabcd_1234, 8, 8], 0x12),
                (&[0xabcd_1234, 28, 8], 0xa),
                (&[0xabcd_1234, 32, 8], 0),
                (&[0xabcd_1234, 0, 0], 0),
                (&[0xabcd_1234, 0, 32], 0xabcd_1234),
            ],
        ),
        (
            "bfe.s32 %r9, %r0, %r1, %r2;",
            'r',
            &[
                (&[0xabcd_1234, 24, 8], 0xffff_ffab),
                (&[0xabcd_1234, 28, 8], 0xffff_fffa),
                (&[0x0bcd_1234, 32, 8], 0),
                (&[0xabcd_1234, 40, 8], 0xffff_ffff),
                (&[0xabcd_1234, 4, 0], 0),
            ],
        ),
        ("bfe.u64 %x9, %x0, %r1, %r2;", 'x', &[(&[0xabcd_0000_0000_0000, 48, 16], 0xabcd)]),
        ("bfe.s64 %x9, %x0, %r1, %r2;", 'x', &[(&[0xabcd_0000_0000_0000, 48, 16], 0xffff_ffff_ffff_abcd)]),
        (
            "bfi.b32 %r9, %r0, %r1, %r2, %r3;",
            'r',
            &[
                (&[0xff, 0, 8, 4], 0xf00),
                (&[0xff, 0x1234_5678, 28, 8], 0xf234_5678),
                (&[0xff, 0x1234_5678, 32, 8], 0x1234_5678),
                (&[0xff, 0x1234_5678, 4, 0], 0x1234_5678),
            ],
        ),
        ("bfi.b64 %x9, %x0, %x1, %r2, %r3;", 'x', &[(&[0xff, 0, 60, 8], 0xf000_0000_0000_0000)]),
        ("bmsk.clamp.b32 %r9, %r0, %r1;", 'r', &[(&[4, 8], 0xff0), (&[4, 64], 0xffff_fff0), (&[32, 1], 0)]),
        ("bmsk.wrap.b32 %r9, %r0, %r1;", 'r', &[(&[36, 8], 0xff0)]),
        ("szext.clamp.s32 %r9, %r0, %r1;", 'r', &[(&[0x80, 8], 0xffff_ff80), (&[0x80, 40], 0x80)]),
        ("szext.wrap.u32 %r9, %r0, %r1;", 'r', &[(&[0x1ff, 8], 0xff)]),
    ]);
}

/// 9.7.1.23 `dp4a`, 9.7.1.24 `dp2a`.
#[test]
fn dot_products() {
    check(&[
        ("dp4a.s32.s32 %r9, %r0, %r1, %r2;", 'r', &[(&[0x01ff_0203, 0x0101_0101, 10], 15)]),
        ("dp4a.u32.u32 %r9, %r0, %r1, %r2;", 'r', &[(&[0x01ff_0203, 0x0101_0101, 10], 271)]),
        ("dp4a.s32.u32 %r9, %r0, %r1, %r2;", 'r', &[(&[0x0000_00ff, 0x0000_00ff, 0], 0xffff_ff01)]),
        ("dp4a.u32.s32 %r9, %r0, %r1, %r2;", 'r', &[(&[0x0000_00ff, 0x0000_00ff, 0], 0xffff_ff01)]),
        ("dp2a.lo.s32.s32 %r9, %r0, %r1, %r2;", 'r', &[(&[0xffff_0002, 0x0403_0201, 1], 1)]),
        ("dp2a.hi.s32.s32 %r9, %r0, %r1, %r2;", 'r', &[(&[0xffff_0002, 0x0403_0201, 1], 3)]),
        ("dp2a.lo.u32.u32 %r9, %r0, %r1, %r2;", 'r', &[(&[0xffff_0002, 0x0403_0201, 1], 2 + 0x1fffe + 1)]),
    ]);
}

/// 9.7.2: sums of more than one register.
#[test]
fn carries() {
    let add = "add.cc.u32 %r4, %r0, %r2;\naddc.u32 %r9, %r1, %r3;";
    assert_eq!(eval(add, 'r', &[&[0xffff_ffff, 1, 1, 2], &[1, 1, 1, 2]]), [4, 3]);
    let sub = "sub.cc.u32 %r4, %r0, %r2;\nsubc.u32 %r9, %r1, %r3;";
    assert_eq!(eval(sub, 'r', &[&[0, 5, 1, 2], &[1, 5, 1, 2]]), [2, 3]);
    let wide = "add.cc.u64 %x4, %x0, %x1;\naddc.cc.u64 %x5, %x2, 0;\naddc.u64 %x9, 0, 0;";
    assert_eq!(eval(wide, 'x', &[&[ONES, 1, ONES, 0], &[ONES, 1, 0, 0]]), [1, 0]);
    let mad = "mad.lo.cc.u32 %r4, %r0, %r1, %r2;\nmadc.hi.u32 %r9, %r0, %r1, 0;";
    assert_eq!(eval(mad, 'r', &[&[0xffff_ffff, 0xffff_ffff, 0xffff_ffff]]), [0xffff_ffff]);
}
