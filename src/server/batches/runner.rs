//! The thread that runs batches: those of different clients at once, those of one client in the order in
//! which they were created.
//!
//! Invariant: what fails in a batch ends no other one, and no request of the server waits for this thread.

use super::exclusion::Exclusion;
use super::run::{RunContext, run_batch};
use super::tables::{self, BatchRow};
use super::wire::BatchStatus;
use super::{Batches, Service, blocking, now, responses};
use crate::server::App;
use crate::server::auth::{Keys, Owner};
use crate::telemetry;
use actix_web::web::Data;
use anyhow::{Context, Result};
use futures_util::future::LocalBoxFuture;
use futures_util::stream::FuturesUnordered;
use futures_util::{FutureExt, StreamExt};
use std::collections::{HashMap, HashSet};
use std::io;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::thread::Builder;
use std::time::Duration;
use tokio::select;
use tokio::sync::{oneshot, watch};
use tokio::task::LocalSet;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tracing::{error, warn};

/// Maximum number of batches that run at once, and of those that are only ended, with them.
const RUNNING_MAX: usize = 16;
const ENDING_MAX: usize = 32;

/// Time between two searches for files and batches whose time has passed.
const CLEANING_TIME: Duration = Duration::from_secs(30);

/// Maximum time for the batches to write what is answered when they stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);

/// The thread of a server that runs batches.
pub struct Runner {
    halt: watch::Sender<bool>,
    /// Completes when the thread ends.
    ended: oneshot::Receiver<()>,
}

impl Runner {
    /// Starts the thread, with at most `helpers` further ones that parse requests and wait for the disk,
    /// unless the server has no batches.
    pub fn start(service: &Service, app: &App, keys: Data<Keys>, helpers: usize) -> Result<Option<Runner>> {
        let Some(batches) = &service.0 else { return Ok(None) };
        let (halt, halted) = watch::channel(false);
        let app = Arc::new(app.without_time_limit());
        let exclusion = Exclusion::default();
        let cx = RunContext { batches: batches.clone(), app, keys, halt: halted, exclusion };
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().max_blocking_threads(helpers).build();
        let runtime = runtime.context("cannot start the thread of batches")?;
        let (running, ended) = oneshot::channel::<()>();
        let lock = batches.folder.hold()?;
        let run = move || {
            let _running = (lock, running);
            // It ends when all threads that write for it have.
            let runtime = runtime;
            LocalSet::new().block_on(&runtime, run_batches(&cx));
        };
        let thread = Builder::new().name("batches".to_owned()).spawn(run);
        thread.context("cannot start the thread of batches")?;
        Ok(Some(Runner { halt, ended }))
    }

    /// Stops the batches, whose requests in flight are dropped. They go on at the next start.
    pub fn halt(&self) {
        self.halt.send_replace(true);
    }

    /// Stops the batches and waits, for a limited time, until what is answered is on the disk. Until then,
    /// the folder stays locked.
    pub async fn stop(mut self) {
        self.halt();
        if timeout(STOP_TIMEOUT, &mut self.ended).await.is_err() {
            warn!(
                "the batches take too long to stop; what is not recorded is computed again at the next start"
            );
        }
    }
}

impl Drop for Runner {
    fn drop(&mut self) {
        self.halt();
    }
}

/// The batches that run.
#[derive(Default)]
struct Running<'a> {
    runs: FuturesUnordered<LocalBoxFuture<'a, Ended>>,
    ids: HashSet<String>,
    /// Number of batches of each owner.
    owners: HashMap<Owner, usize>,
}

/// A batch that does not run any more.
struct Ended {
    id: String,
    owner: Owner,
    has_panicked: bool,
}

/// Runs batches until the server shuts down.
async fn run_batches(cx: &RunContext) {
    let (mut running, mut halt) = (Running::default(), cx.halt.clone());
    let cleaning = clean_regularly(&cx.batches);
    tokio::pin!(cleaning);
    loop {
        let is_halted = *halt.borrow();
        if is_halted && running.runs.is_empty() {
            return;
        }
        if !is_halted {
            running.begin(cx).await;
        }
        select! {
            Some(ended) = running.runs.next() => running.remove(ended),
            () = cx.batches.changed.notified() => {}
            () = &mut cleaning => {}
            _ = halt.wait_for(|halt| *halt), if !is_halted => {}
        }
    }
}

impl<'a> Running<'a> {
    /// Begins the batches that may run.
    async fn begin(&mut self, cx: &'a RunContext) {
        let open =
            cx.batches.database.call(|db| Ok((tables::open_batches(db)?, tables::count_batches(db)?))).await;
        let (open, counts) = match open {
            Ok(found) => found,
            Err(error) => {
                // It is tried again at the next change, or soon.
                return warn!("batches cannot be read: {}", format!("{error:#}").escape_debug());
            }
        };
        for (status, count) in counts {
            telemetry::BATCHES.gauge_with([status]).set(count as f64);
        }
        for row in open {
            if self.may_begin(&row) {
                self.push(cx, row);
            }
        }
    }

    /// Returns whether a batch may begin to run: the oldest one of an owner of which none runs, or one that
    /// is only ended.
    fn may_begin(&self, row: &BatchRow) -> bool {
        let is_over = row.object.status == BatchStatus::Cancelling || row.object.expires_at <= now();
        let is_next = !self.owners.contains_key(&row.owner) && self.owners.len() < RUNNING_MAX;
        let may_end = is_over && self.runs.len() < ENDING_MAX;
        !self.ids.contains(&row.object.id) && (is_next || may_end)
    }

    fn push(&mut self, cx: &'a RunContext, row: BatchRow) {
        let (id, owner) = (row.object.id.clone(), row.owner.clone());
        self.ids.insert(id.clone());
        *self.owners.entry(owner.clone()).or_default() += 1;
        let run = AssertUnwindSafe(run_batch(cx, row)).catch_unwind();
        self.runs.push(Box::pin(async move { Ended { id, owner, has_panicked: run.await.is_err() } }));
    }

    fn remove(&mut self, Ended { id, owner, has_panicked }: Ended) {
        if let Some(count) = self.owners.get_mut(&owner) {
            *count -= 1;
            if *count == 0 {
                self.owners.remove(&owner);
            }
        }
        match has_panicked {
            // It would do so again.
            true => error!(batch = id, "the batch has panicked; it goes on at the next start"),
            false => _ = self.ids.remove(&id),
        }
    }
}

/// Removes files and batches whose time has passed, without end, and wakes the runner: batches that were
/// created may not have begun.
async fn clean_regularly(batches: &Arc<Batches>) {
    let mut ticks = interval(CLEANING_TIME);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        clean(batches).await;
        batches.changed.notify_one();
    }
}

async fn clean(batches: &Arc<Batches>) {
    let now = now();
    let retention = i64::try_from(batches.config.retention.as_secs()).unwrap_or(i64::MAX);
    let expired = batches.database.call(move |db| {
        tables::delete_ended_batches(db, now.saturating_sub(retention))?;
        responses::delete_expired(db, now)?;
        tables::delete_expired_files(db, now)
    });
    let removed = match expired.await {
        Ok(ids) => {
            let batches = batches.clone();
            blocking(move || {
                let removed = ids.iter().map(|id| batches.folder.remove(id));
                // One that fails keeps no other one.
                Ok(removed.fold(Ok(()), io::Result::and)?)
            })
            .await
        }
        Err(error) => Err(error),
    };
    if let Err(error) = removed {
        warn!("expired files cannot be removed: {}", format!("{error:#}").escape_debug());
    }
}
