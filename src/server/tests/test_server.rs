//! A test server with real TCP connections and a fake intake, whose events the test sends.
//!
//! Invariant: nothing here sleeps; each wait is for an event, with a deadline.

use crate::actors::engine::STORE;
use crate::actors::stream::{SubmitKind, event_channel};
use crate::actors::{
    EventSender, IntakeHandle, LiveView, ModelInfo, PromptingDefaults, Status, Submit, TokenStream,
};
use crate::config::{Config, Overrides, ServerConfig};
use crate::memory::{PagePool, split_slots};
use crate::model::spec::Kind;
use crate::request::{FinishReason, Request, RequestError, Token, TokenEvent};
use crate::server::{App, ServeParts, Server, ShutdownOutcome};
use crate::testing::Scratch;
use crate::text::{ChatTemplate, Tokenizer};
use actix::{Actor, Context, Handler};
use actix_web::rt::{net::TcpStream, spawn, task, task::JoinHandle, time::timeout};
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

pub const DEADLINE: Duration = Duration::from_secs(20);
pub const COMPLETIONS: &str = "/v1/completions";
/// BOS token of the test tokenizer; the ids below it are the bytes.
pub const BOS: u32 = 256;

/// An intake that passes requests on to the test, or rejects them all. While the server drains, it rejects
/// new requests.
pub struct FakeIntake {
    calls: UnboundedSender<(Request, EventSender)>,
    status: Arc<Status>,
    refusal: Option<RequestError>,
}

impl Actor for FakeIntake {
    type Context = Context<FakeIntake>;
}

impl Handler<Submit> for FakeIntake {
    type Result = Result<Vec<TokenStream>, RequestError>;

    fn handle(&mut self, Submit { requests, kind: standing }: Submit, _: &mut Self::Context) -> Self::Result {
        if standing == SubmitKind::New && self.status.is_draining() {
            return Err(RequestError::Draining);
        }
        if let Some(refusal) = &self.refusal {
            return Err(refusal.clone());
        }
        let pass_on = |request: Request| {
            let (events, stream) = event_channel(self.status.responses.hold(request.client.id));
            self.calls.send((request, events)).expect("the test listens");
            stream
        };
        Ok(requests.into_iter().map(pass_on).collect())
    }
}

/// A running server with a fake intake.
pub struct TestServer {
    pub address: SocketAddr,
    pub calls: UnboundedReceiver<(Request, EventSender)>,
    pub status: Arc<Status>,
    pub stops: UnboundedSender<()>,
    pub ending: JoinHandle<anyhow::Result<ShutdownOutcome>>,
}

impl TestServer {
    pub fn start() -> TestServer {
        TestServer::with_config(None, |_| {})
    }

    pub fn with_config(
        refusal: Option<RequestError>,
        configure: impl FnOnce(&mut ServerConfig),
    ) -> TestServer {
        TestServer::with_drain_timeout(refusal, configure, DEADLINE)
    }

    pub fn with_drain_timeout(
        refusal: Option<RequestError>,
        configure: impl FnOnce(&mut ServerConfig),
        drain_timeout: Duration,
    ) -> TestServer {
        TestServer::for_model(model(), tokenizer(), refusal, configure, drain_timeout)
    }

    /// Starts a server for a given model and tokenizer.
    pub fn for_model(
        model: ModelInfo,
        tokenizer: Tokenizer,
        refusal: Option<RequestError>,
        configure: impl FnOnce(&mut ServerConfig),
        drain_timeout: Duration,
    ) -> TestServer {
        let config = config(configure);
        let (parts, receiver) = parts(model, tokenizer, refusal, &config);
        let status = parts.status.clone();
        let server = Server::bind(parts, config).unwrap();
        let address = server.address();
        let (stops, stopped) = unbounded_channel();
        let ending = spawn(server.run(stopped, drain_timeout));
        TestServer { address, calls: receiver, status, stops, ending }
    }

    /// Waits for the next request that the server submits. Returns it with the sender of its events.
    pub async fn next_request(&mut self) -> (Request, EventSender) {
        timeout(DEADLINE, self.calls.recv())
            .await
            .expect("a request is submitted")
            .expect("the intake is running")
    }

    pub async fn get(&self, path: &str) -> Response {
        Client::send(self.address, "GET", path, "", "").await.response().await
    }

    pub async fn post(&self, body: &str) -> Response {
        self.send(body).await.response().await
    }

    pub async fn send(&self, body: &str) -> Client {
        Client::send(self.address, "POST", COMPLETIONS, "", body).await
    }

    /// Posts `body` and sends `events` as the engine. Returns the submitted request and the response.
    pub async fn exchange(&mut self, body: Value, events: Vec<TokenEvent>) -> (Request, Response) {
        let client = self.send(&body.to_string()).await;
        let (request, sender) = self.next_request().await;
        events.into_iter().for_each(|event| sender.send(event));
        drop(sender);
        (request, client.response().await)
    }

    pub async fn ending(self) -> ShutdownOutcome {
        timeout(DEADLINE, self.ending).await.expect("the server ends").unwrap().unwrap()
    }

    pub async fn close(self) {
        self.stops.send(()).unwrap();
        assert_eq!(self.ending().await, ShutdownOutcome::Drained);
    }
}

fn config(configure: impl FnOnce(&mut ServerConfig)) -> ServerConfig {
    let mut config = Config::load(None, Overrides::default()).unwrap().server;
    config.port = 0;
    config.workers = 1;
    configure(&mut config);
    config
}

/// Returns the parts of a server, and the requests that it submits.
fn parts(
    model: ModelInfo,
    tokenizer: Tokenizer,
    refusal: Option<RequestError>,
    config: &ServerConfig,
) -> (ServeParts, UnboundedReceiver<(Request, EventSender)>) {
    let (calls, receiver) = unbounded_channel();
    let status = Arc::new(Status::new(Duration::ZERO, 1).with_response_memory(config.response_bytes));
    let intake = IntakeHandle(FakeIntake { calls, refusal, status: status.clone() }.start().recipient());
    let tokenizer = Arc::new(tokenizer);
    let sampling = Arc::new(model.sampling(&tokenizer).unwrap());
    let live = Arc::new(LiveView::new(split_slots(4, 1), PagePool::new(9, 32)));
    let view = (
        live,
        [("model", "a fake".to_owned()), (STORE, "/srv".to_owned()), ("slots", "4".to_owned())].into(),
    );
    (ServeParts::new(intake, status, view, tokenizer, model, sampling), receiver)
}

/// Returns what the handlers of a server share, without a server.
pub fn app(configure: impl FnOnce(&mut ServerConfig)) -> App {
    let config = config(configure);
    App::new(parts(model(), tokenizer(), None, &config).0, config)
}

/// A connection on which a request was sent.
pub struct Client {
    pub stream: TcpStream,
    pub read: Vec<u8>,
}

impl Client {
    pub async fn send(address: SocketAddr, method: &str, path: &str, headers: &str, body: &str) -> Client {
        let stream = TcpStream::connect(address).await.unwrap();
        Client::send_on(stream, method, path, headers, body).await
    }

    pub async fn send_on(stream: TcpStream, method: &str, path: &str, headers: &str, body: &str) -> Client {
        let length = body.len();
        let head = format!("{method} {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n{headers}");
        let mut client = Client { stream, read: Vec::new() };
        client.write(&format!("{head}Content-Length: {length}\r\n\r\n{body}")).await;
        client
    }

    pub async fn write(&mut self, text: &str) {
        let mut rest = text.as_bytes();
        while !rest.is_empty() {
            self.stream.writable().await.unwrap();
            // A server that has responded already may close the connection.
            match self.stream.try_write(rest) {
                Ok(written) => rest = &rest[written..],
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(_) => break,
            }
        }
    }

    /// Reads once. Returns false at the end of the stream.
    pub async fn read_more(&mut self) -> bool {
        let mut buffer = [0; 4096];
        loop {
            timeout(DEADLINE, self.stream.readable()).await.expect("the server goes on").unwrap();
            match self.stream.try_read(&mut buffer) {
                Ok(0) => return false,
                Ok(length) => {
                    self.read.extend_from_slice(&buffer[..length]);
                    return true;
                }
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Reads what has arrived, without waiting. Returns whether anything has.
    pub fn has_more(&mut self) -> bool {
        let mut buffer = [0; 4096];
        let length = self.stream.try_read(&mut buffer).unwrap_or(0);
        self.read.extend_from_slice(&buffer[..length]);
        length > 0
    }

    pub async fn read_until(&mut self, needle: &str) {
        while !String::from_utf8_lossy(&self.read).contains(needle) {
            assert!(self.read_more().await, "no {needle} in {}", String::from_utf8_lossy(&self.read));
        }
    }

    pub async fn response(mut self) -> Response {
        while self.read_more().await {}
        let end = self.read.windows(4).position(|four| four == b"\r\n\r\n").expect("there is a head");
        let head = String::from_utf8(self.read[..end].to_vec()).unwrap().to_ascii_lowercase();
        let raw = &self.read[end + 4..];
        let (body, chunks) = match head.contains("transfer-encoding: chunked") {
            true => dechunked(raw),
            false => (raw.to_vec(), 1),
        };
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        Response {
            status,
            head,
            body: String::from_utf8(body).expect("no half character ever leaves"),
            chunks,
        }
    }
}

/// Decodes a chunked body. Returns it with the number of chunks.
pub fn dechunked(mut raw: &[u8]) -> (Vec<u8>, usize) {
    let (mut body, mut chunks) = (Vec::new(), 0);
    loop {
        let line = raw.windows(2).position(|two| two == b"\r\n").expect("a chunk has a length");
        let length = usize::from_str_radix(std::str::from_utf8(&raw[..line]).unwrap(), 16).unwrap();
        let chunk = &raw[line + 2..];
        if length == 0 {
            return (body, chunks);
        }
        chunks += 1;
        std::str::from_utf8(&chunk[..length]).expect("each chunk is whole characters");
        body.extend_from_slice(&chunk[..length]);
        raw = &chunk[length + 2..];
    }
}

pub struct Response {
    pub status: u16,
    /// Status line and headers, in lower case.
    pub head: String,
    pub body: String,
    /// Number of chunks of the body; 1 if it was not chunked.
    pub chunks: usize,
}

impl Response {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.body))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        let lines = self.head.lines();
        lines.filter_map(|line| line.split_once(": ")).find(|(key, _)| *key == name).map(|(_, value)| value)
    }

    /// Returns the events of a finished stream, which must consist of `data:` lines, the last of them
    /// `[DONE]`.
    pub fn events(&self) -> Vec<Value> {
        assert_eq!(self.status, 200, "{}", self.body);
        let frames = self.body.strip_suffix("\n\n").expect("the last event is closed").split("\n\n");
        let mut data: Vec<_> =
            frames.map(|frame| frame.strip_prefix("data: ").unwrap_or_else(|| panic!("{frame}"))).collect();
        assert_eq!(data.pop(), Some("[DONE]"), "{}", self.body);
        data.into_iter().map(|json| serde_json::from_str(json).unwrap()).collect()
    }

    /// Checks that the body is an error object. Returns its `code` and `param`.
    pub fn error(&self) -> (String, Value) {
        let error = &self.json()["error"];
        let text = |key: &str| error[key].as_str().unwrap_or_else(|| panic!("no {key}: {error}")).to_string();
        assert!(!text("message").is_empty() && text("type").ends_with("_error"), "{error}");
        (text("code"), error["param"].clone())
    }
}

/// Returns the model data of a decoder with a chat template.
pub fn model() -> ModelInfo {
    ModelInfo {
        name: "tiny".into(),
        context: 64,
        max_sequence_tokens: 64,
        max_choices: 300,
        vocab: 257,
        source_vocab: 257,
        kind: Kind::Decoder,
        encoder_context: 0,
        endpoints: vec!["/v1/chat/completions", COMPLETIONS],
        has_head: true,
        eos: vec![],
        sampling_defaults: Default::default(),
        prompting: PromptingDefaults::Decoder(None),
        classifier: None,
        pair_template: None,
        chat_template: Some(Arc::new(template())),
        output_formats: Default::default(),
        speculation: None,
        created: 1,
    }
}

/// Returns a tokenizer with a token per byte, and 256 as BOS.
pub fn tokenizer() -> Tokenizer {
    tokenizer_with(&["<s>"], Value::Null)
}

/// Returns a tokenizer with a token per byte and the given special tokens from 256 on. The post-processor
/// determines which of them the tokenizer adds around a text.
pub fn tokenizer_with(special: &[&str], post_processor: Value) -> Tokenizer {
    // Byte-level vocabularies write each byte as a printable character of its own.
    let is_printable = |byte: &u32| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut others = 0x100..;
    let letter = |byte: u32| char::from_u32(if is_printable(&byte) { byte } else { others.next().unwrap() });
    let vocab: serde_json::Map<_, _> =
        (0..256).map(letter).zip(0..).map(|(c, id)| (c.unwrap().into(), json!(id))).collect();
    let byte_level =
        json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": false });
    let added = special.iter().zip(BOS..).map(|(name, id)| {
        json!({
            "id": id, "content": name, "special": true,
            "single_word": false, "lstrip": false, "rstrip": false, "normalized": false
        })
    });
    let added: Value = added.collect();
    let file = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added, "normalizer": null,
        "pre_tokenizer": byte_level, "post_processor": post_processor, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false,
            "vocab": vocab, "merges": []
        }
    });
    let config = json!({ "bos_token": "<s>" });
    let folder = Scratch::new();
    folder.write("tokenizer.json", file.to_string().as_bytes());
    folder.write("tokenizer_config.json", config.to_string().as_bytes());
    Tokenizer::from_folder(&folder.folder()).unwrap()
}

/// Returns the events of a generation: a token per byte of `text`, and the end.
pub fn answer(text: &str) -> Vec<TokenEvent> {
    let tokens = text.bytes().map(|byte| TokenEvent::Token(bare(byte.into())));
    tokens.chain([TokenEvent::Finished(FinishReason::Length)]).collect()
}

pub fn bare(id: u32) -> Token {
    Token { id, logprob: None, rank: None, top: vec![] }
}

pub fn scored(id: u32, logprob: f32, top: &[(u32, f32)]) -> Token {
    Token { id, logprob: Some(logprob), rank: None, top: top.to_vec() }
}

/// Waits until `condition` is true, at most until the deadline.
pub async fn wait_until(condition: impl Fn() -> bool) {
    let polling = async {
        while !condition() {
            task::yield_now().await;
        }
    };
    timeout(DEADLINE, polling).await.expect("the condition becomes true in time");
}

/// Concatenates a list field of every event's first choice.
pub fn joined(events: &[Value], list: impl Fn(&Value) -> &Value) -> Vec<Value> {
    let lists = events.iter().map(|event| list(&event["choices"][0]));
    lists.filter_map(Value::as_array).flatten().cloned().collect()
}

/// Returns a template that renders `<s>`, each message as `role:content;`, and the generation prompt.
fn template() -> ChatTemplate {
    let source = "{{ bos_token }}{% for m in messages %}{% if m.role == 'robot' %}\
                  {{ raise_exception('no robots') }}{% endif %}{{ m.role }}:{{ m.content }};{% endfor %}\
                  {% if add_generation_prompt %}assistant:{% endif %}";
    let special = [("bos_token".to_owned(), "<s>".to_owned())].into();
    ChatTemplate::new("the test's template", source, special).unwrap()
}
