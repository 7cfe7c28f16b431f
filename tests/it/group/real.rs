//! Tests of groups of real devices that fail, vanish and hang at random, after which no thread is left,
//! including worker threads.

use super::rank::{Failure, Fault, Moment, Script, Shape};
use super::{STEP_TIMEOUT, requests, served};
use crate::common::{self, Outcome, PATIENCE, again, all_home, complete_all, fixture};
use mainstem::actors::device::ExecutorFactory;
use mainstem::actors::engine::{self, Engine};
use mainstem::cli::start::{self, PreparedModel};
use mainstem::model::ModelRef;
use mainstem::model::executor::{Executor, ExecutorReport};
use mainstem_kernels::random::philox;
use mainstem_kernels::{Aborted, Collective, DeviceError, HandoffPorts, StepBatch, StepOutput};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

/// Values of `--devices`.
const GROUPS: [(&str, Shape); 4] = [
    ("cpu:0", Shape(1, 1)),
    ("cpu:0;cpu:1", Shape(2, 1)),
    ("cpu:0&cpu:1", Shape(1, 2)),
    ("cpu:0&cpu:1;cpu:2&cpu:3", Shape(2, 2)),
];

/// A real device that fails on command.
struct Acting {
    inner: Box<dyn Executor>,
    script: Arc<Script>,
    device: usize,
    /// The current step, for failures during exchanges.
    now: Arc<AtomicU64>,
}

impl Executor for Acting {
    fn run(
        &mut self,
        batch: &StepBatch,
        flow: HandoffPorts<'_>,
        out: &mut StepOutput,
    ) -> Result<(), DeviceError> {
        let step = self.script.step(self.device);
        self.now.store(step, Ordering::SeqCst);
        self.script.act(self.device, step, Moment::Begin)?;
        self.inner.run(batch, flow, out)?;
        self.script.act(self.device, step, Moment::End)
    }

    fn report(&self) -> ExecutorReport {
        self.inner.report()
    }
}

/// Collective of a scripted device, which fails as the script says.
struct Exchanging {
    inner: Box<dyn Collective>,
    script: Arc<Script>,
    device: usize,
    now: Arc<AtomicU64>,
}

impl Collective for Exchanging {
    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn rank_count(&self) -> usize {
        self.inner.rank_count()
    }

    fn all_reduce(&mut self, x: &mut [f32]) -> Result<(), Aborted> {
        self.inner.all_reduce(x)?;
        let acted = self.script.act(self.device, self.now.load(Ordering::SeqCst), Moment::Middle);
        acted.unwrap_or_else(|fault| panic!("{fault}"));
        Ok(())
    }

    fn all_gather(
        &mut self,
        rows: usize,
        widths: &[usize],
        own: &[f32],
        all: &mut [f32],
    ) -> Result<(), Aborted> {
        self.inner.all_gather(rows, widths, own, all)
    }
}

fn acting(mut factory: ExecutorFactory, script: &Arc<Script>, device: usize) -> ExecutorFactory {
    let script = script.clone();
    Box::new(move |inner| {
        script.build(device)?;
        let now = Arc::new(AtomicU64::new(0));
        let collective = Exchanging { inner, script: script.clone(), device, now: now.clone() };
        let inner = factory(Box::new(collective))?;
        Ok(Box::new(Acting { inner, script: script.clone(), device, now }))
    })
}

async fn engine(devices: &str, script: &Arc<Script>) -> Engine {
    let settings = [("device.groups", devices.into()), ("scheduler.token_budget", 16.into())];
    let config = common::config(&fixture("gqa"), &settings);
    let prepared = PreparedModel::open(&config, &ModelRef::Path(fixture("gqa"))).expect("the fixture opens");
    let PreparedModel { mut setup, source, tokenizer, device, .. } = prepared;
    setup.step_timeout = Some(STEP_TIMEOUT);
    let mut number = 0..;
    let mut wrap = |factory| acting(factory, script, number.next().expect("it never ends"));
    let factories = start::factories(&device, &source, &tokenizer, &setup);
    let factories = factories.into_iter().map(|stage| stage.into_iter().map(&mut wrap).collect()).collect();
    engine::start(setup, tokenizer, factories).await.expect("the engine starts")
}

/// Returns random failures at random points.
fn failures(shape: Shape, mut below: impl FnMut(usize) -> usize) -> Vec<Failure> {
    let failure = |_| {
        let moment = [Moment::Build, Moment::Begin, Moment::Middle, Moment::End][below(4)];
        let at_step = if moment == Moment::Build { 1 + below(2) } else { below(50) };
        let fault = [Fault::Error, Fault::Panic, Fault::Kill, Fault::Stall][below(4)];
        Failure { device: below(shape.0 * shape.1), at_step: at_step as u64, fault, moment }
    };
    (0..3).map(failure).collect()
}

/// Requests while all that befalls the group, and when it is over.
async fn trial(seed: u32, right: &[Vec<u32>]) {
    let mut rolls = (0..).map(|at| philox([at, 0, 0, 0], [seed, 77])[0] as usize);
    let mut below = |end: usize| rolls.next().expect("they never end") % end;
    let (devices, shape) = GROUPS[below(GROUPS.len())];
    let failures = failures(shape, below);
    let what = format!("{devices}, {failures:?}");
    let script = Script::new(shape, failures);
    let engine = engine(devices, &script).await;
    for _ in 0..3 {
        let outcomes = complete_all(&engine, requests()).await;
        for (outcome, right) in outcomes.iter().zip(right) {
            served(outcome, right, &[]);
        }
    }
    script.release();
    // Lets the remaining failures happen; then the group recovers.
    let began = Instant::now();
    loop {
        let outcomes = complete_all(&engine, requests()).await;
        if outcomes.iter().zip(right).filter(|(outcome, right)| served(outcome, right, &[])).count() == 6 {
            break;
        }
        assert!(began.elapsed() < PATIENCE, "{what}: the group does not come back");
    }
    all_home(&engine, 4).await;
    engine.stop();
    script.threads_end();
}

/// Returns the number of threads of this process.
fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").expect("there is /proc").count()
}

/// Runs in a separate process, so that no other test has threads.
#[test]
fn real_devices_that_fail_by_chance_leave_nothing_behind() {
    const ITSELF: &str = "group::real::real_devices_that_fail_by_chance_leave_nothing_behind";
    if std::env::var_os("ALONE").is_none() {
        return again(ITSELF, &[("ALONE", "1")]);
    }
    let before = threads();
    actix::System::new().block_on(async {
        let script = Script::new(Shape(1, 1), []);
        let one = engine("cpu:0", &script).await;
        let right: Vec<_> = complete_all(&one, requests()).await.iter().map(Outcome::ids).collect();
        one.stop();
        // Those that hang wait for most of their time.
        futures_util::future::join_all((0..24).map(|seed| trial(seed, &right))).await;
    });
    let began = Instant::now();
    while threads() > before {
        assert!(began.elapsed() < PATIENCE, "{} threads are left over", threads() - before);
        std::thread::yield_now();
    }
}
