//! Execution of a run: an open loop, in which each request is sent when it is due regardless of earlier ones,
//! or a closed loop of users.
//!
//! Invariant: in an open loop no request waits for the response to another, so a stalled server does not hold
//! back the load.

mod alarm;
mod closed;
mod open;
mod setup;
mod watcher;
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
        random::{Purpose, RandomStream},
        requests::{Endpoint, LoadSpec},
    },
    sample::Sample,
    scrape::Scrape,
};

use setup::Setup;
use watcher::with_watcher;
use worker::{Job, run_workers};

/// The settings of a run.
#[derive(Clone, Debug)]
pub struct RunSettings {
    /// Name of the run in reports; `None` uses the arrival process.
    pub label: Option<String>,
    pub target: Target,
    pub load: LoadSpec,
    pub arrivals: Arrivals,
    /// Maximum number of requests in flight; further requests wait, and the wait counts as latency. `None` is
    /// unlimited.
    pub max_concurrency: Option<usize>,
    /// Maximum retries of a request that cannot connect or is rejected with status 429 or 503.
    pub retries: u32,
    /// Whether connections are reused.
    pub connections: Connections,
    /// Number of client threads; at least 1.
    pub workers: usize,
    /// Number of warm-up requests, sent one after the other before the run and not measured.
    pub warmups: usize,
    /// Timeout of a request.
    pub request_timeout: Duration,
    /// Time limit of the run: no request is sent after it, and requests in flight fail.
    pub time_limit: Duration,
}

/// The server under test and how requests address it.
#[derive(Clone, Debug)]
pub struct Target {
    /// Base URL without `/v1`, such as `http://127.0.0.1:8080`; `http` or `https`.
    pub url: String,
    /// Models that requests are spread over; if empty, the first model that the server lists.
    pub models: Vec<String>,
    /// API keys that requests are spread over; never logged or reported.
    pub keys: Vec<Secret>,
    pub endpoint: Endpoint,
    /// Fields that override those of every request body.
    pub extra_body: Map<String, Value>,
    /// PEM file of CA certificates to trust in addition to the system's.
    pub ca: Option<PathBuf>,
    /// URL of the server's Prometheus metrics; `None` disables reading them.
    pub metrics_url: Option<String>,
}

/// A text that is never logged or reported.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(pub String);

impl std::fmt::Debug for Secret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Secret")
    }
}

/// The connection policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Connections {
    /// A new connection for each request.
    New,
    /// Idle connections are reused, as in a client with a connection pool.
    Reused,
}

/// The raw results of a run.
#[derive(Clone, Debug)]
pub struct RunRecord {
    /// The models that were requested.
    pub models: Vec<String>,
    /// Start of the run.
    pub began: SystemTime,
    /// One sample per request sent, by index.
    pub samples: Vec<Sample>,
    /// Number of requests not sent because of the time limit or an interruption.
    pub unsent: usize,
    /// The server's metrics before and after the run, if available.
    pub server: Option<(Scrape, Scrape)>,
}

/// Live counts of a run, and a flag to stop it early.
#[derive(Debug, Default)]
pub struct Progress {
    pub sent: AtomicUsize,
    pub in_flight: AtomicUsize,
    pub completed: AtomicUsize,
    pub failed: AtomicUsize,
    pub hung_up: AtomicUsize,
    pub tokens: AtomicU64,
    /// Set by the observer to stop the run: no more requests are sent, and those in flight fail as
    /// interrupted.
    pub stop: AtomicBool,
}

/// Executes a run. Fails only if the server cannot be resolved, queried for its model or warmed up, if files
/// named in the settings cannot be read, if the settings are inconsistent, or if a thread cannot be started.
pub fn run(settings: &RunSettings, progress: &Progress) -> anyhow::Result<RunRecord> {
    with_watcher(progress, |live, stop| {
        let runtime = local_runtime()?;
        let setup = runtime.block_on(Setup::prepare(settings, stop))?;
        let before = runtime.block_on(setup.scrape());
        let schedule = settings
            .arrivals
            .schedule(settings.load.requests, &mut RandomStream::new(settings.load.seed, Purpose::Arrivals));
        let job = Arc::new(Job::new(settings, Arc::clone(setup.service()), schedule, live, stop.clone())?);
        let (began, samples) = run_workers(&job, settings.workers.max(1))?;
        let after = runtime.block_on(setup.scrape());
        Ok(RunRecord {
            models: setup.service().models.clone(),
            began,
            unsent: settings.load.requests - samples.len(),
            samples,
            server: before.zip(after),
        })
    })
}

/// Creates the single-threaded runtime of a worker.
pub(crate) fn local_runtime() -> io::Result<LocalRuntime> {
    Builder::new_current_thread().enable_io().enable_time().build_local(LocalOptions::default())
}
