//! Tests of the program over TCP: start, requests, disconnects, and shutdown.

use crate::common::{self, Copied, PATIENCE, Story, fixture, mainstem, stories};
use crate::families::family;
use serde_json::{Value, json};
use std::borrow::BorrowMut;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

/// A running program.
pub struct Server {
    child: Child,
    addr: String,
    log: Mutex<Receiver<String>>,
}

impl Server {
    pub fn start(fixture_name: &str, flags: &[&str]) -> Server {
        Server::with_model(&fixture(fixture_name), flags)
    }

    pub fn with_model(model: &Path, flags: &[&str]) -> Server {
        Server::run(mainstem(), model, flags)
    }

    /// Starts a server whose files can have so many blocks of 512 or 1024 bytes, depending on the shell.
    pub fn with_file_limit(model: &Path, flags: &[&str], blocks: usize) -> Server {
        let mut limited = common::alone("sh");
        limited.args(["-c", &format!("trap '' XFSZ; ulimit -f {blocks}; exec \"$0\" \"$@\"")]);
        Server::run(limited.arg(mainstem().get_program()), model, flags)
    }

    fn run(mut command: impl BorrowMut<Command>, model: &Path, flags: &[&str]) -> Server {
        let mut child = command
            .borrow_mut()
            .arg("serve")
            .arg(model)
            .args(["--port", "0", "--threads", "2", "--kv-type", "f32"])
            .args(flags)
            .stderr(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let stderr = child.stderr.take().expect("it is piped");
        let (tx, log) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(stderr).lines().map_while(Result::ok) {
                let _ = tx.send(line);
            }
        });
        let mut server = Server { child, addr: String::new(), log: Mutex::new(log) };
        let line = server.line_with("listening on http://");
        let (_, addr) = line.split_once("listening on http://").expect("it was looked for");
        server.addr = addr.split_whitespace().next().expect("an address follows").to_owned();
        server
    }

    /// Waits for the next log line that contains `text`.
    fn line_with(&self, text: &str) -> String {
        let log = self.log.lock().expect("nobody panics with the log");
        loop {
            let line = log.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("no line with {text:?}"));
            if line.contains(text) {
                return line;
            }
        }
    }

    fn connect(&self, path: &str, body: Option<&Value>) -> TcpStream {
        let mut stream = TcpStream::connect(&self.addr).expect("the server accepts");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
        let body = body.map(Value::to_string).unwrap_or_default();
        let method = if body.is_empty() { "GET" } else { "POST" };
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nContent-Type: \
             application/json\r\nContent-Length: {}\r\n\r\n",
            self.addr,
            body.len()
        );
        stream.write_all(head.as_bytes()).expect("the request is sent");
        stream.write_all(body.as_bytes()).expect("the request is sent");
        stream
    }

    pub fn ask(&self, path: &str, body: Option<&Value>) -> (u16, String) {
        let mut answer = Vec::new();
        self.connect(path, body).read_to_end(&mut answer).expect("the answer comes to its end");
        split(&answer)
    }

    pub fn post(&self, body: Value) -> (u16, Value) {
        let (status, text) = self.ask("/v1/completions", Some(&body));
        (status, serde_json::from_str(&text).unwrap_or_else(|_| panic!("not JSON: {text}")))
    }

    pub fn stream(&self, body: &Value) -> Streamed {
        let (status, text) = self.ask("/v1/completions", Some(body));
        assert_eq!(status, 200, "{text}");
        Streamed::parse(&text)
    }

    fn metric(&self, name: &str) -> f64 {
        let (_, text) = self.ask("/metrics", None);
        let line =
            text.lines().find(|line| line.strip_prefix(name).is_some_and(|rest| rest.starts_with('{')));
        let line = line.unwrap_or_else(|| panic!("no metric {name}"));
        line.rsplit(' ').next().expect("a value").parse().expect("a number")
    }

    /// Polls until the metric has this value.
    fn wait_for(&self, name: &str, value: f64) {
        let began = Instant::now();
        while self.metric(name) != value {
            assert!(began.elapsed() < PATIENCE, "{name} stays at {}", self.metric(name));
        }
    }

    /// Returns the address that it listens on.
    pub fn address(&self) -> &str {
        &self.addr
    }

    /// Ends the program at once, whatever it does.
    pub fn kill(&mut self) {
        self.child.kill().expect("it can be killed");
        self.child.wait().expect("it ends");
    }

    pub fn signal(&self, name: &str) {
        common::signal(&self.child, name);
    }

    pub fn exit(&mut self) -> ExitStatus {
        common::wait_for_exit(&mut self.child)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Parses the status and body of a response; chunks are joined.
pub fn split(answer: &[u8]) -> (u16, String) {
    let text = String::from_utf8_lossy(answer);
    let (head, body) = text.split_once("\r\n\r\n").expect("an HTTP answer");
    let status = head.split(' ').nth(1).expect("a status").parse().expect("a number");
    if !head.to_lowercase().contains("transfer-encoding: chunked") {
        return (status, body.to_owned());
    }
    let mut rest = body;
    let mut whole = String::new();
    while let Some((size, after)) = rest.split_once("\r\n") {
        let size = usize::from_str_radix(size, 16).expect("a chunk's size");
        whole.push_str(&after[..size]);
        rest = &after[size + 2..];
        if size == 0 {
            break;
        }
    }
    (status, whole)
}

/// A complete stream of completion chunks.
pub struct Streamed {
    pub text: String,
    pub ids: Vec<u64>,
    pub finish: String,
}

impl Streamed {
    fn parse(body: &str) -> Streamed {
        let mut streamed = Streamed { text: String::new(), ids: Vec::new(), finish: String::new() };
        let mut done = false;
        for event in body.split("\n\n").filter(|event| !event.is_empty() && !event.starts_with(':')) {
            assert!(!done, "nothing follows [DONE]");
            let data = event.strip_prefix("data: ").unwrap_or_else(|| panic!("not an event: {event:?}"));
            if data == "[DONE]" {
                done = true;
                continue;
            }
            let chunk: Value = serde_json::from_str(data).expect("a chunk is JSON");
            let choice = &chunk["choices"][0];
            streamed.text.push_str(choice["text"].as_str().expect("a chunk has text"));
            streamed
                .ids
                .extend(choice["token_ids"].as_array().into_iter().flatten().filter_map(Value::as_u64));
            if let Some(reason) = choice["finish_reason"].as_str() {
                streamed.finish = reason.to_owned();
            }
        }
        assert!(done, "a stream ends with [DONE]");
        streamed
    }
}

fn body(number: u64, stream: bool) -> Value {
    let prompts = ["the rain", "in the main stem", "a", "every live request is a tributary"];
    let mut body = json!({
        "prompt": prompts[(number % 4) as usize],
        "max_tokens": 5 + number % 40,
        "temperature": if number.is_multiple_of(2) { 0.0 } else { 0.8 },
        "seed": number,
        "ignore_eos": true,
        "return_token_ids": true,
    });
    if stream {
        body["stream"] = true.into();
    }
    body
}

#[test]
fn thirty_two_mixed_requests_at_once_get_what_each_gets_alone() {
    let server = Server::start("gqa", &["--slots", "8", "--token-budget", "32"]);
    let alone: Vec<Streamed> = (0..32).map(|n| server.stream(&body(n, true))).collect();
    std::thread::scope(|scope| {
        let (server, alone) = (&server, &alone);
        for number in 0..32u64 {
            scope.spawn(move || {
                let expected = &alone[number as usize];
                if number % 3 == 0 {
                    let (status, answer) = server.post(body(number, false));
                    assert_eq!((status, answer["choices"][0]["text"].as_str()), (200, Some(&*expected.text)));
                    assert_eq!(answer["usage"]["completion_tokens"], 5 + number % 40);
                } else {
                    let streamed = server.stream(&body(number, true));
                    assert_eq!((&streamed.text, &streamed.ids), (&expected.text, &expected.ids), "{number}");
                    assert_eq!(streamed.ids.len() as u64, 5 + number % 40);
                    assert_eq!(streamed.finish, "length");
                }
            });
        }
    });
    server.wait_for("mainstem_num_requests_running", 0.0);
    server.wait_for("mainstem_kv_cache_usage_perc", 0.0);
    assert_eq!(
        server.metric("mainstem_generation_tokens_total"),
        2.0 * (0..32).map(|n| 5 + n % 40).sum::<u64>() as f64
    );
}

/// A client that disconnects frees its slot, streaming or not: with one slot, the next request proves it. The
/// requested answer is too long to have completed.
#[test]
fn hanging_up_frees_the_slot() {
    const LONG: u32 = 30_000;
    let model = Copied::of("gqa", "long-context");
    model.configure("max_position_embeddings", json!(LONG + 1000));
    let server = Server::with_model(&model.0, &["--slots", "1", "--device", "reference"]);
    for (cancelled, stream) in [(1.0, true), (2.0, false)] {
        let mut long = body(1, stream);
        long["max_tokens"] = LONG.into();
        let mut client = server.connect("/v1/completions", Some(&long));
        if stream {
            let mut first = [0; 64];
            client.read_exact(&mut first).expect("the stream begins");
        } else {
            server.wait_for("mainstem_num_requests_running", 1.0);
        }
        drop(client);
        let (status, _) = server.post(body(2, false));
        assert_eq!(status, 200);
        server.wait_for("mainstem_clients_gone_total", cancelled);
        server.wait_for("mainstem_num_requests_running", 0.0);
        server.wait_for("mainstem_slots_live", 0.0);
        server.wait_for("mainstem_kv_cache_usage_perc", 0.0);
    }
    let generated = server.metric("mainstem_generation_tokens_total");
    assert!(generated < LONG.into(), "{generated} tokens for nobody");
}

/// A call to an encoder counts as one request and one client in the metrics, whatever its number of texts.
#[test]
fn a_call_to_an_encoder_counts_once() {
    let model = family("bert", "metrics");
    let texts = json!({ "input": [[8, 9], [10], [11, 12, 13]] });
    let server = Server::with_model(&model.0, &["--slots", "2", "--max-waiting", "2"]);
    assert_eq!(server.ask("/v1/embeddings", Some(&texts)).0, 200);
    server.wait_for("mainstem_e2e_request_latency_seconds_count", 1.0);
    assert_eq!(server.metric("mainstem_request_prompt_tokens_sum"), 6.0);
    assert_eq!(server.metric("mainstem_clients_gone_total"), 0.0);

    let slow = ["--slots", "2", "--device", "fake", "--fake-step", "600s"];
    let server = Server::with_model(&model.0, &slow);
    let client = server.connect("/v1/embeddings", Some(&texts));
    server.wait_for("mainstem_num_requests_running", 2.0);
    drop(client);
    server.wait_for("mainstem_clients_gone_total", 1.0);
    assert_eq!(server.metric("mainstem_e2e_request_latency_seconds_count"), 1.0);
}

#[test]
fn the_first_sigterm_drains_and_the_program_ends_well() {
    let mut server = Server::start("gqa", &["--slots", "2"]);
    let mut long = body(0, true);
    long["max_tokens"] = 100.into();
    let mut client = server.connect("/v1/completions", Some(&long));
    let mut answer = vec![0; 64];
    client.read_exact(&mut answer).expect("the stream begins");
    server.signal("TERM");
    client.read_to_end(&mut answer).expect("the stream comes to its end");
    let (status, text) = split(&answer);
    assert_eq!((status, Streamed::parse(&text).ids.len()), (200, 100));
    assert!(server.exit().success());
}

#[test]
fn errors_name_what_is_wrong() {
    let server = Server::start("gqa", &[]);
    let cases = [
        (json!({"prompt": "a", "temperature": -1.0}), 400, "temperature"),
        (json!({"prompt": "a", "max_tokens": 100_000}), 400, "100000"),
        (json!({"prompt": [1, 99_999]}), 400, "99999"),
        (json!({"prompt": "a", "presence_penalty": 3.0}), 400, "presence_penalty"),
        (json!({"prompt": "a", "model": "another"}), 404, "another"),
    ];
    for (body, status, named) in cases {
        let (got, answer) = server.post(body.clone());
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        assert!(got == status && message.contains(named), "{body}: {got} {answer}");
    }
    assert_eq!(server.ask("/health", None).0, 200);
    let (status, models) = server.ask("/v1/models", None);
    assert!(status == 200 && models.contains("\"gqa\""), "{models}");
}

/// Requests a recorded story, streaming or not, and compares it.
fn check_story(server: &Server, story: &Story, stream: bool) {
    let body = json!({
        "prompt": story.prompt,
        "max_tokens": story.new_ids.len(),
        "temperature": 0,
        "echo": true,
        "ignore_eos": true,
        "return_token_ids": true,
        "stream": stream,
    });
    let (text, ids) = if stream {
        let streamed = server.stream(&body);
        (streamed.text, streamed.ids)
    } else {
        let (status, answer) = server.post(body);
        assert_eq!(status, 200, "{answer}");
        let choice = &answer["choices"][0];
        let ids = choice["token_ids"].as_array().into_iter().flatten().filter_map(Value::as_u64);
        (choice["text"].as_str().unwrap_or_default().to_owned(), ids.collect())
    };
    let sure = story.sure_ids();
    assert!(ids.iter().copied().zip(sure).all(|(ours, theirs)| ours == u64::from(*theirs)), "{text}");
    assert_eq!(ids.len(), story.new_ids.len());
    if sure.len() == story.new_ids.len() {
        assert_eq!(text, story.text);
    }
}

/// Recorded texts of a trained model, each alone, and again among thirty-two mixed requests.
#[test]
fn stories260k_generates_its_recorded_texts_in_any_batch() {
    let Some(folder) = stories() else { return };
    let stories = Story::all(&folder);
    for model in ["hf", "stories260K.bin"] {
        let server = Server::with_model(&folder.join(model), &["--slots", "8", "--token-budget", "32"]);
        stories.iter().for_each(|story| check_story(&server, story, false));
        std::thread::scope(|scope| {
            for number in 0..32u64 {
                let (server, stories) = (&server, &stories);
                scope.spawn(move || match number % 4 {
                    0 => check_story(server, &stories[number as usize / 4 % stories.len()], number % 8 == 0),
                    _ => assert_eq!(server.post(body(number, false)).0, 200),
                });
            }
        });
    }
}
