//! The state of a group, shared by the control thread, the device threads and the supervisor.
//!
//! The control thread submits steps, the devices report their results, and the supervisor waits for what
//! needs recovery: a fault, a step without a result in time, or a step without devices to run it.
//! Invariant: a device's report counts only in the build of the group that it belongs to; after the first
//! fault of a build, none of its steps returns a result.

mod recovery;

pub(super) use recovery::collective_bytes;

use super::mailbox::{Command, Mailbox, StepMessage};
use super::step_queue::StepQueue;
use super::{Epoch, GroupConfig};
use crate::actors::step::{Step, StepResult};
use crate::model::executor::ExecutorReport;
use anyhow::Result;
use mainstem_kernels::{Abort, DeviceError, LateInputs, StepLimits, StepOutput};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::oneshot;
use tracing::error;

/// Error message for a device whose thread ended.
const THREAD_ENDED: &str = "its thread ended";

/// Identifies a device of the group and its current thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::actors) struct DeviceId {
    pub stage: usize,
    pub rank: usize,
    /// Number of threads that the device had before this one.
    pub incarnation: u64,
}

/// The shared state of a group.
pub(in crate::actors) struct GroupState {
    config: GroupConfig,
    inner: Mutex<Inner>,
    /// Notified when something happens that the supervisor may wait for.
    changed: Condvar,
}

/// The state behind the lock.
struct Inner {
    phase: Phase,
    /// Number of builds of the group so far.
    build: u64,
    /// Aborts the current build.
    abort: Abort,
    ranks: Vec<Vec<RankState>>,
    steps: StepQueue,
}

/// Whether the group can run steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The devices are being built, or could not be built.
    Unavailable,
    /// The devices run steps.
    Serving,
    /// A fault occurred, and recovery has not begun.
    Failed,
    /// The group is shutting down.
    Stopping,
}

/// The state of a device and its current thread.
struct RankState {
    mailbox: Arc<Mailbox>,
    incarnation: u64,
    thread: ThreadState,
    /// Whether the device has no executor, or has dropped it since the last command to clear.
    cleared: bool,
    /// Result of the device's current build; `None` until it is reported.
    built: Option<Result<ExecutorReport>>,
    /// Number of abandoned threads of the device that have not ended; each still holds its executor.
    hung_threads: usize,
}

/// The state of a device's thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ThreadState {
    /// The thread runs.
    Running,
    /// The thread is exiting, and drops its executor.
    Exiting,
    /// There is no thread.
    Absent,
}

/// The reason for a recovery. The steps in flight have failed by then.
pub(in crate::actors) enum RecoveryReason {
    /// A device reported a fault, or its thread ended.
    DeviceFailed,
    /// No step completed within the timeout.
    Timeout,
    /// The devices are unavailable, and steps wait for them or a retry is due.
    RetryDue,
}

impl GroupState {
    /// Creates the state of a group without threads and executors.
    pub fn new(config: GroupConfig) -> GroupState {
        let rank_state = || RankState {
            mailbox: Arc::new(Mailbox::new(config.lanes)),
            incarnation: 0,
            thread: ThreadState::Absent,
            cleared: true,
            built: None,
            hung_threads: 0,
        };
        let state = Inner {
            phase: Phase::Unavailable,
            build: 0,
            abort: Abort::new(),
            ranks: config.names.iter().map(|stage| stage.iter().map(|_| rank_state()).collect()).collect(),
            steps: StepQueue::new(config.limits, config.lanes),
        };
        GroupState { config, inner: Mutex::new(state), changed: Condvar::new() }
    }

    /// Returns the configuration of the group.
    pub fn config(&self) -> &GroupConfig {
        &self.config
    }

    /// Returns the limits of a step.
    pub fn limits(&self) -> &StepLimits {
        &self.config.limits
    }

    /// Returns a device's name in the configuration.
    pub fn name(&self, id: DeviceId) -> &str {
        &self.config.names[id.stage][id.rank]
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The interface of the control thread.
impl GroupState {
    /// Submits a step: it is sent to the devices, or waits for them. Returns the channels of its result and
    /// of its signal after the last layer. Fails if the epoch is over.
    pub fn submit(
        &self,
        step: Box<Step>,
        epoch: Epoch,
    ) -> Result<(oneshot::Receiver<StepResult>, oneshot::Receiver<()>), DeviceError> {
        let (answer, answered) = oneshot::channel();
        let (signal, signalled) = oneshot::channel();
        let mut state = self.lock();
        state.steps.check_epoch(epoch.0)?;
        if state.phase == Phase::Stopping {
            return Ok((answered, signalled)); // The senders are dropped.
        }
        state.steps.push(step, answer, signal);
        match state.phase {
            Phase::Serving => state.dispatch_waiting(),
            Phase::Unavailable | Phase::Failed | Phase::Stopping => self.changed.notify_all(),
        }
        Ok((answered, signalled))
    }

    /// Returns the current epoch.
    pub fn epoch(&self) -> Epoch {
        Epoch(self.lock().steps.epoch())
    }

    /// Returns the fault that ended the epoch, as an error, if it is over.
    pub fn check_epoch(&self, epoch: Epoch) -> Result<(), DeviceError> {
        self.lock().steps.check_epoch(epoch.0)
    }

    /// Stops the group: steps return no results any more, and the threads exit.
    pub fn stop(&self) {
        let mut state = self.lock();
        state.phase = Phase::Stopping;
        state.abort.abort();
        state.steps.clear();
        for rank_state in state.ranks.iter().flatten() {
            rank_state.mailbox.close();
        }
        self.changed.notify_all();
    }
}

/// The interface of the device threads.
impl GroupState {
    /// Reports that the device has dropped its executor.
    pub fn report_cleared(&self, id: DeviceId) {
        if let Some(rank_state) = self.lock().rank_state(id) {
            rank_state.cleared = true;
            self.changed.notify_all();
        }
    }

    /// Reports the result of a build.
    pub fn report_built(&self, id: DeviceId, build: u64, built: Result<ExecutorReport>) {
        let mut state = self.lock();
        if build == state.build {
            if built.is_err() {
                // The other devices must not wait for this one during their builds.
                state.abort.abort();
            }
            if let Some(rank_state) = state.rank_state(id) {
                rank_state.built = Some(built);
            }
            self.changed.notify_all();
        }
    }

    /// Returns the late inputs of a step in flight; `None` if its build is over. They do not travel with the
    /// batch, because the stages between need not share memory with the control thread.
    pub fn late_inputs(&self, build: u64, number: u64) -> Option<Arc<LateInputs>> {
        let state = self.lock();
        if build == state.build { state.steps.late_inputs(number) } else { None }
    }

    /// Reports that a step has passed the last layer.
    pub fn report_last_layer(&self, build: u64, number: u64) {
        let mut state = self.lock();
        if build == state.build && state.phase == Phase::Serving {
            state.steps.signal(number);
        }
    }

    /// Reports that the last stage has completed a step, and the time between its previous step and this one.
    /// `output` is exchanged for a buffer to reuse. Then the next waiting steps are sent.
    pub fn report_result(&self, build: u64, number: u64, output: &mut StepOutput, gap: Option<Duration>) {
        let mut state = self.lock();
        if build == state.build && state.phase == Phase::Serving {
            state.steps.complete(number, output, gap);
            state.dispatch_waiting();
        }
    }

    /// Reports a device's fault in a step. Only the first fault of a build counts; the other devices' errors
    /// are consequences.
    pub fn report_fault(&self, id: DeviceId, build: u64, number: u64, fault: DeviceError) {
        let mut state = self.lock();
        if build == state.build {
            self.fail(&mut state, id, number, fault);
        }
    }

    /// Reports that a device's thread is exiting. It still holds its executor.
    pub fn report_exiting(&self, id: DeviceId) {
        let mut state = self.lock();
        let Some(rank_state) = state.rank_state(id) else { return };
        rank_state.thread = ThreadState::Exiting;
        if state.phase == Phase::Unavailable {
            // The other devices must not wait for this one during their builds.
            state.abort.abort();
        }
        self.fail_ended_thread(&mut state, id);
        self.changed.notify_all();
    }

    /// Reports that a device's thread has dropped its executor and exits.
    pub fn report_exited(&self, id: DeviceId) {
        let mut state = self.lock();
        match state.rank_state(id) {
            Some(rank_state) => rank_state.thread = ThreadState::Absent,
            // An abandoned thread resumed and ended.
            None => state.ranks[id.stage][id.rank].hung_threads -= 1,
        }
        self.changed.notify_all();
    }

    /// Fails the group because a device's thread ended.
    fn fail_ended_thread(&self, state: &mut Inner, id: DeviceId) {
        let (number, fault) = (state.steps.oldest_number(), DeviceError::Fault(THREAD_ENDED.to_owned()));
        self.fail(state, id, number, fault);
    }

    /// Logs a fault and fails the group, if it is serving.
    fn fail(&self, state: &mut Inner, id: DeviceId, number: u64, fault: DeviceError) {
        if state.phase == Phase::Serving {
            let (device, fault) = (self.name(id), with_device_name(self.name(id), fault));
            let label = self.config.label();
            error!(device, step = number, %fault, "{label} failed; it is being rebuilt");
            state.fail_build(&fault);
            self.changed.notify_all();
        }
    }
}

impl Inner {
    /// Returns a device, if its thread is still the current one.
    fn rank_state(&mut self, id: DeviceId) -> Option<&mut RankState> {
        let rank_state = &mut self.ranks[id.stage][id.rank];
        (rank_state.incarnation == id.incarnation).then_some(rank_state)
    }

    /// Returns the devices that satisfy a predicate.
    fn ids_where(&self, which: impl Fn(&RankState) -> bool) -> Vec<DeviceId> {
        let mut ids = Vec::new();
        for (stage, ranks) in self.ranks.iter().enumerate() {
            for (rank, rank_state) in ranks.iter().enumerate().filter(|(_, rank_state)| which(rank_state)) {
                ids.push(DeviceId { stage, rank, incarnation: rank_state.incarnation });
            }
        }
        ids
    }

    /// Sends waiting steps to every rank of the first stage, as many as may be in flight.
    fn dispatch_waiting(&mut self) {
        while let Some(batch) = self.steps.start_next() {
            for rank_state in &self.ranks[0] {
                let (build, batch) = (self.build, batch.clone());
                rank_state.mailbox.send(Command::Run(StepMessage { build, batch, handoff: None }));
            }
        }
    }

    /// Fails all pending steps, and aborts the current build.
    fn fail_build(&mut self, fault: &DeviceError) {
        self.phase = Phase::Failed;
        self.abort.abort();
        self.steps.fail_all(fault);
    }
}

/// Prefixes a fault's message with the device's name.
fn with_device_name(device: &str, fault: DeviceError) -> DeviceError {
    match fault {
        DeviceError::Fault(text) => DeviceError::Fault(format!("{device}: {text}")),
        DeviceError::Unsupported(text) => DeviceError::Unsupported(format!("{device}: {text}")),
        DeviceError::OutOfMemory { bytes, reason } => {
            DeviceError::OutOfMemory { bytes, reason: format!("{device}: {reason}") }
        }
    }
}
