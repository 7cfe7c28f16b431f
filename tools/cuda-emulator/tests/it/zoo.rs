//! Kernels with planted errors: each must be found, and named; without the error nothing is found, in any
//! order of warps.

use crate::common::{module, run_on};
use Kind::{
    Assert, Barrier, Divergence, Hang, Misaligned, OutOfBounds, PendingCopy, Race, Trap, Uninitialised,
    UseAfterFree,
};
use cuda::{Kind, Machine, Params, Shape};

/// A kernel, how it is launched, and its errors: name, the text to replace, the text in its place, what
/// must be found.
struct Kernel {
    name: &'static str,
    before: &'static str,
    body: &'static str,
    shape: Shape,
    input: usize,
    output: usize,
    errors: &'static [(&'static str, &'static str, &'static str, &'static [Kind])],
}

/// Sums a row: lanes by shuffles, warps through shared memory.
fn sum() -> Kernel {
    Kernel {
        name: "sum of a row",
        before: "",
        body: "
            .shared .align 4 .b8 part[16];
            .shared .align 4 .b8 total[4];
            shr.u32 %r1, %r31, 5;
            and.b32 %r2, %r31, 31;
            mov.u32 %r3, 0;
            setp.ge.u32 %p1, %r31, %r30;
            @%p1 bra SKIP;
            ld.global.u32 %r3, [%x28];
            SKIP:
            shfl.sync.bfly.b32 %r4, %r3, 16, 31, -1;
            add.s32 %r3, %r3, %r4;
            shfl.sync.bfly.b32 %r4, %r3, 8, 31, -1;
            add.s32 %r3, %r3, %r4;
            shfl.sync.bfly.b32 %r4, %r3, 4, 31, -1;
            add.s32 %r3, %r3, %r4;
            shfl.sync.bfly.b32 %r4, %r3, 2, 31, -1;
            add.s32 %r3, %r3, %r4;
            shfl.sync.bfly.b32 %r4, %r3, 1, 31, -1;
            add.s32 %r3, %r3, %r4;
            setp.ne.u32 %p2, %r2, 0;
            @%p2 bra STORED;
            mov.u32 %r5, part;
            shl.b32 %r6, %r1, 2;
            add.s32 %r5, %r5, %r6;
            st.shared.u32 [%r5], %r3;
            STORED:
            bar.sync 0; // first
            setp.ne.u32 %p3, %r31, 0;
            @%p3 bra SUMMED;
            ld.shared.v4.u32 {%r6, %r7, %r8, %r9}, [part];
            add.s32 %r6, %r6, %r7;
            add.s32 %r6, %r6, %r8;
            add.s32 %r6, %r6, %r9;
            st.shared.u32 [total], %r6;
            SUMMED:
            bar.sync 0; // second
            ld.shared.u32 %r10, [total];
            st.global.u32 [%x27], %r10;",
        shape: Shape::linear(1, 128),
        input: 100,
        output: 128,
        errors: &[
            ("first barrier dropped", "bar.sync 0; // first", "", &[Race, Uninitialised]),
            ("second barrier dropped", "bar.sync 0; // second", "", &[Race, Uninitialised]),
            ("bound dropped", "@%p1 bra SKIP;", "", &[OutOfBounds]),
            (
                "bound one too large",
                "setp.ge.u32 %p1, %r31, %r30;",
                "setp.gt.u32 %p1, %r31, %r30;",
                &[OutOfBounds],
            ),
            (
                "slot of the next warp",
                "shl.b32 %r6, %r1, 2;",
                "mad.lo.u32 %r6, %r1, 4, 4;",
                &[OutOfBounds, Uninitialised],
            ),
            ("slot of half a word", "shl.b32 %r6, %r1, 2;", "shl.b32 %r6, %r1, 1;", &[Misaligned]),
            (
                "shuffle in a branch",
                "@%p1 bra SKIP;
            ld.global.u32 %r3, [%x28];
            SKIP:",
                "@%p1 exit;
                 ld.global.u32 %r3, [%x28];
                 setp.lt.u32 %p4, %r2, 16;
                 @%p4 shfl.sync.bfly.b32 %r4, %r3, 16, 31, -1;",
                &[Divergence],
            ),
            ("shuffle names too few", "16, 31, -1", "16, 31, 0xffff", &[Divergence]),
            ("warps store at one slot", "add.s32 %r5, %r5, %r6;", "", &[Race, Uninitialised]),
            (
                "barrier in a branch",
                "setp.ne.u32 %p3, %r31, 0;
            @%p3 bra SUMMED;",
                "setp.ne.u32 %p3, %r31, 0;
                 @%p3 bra SUMMED;
                 bar.sync 0;",
                &[Barrier],
            ),
            ("barrier of too many", "bar.sync 0; // second", "bar.sync 0, 256;", &[Barrier]),
            (
                "a write that all make",
                "setp.ne.u32 %p3, %r31, 0;",
                "st.shared.u32 [total], %r31;
                 setp.ne.u32 %p3, %r31, 0;",
                &[Race],
            ),
        ],
    }
}

/// Lanes swap values through shared memory.
fn swap() -> Kernel {
    Kernel {
        name: "swap in a warp",
        before: "",
        body: "
            .shared .align 4 .b8 s[128];
            mov.u32 %r1, s;
            shl.b32 %r2, %r31, 2;
            add.s32 %r3, %r1, %r2;
            st.shared.u32 [%r3], %r31;
            bar.warp.sync -1;
            xor.b32 %r4, %r2, 4;
            add.s32 %r4, %r1, %r4;
            ld.shared.u32 %r5, [%r4];
            st.global.u32 [%x27], %r5;",
        shape: Shape::linear(1, 32),
        input: 1,
        output: 32,
        errors: &[
            ("barrier of lanes dropped", "bar.warp.sync -1;", "", &[Race]),
            (
                "barrier in a branch",
                "bar.warp.sync -1;",
                "setp.lt.u32 %p1, %r31, 7;
                 @%p1 bar.warp.sync -1;",
                &[Divergence, Race],
            ),
            ("barrier names too few", "bar.warp.sync -1;", "bar.warp.sync 0xffff;", &[Divergence, Race]),
            (
                "lanes of the wrong half",
                "bar.warp.sync -1;",
                "setp.lt.u32 %p1, %r31, 1;
                 selp.b32 %r9, 1, 0xfffffffe, %p1;
                 bar.warp.sync %r9;",
                &[Race],
            ),
            ("past the end", "xor.b32 %r4, %r2, 4;", "add.s32 %r4, %r2, 4;", &[OutOfBounds]),
        ],
    }
}

/// Two stages of asynchronous copies.
fn pipeline() -> Kernel {
    Kernel {
        name: "pipeline of copies",
        before: "",
        body: "
            .shared .align 16 .b8 s[2048];
            mov.u32 %r1, s;
            shl.b32 %r2, %r31, 4;
            add.s32 %r3, %r1, %r2;
            mul.wide.u32 %x1, %r31, 16;
            add.s64 %x1, %x30, %x1;
            cp.async.cg.shared.global [%r3], [%x1], 16;
            cp.async.commit_group;
            mov.u32 %r4, 0;
            mov.u32 %r5, 0;
            LOOP:
            add.s32 %r6, %r4, 1;
            setp.ge.u32 %p1, %r6, 4;
            @%p1 bra LAST;
            and.b32 %r7, %r6, 1;
            mad.lo.u32 %r8, %r7, 1024, %r3;
            mul.wide.u32 %x2, %r6, 1024;
            add.s64 %x3, %x1, %x2;
            cp.async.cg.shared.global [%r8], [%x3], 16; // next
            cp.async.commit_group; // next
            cp.async.wait_group 1;
            bra.uni LANDED;
            LAST:
            cp.async.wait_group 0;
            LANDED:
            bar.sync 0; // landed
            and.b32 %r7, %r4, 1;
            mad.lo.u32 %r8, %r7, 1024, %r1;
            xor.b32 %r9, %r2, 1008;
            add.s32 %r8, %r8, %r9;
            ld.shared.u32 %r10, [%r8];
            add.s32 %r5, %r5, %r10;
            bar.sync 0; // read
            add.s32 %r4, %r4, 1;
            setp.lt.u32 %p2, %r4, 4;
            @%p2 bra LOOP;
            st.global.u32 [%x27], %r5;",
        shape: Shape::linear(1, 64),
        input: 1024,
        output: 64,
        errors: &[
            ("waits for a group too few", "cp.async.wait_group 1;", "cp.async.wait_group 2;", &[PendingCopy]),
            (
                "the last wait is too short",
                "cp.async.wait_group 0;",
                "cp.async.wait_group 1;",
                &[PendingCopy],
            ),
            ("no commit", "cp.async.commit_group; // next", "", &[PendingCopy]),
            (
                "barrier after landing dropped",
                "bar.sync 0; // landed",
                "",
                &[Race, Uninitialised, PendingCopy],
            ),
            ("barrier before the next copy dropped", "bar.sync 0; // read", "", &[Race, PendingCopy]),
            (
                "reads past the input",
                "mul.wide.u32 %x2, %r6, 1024;",
                "mul.wide.u32 %x2, %r6, 2048;",
                &[OutOfBounds],
            ),
            (
                "writes past shared memory",
                "mad.lo.u32 %r8, %r7, 1024, %r3;",
                "mad.lo.u32 %r8, %r7, 1040, %r3;",
                &[OutOfBounds],
            ),
            ("source is not aligned", "add.s64 %x3, %x1, %x2;", "add.s64 %x3, %x1, 8;", &[Misaligned]),
        ],
    }
}

/// A histogram in shared memory.
fn histogram() -> Kernel {
    Kernel {
        name: "histogram",
        before: "",
        body: "
            .shared .align 4 .b8 bins[256];
            mov.u32 %r1, bins;
            shl.b32 %r2, %r31, 2;
            add.s32 %r3, %r1, %r2;
            mov.u32 %r9, 0;
            st.shared.u32 [%r3], %r9; // clear
            bar.sync 0; // cleared
            ld.global.u32 %r4, [%x28];
            and.b32 %r4, %r4, 63; // bin
            shl.b32 %r4, %r4, 2;
            add.s32 %r4, %r1, %r4;
            atom.shared.add.u32 %r5, [%r4], 1;
            bar.sync 0; // counted
            ld.shared.u32 %r6, [%r3];
            st.global.u32 [%x27], %r6;",
        shape: Shape::linear(1, 64),
        input: 64,
        output: 64,
        errors: &[
            ("bins not cleared", "st.shared.u32 [%r3], %r9; // clear", "", &[Uninitialised]),
            ("barrier after clearing dropped", "bar.sync 0; // cleared", "", &[Race, Uninitialised]),
            ("barrier after counting dropped", "bar.sync 0; // counted", "", &[Race]),
            (
                "counts without atomics",
                "atom.shared.add.u32 %r5, [%r4], 1;",
                "ld.shared.u32 %r5, [%r4];
                 add.s32 %r5, %r5, 1;
                 st.shared.u32 [%r4], %r5;",
                &[Race],
            ),
            ("bin not masked", "and.b32 %r4, %r4, 63; // bin", "", &[OutOfBounds]),
        ],
    }
}

/// CTAs store parts; the last one to arrive adds them up.
fn last_one() -> Kernel {
    Kernel {
        name: "sum over CTAs",
        before: ".global .align 4 .u32 arrived;",
        body: "
            mov.u32 %r1, %ctaid.x;
            mul.wide.u32 %x1, %r1, 4;
            add.s64 %x2, %x31, %x1;
            add.s32 %r2, %r1, 10;
            st.global.u32 [%x2+4], %r2;
            membar.gl; // publish
            atom.global.add.u32 %r3, [arrived], 1;
            setp.ne.u32 %p1, %r3, 3;
            @%p1 exit;
            membar.gl; // acquire
            ld.global.u32 %r4, [%x31+4];
            ld.global.u32 %r5, [%x31+8];
            ld.global.u32 %r6, [%x31+12];
            ld.global.u32 %r7, [%x31+16];
            add.s32 %r4, %r4, %r5;
            add.s32 %r4, %r4, %r6;
            add.s32 %r4, %r4, %r7;
            st.global.u32 [%x31], %r4;",
        shape: Shape::linear(4, 1),
        input: 1,
        output: 5,
        errors: &[
            ("fence before the counter dropped", "membar.gl; // publish", "", &[Race]),
            ("fence after the counter dropped", "membar.gl; // acquire", "", &[Race]),
            ("nobody waits for the last", "@%p1 exit;", "", &[Race, Uninitialised]),
            (
                "CTAs store at one place",
                "add.s64 %x2, %x31, %x1;",
                "mov.u64 %x2, %x31;",
                &[Race, Uninitialised],
            ),
            (
                "counter without atomics",
                "atom.global.add.u32 %r3, [arrived], 1;",
                "ld.global.u32 %r3, [arrived];
                 add.s32 %r9, %r3, 1;
                 st.global.u32 [arrived], %r9;",
                &[Race],
            ),
            (
                "writes past the output",
                "st.global.u32 [%x2+4], %r2;",
                "st.global.u32 [%x2+8], %r2;",
                &[OutOfBounds],
            ),
        ],
    }
}

/// A matrix product of one tile.
fn tile() -> Kernel {
    Kernel {
        name: "tile of a matrix product",
        before: "",
        body: "
            .shared .align 16 .b8 a[512];
            mov.u32 %r1, a;
            shl.b32 %r2, %r31, 4;
            add.s32 %r3, %r1, %r2;
            mov.u32 %r4, 0x3c003c00;
            st.shared.v4.u32 [%r3], {%r4, %r4, %r4, %r4}; // fill
            bar.sync 0;
            ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r5, %r6, %r7, %r8}, [%r3];
            mov.u32 %r9, 0;
            mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r10, %r11, %r12, %r13},
            {%r5, %r6, %r7, %r8}, {%r4, %r4}, {%r9, %r9, %r9, %r9};
            st.global.u32 [%x27], %r10;",
        shape: Shape::linear(1, 32),
        input: 1,
        output: 32,
        errors: &[
            ("barrier before ldmatrix dropped", "bar.sync 0;", "", &[Race]),
            (
                "row is not aligned",
                "[%r3];
            mov.u32 %r9",
                "[%r3+8];
                 mov.u32 %r9",
                &[Misaligned],
            ),
            (
                "row past the end",
                "[%r3];
            mov.u32 %r9",
                "[%r3+16];
                 mov.u32 %r9",
                &[OutOfBounds],
            ),
            (
                "half of the tile filled",
                "st.shared.v4.u32 [%r3], {%r4, %r4, %r4, %r4}; // fill",
                "st.shared.v2.u32 [%r3], {%r4, %r4};",
                &[Uninitialised],
            ),
            (
                "mma in a branch",
                "mov.u32 %r9, 0;",
                "mov.u32 %r9, 0;
                 setp.eq.u32 %p1, %r31, 9;
                 @%p1 exit;",
                &[Divergence],
            ),
        ],
    }
}

/// Elements one by one, local memory, and control.
fn element() -> Kernel {
    Kernel {
        name: "elements",
        before: ".const .align 4 .b8 two[4] = {2, 0, 0, 0};
        .extern .func __assertfail(.param .b64 a, .param .b64 b, .param .b32 c,
            .param .b64 d, .param .b64 e);",
        body: "
            .local .align 8 .b8 keep[16];
            T: .branchtargets A, B;
            mov.u64 %x1, keep;
            mov.u32 %r1, %ctaid.x;
            mad.lo.u32 %r2, %r1, 32, %r31;
            mul.wide.u32 %x2, %r2, 4;
            add.s64 %x3, %x30, %x2;
            add.s64 %x4, %x31, %x2;
            ld.global.u32 %r3, [%x3];
            st.local.u32 [%x1], %r3; // keep
            st.local.u32 [%x1+4], %r2; // keep
            and.b32 %r4, %r31, 1;
            brx.idx %r4, T;
            A:
            ld.local.u32 %r5, [%x1];
            bra.uni C;
            B:
            ld.local.u32 %r5, [%x1+4];
            C:
            ld.const.u32 %r6, [two];
            mul.lo.u32 %r5, %r5, %r6;
            st.global.u32 [%x4], %r5;",
        shape: Shape::linear(2, 32),
        input: 64,
        output: 64,
        errors: &[
            ("CTAs write the same elements", "add.s64 %x4, %x31, %x2;", "add.s64 %x4, %x31, %x29;", &[Race]),
            (
                "reads what another CTA wrote",
                "ld.const.u32 %r6, [two];",
                "st.global.u32 [%x4], %r5;
                 ld.global.u32 %r6, [%x31];",
                &[Race],
            ),
            ("reads its output", "ld.global.u32 %r3, [%x3];", "ld.global.u32 %r3, [%x4];", &[Uninitialised]),
            (
                "address of one byte more",
                "ld.global.u32 %r3, [%x3];",
                "ld.global.u32 %r3, [%x3+1];",
                &[Misaligned],
            ),
            (
                "vector at an odd word",
                "ld.global.u32 %r3, [%x3];",
                "ld.global.v2.u32 {%r3, %r9}, [%x3];",
                &[Misaligned],
            ),
            (
                "null pointer",
                "ld.global.u32 %r3, [%x3];",
                "mov.u64 %x3, 0;
                 ld.global.u32 %r3, [%x3];",
                &[OutOfBounds],
            ),
            ("a word never stored", "st.local.u32 [%x1+4], %r2; // keep", "", &[Uninitialised]),
            (
                "past the local array",
                "st.local.u32 [%x1], %r3; // keep",
                "st.local.u32 [%x1+4096], %r3;",
                &[OutOfBounds],
            ),
            (
                "writes to constants",
                "ld.const.u32 %r6, [two];",
                "mov.u64 %x9, two;
                 st.global.u32 [%x9], %r5;
                 ld.const.u32 %r6, [two];",
                &[OutOfBounds],
            ),
            ("index past the targets", "and.b32 %r4, %r31, 1;", "and.b32 %r4, %r31, 3;", &[Trap]),
            (
                "calls what is no function",
                "ld.const.u32 %r6, [two];",
                "mov.u64 %x9, 4096;
                 P: .callprototype _ ();
                 call %x9, (), P;
                 mov.u32 %r6, 1;",
                &[Trap],
            ),
            (
                "trap",
                "brx.idx %r4, T;",
                "trap;
                 brx.idx %r4, T;",
                &[Trap],
            ),
            (
                "assertion",
                "ld.const.u32 %r6, [two];",
                "mov.u64 %x9, two;
                 {.param .b64 a;
                 st.param.b64 [a], %x9;
                 .param .b64 b;
                 st.param.b64 [b], %x9;
                 .param .b32 c;
                 st.param.b32 [c], %r5;
                 .param .b64 d;
                 st.param.b64 [d], %x9;
                 .param .b64 e;
                 st.param.b64 [e], %x9;
                 call __assertfail, (a, b, c, d, e);}",
                &[Assert],
            ),
            (
                "endless loop",
                "brx.idx %r4, T;",
                "W:
                 bra.uni W;
                 brx.idx %r4, T;",
                &[Hang],
            ),
        ],
    }
}

fn all() -> Vec<Kernel> {
    vec![sum(), swap(), pipeline(), histogram(), last_one(), tile(), element()]
}

fn go(kernel: &Kernel, body: &str, seed: u64) -> Vec<Kind> {
    let input: Vec<u32> = (0..kernel.input as u32).map(|it| it * 6).collect();
    let mut machine = Machine::new(80, seed);
    machine.limit_instructions(100_000);
    let module = module(&mut machine, kernel.before, body);
    let bytes: Vec<u8> = input.iter().flat_map(|it| it.to_le_bytes()).collect();
    let (from, to) = (machine.upload(&bytes), machine.alloc(kernel.output * 4));
    let params = Params::new().u64(from).u64(to).u32(kernel.input as u32);
    let report = machine.launch(&module, "k", kernel.shape, params.bytes()).expect("the kernel is there");
    for finding in &report.findings {
        assert_eq!(finding.kernel, "k");
        assert!(finding.kind == Kind::Hang || finding.line > 5, "{finding}");
    }
    cuda::kinds(&report.findings)
}

#[test]
fn kernels_without_errors_have_no_findings() {
    for kernel in all() {
        for seed in 0..12 {
            assert_eq!(go(&kernel, kernel.body, seed), [], "{} with seed {seed}", kernel.name);
        }
    }
}

#[test]
fn planted_errors_are_found() {
    let (mut count, mut missed) = (0, Vec::new());
    for kernel in all() {
        for (name, find, replace, expected) in kernel.errors {
            let body = kernel.body.replacen(find, replace, 1);
            assert_ne!(body, kernel.body, "{}: {name}", kernel.name);
            for seed in 0..4 {
                // One error may lead to others; the first of those expected must be among them.
                let found = go(&kernel, &body, seed);
                if !found.iter().any(|it| expected.contains(it)) {
                    missed.push(format!("{}, {name}, seed {seed}: {found:?}, not {expected:?}", kernel.name));
                }
            }
            count += 1;
        }
    }
    assert_eq!(missed, Vec::<String>::new());
    assert!(count >= 30, "{count} errors");
}

#[test]
fn freed_memory_is_found() {
    let mut machine = Machine::new(80, 1);
    let module = module(&mut machine, "", "ld.global.u32 %r1, [%x28];\nst.global.u32 [%x27], %r1;");
    let (from, to) = (machine.upload(&[0; 128]), machine.alloc(128));
    let params = Params::new().u64(from).u64(to).u32(32);
    assert!(machine.free(from));
    let report = machine.launch(&module, "k", Shape::linear(1, 32), params.bytes()).expect("it is there");
    assert_eq!(cuda::kinds(&report.findings), [UseAfterFree]);
    assert_eq!(report.findings[0].address, from);
    assert!(!machine.free(from));
}

/// A finding names the place: line, CTA, thread and address.
#[test]
fn findings_name_the_place() {
    let body = "mov.u32 %r1, %ctaid.x;\nsetp.ne.u32 %p1, %r1, 2;\n@%p1 exit;\nsetp.ne.u32 %p2, %r31, 37;
        @%p2 exit;\nst.global.u32 [%x31+4000], %r1;";
    let found = run_on(80, 1, "", body, Shape::linear(3, 64), &[0], 10);
    let [finding] = &found.findings[..] else { panic!("{:?}", found.findings) };
    assert_eq!((finding.kind, finding.cta, finding.thread, finding.count), (OutOfBounds, [2, 0, 0], 37, 1));
    let text = format!("{finding}");
    assert!(
        text.contains("out-of-bounds: kernel 'k' line") && text.contains("3960 bytes past the end"),
        "{text}"
    );
}
