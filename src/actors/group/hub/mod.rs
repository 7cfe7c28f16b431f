//! Where the control thread, the devices' threads and the group's keeper meet.
//!
//! The control thread leaves steps, devices tell what became of them, the keeper waits for what needs it: a fault, a step
//! without an answer, a step without devices.
//! Invariant: what a device says counts only in the build of the group in which it was asked; after the first fault of a
//! build nothing of it is answered any more.

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

/// What is said of a device that nothing more will come from.
const THREAD_ENDED: &str = "its thread ended";

/// A device of the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::actors) struct Place {
    pub stage: usize,
    pub rank: usize,
    /// How many threads the device had before this one.
    pub incarnation: u64,
}

/// The meeting place.
pub(in crate::actors) struct Hub {
    config: GroupConfig,
    state: Mutex<State>,
    /// Something happened that the keeper waits for.
    news: Condvar,
}

struct State {
    phase: Phase,
    /// How often the group was built.
    build: u64,
    /// Gives up what was built last.
    abort: Abort,
    members: Vec<Vec<Member>>,
    steps: Steps,
}

/// What the group can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Nothing: it is being built, or could not be.
    Away,
    Serving,
    /// Nothing: it has yet to be seen what is left of it.
    Failed,
    /// Nothing any more.
    Stopping,
}

/// What is known of a device's thread.
struct Member {
    mailbox: Arc<Mailbox>,
    incarnation: u64,
    life: Life,
    cleared: bool,
    built: Option<Result<ExecutorReport>>,
    /// Threads of the device that were given up and have not ended: each still has what it had.
    hanging: usize,
}

/// Whether a device has a thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Life {
    Lives,
    /// It is on its way out, and drops what it has.
    Ends,
    Gone,
}

/// What the keeper has to see to. Who waited for a step has been told.
pub(in crate::actors) enum News {
    /// A device failed.
    Failed,
    /// Nobody has answered for too long.
    Stalled,
    /// There are no devices, and steps, or it has been a while.
    Wanted,
}

impl Hub {
    /// Without threads and without devices.
    pub fn new(config: GroupConfig) -> Hub {
        let member = || Member {
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
            members: config.names.iter().map(|stage| stage.iter().map(|_| member()).collect()).collect(),
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

    /// What the configuration calls a device.
    pub fn name(&self, place: Place) -> &str {
        &self.config.names[place.stage][place.rank]
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What the control thread says.
impl Hub {
    /// Takes a step in: it is on its way, or waits for the devices. Fails when that epoch is over.
    pub fn take_in(&self, step: Box<Step>, epoch: Epoch) -> Result<oneshot::Receiver<Ran>, DeviceError> {
        let (answer, answered) = oneshot::channel();
        let mut state = self.lock();
        state.steps.lasts(epoch.0)?;
        if state.phase == Phase::Stopping {
            return Ok(answered); // It has lost its other end.
        }
        state.steps.take_in(step, answer);
        match state.phase {
            Phase::Serving => state.start_waiting(),
            Phase::Away | Phase::Failed | Phase::Stopping => self.news.notify_all(),
        }
        Ok(answered)
    }

    /// The epoch at hand.
    pub fn epoch(&self) -> Epoch {
        Epoch(self.lock().steps.epoch())
    }

    /// Fails when that epoch is over, and says what ended it.
    pub fn lasts(&self, epoch: Epoch) -> Result<(), DeviceError> {
        self.lock().steps.lasts(epoch.0)
    }

    /// The end: no step is answered any more, and the threads are on their way out.
    pub fn stop(&self) {
        let mut state = self.lock();
        state.phase = Phase::Stopping;
        state.abort.abort();
        state.steps.forget();
        for member in state.members.iter().flatten() {
            member.mailbox.close();
        }
        self.news.notify_all();
    }
}

/// What devices say.
impl Hub {
    /// The executor is gone.
    pub fn cleared(&self, place: Place) {
        if let Some(member) = self.lock().member(place) {
            member.cleared = true;
            self.news.notify_all();
        }
    }

    /// There is one, or none.
    pub fn built(&self, place: Place, build: u64, built: Result<ExecutorReport>) {
        let mut state = self.lock();
        if build == state.build {
            if built.is_err() {
                // Nobody waits for its part in what they build.
                state.abort.abort();
            }
            if let Some(member) = state.member(place) {
                member.built = Some(built);
            }
            self.news.notify_all();
        }
    }

    /// The last stage has done that step: `output` is exchanged for another. Who waits may have its place.
    pub fn answer(&self, build: u64, number: u64, output: &mut StepOutput) {
        let mut state = self.lock();
        if build == state.build && state.phase == Phase::Serving {
            state.steps.answer(number, output);
            state.start_waiting();
        }
    }

    /// A device failed in that step. Whoever only hears of it from the others is not heard.
    pub fn failed(&self, place: Place, build: u64, number: u64, fault: DeviceError) {
        let mut state = self.lock();
        if build == state.build {
            self.fail(&mut state, place, number, fault);
        }
    }

    /// A device's thread will end, and still has what it had.
    pub fn ends(&self, place: Place) {
        let mut state = self.lock();
        let Some(member) = state.member(place) else { return };
        member.life = Life::Ends;
        if state.phase == Phase::Away {
            // Nobody waits for its part in what they build.
            state.abort.abort();
        }
        self.fail_for_thread(&mut state, place);
        self.news.notify_all();
    }

    /// It has nothing any more, and ends.
    pub fn left(&self, place: Place) {
        let mut state = self.lock();
        match state.member(place) {
            Some(member) => member.life = Life::Gone,
            // One that was given up has woken.
            None => state.members[place.stage][place.rank].hanging -= 1,
        }
        self.news.notify_all();
    }

    fn fail_for_thread(&self, state: &mut State, place: Place) {
        let (number, fault) = (state.steps.oldest(), DeviceError::Fault(THREAD_ENDED.to_owned()));
        self.fail(state, place, number, fault);
    }

    fn fail(&self, state: &mut State, place: Place, number: u64, fault: DeviceError) {
        if state.phase == Phase::Serving {
            let (device, fault) = (self.name(place), named(self.name(place), fault));
            let what = self.config.what();
            error!(device, step = number, %fault, "{what} failed; it is being rebuilt");
            state.give_up(&fault);
            self.news.notify_all();
        }
    }
}

impl State {
    /// The device as long as it is still that thread's.
    fn member(&mut self, place: Place) -> Option<&mut Member> {
        let member = &mut self.members[place.stage][place.rank];
        (member.incarnation == place.incarnation).then_some(member)
    }

    fn places(&self, which: impl Fn(&Member) -> bool) -> Vec<Place> {
        let mut places = Vec::new();
        for (stage, members) in self.members.iter().enumerate() {
            for (rank, member) in members.iter().enumerate().filter(|(_, member)| which(member)) {
                places.push(Place { stage, rank, incarnation: member.incarnation });
            }
        }
        places
    }

    /// Sends the steps that wait to every member of the first stage, as many as may be on the devices.
    fn start_waiting(&mut self) {
        while let Some(batch) = self.steps.start_next() {
            for member in &self.members[0] {
                let (build, batch) = (self.build, batch.clone());
                member.mailbox.put(Order::Run(Parcel { build, batch, carried: None }));
            }
        }
    }

    /// Everybody is told of the fault, and nothing of this build is waited for any more.
    fn give_up(&mut self, fault: &DeviceError) {
        self.phase = Phase::Failed;
        self.abort.abort();
        self.steps.lose(fault);
    }
}

/// The fault with the device's name in front.
fn named(device: &str, fault: DeviceError) -> DeviceError {
    match fault {
        DeviceError::Fault(text) => DeviceError::Fault(format!("{device}: {text}")),
        DeviceError::Unsupported(text) => DeviceError::Unsupported(format!("{device}: {text}")),
        DeviceError::OutOfMemory { bytes, reason } => {
            DeviceError::OutOfMemory { bytes, reason: format!("{device}: {reason}") }
        }
    }
}
