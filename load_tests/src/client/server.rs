//! The address of a server: its URL, resolved IP addresses and TLS configuration.
//!
//! Invariant: names are resolved once, before the run, so that connecting during the run waits only for the
//! server.

use std::{
    io,
    net::SocketAddr,
    path::Path,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use anyhow::{Context, bail, ensure};
use hyper::header::HeaderValue;
use tokio::{
    net::{TcpSocket, TcpStream},
    time::timeout,
};
use url::Url;

use super::{tls::Tls, wire::Wire};
use crate::sample::{Failure, FailureKind};

/// Connect timeout of an address if another one is left to try; the last address has no timeout of its own.
const ADDRESS_TIMEOUT: Duration = Duration::from_secs(2);

/// Minimum receive buffer size in bytes: a buffer smaller than a packet would stall the connection.
const RECEIVE_BUFFER_MIN: u32 = 4096;

/// A server that can be connected to.
#[derive(Debug)]
pub struct Server {
    url: Url,
    host: HeaderValue,
    /// Resolved addresses, at least one.
    addresses: Vec<SocketAddr>,
    /// Index of the address that last accepted a connection; it is tried first.
    preferred: AtomicUsize,
    tls: Option<Tls>,
}

impl Server {
    /// Resolves the host of `url` and loads the certificates: the system's and those of the file `ca`. Errors
    /// do not repeat the URL, which may contain secrets.
    pub fn resolve(url: &str, ca: Option<&Path>) -> anyhow::Result<Self> {
        let url = parse(url)?;
        let addresses = url.socket_addrs(|| None).context("cannot look up the host")?;
        ensure!(!addresses.is_empty(), "the host has no address");
        let tls = if url.scheme() == "https" { Some(Tls::new(&url, ca)?) } else { None };
        Ok(Self { host: host(&url)?, url, addresses, preferred: AtomicUsize::new(0), tls })
    }

    /// Returns the value of the `Host` header.
    pub fn host(&self) -> &HeaderValue {
        &self.host
    }

    /// Returns whether all addresses are of this machine's loopback interface.
    pub fn is_loopback(&self) -> bool {
        self.addresses.iter().all(|address| address.ip().is_loopback())
    }

    /// Returns the path and the query of the URL.
    pub fn path(&self) -> &str {
        &self.url[url::Position::BeforePath..url::Position::AfterQuery]
    }

    /// Returns whether `other` has the same origin, so that an API key of one may be sent to the other.
    pub fn has_same_origin(&self, other: &Self) -> bool {
        self.url.origin() == other.url.origin()
    }

    /// Opens a new connection that reads at most `read_rate` bytes per second, if given.
    pub async fn connect(&self, read_rate: Option<u32>) -> Result<Wire, Failure> {
        let tcp = self.connect_tcp(read_rate).await?;
        match &self.tls {
            None => Ok(Wire::new(Box::new(tcp), read_rate)),
            Some(tls) => {
                let stream =
                    tls.handshake(tcp).await.map_err(|error| FailureKind::Tls.with_message(error))?;
                Ok(Wire::new(Box::new(stream), read_rate))
            }
        }
    }

    /// Tries every address, starting with the one that last accepted a connection.
    async fn connect_tcp(&self, read_rate: Option<u32>) -> Result<TcpStream, Failure> {
        let (count, first) = (self.addresses.len(), self.preferred.load(Ordering::Relaxed));
        let mut failure = None;
        for attempt in 0..count {
            let place = (first + attempt) % count;
            let address = self.addresses[place];
            let connected = if attempt + 1 < count {
                timeout(ADDRESS_TIMEOUT, connect_address(address, read_rate))
                    .await
                    .unwrap_or(Err(io::ErrorKind::TimedOut.into()))
            } else {
                connect_address(address, read_rate).await
            };
            match connected {
                Ok(stream) => {
                    self.preferred.store(place, Ordering::Relaxed);
                    return Ok(stream);
                }
                Err(error) => {
                    failure = Some(FailureKind::Connect.with_message(format_args!("{address}: {error}")));
                }
            }
        }
        Err(failure.expect("a server has an address; this is a bug"))
    }
}

fn parse(text: &str) -> anyhow::Result<Url> {
    let url = Url::parse(text).context("not a URL such as http://127.0.0.1:8080")?;
    if !matches!(url.scheme(), "http" | "https") {
        bail!("the scheme '{}' is neither http nor https", url.scheme());
    }
    ensure!(url.has_host(), "the host is missing");
    ensure!(url.username().is_empty() && url.password().is_none(), "a URL with a user name is not supported");
    ensure!(url.fragment().is_none(), "a URL with a fragment is not supported");
    Ok(url)
}

fn host(url: &Url) -> anyhow::Result<HeaderValue> {
    let text = &url[url::Position::BeforeHost..url::Position::AfterPort];
    HeaderValue::from_str(text).context("the host is not a valid header value")
}

async fn connect_address(address: SocketAddr, read_rate: Option<u32>) -> io::Result<TcpStream> {
    let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    if let Some(rate) = read_rate {
        // A slow reader needs a small receive window that fills up, or the server would never be throttled.
        // The size must be set before the handshake.
        socket.set_recv_buffer_size((rate / 4).clamp(RECEIVE_BUFFER_MIN, 1 << 16))?;
    }
    let stream = socket.connect(address).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve_error(url: &str) -> String {
        format!("{:#}", Server::resolve(url, None).expect_err(url))
    }

    #[test]
    fn urls_that_cannot_be_spoken_to_are_refused_and_say_why() {
        assert!(resolve_error("ftp://127.0.0.1").contains("'ftp' is neither http nor https"));
        assert!(resolve_error("127.0.0.1:80").contains("not a URL"));
        assert!(resolve_error("localhost:80").contains("'localhost' is neither"));
        assert!(
            resolve_error("http://").contains("not a URL") && resolve_error("http://:80").contains("host")
        );
        assert!(resolve_error("http://127.0.0.1:99999").contains("port"));
        assert!(resolve_error("http://127.0.0.1/#top").contains("fragment"));
        for secret in ["http://me:hunter2@127.0.0.1", "http://me:hunter2@127.0.0.1:99999"] {
            assert!(!resolve_error(secret).contains("hunter2"));
        }
    }

    #[test]
    fn host_and_path_are_as_the_url_has_them() {
        for (url, host, path) in [
            ("http://127.0.0.1:8080", "127.0.0.1:8080", "/"),
            ("http://127.0.0.1:80/a/b/", "127.0.0.1", "/a/b/"),
            ("http://[::1]:81/metrics?x=1", "[::1]:81", "/metrics?x=1"),
        ] {
            let server = Server::resolve(url, None).unwrap();
            assert_eq!((server.host().to_str().unwrap(), server.path()), (host, path), "{url}");
        }
    }

    #[test]
    fn a_server_is_the_same_by_scheme_host_and_port() {
        let at = |url| Server::resolve(url, None).unwrap();
        let server = at("http://127.0.0.1:80/v1");
        assert!(server.has_same_origin(&at("http://127.0.0.1/metrics")));
        assert!(
            !server.has_same_origin(&at("http://127.0.0.1:81"))
                && !server.has_same_origin(&at("http://127.0.0.2"))
        );
    }

    #[test]
    fn every_address_is_tried_and_the_one_that_answered_is_kept() {
        let [shut, open] = [(); 2].map(|()| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
        let addresses = [&shut, &open].map(|listener| listener.local_addr().unwrap()).to_vec();
        drop(shut);
        let server = Server { addresses, ..Server::resolve("http://127.0.0.1:1", None).unwrap() };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let failure = runtime.block_on(async {
            server.connect(None).await.expect("the second address answers");
            assert_eq!(server.preferred.load(Ordering::Relaxed), 1);
            drop(open);
            server.connect(None).await.err().expect("nobody answers any more")
        });
        assert_eq!(failure.kind, FailureKind::Connect);
        assert!(failure.message.contains("127.0.0.1:"), "{}", failure.message);
    }
}
