//! Measures how many instructions of lanes the emulator makes in a second, with all checks.
//!
//! `cargo run -p cuda-emulator --example speed`

use cuda::{Machine, Params, Shape};
use std::time::Instant;

/// A kernel: name, body, threads, and CTAs.
const KERNELS: [(&str, &str, u32, u32); 4] = [
    (
        "arithmetic",
        "mov.u32 %r3, 0;\nLOOP:\nfma.rn.f32 %r1, %r1, %r2, %r1;\nmad.lo.s32 %r4, %r4, %r5, %r3;
        dp4a.s32.s32 %r6, %r4, %r5, %r6;
         shr.u32 %r7, %r6, 3;\nand.b32 %r8, %r7, 255;\nadd.s32 %r3, %r3, 1;\nsetp.lt.u32 %p1, %r3, 2000;
        @%p1 bra LOOP;",
        256,
        8,
    ),
    (
        "global loads and stores",
        "mov.u32 %r3, 0;\nmov.u64 %x4, %x1;\nLOOP:\nld.global.f32 %r1, [%x4];\nadd.f32 %r2, %r1, %r2;
        st.global.f32 [%x2], %r2;
         add.s64 %x4, %x4, 4;\nadd.s32 %r3, %r3, 1;\nsetp.lt.u32 %p1, %r3, 500;\n@%p1 bra LOOP;",
        256,
        8,
    ),
    (
        "shared memory and barriers",
        "mov.u32 %r3, 0;\nLOOP:\nst.shared.u32 [%r9], %r3;\nbar.sync 0;\nld.shared.u32 %r4, [%r9];
        add.s32 %r5, %r4, %r5;
         bar.sync 0;\nadd.s32 %r3, %r3, 1;\nsetp.lt.u32 %p1, %r3, 500;\n@%p1 bra LOOP;",
        256,
        8,
    ),
    (
        "matrix products (m16n8k16)",
        "mov.u32 %r3, 0;\nLOOP:
        mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%r20, %r21, %r22, %r23}, 
         {%r4, %r5, %r6, %r7}, {%r4, %r5}, {%r20, %r21, %r22, %r23};
         add.s32 %r3, %r3, 1;\nsetp.lt.u32 %p1, %r3, 500;\n@%p1 bra LOOP;",
        128,
        2,
    ),
];

fn main() {
    for (name, body, threads, ctas) in KERNELS {
        let text = format!(
            ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 a, .param .u64 b) {{
             .reg .pred %p<4>; .reg .b32 %r<32>; .reg .b64 %x<8>;\n.shared .align 4 .b8 s[4096];
             ld.param.u64 %x1, [a]; ld.param.u64 %x2, [b]; mov.u32 %r30, %tid.x; mov.u32 %r29, %ctaid.x;
             mad.lo.u32 %r29, %r29, 256, %r30;
             mul.wide.u32 %x3, %r29, 4; add.s64 %x1, %x1, %x3; add.s64 %x2, %x2, %x3;
             shl.b32 %r9, %r30, 2; mov.u32 %r10, s; add.s32 %r9, %r9, %r10;
             {body}\nret; }}"
        );
        let mut machine = Machine::new(80, 1);
        let module = machine.load(&text).expect("the kernel is right");
        let (from, to) = (machine.upload(&[0; 64 << 10]), machine.alloc(64 << 10));
        let params = Params::new().u64(from).u64(to);
        let start = Instant::now();
        let report =
            machine.launch(&module, "k", Shape::linear(ctas, threads), params.bytes()).expect("it is there");
        let seconds = start.elapsed().as_secs_f64();
        assert_eq!(report.findings, []);
        let rate = report.lane_operations as f64 / seconds / 1e6;
        println!("{name}: {} lane operations, {rate:.0} million a second", report.lane_operations);
    }
}
