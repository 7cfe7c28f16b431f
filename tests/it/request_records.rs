//! Records of requests outside of the API: traces, for which a small collector listens, and the inflight log.

use crate::common::{PATIENCE, fixture, mainstem, signal, wait_for_exit};
use crate::http::split;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::KeyValue;
use opentelemetry_proto::tonic::common::v1::any_value::Value as Any;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

/// A server of the fixture `gqa`.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start(flags: &[&str]) -> Server {
        let mut command = mainstem();
        command.arg("serve").arg(fixture("gqa")).args(["--threads", "2", "--port", "0"]).args(flags);
        // A batch of spans is sent soon.
        command.env("OTEL_BSP_SCHEDULE_DELAY", "10").stderr(Stdio::piped());
        let mut child = command.spawn().expect("the program starts");
        let mut log = BufReader::new(child.stderr.take().expect("it is piped"));
        let mut line = String::new();
        let address = loop {
            line.clear();
            assert_ne!(log.read_line(&mut line).expect("the log is read"), 0, "the server does not listen");
            if let Some((_, rest)) = line.split_once("listening on http://") {
                break rest.split_whitespace().next().expect("an address follows").to_owned();
            }
        };
        std::thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
        Server { child, address }
    }

    fn ask(&self, method: &str, path: &str, headers: &str, body: &str) -> (u16, String) {
        let mut stream = TcpStream::connect(&self.address).expect("the server accepts");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
        let length = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\
             Content-Length: {length}\r\n\r\n{body}"
        )
        .expect("the request is sent");
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).expect("the answer comes to its end");
        split(&answer)
    }

    fn complete(&self, headers: &str, tokens: usize) -> Value {
        let body = json!({ "prompt": "the rain", "max_tokens": tokens, "ignore_eos": true });
        let (status, body) = self.ask("POST", "/v1/completions", headers, &body.to_string());
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).expect("it is JSON")
    }

    /// Ends the server as a service manager does.
    fn stop(&mut self) {
        signal(&self.child, "TERM");
        assert_eq!(wait_for_exit(&mut self.child).code(), Some(0));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A collector, which passes on the spans that it gets.
struct Collector {
    url: String,
    spans: Receiver<Span>,
}

impl Collector {
    fn start() -> Collector {
        let listener = TcpListener::bind("127.0.0.1:0").expect("there is a free port");
        let url = format!("http://{}/v1/traces", listener.local_addr().expect("it is bound"));
        let (sender, spans) = channel();
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let mut reader = BufReader::new(stream);
                while let Some(body) = read_request(&mut reader) {
                    let request = ExportTraceServiceRequest::decode(&*body).expect("it is a request");
                    let scopes = request.resource_spans.into_iter().flat_map(|it| it.scope_spans);
                    // The test may have its spans.
                    scopes.flat_map(|it| it.spans).for_each(|span| _ = sender.send(span));
                    let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
                    reader.get_mut().write_all(answer).expect("the answer is sent");
                }
            }
        });
        Collector { url, spans }
    }

    /// Returns the next `count` spans by their names.
    fn spans(&self, count: usize) -> BTreeMap<String, Span> {
        let next = |_| self.spans.recv_timeout(PATIENCE).expect("a span comes");
        (0..count).map(next).map(|span| (span.name.clone(), span)).collect()
    }
}

/// Reads the body of a request; `None` at the end of the connection.
fn read_request(reader: &mut BufReader<TcpStream>) -> Option<Vec<u8>> {
    let mut length = 0;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line).ok()? == 0 {
            return None;
        }
        let line = line.trim_end().to_ascii_lowercase();
        if let Some(value) = line.strip_prefix("content-length:") {
            length = value.trim().parse().expect("it is a number");
        }
        if line.is_empty() {
            break;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    Some(body)
}

fn attribute<'a>(attributes: &'a [KeyValue], name: &str) -> Option<&'a Any> {
    let found = attributes.iter().find(|attribute| attribute.key == name)?;
    found.value.as_ref()?.value.as_ref()
}

const TRACE: [u8; 16] = [0x4b, 0xf9, 0x2f, 0x35, 0x77, 0xb3, 0x4d, 0xa6, 0xa3, 0xce, 0x92, 0x9d, 0, 0, 0, 1];
const CALLER: [u8; 8] = [0, 0xf0, 0x67, 0xaa, 0x0b, 0xa9, 0x02, 0xb7];

fn traceparent(flags: &str) -> String {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    format!("traceparent: 00-{}-{}-{flags}\r\n", hex(&TRACE), hex(&CALLER))
}

/// The caller's span is the parent of that of the HTTP request, which is the parent of that of the choice,
/// which has the phases. A caller who is not sampled is not traced.
#[test]
fn a_request_is_traced_from_its_caller_to_its_end() {
    let collector = Collector::start();
    let server = Server::start(&["--otlp-traces-endpoint", &collector.url]);
    // Their spans would come first.
    server.complete(&traceparent("00"), 4);
    server.ask("GET", "/v1/models", &traceparent("01"), "");
    assert_eq!(server.ask("POST", "/ping", &traceparent("01"), "").0, 200);
    server.complete(&(traceparent("01") + "X-Request-Id: the-request\r\n"), 4);
    let spans = collector.spans(5);
    let (http, choice) = (&spans["POST /v1/completions"], &spans["text_completion gqa"]);
    assert!(spans.values().all(|span| span.trace_id == TRACE), "{spans:?}");
    assert_eq!((&*http.parent_span_id, &choice.parent_span_id), (&CALLER[..], &http.span_id));
    assert_eq!(attribute(&http.attributes, "http.response.status_code"), Some(&Any::IntValue(200)));
    let of_choice = |name| attribute(&choice.attributes, name);
    assert_eq!(of_choice("gen_ai.usage.output_tokens"), Some(&Any::IntValue(4)));
    assert_eq!(of_choice("gen_ai.request.model"), Some(&Any::StringValue("gqa".into())));
    assert_eq!(of_choice("mainstem.request.id"), Some(&Any::StringValue("the-request".into())));
    assert_eq!(of_choice("mainstem.slot"), Some(&Any::IntValue(0)));
    let mut moment = choice.start_time_unix_nano;
    for phase in ["queue", "prefill", "decode"] {
        let span = &spans[phase];
        assert_eq!((&span.parent_span_id, span.start_time_unix_nano), (&choice.span_id, moment), "{phase}");
        moment = span.end_time_unix_nano;
    }
    let events: Vec<_> = choice.events.iter().map(|event| (&*event.name, event.time_unix_nano)).collect();
    assert_eq!(events[0], ("first_token", spans["decode"].start_time_unix_nano));
    assert_eq!(events[1], ("end", choice.end_time_unix_nano));
    assert!(moment <= choice.end_time_unix_nano);
    // The span of a stream lasts as long as its body.
    let body = json!({ "prompt": "the rain", "max_tokens": 4, "ignore_eos": true, "stream": true });
    let (status, events) = server.ask("POST", "/v1/completions", &traceparent("01"), &body.to_string());
    assert!(status == 200 && events.ends_with("data: [DONE]\n\n"), "{events}");
    let spans = collector.spans(5);
    let (http, choice) = (&spans["POST /v1/completions"], &spans["text_completion gqa"]);
    assert_eq!((&choice.parent_span_id, &*http.trace_id), (&http.span_id, &TRACE[..]));
    assert!(http.end_time_unix_nano >= choice.end_time_unix_nano, "{http:?} {choice:?}");
    // A refused request has the span of HTTP only.
    assert_eq!(server.ask("POST", "/v1/completions", &traceparent("01"), "{}").0, 400);
    let refused = &collector.spans(1)["POST /v1/completions"];
    assert_eq!(attribute(&refused.attributes, "http.response.status_code"), Some(&Any::IntValue(400)));
}

/// A request without its key cannot fill the space for spans that wait.
#[test]
fn a_request_without_its_key_is_not_traced() {
    let collector = Collector::start();
    let server = Server::start(&["--otlp-traces-endpoint", &collector.url, "--api-key", "the-key"]);
    let ask = |key: &str| server.ask("POST", "/v1/completions", &(traceparent("01") + key), "{}").0;
    assert_eq!((ask(""), ask("Authorization: Bearer the-key\r\n")), (401, 400));
    let first = &collector.spans(1)["POST /v1/completions"];
    assert_eq!(attribute(&first.attributes, "http.response.status_code"), Some(&Any::IntValue(400)));
}

/// Requests are answered, and the spans that nobody gets are counted.
#[test]
fn a_collector_that_is_down_costs_spans_only() {
    let free = TcpListener::bind("127.0.0.1:0").expect("there is a free port");
    let url = format!("http://{}/v1/traces", free.local_addr().expect("it is bound"));
    drop(free);
    let mut server = Server::start(&["--otlp-traces-endpoint", &url]);
    server.complete("", 4);
    let began = Instant::now();
    loop {
        let metrics = server.ask("GET", "/metrics", "", "").1;
        let lost = metrics
            .lines()
            .find(|line| line.starts_with("mainstem_trace_spans_total{") && line.contains("result=\"lost\""));
        let lost = lost.expect("the metric is there").rsplit(' ').next();
        if lost == Some("5") {
            break;
        }
        assert!(began.elapsed() < PATIENCE, "lost spans: {lost:?}");
    }
    server.stop();
}

/// Each request has a line, also one of a second server that appends to the file.
#[test]
fn the_inflight_log_has_a_line_for_each_request() {
    let path = std::env::temp_dir().join(format!("mainstem-inflight-{}.csv", std::process::id()));
    let name = path.display().to_string();
    let mut prompt_tokens = Value::Null;
    for id in ["first", "a,b\"c"] {
        let mut server = Server::start(&["--inflight-log", &name]);
        let answer = server.complete(&format!("X-Request-Id: {id}\r\n"), 4);
        assert_eq!(server.ask("POST", "/v1/completions", "", "{}").0, 400);
        server.stop();
        prompt_tokens = answer["usage"]["prompt_tokens"].clone();
    }
    let text = std::fs::read_to_string(&path).expect("the log is there");
    std::fs::remove_file(&path).expect("it can be removed");
    let lines: Vec<_> = text.lines().collect();
    assert_eq!(lines.len(), 3, "{text}");
    let columns: Vec<_> = lines[0].split(',').collect();
    for (line, id) in lines[1..].iter().zip(["\"first\",", "\"a,b\"\"c\","]) {
        let values: Vec<_> = line.strip_prefix(id).expect("its id").split(',').collect();
        let value = |name| values[columns.iter().position(|column| *column == name).expect("a column") - 1];
        let number = |name| value(name).parse::<f64>().unwrap_or_else(|_| panic!("{name}: {line}"));
        assert!(number("queue_ms") <= number("first_token_ms"), "{line}");
        assert!(number("first_token_ms") <= number("elapsed_ms"), "{line}");
        assert_eq!([value("generated_tokens"), value("slot"), value("reason")], ["4", "0", "length"]);
        assert_eq!(prompt_tokens, number("prompt_tokens") as u64, "{line}");
    }
}

/// A file that cannot be written is an error at start.
#[test]
fn an_inflight_log_that_cannot_be_opened_is_named() {
    let mut command = mainstem();
    command.args(["serve", "--port", "0", "--inflight-log", "/no/such/folder/log.csv"]);
    let output = command.output().expect("the program starts");
    let log = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && log.contains("/no/such/folder/log.csv (server.inflight_log)"),
        "{log}"
    );
}
