//! A launch: its request, the order of its CTAs, and its outcome.

use super::Random;
use super::cta::Cta;
use crate::findings::{Finding, Findings, Kind};
use crate::memory::{Epochs, GlobalMemory};
use crate::program::{Function, Program};

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
    /// Whether the launch must end: an address, trap or assertion failed.
    pub(super) fatal: bool,
    /// The CTA that runs.
    pub(super) cta: Cta,
}

/// Instructions that a warp makes before another one's turn.
const QUANTUM: u64 = 20_000;

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
        fatal: false,
        cta: Cta::default(),
    };
    if request.cooperative {
        engine.run_together()
    } else {
        engine.run_in_turn()
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
    fn indices(&self) -> impl Iterator<Item = [u32; 3]> + use<> {
        let [nx, ny, nz] = self.request.grid;
        (0..nz).flat_map(move |z| (0..ny).flat_map(move |y| (0..nx).map(move |x| [x, y, z])))
    }

    fn run_in_turn(&mut self) {
        for (number, index) in self.indices().enumerate() {
            self.begin_cta(number as u32, index);
            while !self.fatal && self.turn() {}
            if self.fatal {
                return;
            }
        }
    }

    fn run_together(&mut self) {
        let mut ctas = Vec::new();
        for (number, index) in self.indices().enumerate() {
            self.cta = Cta::default();
            self.begin_cta(number as u32, index);
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
        self.run(&mut warp, QUANTUM);
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
