//! Remote server over HTTP. The client library blocks, so each request runs on a separate thread. A thread
//! whose answer was dropped is not awaited: it closes the connection when the next data arrives.
//!
//! Invariant: the API key occurs in the request's header and in no message.

use super::transport::{Failure, Reply, Transport};
use actix_web::web::Bytes;
use futures_util::StreamExt;
use futures_util::future::LocalBoxFuture;
use futures_util::stream;
use serde_json::Value;
use std::io::Read;
use std::net::IpAddr;
use std::str::FromStr;
use std::thread;
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum size of a response that is not an event stream.
const WHOLE_BYTES_MAX: u64 = 64 << 20;

/// Base URL of a server's API, without `/v1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BaseUrl(String);

impl FromStr for BaseUrl {
    type Err = String;

    /// Parses `http(s)://host:port`, optionally followed by a path and `/v1`.
    fn from_str(text: &str) -> Result<BaseUrl, String> {
        let rest = text.strip_prefix("http://").or_else(|| text.strip_prefix("https://"));
        let host = rest.ok_or("it must begin with http:// or https://")?.split('/').next().unwrap_or("");
        if host.is_empty()
            || text.contains(|c: char| c.is_whitespace() || c.is_control() || c == '?' || c == '#')
        {
            return Err("expected a URL such as http://127.0.0.1:8080".to_string());
        }
        let text = text.trim_end_matches('/');
        Ok(BaseUrl(text.strip_suffix("/v1").unwrap_or(text).to_string()))
    }
}

impl BaseUrl {
    /// Whether requests cannot be read in transit: they are encrypted, or stay on this machine.
    pub fn is_private(&self) -> bool {
        let Some(rest) = self.0.strip_prefix("http://") else { return true };
        let authority = rest.split('/').next().unwrap_or_default();
        // With these characters, the client library may parse another host.
        if authority.contains(['@', '\\', '%']) {
            return false;
        }
        let host = match authority.strip_prefix('[') {
            Some(rest) => rest.split(']').next().unwrap_or_default(),
            None => authority.split(':').next().unwrap_or_default(),
        };
        host.eq_ignore_ascii_case("localhost") || host.parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
    }
}

/// A server that speaks the OpenAI API.
pub struct Remote {
    agent: ureq::Agent,
    base: BaseUrl,
    /// The value of the Authorization header.
    authorization: Option<String>,
}

impl Remote {
    /// Creates a client of the server at `base`. `key` must be valid in an HTTP header.
    pub fn new(base: BaseUrl, key: Option<&str>) -> Remote {
        // One connection per request: an idle one might be closed by the time it is needed.
        let agent = ureq::builder().timeout_connect(CONNECT_TIMEOUT).redirects(0).max_idle_connections(0);
        let agent = agent.user_agent(concat!("mainstem/", env!("CARGO_PKG_VERSION"))).build();
        Remote { agent, base, authorization: key.map(|key| format!("Bearer {key}")) }
    }

    /// Returns the name of the first model that the server lists.
    pub async fn first_model(&self) -> Result<String, Failure> {
        let ReplyBody::Whole(bytes) = send_request(self.request("GET", "/v1/models"), None).await? else {
            return Err(Failure::new("the server's list of models is not JSON"));
        };
        let list: Value = serde_json::from_slice(&bytes)
            .map_err(|error| Failure::new(format!("the server's list of models is not JSON: {error}")))?;
        let name = list["data"][0]["id"].as_str().map(str::to_string);
        name.ok_or_else(|| Failure::new("the server lists no models; specify MODEL"))
    }

    fn request(&self, method: &str, path: &str) -> ureq::Request {
        let request = self.agent.request(method, &format!("{}{path}", self.base.0));
        // A compressing server would buffer events.
        let request = request.set("Accept-Encoding", "identity");
        match &self.authorization {
            Some(value) => request.set("Authorization", value),
            None => request,
        }
    }
}

impl Transport for Remote {
    fn post<'a>(&'a self, path: &'a str, body: &'a Value) -> LocalBoxFuture<'a, Result<Reply, Failure>> {
        let request = self.request("POST", path).set("Content-Type", "application/json");
        Box::pin(async move {
            Ok(match send_request(request, Some(body.to_string())).await? {
                ReplyBody::Whole(bytes) => Reply::Whole(bytes),
                ReplyBody::Events(mut bytes) => {
                    Reply::Events(stream::poll_fn(move |context| bytes.poll_recv(context)).boxed_local())
                }
            })
        })
    }
}

/// The body of a response: complete, or a channel of its parts.
enum ReplyBody {
    Whole(Bytes),
    Events(mpsc::Receiver<Result<Bytes, Failure>>),
}

async fn send_request(request: ureq::Request, body: Option<String>) -> Result<ReplyBody, Failure> {
    let (sender, arrival) = oneshot::channel();
    thread::Builder::new()
        .name("http".to_string())
        .spawn(move || perform(request, body, sender))
        .map_err(|error| Failure::new(format!("cannot start a thread: {error}")))?;
    arrival.await.unwrap_or_else(|_| Err(Failure::new("the connection failed")))
}

/// Sends the request and forwards the response to `head` until the receiver is dropped.
fn perform(request: ureq::Request, body: Option<String>, head: oneshot::Sender<Result<ReplyBody, Failure>>) {
    let sent = match body {
        Some(body) => request.send_string(&body),
        None => request.call(),
    };
    let response = match sent.map_err(request_failure).and_then(check_status) {
        Ok(response) if response.content_type() == "text/event-stream" => response,
        other => {
            let _ = head.send(other.and_then(read_body));
            return;
        }
    };
    let (sender, receiver) = mpsc::channel(16);
    if head.send(Ok(ReplyBody::Events(receiver))).is_ok() {
        forward_body(response.into_reader(), &sender);
    }
}

fn forward_body(mut body: impl Read, sender: &mpsc::Sender<Result<Bytes, Failure>>) {
    let mut buffer = [0; 8192];
    loop {
        let piece = match body.read(&mut buffer) {
            Ok(0) => return,
            Ok(n) => Ok(Bytes::copy_from_slice(&buffer[..n])),
            Err(error) => Err(Failure::new(format!("the connection broke: {error}"))),
        };
        let is_last = piece.is_err();
        if sender.blocking_send(piece).is_err() || is_last {
            return;
        }
    }
}

fn read_body(response: ureq::Response) -> Result<ReplyBody, Failure> {
    let mut bytes = Vec::new();
    let read = response.into_reader().take(WHOLE_BYTES_MAX).read_to_end(&mut bytes);
    read.map_err(|error| Failure::new(format!("the connection broke: {error}")))?;
    Ok(ReplyBody::Whole(bytes.into()))
}

/// Returns a response of status 2xx. Any other status is a failure; redirects are not followed.
fn check_status(response: ureq::Response) -> Result<ureq::Response, Failure> {
    match response.status() {
        200..=299 => Ok(response),
        _ => Err(status_failure(response)),
    }
}

fn request_failure(error: ureq::Error) -> Failure {
    match error {
        ureq::Error::Status(_, response) => status_failure(response),
        ureq::Error::Transport(error) => Failure::new(error.to_string()),
    }
}

/// Returns the failure that an unsuccessful response describes.
fn status_failure(response: ureq::Response) -> Failure {
    let status = format!("{} {}", response.status(), response.status_text());
    let body = match read_body(response) {
        Ok(ReplyBody::Whole(bytes)) => serde_json::from_slice(&bytes).ok(),
        _ => None,
    };
    match body.map(Failure::from_body) {
        Some(failure) => {
            Failure { body: failure.body, ..Failure::new(format!("{status}: {}", failure.message)) }
        }
        None => Failure::new(format!("the server answered {status}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_accepted_with_and_without_its_version() {
        for (text, base) in [
            ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
            ("http://localhost:1/", "http://localhost:1"),
            ("https://example.org/api/v1", "https://example.org/api"),
            ("https://example.org/v1/", "https://example.org"),
        ] {
            assert_eq!(text.parse(), Ok(BaseUrl(base.to_string())));
        }
        for text in
            ["localhost:8080", "ftp://host", "http://", "http:///v1", "http://a b", "http://host/?x=1"]
        {
            assert!(text.parse::<BaseUrl>().is_err(), "{text}");
        }
    }

    #[test]
    fn unencrypted_requests_to_other_machines_are_not_private() {
        let is_private = |text: &str| text.parse::<BaseUrl>().unwrap().is_private();
        for text in [
            "https://example.org",
            "http://127.0.0.1:8080",
            "http://127.1.2.3/api",
            "http://[::1]:1/v1",
            "http://LocalHost:8080",
        ] {
            assert!(is_private(text), "{text}");
        }
        for text in [
            "http://example.org",
            "http://192.168.0.1:8080",
            "http://0.0.0.0:1",
            "http://[fe80::1]:1",
            "http://localhost.example.org",
            "http://127.0.0.1.example.org:1",
            "http://127.0.0.1@example.org",
            "http://example.org\\@127.0.0.1",
            "http://example.org/http://127.0.0.1",
        ] {
            assert!(!is_private(text), "{text}");
        }
    }
}
