//! Exchanges between lanes: PTX ISA 9.7.9.6 `shfl.sync`, 9.7.13.9 `vote.sync`, 9.7.13.10 `match.sync`,
//! 9.7.13.11 `activemask`, 9.7.13.12 `redux.sync`, 9.7.13.17 `elect.sync`.

use crate::common::warp;

fn shuffle(mode: &str, b: &str, c: &str) -> (Vec<u32>, u32) {
    let body = format!(
        "add.s32 %r1, %r31, 100;\nshfl.sync.{mode}.b32 %r2|%p1, %r1, {b}, {c}, -1;
        vote.sync.ballot.b32 %r3, %p1, -1;\nsetp.eq.u32 %p2, %r31, 31;\nselp.b32 %r2, %r3, %r2, %p2;
        st.global.u32 [%x27], %r2;"
    );
    let words = warp(&body, &[0]);
    (words[..31].to_vec(), words[31])
}

#[test]
fn shuffles() {
    // c is 31: one segment of 32 lanes, clamped at lane 31; for `up`, at lane 0.
    let (values, inside) = shuffle("up", "1", "0");
    assert_eq!(values[..3], [100, 100, 101]);
    assert_eq!(inside, !1);
    let (values, inside) = shuffle("down", "2", "31");
    assert_eq!(values[..2], [102, 103]);
    assert_eq!((values[30], inside), (130, 0x3fff_ffff));
    let (values, inside) = shuffle("bfly", "3", "31");
    assert_eq!(values[..5], [103, 102, 101, 100, 107]);
    assert_eq!(inside, u32::MAX);
    let (values, inside) = shuffle("idx", "5", "31");
    assert!(values.iter().all(|it| *it == 105));
    assert_eq!(inside, u32::MAX);
    // Segments of 8 lanes: the mask of c is 24.
    let (values, inside) = shuffle("idx", "3", "0x181f");
    assert_eq!((values[0], values[9], values[30]), (103, 111, 127));
    assert_eq!(inside, u32::MAX);
    let (values, inside) = shuffle("down", "4", "0x1807");
    assert_eq!((values[3], values[4], values[11]), (107, 104, 115));
    assert_eq!(inside, 0x0f0f_0f0f);
    let (values, inside) = shuffle("up", "2", "0x1800");
    assert_eq!((values[8], values[10]), (108, 108));
    assert_eq!(inside, 0xfcfc_fcfc);
}

#[test]
fn votes() {
    let vote = |form: &str, limit: u32| {
        warp(
            &format!(
                "setp.lt.u32 %p1, %r31, {limit};\nvote.sync.{form}.pred %p2, %p1, -1;
        selp.b32 %r1, 1, 0, %p2;\nst.global.u32 [%x27], %r1;"
            ),
            &[0],
        )
    };
    for (form, none, some, all) in [("all", 0, 0, 1), ("any", 0, 1, 1), ("uni", 1, 0, 1)] {
        assert_eq!(vote(form, 0), [none; 32], "{form}");
        assert_eq!(vote(form, 3), [some; 32], "{form}");
        assert_eq!(vote(form, 32), [all; 32], "{form}");
    }
    let body = "setp.lt.u32 %p1, %r31, 3;\nvote.sync.ballot.b32 %r1, !%p1, -1;\nst.global.u32 [%x27], %r1;";
    assert_eq!(warp(body, &[0]), [!0b111; 32]);
}

#[test]
fn matches_and_reductions() {
    let body = "and.b32 %r1, %r31, 3;\nmatch.any.sync.b32 %r2, %r1, -1;\nst.global.u32 [%x27], %r2;";
    assert_eq!(warp(body, &[0])[..4], [0x1111_1111, 0x2222_2222, 0x4444_4444, 0x8888_8888]);
    let body = "cvt.u64.u32 %x1, %r31;\nand.b64 %x1, %x1, 1;\nmatch.any.sync.b64 %r2, %x1, -1;
        st.global.u32 [%x27], %r2;";
    assert_eq!(warp(body, &[0])[..2], [0x5555_5555, 0xaaaa_aaaa]);
    let body = "match.all.sync.b32 %r2|%p1, 7, -1;\nmatch.all.sync.b32 %r3|%p2, %r31, -1;
        selp.b32 %r4, 1, 0, %p1;
        selp.b32 %r5, 2, 0, %p2;\nadd.s32 %r4, %r4, %r5;\nxor.b32 %r2, %r2, %r3;\nadd.s32 %r2, %r2, %r4;
        st.global.u32 [%x27], %r2;";
    assert_eq!(warp(body, &[0]), [0; 32]);
    let redux = |form: &str, value: &str| {
        warp(
            &format!(
                "sub.s32 %r2, %r31, 16;\nredux.sync.{form} %r1, {value}, -1;\nst.global.u32 [%x27], %r1;"
            ),
            &[0],
        )
    };
    for (form, value, expected) in [
        ("add.u32", "%r31", 496),
        ("add.s32", "%r2", 0xffff_fff0),
        ("min.u32", "%r2", 0),
        ("min.s32", "%r2", 0xffff_fff0),
        ("max.u32", "%r2", 0xffff_ffff),
        ("max.s32", "%r2", 15),
        ("and.b32", "%r31", 0),
        ("or.b32", "%r31", 31),
        ("xor.b32", "%r31", 0),
    ] {
        assert_eq!(redux(form, value), [expected; 32], "{form}");
    }
}

/// Lanes that have exited are not waited for, whether they exit before or after the others come to an
/// exchange.
#[test]
fn exited_lanes() {
    for (first, last) in [("@!%p1 exit;", ""), ("@!%p1 bra OUT;", "bra.uni END;\nOUT:\nexit;\nEND:")] {
        let body = format!(
            "st.global.u32 [%x27], 0;\nsetp.lt.u32 %p1, %r31, 8;\n{first}
            redux.sync.add.u32 %r1, %r31, -1;\nst.global.u32 [%x27], %r1;\n{last}"
        );
        let words = warp(&body, &[0]);
        assert_eq!((words[7], words[8]), (28, 0), "{first}");
    }
}

/// Lanes that took one side of a branch exchange among themselves.
#[test]
fn in_divergent_code() {
    let body = "setp.lt.u32 %p1, %r31, 8;\n@!%p1 bra OTHER;
        redux.sync.add.u32 %r1, %r31, 0xff;\nactivemask.b32 %r2;\nbra.uni JOIN;
        OTHER:\nredux.sync.add.u32 %r1, %r31, 0xffffff00;\nactivemask.b32 %r2;
        JOIN:\nbar.warp.sync -1;\nadd.s32 %r1, %r1, %r2;\nst.global.u32 [%x27], %r1;";
    let words = warp(body, &[0]);
    assert_eq!(words[..8], [28 + 0xff; 8]);
    assert_eq!(words[8..], [(468u32).wrapping_add(0xffff_ff00); 24]);
    // A converged warp, whose halves name only themselves.
    let body = "setp.lt.u32 %p1, %r31, 16;\nselp.b32 %r2, 0xffff, 0xffff0000, %p1;
        redux.sync.add.u32 %r1, %r31, %r2;
        elect.sync %r3|%p2, %r2;\nselp.b32 %r4, 1000, 0, %p2;\nadd.s32 %r1, %r1, %r4;
        st.global.u32 [%x27], %r1;";
    let words = warp(body, &[0]);
    assert_eq!((words[0], words[1], words[16], words[17]), (1120, 120, 1376, 376));
}
