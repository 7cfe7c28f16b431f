//! A group: the devices that hold one model together, and that step, fail and restart together.
//!
//! A step is sent to all ranks of the first stage at once. The first rank of each stage hands it over to all
//! ranks of the next, and the first rank of the last stage returns the results. So steps pass the stages in
//! order, and several are in flight at a time.
//! Any failure of a device (an error, a panic, the end of its thread, or a timeout) fails the whole group:
//! every step in flight gets the same error, and the group is rebuilt before the next step runs.
//! A fault loses the device state of all sequences, also of those without a step in flight. Each step
//! therefore gives the epoch of the state that its sequences depend on, and is refused when that epoch is
//! over.
//! Invariant: a step is answered once, and only by a group without a fault since the state that the step
//! depends on was computed.

pub(super) mod state;

pub(super) mod mailbox;

pub mod link;

mod step_queue;

mod supervisor;

pub use supervisor::Reports;

use super::status::Status;
use super::step::{ExecutorFactory, Step, StepResult};
use anyhow::{Context, Result, ensure};
use link::{Capacity, LinkFactory};
use mainstem_kernels::{DeviceError, StepLimits};
use state::GroupState;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;
use supervisor::Supervisor;
use tokio::sync::oneshot;

/// Configuration of a group.
#[derive(Clone)]
pub struct GroupConfig {
    /// The devices' names, by stage and rank.
    pub names: Vec<Vec<String>>,
    pub limits: StepLimits,
    /// Bytes of a row of the residual stream, which is handed over from stage to stage.
    pub row_bytes: usize,
    /// Maximum number of steps in flight, which is the number of lanes. More steps wait.
    pub lanes: usize,
    /// Maximum time between results while steps are in flight; `None` for no limit.
    pub step_timeout: Option<Duration>,
    /// Creates the links between stages: [`link::local`] within a process.
    pub link_factory: LinkFactory,
    /// Status to update when the devices are rebuilt.
    pub status: Arc<Status>,
}

/// The period between two faults, in which the devices keep the state of sequences.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Epoch(pub u64);

/// The future result of a step.
pub type StepFuture = Pin<Box<dyn Future<Output = StepResult>>>;

/// A step that was sent. Awaiting it gives its result.
pub struct SentStep {
    pub result: StepFuture,
    /// Resolves when the step has passed its last layer, or with an error when it has ended without a signal.
    pub last_layer: oneshot::Receiver<()>,
}

impl IntoFuture for SentStep {
    type Output = StepResult;
    type IntoFuture = StepFuture;

    fn into_future(self) -> StepFuture {
        self.result
    }
}

/// Devices that run steps in the order in which they are sent.
pub trait Devices: Send + Sync {
    /// Sends a step whose sequences got their slots in `epoch`; fails if the epoch is over. The step is sent
    /// when this returns; the result is awaited.
    fn send(&self, step: Box<Step>, epoch: Epoch) -> Result<SentStep, DeviceError>;

    /// Returns the current epoch.
    fn epoch(&self) -> Epoch;

    /// Returns the fault that ended the epoch, as an error, if it is over.
    fn check_epoch(&self, epoch: Epoch) -> Result<(), DeviceError>;

    /// Returns the number of devices that take part in a step.
    fn count(&self) -> usize;
}

/// The devices of a model: stages of layers, and tensor-parallel ranks within a stage.
pub struct Group {
    state: Arc<GroupState>,
    supervisor: Mutex<Option<JoinHandle<()>>>,
}

impl GroupConfig {
    /// A configuration for devices of these names in one process, with one step in flight per stage and no
    /// timeout.
    pub fn new(names: Vec<Vec<String>>, limits: StepLimits, row_bytes: usize) -> GroupConfig {
        let (lanes, status) = (names.len(), Arc::new(Status::new(Duration::ZERO, 0)));
        GroupConfig {
            names,
            limits,
            row_bytes,
            lanes,
            step_timeout: None,
            link_factory: Arc::new(link::local),
            status,
        }
    }

    /// Returns the maximum size of activation hand-offs between stages.
    fn link_capacity(&self) -> Capacity {
        Capacity { limits: self.limits, row_bytes: self.row_bytes, max_steps: self.lanes }
    }

    /// Returns what the log calls the group.
    fn label(&self) -> &'static str {
        match &self.names[..] {
            [stage] if stage.len() == 1 => "the device",
            _ => "the group",
        }
    }
}

impl Group {
    /// Starts a thread per device, and builds all devices in parallel. Fails if one cannot be built.
    pub async fn start(
        factories: Vec<Vec<ExecutorFactory>>,
        config: GroupConfig,
    ) -> Result<(Group, Reports)> {
        let sizes = |lens: &mut dyn Iterator<Item = usize>| lens.collect::<Vec<_>>();
        ensure!(
            sizes(&mut factories.iter().map(Vec::len)) == sizes(&mut config.names.iter().map(Vec::len))
                && !factories.is_empty()
                && factories.iter().all(|stage| !stage.is_empty()),
            "a group needs at least one stage, a stage at least one device, and each device a name"
        );
        let shared =
            |stage: Vec<ExecutorFactory>| stage.into_iter().map(|make| Arc::new(Mutex::new(make))).collect();
        let state = Arc::new(GroupState::new(config));
        let supervisor = Supervisor::new(state.clone(), factories.into_iter().map(shared).collect());
        let (started, built) = oneshot::channel();
        let thread = Builder::new().name("group".to_owned()).spawn(move || supervisor.run(started));
        let thread = thread.context("starting the group's thread")?;
        let group = Group { state, supervisor: Mutex::new(Some(thread)) };
        let reports = built.await.context("the group's thread has ended").flatten();
        match reports {
            Ok(reports) => Ok((group, reports)),
            Err(error) => {
                group.stop();
                Err(error)
            }
        }
    }

    /// Stops the group, and waits a limited time for the running steps. Steps in flight return no results.
    pub fn stop(&self) {
        self.state.stop();
        let thread = self.supervisor.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

/// Any number of steps can be sent; those beyond the devices' capacity wait, as all do while the devices are
/// rebuilt. A waiting step is passed to the first stage by the device that completes an earlier one.
impl Devices for Group {
    fn send(&self, step: Box<Step>, epoch: Epoch) -> Result<SentStep, DeviceError> {
        let (result, last_layer) = self.state.submit(step, epoch)?;
        let result: StepFuture = Box::pin(async move {
            match result.await {
                Ok(ran) => ran,
                Err(_) => StepResult {
                    step: Box::default(),
                    result: Err(DeviceError::Fault(STOPPED_MESSAGE.to_owned())),
                },
            }
        });
        Ok(SentStep { result, last_layer })
    }

    fn epoch(&self) -> Epoch {
        self.state.epoch()
    }

    fn check_epoch(&self, epoch: Epoch) -> Result<(), DeviceError> {
        self.state.check_epoch(epoch)
    }

    fn count(&self) -> usize {
        self.state.config().names.iter().map(Vec::len).sum()
    }
}

/// Returns the communication bytes of a stage of `ranks` ranks: for collectives, and for the hand-off to
/// the `next` stage, if there is one.
pub(super) fn stage_buffer_bytes(ranks: usize, next: Option<Capacity>) -> usize {
    state::collective_bytes(ranks).saturating_add(next.map_or(0, |capacity| capacity.bytes()))
}

/// Error message of a step of a stopped group.
const STOPPED_MESSAGE: &str = "the group is stopped";

impl Drop for Group {
    fn drop(&mut self) {
        self.state.stop();
    }
}
