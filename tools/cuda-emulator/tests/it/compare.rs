//! Comparison and selection: PTX ISA 9.7.6 and 9.7.7.

use crate::common::{check, d, eval, f};

const NAN: f32 = f32::NAN;

/// 9.7.6.2 `setp` of integers.
#[test]
fn integers() {
    check(&[
        ("setp.eq.s32 %p9, %r0, %r1;", 'p', &[(&[1, 1], 1), (&[1, 2], 0)]),
        ("setp.ne.b32 %p9, %r0, %r1;", 'p', &[(&[1, 1], 0), (&[1, 2], 1)]),
        ("setp.lt.s32 %p9, %r0, %r1;", 'p', &[(&[0xffff_ffff, 1], 1), (&[1, 1], 0)]),
        ("setp.lt.u32 %p9, %r0, %r1;", 'p', &[(&[0xffff_ffff, 1], 0), (&[0, 1], 1)]),
        ("setp.lo.u32 %p9, %r0, %r1;", 'p', &[(&[0, 1], 1)]),
        ("setp.le.s32 %p9, %r0, %r1;", 'p', &[(&[1, 1], 1), (&[2, 1], 0)]),
        ("setp.gt.s32 %p9, %r0, -1;", 'p', &[(&[0], 1), (&[0xffff_ffff], 0)]),
        ("setp.hi.u32 %p9, %r0, %r1;", 'p', &[(&[0xffff_ffff, 1], 1)]),
        ("setp.ge.u32 %p9, %r0, %r1;", 'p', &[(&[1, 1], 1), (&[0, 1], 0)]),
        ("setp.ls.u32 %p9, %r0, %r1;", 'p', &[(&[1, 1], 1)]),
        ("setp.hs.u32 %p9, %r0, %r1;", 'p', &[(&[1, 1], 1)]),
        ("setp.lt.s16 %p9, %h0, %h1;", 'p', &[(&[0xffff, 1], 1)]),
        ("setp.lt.u16 %p9, %h0, %h1;", 'p', &[(&[0xffff, 1], 0)]),
        ("setp.lt.s64 %p9, %x0, %x1;", 'p', &[(&[u64::MAX, 1], 1)]),
        ("setp.lt.u64 %p9, %x0, %x1;", 'p', &[(&[u64::MAX, 1], 0)]),
        ("setp.eq.b64 %p9, %x0, %x1;", 'p', &[(&[1 << 40, 1 << 41], 0)]),
    ]);
}

/// 9.7.6.2 `setp`: NaN makes ordered comparisons false, and unordered ones true.
#[test]
fn floats() {
    for (name, less, equal, nan) in [
        ("eq", 0, 1, 0),
        ("ne", 1, 0, 0),
        ("lt", 1, 0, 0),
        ("le", 1, 1, 0),
        ("gt", 0, 0, 0),
        ("ge", 0, 1, 0),
        ("equ", 0, 1, 1),
        ("neu", 1, 0, 1),
        ("ltu", 1, 0, 1),
        ("leu", 1, 1, 1),
        ("gtu", 0, 0, 1),
        ("geu", 0, 1, 1),
        ("num", 1, 1, 0),
        ("nan", 0, 0, 1),
    ] {
        let body = format!("setp.{name}.f32 %p9, %r0, %r1;");
        let cases: [&[u64]; 4] =
            [&[f(1.0), f(2.0)], &[f(2.0), f(2.0)], &[f(NAN), f(1.0)], &[f(-0.0), f(0.0)]];
        assert_eq!(eval(&body, 'p', &cases), [less, equal, nan, equal], "{body}");
        let body = format!("setp.{name}.f64 %p9, %x0, %x1;");
        let cases: [&[u64]; 3] = [&[d(1.0), d(2.0)], &[d(2.0), d(2.0)], &[d(f64::NAN), d(1.0)]];
        assert_eq!(eval(&body, 'p', &cases), [less, equal, nan], "{body}");
        let body = format!("setp.{name}.f16 %p9, %h0, %h1;");
        let cases: [&[u64]; 3] = [&[0x3c00, 0x4000], &[0x4000, 0x4000], &[0x7fff, 0x3c00]];
        assert_eq!(eval(&body, 'p', &cases), [less, equal, nan], "{body}");
        let body = format!("setp.{name}.bf16 %p9, %h0, %h1;");
        let cases: [&[u64]; 3] = [&[0x3f80, 0x4000], &[0x4000, 0x4000], &[0x7fff, 0x3f80]];
        assert_eq!(eval(&body, 'p', &cases), [less, equal, nan], "{body}");
    }
    check(&[
        ("setp.eq.ftz.f32 %p9, %r0, %r1;", 'p', &[(&[1, 0x8000_0002], 1)]),
        ("setp.eq.f32 %p9, %r0, %r1;", 'p', &[(&[1, 2], 0)]),
    ]);
}

/// 9.7.6.2: the second result and the predicate that a comparison is combined with.
#[test]
fn combined() {
    check(&[
        ("setp.lt.and.s32 %p9|%p8, %r0, %r1, %p2;", 'p', &[(&[1, 2, 1], 1), (&[1, 2, 0], 0)]),
        (
            "setp.lt.and.s32 %p8|%p9, %r0, %r1, %p2;",
            'p',
            &[(&[1, 2, 1], 0), (&[2, 1, 1], 1), (&[2, 1, 0], 0)],
        ),
        ("setp.lt.or.s32 %p9, %r0, %r1, !%p2;", 'p', &[(&[2, 1, 0], 1), (&[2, 1, 1], 0)]),
        ("setp.lt.xor.s32 %p9, %r0, %r1, %p2;", 'p', &[(&[1, 2, 1], 0), (&[2, 1, 1], 1)]),
        ("setp.lt.and.f32 %p9, %r0, %r1, %p2;", 'p', &[(&[f(1.0), f(2.0), 1], 1)]),
    ]);
}

/// 9.7.6.1 `set`, 9.7.6.3 `selp`, 9.7.6.4 `slct`, 9.7.3.1 `testp`.
#[test]
fn selection() {
    check(&[
        ("set.lt.u32.s32 %r9, %r0, %r1;", 'r', &[(&[1, 2], 0xffff_ffff), (&[2, 1], 0)]),
        ("set.lt.f32.f32 %r9, %r0, %r1;", 'r', &[(&[f(1.0), f(2.0)], f(1.0)), (&[f(2.0), f(1.0)], 0)]),
        ("set.lt.f16.f16 %h9, %h0, %h1;", 'h', &[(&[0x3c00, 0x4000], 0x3c00)]),
        ("selp.b32 %r9, %r0, %r1, %p2;", 'r', &[(&[5, 6, 1], 5), (&[5, 6, 0], 6)]),
        ("selp.b64 %x9, %x0, %x1, !%p2;", 'x', &[(&[5 << 40, 6 << 40, 1], 6 << 40)]),
        ("selp.f32 %r9, 0f3F800000, %r1, %p2;", 'r', &[(&[0, 6, 1], 0x3f80_0000)]),
        ("selp.u16 %h9, 1, 2, %p2;", 'h', &[(&[0, 0, 0], 2)]),
        ("slct.u32.s32 %r9, %r0, %r1, %r2;", 'r', &[(&[5, 6, 0], 5), (&[5, 6, 0xffff_ffff], 6)]),
        ("slct.f32.f32 %r9, %r0, %r1, %r2;", 'r', &[(&[5, 6, f(-0.0)], 5), (&[5, 6, f(NAN)], 6)]),
        ("testp.finite.f32 %p9, %r0;", 'p', &[(&[f(1.0)], 1), (&[f(f32::INFINITY)], 0)]),
        ("testp.infinite.f32 %p9, %r0;", 'p', &[(&[f(f32::INFINITY)], 1)]),
        ("testp.number.f32 %p9, %r0;", 'p', &[(&[f(f32::INFINITY)], 1), (&[f(NAN)], 0)]),
        ("testp.notanumber.f64 %p9, %x0;", 'p', &[(&[d(f64::NAN)], 1)]),
        ("testp.normal.f32 %p9, %r0;", 'p', &[(&[f(1.0)], 1), (&[1], 0)]),
        ("testp.subnormal.f32 %p9, %r0;", 'p', &[(&[1], 1), (&[f(1.0)], 0)]),
    ]);
}
