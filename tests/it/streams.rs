//! Tests of every way in which a request can end, through HTTP and the real actors: the last event that the
//! client reads, and the release of slot, pages and permit. The device follows a script.

use crate::common::{all_home, config, engine_with, fixture, within};
use actix_web::rt::spawn;
use actix_web::rt::task::JoinHandle;
use actix_web::web::block;
use mainstem::actors::device::ExecutorFactory;
use mainstem::actors::engine::Engine;
use mainstem::config::ServerConfig;
use mainstem::model::executor::{Executor, ExecutorReport};
use mainstem::request::Request;
use mainstem::server::{ServeParts, Server, ShutdownOutcome};
use mainstem::telemetry;
use mainstem_kernels::{DeviceError, HandoffPorts, SampleMode, StepBatch, StepOutput};
use serde_json::{Value, json};
use std::collections::{BTreeSet, VecDeque};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

const SLOTS: usize = 4;

/// The device's action in a step.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Action {
    /// Sample this token for every sequence.
    Sample(u32),
    Fail,
    Panic,
    /// Sample a token for every sequence, after the test releases the step.
    Hold,
    /// No sequence should be left: a step with one is counted.
    Stray,
}

/// The next actions; after them, the same token is sampled forever.
#[derive(Default)]
struct Script {
    steps: Mutex<VecDeque<Action>>,
    /// Number of held steps that the test has released.
    let_go: Mutex<usize>,
    /// Whether a step is held now.
    holds: AtomicBool,
    strays: AtomicUsize,
    changed: Condvar,
}

/// The token sampled after the end of the script.
const FILLER: u32 = 40;

impl Script {
    fn write(&self, steps: &[Action]) {
        self.steps.lock().expect("no test panics with it").extend(steps);
    }

    fn let_go(&self) {
        *self.let_go.lock().expect("no test panics with it") += 1;
        self.changed.notify_all();
    }

    fn wait(&self) {
        let free = self.let_go.lock().expect("no test panics with it");
        self.holds.store(true, Ordering::SeqCst);
        *self.changed.wait_while(free, |free| *free == 0).expect("no test panics with it") -= 1;
        self.holds.store(false, Ordering::SeqCst);
    }
}

struct Scripted {
    inner: Box<dyn Executor>,
    script: Arc<Script>,
}

impl Executor for Scripted {
    fn run(
        &mut self,
        batch: &StepBatch,
        flow: HandoffPorts<'_>,
        out: &mut StepOutput,
    ) -> Result<(), DeviceError> {
        let samples = batch.sampling.iter().any(|sample| sample.mode == SampleMode::Sample);
        let next = samples.then(|| self.script.steps.lock().expect("no test panics with it").pop_front());
        let next = next.flatten();
        if next == Some(Action::Hold) {
            // Before the step's last layer, after which the next step is scheduled.
            self.script.wait();
        }
        self.inner.run(batch, flow, out)?;
        let token = match next {
            None | Some(Action::Hold) => FILLER,
            Some(Action::Sample(token)) => token,
            Some(Action::Fail) => return Err(DeviceError::Fault("the test's device fails".into())),
            Some(Action::Panic) => panic!("the test's device panics"),
            Some(Action::Stray) => {
                self.script.strays.fetch_add(1, Ordering::SeqCst);
                FILLER
            }
        };
        out.tokens.iter_mut().for_each(|row| row.token = token);
        Ok(())
    }

    fn report(&self) -> ExecutorReport {
        self.inner.report()
    }
}

/// A server with an engine whose device is scripted.
struct House {
    engine: Engine,
    address: SocketAddr,
    script: Arc<Script>,
    stops: UnboundedSender<()>,
    ending: JoinHandle<anyhow::Result<ShutdownOutcome>>,
}

impl House {
    async fn open(drain_timeout: Duration, configure: impl FnOnce(&mut ServerConfig)) -> House {
        let script = Arc::new(Script::default());
        let scripted = |mut factory: ExecutorFactory| -> ExecutorFactory {
            let script = script.clone();
            Box::new(move |stage| Ok(Box::new(Scripted { inner: factory(stage)?, script: script.clone() })))
        };
        let template = fixture("chat/renamed.jinja").display().to_string();
        let engine = engine_with("gqa", &[("model.chat_template", template.into())], scripted).await;
        let mut server = config(&fixture("gqa"), &[]).server;
        server.workers = 1;
        configure(&mut server);
        let server = Server::bind(ServeParts::from(&engine), server).expect("a port is free");
        let (address, (stops, stopped)) = (server.address(), unbounded_channel());
        let ending = spawn(server.run(stopped, drain_timeout));
        House { engine, address, script, stops, ending }
    }

    /// Sends a request and returns a future of its complete answer.
    fn ask(&self, body: &Value) -> impl Future<Output = Answer> + use<> {
        let (address, body) = (self.address, body.clone());
        let exchange = spawn(block(move || {
            let mut answer = Vec::new();
            connect(address, &body).read_to_end(&mut answer).expect("the answer comes to its end");
            Answer::read(&answer, body["stream"] == true, body["n"].as_u64().unwrap_or(1))
        }));
        async { exchange.await.expect("the client's task").expect("the client's thread") }
    }

    /// Waits until the device holds a step.
    async fn until_held(&self) {
        until(|| self.script.holds.load(Ordering::SeqCst)).await;
    }

    /// Releases the held step and waits until all resources are released. No sequence may be computed after
    /// it.
    async fn all_home_at_once(&self) {
        self.script.let_go();
        all_home(&self.engine, SLOTS).await;
        self.script.steps.lock().expect("no test panics with it").clear();
        assert_eq!(self.script.strays.load(Ordering::SeqCst), 0, "steps for nobody");
    }

    /// Waits for the end of the server after it was stopped.
    async fn ended(self) -> ShutdownOutcome {
        let ending = self.ending.await.expect("the server's task").expect("the server ends well");
        self.engine.stop();
        ending
    }

    async fn close(self) -> ShutdownOutcome {
        let _ = self.stops.send(());
        self.ended().await
    }
}

/// Posts a body to its API.
fn connect(address: SocketAddr, body: &Value) -> TcpStream {
    let path = if body["messages"].is_null() { "/v1/completions" } else { "/v1/chat/completions" };
    let mut stream = TcpStream::connect(address).expect("the server accepts");
    stream.set_read_timeout(Some(crate::common::PATIENCE)).expect("a timeout can be set");
    let body = body.to_string();
    let head = "HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length";
    stream
        .write_all(format!("POST {path} {head}: {}\r\n\r\n{body}", body.len()).as_bytes())
        .expect("it is sent");
    stream
}

/// The final result seen by a client.
#[derive(Debug, PartialEq)]
struct Answer {
    text: String,
    /// The finish reason, or an error's code.
    end: String,
    stop_reason: Value,
}

impl Answer {
    /// Reads an answer, and checks that a stream is one: of each choice text and then one end, or an
    /// error that ends them all, then `[DONE]`, then nothing.
    fn read(answer: &[u8], stream: bool, choices: u64) -> Answer {
        let (status, body) = crate::http::split(answer);
        if !stream {
            let json: Value = serde_json::from_str(&body).unwrap_or_else(|_| panic!("not JSON: {body}"));
            assert_eq!(status == 200, json.get("error").is_none(), "{status} {json}");
            return Answer::of(&json).unwrap_or_else(|| panic!("no end: {json}"));
        }
        if status != 200 {
            return Answer::of(&serde_json::from_str(&body).expect("an error is JSON")).expect("an error");
        }
        let mut events: Vec<&str> = body.split("\n\n").collect();
        assert_eq!(events.pop(), Some(""), "the last event is closed: {body}");
        assert_eq!(events.pop(), Some("data: [DONE]"), "{body}");
        let mut open: BTreeSet<u64> = (0..choices).collect();
        let mut last = None;
        let mut text = String::new();
        for event in events {
            let json: Value =
                serde_json::from_str(event.strip_prefix("data: ").expect("data")).expect("JSON");
            let index = json["choices"][0]["index"].as_u64();
            assert!(index.map_or(!open.is_empty(), |index| open.contains(&index)), "after the end: {body}");
            text += choice_text(&json["choices"][0]);
            last = Answer::of(&json);
            match (&last, index) {
                (Some(_), Some(index)) => _ = open.remove(&index),
                // An error ends them all.
                (Some(_), None) => open.clear(),
                (None, _) => {}
            }
        }
        assert!(open.is_empty(), "not every choice ends: {body}");
        Answer { text, ..last.unwrap_or_else(|| panic!("no end: {body}")) }
    }

    fn of(json: &Value) -> Option<Answer> {
        let choice = &json["choices"][0];
        let end = json["error"]["code"].as_str().or(choice["finish_reason"].as_str())?.to_owned();
        let text = choice_text(choice).to_owned();
        Some(Answer { text, end, stop_reason: choice["stop_reason"].clone() })
    }

    fn is(&self, text: &str, end: &str, stop_reason: Value) {
        assert_eq!((&*self.text, &*self.end, &self.stop_reason), (text, end, &stop_reason));
    }
}

/// Returns the text of a choice of either API.
fn choice_text(choice: &Value) -> &str {
    let places = [&choice["text"], &choice["message"]["content"], &choice["delta"]["content"]];
    places.into_iter().find_map(Value::as_str).unwrap_or_default()
}

/// The API, and whether the answer is streamed.
#[derive(Clone, Copy, Debug)]
struct Way {
    chat: bool,
    stream: bool,
}

const WAYS: [Way; 4] = [
    Way { chat: false, stream: false },
    Way { chat: false, stream: true },
    Way { chat: true, stream: false },
    Way { chat: true, stream: true },
];

fn body(way: Way, more: Value) -> Value {
    let mut body = json!({ "max_tokens": 4, "stream": way.stream });
    match way.chat {
        true => body["messages"] = json!([{ "role": "user", "content": "?" }]),
        false => body["prompt"] = json!([5, 6, 7]),
    }
    for (key, value) in more.as_object().expect("an object") {
        body[key] = value.clone();
    }
    body
}

#[actix::test]
async fn by_tokens_and_lengths_and_texts() {
    let house = House::open(crate::common::PATIENCE, |_| {}).await;
    let eos = *house.engine.model.eos.first().expect("the fixture has an end token");
    let ids = [65, 66, 67, 68];
    let text = |ids: &[u32]| house.engine.tokenizer.decode(ids, true).expect("they are tokens");
    assert!(text(&ids).is_ascii() && text(&ids).len() >= 4, "four tokens with a text: {}", text(&ids));
    let actions = ids.map(Action::Sample);
    // From the middle of the second token's text to the middle of the third's, as far as their lengths allow.
    let across = text(&ids)[text(&ids[..1]).len()..text(&ids[..3]).len()].to_owned();
    let before = text(&ids[..1]);
    for way in WAYS {
        let ask = async |steps: &[Action], more: Value| {
            house.script.write(steps);
            let answer = house.ask(&body(way, more)).await;
            all_home(&house.engine, SLOTS).await;
            house.script.steps.lock().expect("no test panics with it").clear();
            answer
        };
        ask(&actions, json!({})).await.is(&text(&ids), "length", Value::Null);
        let stopped = [actions[0], Action::Sample(eos)];
        ask(&stopped, json!({})).await.is(&text(&ids[..1]), "stop", Value::Null);
        ask(&[Action::Sample(eos)], json!({})).await.is("", "stop", Value::Null);
        let params = json!({ "stop_token_ids": [67] });
        ask(&actions, params).await.is(&text(&ids[..2]), "stop", json!(67));
        let params = json!({ "stop": [&across], "max_tokens": LONG });
        ask(&actions, params).await.is(&before, "stop", json!(across));
        if !way.chat {
            let params = json!({ "max_tokens": 0, "echo": true });
            ask(&[], params).await.is(&text(&[5, 6, 7]), "length", Value::Null);
        }
        let params = json!({ "n": 3, "max_tokens": 2 });
        assert_eq!(ask(&actions, params).await.end, "length");
    }
    assert_eq!(house.close().await, ShutdownOutcome::Drained);
}

#[actix::test]
async fn by_a_fault_before_the_first_token_or_after() {
    let house = House::open(crate::common::PATIENCE, |_| {}).await;
    for way in WAYS {
        for fault in [Action::Fail, Action::Panic] {
            for steps in [vec![fault], vec![Action::Sample(65), fault]] {
                house.script.write(&steps);
                let answer = house.ask(&body(way, json!({}))).await;
                assert_eq!(answer.end, "device_failed");
                all_home(&house.engine, SLOTS).await;
            }
        }
        assert_eq!(house.ask(&body(way, json!({}))).await.end, "length", "and then all is well again");
    }
    assert_eq!(house.close().await, ShutdownOutcome::Drained);
}

/// Returns the number of replies whose clients disconnected in this process. No other test causes any.
fn hung_up() -> u64 {
    let page = telemetry::install(None).render();
    let line =
        page.lines().find(|line| line.starts_with("mainstem_clients_gone_total")).expect("it is there");
    line.rsplit(' ').next().expect("a value").parse().expect("a number")
}

/// Waits until a condition holds, yielding to other tasks.
async fn until(is_so: impl Fn() -> bool) {
    let rounds = async {
        while !is_so() {
            tokio::task::yield_now().await;
        }
    };
    within(rounds).await;
}

/// Returns a held step, followed by as many steps as an uninterrupted request of [`LONG`] would take.
fn held_and_then_none() -> Vec<Action> {
    let mut steps = vec![Action::Stray; LONG as usize];
    steps[0] = Action::Hold;
    steps
}

const LONG: u64 = 60;

/// Requests in slots, or queued because all slots are taken.
#[actix::test]
async fn by_the_client_who_hangs_up() {
    let house = House::open(crate::common::PATIENCE, |_| {}).await;
    for way in WAYS {
        for n in [1, SLOTS, SLOTS + 3] {
            let before = hung_up();
            house.script.write(&held_and_then_none());
            let client = connect(house.address, &body(way, json!({ "n": n, "max_tokens": LONG })));
            house.until_held().await;
            drop(client);
            until(|| hung_up() >= before + n as u64).await;
            house.all_home_at_once().await;
        }
    }
    assert_eq!(house.close().await, ShutdownOutcome::Drained);
}

#[actix::test]
async fn by_the_end_of_the_requests_time() {
    let limit = Duration::from_secs(1);
    let house = House::open(crate::common::PATIENCE, |server| server.request_timeout = Some(limit)).await;
    for way in WAYS {
        for n in [1, SLOTS, SLOTS + 3] {
            house.script.write(&held_and_then_none());
            let answer = house.ask(&body(way, json!({ "n": n, "max_tokens": LONG })));
            house.until_held().await;
            assert_eq!(answer.await.end, "request_timeout");
            house.all_home_at_once().await;
        }
    }
    assert_eq!(house.close().await, ShutdownOutcome::Drained);
}

/// If a client does not read, its body is not polled, but its sequences still end at the deadline.
#[actix::test]
async fn by_the_end_of_its_time_though_nobody_reads() {
    let limit = Duration::from_secs(1);
    let house = House::open(crate::common::PATIENCE, |server| server.request_timeout = Some(limit)).await;
    let request = Request {
        time_limit: Some(limit),
        ignore_eos: true,
        ..Request::greedy("unread", [5, 6], LONG as u32)
    };
    let deadline = request.deadline().expect("it has one");
    house.script.write(&held_and_then_none());
    let events = house.engine.intake.submit(vec![request]).await.expect("it is taken in");
    house.until_held().await;
    until(|| Instant::now() >= deadline).await;
    house.all_home_at_once().await;
    drop(events);
    assert_eq!(house.close().await, ShutdownOutcome::Drained);
}

#[actix::test]
async fn by_itself_while_the_server_drains() {
    for way in WAYS {
        let house = House::open(crate::common::PATIENCE, |_| {}).await;
        house.script.write(&[Action::Hold]);
        let answer = house.ask(&body(way, json!({})));
        house.until_held().await;
        house.stops.send(()).expect("the server runs");
        house.script.let_go();
        assert_eq!(answer.await.end, "length");
        all_home(&house.engine, SLOTS).await;
        assert_eq!(house.ended().await, ShutdownOutcome::Drained);
    }
}

#[actix::test]
async fn by_the_end_of_the_servers_patience() {
    for way in WAYS {
        for patience in [Duration::ZERO, crate::common::PATIENCE] {
            let house = House::open(patience, |_| {}).await;
            house.script.write(&held_and_then_none());
            let answer = house.ask(&body(way, json!({ "n": SLOTS + 3, "max_tokens": LONG })));
            house.until_held().await;
            house.stops.send(()).expect("the server runs");
            // With an unlimited drain time, a second stop request is needed.
            let ending = if patience.is_zero() {
                ShutdownOutcome::TimedOut
            } else {
                house.stops.send(()).expect("the server runs");
                ShutdownOutcome::Aborted
            };
            assert_eq!(answer.await.end, "shut_down");
            house.all_home_at_once().await;
            assert_eq!(house.ended().await, ending);
        }
    }
}
