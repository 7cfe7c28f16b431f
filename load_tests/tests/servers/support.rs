//! Test servers, with a thread per connection, and settings to run against them.
//!
//! Invariant: a server sends exactly the bytes that its test provides.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    sync::Arc,
    thread,
    time::Duration,
};

use load_tests::{
    plan::{
        arrivals::Arrivals,
        lengths::LengthDistribution,
        prompts::PromptSource,
        requests::{Endpoint, LoadSpec},
    },
    run::{Connections, Progress, RunRecord, RunSettings, Secret, Target, run},
    sample::{FailureKind, Outcome, Sample},
};

pub const HEAD: &str =
    "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
pub const TOKEN: &str =
    "data: {\"choices\":[{\"index\":0,\"text\":\"a\",\"token_ids\":[5],\"finish_reason\":null}]}\n\n";
pub const DONE: &str = "data: [DONE]\n\n";

/// Timeout of a run that hangs; a successful run never waits for it.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A received request.
#[derive(Clone, Debug)]
pub struct ReceivedRequest {
    /// The request line and the headers, in lower case.
    pub head: Vec<String>,
    pub body: String,
}

impl ReceivedRequest {
    /// Returns the request line in lower case.
    pub fn line(&self) -> &str {
        &self.head[0]
    }

    /// Returns the value of a header in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.head.iter().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
    }

    pub fn json(&self) -> serde_json::Value {
        serde_json::from_str(&self.body).unwrap()
    }
}

pub fn listen() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// Returns a port that nothing listens on and that stays reserved while the tests run.
pub fn closed_port() -> SocketAddr {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let address = socket.local_addr().unwrap();
    std::mem::forget(socket);
    address
}

/// Handles every connection with `talk` on its own thread.
pub fn serve_connections(talk: impl Fn(TcpStream) + Send + Sync + 'static) -> SocketAddr {
    let (listener, address) = listen();
    let talk = Arc::new(talk);
    thread::spawn(move || {
        for stream in listener.incoming() {
            let (stream, talk) = (stream.unwrap(), Arc::clone(&talk));
            thread::spawn(move || talk(stream));
        }
    });
    address
}

/// Handles one request per connection with `answer` and closes the connection.
pub fn serve(answer: impl Fn(TcpStream, ReceivedRequest) + Send + Sync + 'static) -> SocketAddr {
    serve_connections(move |stream| {
        if let Some(request) = read_request(&stream) {
            answer(stream, request);
        }
    })
}

/// Responds to every request with the bytes returned by `answer`, and keeps connections open.
pub fn serve_bytes(answer: impl Fn(ReceivedRequest) -> String + Send + Sync + 'static) -> SocketAddr {
    serve_connections(move |mut stream| {
        while let Some(request) = read_request(&stream) {
            if stream.write_all(answer(request).as_bytes()).is_err() {
                return;
            }
        }
    })
}

/// Reads the next request of a connection. Returns `None` if the client has closed it.
pub fn read_request(stream: impl Read) -> Option<ReceivedRequest> {
    let mut reader = BufReader::new(stream);
    let (mut head, mut length) = (Vec::new(), 0);
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).unwrap_or(0) == 0 {
            return None;
        }
        let line = line.trim_end().to_ascii_lowercase();
        if line.is_empty() {
            break;
        }
        if let Some(value) = line.strip_prefix("content-length: ") {
            length = value.parse().unwrap();
        }
        head.push(line);
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some(ReceivedRequest { head, body: String::from_utf8(body).unwrap() })
}

pub fn chunk(text: &str) -> String {
    format!("{:x}\r\n{text}\r\n", text.len())
}

/// Formats a response with a content length.
pub fn page(status: &str, headers: &str, text: &str) -> String {
    format!("HTTP/1.1 {status}\r\n{headers}content-length: {}\r\n\r\n{text}", text.len())
}

/// Formats events as a streamed response in one chunk.
pub fn stream(events: &str) -> String {
    format!("{HEAD}{}0\r\n\r\n", chunk(events))
}

/// Formats a correct response: every requested token in its own chunk, and the end mark.
pub fn good_response(request: &ReceivedRequest) -> String {
    let tokens = request.json()["max_tokens"].as_u64().unwrap() as usize;
    format!("{HEAD}{}{}0\r\n\r\n", chunk(TOKEN).repeat(tokens), chunk(DONE))
}

/// Returns settings that send all requests at once from two workers, each on a new connection.
pub fn settings(address: SocketAddr, requests: usize) -> RunSettings {
    RunSettings {
        label: None,
        target: Target {
            url: format!("http://{address}"),
            models: vec!["m".into()],
            keys: Vec::new(),
            endpoint: Endpoint::Completions,
            extra_body: serde_json::Map::new(),
            ca: None,
            metrics_url: None,
        },
        load: load(requests),
        arrivals: Arrivals::AllAtOnce,
        max_concurrency: None,
        retries: 0,
        connections: Connections::New,
        workers: 2,
        warmups: 0,
        request_timeout: PATIENCE,
        time_limit: PATIENCE,
    }
}

fn load(requests: usize) -> LoadSpec {
    LoadSpec {
        requests,
        prompts: PromptSource::Ids { vocab: 100 },
        prompt: LengthDistribution::Uniform { low: 4, high: 8 },
        output: Some(LengthDistribution::Uniform { low: 3, high: 6 }),
        trace: None,
        shared_prefix: 0,
        prefix_groups: 1,
        temperature: 0.0,
        seed: 1,
        ignore_eos: true,
        hangup_share: 0.0,
        hangup_after: 2,
        slow_share: 0.0,
        slow_rate: 1000,
        models: 1,
        keys: 0,
    }
}

/// Returns a closed loop without think time.
pub fn users(count: usize) -> Arrivals {
    Arrivals::Users { count, think: Duration::ZERO }
}

pub fn constant(gap: Duration) -> Arrivals {
    Arrivals::Constant { gap }
}

pub fn with_keys(settings: RunSettings, keys: &[&str]) -> RunSettings {
    let load = LoadSpec { keys: keys.len(), ..settings.load };
    let keys = keys.iter().map(|key| Secret(key.to_string())).collect();
    RunSettings { load, target: Target { keys, ..settings.target }, ..settings }
}

pub fn run_to_end(settings: &RunSettings) -> RunRecord {
    run(settings, &Progress::default()).unwrap()
}

/// Runs a single request and returns its sample.
pub fn one_sample(settings: &RunSettings) -> Sample {
    let [sample] = run_to_end(settings).samples.try_into().unwrap();
    sample
}

/// Returns the kind of each failure, by index.
pub fn failure_kinds(record: &RunRecord) -> Vec<FailureKind> {
    let kind = |sample: &Sample| match &sample.outcome {
        Outcome::Failed(failure) => Some(failure.kind),
        Outcome::Completed | Outcome::HungUp => None,
    };
    record.samples.iter().filter_map(kind).collect()
}

pub fn all_completed(record: &RunRecord) -> bool {
    record.samples.iter().all(|sample| sample.outcome == Outcome::Completed)
}
