//! Helpers that run PTX for tests.

use cuda::{Finding, Kind, Machine, Module, Params, Shape};

/// The beginning of a module.
pub const HEAD: &str = ".version 8.8\n.target sm_90\n.address_size 64\n";

/// Registers of every test.
pub const REGISTERS: &str = "
    .reg .pred %p<16>;
    .reg .b16 %h<32>;
    .reg .b32 %r<64>;
    .reg .b64 %x<32>;
";

/// The bits of a float.
pub fn f(x: f32) -> u64 {
    u64::from(x.to_bits())
}

/// The bits of a double.
pub fn d(x: f64) -> u64 {
    x.to_bits()
}

/// Runs `body` once for each case. The inputs are in `%x0` to `%x3`, their lower bits in `%r0` to `%r3` and
/// `%h0` to `%h3`, their lowest bit in `%p0` to `%p3`. The result is register 9 of the class that `result`
/// names.
pub fn eval(body: &str, result: char, cases: &[&[u64]]) -> Vec<u64> {
    eval_on(80, body, result, cases)
}

/// As [`eval`], on an architecture.
pub fn eval_on(arch: u32, body: &str, result: char, cases: &[&[u64]]) -> Vec<u64> {
    let convert = match result {
        'r' => "cvt.u64.u32 %x9, %r9;",
        'h' => "cvt.u64.u16 %x9, %h9;",
        'p' => "selp.b64 %x9, 1, 0, %p9;",
        _ => "",
    };
    let mut text = format!("{HEAD}.visible .entry k(.param .u64 k_0, .param .u64 k_1) {{\n{REGISTERS}");
    text.push_str("ld.param.u64 %x20, [k_0];\nld.param.u64 %x21, [k_1];\nmov.u32 %r20, %tid.x;\n");
    text.push_str("mad.wide.u32 %x20, %r20, 32, %x20;\nmad.wide.u32 %x21, %r20, 8, %x21;\n");
    for at in 0..4 {
        text.push_str(&format!("ld.global.u64 %x{at}, [%x20+{}];\ncvt.u32.u64 %r{at}, %x{at};\n", at * 8));
        text.push_str(&format!("cvt.u16.u64 %h{at}, %x{at};\nand.b32 %r21, %r{at}, 1;\n"));
        text.push_str(&format!("setp.ne.u32 %p{at}, %r21, 0;\n"));
    }
    text.push_str(&format!("{body}\n{convert}\nst.global.u64 [%x21], %x9;\nret;\n}}\n"));
    let mut machine = Machine::new(arch, 1);
    let module = machine.load(&text).unwrap_or_else(|error| panic!("{error}\n{body}"));
    let mut input = Vec::new();
    for case in cases {
        let mut row = [0u64; 4];
        row[..case.len()].copy_from_slice(case);
        input.extend(row.iter().flat_map(|it| it.to_le_bytes()));
    }
    let from = machine.upload(&input);
    let to = machine.alloc(cases.len() * 8);
    let params = Params::new().u64(from).u64(to);
    let report = machine.launch(&module, "k", Shape::linear(1, cases.len() as u32), params.bytes());
    let report = report.expect("the kernel is there");
    assert_eq!(report.findings, [], "{body}");
    let out = machine.read(to, cases.len() * 8).expect("it is allocated");
    out.chunks(8).map(|it| u64::from_le_bytes(it.try_into().expect("8 bytes"))).collect()
}

/// Inputs of an instruction, and its result.
pub type Case<'a> = (&'a [u64], u64);

/// Checks instructions: each with its class of result, and cases of inputs and the result.
pub fn check(table: &[(&str, char, &[Case])]) {
    for (body, result, cases) in table {
        let inputs: Vec<&[u64]> = cases.iter().map(|(inputs, _)| *inputs).collect();
        let found = eval(body, *result, &inputs);
        for ((inputs, expected), found) in cases.iter().zip(&found) {
            assert_eq!(found, expected, "{body} of {inputs:#x?}: {found:#x}, expected {expected:#x}");
        }
    }
}

/// A kernel that was run: its findings, and the words of its output.
pub struct Run {
    pub findings: Vec<Finding>,
    pub words: Vec<u32>,
    pub printed: String,
}

impl Run {
    /// The kinds of findings.
    pub fn kinds(&self) -> Vec<Kind> {
        cuda::kinds(&self.findings)
    }
}

/// A kernel `k(in, out, n)` of `body` with declarations before it, on so many words of input and output.
pub fn module(machine: &mut Machine, before: &str, body: &str) -> Module {
    let text = format!(
        "{HEAD}{before}\n.visible .entry k(.param .u64 k_0, .param .u64 k_1, .param .u32 k_2) {{\n{REGISTERS}
        ld.param.u64 %x30, [k_0];\nld.param.u64 %x31, [k_1];\nld.param.u32 %r30, [k_2];
        mov.u32 %r31, %tid.x;\nmul.wide.u32 %x29, %r31, 4;\nadd.s64 %x28, %x30, %x29;
        add.s64 %x27, %x31, %x29;
        {body}\nret;\n}}\n"
    );
    machine.load(&text).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// Runs a body of [`module`]. `%x30` is the input, `%x31` the output, `%r30` the number of words, `%r31`
/// the thread, and `%x28` and `%x27` the thread's words of input and output.
pub fn run(before: &str, body: &str, shape: Shape, input: &[u32], output: usize) -> Run {
    run_on(80, 1, before, body, shape, input, output)
}

/// As [`run`], on an architecture and with a seed.
pub fn run_on(
    arch: u32,
    seed: u64,
    before: &str,
    body: &str,
    shape: Shape,
    input: &[u32],
    output: usize,
) -> Run {
    let mut machine = Machine::new(arch, seed);
    let module = module(&mut machine, before, body);
    let bytes: Vec<u8> = input.iter().flat_map(|it| it.to_le_bytes()).collect();
    let from = machine.upload(&bytes);
    let to = machine.alloc((output * 4).max(4));
    let params = Params::new().u64(from).u64(to).u32(input.len() as u32);
    let report = machine.launch(&module, "k", shape, params.bytes()).expect("the kernel is there");
    let words = machine.read(to, output * 4).expect("it is allocated");
    let words = words.chunks(4).map(|it| u32::from_le_bytes(it.try_into().expect("4 bytes"))).collect();
    Run { findings: report.findings, words, printed: report.printed }
}

/// The output of a body of one warp that must have no findings.
pub fn warp(body: &str, input: &[u32]) -> Vec<u32> {
    let run = run("", body, Shape::linear(1, 32), input, 32);
    assert_eq!(run.findings, [], "{body}");
    run.words
}
