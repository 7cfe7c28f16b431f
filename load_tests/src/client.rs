//! One streaming request: sent, read to its end, and every way it can go wrong told apart.
//!
//! A request has a connection of its own, so that none depends on how another's ended.
//! Invariant: whatever the server does, `send` returns a sample by the deadline.

use std::{
    fmt, io,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use awc::error::{ConnectError, SendRequestError};
use futures_util::StreamExt;
use serde::Deserialize;
use tokio::time::timeout_at;

use crate::{
    requests::Request,
    sse::{SseDecoder, SseError},
};

/// What became of one request. All times run from the start of the run.
#[derive(Clone, Debug)]
pub struct Sample {
    /// The request's place in the run.
    pub index: usize,
    pub prompt_len: u32,
    /// Tokens asked for.
    pub output_len_asked: u32,
    /// Tokens that came: counted by their ids where the server sends them, else by its closing usage, else
    /// one per event with text.
    pub output_len: u32,
    /// When the request was due.
    pub scheduled: Duration,
    /// When it was sent.
    pub sent: Duration,
    /// When it was over, however it ended.
    pub ended: Duration,
    /// When tokens came, and how many at once: one entry per event.
    pub deliveries: Vec<(Duration, u32)>,
    pub outcome: Outcome,
}

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Completed,
    /// This client left early, as planned.
    HungUp,
    Failed(Failure),
}

/// A failure, and in a few words what was seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub kind: FailureKind,
    pub message: String,
}

/// The kinds of failure that are counted apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum FailureKind {
    /// No connection.
    Connect,
    /// The answer does not begin as HTTP.
    BadHttp,
    /// Any status but 200.
    Status(u16),
    /// The connection ended before the answer did.
    EarlyClose,
    /// The body is not a stream of completion events.
    BadSse,
    /// The server reported an error within the stream.
    ErrorEvent,
    /// The stream ended well, without a single token.
    NoTokens,
    /// The request took longer than a request may.
    Timeout,
    /// The run's time was over.
    TimeLimit,
}

impl fmt::Display for FailureKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FailureKind::Connect => write!(f, "connect"),
            FailureKind::BadHttp => write!(f, "bad HTTP"),
            FailureKind::Status(status) => write!(f, "status {status}"),
            FailureKind::EarlyClose => write!(f, "early close"),
            FailureKind::BadSse => write!(f, "bad SSE"),
            FailureKind::ErrorEvent => write!(f, "error event"),
            FailureKind::NoTokens => write!(f, "no tokens"),
            FailureKind::Timeout => write!(f, "timeout"),
            FailureKind::TimeLimit => write!(f, "time limit"),
        }
    }
}

impl FailureKind {
    fn saying(self, message: impl fmt::Display) -> Failure {
        Failure { kind: self, message: message.to_string().chars().take(200).collect() }
    }
}

/// When a run began and how long its requests may take.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    start: Instant,
    request_timeout: Duration,
    run_limit: Duration,
}

impl Clock {
    /// Starts now.
    pub fn start(request_timeout: Duration, run_limit: Duration) -> Self {
        Self { start: Instant::now(), request_timeout, run_limit }
    }

    /// Time since the start.
    pub fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// The instant of a time of the run.
    pub fn at(&self, time: Duration) -> tokio::time::Instant {
        (self.start + time).into()
    }

    /// Whether the run's time is over at `time`.
    pub fn is_over(&self, time: Duration) -> bool {
        time >= self.run_limit
    }

    /// When a request sent at `sent` is given up, and as what.
    fn deadline(&self, sent: Duration) -> (Duration, Failure) {
        let own = sent.saturating_add(self.request_timeout);
        if own <= self.run_limit {
            (own, FailureKind::Timeout.saying(format_args!("no end after {:?}", self.request_timeout)))
        } else {
            (
                self.run_limit,
                FailureKind::TimeLimit.saying(format_args!("the run ended at {:?}", self.run_limit)),
            )
        }
    }
}

/// A server, and the model to ask it for.
pub struct Client {
    http: awc::Client,
    completions_url: String,
    model: String,
}

impl Client {
    /// A client of the server at `base`, such as `http://127.0.0.1:8080`. Without a model's name, the server
    /// is asked for the first it lists.
    pub async fn new(base: &str, model: Option<&str>, connect_timeout: Duration) -> anyhow::Result<Self> {
        let base = base.trim_end_matches('/');
        let connector = awc::Connector::new().limit(0).timeout(connect_timeout);
        // Deadlines are the caller's: one for the whole request.
        let http = awc::Client::builder().connector(connector).disable_timeout().disable_redirects().finish();
        let model = match model {
            Some(model) => model.to_string(),
            None => first_model(&http, base, connect_timeout).await.with_context(|| {
                format!("asking {base}/v1/models what it serves (or name one with --model)")
            })?,
        };
        Ok(Self { http, completions_url: format!("{base}/v1/completions"), model })
    }

    /// The model asked for.
    pub fn model(&self) -> &str {
        &self.model
    }

    /// Sends `request`, due at `scheduled`, now.
    pub async fn send(&self, request: &Request, scheduled: Duration, clock: Clock) -> Sample {
        let body = request.body(&self.model);
        let sent = clock.now();
        let (deadline, given_up) = clock.deadline(sent);
        let mut answer = Answer::new(request.hang_up_after);
        let end = match timeout_at(clock.at(deadline), self.converse(body, clock, &mut answer)).await {
            Ok(end) => end,
            Err(_) => Err(given_up),
        };
        let outcome = end.unwrap_or_else(Outcome::Failed);
        Sample {
            index: request.index,
            prompt_len: request.prompt.len() as u32,
            output_len_asked: request.output_len,
            output_len: answer.output_len(),
            scheduled,
            sent,
            ended: clock.now(),
            deliveries: answer.deliveries,
            outcome,
        }
    }

    /// The exchange itself. `answer` keeps what came even when the caller drops this at a deadline.
    /// The HTTP library takes an HTTP/1.1 body without length or chunks as empty: an early close.
    async fn converse(&self, body: String, clock: Clock, answer: &mut Answer) -> Result<Outcome, Failure> {
        let post = self.http.post(&self.completions_url).force_close().content_type("application/json");
        let mut response = post.send_body(body).await.map_err(|error| send_failure(&error))?;
        let status = response.status().as_u16();
        if status != 200 {
            let text = response.body().limit(1 << 16).await.unwrap_or_default();
            return Err(FailureKind::Status(status).saying(String::from_utf8_lossy(&text).trim()));
        }
        while let Some(chunk) = response.next().await {
            let chunk = match chunk {
                Ok(chunk) => chunk,
                // Nothing is lost with the end mark read.
                Err(_) if answer.done => break,
                Err(error) => return Err(FailureKind::EarlyClose.saying(error)),
            };
            if answer.take(&chunk, clock.now())? == Next::Leave {
                return Ok(Outcome::HungUp);
            }
        }
        answer.end()
    }
}

async fn first_model(http: &awc::Client, base: &str, timeout: Duration) -> anyhow::Result<String> {
    #[derive(Deserialize)]
    struct Models {
        data: Vec<Model>,
    }
    #[derive(Deserialize)]
    struct Model {
        id: String,
    }
    let get = http.get(format!("{base}/v1/models")).timeout(timeout).force_close();
    // The client's errors are not Send.
    let mut response = get.send().await.map_err(|error| anyhow::anyhow!("{error}"))?;
    if response.status() != 200 {
        bail!("the answer is {}", response.status());
    }
    let body = response.body().await.map_err(|error| anyhow::anyhow!("{error}"))?;
    let models: Models = serde_json::from_slice(&body).context("the answer is not a list of models")?;
    models.data.into_iter().next().map(|model| model.id).context("the list is empty")
}

fn send_failure(error: &SendRequestError) -> Failure {
    let kind = match error {
        // The HTTP client's word for an end of the stream before the answer's head.
        SendRequestError::Connect(ConnectError::Disconnected) | SendRequestError::Send(_) => {
            FailureKind::EarlyClose
        }
        SendRequestError::Connect(ConnectError::Timeout) | SendRequestError::Timeout => FailureKind::Timeout,
        SendRequestError::Response(parse) if is_io(parse) => FailureKind::EarlyClose,
        SendRequestError::Response(_) => FailureKind::BadHttp,
        _ => FailureKind::Connect,
    };
    kind.saying(error)
}

fn is_io(error: &dyn std::error::Error) -> bool {
    error.source().is_some_and(|source| source.is::<io::Error>())
}

/// What the client does after a chunk.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    Read,
    Leave,
}

/// What has come of an answer so far.
struct Answer {
    decoder: SseDecoder,
    hang_up_after: Option<u32>,
    deliveries: Vec<(Duration, u32)>,
    /// Tokens in `deliveries`.
    delivered: u32,
    /// The server sends token ids, so that `delivered` is exact.
    by_id: bool,
    /// Tokens by the server's own count.
    usage: Option<u32>,
    /// The end mark has come.
    done: bool,
}

/// An event of the stream; what is not named here does not matter to the client.
#[derive(Deserialize)]
struct Event {
    error: Option<serde_json::Value>,
    choices: Option<Vec<Choice>>,
    usage: Option<Usage>,
}

#[derive(Deserialize)]
struct Choice {
    #[serde(default)]
    text: String,
    token_ids: Option<Vec<u32>>,
}

#[derive(Deserialize)]
struct Usage {
    completion_tokens: u32,
}

impl Answer {
    fn new(hang_up_after: Option<u32>) -> Self {
        Self {
            decoder: SseDecoder::default(),
            hang_up_after,
            deliveries: Vec::new(),
            delivered: 0,
            by_id: false,
            usage: None,
            done: false,
        }
    }

    /// Takes a piece of the body that came at `now`.
    fn take(&mut self, chunk: &[u8], now: Duration) -> Result<Next, Failure> {
        let mut events = Vec::new();
        let decoded = self.decoder.push(chunk, &mut events);
        // What came whole before the garbage counts.
        for data in events {
            self.take_event(&data, now)?;
            if self.hang_up_after.is_some_and(|tokens| self.delivered >= tokens) {
                return Ok(Next::Leave);
            }
        }
        decoded.map(|()| Next::Read).map_err(|error: SseError| FailureKind::BadSse.saying(error))
    }

    fn take_event(&mut self, data: &str, now: Duration) -> Result<(), Failure> {
        if self.done {
            return Err(FailureKind::BadSse.saying("an event after [DONE]"));
        }
        if data == "[DONE]" {
            self.done = true;
            return Ok(());
        }
        let event: Event = serde_json::from_str(data)
            .map_err(|error| FailureKind::BadSse.saying(format_args!("{error} in the event {data}")))?;
        if let Some(error) = event.error {
            return Err(FailureKind::ErrorEvent.saying(error));
        }
        if event.choices.is_none() && event.usage.is_none() {
            return Err(
                FailureKind::BadSse.saying(format_args!("neither choices nor usage in the event {data}"))
            );
        }
        self.usage = event.usage.map(|usage| usage.completion_tokens).or(self.usage);
        let tokens = event.choices.iter().flatten().map(|choice| self.count(choice)).sum();
        if tokens > 0 {
            self.deliveries.push((now, tokens));
            self.delivered += tokens;
        }
        Ok(())
    }

    fn count(&mut self, choice: &Choice) -> u32 {
        match &choice.token_ids {
            Some(ids) => {
                self.by_id = true;
                ids.len() as u32
            }
            None => u32::from(!choice.text.is_empty()),
        }
    }

    fn output_len(&self) -> u32 {
        match self.usage {
            Some(usage) if !self.by_id => usage,
            _ => self.delivered,
        }
    }

    /// The body is over.
    fn end(&self) -> Result<Outcome, Failure> {
        if !self.done {
            return Err(FailureKind::EarlyClose.saying("the stream ended without [DONE]"));
        }
        if self.delivered == 0 {
            return Err(FailureKind::NoTokens.saying("[DONE] came first"));
        }
        Ok(Outcome::Completed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(chunks: &[&str]) -> (Answer, Result<Next, Failure>) {
        let mut answer = Answer::new(None);
        let end =
            chunks.iter().try_fold(Next::Read, |_, chunk| answer.take(chunk.as_bytes(), Duration::ZERO));
        (answer, end)
    }

    #[test]
    fn ids_count_before_usage_and_usage_before_events() {
        let text = "data: {\"choices\":[{\"text\":\"ab\"}]}\n\n";
        let ids = "data: {\"choices\":[{\"text\":\"\",\"token_ids\":[1,2,3]}]}\n\n";
        let usage = "data: {\"choices\":[],\"usage\":{\"completion_tokens\":9}}\n\n";
        let finish = "data: {\"choices\":[{\"text\":\"\",\"finish_reason\":\"length\"}],\"usage\":null}\n\n";
        let len = |chunks: &[&str]| answer(chunks).0.output_len();
        assert_eq!(len(&[text, text, finish]), 2);
        assert_eq!(len(&[text, finish, usage]), 9);
        assert_eq!(len(&[ids, ids, finish, usage]), 6);
        assert_eq!(answer(&[ids, finish]).0.deliveries, [(Duration::ZERO, 3)]);
    }

    #[test]
    fn events_that_are_none_fail_and_keep_what_came_before() {
        let good = "data: {\"choices\":[{\"text\":\"a\"}]}\n\n";
        for (bad, kind) in [
            ("data: {\"error\":{\"message\":\"gone\"}}\n\n", FailureKind::ErrorEvent),
            ("data: {}\n\n", FailureKind::BadSse),
            ("data: [1]\n\n", FailureKind::BadSse),
            ("data: {\"choices\":\"x\"}\n\n", FailureKind::BadSse),
            ("rubbish\n", FailureKind::BadSse),
            ("data: [DONE]\n\ndata: {}\n\n", FailureKind::BadSse),
        ] {
            let (answer, end) = answer(&[&format!("{good}{bad}")]);
            assert_eq!(end.map_err(|failure| failure.kind), Err(kind), "{bad}");
            assert_eq!(answer.output_len(), 1, "{bad}");
        }
    }

    #[test]
    fn the_nearer_deadline_names_the_failure() {
        let seconds = Duration::from_secs;
        let clock = Clock::start(seconds(10), seconds(60));
        let deadline = |sent| {
            let (deadline, failure) = clock.deadline(seconds(sent));
            (deadline, failure.kind)
        };
        assert_eq!(deadline(50), (seconds(60), FailureKind::Timeout));
        assert_eq!(deadline(51), (seconds(60), FailureKind::TimeLimit));
        assert!(clock.is_over(seconds(60)) && !clock.is_over(seconds(59)));
    }
}
