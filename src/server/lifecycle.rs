//! How the server comes and goes: it takes its place, listens, runs, drains and stops.
//!
//! Invariant: nobody can connect before there is an engine to answer. After the first stop no new request is taken
//! in; after the second nothing is waited for but the way of the last words to the clients.

use super::access::access;
use super::auth::{Keys, cors, guard};
use super::routes::routes;
use super::{App, ServeParts, tls};
use crate::config::ServerConfig;
use crate::telemetry;
use actix_web::dev::Server as HttpServerRun;
use actix_web::middleware::from_fn;
use actix_web::rt::net::TcpSocket;
use actix_web::{HttpServer, rt, web};
use anyhow::{Context, Result, bail};
use metrics_exporter_prometheus::PrometheusHandle;
#[cfg(target_os = "linux")]
use socket2::SockRef;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::select;
use tokio::sync::mpsc::UnboundedReceiver;
use tracing::{info, warn};

/// How long answers that are over may take to reach the clients' sockets.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// How often it is looked whether the last request is over.
const DRAIN_INTERVAL: Duration = Duration::from_millis(20);

/// How often observations are put into their buckets.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(5);

/// How long a client may take nothing of what it asked for before its connection is dropped.
const UNREAD_TIMEOUT: Duration = Duration::from_secs(60);

/// Connections that may wait to be accepted.
const BACKLOG: u32 = 2048;

/// All that a server needs beside an engine, found to be good: the address is its own, keys and certificate are
/// read. Whoever comes is refused until it [serves](Place::serve).
pub struct Place {
    config: ServerConfig,
    sockets: Vec<TcpSocket>,
    keys: Keys,
    tls: Option<rustls::ServerConfig>,
}

impl Place {
    /// Takes the configured address. Must be called within an actix system.
    pub fn take(config: ServerConfig) -> Result<Place> {
        let keys = Keys::new(&config.keys()?)?;
        let tls = config.tls.as_ref().map(tls::server_config).transpose()?;
        let sockets = sockets(&config).with_context(|| cannot_listen(&config))?;
        Ok(Place { config, sockets, keys, tls })
    }

    /// Listens, for the engine of `parts`.
    pub fn serve(self, parts: ServeParts) -> Result<Server> {
        let Place { config, sockets, keys, tls } = self;
        let metrics = telemetry::install(None);
        let app = web::Data::new(App::new(parts, config.clone()));
        let (data, origins, keys) = (app.clone(), config.cors_origins.clone(), web::Data::new(keys));
        let shown = web::Data::new(metrics.clone());
        // The last that wraps is the first to see a request: a refused one has its id, and its CORS headers too.
        let new_app = move || {
            actix_web::App::new()
                .app_data(data.clone())
                .app_data(keys.clone())
                .app_data(shown.clone())
                .wrap(from_fn(guard))
                .wrap(cors(&origins))
                .wrap(from_fn(access))
                .configure(routes)
        };
        let mut server = HttpServer::new(new_app)
            .workers(config.workers)
            .keep_alive(config.keep_alive)
            // A client that hangs up must drop the handler that works for it.
            .h1_allow_half_closed(false)
            .shutdown_timeout(FLUSH_TIMEOUT.as_secs())
            .disable_signals();
        for socket in sockets {
            let listener = socket.listen(BACKLOG).and_then(|listener| listener.into_std());
            server = match (listener, &tls) {
                (Ok(listener), None) => server.listen(listener),
                (Ok(listener), Some(tls)) => server.listen_rustls_0_23(listener, tls.clone()),
                (Err(error), _) => Err(error),
            }
            .with_context(|| cannot_listen(&config))?;
        }
        let address = *server.addrs().first().context("no address was bound")?;
        let scheme = if tls.is_some() { "https" } else { "http" };
        Ok(Server { run: server.run(), address, scheme, app, metrics })
    }
}

fn cannot_listen(config: &ServerConfig) -> String {
    format!("cannot listen on {}:{}", config.host, config.port)
}

/// A socket for each address of the configured host that can be had; an error if there is none.
fn sockets(config: &ServerConfig) -> io::Result<Vec<TcpSocket>> {
    let mut taken = Vec::new();
    let mut failed = None;
    for address in (config.host.as_str(), config.port).to_socket_addrs()? {
        match socket(address) {
            Ok(socket) => taken.push(socket),
            Err(error) => failed = Some(error),
        }
    }
    match failed {
        Some(error) if taken.is_empty() => Err(error),
        _ => Ok(taken),
    }
}

fn socket(address: SocketAddr) -> io::Result<TcpSocket> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // Connections of a server that was here before may still be on their way out.
    socket.set_reuseaddr(true)?;
    // A token leaves when it is there, not when the client has told that the one before came: 40 ms on a connection that
    // is used again. Accepted connections inherit it.
    socket.set_nodelay(true)?;
    // This too; other systems have no such thing.
    #[cfg(target_os = "linux")]
    SockRef::from(&socket).set_tcp_user_timeout(Some(UNREAD_TIMEOUT))?;
    socket.bind(address)?;
    Ok(socket)
}

/// A server that listens.
pub struct Server {
    run: HttpServerRun,
    address: SocketAddr,
    /// What the address is reached by.
    scheme: &'static str,
    app: web::Data<App>,
    metrics: PrometheusHandle,
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
    /// A server at the configured address. Must be called, and run, within an actix system.
    pub fn bind(parts: ServeParts, config: ServerConfig) -> Result<Server> {
        Place::take(config)?.serve(parts)
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
        let upkeep = rt::spawn(keep_up(self.metrics));
        info!("listening on {}://{}", self.scheme, self.address);
        select! {
            ended = &mut running => {
                ended.context("the HTTP server's task failed")?.context("the HTTP server failed")?;
                bail!("the HTTP server stopped by itself");
            }
            _ = stops.recv() => {}
        }
        self.app.parts.status.draining.store(true, Ordering::SeqCst);
        info!(in_flight = self.app.parts.status.pending(), "draining: new requests are refused");
        // With nothing in flight a second stop cuts nothing off.
        let ending = select! {
            biased;
            drained = rt::time::timeout(drain_timeout, until(|| self.app.is_idle())) => match drained {
                Ok(()) => Ending::Drained,
                Err(_) => Ending::TimedOut,
            },
            Some(()) = stops.recv() => Ending::Cut,
        };
        if ending != Ending::Drained {
            warn!(in_flight = self.app.parts.status.pending(), "requests in flight are cut off");
            self.app.cut.send_replace(true);
            let _ = rt::time::timeout(FLUSH_TIMEOUT, until(|| !self.app.has_open_responses())).await;
        }
        // What was cut off has ended in an error by now; its last words may still be on their way.
        handle.stop(true).await;
        upkeep.abort();
        info!("stopped");
        Ok(ending)
    }
}

async fn until(is_so: impl Fn() -> bool) {
    let mut ticks = rt::time::interval(DRAIN_INTERVAL);
    while !is_so() {
        ticks.tick().await;
    }
}

async fn keep_up(metrics: PrometheusHandle) {
    let mut ticks = rt::time::interval(UPKEEP_INTERVAL);
    loop {
        ticks.tick().await;
        metrics.run_upkeep();
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;
    use crate::config::{Config, Overrides};
    use std::net::TcpStream;

    /// A health check sees a server that is loading as one that is not there.
    #[actix_web::test]
    async fn a_place_that_is_taken_refuses_who_comes() {
        let mut flags = Overrides::default();
        flags.set("server.port", Some(0));
        let place = Place::take(Config::load(None, flags).unwrap().server).unwrap();
        let address = place.sockets[0].local_addr().unwrap();
        assert_ne!(address.port(), 0);
        let refused = TcpStream::connect(address).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    }
    /// The bug: with the system's defaults, a stream on a connection that was used before stood still for 40 ms.
    #[actix_web::test]
    async fn tokens_leave_at_once_on_every_connection() {
        let listener = socket("127.0.0.1:0".parse().unwrap()).unwrap().listen(1).unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        assert!(accepted.nodelay().unwrap());
    }
}
