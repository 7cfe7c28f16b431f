//! The state of a group, shared by the control thread, the device threads and the supervisor.
//!
//! The control thread submits steps, the devices report their results, and the supervisor waits for what
//! needs recovery: a fault, a step without a result in time, or a step without devices to run it.
//! Invariant: a device's report counts only in the build of the group that it belongs to; after the first
//! fault of a build, none of its steps returns a result.

mod kept;

pub(super) use kept::exchange_bytes;

use super::mailbox::{Mailbox, Order, Parcel};
use super::steps::Steps;
use super::{Epoch, GroupConfig};
use crate::actors::device::{Ran, Step};
use crate::model::executor::ExecutorReport;
use anyhow::Result;
use mainstem_kernels::{Abort, DeviceError, StepLimits, StepOutput};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;
use tracing::error;

/// Error message for a device whose thread ended.
const THREAD_ENDED: &str = "its thread ended";

/// Identifies a device of the group and its current thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::actors) struct Place {
    pub stage: usize,
    pub rank: usize,
    /// Number of threads that the device had before this one.
    pub incarnation: u64,
}

/// The shared state of a group.
pub(in crate::actors) struct Hub {
    config: GroupConfig,
    state: Mutex<State>,
    /// Notified when something happens that the supervisor may wait for.
    news: Condvar,
}

/// The state behind the lock.
struct State {
    phase: Phase,
    /// Number of builds of the group so far.
    build: u64,
    /// Aborts the current build.
    abort: Abort,
    members: Vec<Vec<Member>>,
    steps: Steps,
}

/// Whether the group can run steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The devices are being built, or could not be built.
    /// The devices run steps.
    Away,
    Serving,
    /// A fault occurred, and recovery has not begun.
    Failed,
    /// The group is shutting down.
    Stopping,
}

/// The state of a device and its current thread.
struct Member {
    mailbox: Arc<Mailbox>,
    incarnation: u64,
    life: Life,
    /// Whether the device has no executor, or has dropped it since the last command to clear.
    cleared: bool,
    /// Result of the device's current build; `None` until it is reported.
    built: Option<Result<ExecutorReport>>,
    /// Number of abandoned threads of the device that have not ended; each still holds its executor.
    hanging: usize,
}

/// The state of a device's thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    /// The thread runs.
    Lives,
    /// The thread is exiting, and drops its executor.
    Ends,
    /// There is no thread.
    Gone,
}

/// Why recovery is necessary. The steps in flight have failed by then.
pub(in crate::actors) enum News {
    /// A device reported a fault, or its thread ended.
    Failed,
    /// No step completed within the timeout.
    Stalled,
    /// The devices are unavailable, and steps wait for them or a retry is due.
    Wanted,
}

impl Hub {
    /// Creates the state of a group without threads and executors.
    pub fn new(config: GroupConfig) -> Hub {
        let rank_state = || Member {
            mailbox: Arc::new(Mailbox::new(config.lanes)),
            incarnation: 0,
            life: Life::Gone,
            cleared: true,
            built: None,
            hanging: 0,
        };
        let state = State {
            phase: Phase::Away,
            build: 0,
            abort: Abort::new(),
            members: config.names.iter().map(|stage| stage.iter().map(|_| rank_state()).collect()).collect(),
            steps: Steps::new(config.limits, config.lanes),
        };
        Hub { config, state: Mutex::new(state), news: Condvar::new() }
    }

    pub fn config(&self) -> &GroupConfig {
        &self.config
    }

    pub fn limits(&self) -> &StepLimits {
        &self.config.limits
    }

    /// Returns a device's name in the configuration.
    pub fn name(&self, id: Place) -> &str {
        &self.config.names[id.stage][id.rank]
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The interface of the control thread.
impl Hub {
    /// Submits a step: it is sent to the devices, or waits for them. Fails if the epoch is over.
    pub fn take_in(&self, step: Box<Step>, epoch: Epoch) -> Result<oneshot::Receiver<Ran>, DeviceError> {
        let (answer, answered) = oneshot::channel();
        let mut state = self.lock();
        state.steps.lasts(epoch.0)?;
        if state.phase == Phase::Stopping {
            return Ok(answered); // The sender is dropped.
        }
        state.steps.take_in(step, answer);
        match state.phase {
            Phase::Serving => state.start_waiting(),
            Phase::Away | Phase::Failed | Phase::Stopping => self.news.notify_all(),
        }
        Ok(answered)
    }

    /// Returns the current epoch.
    pub fn epoch(&self) -> Epoch {
        Epoch(self.lock().steps.epoch())
    }

    /// Returns the fault that ended the epoch, as an error, if it is over.
    pub fn lasts(&self, epoch: Epoch) -> Result<(), DeviceError> {
        self.lock().steps.lasts(epoch.0)
    }

    /// Stops the group: steps return no results any more, and the threads exit.
    pub fn stop(&self) {
        let mut state = self.lock();
        state.phase = Phase::Stopping;
        state.abort.abort();
        state.steps.forget();
        for rank_state in state.members.iter().flatten() {
            rank_state.mailbox.close();
        }
        self.news.notify_all();
    }
}

/// The interface of the device threads.
impl Hub {
    /// Reports that the device has dropped its executor.
    pub fn cleared(&self, id: Place) {
        if let Some(rank_state) = self.lock().member(id) {
            rank_state.cleared = true;
            self.news.notify_all();
        }
    }

    /// Reports the result of a build.
    pub fn built(&self, id: Place, build: u64, built: Result<ExecutorReport>) {
        let mut state = self.lock();
        if build == state.build {
            if built.is_err() {
                // The other devices must not wait for this one during their builds.
                state.abort.abort();
            }
            if let Some(rank_state) = state.member(id) {
                rank_state.built = Some(built);
            }
            self.news.notify_all();
        }
    }

    /// Reports that the last stage has completed a step. `output` is exchanged for a buffer to reuse. Then
    /// the next waiting steps are sent.
    pub fn answer(&self, build: u64, number: u64, output: &mut StepOutput) {
        let mut state = self.lock();
        if build == state.build && state.phase == Phase::Serving {
            state.steps.answer(number, output);
            state.start_waiting();
        }
    }

    /// Reports a device's fault in a step. Only the first fault of a build counts; the other devices' errors
    /// are consequences.
    pub fn failed(&self, id: Place, build: u64, number: u64, fault: DeviceError) {
        let mut state = self.lock();
        if build == state.build {
            self.fail(&mut state, id, number, fault);
        }
    }

    /// Reports that a device's thread is exiting. It still holds its executor.
    pub fn ends(&self, id: Place) {
        let mut state = self.lock();
        let Some(rank_state) = state.member(id) else { return };
        rank_state.life = Life::Ends;
        if state.phase == Phase::Away {
            // The other devices must not wait for this one during their builds.
            state.abort.abort();
        }
        self.fail_for_thread(&mut state, id);
        self.news.notify_all();
    }

    /// Reports that a device's thread has dropped its executor and exits.
    pub fn left(&self, id: Place) {
        let mut state = self.lock();
        match state.member(id) {
            Some(rank_state) => rank_state.life = Life::Gone,
            // An abandoned thread resumed and ended.
            None => state.members[id.stage][id.rank].hanging -= 1,
        }
        self.news.notify_all();
    }

    /// Fails the group because a device's thread ended.
    fn fail_for_thread(&self, state: &mut State, id: Place) {
        let (number, fault) = (state.steps.oldest(), DeviceError::Fault(THREAD_ENDED.to_owned()));
        self.fail(state, id, number, fault);
    }

    /// Logs a fault and fails the group, if it is serving.
    fn fail(&self, state: &mut State, id: Place, number: u64, fault: DeviceError) {
        if state.phase == Phase::Serving {
            let (device, fault) = (self.name(id), named(self.name(id), fault));
            let label = self.config.what();
            error!(device, step = number, %fault, "{label} failed; it is being rebuilt");
            state.give_up(&fault);
            self.news.notify_all();
        }
    }
}

impl State {
    /// Returns a device, if its thread is still the current one.
    fn member(&mut self, id: Place) -> Option<&mut Member> {
        let rank_state = &mut self.members[id.stage][id.rank];
        (rank_state.incarnation == id.incarnation).then_some(rank_state)
    }

    /// Returns the devices that satisfy a predicate.
    fn places(&self, which: impl Fn(&Member) -> bool) -> Vec<Place> {
        let mut ids = Vec::new();
        for (stage, ranks) in self.members.iter().enumerate() {
            for (rank, rank_state) in ranks.iter().enumerate().filter(|(_, rank_state)| which(rank_state)) {
                ids.push(Place { stage, rank, incarnation: rank_state.incarnation });
            }
        }
        ids
    }

    /// Sends waiting steps to every rank of the first stage, as many as may be in flight.
    fn start_waiting(&mut self) {
        while let Some(batch) = self.steps.start_next() {
            for rank_state in &self.members[0] {
                let (build, batch) = (self.build, batch.clone());
                rank_state.mailbox.put(Order::Run(Parcel { build, batch, carried: None }));
            }
        }
    }

    /// Fails all pending steps, and aborts the current build.
    fn give_up(&mut self, fault: &DeviceError) {
        self.phase = Phase::Failed;
        self.abort.abort();
        self.steps.lose(fault);
    }
}

/// Prefixes a fault's message with the device's name.
fn named(device: &str, fault: DeviceError) -> DeviceError {
    match fault {
        DeviceError::Fault(text) => DeviceError::Fault(format!("{device}: {text}")),
        DeviceError::Unsupported(text) => DeviceError::Unsupported(format!("{device}: {text}")),
        DeviceError::OutOfMemory { bytes, reason } => {
            DeviceError::OutOfMemory { bytes, reason: format!("{device}: {reason}") }
        }
    }
}
