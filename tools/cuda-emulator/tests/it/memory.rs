//! Loads, stores and copies: PTX ISA 9.7.9.

use crate::common::{HEAD, eval, run, warp};
use cuda::{Kind, Machine, Params, Shape};

/// 9.7.9.8 `ld`, 9.7.9.11 `st`: sizes, signs, vectors, and hints that change nothing.
#[test]
fn sizes_signs_and_vectors() {
    let input: Vec<u32> = (0..256u32).map(|it| 0x8091_a2b3u32.rotate_left(it) ^ it).collect();
    let byte = |at: usize| (input[at / 4] >> (8 * (at % 4))) as u8;
    let load = |form: &str, at: &str| {
        warp(&format!("add.s64 %x1, %x30, %x29;\n{form} %r1, {at};\nst.global.u32 [%x27], %r1;"), &input)
    };
    let expected: Vec<u32> = (0..32).map(|it| byte(4 * it) as i8 as i32 as u32).collect();
    assert_eq!(load("ld.global.s8", "[%x1]"), expected);
    let expected: Vec<u32> = (0..32).map(|it| u32::from(byte(4 * it + 3))).collect();
    assert_eq!(load("ld.global.nc.u8", "[%x1+3]"), expected);
    let half = |it: usize| u16::from_le_bytes([byte(4 * it + 2), byte(4 * it + 3)]);
    let expected: Vec<u32> = (0..32).map(|it| half(it) as i16 as i32 as u32).collect();
    assert_eq!(load("ld.global.s16", "[%x1+2]"), expected);
    let expected: Vec<u32> = (0..32).map(|it| u32::from(half(it))).collect();
    assert_eq!(load("ld.u16", "[%x1+2]"), expected);
    for form in [
        "ld.global.ca.u32",
        "ld.global.cg.u32",
        "ld.global.cs.u32",
        "ld.global.lu.u32",
        "ld.global.cv.u32",
        "ld.volatile.global.u32",
        "ld.relaxed.gpu.global.u32",
        "ld.acquire.sys.global.u32",
        "ld.weak.global.b32",
        "ld.global.nc.L1::no_allocate.u32",
        "ld.global.nc.L1::no_allocate.L2::128B.b32",
        "ldu.global.u32",
        "ld.f32",
        "ld.global.L2::64B.u32",
        "ld.relaxed.cta.u32",
    ] {
        assert_eq!(load(form, "[%x1]"), &input[..32], "{form}");
    }
    for form in [
        "st.global.wb.u32",
        "st.global.cg.u32",
        "st.global.cs.u32",
        "st.global.wt.u32",
        "st.volatile.global.u32",
        "st.relaxed.gpu.global.u32",
        "st.release.sys.global.u32",
        "st.weak.f32",
        "st.global.L1::no_allocate.b32",
    ] {
        let body = format!("ld.global.u32 %r1, [%x28];\n{form} [%x27], %r1;");
        assert_eq!(warp(&body, &input), &input[..32], "{form}");
    }
    let body = "mul.wide.u32 %x1, %r31, 16;\nadd.s64 %x2, %x30, %x1;\nadd.s64 %x3, %x31, %x1;
        ld.global.v4.u32 {%r1, %r2, _, %r4}, [%x2];\nst.global.v4.u32 [%x3], {%r4, %r2, %r1, %r31};";
    let found = run("", body, Shape::linear(1, 32), &input, 128);
    let expected: Vec<u32> = (0..32u32)
        .flat_map(|it| {
            let at = 4 * it as usize;
            [input[at + 3], input[at + 1], input[at], it]
        })
        .collect();
    assert_eq!((found.findings, found.words), (vec![], expected));
    let body = "mul.wide.u32 %x1, %r31, 16;\nadd.s64 %x2, %x30, %x1;\nadd.s64 %x3, %x31, %x1;
        ld.global.v2.u64 {%x4, %x5}, [%x2];\nst.global.v2.b64 [%x3], {%x5, %x4};";
    let found = run("", body, Shape::linear(1, 32), &input, 128);
    assert_eq!(found.words[..4], [input[2], input[3], input[0], input[1]]);
    let body = "st.global.u8 [%x27], %r31;\nst.global.u8 [%x27+1], 7;\nst.global.u16 [%x27+2], %r31;";
    assert_eq!(warp(body, &input)[5], 0x0005_0705);
}

/// 9.7.9.20 `cvta`, 9.7.9.19 `isspacep`: windows of generic addresses.
#[test]
fn generic_addresses() {
    let body = ".shared .align 16 .b8 s[256];\n.local .align 8 .b8 l[16];
        mov.u64 %x1, s;\ncvta.shared.u64 %x2, %x1;\nmov.u64 %x3, l;\ncvta.local.u64 %x4, %x3;
        add.s64 %x5, %x2, %x29;\nst.u32 [%x5], %r31;\nst.local.u32 [%x3+4], %r31;\nld.u32 %r1, [%x4+4];
        cvta.to.shared.u64 %x6, %x5;\ncvt.u32.u64 %r2, %x6;\nld.shared.u32 %r3, [%r2];
        ld.shared.u32 %r4, [s+8];
        isspacep.shared %p1, %x5;\nisspacep.local %p2, %x5;\nisspacep.global %p3, %x30;
        selp.b32 %r5, 1, 0, %p1;
        selp.b32 %r6, 2, 0, %p2;\nselp.b32 %r7, 4, 0, %p3;\nadd.s32 %r8, %r1, %r3;\nadd.s32 %r8, %r8, %r5;
        add.s32 %r8, %r8, %r6;\nadd.s32 %r8, %r8, %r7;\ncvta.to.global.u64 %x7, %x27;
        st.global.u32 [%x7], %r8;";
    // Thread 2's word is read by all without a barrier, which is a race; the values are right all the same.
    let found = run("", body, Shape::linear(1, 32), &[0], 32);
    assert_eq!(found.kinds(), [Kind::Race]);
    assert_eq!(found.words, (0..32).map(|it| 2 * it + 5).collect::<Vec<_>>());
}

/// 5.1.6 and 5.4: constants, initialized variables, addresses in initializers, and zeros for the rest.
#[test]
fn module_variables() {
    let before = ".const .align 4 .b8 table[8] = {1, 0, 0, 0, 2, 0, 0, 0};\n.global .align 4 .u32 value = 7;
        .global .align 8 .u64 where[2] = {value, table};\n.global .align 4 .b8 rest[4];
        .global .f32 one = 0f3F800000;";
    let body = "ld.const.u32 %r1, [table+4];\nld.global.u32 %r2, [value];\nld.global.u64 %x1, [where];
        ld.global.u32 %r3, [%x1];\nld.global.u32 %r4, [rest];\nld.global.f32 %r5, [one];\nmov.u64 %x2, table;
        ld.const.u32 %r6, [%x2];\nadd.s32 %r1, %r1, %r2;\nadd.s32 %r1, %r1, %r3;\nadd.s32 %r1, %r1, %r4;
        add.s32 %r1, %r1, %r5;\nadd.s32 %r1, %r1, %r6;\nst.global.u32 [%x27], %r1;";
    let found = run(before, body, Shape::linear(1, 1), &[0], 1);
    assert_eq!((found.findings, found.words), (vec![], vec![2 + 7 + 7 + 0x3f80_0000 + 1]));
}

/// 9.7.9.25 `cp.async`: 4, 8 and 16 bytes, zeros past the source's size, groups, and landing at the wait.
#[test]
fn asynchronous_copies() {
    let input: Vec<u32> = (0..256).collect();
    let body =
        ".shared .align 16 .b8 s[1024];\nmov.u32 %r1, s;\nshl.b32 %r2, %r31, 4;\nadd.s32 %r1, %r1, %r2;
        mul.wide.u32 %x1, %r31, 16;\nadd.s64 %x1, %x30, %x1;\ncp.async.cg.shared.global [%r1], [%x1], 16;
        cp.async.ca.shared.global [%r1+512], [%x1], 8;\ncp.async.commit_group;\nmov.u32 %r5, 4;
        cp.async.ca.shared.global [%r1+520], [%x1+8], 8, %r5;\ncp.async.commit_group;
        cp.async.wait_group 1;\nld.shared.u32 %r3, [%r1+4];\nld.shared.u32 %r4, [%r1+512];
        cp.async.wait_all;\nld.shared.u32 %r6, [%r1+520];\nld.shared.u32 %r7, [%r1+524];
        add.s32 %r3, %r3, %r4;\nadd.s32 %r3, %r3, %r6;\nadd.s32 %r3, %r3, %r7;\nst.global.u32 [%x27], %r3;";
    let found = run("", body, Shape::linear(1, 32), &input, 32);
    assert_eq!(found.findings, []);
    assert_eq!(found.words, (0..32).map(|it| 4 * it + 1 + 4 * it + 4 * it + 2).collect::<Vec<_>>());
    let body = ".shared .align 16 .b8 s[16];\nmov.u32 %r1, s;\nsetp.eq.u32 %p1, %r31, 0;
        cp.async.cg.shared.global [%r1], [%x30], 16, %p1;\ncp.async.wait_all;\nld.shared.u32 %r2, [%r1+4];
        st.global.u32 [%x27], %r2;";
    assert_eq!(run("", body, Shape::linear(1, 1), &[9, 9, 9, 9], 1).words, [0]);
}

/// 9.7.9.8 `ld.param` of structures, by constant and by register address.
#[test]
fn parameters() {
    let text = format!(
        "{HEAD}.visible .entry k(.param .align 8 .b8 k_0[24], .param .u8 k_1, .param .u64 k_2) {{
        .reg .b32 %r<9>;\n.reg .b64 %x<9>;\n.reg .b16 %h<3>;
        ld.param.u32 %r1, [k_0+4];\nld.param.v2.u32 {{%r2, %r3}}, [k_0+8];\nld.param.u8 %h1, [k_1];
        ld.param.u64 %x1, [k_2];
        mov.b64 %x2, k_0;\ncvta.param.u64 %x3, %x2;\nld.u32 %r4, [%x3+20];\ncvt.u32.u16 %r5, %h1;
        add.s32 %r1, %r1, %r2;\nadd.s32 %r1, %r1, %r3;\nadd.s32 %r1, %r1, %r4;\nadd.s32 %r1, %r1, %r5;
        st.global.u32 [%x1], %r1;\nret;\n}}"
    );
    let mut machine = Machine::new(80, 1);
    let module = machine.load(&text).expect("it is right");
    let to = machine.alloc(4);
    let params = (0..6).fold(Params::new(), |params, it| params.u32(1 << it)).u32(100).u64(to);
    let report = machine.launch(&module, "k", Shape::linear(1, 1), params.bytes()).expect("it is there");
    assert_eq!(report.findings, []);
    assert_eq!(machine.read(to, 4).expect("it is there"), (2 + 4 + 8 + 32 + 100u32).to_le_bytes());
}

/// 10: special registers.
#[test]
fn special_registers() {
    let body = "mov.u32 %r1, %ntid.x;\nmov.u32 %r2, %ctaid.y;\nmov.u32 %r3, %nctaid.y;\nmov.u32 %r4, %laneid;
        mov.u32 %r5, %warpid;\nmov.u32 %r6, %tid.y;\nmov.u32 %r7, %lanemask_lt;
        mov.u32 %r8, %lanemask_ge;\nmov.u32 %r10, %dynamic_smem_size;
        mad.lo.s32 %r11, %r6, 16, %r31;\nmul.wide.u32 %x1, %r11, 32;\nadd.s64 %x1, %x31, %x1;
        setp.ne.u32 %p1, %r2, 1;\n@%p1 exit;
        st.global.v4.u32 [%x1], {%r1, %r2, %r3, %r4};\nst.global.v4.u32 [%x1+16], {%r5, %r6, %r7, %r8};";
    let shape = Shape { grid: [1, 2, 1], block: [16, 4, 1], dynamic_shared: 64, cooperative: false };
    let found = run("", body, shape, &[0], 512);
    assert_eq!(found.findings, []);
    // Thread (3, 2) is number 35: lane 3 of warp 1.
    assert_eq!(found.words[35 * 8..36 * 8], [16, 1, 2, 3, 1, 2, 0b111, !0b111]);
    let clocks = "mov.u64 %x1, %globaltimer;\nmov.u32 %r1, %clock;\nmov.u64 %x2, %clock64;
        mov.u32 %r2, %smid;\nmov.u64 %x9, 1;";
    assert_eq!(eval(clocks, 'x', &[&[]]), [1]);
}
