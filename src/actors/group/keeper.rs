//! The keeper of a group: the thread that builds it, and builds it again.
//!
//! Owns the devices' threads. Sleeps as long as all is well.
//! Invariant: a group is built from nothing: every device has dropped what it had, or has been given up and replaced. Of a
//! device one thread at most hangs beside the one that replaced it, so that nobody has a third model in memory. Who waits
//! for a step is told when the devices take too long to come back, if steps have a limit at all; when the group is stopped,
//! the keeper ends within a set time.

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

/// What every device of a group reports of itself, stage by stage, by rank.
pub type Reports = Vec<Vec<ExecutorReport>>;

/// How long the devices may take at most to find out that the group was given up for a silence, before those are named that
/// have not.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// How many times as long as the first a later build may take.
const SLOWER: u32 = 10;

/// How long devices that could not be built are left alone at least, if nobody wants them.
const ALONE: Duration = Duration::from_secs(5);

/// How long the devices have at the end to be through with the step they are in.
const LEAVING: Duration = Duration::from_secs(10);

/// The thread's state.
pub(super) struct Keeper {
    hub: Arc<Hub>,
    factories: Vec<Vec<SharedFactory>>,
    /// A device's thread, or why there is none.
    threads: Vec<Vec<Option<JoinHandle<()>>>>,
    /// Threads that stalled. They end when they wake, if ever they do.
    given_up: Vec<(String, JoinHandle<()>)>,
    /// What the first build took.
    first: Duration,
}

impl Keeper {
    pub fn new(hub: Arc<Hub>, factories: Vec<Vec<SharedFactory>>) -> Keeper {
        let threads = factories.iter().map(|stage| stage.iter().map(|_| None).collect()).collect();
        Keeper { hub, factories, threads, given_up: Vec::new(), first: Duration::ZERO }
    }

    /// Builds the group and tells how that went; then keeps it, if it could be built at all.
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

    fn see_to_it(&mut self) {
        let what = self.hub.config().what();
        // Devices that take long to build are not built all the time.
        let again = self.first.max(ALONE);
        while let Some(news) = self.hub.next_news(again) {
            match self.recover(news) {
                Ok(_) => info!("{what} is back"),
                Err(_) if self.hub.is_stopping() => {}
                Err(fault) => {
                    error!(
                        "{what} is still away: {fault:#}; it is tried again in {again:.0?}, or with the next step"
                    )
                }
            }
        }
    }

    /// Everybody drops what they have; who does not in time is replaced. Then all build.
    fn recover(&mut self, news: News) -> Result<Reports> {
        let hub = self.hub.clone();
        let GroupConfig { step_timeout, status, .. } = hub.config();
        let building = self.first * SLOWER + step_timeout.unwrap_or_default();
        status.away_for(building + step_timeout.unwrap_or_default());
        if !matches!(news, News::Wanted) {
            telemetry::DEVICE_RESTARTS.add(1);
        }
        self.clear(news);
        let built = self.build(step_timeout.map(|_| building))?;
        status.back();
        Ok(built)
    }

    /// Everybody drops what they have. Who is in a long step has as much time again before its thread is given up: it may
    /// well come to its end.
    fn clear(&mut self, news: News) {
        let timeout = self.hub.config().step_timeout;
        let within = |time| Some(Instant::now() + time);
        let until = timeout.and_then(within);
        self.hub.clear();
        if let News::Stalled = news {
            let stalled = self.hub.not_cleared(timeout.and_then(|timeout| within(timeout.min(LAST_WORDS))));
            self.hub.name_stalled(&stalled);
        }
        for place in self.hub.to_give_up(until) {
            self.give_up(place);
        }
    }

    /// Leaves a thread to itself: the device gets another.
    fn give_up(&mut self, place: Place) {
        self.given_up.retain(|(_, thread)| !thread.is_finished());
        let device = self.hub.name(place).to_owned();
        if self.hub.disown(place) {
            warn!(device, "its thread is given up, and ends when it wakes");
            let thread = self.threads[place.stage][place.rank].take();
            self.given_up.extend(thread.map(|thread| (device, thread)));
        }
    }

    /// Builds the group, with new threads where there are none. Steps that wait for it are told if that fails, and if it
    /// takes longer than that.
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

    fn start_dead(&mut self) -> Result<()> {
        for place in self.hub.dead() {
            if let Some(thread) = self.threads[place.stage][place.rank].take() {
                let _ = thread.join();
            }
            self.start(place)?;
        }
        Ok(())
    }

    fn start(&mut self, old: Place) -> Result<()> {
        let Some((place, mailbox)) = self.hub.replace(old) else { return Ok(()) };
        let factory = self.factories[place.stage][place.rank].clone();
        let thread = Device::spawn(place, self.hub.clone(), mailbox, factory)
            .inspect_err(|_| self.hub.left(place))
            .with_context(|| format!("starting the thread of the device {}", self.hub.name(place)))?;
        self.threads[place.stage][place.rank] = Some(thread);
        Ok(())
    }

    /// Waits for the threads, which have been told to end.
    fn end(mut self) {
        for place in self.hub.not_ended(Instant::now() + LEAVING) {
            let thread = self.threads[place.stage][place.rank].take();
            self.given_up.extend(thread.map(|thread| (self.hub.name(place).to_owned(), thread)));
        }
        for (device, thread) in self.given_up {
            match thread.is_finished() {
                true => _ = thread.join(),
                false => warn!(device, "its thread has not come to an end; it is left to itself"),
            }
        }
        for thread in self.threads.into_iter().flatten().flatten() {
            let _ = thread.join();
        }
    }
}
