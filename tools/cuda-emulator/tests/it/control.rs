//! Control flow and barriers: PTX ISA 9.7.12 and 9.7.13.

use crate::common::{run, run_on, warp};
use cuda::{Kind, Shape};

/// 9.7.12.3 `bra`: loops of different lengths in the lanes of a warp.
#[test]
fn divergent_loops() {
    let body = "mov.u32 %r1, 0;\nmov.u32 %r2, 0;\nLOOP:\nadd.s32 %r1, %r1, %r2;\nadd.s32 %r2, %r2, 1;
        setp.le.u32 %p1, %r2, %r31;\n@%p1 bra LOOP;\nst.global.u32 [%x27], %r1;";
    assert_eq!(warp(body, &[0]), (0..32).map(|it| it * (it + 1) / 2).collect::<Vec<_>>());
}

/// 9.7.12.4 `brx.idx`.
#[test]
fn indexed_branches() {
    let body = "T: .branchtargets A, B, C;\nrem.u32 %r1, %r31, 3;\nbrx.idx %r1, T;
        A:\nmov.u32 %r2, 10;\nbra.uni E;\nB:\nmov.u32 %r2, 20;\nbra.uni E;\nC:\nmov.u32 %r2, 30;
        E:\nst.global.u32 [%x27], %r2;";
    assert_eq!(warp(body, &[0])[..4], [10, 20, 30, 10]);
}

/// Labels and registers of a block are its own.
#[test]
fn blocks() {
    let body = "mov.u32 %r1, 0;\n{\n.reg .b32 t;\n.reg .pred q;\nmov.u32 t, 3;\nW:\nadd.s32 %r1, %r1, 1;
        sub.s32 t, t, 1;
        setp.ne.s32 q, t, 0;\n@q bra W;\n}\n{\n.reg .b64 t;\n.reg .pred q;\nmov.u64 t, 5;\nW:
        add.s32 %r1, %r1, 10;
        sub.s64 t, t, 1;\nsetp.ne.s64 q, t, 0;\n@q bra W;\n}\nst.global.u32 [%x27], %r1;";
    assert_eq!(warp(body, &[0]), [53; 32]);
}

/// 9.7.12.5 `call`: parameters, results, recursion in divergent lanes, local variables, and pointers to
/// functions.
#[test]
fn functions() {
    let before = "
        .func (.param .b32 result) fib(.param .b32 n) {
            .reg .pred %p<3>;\n.reg .b32 %r<9>;\n.local .align 4 .b8 keep[4];
            ld.param.u32 %r1, [n];\nst.local.u32 [keep], %r1;\nsetp.lt.s32 %p1, %r1, 2;\n@%p1 bra DONE;
            add.s32 %r2, %r1, -1;
            { .param .b32 a;\nst.param.b32 [a+0], %r2;\n.param .b32 b;\ncall.uni (b), fib, (a);
        ld.param.b32 %r3, [b+0]; }
            ld.local.u32 %r4, [keep];\nadd.s32 %r4, %r4, -2;
            { .param .b32 a;\nst.param.b32 [a+0], %r4;\n.param .b32 b;\ncall.uni (b), fib, (a);
        ld.param.b32 %r5, [b+0]; }
            add.s32 %r1, %r3, %r5;
            DONE:\nst.param.b32 [result+0], %r1;\nret;
        }
        .func (.param .b32 result) twice(.param .b32 n) {
            .reg .b32 %r<3>;\nld.param.u32 %r1, [n];\nshl.b32 %r2, %r1, 1;\nst.param.b32 [result+0], %r2;
        ret;
        }
        .global .align 8 .u64 table[2] = {fib, twice};";
    let body = "rem.u32 %r1, %r31, 10;\nand.b32 %r2, %r31, 1;\nmul.wide.u32 %x1, %r2, 8;\nmov.u64 %x2, table;
        add.s64 %x1, %x1, %x2;\nld.global.u64 %x3, [%x1];
        { .param .b32 a;\nst.param.b32 [a+0], %r1;\n.param .b32 b;
        P: .callprototype (.param .b32 _) _ (.param .b32 _);
        call (b), %x3, (a), P;\nld.param.b32 %r4, [b+0]; }\nst.global.u32 [%x27], %r4;";
    let found = run(before, body, Shape::linear(1, 32), &[0], 32);
    assert_eq!(found.findings, []);
    let fib = [0, 1, 1, 2, 3, 5, 8, 13, 21, 34];
    let expected: Vec<u32> =
        (0..32).map(|it| if it % 2 == 0 { fib[it % 10] } else { 2 * (it as u32 % 10) }).collect();
    assert_eq!(found.words, expected);
}

/// `vprintf` and `__assertfail`, which compilers call.
#[test]
fn printf_and_assert() {
    let before = ".extern .func (.param .b32 r) vprintf(.param .b64 a, .param .b64 b);
        .global .align 1 .b8 text[15] = {37, 100, 32, 37, 115, 32, 37, 46, 49, 102, 32, 37, 37, 10};
        .global .align 1 .b8 word[3] = {104, 105};";
    let body = ".local .align 8 .b8 list[24];\nmov.u64 %x1, list;\ncvta.local.u64 %x2, %x1;
        st.local.u32 [%x1], %r31;\nmov.u64 %x3, word;
        cvta.global.u64 %x3, %x3;\nst.local.u64 [%x1+8], %x3;\nmov.f64 %x4, 0d3FF8000000000000;
        st.local.f64 [%x1+16], %x4;\nmov.u64 %x5, text;
        { .param .b64 a;\nst.param.b64 [a+0], %x5;\n.param .b64 b;\nst.param.b64 [b+0], %x2;\n.param .b32 c;
        call.uni (c), vprintf, (a, b);\nld.param.b32 %r1, [c+0]; }";
    let found = run(before, body, Shape::linear(1, 2), &[0], 1);
    assert_eq!(found.findings, []);
    assert_eq!(found.printed, "0 hi 1.500000 %\n1 hi 1.500000 %\n");
    let before = ".extern .func __assertfail(.param .b64 a, .param .b64 b, .param .b32 c,
        .param .b64 d, .param .b64 e);
        .global .align 1 .b8 word[3] = {104, 105};";
    let body = "mov.u64 %x1, word;\nmov.u32 %r1, 42;\nmov.u64 %x2, 1;\nsetp.ne.u32 %p1, %r31, 3;\n@%p1 exit;
        { .param .b64 a;\nst.param.b64 [a+0], %x1;\n.param .b64 b;\nst.param.b64 [b+0], %x1;
        .param .b32 c;\nst.param.b32 [c+0], %r1;
        .param .b64 d;\nst.param.b64 [d+0], %x1;\n.param .b64 e;\nst.param.b64 [e+0], %x2;
        call.uni __assertfail, (a, b, c, d, e); }";
    let found = run(before, body, Shape::linear(1, 32), &[0], 1);
    assert_eq!((found.kinds(), found.findings[0].thread), (vec![Kind::Assert], 3));
    assert_eq!(found.findings[0].what, "hi:42: assertion 'hi' failed");
}

/// 9.7.13.1 `bar.sync` and `bar.red` over four warps, in any order of warps.
#[test]
fn barriers() {
    let body = ".shared .align 4 .b8 s[512];\nmov.u64 %x1, s;\nadd.s64 %x2, %x1, %x29;
        st.shared.u32 [%x2], %r31;\nbar.sync 0;
        xor.b32 %r1, %r31, 127;\nmul.wide.u32 %x3, %r1, 4;\nadd.s64 %x3, %x1, %x3;\nld.shared.u32 %r2, [%x3];
        setp.lt.u32 %p1, %r31, 40;\nbar.red.popc.u32 %r3, 0, %p1;\nbar.red.and.pred %p2, 0, %p1;
        bar.red.or.pred %p3, 0, %p1;
        barrier.cta.red.aligned.or.pred %p4, 1, 128, !%p1;\nselp.b32 %r4, 1000, 0, %p2;
        selp.b32 %r5, 2000, 0, %p3;\nselp.b32 %r6, 4000, 0, %p4;
        mad.lo.s32 %r2, %r3, 10000, %r2;\nadd.s32 %r2, %r2, %r4;\nadd.s32 %r2, %r2, %r5;
        add.s32 %r2, %r2, %r6;\nst.global.u32 [%x27], %r2;";
    for seed in 0..8 {
        let found = run_on(80, seed, "", body, Shape::linear(1, 128), &[0], 128);
        assert_eq!(found.findings, []);
        assert_eq!(found.words, (0..128).map(|it| 400_000 + 6000 + (127 - it)).collect::<Vec<u32>>());
    }
}

/// 9.7.13.1 `bar.arrive`: producers go on, consumers wait, and no more than the count takes part.
#[test]
fn named_barriers() {
    let body = ".shared .align 4 .b8 s[128];\nmov.u64 %x1, s;\nshr.u32 %r1, %r31, 5;
        and.b32 %r2, %r31, 31;\nmul.wide.u32 %x2, %r2, 4;
        add.s64 %x2, %x1, %x2;\nsetp.eq.u32 %p1, %r1, 0;\n@!%p1 bra CONSUMER;
        st.shared.u32 [%x2], %r31;\nmembar.cta;\nbarrier.arrive 1, 64;\nexit;
        CONSUMER:\nbar.sync 1, 64;\nld.shared.u32 %r3, [%x2];\nst.global.u32 [%x27], %r3;";
    for seed in 0..8 {
        let found = run_on(80, seed, "", body, Shape::linear(1, 64), &[0], 64);
        assert_eq!(found.findings, []);
        assert_eq!(found.words[32..], (0..32).collect::<Vec<u32>>());
    }
}

/// A flag in global memory orders CTAs that run at once (section 8: release, acquire and fences).
#[test]
fn flags_between_ctas() {
    for (publish, take) in [
        ("st.release.gpu.global.u32 [%x31+4], 1;", "ld.acquire.gpu.global.u32 %r2, [%x31+4];"),
        (
            "membar.gl;\nst.volatile.global.u32 [%x31+4], 1;",
            "ld.volatile.global.u32 %r2, [%x31+4];\nfence.acq_rel.gpu;",
        ),
        (
            "fence.sc.gpu;\nred.global.add.u32 [%x31+4], 1;",
            "atom.global.add.u32 %r2, [%x31+4], 0;\nmembar.gl;",
        ),
    ] {
        let body = format!(
            "mov.u32 %r1, %ctaid.x;\nsetp.eq.u32 %p1, %r1, 0;\n@!%p1 bra WAIT;
            st.global.u32 [%x31], 77;\n{publish}\nexit;
            WAIT:\n{take}\nsetp.eq.u32 %p2, %r2, 0;\n@%p2 bra WAIT;\nld.global.u32 %r3, [%x31];
        st.global.u32 [%x31+8], %r3;"
        );
        let text = format!("setp.eq.u32 %p3, %r31, 99;\n{body}");
        for seed in 0..6 {
            let mut machine = cuda::Machine::new(80, seed);
            let module = crate::common::module(&mut machine, "", &text);
            let to = machine.upload(&[0; 12]);
            let params = cuda::Params::new().u64(to).u64(to).u32(0);
            let shape = Shape { cooperative: true, ..Shape::linear(2, 1) };
            let report = machine.launch(&module, "k", shape, params.bytes()).expect("it is there");
            assert_eq!(report.findings, [], "{publish}");
            assert_eq!(machine.read(to + 8, 4).expect("it is there"), 77u32.to_le_bytes());
        }
    }
}

/// 9.7.12.7 `exit`, 9.7.15.7 `trap`, and instructions that do nothing here.
#[test]
fn ends() {
    let body = "st.global.u32 [%x27], 1;\nsetp.lt.u32 %p1, %r31, 4;\n@%p1 exit;\nst.global.u32 [%x27], 2;
        nanosleep.u32 100;
        prefetch.global.L2 [%x30];\nprefetchu.L1 [%x30];\ngriddepcontrol.wait;
        griddepcontrol.launch_dependents;\npmevent 1;\nmembar.sys;\nfence.acq_rel.cta;";
    let words = warp(body, &[0]);
    assert_eq!((words[3], words[4]), (1, 2));
    let found = run("", "setp.eq.u32 %p1, %r31, 5;\n@%p1 trap;", Shape::linear(1, 32), &[0], 1);
    assert_eq!((found.kinds(), found.findings[0].thread), (vec![Kind::Trap], 5));
}
