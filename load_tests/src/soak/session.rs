//! The clients of a soak test, and what they know.
//!
//! Invariant: after a round, no client has a request in flight.

use std::{
    cell::{RefCell, RefMut},
    collections::BTreeMap,
    rc::Rc,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use anyhow::{Result, bail, ensure};
use serde_json::Value;
use tokio::{task::JoinSet, time::sleep};

use super::{
    exchange::{FAULT_CODES, Outcome, Peer, Reply},
    file::SoakFile,
    kind::{Expected, Kind},
    process::Resources,
    report::Tally,
    traffic::{SoakRequest, Traffic},
};
use crate::{
    plan::random::{Purpose, RandomStream},
    run::Progress,
    scenario::server::ServerProcess,
    scrape::exposition,
};

/// Maximum number of attempts to record an answer of a running server, which may have faults.
pub const ATTEMPTS_MAX: usize = 50;

/// Gauges that are 0 while the server is idle.
const GAUGES: [&str; 4] = [
    "mainstem_num_requests_running",
    "mainstem_num_requests_waiting",
    "mainstem_slots_live",
    "mainstem_kv_cache_usage_perc",
];

const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Measurements of which the smallest counts: connections are closed a moment after the last response.
const MEASUREMENTS: usize = 5;

/// Number of streams that are open when the server is told to exit.
const DRAINED_STREAMS: u32 = 4;

/// The answers of a server without load.
pub struct Recorded {
    answers: BTreeMap<(Kind, u32), Value>,
    /// Kinds that the model has no endpoint for.
    skipped: Vec<Kind>,
}

impl Recorded {
    /// Records the answers of all requests of a file, each with at most `attempts` attempts. Fails if the
    /// last one ends with an error.
    pub async fn from(peer: &Peer, file: &SoakFile, attempts: usize) -> Result<Recorded> {
        let mut recorded = Recorded { answers: BTreeMap::new(), skipped: Vec::new() };
        let wanted =
            file.mix.iter().filter(|(kind, weight)| **weight > 0.0 && kind.expected() == Expected::Answer);
        for (&kind, _) in wanted {
            for variant in 0..file.load.variants.get() {
                match record(peer, &SoakRequest::new(&file.load, kind, variant), attempts).await {
                    Reply::Answer(answer) => _ = recorded.answers.insert((kind, variant), answer),
                    Reply::Error { code, .. } if code == "wrong_endpoint" => {
                        recorded.skipped.push(kind);
                        break;
                    }
                    other => bail!("the quiet server's answer to {kind:?} {variant} is {other:?}"),
                }
            }
        }
        Ok(recorded)
    }
}

/// Sends a request until it has no fault, at most `attempts` times.
async fn record(peer: &Peer, request: &SoakRequest, attempts: usize) -> Reply {
    let mut reply = Reply::HungUp;
    for _ in 0..attempts {
        reply = peer.send(request, RandomStream::new(0, Purpose::Soak(0))).await;
        match &reply {
            Reply::Error { code, .. } if FAULT_CODES.contains(&&**code) => {}
            _ => break,
        }
    }
    reply
}

/// A soak test of one server.
pub struct Session {
    pub file: SoakFile,
    pub peer: Rc<Peer>,
    /// Process of the server.
    pid: u32,
    recorded: Rc<Recorded>,
    clients: Rc<Clients>,
}

/// The state that the clients share.
struct Clients {
    traffic: RefCell<Traffic>,
    tally: RefCell<Tally>,
}

impl Session {
    /// Creates the test of a server with the answers that were recorded before.
    pub fn new(file: SoakFile, peer: Peer, pid: u32, recorded: Recorded) -> Session {
        let generates = recorded.generates();
        let is_wanted = |kind| match kind {
            Kind::WrongKey => peer.has_key(),
            Kind::HangUp | Kind::UnknownModel => generates,
            _ => !recorded.skipped.contains(&kind),
        };
        let traffic = RefCell::new(Traffic::new(&file, is_wanted));
        let clients = Rc::new(Clients { traffic, tally: RefCell::default() });
        Session { file, peer: Rc::new(peer), pid, recorded: Rc::new(recorded), clients }
    }

    /// Returns the outcomes until now.
    pub fn tally(&self) -> Tally {
        self.clients.tally.borrow().clone()
    }

    /// Returns the kinds of requests that are left out.
    pub fn skipped(&self) -> Vec<Kind> {
        self.recorded.skipped.clone()
    }

    /// Returns whether faults are expected.
    pub fn injects(&self) -> bool {
        !self.file.server.inject.is_empty()
    }

    /// Lets all clients send requests for a time, and waits for their last responses. Then one more request
    /// waits until the devices are there, if they are being rebuilt.
    pub async fn round(&self, time: Duration, progress: &Progress) {
        let until = Instant::now() + time;
        let mut running = JoinSet::new();
        for _ in 0..self.file.load.clients.get() {
            let (peer, recorded, clients) = (self.peer.clone(), self.recorded.clone(), self.clients.clone());
            running.spawn_local(async move {
                while Instant::now() < until {
                    let (request, random) = clients.traffic.borrow_mut().next();
                    let outcome = send(&peer, &recorded, &request, random).await;
                    clients.add(&request, &outcome);
                }
            });
        }
        let stopped = async {
            while !progress.stop.load(Ordering::Relaxed) {
                sleep(POLL_INTERVAL).await;
            }
        };
        let finished = async { while running.join_next().await.is_some() {} };
        tokio::select! {
            () = finished => self.probe().await,
            () = stopped => {}
        }
    }

    async fn probe(&self) {
        if let Some((kind, variant)) = self.recorded.answers.keys().next() {
            let request = SoakRequest::new(&self.file.load, *kind, *variant);
            let outcome =
                send(&self.peer, &self.recorded, &request, RandomStream::new(0, Purpose::Soak(0))).await;
            self.clients.add(&request, &outcome);
        }
    }

    /// Waits until the server is idle. Returns what it still holds after `patience`, if anything.
    pub async fn wait_until_idle(&self, patience: Duration) -> Result<Option<String>> {
        let until = Instant::now() + patience;
        loop {
            let metrics = exposition::parse(&self.peer.get("/metrics").await?);
            let mut held = Vec::new();
            for name in GAUGES {
                let series = metrics.get(name).map(|series| series.values().sum::<f64>());
                match series {
                    Some(0.0) => {}
                    Some(value) => held.push(format!("{name} {value}")),
                    None => bail!("the server has no metric {name}"),
                }
            }
            match held.is_empty() {
                true => return Ok(None),
                false if Instant::now() >= until => return Ok(Some(held.join(", "))),
                false => sleep(POLL_INTERVAL).await,
            }
        }
    }

    /// Returns what the idle server holds.
    pub async fn resources(&self) -> Result<Resources> {
        let mut least = Resources::of(self.pid)?;
        for _ in 1..MEASUREMENTS {
            sleep(POLL_INTERVAL).await;
            least = least.min(Resources::of(self.pid)?);
        }
        Ok(least)
    }

    /// Ends the server while it sends streams. Fails if these are not completed, or it does not exit
    /// with 0.
    pub async fn drain(&self, server: &mut ServerProcess, patience: Duration) -> Result<()> {
        let mut open = Vec::new();
        for variant in 0..DRAINED_STREAMS.min(self.file.load.variants.get()) {
            if self.recorded.answers.contains_key(&(Kind::Stream, variant)) {
                let request = SoakRequest::new(&self.file.load, Kind::Stream, variant);
                open.push((
                    request,
                    self.peer.start(&SoakRequest::new(&self.file.load, Kind::Stream, variant)).await,
                ));
            }
        }
        server.terminate()?;
        for (request, stream) in open {
            let reply = match stream {
                Ok(stream) => stream.finish().await,
                Err(why) => Reply::Broken(why),
            };
            let outcome = self.recorded.judge(&request, reply);
            let is_good = matches!(outcome, Outcome::Expected | Outcome::Fault(_));
            ensure!(is_good, "stream {}: {outcome:?}", request.variant);
        }
        server.wait_for_success(patience)
    }
}

impl Clients {
    fn add(&self, request: &SoakRequest, outcome: &Outcome) {
        let mut tally: RefMut<Tally> = self.tally.borrow_mut();
        tally.add(request.kind, request.variant, outcome);
    }
}

impl Recorded {
    /// Returns whether the model generates text. If it does not, the endpoint of completions refuses all
    /// requests.
    fn generates(&self) -> bool {
        !self.skipped.contains(&Kind::Stream)
    }

    fn judge(&self, request: &SoakRequest, reply: Reply) -> Outcome {
        let is_refused = matches!(&reply, Reply::Error { status: 400, code } if code == "wrong_endpoint");
        if is_refused && !self.generates() && matches!(request.kind, Kind::BadParameter | Kind::TooLong) {
            return Outcome::Expected;
        }
        Outcome::of(request.kind, reply, self.answers.get(&(request.kind, request.variant)))
    }
}

async fn send(peer: &Peer, recorded: &Recorded, request: &SoakRequest, random: RandomStream) -> Outcome {
    recorded.judge(request, peer.send(request, random).await)
}
