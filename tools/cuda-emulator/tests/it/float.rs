//! Floating point: PTX ISA 9.7.3.

use crate::common::{check, d, eval, f};

const NAN: u64 = 0x7fff_ffff;
const INF: u64 = 0x7f80_0000;
const NEG: u64 = 0x8000_0000;
const TINY: f32 = 5.960_464_5e-8; // 2^-24

/// 9.7.3.3 `add`, 9.7.3.4 `sub`: special values, subnormal numbers, saturation and rounding.
#[test]
fn sums() {
    check(&[
        (
            "add.f32 %r9, %r0, %r1;",
            'r',
            &[
                (&[f(1.5), f(2.0)], f(3.5)),
                (&[INF, INF | NEG], NAN),
                (&[f(f32::NAN), f(1.0)], NAN),
                (&[f(-0.0), f(0.0)], 0),
                (&[f(-0.0), f(-0.0)], NEG),
                (&[1, 1], 2),
                (&[f(1.0), f(TINY)], f(1.0)),
            ],
        ),
        (
            "add.ftz.f32 %r9, %r0, %r1;",
            'r',
            &[(&[1, 1], 0), (&[0x8000_0001, NEG], NEG), (&[f(1.0), 1], f(1.0))],
        ),
        (
            "add.sat.f32 %r9, %r0, %r1;",
            'r',
            &[(&[f(0.75), f(0.75)], f(1.0)), (&[f(-1.0), f(0.5)], 0), (&[INF, INF | NEG], 0)],
        ),
        (
            "add.rz.f32 %r9, %r0, %r1;",
            'r',
            &[(&[f(1.0), f(1.5 * TINY)], f(1.0)), (&[f(-1.0), f(-1.5 * TINY)], f(-1.0))],
        ),
        (
            "add.rm.f32 %r9, %r0, %r1;",
            'r',
            &[
                (&[f(1.0), f(1e-30)], f(1.0)),
                (&[f(-1.0), f(-1e-30)], 0xbf80_0001),
                (&[f(1.0), f(-1.0)], NEG),
                (&[f(1.0), f(-1e-30)], 0x3f7f_ffff),
            ],
        ),
        (
            "add.rp.f32 %r9, %r0, %r1;",
            'r',
            &[(&[f(1.0), f(1e-30)], 0x3f80_0001), (&[f(f32::MAX), f(f32::MAX)], INF)],
        ),
        ("add.rz.f32 %r9, %r0, %r1;", 'r', &[(&[f(f32::MAX), f(f32::MAX)], f(f32::MAX))]),
        ("sub.f32 %r9, %r0, %r1;", 'r', &[(&[f(1.0), f(2.5)], f(-1.5)), (&[INF, INF], NAN)]),
        ("sub.rm.f32 %r9, %r0, %r1;", 'r', &[(&[f(1.0), f(1.0)], NEG)]),
        ("sub.ftz.f32 %r9, %r0, %r1;", 'r', &[(&[0x0080_0001, 0x0080_0000], 0)]),
        ("add.f64 %x9, %x0, %x1;", 'x', &[(&[d(1.5), d(2.0)], d(3.5)), (&[d(1.0), d(1e-17)], d(1.0))]),
        ("add.rp.f64 %x9, %x0, %x1;", 'x', &[(&[d(1.0), d(1e-17)], d(1.0) + 1)]),
        ("add.rm.f64 %x9, %x0, %x1;", 'x', &[(&[d(1.0), d(-1e-17)], d(1.0) - 1)]),
        (
            "add.rz.f64 %x9, %x0, %x1;",
            'x',
            &[(&[d(1.0), d(-1e-17)], d(1.0) - 1), (&[d(-1.0), d(-1e-17)], d(-1.0))],
        ),
        ("sub.f64 %x9, %x0, %x1;", 'x', &[(&[d(1.0), d(2.5)], d(-1.5))]),
    ]);
}

/// 9.7.3.5 `mul`, 9.7.3.6 `fma`, 9.7.3.7 `mad`.
#[test]
fn products() {
    check(&[
        (
            "mul.f32 %r9, %r0, %r1;",
            'r',
            &[(&[f(1.5), f(-2.0)], f(-3.0)), (&[0, INF], NAN), (&[f(-0.0), f(2.0)], NEG)],
        ),
        ("mul.ftz.f32 %r9, %r0, %r1;", 'r', &[(&[f(1e-20), f(1e-20)], 0), (&[f(1e-20), f(-1e-20)], NEG)]),
        ("mul.sat.f32 %r9, %r0, %r1;", 'r', &[(&[f(3.0), f(2.0)], f(1.0))]),
        ("mul.rn.f32 %r9, %r0, %r1;", 'r', &[(&[0x3f80_0001, 0x3f80_0001], 0x3f80_0002)]),
        ("mul.rp.f32 %r9, %r0, %r1;", 'r', &[(&[0x3f80_0001, 0x3f80_0001], 0x3f80_0003)]),
        ("mul.rz.f32 %r9, %r0, %r1;", 'r', &[(&[0x3f80_0001, 0xbf80_0001], 0xbf80_0002)]),
        ("mul.rm.f32 %r9, %r0, %r1;", 'r', &[(&[0x3f80_0001, 0xbf80_0001], 0xbf80_0003)]),
        // The product is not rounded: (1 + 2^-23)^2 - (1 + 2^-22) = 2^-46.
        ("fma.rn.f32 %r9, %r0, %r1, %r2;", 'r', &[(&[0x3f80_0001, 0x3f80_0001, 0xbf80_0002], 0x2880_0000)]),
        ("fma.rz.f32 %r9, %r0, %r1, %r2;", 'r', &[(&[f(1e-15), f(-1e-15), f(1.0)], 0x3f7f_ffff)]),
        ("fma.rm.f32 %r9, %r0, %r1, %r2;", 'r', &[(&[f(1.0), f(1.0), f(-1.0)], NEG)]),
        ("fma.rp.f32 %r9, %r0, %r1, %r2;", 'r', &[(&[f(1e-15), f(1e-15), f(1.0)], 0x3f80_0001)]),
        ("fma.rn.ftz.f32 %r9, %r0, %r1, %r2;", 'r', &[(&[1, f(1.0), f(2.0)], f(2.0))]),
        ("fma.rn.sat.f32 %r9, %r0, %r1, %r2;", 'r', &[(&[f(2.0), f(2.0), f(-9.0)], 0)]),
        ("mad.rn.f32 %r9, %r0, %r1, %r2;", 'r', &[(&[f(2.0), f(3.0), f(1.0)], f(7.0))]),
        ("mul.f64 %x9, %x0, %x1;", 'x', &[(&[d(1.5), d(2.0)], d(3.0))]),
        ("mul.rp.f64 %x9, %x0, %x1;", 'x', &[(&[d(1.0) + 1, d(1.0) + 1], d(1.0) + 3)]),
        ("fma.rn.f64 %x9, %x0, %x1, %x2;", 'x', &[(&[d(2.0), d(3.0), d(1.0)], d(7.0))]),
        ("fma.rz.f64 %x9, %x0, %x1, %x2;", 'x', &[(&[d(1e-20), d(-1.0), d(1.0)], d(1.0) - 1)]),
    ]);
}

/// 9.7.3.8 `div`, 9.7.3.13 `rcp`, 9.7.3.15 `sqrt` with IEEE rounding.
#[test]
fn quotients_and_roots() {
    check(&[
        (
            "div.rn.f32 %r9, %r0, %r1;",
            'r',
            &[
                (&[f(1.0), f(3.0)], f(1.0 / 3.0)),
                (&[f(1.0), 0], INF),
                (&[f(-1.0), 0], INF | NEG),
                (&[0, 0], NAN),
            ],
        ),
        // 1/3 lies between 0x3eaaaaaa and 0x3eaaaaab.
        ("div.rz.f32 %r9, %r0, %r1;", 'r', &[(&[f(1.0), f(3.0)], 0x3eaa_aaaa)]),
        (
            "div.rp.f32 %r9, %r0, %r1;",
            'r',
            &[(&[f(1.0), f(3.0)], 0x3eaa_aaab), (&[f(1.0), f(-3.0)], 0xbeaa_aaaa)],
        ),
        ("div.rm.f32 %r9, %r0, %r1;", 'r', &[(&[f(1.0), f(-3.0)], 0xbeaa_aaab)]),
        ("div.full.f32 %r9, %r0, %r1;", 'r', &[(&[f(6.0), f(3.0)], f(2.0))]),
        (
            "div.approx.f32 %r9, %r0, %r1;",
            'r',
            &[
                (&[f(6.0), f(3.0)], f(2.0)),
                // Divisors above 2^126 give 0, or NaN of infinity.
                (&[f(1.0), f(1.5e38)], 0),
                (&[INF, f(1.5e38)], NAN),
            ],
        ),
        ("div.approx.ftz.f32 %r9, %r0, %r1;", 'r', &[(&[1, f(1.0)], 0)]),
        ("div.rn.f64 %x9, %x0, %x1;", 'x', &[(&[d(1.0), d(4.0)], d(0.25))]),
        ("rcp.rn.f32 %r9, %r0;", 'r', &[(&[f(4.0)], f(0.25)), (&[NEG], INF | NEG)]),
        ("rcp.rz.f32 %r9, %r0;", 'r', &[(&[f(3.0)], 0x3eaa_aaaa)]),
        ("rcp.rn.f64 %x9, %x0;", 'x', &[(&[d(4.0)], d(0.25))]),
        ("sqrt.rn.f32 %r9, %r0;", 'r', &[(&[f(2.0)], 0x3fb5_04f3), (&[f(-1.0)], NAN), (&[NEG], NEG)]),
        ("sqrt.rp.f32 %r9, %r0;", 'r', &[(&[f(2.0)], 0x3fb5_04f4)]),
        ("sqrt.rn.ftz.f32 %r9, %r0;", 'r', &[(&[1], 0)]),
        ("sqrt.rn.f64 %x9, %x0;", 'x', &[(&[d(9.0)], d(3.0))]),
    ]);
}

/// 9.7.3.9 `abs`, 9.7.3.10 `neg`, 9.7.3.11 `min`, 9.7.3.12 `max`, 9.7.3.2 `copysign`.
#[test]
fn signs_and_extremes() {
    let q = f(f32::NAN);
    check(&[
        ("abs.f32 %r9, %r0;", 'r', &[(&[f(-2.0)], f(2.0)), (&[0x8000_0001], 1)]),
        ("abs.ftz.f32 %r9, %r0;", 'r', &[(&[0x8000_0001], 0)]),
        ("neg.f32 %r9, %r0;", 'r', &[(&[f(2.0)], f(-2.0)), (&[0], NEG)]),
        ("neg.ftz.f32 %r9, %r0;", 'r', &[(&[1], NEG)]),
        (
            "min.f32 %r9, %r0, %r1;",
            'r',
            &[(&[f(1.0), f(2.0)], f(1.0)), (&[q, f(2.0)], f(2.0)), (&[q, q], NAN), (&[0, NEG], NEG)],
        ),
        (
            "max.f32 %r9, %r0, %r1;",
            'r',
            &[(&[f(1.0), f(2.0)], f(2.0)), (&[f(1.0), q], f(1.0)), (&[NEG, 0], 0)],
        ),
        ("min.NaN.f32 %r9, %r0, %r1;", 'r', &[(&[q, f(2.0)], NAN), (&[f(1.0), f(2.0)], f(1.0))]),
        ("max.NaN.f32 %r9, %r0, %r1;", 'r', &[(&[f(1.0), q], NAN)]),
        ("min.ftz.f32 %r9, %r0, %r1;", 'r', &[(&[1, 2], 0)]),
        ("max.ftz.NaN.f32 %r9, %r0, %r1;", 'r', &[(&[1, q], NAN), (&[1, 2], 0)]),
        (
            "min.xorsign.abs.f32 %r9, %r0, %r1;",
            'r',
            &[(&[f(-1.0), f(2.0)], f(-1.0)), (&[f(-3.0), f(-2.0)], f(2.0))],
        ),
        ("max.xorsign.abs.f32 %r9, %r0, %r1;", 'r', &[(&[f(-1.0), f(2.0)], f(-2.0))]),
        ("copysign.f32 %r9, %r0, %r1;", 'r', &[(&[f(-1.0), f(2.0)], f(-2.0))]),
        ("abs.f64 %x9, %x0;", 'x', &[(&[d(-2.0)], d(2.0))]),
        ("neg.f64 %x9, %x0;", 'x', &[(&[d(2.0)], d(-2.0))]),
        ("min.f64 %x9, %x0, %x1;", 'x', &[(&[d(f64::NAN), d(2.0)], d(2.0)), (&[d(0.0), d(-0.0)], d(-0.0))]),
        ("max.f64 %x9, %x0, %x1;", 'x', &[(&[d(1.0), d(2.0)], d(2.0))]),
        ("copysign.f64 %x9, %x0, %x1;", 'x', &[(&[d(-1.0), d(2.0)], d(-2.0))]),
    ]);
}

/// 9.7.3.14 and on: approximations, within their documented errors, and at their special values.
#[test]
fn approximations() {
    let near = |body: &str, x: f32, expected: f64, error: f64| {
        let found = f32::from_bits(eval(body, 'r', &[&[f(x)]])[0] as u32);
        let off = (f64::from(found) - expected).abs();
        assert!(off <= error, "{body} of {x}: {found}, expected {expected}");
    };
    for x in [0.3f32, 1.7, -2.9] {
        let wide = f64::from(x);
        let relative = |value: f64| value.abs() * 2f64.powi(-22);
        near("ex2.approx.f32 %r9, %r0;", x, wide.exp2(), relative(wide.exp2()));
        near("ex2.approx.ftz.f32 %r9, %r0;", x, wide.exp2(), relative(wide.exp2()));
        near("sin.approx.f32 %r9, %r0;", x, wide.sin(), 2f64.powi(-20));
        near("cos.approx.f32 %r9, %r0;", x, wide.cos(), 2f64.powi(-20));
        near("sin.approx.ftz.f32 %r9, %r0;", x, wide.sin(), 2f64.powi(-20));
        near("cos.approx.ftz.f32 %r9, %r0;", x, wide.cos(), 2f64.powi(-20));
        near("tanh.approx.f32 %r9, %r0;", x, wide.tanh(), wide.tanh().abs() * 2f64.powi(-11));
        near("rcp.approx.f32 %r9, %r0;", x, 1.0 / wide, relative(1.0 / wide));
        near("rcp.approx.ftz.f32 %r9, %r0;", x, 1.0 / wide, relative(1.0 / wide));
    }
    for x in [0.3f32, 1.7, 1e10] {
        let wide = f64::from(x);
        near("lg2.approx.f32 %r9, %r0;", x, wide.log2(), 2f64.powi(-22) * wide.log2().abs().max(1.0));
        near("rsqrt.approx.f32 %r9, %r0;", x, 1.0 / wide.sqrt(), 2f64.powi(-22) / wide.sqrt());
        near("rsqrt.approx.ftz.f32 %r9, %r0;", x, 1.0 / wide.sqrt(), 2f64.powi(-22) / wide.sqrt());
        near("sqrt.approx.f32 %r9, %r0;", x, wide.sqrt(), wide.sqrt() * 2f64.powi(-22));
        near("sqrt.approx.ftz.f32 %r9, %r0;", x, wide.sqrt(), wide.sqrt() * 2f64.powi(-22));
    }
    check(&[
        (
            "ex2.approx.f32 %r9, %r0;",
            'r',
            &[(&[INF], INF), (&[INF | NEG], 0), (&[NEG], f(1.0)), (&[f(f32::NAN)], NAN), (&[f(-149.0)], 1)],
        ),
        ("ex2.approx.ftz.f32 %r9, %r0;", 'r', &[(&[f(-149.0)], 0), (&[1], f(1.0))]),
        (
            "lg2.approx.f32 %r9, %r0;",
            'r',
            &[(&[0], INF | NEG), (&[NEG], INF | NEG), (&[f(-1.0)], NAN), (&[INF], INF), (&[f(1.0)], 0)],
        ),
        ("lg2.approx.ftz.f32 %r9, %r0;", 'r', &[(&[1], INF | NEG)]),
        ("rcp.approx.f32 %r9, %r0;", 'r', &[(&[0], INF), (&[NEG], INF | NEG), (&[INF], 0)]),
        ("rcp.approx.ftz.f32 %r9, %r0;", 'r', &[(&[1], INF), (&[f(2f32.powi(127))], 0)]),
        (
            "rsqrt.approx.f32 %r9, %r0;",
            'r',
            &[(&[0], INF), (&[NEG], INF | NEG), (&[f(-1.0)], NAN), (&[INF], 0)],
        ),
        ("sqrt.approx.f32 %r9, %r0;", 'r', &[(&[NEG], NEG), (&[f(-1.0)], NAN), (&[f(9.0)], f(3.0))]),
        ("sin.approx.f32 %r9, %r0;", 'r', &[(&[0], 0), (&[NEG], NEG), (&[INF], NAN)]),
        ("cos.approx.f32 %r9, %r0;", 'r', &[(&[0], f(1.0)), (&[INF], NAN)]),
        ("tanh.approx.f32 %r9, %r0;", 'r', &[(&[INF], f(1.0)), (&[INF | NEG], f(-1.0))]),
        ("rcp.approx.ftz.f64 %x9, %x0;", 'x', &[(&[d(4.0)], d(0.25)), (&[d(0.0)], d(f64::INFINITY))]),
        ("rsqrt.approx.f64 %x9, %x0;", 'x', &[(&[d(4.0)], d(0.5))]),
    ]);
}
