//! The supervisor of a group: the thread that builds the devices, and rebuilds them after a fault.
//!
//! Owns the devices' threads. It sleeps while the group is healthy.
//! Invariant: a group is built from scratch: every device has dropped its executor, or its thread has been
//! abandoned and replaced. At most one hung thread per device exists beside the current one, so that a device
//! never holds a third model in memory. If steps have a timeout, waiting steps fail when recovery takes too
//! long; when the group is stopped, the supervisor ends within a fixed time.

use super::GroupConfig;
use super::hub::{Hub, News, Place};
use crate::actors::device::{Device, SharedFactory};
use crate::model::executor::ExecutorReport;
use crate::telemetry;
use anyhow::{Context, Result};
use mainstem_kernels::DeviceError;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tracing::{error, info, warn};

/// Reports of all devices of a group, by stage and rank.
pub type Reports = Vec<Vec<ExecutorReport>>;

/// Maximum time that the devices have after a timeout to drop their executors before the ones that have not
/// are logged.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// How many times longer than the first build a rebuild may take.
const SLOWER: u32 = 10;

/// Minimum time between attempts to rebuild, unless steps wait.
const ALONE: Duration = Duration::from_secs(5);

/// How long the devices may take to finish their current step when the group is stopped.
const LEAVING: Duration = Duration::from_secs(10);

/// The state of the supervisor thread.
pub(super) struct Keeper {
    hub: Arc<Hub>,
    factories: Vec<Vec<SharedFactory>>,
    /// The thread of each device; `None` if it has none.
    threads: Vec<Vec<Option<JoinHandle<()>>>>,
    /// Abandoned threads with their device names. They end when they resume, if ever.
    given_up: Vec<(String, JoinHandle<()>)>,
    /// Duration of the first build.
    first: Duration,
}

impl Keeper {
    pub fn new(group: Arc<Hub>, factories: Vec<Vec<SharedFactory>>) -> Keeper {
        let threads = factories.iter().map(|stage| stage.iter().map(|_| None).collect()).collect();
        Keeper { hub: group, factories, threads, given_up: Vec::new(), first: Duration::ZERO }
    }

    /// Builds the group and sends the result; if it succeeded, supervises the group until it is stopped.
    pub fn keep(mut self, started: oneshot::Sender<Result<Reports>>) {
        let began = Instant::now();
        match self.build(None) {
            Ok(reports) => {
                self.first = began.elapsed();
                let _ = started.send(Ok(reports));
                self.see_to_it();
                self.end();
            }
            Err(error) => {
                self.hub.stop();
                self.end();
                let _ = started.send(Err(error));
            }
        }
    }

    /// Recovers the group whenever necessary, until it is stopped.
    fn see_to_it(&mut self) {
        let label = self.hub.config().what();
        // Devices that take long to build are not rebuilt continuously.
        let retry_interval = self.first.max(ALONE);
        while let Some(reason) = self.hub.next_news(retry_interval) {
            match self.recover(reason) {
                Ok(_) => info!("{label} is back"),
                Err(_) if self.hub.is_stopping() => {}
                Err(fault) => {
                    error!(
                        "{label} is still unavailable: {fault:#}; retrying in {retry_interval:.0?}, or with the next step"
                    )
                }
            }
        }
    }

    /// Recovers the group: all devices drop their executors, threads that do not in time are replaced, and
    /// all devices build again.
    fn recover(&mut self, reason: News) -> Result<Reports> {
        let group = self.hub.clone();
        let GroupConfig { step_timeout, status, .. } = group.config();
        let build_limit = self.first * SLOWER + step_timeout.unwrap_or_default();
        status.away_for(build_limit + step_timeout.unwrap_or_default());
        if !matches!(reason, News::Wanted) {
            telemetry::DEVICE_RESTARTS.add(1);
        }
        self.clear(reason);
        let reports = self.build(step_timeout.map(|_| build_limit))?;
        status.back();
        Ok(reports)
    }

    /// Commands all devices to drop their executors, and abandons the threads that do not. A device in a long
    /// step gets another step timeout before its thread is abandoned, as it may well finish.
    fn clear(&mut self, reason: News) {
        let timeout = self.hub.config().step_timeout;
        let within = |time| Some(Instant::now() + time);
        let until = timeout.and_then(within);
        self.hub.clear();
        if let News::Stalled = reason {
            let stalled = self.hub.not_cleared(timeout.and_then(|timeout| within(timeout.min(LAST_WORDS))));
            self.hub.name_stalled(&stalled);
        }
        for id in self.hub.to_give_up(until) {
            self.give_up(id);
        }
    }

    /// Abandons a thread: the device will get another.
    fn give_up(&mut self, id: Place) {
        self.given_up.retain(|(_, thread)| !thread.is_finished());
        let device = self.hub.name(id).to_owned();
        if self.hub.disown(id) {
            warn!(device, "the device's thread is abandoned; it ends when it resumes");
            let thread = self.threads[id.stage][id.rank].take();
            self.given_up.extend(thread.map(|thread| (device, thread)));
        }
    }

    /// Builds the group, with new threads for devices that have none. Waiting steps fail if the build fails
    /// or takes longer than `limit`.
    fn build(&mut self, limit: Option<Duration>) -> Result<Reports> {
        self.hub.away();
        let built = self.start_dead().and_then(|()| {
            self.hub.build();
            self.hub.wait_built(limit.map(|limit| Instant::now() + limit))
        });
        match &built {
            Ok(_) => self.hub.serve(),
            Err(fault) => self.hub.turn_away(&DeviceError::Fault(format!("{fault:#}"))),
        }
        built
    }

    /// Starts a thread for every device that has none.
    fn start_dead(&mut self) -> Result<()> {
        for id in self.hub.dead() {
            if let Some(thread) = self.threads[id.stage][id.rank].take() {
                let _ = thread.join();
            }
            self.start(id)?;
        }
        Ok(())
    }

    /// Starts a thread for a device.
    fn start(&mut self, old: Place) -> Result<()> {
        let Some((id, mailbox)) = self.hub.replace(old) else { return Ok(()) };
        let factory = self.factories[id.stage][id.rank].clone();
        let thread = Device::spawn(id, self.hub.clone(), mailbox, factory)
            .inspect_err(|_| self.hub.left(id))
            .with_context(|| format!("starting the thread of the device {}", self.hub.name(id)))?;
        self.threads[id.stage][id.rank] = Some(thread);
        Ok(())
    }

    /// Waits a limited time for the threads, which have been told to exit.
    fn end(mut self) {
        for id in self.hub.not_ended(Instant::now() + LEAVING) {
            let thread = self.threads[id.stage][id.rank].take();
            self.given_up.extend(thread.map(|thread| (self.hub.name(id).to_owned(), thread)));
        }
        for (device, thread) in self.given_up {
            match thread.is_finished() {
                true => _ = thread.join(),
                false => warn!(device, "the device's thread has not ended; it is abandoned"),
            }
        }
        for thread in self.threads.into_iter().flatten().flatten() {
            let _ = thread.join();
        }
    }
}
