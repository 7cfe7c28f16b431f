//! A test device of a group that computes nothing but checks everything: the hand-off from the previous
//! stage, the exchanges between the ranks of its stage, and that no sequence continues without its earlier
//! positions. It fails on command.

use crate::common::PATIENCE;
use mainstem::actors::device::ExecutorFactory;
use mainstem::model::executor::{Executor, ExecutorReport};
use mainstem::model::fake::FakeExecutor;
use mainstem_kernels::{
    Aborted, ActivationHandoff, Collective, DeviceError, HandoffPorts, SpanTable, StepBatch, StepLimits,
    StepOutput,
};
use std::collections::{HashMap, HashSet};
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Instant;

/// Number of stages, and of ranks per stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape(pub usize, pub usize);

/// Failure of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    Error,
    Panic,
    /// The thread ends.
    Kill,
    /// The device hangs until the test releases it.
    Stall,
}

/// The point at which a device fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// During the build.
    Build,
    Begin,
    /// Between two exchanges of the stage.
    Middle,
    /// After the last exchange of the stage.
    End,
    /// While the device is dropped.
    Drop,
}

/// A failure of the device with this index (by stage, then rank), at a given step since the start of the
/// group, at a given build, or when the device of that build is dropped.
#[derive(Clone, Copy, Debug)]
pub struct Failure {
    pub device: usize,
    pub at_step: u64,
    pub fault: Fault,
    pub moment: Moment,
}

/// The state shared by all devices of a test.
pub struct Script {
    pub shape: Shape,
    failures: Vec<Failure>,
    /// Number of steps started by each device.
    pub steps: Vec<AtomicU64>,
    /// Number of builds of each device.
    pub builds: Vec<AtomicU64>,
    /// The threads that devices were built on.
    threads: Mutex<Vec<PathBuf>>,
    released: Mutex<bool>,
    release: Condvar,
}

impl Script {
    pub fn new(shape: Shape, failures: impl IntoIterator<Item = Failure>) -> Arc<Script> {
        let counts = || (0..shape.0 * shape.1).map(|_| AtomicU64::new(0)).collect();
        Arc::new(Script {
            shape,
            failures: failures.into_iter().collect(),
            steps: counts(),
            builds: counts(),
            threads: Mutex::default(),
            released: Mutex::new(false),
            release: Condvar::new(),
        })
    }

    /// Returns the factories of all devices. Tokens depend only on seed and position.
    pub fn factories(self: &Arc<Script>, limits: StepLimits) -> Vec<Vec<ExecutorFactory>> {
        let Shape(stages, ranks) = self.shape;
        let factory = |device| {
            let script = self.clone();
            let factory: ExecutorFactory = Box::new(move |collective| {
                let build = script.build(device)?;
                Ok(Box::new(ScriptedRank::new(script.clone(), (device, build), collective, limits)))
            });
            factory
        };
        (0..stages).map(|stage| (0..ranks).map(|rank| factory(stage * ranks + rank)).collect()).collect()
    }

    /// Records that the device is being built on this thread. Returns the number of the build.
    pub fn build(&self, device: usize) -> Result<u64, DeviceError> {
        let build = self.builds[device].fetch_add(1, Ordering::SeqCst);
        if let Ok(thread) = std::fs::read_link("/proc/thread-self") {
            self.threads.lock().expect("no test fails there").push(Path::new("/proc").join(thread));
        }
        self.act(device, build, Moment::Build).map(|()| build)
    }

    /// Records that the device starts a step. Returns the number of the step.
    pub fn step(&self, device: usize) -> u64 {
        self.steps[device].fetch_add(1, Ordering::SeqCst)
    }

    /// Returns the threads on which devices were built.
    pub fn threads(&self) -> usize {
        self.threads.lock().expect("no test fails there").iter().collect::<HashSet<_>>().len()
    }

    /// Releases all hanging devices.
    pub fn release(&self) {
        *self.released.lock().expect("no test fails there") = true;
        self.release.notify_all();
    }

    /// Waits until every thread on which a device was built has ended.
    pub fn threads_end(&self) {
        let began = Instant::now();
        for thread in self.threads.lock().expect("no test fails there").iter() {
            while thread.exists() {
                assert!(began.elapsed() < PATIENCE, "the thread {} is left over", thread.display());
                std::thread::yield_now();
            }
        }
    }

    /// Fails if a failure is due.
    pub fn act(&self, device: usize, step: u64, moment: Moment) -> Result<(), DeviceError> {
        let due =
            |failure: &&Failure| (failure.device, failure.at_step, failure.moment) == (device, step, moment);
        match self.failures.iter().find(due).map(|failure| failure.fault) {
            None => Ok(()),
            Some(Fault::Error) => Err(DeviceError::Fault("the test's device fails".into())),
            Some(Fault::Panic) => panic!("the test's device fails"),
            Some(Fault::Kill) => resume_unwind(Box::new(Bomb)),
            Some(Fault::Stall) => {
                let mut released = self.released.lock().expect("no test fails there");
                while !*released {
                    released = self.release.wait(released).expect("no test fails there");
                }
                Ok(())
            }
        }
    }
}

/// Panic payload that panics again when dropped, so that a thread ends by it wherever panics are caught.
struct Bomb;

impl Drop for Bomb {
    fn drop(&mut self) {
        resume_unwind(Box::new(()));
    }
}

struct ScriptedRank {
    script: Arc<Script>,
    device: usize,
    build: u64,
    stage: usize,
    collective: Box<dyn Collective>,
    answers: FakeExecutor,
    /// Number of positions of each slot's sequence that this device has seen.
    seen: HashMap<u32, u32>,
}

impl ScriptedRank {
    fn new(
        script: Arc<Script>,
        (device, build): (usize, u64),
        collective: Box<dyn Collective>,
        limits: StepLimits,
    ) -> ScriptedRank {
        let Shape(_, ranks) = script.shape;
        assert_eq!((collective.rank(), collective.rank_count()), (device % ranks, ranks));
        let answers = FakeExecutor::new((3..200).collect(), limits);
        let (stage, seen) = (device / ranks, HashMap::new());
        ScriptedRank { script, device, build, stage, collective, answers, seen }
    }

    /// Checks that a continued sequence started on this device.
    fn remember(&mut self, batch: &StepBatch) {
        for step in &batch.moves {
            let seen = self.seen.get(&step.from).copied().unwrap_or(0);
            self.seen.insert(step.to, seen);
        }
        for span in batch.spans.iter().filter(|span| span.table == SpanTable::Own) {
            let seen = if span.start == 0 { 0 } else { self.seen.get(&span.slot).copied().unwrap_or(0) };
            assert_eq!(span.start, seen, "slot {}: something of its sequence is missing here", span.slot);
            self.seen.insert(span.slot, seen + span.len() as u32);
        }
    }

    /// Sums of different sizes, and columns.
    fn exchange(&mut self, step: u64) -> Result<(), Aborted> {
        let ranks = self.collective.rank_count();
        let mut x = vec![(self.collective.rank() + 1) as f32; 1 + step as usize % 100];
        self.collective.all_reduce(&mut x)?;
        assert!(x.iter().all(|x| *x == (ranks * (ranks + 1) / 2) as f32), "{x:?}");
        let widths: Vec<usize> = (1..=ranks).collect();
        let own = vec![self.collective.rank() as f32; 2 * widths[self.collective.rank()]];
        let mut all = vec![-1.0; 2 * widths.iter().sum::<usize>()];
        self.collective.all_gather(2, &widths, &own, &mut all)?;
        let row = (0..ranks).flat_map(|rank| vec![rank as f32; rank + 1]);
        assert_eq!(all, row.clone().chain(row).collect::<Vec<_>>());
        Ok(())
    }
}

impl Executor for ScriptedRank {
    fn run(
        &mut self,
        batch: &StepBatch,
        flow: HandoffPorts<'_>,
        out: &mut StepOutput,
    ) -> Result<(), DeviceError> {
        let (step, last_layer) = (self.script.step(self.device), flow.last_layer);
        let given_up = |Aborted| resume_unwind(Box::new(Aborted));
        self.script.act(self.device, step, Moment::Begin)?;
        self.remember(batch);
        assert_eq!(flow.input.cloned(), self.stage.checked_sub(1).map(|before| mark(batch, before)));
        self.exchange(batch.step).unwrap_or_else(given_up);
        self.script.act(self.device, step, Moment::Middle)?;
        self.exchange(batch.step + 1).unwrap_or_else(given_up);
        let last = self.stage + 1 == self.script.shape.0;
        assert_eq!(flow.output.is_some(), self.collective.rank() == 0 && !last, "the first member hands on");
        if let Some(to) = flow.output {
            *to = mark(batch, self.stage);
        }
        out.clear();
        if self.collective.rank() == 0 && last {
            self.answers.run(
                batch,
                HandoffPorts { late: flow.late, last_layer, ..HandoffPorts::default() },
                out,
            )?;
        }
        self.script.act(self.device, step, Moment::End)
    }

    fn report(&self) -> ExecutorReport {
        ExecutorReport { device: format!("device {}", self.device), ..ExecutorReport::default() }
    }
}

impl Drop for ScriptedRank {
    fn drop(&mut self) {
        let _ = self.script.act(self.device, self.build, Moment::Drop);
    }
}

/// The activations that a stage passes on for a step.
fn mark(batch: &StepBatch, stage: usize) -> ActivationHandoff {
    let decoder = batch.tokens.iter().map(|token| (*token as u8).wrapping_add(stage as u8));
    ActivationHandoff { encoder: batch.step.to_le_bytes().to_vec(), decoder: decoder.collect() }
}
