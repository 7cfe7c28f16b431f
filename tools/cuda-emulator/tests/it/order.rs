//! The order of memory (PTX ISA, section 8): what is a race, and what is none, down to single bytes; fences
//! and their scopes; and orders that a device leaves open.

use crate::common::{Run, run_on};
use Kind::{Barrier, Divergence, Race, Uninitialised};
use cuda::{Kind, Shape};

const SEEDS: std::ops::Range<u64> = 0..12;

fn with_seed(seed: u64, before: &str, body: &str, shape: Shape) -> Run {
    run_on(80, seed, before, body, shape, &[0; 256], 256)
}

/// The body has no findings in any order of warps.
fn is_right(before: &str, body: &str, shape: Shape) {
    for seed in SEEDS {
        assert_eq!(with_seed(seed, before, body, shape).findings, [], "seed {seed}: {body}");
    }
}

/// The body has findings of these kinds in every order of warps; accesses that are too early may also read
/// what is not written yet.
fn is_wrong(before: &str, body: &str, shape: Shape, kind: Kind) {
    for seed in SEEDS {
        let found = with_seed(seed, before, body, shape);
        let kinds: Vec<Kind> = found.kinds().into_iter().filter(|it| *it != Uninitialised).collect();
        assert_eq!(kinds, [kind], "seed {seed}: {body}");
    }
}

/// The body is right, and has a race without the text given.
fn needs(before: &str, body: &str, shape: Shape, text: &str) {
    is_right(before, body, shape);
    assert!(body.contains(text), "{text}");
    is_wrong(before, &body.replacen(text, "", 1), shape, Race);
}

/// Lanes store parts of a word that another lane reads: each is known by its bytes.
#[test]
fn parts_of_words_within_a_warp() {
    for (size, type_name) in [(1, "u8"), (2, "u16")] {
        let body = format!(
            ".shared .align 4 .b8 s[128];\nmov.u32 %r1, s;\nmad.lo.u32 %r2, %r31, {size}, %r1;
            cvt.u16.u32 %h1, %r31;\nst.shared.{type_name} [%r2], %h1;\nbar.warp.sync -1;
            setp.ge.u32 %p1, %r31, {0};\n@%p1 exit;\nmad.lo.u32 %r3, %r31, 4, %r1;
            ld.shared.u32 %r4, [%r3];\nst.global.u32 [%x27], %r4;",
            8 * size
        );
        needs("", &body, Shape::linear(1, 32), "bar.warp.sync -1;");
        // The next lane's part; the last lane reads that of the first.
        let body = format!(
            ".shared .align 4 .b8 s[128];\nmov.u32 %r1, s;\nmad.lo.u32 %r2, %r31, {size}, %r1;
            cvt.u16.u32 %h1, %r31;\nst.shared.{type_name} [%r2], %h1;\nbar.warp.sync -1;
            add.u32 %r3, %r31, 1;\nand.b32 %r3, %r3, 31;\nmad.lo.u32 %r3, %r3, {size}, %r1;
            ld.shared.{type_name} %r4, [%r3];\nst.global.u32 [%x27], %r4;"
        );
        needs("", &body, Shape::linear(1, 32), "bar.warp.sync -1;");
        // A lane reads its own part, and stores it again: nothing must be ordered.
        let body = format!(
            ".shared .align 4 .b8 s[128];\nmov.u32 %r1, s;\nmad.lo.u32 %r2, %r31, {size}, %r1;
            cvt.u16.u32 %h1, %r31;\nst.shared.{type_name} [%r2], %h1;\nld.shared.{type_name} %r4, [%r2];
            add.u32 %r4, %r4, 1;\nst.shared.{type_name} [%r2], %r4;\nst.global.u32 [%x27], %r4;"
        );
        is_right("", &body, Shape::linear(1, 32));
    }
}

/// A lane stores a part that other lanes have read.
#[test]
fn parts_of_words_are_read_and_written() {
    let body = ".shared .align 4 .b8 s[128];\nmov.u32 %r1, s;\nadd.u32 %r2, %r31, %r1;
        mov.u16 %h1, 3;\nst.shared.u8 [%r2], %h1;\nbar.warp.sync -1;
        xor.b32 %r3, %r31, 4;\nadd.u32 %r3, %r3, %r1;\nld.shared.u8 %r4, [%r3];\nbar.warp.sync 0xffffffff;
        st.shared.u8 [%r2], %r31;\nst.global.u32 [%x27], %r4;";
    needs("", body, Shape::linear(1, 32), "bar.warp.sync 0xffffffff;");
}

/// Lanes read parts of words and store them, in memory that nobody stores before.
#[test]
fn parts_of_words_in_place() {
    let body = "cvt.u64.u32 %x2, %r31;\nadd.s64 %x1, %x30, %x2;\nld.global.u8 %r1, [%x1];
        st.global.u8 [%x1], %r1;\nst.global.u8 [%x1], %r31;";
    is_right("", body, Shape::linear(1, 64));
    let next = "add.u32 %r2, %r31, 1;\nand.b32 %r2, %r2, 31;\ncvt.u64.u32 %x1, %r2;\nadd.s64 %x1, %x30, %x1;
        cvt.u64.u32 %x2, %r31;\nadd.s64 %x2, %x30, %x2;\nld.global.u8 %r1, [%x1];\nbar.warp.sync -1;
        st.global.u8 [%x2], %r1;";
    needs("", next, Shape::linear(1, 32), "bar.warp.sync -1;");
}

/// Warps store parts of one word.
#[test]
fn parts_of_words_among_warps() {
    // Warp 1 reads what warp 0 stored beside its own part.
    let body = ".shared .align 4 .b8 s[4];\nshr.u32 %r1, %r31, 5;\nmov.u32 %r2, s;\nadd.u32 %r3, %r1, %r2;
        and.b32 %r4, %r31, 31;\nsetp.ne.u32 %p1, %r4, 0;\n@!%p1 st.shared.u8 [%r3], %r1;\nbar.sync 0;
        setp.ne.u32 %p2, %r31, 32;\n@%p2 exit;\nxor.b32 %r5, %r1, 1;\nadd.u32 %r5, %r5, %r2;
        ld.shared.u8 %r6, [%r5];\nst.global.u32 [%x27], %r6;";
    needs("", body, Shape::linear(1, 64), "bar.sync 0;");
    // Each its own: right without a barrier.
    let own = body.replacen("xor.b32 %r5, %r1, 1;", "mov.u32 %r5, %r1;", 1);
    is_right("", &own, Shape::linear(1, 64));
    is_right("", &own.replacen("bar.sync 0;", "", 1), Shape::linear(1, 64));
    // A warp stores a word; when it is ordered, another stores half of it, and a third one reads the other.
    let body = "setp.lt.u32 %p1, %r31, 32;\nsetp.ge.u32 %p2, %r31, 64;\nmov.u32 %r1, 7;
        setp.eq.u32 %p3, %r31, 0;\nsetp.eq.u32 %p4, %r31, 32;\nsetp.eq.u32 %p5, %r31, 64;
        @%p3 st.global.u32 [%x31], %r1;\nbar.sync 0;\n@%p4 st.global.u16 [%x31], %r31;
        @!%p5 exit;\nld.global.u16 %r2, [%x31+2];\nst.global.u32 [%x31+4], %r2;";
    needs("", body, Shape::linear(1, 96), "bar.sync 0;");
}

/// 9.7.9.9 `ld.global.nc`: the memory is constant while the kernel runs.
#[test]
fn constant_loads_of_what_is_written() {
    let body = "st.global.u32 [%x27], %r31;\nbar.sync 0;\nxor.b32 %r1, %r31, 33;
        mul.wide.u32 %x1, %r1, 4;\nadd.s64 %x1, %x31, %x1;\nld.global#.u32 %r2, [%x1];
        st.global.u32 [%x27+512], %r2;";
    is_right("", &body.replace('#', ""), Shape::linear(1, 64));
    is_wrong("", &body.replace('#', ".nc"), Shape::linear(1, 64), Race);
    // The thread's own store as well; a load before the store is harmless.
    let own = "st.global.u32 [%x27], %r31;\nld.global.nc.u32 %r2, [%x27];\nst.global.u32 [%x27+512], %r2;";
    is_wrong("", own, Shape::linear(1, 64), Race);
    is_right("", "ld.global.nc.u32 %r2, [%x28];\nst.global.u32 [%x28], %r31;", Shape::linear(1, 64));
}

/// All threads of each CTA store; the last CTA reads what all stored.
const LAST: &str = "
    mov.u32 %r1, %ctaid.x;\nmad.lo.u32 %r2, %r1, 64, %r31;\nmul.wide.u32 %x1, %r2, 4;
    add.s64 %x1, %x31, %x1;\nst.global.u32 [%x1], %r2;
    bar.sync 0; // stored
    setp.ne.u32 %p1, %r31, 0;
    @%p1 bra COUNTED;
    membar.gl; // release
    atom.global.add.u32 %r3, [arrived], 1;
    membar.gl; // acquire
    st.shared.u32 [turn], %r3;
    COUNTED:
    bar.sync 0; // counted
    ld.shared.u32 %r3, [turn];
    setp.ne.u32 %p2, %r3, 3;
    @%p2 exit;
    add.s64 %x2, %x31, %x29;
    ld.global.u32 %r4, [%x2];\nld.global.u32 %r5, [%x2+256];\nld.global.u32 %r6, [%x2+512];
    ld.global.u32 %r7, [%x2+768];\nadd.u32 %r4, %r4, %r5;\nadd.u32 %r4, %r4, %r6;\nadd.u32 %r4, %r4, %r7;
    st.global.u32 [%x28], %r4;";
const ARRIVED: &str = ".global .align 4 .u32 arrived;\n.shared .align 4 .b8 turn[4];";

#[test]
fn fences_release_what_their_warp_knows() {
    let shape = Shape::linear(4, 64);
    for text in ["bar.sync 0; // stored", "membar.gl; // release", "membar.gl; // acquire"] {
        needs(ARRIVED, LAST, shape, text);
    }
    // Each thread may fence for itself before the barrier.
    let early = LAST.replacen("membar.gl; // release", "", 1);
    let early = early.replacen("bar.sync 0; // stored", "membar.gl;\nbar.sync 0;", 1);
    is_right(ARRIVED, &early, shape);
    // A fence before the stores releases none of them.
    let before = LAST.replacen("membar.gl; // release", "", 1);
    is_wrong(
        ARRIVED,
        &before.replacen("mov.u32 %r1, %ctaid.x;", "membar.gl;\nmov.u32 %r1, %ctaid.x;", 1),
        shape,
        Race,
    );
    // Instructions with an order of their own need no fences.
    let own = LAST.replacen("membar.gl; // release", "", 1).replacen("membar.gl; // acquire", "", 1);
    is_right(ARRIVED, &own.replacen("atom.global", "atom.acq_rel.gpu.global", 1), shape);
    is_wrong(ARRIVED, &own.replacen("atom.global", "atom.acquire.gpu.global", 1), shape, Race);
    is_wrong(ARRIVED, &own.replacen("atom.global", "atom.release.gpu.global", 1), shape, Race);
}

/// Fences and atomic operations within the CTA do not order those of others.
#[test]
fn scopes() {
    let shape = Shape::linear(4, 64);
    for text in ["membar.gl; // release", "membar.gl; // acquire"] {
        is_wrong(ARRIVED, &LAST.replacen(text, "membar.cta;", 1), shape, Race);
    }
    is_wrong(ARRIVED, &LAST.replacen("atom.global", "atom.cta.global", 1), shape, Race);
    // Within a CTA they do.
    let flag = "setp.eq.u32 %p1, %r31, 0;\nsetp.eq.u32 %p2, %r31, 32;\n@%p1 bra WRITE;\n@%p2 bra READ;\nexit;
        WRITE:\nst.global.u32 [%x31], 7;\nmembar.cta; // release
        atom.cta.global.exch.b32 %r1, [arrived], 1;\nexit;
        READ:\nld.relaxed.cta.global.u32 %r1, [arrived];\nsetp.eq.u32 %p3, %r1, 0;\n@%p3 bra READ;
        membar.cta; // acquire\nld.global.u32 %r2, [%x31];\nst.global.u32 [%x31+4], %r2;";
    needs(ARRIVED, flag, Shape::linear(1, 64), "membar.cta; // release");
    needs(ARRIVED, flag, Shape::linear(1, 64), "membar.cta; // acquire");
}

/// Seeds change the order of CTAs, and where strong accesses of warps fall between one another.
#[test]
fn orders_that_a_device_leaves_open() {
    let ticket = "mov.u32 %r1, %ctaid.x;\natom.global.add.u32 %r2, [arrived], 1;\nmul.wide.u32 %x1, %r1, 4;
        add.s64 %x1, %x31, %x1;\nst.global.u32 [%x1], %r2;";
    let orders: Vec<Vec<u32>> = SEEDS
        .map(|seed| {
            let found = with_seed(seed, ARRIVED, ticket, Shape::linear(12, 1));
            assert_eq!(found.findings, []);
            let mut sorted = found.words[..12].to_vec();
            sorted.sort_unstable();
            assert_eq!(sorted, (0..12).collect::<Vec<_>>());
            found.words[..12].to_vec()
        })
        .collect();
    assert!(orders.iter().any(|it| *it != orders[0]));
    // A counter without atomic operations loses counts: the first lanes of 8 warps count to 20.
    let count = "and.b32 %r9, %r31, 31;\nsetp.ne.u32 %p2, %r9, 0;\nmov.u32 %r3, 0;\n@%p2 bra END;
        LOOP:\nld.volatile.global.u32 %r1, [arrived];\nadd.u32 %r1, %r1, 1;
        st.volatile.global.u32 [arrived], %r1;\nadd.u32 %r3, %r3, 1;\nsetp.lt.u32 %p1, %r3, 20;
        @%p1 bra LOOP;
        END:\nbar.sync 0;\nld.volatile.global.u32 %r2, [arrived];\nst.global.u32 [%x27], %r2;";
    let counts: Vec<u32> =
        SEEDS.map(|seed| with_seed(seed, ARRIVED, count, Shape::linear(1, 256)).words[0]).collect();
    assert!(counts.iter().any(|it| *it < 160), "{counts:?}");
}

/// 9.7.9.6 `shfl.sync`: a lane reads from lanes that it names only.
#[test]
fn shuffles_across_what_is_named() {
    let body = "setp.lt.u32 %p1, %r31, 16;\nselp.b32 %r1, 0xffff, 0xffff0000, %p1;
        shfl.sync.bfly.b32 %r2, %r31, #, 31, %r1;\nst.global.u32 [%x27], %r2;";
    is_right("", &body.replace('#', "8"), Shape::linear(1, 32));
    is_wrong("", &body.replace('#', "16"), Shape::linear(1, 32), Divergence);
}

/// 9.7.13.1 `barrier`: all who come to it name the same number of threads.
#[test]
fn barriers_of_different_counts() {
    let body = "setp.lt.u32 %p1, %r31, 32;\n@%p1 bar.arrive 1, #;\n@%p1 exit;\nbar.sync 1, 64;";
    is_right("", &body.replace('#', "64"), Shape::linear(1, 64));
    is_wrong("", &body.replace('#', "96"), Shape::linear(1, 64), Barrier);
}

/// 9.7.13.4: `atom.add.f32` flushes subnormal numbers in global memory only.
#[test]
fn subnormal_sums() {
    let body =
        ".shared .align 4 .b8 s[4];\nmov.u32 %r1, 1;\nst.shared.u32 [s], %r1;\nst.global.u32 [%x31], %r1;
        red.shared.add.f32 [s], %r1;\nred.global.add.f32 [%x31], %r1;\nld.shared.u32 %r2, [s];
        st.global.u32 [%x31+4], %r2;";
    let found = with_seed(0, "", body, Shape::linear(1, 1));
    assert_eq!((&found.findings[..], &found.words[..2]), (&[][..], &[0, 2][..]));
}
