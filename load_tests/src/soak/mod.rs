//! Soak tests: mixed traffic with hang-ups, bad requests and injected faults, for a long time.
//!
//! A server without faults records the right answers. Then a server with faults gets the traffic in rounds;
//! after each, the clients wait until the server is idle, and its resources are counted.
//! Invariant: only servers that the test started are stopped, and only servers on this machine are tested.

mod check;
mod exchange;
mod file;
mod flat;
mod kind;
mod process;
mod report;
mod session;
mod traffic;

use std::{
    path::{Path, PathBuf},
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};

use crate::{
    run::{Progress, local_runtime},
    scenario::{args, server::ServerProcess},
};

use check::ServerFaults;
use exchange::Peer;
use file::SoakFile;
pub use kind::Kind;
pub use report::SoakReport;
use report::{RoundSample, Tally};
use session::{ATTEMPTS_MAX, Recorded, Session};

/// Options of a soak test, which override its file.
#[derive(Clone, Debug)]
pub struct SoakOptions {
    /// The soak file; `None` is the built-in one.
    pub file: Option<PathBuf>,
    pub target: SoakTarget,
    /// Model to serve.
    pub model: Option<String>,
    /// Additional arguments of `mainstem serve`; they override those of the file.
    pub server_args: Vec<String>,
    /// Faults to inject; empty for none. A running server must inject some by itself if this is not empty.
    pub inject: Option<String>,
    /// Time of all rounds together.
    pub time: Option<Duration>,
    pub rounds: Option<u32>,
    /// Bytes by which the resident memory may grow without a leak.
    pub rss_noise_bytes: Option<u64>,
    /// Maximum time of a server to load its model, and to exit.
    pub start_timeout: Duration,
    /// Maximum time of a request, and of the wait for an idle server.
    pub patience: Duration,
}

/// The server to test.
#[derive(Clone, Debug)]
pub enum SoakTarget {
    /// A `mainstem` executable, which is started.
    Program(PathBuf),
    /// A running server, by its URL, its process and an API key, if it requires one.
    Running { url: String, pid: u32, key: Option<String> },
}

impl SoakOptions {
    /// Creates options without overrides.
    pub fn new(target: SoakTarget) -> SoakOptions {
        SoakOptions {
            file: None,
            target,
            model: None,
            server_args: Vec::new(),
            inject: None,
            time: None,
            rounds: None,
            rss_noise_bytes: None,
            start_timeout: Duration::from_secs(600),
            patience: Duration::from_secs(120),
        }
    }

    fn file(&self) -> Result<SoakFile> {
        let mut file = SoakFile::read(self.file.as_deref())?;
        file.server.model = self.model.clone().or(file.server.model);
        let own = match self.target {
            SoakTarget::Program(_) => file.server.inject,
            SoakTarget::Running { .. } => String::new(),
        };
        file.server.inject = self.inject.clone().unwrap_or(own);
        file.load.seconds = self.time.map_or(file.load.seconds, |time| time.as_secs_f64());
        file.load.rounds = self.rounds.unwrap_or(file.load.rounds);
        file.flat.rss_noise_bytes = self.rss_noise_bytes.unwrap_or(file.flat.rss_noise_bytes);
        file.check()?;
        Ok(file)
    }
}

/// API key of the servers that a test starts.
const KEY: &str = "soak";

/// Environment variable without which a server injects no faults.
const FAULTS_ENABLED: (&str, &str) = ("MAINSTEM_FAULTS_ENABLED", "true");

/// Runs a soak test. `tell` receives progress lines. If the run is stopped, the report covers the rounds
/// until then, and the test fails. Fails if the file is invalid, or a server does not start or cannot be
/// reached.
pub fn run(options: &SoakOptions, progress: &Progress, tell: &mut dyn FnMut(&str)) -> Result<SoakReport> {
    let file = options.file()?;
    tell(&format!("{}. {}", file.title, file.text));
    let runtime = local_runtime().context("starting the runtime")?;
    let peer = |url: &str, key: Option<&str>| Peer::new(url, key, options.patience);
    let mut report = match &options.target {
        SoakTarget::Running { url, pid, key } => {
            let recording = peer(url, key.as_deref())?;
            let recorded = runtime.block_on(Recorded::from(&recording, &file, ATTEMPTS_MAX))?;
            let session = Session::new(file, peer(url, key.as_deref())?, *pid, recorded);
            runtime.block_on(soak(&session, options, progress, tell))?
        }
        SoakTarget::Program(program) => {
            let start = |file: &SoakFile, inject: &str| start(program, file, inject, options, progress);
            tell("recording the answers of a server without faults");
            let mut quiet = start(&file, "")?;
            let recorded = runtime.block_on(record_quiet(&peer(&quiet.url, Some(KEY))?, &file))?;
            quiet.terminate()?;
            quiet.wait_for_success(options.start_timeout).context("the server without faults")?;
            let mut server = start(&file, &file.server.inject)?;
            let session = Session::new(file, peer(&server.url, Some(KEY))?, server.pid(), recorded);
            let report = runtime.block_on(soak(&session, options, progress, tell));
            let mut report = report.or_else(|error| server.check().and(Err(error)))?;
            tell("draining");
            let drained = runtime.block_on(session.drain(&mut server, options.start_timeout));
            report.problems.extend(drained.err().map(|error| format!("draining: {error:#}")));
            report
        }
    };
    report.passed = report.problems.is_empty();
    Ok(report)
}

/// Records the answers of a server without faults. Fails if it had some: then they need not be the right
/// ones.
async fn record_quiet(peer: &Peer, file: &SoakFile) -> Result<Recorded> {
    let recorded = Recorded::from(peer, file, 1).await?;
    let faults = ServerFaults::between("", &peer.get("/metrics").await?);
    ensure!(faults.is_quiet(), "the server that is to have no faults had some: {faults:?}");
    Ok(recorded)
}

fn start(
    program: &Path,
    file: &SoakFile,
    inject: &str,
    options: &SoakOptions,
    progress: &Progress,
) -> Result<ServerProcess> {
    let server = &file.server;
    let (mut own, mut variables) = (vec!["--api-key".to_owned(), KEY.to_owned()], Vec::new());
    if !inject.is_empty() {
        own.extend(["--inject".to_owned(), inject.to_owned()]);
        variables.push(FAULTS_ENABLED);
    }
    let args = args::serve_args(server.model.as_deref(), &[&server.args, &options.server_args, &own], None);
    ServerProcess::start_with(program, &args, &variables, options.start_timeout, progress)
}

/// Sends the traffic in rounds, and checks what came of it.
async fn soak(
    session: &Session,
    options: &SoakOptions,
    progress: &Progress,
    tell: &mut dyn FnMut(&str),
) -> Result<SoakReport> {
    let (began, load) = (Instant::now(), &session.file.load);
    let before = session.peer.get("/metrics").await?;
    let (mut samples, mut problems) = (Vec::<RoundSample>::new(), Vec::new());
    for round in 1..=load.rounds {
        session.round(Duration::from_secs_f64(load.seconds / f64::from(load.rounds)), progress).await;
        if progress.stop.load(Ordering::Relaxed) {
            problems.push(format!("interrupted in round {round} of {}", load.rounds));
            break;
        }
        if let Some(held) = session.wait_until_idle(options.patience).await? {
            problems.push(format!("not idle {:?} after round {round}: {held}", options.patience));
            break;
        }
        let resources = session.resources().await?;
        let requests = session.tally().requests;
        let restarts = ServerFaults::between(&before, &session.peer.get("/metrics").await?).restarts;
        samples.push(RoundSample { requests, seconds: began.elapsed().as_secs_f64(), restarts, resources });
        tell(&format!(
            "round {round} of {}: {requests} requests, {} MiB, {} files, {} threads",
            load.rounds,
            resources.rss_bytes >> 20,
            resources.fds,
            resources.threads
        ));
    }
    let after = session.peer.get("/metrics").await?;
    let (tally, server) = (session.tally(), ServerFaults::between(&before, &after));
    let growth = report::growth(&samples, session.file.flat.rss_noise_bytes as f64).unwrap_or_default();
    problems.extend(growth.iter().filter(|(_, growth)| !growth.is_flat()).map(|(name, growth)| {
        format!("{name} grew from {:.0} to {:.0} in {} requests", growth.early, growth.late, growth.requests)
    }));
    problems.extend(session.check_tally(&tally, &server));
    Ok(SoakReport {
        title: session.file.title.clone(),
        passed: false,
        problems,
        seconds: began.elapsed().as_secs_f64(),
        skipped: session.skipped(),
        tally,
        server,
        growth,
        samples,
    })
}

impl Session {
    /// Returns what the requests and the faults show that must not be.
    fn check_tally(&self, tally: &Tally, server: &ServerFaults) -> Vec<String> {
        let mut problems = server.check(&tally.faults, tally.failed_requests);
        if tally.wrong > 0 {
            problems.push(format!("{} requests went wrong", tally.wrong));
            problems.extend(tally.differences.iter().cloned());
        }
        let resets = tally.without_reason();
        if !resets.is_empty() {
            problems.push(format!("{resets:?}: every connection was reset, and no client learnt why"));
        }
        if self.injects() && server.injected.is_empty() {
            problems.push("no fault was injected".to_owned());
        }
        problems
    }
}
