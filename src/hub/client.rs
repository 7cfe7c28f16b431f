//! HTTP requests to a model hub, and the interpretation of its responses.
//!
//! Invariant: the token is sent only to the hub's own origin and appears in no message; every wait has a time
//! limit.

use serde::Deserialize;
use std::error::Error;
use std::fmt::Write;
use std::io::{ErrorKind, Read};
use std::time::Duration;
use ureq::{Agent, AgentBuilder, Request, Response};

/// Maximum number of redirects.
const REDIRECTS: usize = 5;
/// Maximum size of a list of files.
const LISTING_BYTES_MAX: u64 = 64 << 20;

/// Time limits of requests.
#[derive(Clone, Debug)]
pub struct Timeouts {
    /// To establish a connection.
    pub connect: Duration,
    /// For a whole response, except file content.
    pub response: Duration,
    /// For a whole response to an update check, when the revision is already cached. Does not cover name
    /// resolution, which the system times.
    pub update_check: Duration,
    /// Between two reads of a file's content.
    pub idle: Duration,
    /// Delay before the second attempt; the third waits twice as long.
    pub retry_delay: Duration,
}

impl Default for Timeouts {
    fn default() -> Timeouts {
        Timeouts {
            connect: Duration::from_secs(10),
            response: Duration::from_secs(30),
            update_check: Duration::from_secs(3),
            idle: Duration::from_secs(60),
            retry_delay: Duration::from_millis(250),
        }
    }
}

/// An HTTP client for one hub.
pub(super) struct Client {
    pub endpoint: String,
    pub token: Option<String>,
    pub timeouts: Timeouts,
}

/// The hub's description of a commit.
#[derive(Deserialize)]
pub(super) struct Listing {
    pub sha: String,
    pub siblings: Vec<ListedFile>,
}

/// A file of a commit. Mirrors may leave out all fields but the name.
#[derive(Deserialize)]
pub(super) struct ListedFile {
    #[serde(rename = "rfilename")]
    pub name: String,
    /// Size of the file, in bytes.
    pub size: Option<u64>,
    lfs: Option<LfsInfo>,
}

#[derive(Deserialize)]
struct LfsInfo {
    sha256: Option<String>,
}

impl ListedFile {
    /// Returns the SHA-256 of the content, in hexadecimal.
    pub fn sha256(&self) -> Option<&str> {
        self.lfs.as_ref()?.sha256.as_deref()
    }
}

/// Response headers of a file, which are untrusted text.
pub(super) struct FileInfo {
    /// Identifier of the content.
    pub etag: String,
    /// The commit that the file belongs to.
    pub commit: Option<String>,
    /// Size of the file, in bytes.
    pub size: Option<u64>,
}

/// A file's content from byte `start`.
pub(super) struct FileContent {
    pub start: u64,
    /// Size of the whole file, in bytes.
    pub size: Option<u64>,
    pub reader: Box<dyn Read + Send + Sync>,
}

/// A failed request.
#[derive(Debug)]
pub(super) struct FetchError {
    pub reason: String,
    /// Whether a retry may succeed.
    pub transient: bool,
}

impl FetchError {
    /// Creates an error that another attempt may not have.
    pub fn transient(reason: impl Into<String>) -> FetchError {
        FetchError { reason: reason.into(), transient: true }
    }

    /// Creates an error that every further attempt would have.
    pub fn permanent(reason: impl Into<String>) -> FetchError {
        FetchError { reason: reason.into(), transient: false }
    }
}

/// Options of a request.
#[derive(Default)]
struct RequestOptions {
    /// Value of the `Range` header: `bytes=FIRST-LAST`.
    range: Option<String>,
    /// Time limit for the whole response; `None` for file content, which is limited per read.
    time_limit: Option<Duration>,
    /// A response with this header is returned even if it is a redirect.
    stop_at: Option<&'static str>,
}

impl Client {
    /// Returns the files of a revision's commit.
    pub fn listing(&self, repository: &str, revision: &str, within: Duration) -> Result<Listing, FetchError> {
        let revision = percent_encode(revision);
        // Only with `blobs=true` does the response have sizes and hashes.
        let address = format!("{}/api/models/{repository}/revision/{revision}?blobs=true", self.endpoint);
        let answer =
            self.send(address, &RequestOptions { time_limit: Some(within), ..RequestOptions::default() })?;
        serde_json::from_reader(answer.into_reader().take(LISTING_BYTES_MAX)).map_err(|error| FetchError {
            transient: error.is_io(),
            reason: format!("cannot read the list of files: {error}"),
        })
    }

    /// Returns the URL of a file of a commit.
    pub fn file_url(&self, repository: &str, commit: &str, name: &str) -> String {
        let name: Vec<String> = name.split('/').map(percent_encode).collect();
        format!("{}/{repository}/resolve/{commit}/{}", self.endpoint, name.join("/"))
    }

    /// Requests the metadata of the file at an address.
    pub fn file_info(&self, address: String) -> Result<FileInfo, FetchError> {
        const LINKED_ETAG: &str = "x-linked-etag";
        let question = RequestOptions {
            range: Some("bytes=0-0".to_owned()),
            time_limit: Some(self.timeouts.response),
            // The storage backend behind the redirect has a different ETag for the content.
            stop_at: Some(LINKED_ETAG),
        };
        let answer = self.send(address, &question)?;
        let etag = answer.header(LINKED_ETAG).or_else(|| answer.header("etag"));
        let etag = etag.ok_or_else(|| FetchError::permanent("the hub sent no ETag"))?;
        let size = answer.header("x-linked-size").and_then(|size| size.parse().ok());
        Ok(FileInfo {
            etag: etag.strip_prefix("W/").unwrap_or(etag).trim_matches('"').to_owned(),
            commit: answer.header("x-repo-commit").map(str::to_owned),
            size: size.or_else(|| content_range(&answer)?.1),
        })
    }

    /// Requests the file's content from byte `start`. The hub may send it from an earlier byte.
    pub fn content(&self, address: String, start: u64) -> Result<FileContent, FetchError> {
        let range = (start > 0).then(|| format!("bytes={start}-"));
        let answer = self.send(address, &RequestOptions { range, ..RequestOptions::default() })?;
        let extent = content_range(&answer).filter(|(first, _)| *first <= start);
        let (start, size) =
            extent.ok_or_else(|| FetchError::permanent("the hub sent a different byte range"))?;
        Ok(FileContent { start, size, reader: answer.into_reader() })
    }

    /// Returns the error for a failed read of a file's content.
    pub fn read_error(&self, error: &std::io::Error) -> FetchError {
        FetchError::transient(match error.kind() {
            ErrorKind::TimedOut | ErrorKind::WouldBlock => {
                format!("no data received for {:?}", self.timeouts.idle)
            }
            _ => format!("the connection broke: {error}"),
        })
    }

    /// Sends a request and follows redirects.
    fn send(&self, mut address: String, question: &RequestOptions) -> Result<Response, FetchError> {
        let agent = self.agent(question.time_limit);
        for _ in 0..=REDIRECTS {
            let request = self.request(&agent, &address, question)?;
            let here = request.request_url().map_err(|_| invalid_url())?;
            let answer = request.call().map_err(|error| self.request_error(error))?;
            let is_enough = question.stop_at.is_some_and(|header| answer.has(header));
            let is_redirect = matches!(answer.status(), 301 | 302 | 303 | 307 | 308);
            match answer.header("location") {
                Some(next) if is_redirect && !is_enough => {
                    let next = here.as_url().join(next).map_err(|_| invalid_url())?;
                    address = next.into();
                }
                _ if answer.status() < 300 || is_enough => return Ok(answer),
                _ => return Err(self.status_error(answer.status(), &answer)),
            }
        }
        Err(FetchError::permanent("too many redirects"))
    }

    /// Creates an agent for one request: without connection reuse, and with redirects left to
    /// [`Client::send`].
    fn agent(&self, within: Option<Duration>) -> Agent {
        let Timeouts { connect, idle: silence, .. } = self.timeouts;
        AgentBuilder::new()
            .user_agent(concat!("mainstem/", env!("CARGO_PKG_VERSION")))
            .try_proxy_from_env(!self.is_local())
            .redirects(0)
            .max_idle_connections(0)
            .timeout_connect(within.map_or(connect, |within| within.min(connect)))
            .timeout_read(silence)
            .timeout_write(silence)
            .build()
    }

    /// Whether the hub runs on this machine, which is never reached through a proxy.
    fn is_local(&self) -> bool {
        let host = self.endpoint.split_once("://").map_or("", |(_, host)| host);
        ["127.", "localhost", "[::1]"].iter().any(|here| host.starts_with(here))
    }

    fn request(
        &self,
        agent: &Agent,
        address: &str,
        question: &RequestOptions,
    ) -> Result<Request, FetchError> {
        // Without content encoding, sizes and ranges refer to the file itself.
        let mut request = agent.get(address).set("Accept-Encoding", "identity");
        if let Some(range) = &question.range {
            request = request.set("Range", range);
        }
        if let Some(within) = question.time_limit {
            request = request.timeout(within);
        }
        let origin = |address| Some(agent.get(address).request_url().ok()?.as_url().origin());
        let is_own = match (origin(address), origin(&self.endpoint)) {
            (Some(target), Some(own)) => target == own,
            _ => return Err(invalid_url()),
        };
        Ok(match &self.token {
            Some(token) if is_own => request.set("Authorization", &format!("Bearer {token}")),
            _ => request,
        })
    }

    fn request_error(&self, error: ureq::Error) -> FetchError {
        match error {
            ureq::Error::Status(status, answer) => self.status_error(status, &answer),
            // The error's own text may contain a signed URL.
            ureq::Error::Transport(broken) => {
                let mut reason = broken.kind().to_string();
                let details = [broken.message().map(str::to_owned), broken.source().map(|e| e.to_string())];
                for detail in details.into_iter().flatten() {
                    reason = format!("{reason}: {detail}");
                }
                FetchError::transient(reason)
            }
        }
    }

    fn status_error(&self, status: u16, answer: &Response) -> FetchError {
        let reason = match (status, answer.header("x-error-code")) {
            (404, Some("RevisionNotFound")) => "the repository has no such revision".to_owned(),
            (404, Some("EntryNotFound")) => "the repository has no such file".to_owned(),
            (401 | 403 | 404, _) if self.token.is_some() => {
                format!("the repository does not exist, or the token gives no access to it (status {status})")
            }
            (401 | 403 | 404, _) => {
                format!("the repository does not exist or needs a token: set HF_TOKEN (status {status})")
            }
            _ => format!("the hub responded with status {status}"),
        };
        FetchError { reason, transient: status == 429 || status >= 500 }
    }
}

fn invalid_url() -> FetchError {
    FetchError::permanent("the hub redirected to an invalid address")
}

/// Returns the first byte of the response's content and the size of the whole file; `None` for an invalid
/// range.
fn content_range(answer: &Response) -> Option<(u64, Option<u64>)> {
    if answer.status() != 206 {
        let len = answer.header("content-length").filter(|_| answer.status() == 200);
        return Some((0, len.and_then(|len| len.parse().ok())));
    }
    let (range, size) = answer.header("content-range")?.strip_prefix("bytes ")?.split_once('/')?;
    Some((range.split_once('-')?.0.parse().ok()?, size.parse().ok()))
}

/// Percent-encodes text as one segment of a URL.
fn percent_encode(text: &str) -> String {
    let mut encoded = String::new();
    for byte in text.bytes() {
        match byte.is_ascii_alphanumeric() || b"._-~".contains(&byte) {
            true => encoded.push(byte.into()),
            false => write!(encoded, "%{byte:02X}").expect("writing to a string cannot fail; this is a bug"),
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_hold_any_name() {
        assert_eq!(percent_encode("refs/pr/12"), "refs%2Fpr%2F12");
        assert_eq!(percent_encode("model-00001-of-00002.safetensors"), "model-00001-of-00002.safetensors");
        assert_eq!(percent_encode("a b?#%\u{e4}"), "a%20b%3F%23%25%C3%A4");
    }

    #[test]
    fn extents_are_read() {
        let read = |text: &str| content_range(&text.parse::<Response>().expect("it is an answer"));
        assert_eq!(read("HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n"), Some((0, Some(7))));
        assert_eq!(read("HTTP/1.1 206 P\r\nContent-Range: bytes 5-6/7\r\n\r\n"), Some((5, Some(7))));
        assert_eq!(read("HTTP/1.1 206 P\r\nContent-Range: bytes 5-6/*\r\n\r\n"), Some((5, None)));
        assert_eq!(read("HTTP/1.1 302 F\r\nContent-Length: 7\r\n\r\n"), Some((0, None)));
        assert_eq!(read("HTTP/1.1 206 P\r\n\r\n"), None);
        assert_eq!(read("HTTP/1.1 206 P\r\nContent-Range: bytes x-6/7\r\n\r\n"), None);
    }
}
