//! One exchange with the server: sends a request, reads the response, and judges it.
//!
//! Invariant: an exchange ends by its deadline, and its connection is closed then.

use std::{
    error::Error,
    io::{self, ErrorKind},
    iter,
    time::Duration,
};

use http_body_util::Full;
use hyper::{
    Method, Request,
    body::{Bytes, Incoming},
    header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue},
};
use mainstem_sse::SseDecoder;
use serde_json::{Map, Value, json};
use tokio::time::{sleep, timeout};

use super::{
    kind::{Expected, Kind},
    traffic::SoakRequest,
};
use crate::{
    client::{Connection, Server},
    plan::random::RandomStream,
};

/// Maximum size of a response body in bytes.
const BODY_BYTES_MAX: usize = 16 << 20;

/// Maximum time of a client that disconnects before the response begins, in milliseconds.
const PATIENCE_MS: u32 = 40;

/// Maximum number of chunks after which a client disconnects.
const CHUNKS_MAX: u32 = 10;

/// The reply to a request.
#[derive(Clone, Debug, PartialEq)]
pub enum Reply {
    /// The answer of status 200, without what differs from request to request.
    Answer(Value),
    /// An error: its status, or 200 if a stream ends with it, and its code.
    Error { status: u16, code: String },
    /// The client disconnected as planned.
    HungUp,
    /// The server reset the connection before it had the whole request.
    Reset,
    /// The connection broke in another way, or the response is invalid.
    Broken(String),
}

/// The server under test.
pub struct Peer {
    pub server: Server,
    /// API key; never reported.
    key: Option<HeaderValue>,
    /// Maximum time of an exchange.
    pub patience: Duration,
}

impl Peer {
    /// Resolves the server at `url`. Fails if it is not on this machine.
    pub fn new(url: &str, key: Option<&str>, patience: Duration) -> anyhow::Result<Peer> {
        let server = Server::resolve(url, None)?;
        anyhow::ensure!(server.is_loopback(), "the server's address is not a loopback address");
        let bearer = |key| HeaderValue::from_str(&format!("Bearer {key}"));
        let mut key = key.map(bearer).transpose()?;
        key.iter_mut().for_each(|key| key.set_sensitive(true));
        Ok(Peer { server, key, patience })
    }

    /// Returns whether requests have an API key, so that a wrong one is refused.
    pub fn has_key(&self) -> bool {
        self.key.is_some()
    }

    /// Fetches a page as text.
    pub async fn get(&self, path: &'static str) -> anyhow::Result<String> {
        let fetch = async {
            let (mut connection, request) = self.open(Method::GET, path, Bytes::new(), false).await?;
            let response = connection.request(request).await.map_err(|error| error.to_string())?;
            let status = response.status();
            match connection.read_text(response.into_body(), BODY_BYTES_MAX).await {
                Ok(text) if status == 200 => Ok(text),
                Ok(_) | Err(_) => Err(format!("the status is {status}")),
            }
        };
        let answer = timeout(self.patience, fetch).await.unwrap_or_else(|_| Err(self.timed_out()));
        answer.map_err(|why| anyhow::anyhow!("GET {path}: {why}"))
    }

    /// Sends a request and reads its response.
    pub async fn send(&self, request: &SoakRequest, random: RandomStream) -> Reply {
        let exchange = self.exchange(request, random);
        timeout(self.patience, exchange).await.unwrap_or_else(|_| Reply::Broken(self.timed_out()))
    }

    /// Sends a request whose response is read by the caller.
    pub async fn start(&self, request: &SoakRequest) -> Result<OpenStream, String> {
        let SoakRequest { method, path, body, .. } = request.clone();
        let (mut connection, request) = self.open(method, path, body, false).await?;
        let response = connection.request(request).await.map_err(|error| error.to_string())?;
        let (status, mut body) = (response.status().as_u16(), response.into_body());
        let first = match connection.next_chunk(&mut body).await {
            Some(Ok((chunk, _))) => chunk.to_vec(),
            Some(Err(error)) => return Err(error.to_string()),
            None => Vec::new(),
        };
        Ok(OpenStream { connection, status, body, first })
    }

    fn timed_out(&self) -> String {
        format!("no complete response within {:?}", self.patience)
    }

    async fn open(
        &self,
        method: Method,
        path: &'static str,
        body: Bytes,
        is_wrong_key: bool,
    ) -> Result<(Connection, Request<Full<Bytes>>), String> {
        let connection = Connection::open(&self.server, None).await.map_err(|failure| failure.message)?;
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = method;
        *request.uri_mut() = path.parse().expect("the paths are valid");
        let headers = request.headers_mut();
        headers.insert(HOST, self.server.host().clone());
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        let wrong = HeaderValue::from_static("Bearer wrong");
        headers.extend(self.key.clone().map(|key| (AUTHORIZATION, if is_wrong_key { wrong } else { key })));
        Ok((connection, request))
    }

    async fn exchange(&self, request: &SoakRequest, mut random: RandomStream) -> Reply {
        let SoakRequest { kind, method, path, body, .. } = request.clone();
        let (mut connection, post) = match self.open(method, path, body, kind == Kind::WrongKey).await {
            Ok(opened) => opened,
            Err(why) => return Reply::Broken(why),
        };
        let hangs_up_early = kind == Kind::HangUp && random.unit() < 0.5;
        let early = async {
            match hangs_up_early {
                true => sleep(Duration::from_millis(random.between(0, PATIENCE_MS).into())).await,
                false => std::future::pending().await,
            }
        };
        let response = tokio::select! {
            response = connection.request(post) => response,
            () = early => return Reply::HungUp,
        };
        let response = match response {
            Ok(response) => response,
            Err(error) if is_reset(&error) => return Reply::Reset,
            Err(error) => return Reply::Broken(error.to_string()),
        };
        let (status, body) = (response.status().as_u16(), response.into_body());
        if kind == Kind::HangUp && status == 200 {
            let chunks = random.between(0, CHUNKS_MAX);
            return hang_up_after(&mut connection, body, chunks).await;
        }
        match connection.read_text(body, BODY_BYTES_MAX).await {
            Ok(text) => parse(status, &text),
            Err(text) => {
                Reply::Broken(format!("the body of status {status} is cut off after {} bytes", text.len()))
            }
        }
    }
}

/// Returns whether the cause of an error is that the peer closed the connection to what is still sent.
fn is_reset(error: &(dyn Error + 'static)) -> bool {
    let mut causes = iter::successors(Some(error), |error| (*error).source());
    let kind = causes.find_map(|error| error.downcast_ref::<io::Error>()).map(io::Error::kind);
    matches!(kind, Some(ErrorKind::BrokenPipe | ErrorKind::ConnectionReset | ErrorKind::ConnectionAborted))
}

/// A response that has begun.
pub struct OpenStream {
    connection: Connection,
    status: u16,
    body: Incoming,
    first: Vec<u8>,
}

impl OpenStream {
    /// Reads the rest of the response.
    pub async fn finish(mut self) -> Reply {
        let rest = self.connection.read_text(self.body, BODY_BYTES_MAX).await;
        let first = String::from_utf8_lossy(&self.first);
        match rest {
            Ok(rest) => parse(self.status, &(first + rest.as_str())),
            Err(_) => Reply::Broken("the response is cut off".into()),
        }
    }
}

/// Reads chunks of a stream and disconnects. A stream that ends earlier is read to its end.
async fn hang_up_after(connection: &mut Connection, mut body: Incoming, chunks: u32) -> Reply {
    let mut text = Vec::new();
    for _ in 0..chunks {
        match connection.next_chunk(&mut body).await {
            Some(Ok((chunk, _))) => text.extend_from_slice(&chunk),
            Some(Err(error)) => return Reply::Broken(error.to_string()),
            None => return parse(200, &String::from_utf8_lossy(&text)),
        }
    }
    Reply::HungUp
}

/// Parses a complete response.
fn parse(status: u16, text: &str) -> Reply {
    if status == 200 && !text.starts_with('{') {
        return parse_stream(text);
    }
    match serde_json::from_str::<Value>(text) {
        Err(error) => Reply::Broken(format!("the body of status {status} is not JSON: {error}")),
        Ok(answer) if status == 200 => match answer.get("choices").or_else(|| answer.get("data")) {
            Some(part) => Reply::Answer(part.clone()),
            None => Reply::Broken("the answer has neither choices nor data".into()),
        },
        Ok(answer) => Reply::Error { status, code: error_code(&answer["error"]) },
    }
}

fn error_code(error: &Value) -> String {
    error["code"].as_str().unwrap_or("none").to_owned()
}

/// Parses the events of a stream into the text and the finish reason of each choice.
fn parse_stream(text: &str) -> Reply {
    let (mut decoder, mut bytes, mut choices) = (SseDecoder::default(), text.as_bytes(), Map::new());
    let mut is_done = false;
    loop {
        let event = match decoder.next(&mut bytes) {
            Ok(Some("[DONE]")) => {
                is_done = true;
                continue;
            }
            Ok(Some(event)) => serde_json::from_str::<Value>(event),
            Ok(None) if is_done => return Reply::Answer(choices.into()),
            Ok(None) => return Reply::Broken("the stream ends without [DONE]".into()),
            Err(error) => return Reply::Broken(error.to_string()),
        };
        match event {
            Err(error) => return Reply::Broken(format!("an event is not JSON: {error}")),
            Ok(event) if event.get("error").is_some() => {
                return Reply::Error { status: 200, code: error_code(&event["error"]) };
            }
            Ok(event) => event["choices"].as_array().into_iter().flatten().for_each(|choice| {
                add_choice(&mut choices, choice);
            }),
        }
    }
}

fn add_choice(choices: &mut Map<String, Value>, part: &Value) {
    let whole = choices.entry(part["index"].to_string()).or_insert_with(|| json!({"text": ""}));
    let text = [&whole["text"], &part["text"]].map(|text| text.as_str().unwrap_or("")).concat();
    whole["text"] = text.into();
    if !part["finish_reason"].is_null() {
        whole["finish_reason"] = part["finish_reason"].clone();
    }
}

/// The judgement of a reply.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    /// The recorded answer, or the expected error.
    Expected,
    HungUp,
    /// The connection was reset, as it may be if the server does not read the whole request.
    Reset,
    /// An error of the kind that faults cause, by its code.
    Fault(String),
    /// Anything else, with the difference.
    Wrong(String),
}

/// Error codes of injected faults.
pub const FAULT_CODES: [&str; 2] = ["device_failed", "sampling_failed"];

impl Outcome {
    /// Judges a reply. `recorded` is the answer of the quiet server.
    pub fn of(kind: Kind, reply: Reply, recorded: Option<&Value>) -> Outcome {
        match (kind.expected(), reply) {
            (Expected::Nothing, Reply::HungUp) => Outcome::HungUp,
            // The answer was complete before the client hung up.
            (Expected::Nothing, Reply::Answer(_)) => Outcome::Expected,
            (Expected::Error(wanted, reason), Reply::Error { status, code })
                if status == wanted && code == reason =>
            {
                Outcome::Expected
            }
            // The server does not read a body that is too large, so it may close the connection before the
            // client has sent it.
            (_, Reply::Reset) if kind == Kind::HugeBody => Outcome::Reset,
            (Expected::Answer | Expected::Nothing, Reply::Error { status: 200 | 500, code })
                if FAULT_CODES.contains(&&*code) =>
            {
                Outcome::Fault(code)
            }
            (Expected::Answer, Reply::Answer(answer)) => match recorded {
                Some(recorded) if *recorded == answer => Outcome::Expected,
                Some(recorded) => Outcome::Wrong(format!("answer {answer}, but recorded was {recorded}")),
                None => Outcome::Wrong("no answer was recorded".into()),
            },
            (_, Reply::Answer(_)) => Outcome::Wrong("status 200".into()),
            (_, Reply::Error { status, code }) => Outcome::Wrong(format!("status {status}, {code}")),
            (_, Reply::HungUp) => Outcome::Wrong("the client hung up".into()),
            (_, Reply::Reset) => Outcome::Wrong("the connection was reset".into()),
            (_, Reply::Broken(why)) => Outcome::Wrong(why),
        }
    }

    /// Returns the name of the outcome in reports.
    pub fn name(&self) -> &str {
        match self {
            Outcome::Expected => "expected",
            Outcome::HungUp => "hung up",
            Outcome::Reset => "reset",
            Outcome::Fault(code) => code,
            Outcome::Wrong(_) => "WRONG",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(text: &str, end: Value) -> String {
        let choice = json!({"index": 0, "text": text, "finish_reason": end});
        format!("data: {}\n\n", json!({"choices": [choice]}))
    }

    #[test]
    fn a_stream_is_the_text_of_its_events() {
        let events = [event("a", Value::Null), event("b", "stop".into()), "data: [DONE]\n\n".into()];
        let answer = json!({"0": {"text": "ab", "finish_reason": "stop"}});
        assert_eq!(parse(200, &events.concat()), Reply::Answer(answer));
        let cut = parse(200, &events[..2].concat());
        assert_eq!(cut, Reply::Broken("the stream ends without [DONE]".into()));
        let failed = format!("{}data: {{\"error\":{{\"code\":\"device_failed\"}}}}\n\n", events[0]);
        assert_eq!(parse(200, &failed), Reply::Error { status: 200, code: "device_failed".into() });
    }

    #[test]
    fn answers_are_judged_by_what_was_recorded() {
        let recorded = json!([{"text": "a"}]);
        let of = |kind, reply| Outcome::of(kind, reply, Some(&recorded));
        let answer = parse(200, r#"{"id": "7", "choices": [{"text": "a"}]}"#);
        let other = parse(200, r#"{"id": "7", "choices": [{"text": "b"}]}"#);
        let fault = parse(500, r#"{"error": {"code": "sampling_failed"}}"#);
        let refused = parse(400, r#"{"error": {"code": "invalid_value"}}"#);
        assert_eq!(of(Kind::Short, answer.clone()), Outcome::Expected);
        assert_eq!(of(Kind::Short, fault.clone()), Outcome::Fault("sampling_failed".into()));
        assert_eq!(of(Kind::BadParameter, refused.clone()), Outcome::Expected);
        assert_eq!(of(Kind::HangUp, Reply::HungUp), Outcome::HungUp);
        assert_eq!(of(Kind::HugeBody, Reply::Reset), Outcome::Reset);
        for (kind, reply, words) in [
            (Kind::Short, other, "recorded was"),
            (Kind::Short, refused.clone(), "status 400, invalid_value"),
            (Kind::Malformed, answer, "status 200"),
            (Kind::Malformed, fault, "status 500"),
            (Kind::UnknownPath, refused.clone(), "status 400"),
            (Kind::TooLong, refused, "status 400, invalid_value"),
            (Kind::Short, Reply::Reset, "was reset"),
            (Kind::HugeBody, Reply::Broken("closed".into()), "closed"),
            (Kind::Short, parse(500, r#"{"error": {"code": "internal_error"}}"#), "internal_error"),
            (Kind::Short, parse(200, "{"), "not JSON"),
            (Kind::Short, parse(200, "no"), "without [DONE]"),
            (Kind::HangUp, Reply::Broken("reset".into()), "reset"),
        ] {
            let Outcome::Wrong(why) = of(kind, reply) else { panic!("{kind:?} must be wrong: {words}") };
            assert!(why.contains(words), "{why}");
        }
    }

    #[test]
    fn a_reset_is_told_from_other_errors_by_its_cause() {
        #[derive(Debug)]
        struct Outer(io::Error);
        impl std::fmt::Display for Outer {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, "outer")
            }
        }
        impl Error for Outer {
            fn source(&self) -> Option<&(dyn Error + 'static)> {
                Some(&self.0)
            }
        }
        for (kind, expected) in [
            (ErrorKind::BrokenPipe, true),
            (ErrorKind::ConnectionReset, true),
            (ErrorKind::TimedOut, false),
            (ErrorKind::UnexpectedEof, false),
        ] {
            assert_eq!(is_reset(&Outer(kind.into())), expected, "{kind:?}");
        }
        assert!(!is_reset(&std::fmt::Error));
    }
}
