//! A launch: its request, the order of its CTAs, and its outcome.

use super::Random;
use super::cta::Cta;
use crate::coverage::Coverage;
use crate::findings::{Finding, Findings, Kind};
use crate::memory::{Epochs, GlobalMemory};
use crate::program::{Function, Program};
use std::sync::Arc;

/// Settings of execution.
#[derive(Clone, Debug)]
pub(crate) struct Config {
    /// Architecture, as `80` for compute capability 8.0.
    pub(crate) arch: u32,
    /// Seed of the order of warps.
    pub(crate) seed: u64,
    /// Most instructions of warps in one launch.
    pub(crate) instructions: u64,
    /// Whether races in global memory are looked for.
    pub(crate) global_races: bool,
    /// Whether only the CTAs at the corners of grids run.
    pub(crate) corners: bool,
    /// The record of executed lines, if there is one.
    pub(crate) coverage: Option<Arc<Coverage>>,
}

/// A launch to run.
#[derive(Clone, Debug)]
pub(crate) struct Request<'a> {
    pub(crate) program: &'a Program,
    pub(crate) kernel: usize,
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) dynamic_shared: u32,
    pub(crate) params: &'a [u8],
    /// Whether all CTAs run at once.
    pub(crate) cooperative: bool,
    /// First epoch of the launch.
    pub(crate) first_epoch: u32,
}

/// The outcome of a launch.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) findings: Vec<Finding>,
    /// Text that the kernel printed.
    pub(crate) printed: String,
    pub(crate) next_epoch: u32,
    /// Instructions of warps.
    pub(crate) instructions: u64,
    /// Instructions of lanes.
    pub(crate) lane_operations: u64,
}

/// The state of a launch while it runs.
pub(super) struct Engine<'a> {
    pub(super) program: &'a Program,
    pub(super) kernel: &'a Function,
    pub(super) memory: &'a mut GlobalMemory,
    pub(super) config: &'a Config,
    pub(super) request: &'a Request<'a>,
    pub(super) epochs: Epochs,
    pub(super) findings: Findings,
    pub(super) printed: String,
    pub(super) random: Random,
    pub(super) instructions: u64,
    pub(super) lane_operations: u64,
    /// Whether each instruction was executed; empty if that is not recorded.
    pub(super) executed: Vec<bool>,
    /// Whether the launch must end: an address, trap or assertion failed.
    pub(super) fatal: bool,
    /// The CTA that runs.
    pub(super) cta: Cta,
}

/// Instructions that a warp makes before another one's turn.
const QUANTUM: u64 = 20_000;
/// Most instructions of a turn that is cut short, as every fourth one is, so that strong accesses of warps
/// fall between one another.
const SHORT: usize = 64;

/// Runs a kernel to its end, or to a fatal finding.
pub(crate) fn launch(request: &Request, memory: &mut GlobalMemory, config: &Config) -> Outcome {
    let kernel = &request.program.functions[request.kernel];
    let mut engine = Engine {
        program: request.program,
        kernel,
        memory,
        config,
        request,
        epochs: Epochs::new(request.first_epoch),
        findings: Findings::default(),
        printed: String::new(),
        random: Random(config.seed),
        instructions: 0,
        lane_operations: 0,
        executed: vec![false; if config.coverage.is_some() { request.program.code.len() } else { 0 }],
        fatal: false,
        cta: Cta::default(),
    };
    if request.cooperative {
        engine.run_together()
    } else {
        engine.run_in_turn()
    }
    if let Some(coverage) = &config.coverage {
        let executed = request.program.code.iter().zip(&engine.executed).filter(|(_, executed)| **executed);
        coverage.add(request.program.text_hash, executed.map(|(inst, _)| inst.line));
    }
    Outcome {
        next_epoch: engine.epochs.end(),
        findings: engine.findings.list,
        printed: engine.printed,
        instructions: engine.instructions,
        lane_operations: engine.lane_operations,
    }
}

impl Engine<'_> {
    /// The CTAs by number and index, in a seeded order: from any one on, in steps of a size that meets all.
    fn indices(&mut self) -> impl Iterator<Item = (u32, [u32; 3])> + use<> {
        let [nx, ny, nz] = self.request.grid;
        let count = u64::from(nx) * u64::from(ny) * u64::from(nz);
        let step = loop {
            let step = self.random.below(count as usize) as u64 + 1;
            if is_coprime(step, count) {
                break step;
            }
        };
        let (mut at, corners) = (self.random.below(count as usize) as u64, self.config.corners);
        let all = (0..count).map(move |_| {
            at = (at + step) % count;
            let (row, x) = (at / u64::from(nx), (at % u64::from(nx)) as u32);
            (at as u32, [x, (row % u64::from(ny)) as u32, (row / u64::from(ny)) as u32])
        });
        let is_outer =
            move |at: [u32; 3]| (0..3).all(|axis| at[axis] == 0 || at[axis] + 1 == [nx, ny, nz][axis]);
        all.filter(move |(_, index)| !corners || is_outer(*index))
    }

    fn run_in_turn(&mut self) {
        for (number, index) in self.indices() {
            self.begin_cta(number, index);
            while !self.fatal && self.turn() {}
            if self.fatal {
                return;
            }
        }
    }

    fn run_together(&mut self) {
        let mut ctas = Vec::new();
        for (number, index) in self.indices() {
            self.cta = Cta::default();
            self.begin_cta(number, index);
            ctas.push(std::mem::take(&mut self.cta));
        }
        while !ctas.is_empty() && !self.fatal {
            let at = self.random.below(ctas.len());
            std::mem::swap(&mut self.cta, &mut ctas[at]);
            let goes_on = self.turn();
            std::mem::swap(&mut self.cta, &mut ctas[at]);
            if !goes_on {
                ctas.swap_remove(at);
            }
        }
    }

    /// Lets one warp of the CTA run; tells whether the CTA goes on.
    fn turn(&mut self) -> bool {
        let ready: Vec<usize> = self.cta.ready_warps();
        if ready.is_empty() {
            return self.unblock();
        }
        let at = ready[self.random.below(ready.len())];
        let mut warp = std::mem::take(&mut self.cta.warps[at]);
        let is_short = self.random.below(4) == 0;
        let quantum = if is_short { 1 + self.random.below(SHORT) as u64 } else { QUANTUM };
        self.run(&mut warp, quantum);
        if !is_short && warp.now.mask != 0 && !warp.others.is_empty() {
            warp.choose(Some(&mut self.random));
        }
        self.cta.warps[at] = warp;
        self.check_barriers();
        if self.instructions > self.config.instructions {
            let what = format!("more than {} instructions of warps", self.config.instructions);
            self.note(Kind::Hang, 0, 0, 0, what);
            self.fatal = true;
        }
        true
    }

    /// Records a finding about a thread of the CTA.
    pub(super) fn note(&mut self, kind: Kind, line: u32, thread: u32, address: u64, what: impl Into<String>) {
        let (kernel, cta) = (self.kernel.name.clone(), self.cta.index);
        self.findings.add(Finding { kind, kernel, line, cta, thread, address, what: what.into(), count: 1 });
    }
}

fn is_coprime(a: u64, b: u64) -> bool {
    let (mut a, mut b) = (a, b);
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a == 1
}
