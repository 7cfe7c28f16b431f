//! Matrix instructions: PTX ISA 9.7.14, against products by the tables of its fragments.

use crate::common::{run_on, warp};
use cuda::Shape;

/// A kernel that loads registers `%r1` and on from the input, register by register, runs `op`, and stores
/// `%r11` and on.
fn matrix(arch: u32, op: &str, inputs: &[Vec<u32>], outputs: usize) -> Vec<Vec<u32>> {
    let mut body = String::new();
    for at in 0..inputs.len() {
        body.push_str(&format!("ld.global.u32 %r{}, [%x28+{}];\n", at + 1, at * 128));
    }
    body.push_str(op);
    for at in 0..outputs {
        body.push_str(&format!("\nst.global.u32 [%x27+{}], %r{};", at * 128, at + 41));
    }
    let input: Vec<u32> = inputs.concat();
    let found = run_on(arch, 1, "", &body, Shape::linear(1, 32), &input, outputs * 32);
    assert_eq!(found.findings, [], "{op}");
    found.words.chunks(32).map(<[u32]>::to_vec).collect()
}

fn a_value(row: usize, k: usize) -> f32 {
    ((row * 7 + k * 3) % 11) as f32 - 5.0
}

fn b_value(k: usize, col: usize) -> f32 {
    ((k * 5 + col * 2) % 9) as f32 - 4.0
}

fn c_value(row: usize, col: usize) -> f32 {
    (row * 8 + col) as f32
}

fn f16(x: f32) -> u32 {
    u32::from(half::f16::from_f32(x).to_bits())
}

fn bf16(x: f32) -> u32 {
    u32::from(half::bf16::from_f32(x).to_bits())
}

/// Packs elements `(row, k)` of A or `(k, col)` of B: `per` in a register, as the manual's figures show.
fn fragments(k: usize, per: usize, code: impl Fn(f32) -> u32) -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
    let bits = 32 / per;
    let registers = 16 * k * bits / 1024;
    let (mut a, mut b) = (vec![vec![0; 32]; registers], vec![vec![0; 32]; registers / 2]);
    for lane in 0..32 {
        let (group, thread) = (lane >> 2, lane % 4);
        for e in 0..per {
            for (r, plane) in a.iter_mut().enumerate() {
                // a0..a1 of row `groupID`, a2..a3 of row `groupID + 8`, a4.. and on further columns.
                let row = if r % 2 == 0 { group } else { group + 8 };
                let column = thread * per + e + if r >= 2 { 4 * per } else { 0 };
                plane[lane] |= code(a_value(row, column)) << (bits * e);
            }
            for (r, plane) in b.iter_mut().enumerate() {
                let row = thread * per + e + 4 * per * r;
                plane[lane] |= code(b_value(row, group)) << (bits * e);
            }
        }
    }
    (a, b)
}

fn expected(row: usize, col: usize, k: usize) -> f32 {
    c_value(row, col) + (0..k).map(|it| a_value(row, it) * b_value(it, col)).sum::<f32>()
}

fn list(first: usize, count: usize) -> String {
    let names: Vec<String> = (first..first + count).map(|it| format!("%r{it}")).collect();
    format!("{{{}}}", names.join(", "))
}

/// Checks a shape whose accumulators are 32 bits wide.
fn check(arch: u32, shape: &str, types: &str, k: usize, per: usize, code: impl Fn(f32) -> u32, float: bool) {
    let (a, b) = fragments(k, per, code);
    let write = |x: f32| if float { x.to_bits() } else { x as i32 as u32 };
    let place = |lane: usize, at: usize| (lane / 4 + 8 * (at / 2), lane % 4 * 2 + at % 2);
    let plane = |f: &dyn Fn(usize, usize) -> f32, at: usize| {
        (0..32).map(|lane| write(f(place(lane, at).0, place(lane, at).1))).collect::<Vec<u32>>()
    };
    let c: Vec<Vec<u32>> = (0..4).map(|at| plane(&c_value, at)).collect();
    let (na, nb) = (a.len(), b.len());
    let op = format!(
        "mma.sync.aligned.{shape}.row.col.{types} {}, {}, {}, {};",
        list(41, 4),
        list(1, na),
        list(1 + na, nb),
        list(1 + na + nb, 4)
    );
    let found = matrix(arch, &op, &[a, b, c].concat(), 4);
    for (at, found) in found.iter().enumerate() {
        assert_eq!(*found, plane(&|row, col| expected(row, col, k), at), "{op}");
    }
}

#[test]
fn products() {
    let tf32 = |x: f32| x.to_bits();
    let s8 = |x: f32| u32::from(x as i8 as u8);
    for arch in [80, 90] {
        check(arch, "m16n8k16", "f32.f16.f16.f32", 16, 2, f16, true);
        check(arch, "m16n8k8", "f32.f16.f16.f32", 8, 2, f16, true);
        check(arch, "m16n8k16", "f32.bf16.bf16.f32", 16, 2, bf16, true);
        check(arch, "m16n8k8", "f32.bf16.bf16.f32", 8, 2, bf16, true);
        check(arch, "m16n8k8", "f32.tf32.tf32.f32", 8, 1, tf32, true);
        check(arch, "m16n8k4", "f32.tf32.tf32.f32", 4, 1, tf32, true);
        check(arch, "m16n8k32", "s32.s8.s8.s32", 32, 4, s8, false);
        check(arch, "m16n8k16", "s32.s8.s8.s32", 16, 4, s8, false);
    }
}

/// Accumulators of F16: two in a register.
#[test]
fn half_accumulators() {
    let (a, b) = fragments(16, 2, f16);
    let place = |lane: usize, at: usize, e: usize| (lane / 4 + 8 * at, lane % 4 * 2 + e);
    let plane = |f: &dyn Fn(usize, usize) -> f32, at: usize| {
        let code = |lane, e| f16(f(place(lane, at, e).0, place(lane, at, e).1));
        (0..32).map(|lane| code(lane, 0) | code(lane, 1) << 16).collect::<Vec<u32>>()
    };
    let c = vec![plane(&c_value, 0), plane(&c_value, 1)];
    let op = format!(
        "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {}, {}, {}, {};",
        list(41, 2),
        list(1, 4),
        list(5, 2),
        list(7, 2)
    );
    let found = matrix(80, &op, &[a, b, c].concat(), 2);
    for (at, found) in found.iter().enumerate() {
        assert_eq!(*found, plane(&|row, col| expected(row, col, 16), at));
    }
}

/// Unsigned bytes, and saturation of sums.
#[test]
fn unsigned_and_saturating() {
    let ones = vec![vec![0xffff_ffffu32; 32]; 6];
    let c = vec![vec![0u32; 32]; 4];
    let go = |types: &str, c: Vec<Vec<u32>>| {
        let op = format!(
            "mma.sync.aligned.m16n8k32.row.col.{types} {}, {}, {}, {};",
            list(41, 4),
            list(1, 4),
            list(5, 2),
            list(7, 4)
        );
        matrix(80, &op, &[ones.clone(), c].concat(), 4)[0][0]
    };
    assert_eq!(go("s32.u8.u8.s32", c.clone()), 32 * 255 * 255);
    assert_eq!(go("s32.s8.s8.s32", c.clone()), 32);
    assert_eq!(go("s32.u8.s8.s32", c.clone()), (-32i32 * 255) as u32);
    let full = vec![vec![0x7fff_fff0u32; 32]; 4];
    assert_eq!(go("s32.s8.s8.s32", full.clone()), 0x7fff_fff0u32.wrapping_add(32));
    let op = format!(
        "mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32 {}, {}, {}, {};",
        list(41, 4),
        list(1, 4),
        list(5, 2),
        list(7, 4)
    );
    assert_eq!(matrix(80, &op, &[ones, full].concat(), 4)[0][0], 0x7fff_ffff);
}

/// 9.7.14.5.15 `ldmatrix` and 9.7.14.5.16 `stmatrix`: lane l holds row l / 4, columns 2 (l % 4) and the next.
#[test]
fn matrix_moves() {
    for (form, count) in [("x1", 1usize), ("x2", 2), ("x4", 4)] {
        for trans in ["", ".trans"] {
            let registers = list(1, count);
            let body = format!(
                ".shared .align 16 .b8 s[1024];\nmov.u32 %r20, s;\nshl.b32 %r21, %r31, 4;
        add.s32 %r21, %r20, %r21;
                shl.b32 %r22, %r31, 3;\nmov.u32 %r23, 0;\nadd.s32 %r24, %r22, 0;
                LOOP:\ncvt.u16.u32 %h1, %r24;\nshl.b32 %r25, %r23, 1;\nadd.s32 %r26, %r21, %r25;
        st.shared.u16 [%r26], %h1;\nadd.s32 %r24, %r24, 1;
                add.s32 %r23, %r23, 1;\nsetp.lt.u32 %p1, %r23, 8;\n@%p1 bra LOOP;\nbar.sync 0;
                ldmatrix.sync.aligned.m8n8.{form}{trans}.shared.b16 {registers}, [%r21];\nbar.sync 0;
                stmatrix.sync.aligned.m8n8.{form}{trans}.shared.b16 [%r21], {registers};\nbar.sync 0;
                ld.shared.u32 %r40, [%r21+4];\nshl.b32 %r41, %r{count}, 0;\nst.global.u32 [%x27], %r41;
        setp.eq.u32 %p2, %r31, 31;
                setp.ne.u32 %p3, %r40, 0;\n"
            );
            let words = warp(&body, &[0]);
            for (lane, word) in words.iter().enumerate() {
                let element = |half: usize| {
                    let (row, column) = (lane / 4, lane % 4 * 2 + half);
                    let (row, column) = if trans.is_empty() { (row, column) } else { (column, row) };
                    ((count - 1) * 64 + row * 8 + column) as u32
                };
                assert_eq!(*word, element(0) | element(1) << 16, "{form}{trans} lane {lane}");
            }
        }
    }
}
