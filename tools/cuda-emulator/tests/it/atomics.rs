//! Atomic operations: PTX ISA 9.7.13.4 `atom`, 9.7.13.5 `red`.

use crate::common::run;
use cuda::Shape;

/// All 32 lanes do the operation on one value; gives the value, and the sum of what they found there.
fn all_lanes(form: &str, space: &str, start: u32, operand: &str) -> u32 {
    let body = format!(
        ".shared .align 8 .b8 s[8];\nmov.u64 %x1, {};\nld.global.u32 %r1, [%x30];\nsetp.eq.u32 %p1, %r31, 0;
        @%p1 st.{space}.u32 [%x1], %r1;\n@%p1 st.{space}.u32 [%x1+4], 0;\nbar.sync 0;
        cvt.u64.u32 %x5, %r31;\ncvt.rn.f32.u32 %r4, %r31;\ncvt.u16.u32 %h1, %r31;\nmov.b32 %r5, {{%h1, %h1}};
        {form} [%x1], {operand};\nbar.sync 0;\n@%p1 ld.{space}.u32 %r3, [%x1];
        @%p1 st.global.u32 [%x31], %r3;",
        if space == "shared" { "s" } else { "%x31" }
    );
    let found = run("", &body, Shape::linear(1, 32), &[start], 2);
    assert_eq!(found.findings, [], "{form}");
    found.words[0]
}

#[test]
fn integers() {
    for space in ["global", "shared"] {
        let go =
            |form: &str, start, operand: &str| all_lanes(&form.replace('#', space), space, start, operand);
        assert_eq!(go("red.#.add.u32", 5, "%r31"), 5 + 496);
        assert_eq!(go("red.relaxed.gpu.#.add.s32", 5, "%r31"), 5 + 496);
        assert_eq!(go("red.#.min.u32", 5, "%r31"), 0);
        assert_eq!(go("red.#.min.s32", 0xffff_fff0, "%r31"), 0xffff_fff0);
        assert_eq!(go("red.#.max.u32", 5, "%r31"), 31);
        assert_eq!(go("red.#.max.s32", 0xffff_fff0, "%r31"), 31);
        assert_eq!(go("red.#.and.b32", 0xffff_ffff, "0xff0f"), 0xff0f);
        assert_eq!(go("red.#.or.b32", 0, "%r31"), 31);
        assert_eq!(go("red.#.xor.b32", 1, "%r31"), 1);
        assert_eq!(go("red.#.inc.u32", 0, "9"), 32 % 10);
        assert_eq!(go("red.#.dec.u32", 3, "9"), 1);
        assert_eq!(go("red.#.add.u64", 5, "%x5"), 5 + 496);
        assert_eq!(go("red.#.max.u64", 5, "%x5"), 31);
        assert_eq!(go("red.#.min.s64", 5, "%x5"), 0);
        assert_eq!(go("red.#.and.b64", 0xffff, "%x5"), 0);
        assert_eq!(go("atom.#.add.u32 %r6,", 5, "%r31"), 5 + 496);
        assert_eq!(go("atom.#.cta.add.u32 %r6,", 5, "%r31"), 5 + 496);
        assert_eq!(go("atom.acq_rel.gpu.#.add.u32 %r6,", 5, "%r31"), 5 + 496);
        assert_eq!(go("atom.#.exch.b32 %r6,", 5, "77"), 77);
        assert_eq!(go("atom.#.cas.b32 %r6,", 5, "5, 6"), 6);
        assert_eq!(go("atom.#.cas.b64 %x6,", 4, "5, 6"), 4);
        assert_eq!(go("atom.#.cas.b16 %h6,", 5, "5, 6"), 6);
        assert_eq!(go("atom.#.inc.u32 %r6,", 9, "9"), 31 % 10);
        assert_eq!(go("atom.#.dec.u32 %r6,", 0, "9"), 8);
    }
}

#[test]
fn floats() {
    for space in ["global", "shared"] {
        let go =
            |form: &str, start, operand: &str| all_lanes(&form.replace('#', space), space, start, operand);
        assert_eq!(f32::from_bits(go("red.#.add.f32", 1f32.to_bits(), "%r4")), 497.0);
        assert_eq!(f32::from_bits(go("atom.#.add.f32 %r6,", 1f32.to_bits(), "%r4")), 497.0);
        assert_eq!(go("red.#.add.noftz.f16x2", 0, "0x3c003c00"), 0x5000_5000);
        assert_eq!(go("red.#.add.noftz.bf16x2", 0, "0x3f803f80"), 0x4200_4200);
        assert_eq!(go("red.#.add.noftz.f16", 0, "0x3c00"), 0x5000);
    }
    assert_eq!(all_lanes("red.global.add.f64", "global", 0, "0d0000000000000000"), 0);
}

/// The value from before comes back; each lane finds another one.
#[test]
fn old_values() {
    let body = "setp.eq.u32 %p1, %r31, 0;\n@%p1 st.global.u32 [%x31+128], 0;\nbar.sync 0;
        atom.global.add.u32 %r1, [%x31+128], 1;\nst.global.u32 [%x27], %r1;";
    let found = run("", body, Shape::linear(1, 32), &[0], 33);
    let mut seen = found.words[..32].to_vec();
    seen.sort_unstable();
    assert_eq!(seen, (0..32).collect::<Vec<_>>());
    assert_eq!(found.words[32], 32);
    let body = "mov.u32 %r5, 0;\nst.global.v4.u32 [%x31], {%r5, %r5, %r5, %r5};\nmov.u32 %r1, 0f3F800000;
        atom.global.add.v2.f32 {%r2, %r3}, [%x31], {%r1, %r1};
        red.global.add.v4.f32 [%x31], {%r1, %r1, %r1, %r1};";
    let one = 1f32.to_bits();
    let two = 2f32.to_bits();
    assert_eq!(run("", body, Shape::linear(1, 1), &[0], 4).words, [two, two, one, one]);
}
