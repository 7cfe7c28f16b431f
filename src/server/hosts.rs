//! The host names by which clients may address the server. With DNS rebinding, a web page makes the browser
//! of its visitor send requests to a server of the visitor's own machine, under a name that belongs to the
//! page, so that the browser takes the server for a part of the page's site.
//!
//! Invariant: an IP address is always allowed as a host, because a page cannot have one as its name without
//! being served from there.

use crate::config::ServerConfig;
use actix_web::http::header::{HOST, HeaderMap, HeaderValue};
use std::net::{IpAddr, SocketAddr};

/// Domains, and domains below them, that nobody can register: names of the machine and of private networks.
const PRIVATE_DOMAINS: [&str; 3] = ["localhost", "local", "internal"];

/// The hosts that the `Host` header of a request may have.
#[derive(Debug)]
pub struct AllowedHosts {
    policy: Policy,
    /// `server.host` and the names of `server.allowed_hosts`, in lower case.
    names: Vec<String>,
    /// Port of the server, and of a `Host` header that has none.
    port: u16,
    default_port: u16,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Policy {
    /// Every host.
    Any,
    /// IP addresses, localhost and the listed names.
    Listed,
    /// In addition, private names, and any name with a port other than the server's: a proxy that listens
    /// there has passed on the request. A browser that was led here by DNS connects to the server's own port.
    Local,
}

impl AllowedHosts {
    /// Creates the rules of a server that listens on `addresses`.
    pub fn new(config: &ServerConfig, addresses: &[SocketAddr]) -> AllowedHosts {
        let listed = &config.allowed_hosts;
        let policy = match listed.as_slice() {
            [only] if only == "*" => Policy::Any,
            [] if addresses.iter().all(|address| address.ip().is_loopback()) => Policy::Local,
            [] => Policy::Any,
            _ => Policy::Listed,
        };
        let names = listed.iter().chain([&config.host]).map(|name| name.to_ascii_lowercase()).collect();
        let port = addresses.first().map_or(config.port, SocketAddr::port);
        let default_port = if config.tls.is_some() { 443 } else { 80 };
        AllowedHosts { policy, names, port, default_port }
    }

    /// Returns the first host of a request that is not allowed, if any. A request without a host is allowed,
    /// because browsers always send one.
    pub fn find_refused<'a>(&self, headers: &'a HeaderMap) -> Option<&'a HeaderValue> {
        headers.get_all(HOST).find(|host| !host.to_str().is_ok_and(|host| self.allow(host)))
    }

    /// Returns whether a host, with or without a port, is allowed.
    fn allow(&self, host: &str) -> bool {
        if self.policy == Policy::Any || host.is_empty() {
            return true;
        }
        let Some((name, port)) = split_host(host) else { return false };
        let name = name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase();
        let address = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>();
        if address.is_ok() || is_in(&name, "localhost") || self.names.iter().any(|own| matches(&name, own)) {
            return true;
        }
        let is_private = !name.contains('.') || PRIVATE_DOMAINS.iter().any(|domain| is_in(&name, domain));
        self.policy == Policy::Local && (is_private || port.unwrap_or(self.default_port) != self.port)
    }
}

/// Splits a host into name and port. `None` if the port is not a number.
fn split_host(host: &str) -> Option<(&str, Option<u16>)> {
    match host.rsplit_once(':') {
        Some((name, port)) if !port.ends_with(']') => Some((name, Some(port.parse().ok()?))),
        _ => Some((host, None)),
    }
}

/// Returns whether `name` is `domain` or below it.
fn is_in(name: &str, domain: &str) -> bool {
    name.strip_suffix(domain).is_some_and(|rest| rest.is_empty() || rest.ends_with('.'))
}

/// Returns whether `name` is the listed name, or below it if that is written as `*.domain`.
fn matches(name: &str, listed: &str) -> bool {
    match listed.strip_prefix("*.") {
        Some(domain) => name != domain && is_in(name, domain),
        None => name == listed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Overrides};

    fn hosts(listed: &[&str], address: &str) -> AllowedHosts {
        let mut config = Config::load(None, Overrides::default()).unwrap().server;
        config.host = "Gpu.Example".into();
        config.allowed_hosts = listed.iter().map(|name| name.to_string()).collect();
        AllowedHosts::new(&config, &[address.parse().unwrap()])
    }

    #[test]
    fn on_loopback_a_name_that_could_be_a_pages_is_refused() {
        let hosts = hosts(&[], "127.0.0.1:8080");
        for host in [
            "localhost",
            "LOCALHOST:8080",
            "app.localhost:8080",
            "127.0.0.1:8080",
            "[::1]:8080",
            "[::1]",
            "192.168.1.5:8080",
            "my-machine:8080",
            "my-machine.local:8080",
            "gpu.example:8080",
            "gpu.example.:8080",
            // A proxy on this machine has these.
            "llm.example.com",
            "llm.example.com:443",
            "",
        ] {
            assert!(hosts.allow(host), "{host}");
        }
        for host in [
            "evil.example:8080",
            "EVIL.example.:8080",
            "127.0.0.1.evil.example:8080",
            "localhost.evil.example:8080",
            "evillocalhost.example:8080",
            "x.notlocal:8080",
            "evil.example:",
            "evil.example:99999",
        ] {
            assert!(!hosts.allow(host), "{host}");
        }
        let default_port = self::hosts(&[], "127.0.0.1:80");
        assert!(!default_port.allow("evil.example") && default_port.allow("evil.example:8080"));
    }

    #[test]
    fn listed_names_are_the_only_ones_and_a_public_address_alone_allows_all() {
        for address in ["127.0.0.1:8080", "0.0.0.0:8080"] {
            let hosts = hosts(&["llm.example.com", "*.Example.org"], address);
            for host in
                ["llm.example.com", "llm.example.com:1", "a.example.org", "localhost:1", "10.0.0.1:8080"]
            {
                assert!(hosts.allow(host), "{host}");
            }
            for host in ["example.org", "evil.example", "my-machine", "aexample.org"] {
                assert!(!hosts.allow(host), "{host}");
            }
        }
        assert!(hosts(&[], "0.0.0.0:8080").allow("evil.example:8080"));
        assert!(hosts(&["*"], "127.0.0.1:8080").allow("evil.example:8080"));
    }
}
