//! Startup and shutdown of the server: it binds its address, listens, runs, drains and stops.
//!
//! Invariant: no client can connect before the engine is ready. After the first stop signal no new request is
//! accepted; after the second the server only waits until error responses have reached the clients.

use super::access::{trace_request, track_request};
use super::auth::{Keys, Rules, authorize, check_host, cors};
use super::batches::Service;
use super::batches::runner::Runner;
use super::connections::Connections;
use super::dialects::shape_errors;
use super::failed_keys::FailedKeys;
use super::hosts::AllowedHosts;
use super::listener::{Acceptor, add_listener};
use super::open_files::{FILES_PER_WORKER, connection_limit};
use super::routes::{metrics_route, page_routes, root_route, routes};
use super::tls::{self, Certificate};
use super::{App, ServeParts};
use crate::config::ServerConfig;
use crate::telemetry;
use actix_server::{Server as HttpServerRun, ServerBuilder};
use actix_web::middleware::from_fn;
use actix_web::rt::net::TcpSocket;
use actix_web::{rt, web};
use anyhow::{Context, Result, anyhow, bail};
use metrics_exporter_prometheus::PrometheusHandle;
#[cfg(target_os = "linux")]
use socket2::SockRef;
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::num::NonZero;
use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::thread::Builder;
use std::time::Duration;
use tokio::select;
use tokio::sync::mpsc::UnboundedReceiver;
use tokio_rustls::TlsAcceptor;
use tracing::{info, warn};

/// Maximum time for finished responses to reach the clients' sockets.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(1);

/// Interval at which draining checks whether the last request has ended.
const DRAIN_INTERVAL: Duration = Duration::from_millis(20);

/// Interval of the metrics recorder's upkeep, which sorts observations into histogram buckets.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(5);

/// Time for which a client may read nothing of its response before its connection is dropped.
const UNREAD_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum number of connections that wait to be accepted.
const BACKLOG: u32 = 2048;

/// Maximum number of connections to the listener of the metrics.
const METRICS_CONNECTIONS: usize = 32;

/// Returns the maximum number of threads of a worker besides its own: they parse requests, compile grammars,
/// and write responses.
pub fn blocking_threads(config: &ServerConfig) -> usize {
    config.workers + config.grammar.threads + WRITERS
}

/// Number of these threads that are left for responses when every other one is in use.
const WRITERS: usize = 4;

/// A server before its engine is ready: the address is bound, and keys and certificate are read. Connections
/// are refused until [`BoundServer::serve`] is called.
pub struct BoundServer {
    config: ServerConfig,
    sockets: Vec<TcpSocket>,
    /// Sockets of the metrics' own listener.
    metrics_sockets: Vec<TcpSocket>,
    keys: web::Data<Keys>,
    certificate: Option<Arc<Certificate>>,
    /// Files and batches.
    service: Service,
    /// Maximum number of connections.
    connections: usize,
}

impl BoundServer {
    /// Returns the maximum number of connections: the configured one, or as many as files can be open.
    pub fn connections(&self) -> usize {
        self.connections
    }

    /// Binds the configured address, reads keys and certificate, and opens the folder of batches. Must be
    /// called within an actix system.
    pub fn bind(config: ServerConfig) -> Result<BoundServer> {
        check_workers(config.workers)?;
        let keys = web::Data::new(Keys::new(&config.load_api_keys()?)?);
        let certificate = config.tls.as_ref().map(Certificate::read).transpose()?.map(Arc::new);
        let sockets = bind_sockets(&config.host, config.port).with_context(|| listen_error(&config))?;
        let metrics_sockets = match &config.metrics_listener {
            None => Vec::new(),
            Some((host, port)) => bind_sockets(host, port.get()).with_context(|| {
                format!("cannot listen on {host}:{port} (server.metrics_host, server.metrics_port)")
            })?,
        };
        if let Some(path) = &config.inflight_log {
            telemetry::start_inflight_log(path)
                .with_context(|| format!("cannot write {} (server.inflight_log)", path.display()))?;
        }
        let connections = connection_limit(config.max_connections, config.workers)?;
        let service = Service::open(&config.batches)?;
        Ok(BoundServer { config, sockets, metrics_sockets, keys, certificate, service, connections })
    }

    /// Returns a handle that reads keys and certificate again.
    pub fn reloader(&self) -> Reloader {
        let BoundServer { config, keys, certificate, .. } = self;
        Reloader { config: config.clone(), keys: keys.clone(), certificate: certificate.clone() }
    }

    /// Starts to listen, for the engine of `parts`. Must be called within an actix system.
    pub fn serve(self, parts: ServeParts) -> Result<Server> {
        let BoundServer { config, sockets, metrics_sockets, keys, certificate, service, connections } = self;
        let tls = certificate.map(tls::server_config).transpose()?;
        let hosts = AllowedHosts::new(&config, &addresses_of(&sockets));
        let rules = web::Data::new(Rules { keys: keys.clone(), hosts, failed: FailedKeys::default() });
        let metrics = telemetry::install(None);
        let app = web::Data::new(App::new(parts, config.clone()));
        let runner = Runner::start(&service, &app, keys.clone(), blocking_threads(&config))?;
        let service = web::Data::new(service);
        let (data, origins) = (app.clone(), config.cors_origins.clone());
        let shown = web::Data::new(metrics.clone());
        let (with_metrics, with_page) = (config.metrics_listener.is_none(), config.web);
        // The last middleware sees requests first: rejected ones have a request id, and CORS headers too.
        let shared = service.clone();
        let new_app = move || {
            actix_web::App::new()
                .app_data(data.clone())
                .app_data(rules.clone())
                .app_data(shown.clone())
                .app_data(shared.clone())
                .wrap(from_fn(trace_request))
                .wrap(from_fn(authorize))
                .wrap(from_fn(shape_errors))
                .wrap(cors(&origins))
                .wrap(from_fn(track_request))
                .configure(routes)
                .configure(|config| {
                    root_route(config, with_page);
                    if with_metrics {
                        metrics_route(config)
                    }
                    if with_page {
                        page_routes(config)
                    }
                })
        };
        let address = *addresses_of(&sockets).first().context("no address was bound")?;
        let scheme = if tls.is_some() { "https" } else { "http" };
        let address_limit = config.max_connections_per_address.map(NonZero::get);
        let table = Connections::new(connections, address_limit);
        let tls = tls.map(|tls| TlsAcceptor::from(Arc::new(tls)));
        let acceptor = Acceptor::new(table, tls, config.keep_alive);
        let per_worker = connections / config.workers + FILES_PER_WORKER as usize / 2;
        let mut server = ServerBuilder::new()
            .workers(config.workers)
            .worker_max_blocking_threads(blocking_threads(&config))
            // Reached only if a worker is behind with what is accepted already.
            .max_concurrent_connections(per_worker)
            .shutdown_timeout(FLUSH_TIMEOUT.as_secs())
            .disable_signals();
        for listener in listen(sockets).with_context(|| listen_error(&config))? {
            server = add_listener(server, listener, acceptor.clone(), new_app.clone())?;
        }
        server = listen_for_metrics(server, metrics_sockets, &config, keys, (app.clone(), metrics.clone()))?;
        Ok(Server { run: server.run(), address, scheme, app, service, runner, metrics })
    }
}

/// Adds the metrics' own listener to a server, if it has one.
fn listen_for_metrics(
    mut server: ServerBuilder,
    sockets: Vec<TcpSocket>,
    config: &ServerConfig,
    keys: web::Data<Keys>,
    (app, metrics): (web::Data<App>, PrometheusHandle),
) -> Result<ServerBuilder> {
    let Some((host, _)) = &config.metrics_listener else { return Ok(server) };
    let config = ServerConfig { host: host.clone(), tls: None, ..config.clone() };
    let hosts = AllowedHosts::new(&config, &addresses_of(&sockets));
    let rules = web::Data::new(Rules { keys, hosts, failed: FailedKeys::default() });
    let shown = web::Data::new(metrics);
    let new_app = move || {
        actix_web::App::new()
            .app_data(app.clone())
            .app_data(rules.clone())
            .app_data(shown.clone())
            .wrap(from_fn(check_host))
            .wrap(from_fn(track_request))
            .configure(metrics_route)
    };
    let connections = Connections::new(METRICS_CONNECTIONS, None);
    let acceptor = Acceptor::new(connections, None, config.keep_alive);
    for listener in listen(sockets).context("cannot listen on server.metrics_port")? {
        info!("metrics on http://{}/metrics", listener.local_addr()?);
        server = add_listener(server, listener, acceptor.clone(), new_app.clone())?;
    }
    Ok(server)
}

fn addresses_of(sockets: &[TcpSocket]) -> Vec<SocketAddr> {
    sockets.iter().flat_map(TcpSocket::local_addr).collect()
}

/// Begins to listen on bound sockets.
fn listen(sockets: Vec<TcpSocket>) -> io::Result<Vec<TcpListener>> {
    sockets.into_iter().map(|socket| socket.listen(BACKLOG)?.into_std()).collect()
}

/// Reads the API keys of the key file, the certificate and its key again.
pub struct Reloader {
    config: ServerConfig,
    keys: web::Data<Keys>,
    certificate: Option<Arc<Certificate>>,
}

impl Reloader {
    /// Replaces keys and certificate by those that the files have now. Later requests need one of these keys,
    /// and later connections get this certificate. If a file has an error, nothing is replaced.
    pub fn reload(&self) -> Result<()> {
        let keys = Keys::new(&self.config.load_api_keys()?)?;
        let read = self.config.tls.as_ref().map(Certificate::read).transpose()?;
        self.keys.replace(keys);
        if let (Some(current), Some(read)) = (&self.certificate, read) {
            current.replace(read);
        }
        info!(
            api_keys = self.keys.count(),
            tls = self.certificate.is_some(),
            "keys and certificate reloaded"
        );
        Ok(())
    }
}

fn listen_error(config: &ServerConfig) -> String {
    format!("cannot listen on {}:{} (server.host, server.port)", config.host, config.port)
}

/// Fails if there cannot be so many workers: each takes a thread and an event loop with its file descriptors.
/// The workers' own start would panic.
fn check_workers(workers: usize) -> Result<()> {
    let begun = (0..workers).map(|_| {
        let (held, holder) = mpsc::channel::<()>();
        let built = mpsc::channel();
        let thread = Builder::new().spawn(move || {
            let event_loop = tokio::runtime::Builder::new_current_thread().enable_all().build();
            _ = built.0.send(event_loop.as_ref().map(|_| ()).map_err(|error| error.to_string()));
            // Until all of them are there.
            _ = holder.recv();
        });
        let thread = thread.map_err(|error| error.to_string())?;
        built.1.recv().unwrap_or_else(|_| Err("a thread has failed".into())).map(|()| (held, thread))
    });
    let begun: Result<Vec<_>, String> = begun.collect();
    let failed = |reason| anyhow!("server.workers = {workers}: cannot start so many workers: {reason}");
    for (held, thread) in begun.map_err(failed)? {
        drop(held);
        _ = thread.join();
    }
    Ok(())
}

/// Binds a socket to each address of the configured host. Fails only if none can be bound.
fn bind_sockets(host: &str, port: u16) -> io::Result<Vec<TcpSocket>> {
    let mut taken = Vec::new();
    let mut failed = None;
    for address in (host, port).to_socket_addrs()? {
        match bind_socket(address) {
            Ok(socket) => taken.push(socket),
            Err(error) => failed = Some(error),
        }
    }
    match failed {
        Some(error) if taken.is_empty() => Err(error),
        _ => Ok(taken),
    }
}

fn bind_socket(address: SocketAddr) -> io::Result<TcpSocket> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
    // Connections of a previous server on this address may still be closing.
    socket.set_reuseaddr(true)?;
    // Without this, a token is sent only after the client has acknowledged the previous one: 40 ms on a
    // reused connection. Accepted connections inherit the option.
    socket.set_nodelay(true)?;
    // Accepted connections inherit this option too; other systems do not have it.
    #[cfg(target_os = "linux")]
    SockRef::from(&socket).set_tcp_user_timeout(Some(UNREAD_TIMEOUT))?;
    socket.bind(address)?;
    Ok(socket)
}

/// A listening server.
pub struct Server {
    run: HttpServerRun,
    address: SocketAddr,
    /// URL scheme of the address.
    scheme: &'static str,
    app: web::Data<App>,
    service: web::Data<Service>,
    runner: Option<Runner>,
    metrics: PrometheusHandle,
}

/// Outcome of a shutdown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShutdownOutcome {
    /// Every request in flight was answered.
    Drained,
    /// The drain timeout elapsed, and requests in flight were aborted.
    TimedOut,
    /// A second stop signal aborted requests in flight.
    Aborted,
}

impl Server {
    /// Binds the configured address and listens. Must be called, and the server run, within an actix system.
    pub fn bind(parts: ServeParts, config: ServerConfig) -> Result<Server> {
        BoundServer::bind(config)?.serve(parts)
    }

    /// Returns the bound address; its port is the real one if port 0 was configured.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `stops` receives a message. Requests in flight then have `drain_timeout` to finish; a
    /// second message aborts them.
    pub async fn run(
        self,
        mut stops: UnboundedReceiver<()>,
        drain_timeout: Duration,
    ) -> Result<ShutdownOutcome> {
        let handle = self.run.handle();
        let mut running = rt::spawn(self.run);
        let upkeep = rt::spawn(run_upkeep(self.metrics));
        info!("listening on {}://{}", self.scheme, self.address);
        let url = match self.address.ip().is_unspecified() {
            true => format!("{}://localhost:{}", self.scheme, self.address.port()),
            false => format!("{}://{}", self.scheme, self.address),
        };
        match self.app.config.web {
            true => info!("try it: open {url}/ in a browser, or give clients of OpenAI's API {url}/v1"),
            false => info!("try it: give clients of OpenAI's API the address {url}/v1"),
        }
        select! {
            ended = &mut running => {
                ended.context("the HTTP server's task failed")?.context("the HTTP server failed")?;
                bail!("the HTTP server stopped by itself");
            }
            _ = stops.recv() => {}
        }
        self.app.parts.status.draining.store(true, Ordering::SeqCst);
        self.runner.iter().for_each(Runner::halt);
        info!(in_flight = self.app.parts.status.pending(), "draining: new requests are rejected");
        // Biased: if nothing is in flight, a second stop aborts nothing.
        let ending = select! {
            biased;
            drained = rt::time::timeout(drain_timeout, wait_until(|| self.app.is_idle())) => match drained {
                Ok(()) => ShutdownOutcome::Drained,
                Err(_) => ShutdownOutcome::TimedOut,
            },
            Some(()) = stops.recv() => ShutdownOutcome::Aborted,
        };
        if ending != ShutdownOutcome::Drained {
            warn!(in_flight = self.app.parts.status.pending(), "requests in flight are aborted");
            self.app.abort.send_replace(true);
            let _ = rt::time::timeout(FLUSH_TIMEOUT, wait_until(|| !self.app.has_open_responses())).await;
        }
        if let Some(runner) = self.runner {
            runner.stop().await;
        }
        // Aborted requests have ended in an error by now; their responses may still be on their way.
        handle.stop(true).await;
        self.service.release().await;
        upkeep.abort();
        info!("stopped");
        Ok(ending)
    }
}

/// Waits until `condition` is true.
async fn wait_until(condition: impl Fn() -> bool) {
    let mut ticks = rt::time::interval(DRAIN_INTERVAL);
    while !condition() {
        ticks.tick().await;
    }
}

/// Runs the metrics recorder's upkeep periodically, without end.
async fn run_upkeep(metrics: PrometheusHandle) {
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

    /// To a health check, a server that is loading looks like one that is not running.
    #[actix_web::test]
    async fn a_bound_server_refuses_connections() {
        let mut flags = Overrides::default();
        flags.set("server.port", Some(0));
        let place = BoundServer::bind(Config::load(None, flags).unwrap().server).unwrap();
        let address = place.sockets[0].local_addr().unwrap();
        assert_ne!(address.port(), 0);
        let refused = TcpStream::connect(address).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::ConnectionRefused);
    }
    /// Regression: with the system's defaults, a stream on a reused connection stalled for 40 ms.
    #[actix_web::test]
    async fn tokens_leave_at_once_on_every_connection() {
        let listener = bind_socket("127.0.0.1:0".parse().unwrap()).unwrap().listen(1).unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let (accepted, _) = listener.accept().await.unwrap();
        assert!(accepted.nodelay().unwrap());
    }
}
