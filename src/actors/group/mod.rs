//! A group: the devices that hold one model together, and step, fail and restart together.
//!
//! A step goes to all members of the first stage at once; the first member of each stage hands it on to all of the next;
//! the first of the last answers. So steps pass the stages in order, and several are under way at a time.
//! Whatever befalls a member, an error, a panic, the end of its thread or a silence that lasts too long, gives the whole
//! group up: every step under way gets the same error, and the group is built anew before the next one runs.
//! A fault takes what the devices remember of all sequences, also of those that had no step under way. So a step says from
//! which epoch of that memory on its sequences are in slots, and is refused when that is over.
//! Invariant: a step is answered once, and only by a group that has been whole since what it goes on from was computed.

pub(super) mod hub;

pub(super) mod mailbox;

pub mod link;

mod steps;

mod keeper;

pub use keeper::Reports;

use super::device::{Factory, Ran, Step};
use super::status::Status;
use anyhow::{Context, Result, ensure};
use hub::Hub;
use keeper::Keeper;
use link::{Linking, Room};
use mainstem_kernels::{DeviceError, StepLimits};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;
use tokio::sync::oneshot;

/// What a group is told.
#[derive(Clone)]
pub struct GroupConfig {
    /// What the devices are called, stage by stage, by rank.
    pub names: Vec<Vec<String>>,
    pub limits: StepLimits,
    /// Width of the residual stream, which goes from stage to stage.
    pub width: usize,
    /// Steps that are on the devices at once, at most: as many as lanes. More wait.
    pub lanes: usize,
    /// How long the group may go without an answer while it has steps; `None` for ever.
    pub step_timeout: Option<Duration>,
    /// How stages reach each other: [`link::local`] within a process.
    pub linking: Linking,
    /// Who is told while the devices are built again.
    pub status: Arc<Status>,
}

/// What the devices remember between two faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Epoch(pub u64);

/// A step under way.
pub type Running = Pin<Box<dyn Future<Output = Ran>>>;

/// What runs steps, in the order in which they are sent.
pub trait Devices: Send + Sync {
    /// Sends off a step of sequences that are in slots from `epoch` on; fails when that is over. It is on its way when this
    /// returns; what it gives is awaited.
    fn send(&self, step: Box<Step>, epoch: Epoch) -> Result<Running, DeviceError>;

    /// The epoch at hand.
    fn epoch(&self) -> Epoch;

    /// Fails when that epoch is over, and says what ended it.
    fn lasts(&self, epoch: Epoch) -> Result<(), DeviceError>;

    /// How many have a part in a step.
    fn count(&self) -> usize;
}

/// The devices of a model: stages by layers, members by rank.
pub struct Group {
    hub: Arc<Hub>,
    keeper: Mutex<Option<JoinHandle<()>>>,
}

impl GroupConfig {
    /// Devices of these names in one process, a step for each stage, with all the time they want.
    pub fn new(names: Vec<Vec<String>>, limits: StepLimits, width: usize) -> GroupConfig {
        let (lanes, status) = (names.len(), Arc::new(Status::new(Duration::ZERO, 0)));
        GroupConfig {
            names,
            limits,
            width,
            lanes,
            step_timeout: None,
            linking: Arc::new(link::local),
            status,
        }
    }

    fn room(&self) -> Room {
        Room { limits: self.limits, width: self.width, steps: self.lanes }
    }

    /// What the log calls it.
    fn what(&self) -> &'static str {
        match &self.names[..] {
            [stage] if stage.len() == 1 => "the device",
            _ => "the group",
        }
    }
}

impl Group {
    /// Starts a thread for each device and builds what it runs, all at the same time. Fails when one cannot be built.
    pub async fn start(factories: Vec<Vec<Factory>>, config: GroupConfig) -> Result<(Group, Reports)> {
        let sizes = |lens: &mut dyn Iterator<Item = usize>| lens.collect::<Vec<_>>();
        ensure!(
            sizes(&mut factories.iter().map(Vec::len)) == sizes(&mut config.names.iter().map(Vec::len))
                && !factories.is_empty()
                && factories.iter().all(|stage| !stage.is_empty()),
            "a group has stages, a stage has devices, and each of them a name"
        );
        let shared = |stage: Vec<Factory>| stage.into_iter().map(|make| Arc::new(Mutex::new(make))).collect();
        let hub = Arc::new(Hub::new(config));
        let keeper = Keeper::new(hub.clone(), factories.into_iter().map(shared).collect());
        let (started, built) = oneshot::channel();
        let thread = Builder::new().name("group".to_owned()).spawn(move || keeper.keep(started));
        let thread = thread.context("starting the group's thread")?;
        let group = Group { hub, keeper: Mutex::new(Some(thread)) };
        let reports = built.await.context("the group's thread is gone").flatten();
        match reports {
            Ok(reports) => Ok((group, reports)),
            Err(error) => {
                group.stop();
                Err(error)
            }
        }
    }

    /// Ends the group, and waits for the steps that devices are in, though not for ever. Steps under way are not answered.
    pub fn stop(&self) {
        self.hub.stop();
        let keeper = self.keeper.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(keeper) = keeper {
            let _ = keeper.join();
        }
    }
}

/// Any number of steps can be sent; those that the devices have no place for wait, as they do for devices that are built.
impl Devices for Group {
    fn send(&self, step: Box<Step>, epoch: Epoch) -> Result<Running, DeviceError> {
        let answer = self.hub.take_in(step, epoch)?;
        Ok(Box::pin(async move {
            match answer.await {
                Ok(ran) => ran,
                Err(_) => Ran { step: Box::default(), result: Err(DeviceError::Fault(STOPPED.to_owned())) },
            }
        }))
    }

    fn epoch(&self) -> Epoch {
        self.hub.epoch()
    }

    fn lasts(&self, epoch: Epoch) -> Result<(), DeviceError> {
        self.hub.lasts(epoch)
    }

    fn count(&self) -> usize {
        self.hub.config().names.iter().map(Vec::len).sum()
    }
}

/// Bytes that a stage of so many members exchanges by, and hands on by if there is a next one.
pub(super) fn stage_bytes(members: usize, next: Option<Room>) -> usize {
    hub::exchange_bytes(members).saturating_add(next.map_or(0, |room| room.bytes()))
}

/// What a step gets from a group that is no more.
const STOPPED: &str = "the group is stopped";

impl Drop for Group {
    fn drop(&mut self) {
        self.hub.stop();
    }
}
