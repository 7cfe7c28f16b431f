//! Refusals: what the emulator does not know is named, with its line.

use crate::common::{HEAD, REGISTERS};
use cuda::Machine;

fn error(body: &str) -> String {
    let text = format!("{HEAD}.visible .entry k() {{{}\n{body}\nret;\n}}\n", REGISTERS.replace('\n', " "));
    match Machine::new(90, 1).load(&text) {
        Ok(_) => String::new(),
        Err(error) => error.to_string(),
    }
}

#[test]
fn unknown_forms_are_named() {
    for (body, named) in [
        ("wgmma.fence.sync.aligned;", "wgmma.fence.sync.aligned"),
        ("mbarrier.init.shared::cta.b64 [%r1], 1;", "mbarrier.init.shared::cta.b64"),
        ("cp.async.bulk.commit_group;", "bulk"),
        ("cp.async.mbarrier.arrive.shared.b64 [%x1];", "cp.async.mbarrier.arrive.shared.b64"),
        ("tex.2d.v4.f32.f32 {%r1, %r2, %r3, %r4}, [t, {%r1, %r2}];", "tex.2d.v4.f32.f32"),
        ("frobnicate.u32 %r1, %r2;", "frobnicate.u32"),
        ("add.rz.s32 %r1, %r2, %r3;", "add.rz.s32"),
        ("add.blue.f32 %r1, %r2, %r3;", "blue"),
        ("ld.global.pink.u32 %r1, [%x1];", "pink"),
        ("shfl.up.b32 %r1, %r2, 1, 0;", "shfl.up.b32"),
        ("vote.ballot.b32 %r1, %p1;", "vote.ballot.b32"),
        ("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%r1}, {%r1}, {%r1}, {%r1};", "m8n8k4"),
        ("fence.proxy.async;", "fence.proxy.async"),
        ("barrier.cluster.arrive;", "barrier.cluster.arrive"),
        ("setmaxnreg.inc.sync.aligned.u32 24;", "setmaxnreg"),
        (".banana 3;", ".banana"),
        ("add.s32 %r1, %r2, %nothing;", "%nothing"),
        ("bra NOWHERE;", "NOWHERE"),
        ("add.s32 %x1, %r2, %r3;", "64 bits"),
    ] {
        let found = error(body);
        assert!(found.contains(named), "{body}: {found}");
        assert!(found.starts_with("PTX line 5:"), "{body}: {found}");
    }
    assert_eq!(error("add.s32 %r1, %r2, %r3;"), "");
}

#[test]
fn malformed_text_is_refused() {
    let mut machine = Machine::new(90, 1);
    for text in [
        "",
        "x",
        ".version 8.8",
        ".version 8.8\n.entry k( {",
        ".version 8.8\n.visible .entry k() { ret",
        "\u{1}",
        "0fzz",
        "/*",
        "\"",
    ] {
        // Either error is right; nothing may panic.
        let _ = machine.load(text);
    }
    assert!(machine.load("").is_err());
    assert!(machine.load(".version 8.8\n.visible .entry k() { ret").is_err());
}
