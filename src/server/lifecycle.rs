//! How the server comes and goes: it binds, runs, drains and stops.
//!
//! Invariant: after the first stop no new request is taken in; after the second nothing is waited for.

use super::access::access;
use super::{App, ServeParts, routes};
use crate::config::ServerConfig;
use crate::telemetry;
use actix_web::dev::Server as HttpServerRun;
use actix_web::middleware::from_fn;
use actix_web::{HttpServer, rt, web};
use anyhow::{Context, Result};
use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::select;
use tokio::sync::mpsc::UnboundedReceiver;
use tracing::{info, warn};

/// How long answers that are over may take to reach the clients' sockets.
const FLUSH_TIMEOUT_S: u64 = 1;

/// How often it is looked whether the last request is over.
const DRAIN_INTERVAL: Duration = Duration::from_millis(20);

/// How often observations are put into their buckets.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(5);

/// A bound server.
pub struct Server {
    run: HttpServerRun,
    address: SocketAddr,
    app: web::Data<App>,
}

/// How a server ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Every request in flight was answered.
    Drained,
    /// Time was up, and requests in flight were cut off.
    TimedOut,
    /// A second stop cut off what was in flight.
    Cut,
}

impl Server {
    /// Binds to the configured address. Must be called, and run, within an actix system.
    pub fn bind(parts: ServeParts, config: ServerConfig) -> Result<Server> {
        let app = web::Data::new(App::new(parts, config.clone(), telemetry::install()));
        let data = app.clone();
        let new_app =
            move || actix_web::App::new().app_data(data.clone()).wrap(from_fn(access)).configure(routes);
        let server = HttpServer::new(new_app)
            .workers(config.workers)
            .keep_alive(config.keep_alive)
            // A client that hangs up must drop the handler that works for it.
            .h1_allow_half_closed(false)
            .shutdown_timeout(FLUSH_TIMEOUT_S)
            .disable_signals()
            .bind((config.host.as_str(), config.port))
            .with_context(|| format!("cannot listen on {}:{}", config.host, config.port))?;
        let address = *server.addrs().first().context("no address was bound")?;
        Ok(Server { run: server.run(), address, app })
    }

    /// The real address, also when port 0 was asked for.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `stops` says so: the first time requests in flight get `drain_timeout` to finish, the
    /// second time nothing is waited for.
    pub async fn run(self, mut stops: UnboundedReceiver<()>, drain_timeout: Duration) -> Result<Ending> {
        let handle = self.run.handle();
        let mut running = rt::spawn(self.run);
        let upkeep = rt::spawn(keep_up(self.app.clone()));
        info!("listening on http://{}", self.address);
        select! {
            ended = &mut running => {
                ended.context("the HTTP server's task failed")?.context("the HTTP server failed")?;
                anyhow::bail!("the HTTP server stopped by itself");
            }
            _ = stops.recv() => {}
        }
        self.app.parts.status.draining.store(true, Ordering::SeqCst);
        info!(in_flight = self.app.parts.status.pending(), "draining: new requests are refused");
        let ending = select! {
            drained = rt::time::timeout(drain_timeout, drained(&self.app)) => match drained {
                Ok(()) => Ending::Drained,
                Err(_) => Ending::TimedOut,
            },
            Some(()) = stops.recv() => Ending::Cut,
        };
        if ending != Ending::Drained {
            warn!(in_flight = self.app.parts.status.pending(), "requests in flight are cut off");
        }
        handle.stop(ending == Ending::Drained).await;
        upkeep.abort();
        info!("stopped");
        Ok(ending)
    }
}

async fn drained(app: &App) {
    let mut ticks = rt::time::interval(DRAIN_INTERVAL);
    while !app.is_idle() {
        ticks.tick().await;
    }
}

async fn keep_up(app: web::Data<App>) {
    let mut ticks = rt::time::interval(UPKEEP_INTERVAL);
    loop {
        ticks.tick().await;
        app.metrics.run_upkeep();
    }
}
