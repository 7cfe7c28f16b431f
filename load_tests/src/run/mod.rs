//! A whole run: an open loop, in which each request is sent when it is due, whatever became of those before it; or
//! a closed loop of users.
//!
//! Invariant: in an open loop no request waits for another's answer: a stalled server does not hold back the load.

mod alarm;
mod closed;
mod open;
mod setup;
mod watch;
mod worker;

use std::{
    io,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize},
    },
    time::{Duration, SystemTime},
};

use serde_json::{Map, Value};
use tokio::runtime::{Builder, LocalOptions, LocalRuntime};

use crate::{
    plan::{
        arrivals::Arrivals,
        draws::{Draws, Purpose},
        requests::{Endpoint, Load},
    },
    sample::Sample,
    scrape::Scrape,
};

use setup::Setup;
use watch::watched;
use worker::{Job, work_all};

/// Everything a run is made of.
#[derive(Clone, Debug)]
pub struct Settings {
    /// What the run is called in reports.
    pub label: Option<String>,
    pub target: Target,
    pub load: Load,
    pub arrivals: Arrivals,
    /// Requests that may be in flight at once; those beyond it wait, and their wait counts. `None` knows no limit.
    pub max_concurrency: Option<usize>,
    /// Times a request is sent again when there is no connection, or the answer is 429 or 503.
    pub retries: u32,
    /// Whether connections are used again.
    pub connections: Connections,
    /// Threads that send and read; at least 1.
    pub workers: usize,
    /// Requests sent and answered before the run begins, one after the other; they count for nothing.
    pub warmups: usize,
    /// A request that takes longer has failed.
    pub request_timeout: Duration,
    /// After this time nothing more is sent, and what is in flight has failed.
    pub time_limit: Duration,
}

/// The server, and how it is spoken to.
#[derive(Clone, Debug)]
pub struct Target {
    /// Up to but without `/v1`, such as `http://127.0.0.1:8080`; `https` too.
    pub url: String,
    /// Empty asks the server what it serves and takes the first; otherwise requests are spread over them.
    pub models: Vec<String>,
    /// API keys that requests are spread over. Never shown.
    pub keys: Vec<Secret>,
    pub endpoint: Endpoint,
    /// Fields that go into every body before ours.
    pub extra_body: Map<String, Value>,
    /// A file of certificates in PEM to trust beside the system's.
    pub ca: Option<PathBuf>,
    /// Where the server's Prometheus metrics are; `None` does not ask for them.
    pub metrics_url: Option<String>,
}

/// A text that no log and no report shows.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub String);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

/// Whether a connection serves one request or many.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Connections {
    /// Each request has its own.
    New,
    /// An idle one is used again, as clients with a pool do.
    Reused,
}

/// What a run leaves behind.
#[derive(Clone, Debug)]
pub struct Record {
    /// The models asked for.
    pub models: Vec<String>,
    /// When the run began.
    pub began: SystemTime,
    /// One per request sent, by index.
    pub samples: Vec<Sample>,
    /// Requests that the time limit or an interruption left unsent.
    pub unsent: usize,
    /// The server's own metrics before the run and after it, where it tells them.
    pub server: Option<(Scrape, Scrape)>,
}

/// What a run has come to so far, for whoever watches; and the way to end it early.
#[derive(Debug, Default)]
pub struct Progress {
    pub sent: AtomicUsize,
    pub in_flight: AtomicUsize,
    pub completed: AtomicUsize,
    pub failed: AtomicUsize,
    pub hung_up: AtomicUsize,
    pub tokens: AtomicU64,
    /// Set by the watcher: nothing more is sent, and what is in flight has failed as interrupted.
    pub stop: AtomicBool,
}

/// Runs the whole load. Fails only when the server cannot be found, asked for its model or warmed up, when settings
/// name files that cannot be read or do not agree with each other, or when a thread cannot be had.
pub fn run(settings: &Settings, progress: &Progress) -> anyhow::Result<Record> {
    watched(progress, |live, stop| {
        let runtime = local_runtime()?;
        let setup = runtime.block_on(Setup::make(settings, stop))?;
        let before = runtime.block_on(setup.scrape());
        let schedule = settings
            .arrivals
            .schedule(settings.load.requests, &mut Draws::new(settings.load.seed, Purpose::Arrivals));
        let job = Arc::new(Job::new(settings, Arc::clone(setup.service()), schedule, live, stop.clone())?);
        let (began, samples) = work_all(&job, settings.workers.max(1))?;
        let after = runtime.block_on(setup.scrape());
        Ok(Record {
            models: setup.service().models.clone(),
            began,
            unsent: settings.load.requests - samples.len(),
            samples,
            server: before.zip(after),
        })
    })
}

/// What a thread runs its tasks on.
fn local_runtime() -> io::Result<LocalRuntime> {
    Builder::new_current_thread().enable_io().enable_time().build_local(LocalOptions::default())
}
