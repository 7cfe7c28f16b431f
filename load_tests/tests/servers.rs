//! The load tester against servers on real TCP: good ones, broken ones, stalled ones.
//!
//! Invariant: every server answers a known number of connections, and waits for events, never for time.

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    process::Command,
    sync::{Arc, mpsc},
    thread,
    time::Duration,
};

use load_tests::{
    client::{FailureKind, Outcome, Sample},
    measure::Summary,
    requests::Load,
    run::{Record, Settings, run},
};

const HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
const TOKEN: &str =
    "data: {\"choices\":[{\"index\":0,\"text\":\"a\",\"token_ids\":[5],\"finish_reason\":null}]}\n\n";
const DONE: &str = "data: [DONE]\n\n";

fn listen() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    (listener, address)
}

/// Answers `connections` connections, each on a thread of its own, its request read.
fn serve(connections: usize, answer: impl Fn(TcpStream, String) + Send + Sync + 'static) -> SocketAddr {
    let (listener, address) = listen();
    let answer = Arc::new(answer);
    thread::spawn(move || {
        for stream in listener.incoming().take(connections) {
            let (stream, answer) = (stream.unwrap(), Arc::clone(&answer));
            thread::spawn(move || {
                let body = read_request(&stream);
                answer(stream, body);
            });
        }
    });
    address
}

/// The body of the request.
fn read_request(stream: &TcpStream) -> String {
    let mut reader = BufReader::new(stream);
    let mut length = 0;
    let mut line = String::new();
    while reader.read_line(&mut line).unwrap() > 2 {
        if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
            length = value.trim().parse().unwrap();
        }
        line.clear();
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).unwrap();
    String::from_utf8(body).unwrap()
}

fn chunk(text: &str) -> String {
    format!("{:x}\r\n{text}\r\n", text.len())
}

/// Every token asked for, in one chunk each, and a proper end.
fn answer_well(mut stream: TcpStream, body: String) {
    let body: serde_json::Value = serde_json::from_str(&body).unwrap();
    let mut answer = HEAD.to_string();
    (0..body["max_tokens"].as_u64().unwrap()).for_each(|_| answer += &chunk(TOKEN));
    answer += &chunk(DONE);
    answer += "0\r\n\r\n";
    stream.write_all(answer.as_bytes()).unwrap();
}

fn settings(address: SocketAddr, requests: usize) -> Settings {
    Settings {
        url: format!("http://{address}"),
        model: Some("m".into()),
        load: Load {
            requests,
            prompt: "4-8".parse().unwrap(),
            output: "3-6".parse().unwrap(),
            vocab: 100,
            temperature: 0.0,
            seed: 1,
            hangup_share: 0.0,
            hangup_after: 2,
        },
        arrivals: "all".parse().unwrap(),
        request_timeout: Duration::from_secs(60),
        time_limit: Duration::from_secs(60),
    }
}

fn run_to_end(settings: &Settings) -> Record {
    actix_rt::System::new().block_on(run(settings)).unwrap()
}

fn kinds(record: &Record) -> Vec<FailureKind> {
    let kind = |sample: &Sample| match &sample.outcome {
        Outcome::Failed(failure) => Some(failure.kind),
        Outcome::Completed | Outcome::HungUp => None,
    };
    record.samples.iter().filter_map(kind).collect()
}

/// Answers `count` requests, and none of them before all have come.
fn serve_once_all_are_there(count: usize) -> SocketAddr {
    let (listener, address) = listen();
    thread::spawn(move || {
        let streams: Vec<TcpStream> = listener.incoming().take(count).map(Result::unwrap).collect();
        for stream in streams {
            let body = read_request(&stream);
            answer_well(stream, body);
        }
    });
    address
}

#[test]
fn a_good_server_completes_every_request_in_full() {
    let address = serve(20, answer_well);
    let record = run_to_end(&settings(address, 20));
    let summary = Summary::of(&record.samples);
    assert_eq!((summary.sent, summary.completed, record.unsent), (20, 20, 0));
    assert!(record.samples.iter().all(|s| s.output_len == s.output_len_asked));
    assert!(record.samples.iter().enumerate().all(|(index, s)| s.index == index));
    assert!(summary.per_second(summary.output_tokens) > 0.0);
}

#[test]
fn more_requests_are_in_flight_than_a_connection_pool_would_hold() {
    const REQUESTS: usize = 150;
    let address = serve_once_all_are_there(REQUESTS);
    let summary = Summary::of(&run_to_end(&settings(address, REQUESTS)).samples);
    assert_eq!((summary.completed, summary.peak_concurrency), (REQUESTS, REQUESTS));
}

#[test]
fn a_stalled_server_shows_in_the_percentiles() {
    const REQUESTS: usize = 20;
    const GAP_MS: u32 = 5;
    // A client that waited for an answer before it went on would never send the last request.
    let address = serve_once_all_are_there(REQUESTS);
    let arrivals = format!("constant:{GAP_MS}").parse().unwrap();
    let record = run_to_end(&Settings { arrivals, ..settings(address, REQUESTS) });
    for (index, sample) in record.samples.iter().enumerate() {
        let stall = Duration::from_millis(u64::from(GAP_MS)) * (REQUESTS - 1 - index) as u32;
        assert!(sample.ttft().unwrap() >= stall, "request {index}: {sample:?}");
    }
    let ttft = Summary::of(&record.samples).ttft.unwrap();
    assert!(ttft.p99 >= f64::from(GAP_MS) * (REQUESTS - 2) as f64, "{ttft:?}");
}

#[test]
fn clients_that_leave_really_leave_and_are_no_failures() {
    let (left, seen) = mpsc::channel();
    let address = serve(4, move |mut stream, _| {
        stream.write_all(HEAD.as_bytes()).unwrap();
        // Goes on until the client is gone.
        while stream.write_all(chunk(TOKEN).as_bytes()).is_ok() {}
        left.send(()).unwrap();
    });
    let mut settings = settings(address, 4);
    settings.load.hangup_share = 1.0;
    let record = run_to_end(&settings);
    assert!(record.samples.iter().all(|s| s.outcome == Outcome::HungUp && s.output_len >= 2));
    assert_eq!(seen.iter().take(4).count(), 4);
}

#[test]
fn broken_answers_are_counted_by_kind() {
    let begun = format!("{HEAD}{}{}", chunk(TOKEN), chunk(TOKEN));
    let stream = |events: &str| format!("{HEAD}{}0\r\n\r\n", chunk(events));
    for (answer, kind, tokens) in [
        (String::new(), FailureKind::EarlyClose, 0),
        ("HTTP/1.1 200 O".into(), FailureKind::EarlyClose, 0),
        ("\x01\x02 rubbish\r\n\r\n".into(), FailureKind::BadHttp, 0),
        ("HTTP/1.1 500 X\r\ncontent-length: 4\r\n\r\noops".into(), FailureKind::Status(500), 0),
        ("HTTP/1.1 429 X\r\ncontent-length: 900\r\n\r\ncut".into(), FailureKind::Status(429), 0),
        ("HTTP/1.1 301 X\r\nlocation: /\r\ncontent-length: 0\r\n\r\n".into(), FailureKind::Status(301), 0),
        (begun.clone(), FailureKind::EarlyClose, 2),
        (format!("{begun}0\r\n\r\n"), FailureKind::EarlyClose, 2),
        (format!("{begun}zz\r\n"), FailureKind::EarlyClose, 2),
        ("HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n<html>\n</html>\n".into(), FailureKind::BadSse, 0),
        (stream("data: {\"choices\":[{\n\n"), FailureKind::BadSse, 0),
        (
            stream(&format!("{TOKEN}data: {{\"error\":{{\"message\":\"gone\"}}}}\n\n{DONE}")),
            FailureKind::ErrorEvent,
            1,
        ),
        (stream(DONE), FailureKind::NoTokens, 0),
    ] {
        let bytes = answer.clone();
        let address = serve(3, move |mut stream, _| stream.write_all(bytes.as_bytes()).unwrap());
        let record = run_to_end(&settings(address, 3));
        assert_eq!(kinds(&record), [kind; 3], "{answer:?}: {:?}", record.samples);
        assert!(record.samples.iter().all(|s| s.output_len == tokens), "{answer:?}");
    }
}

#[test]
fn a_closed_port_is_a_failure_to_connect() {
    let (listener, address) = listen();
    drop(listener);
    assert_eq!(kinds(&run_to_end(&settings(address, 3))), [FailureKind::Connect; 3]);
}

/// Begins an answer, or not, and then waits for the client to go.
fn serve_and_wait(connections: usize, begin: &'static str) -> SocketAddr {
    serve(connections, move |mut stream, _| {
        stream.write_all(begin.as_bytes()).unwrap();
        let _ = stream.read(&mut [0]);
    })
}

#[test]
fn answers_that_never_end_are_given_up() {
    for begin in ["", "HTTP/1.1 200 OK\r\ncontent-le", HEAD, "HTTP/1.1 503 X\r\ncontent-length: 9\r\n\r\n"] {
        let request_timeout = Duration::from_millis(60);
        let settings = Settings { request_timeout, ..settings(serve_and_wait(2, begin), 2) };
        let record = run_to_end(&settings);
        assert_eq!(kinds(&record), [FailureKind::Timeout; 2], "{begin:?}");
        assert!(record.samples.iter().all(|s| s.ended - s.sent >= request_timeout));
    }
}

#[test]
fn the_run_ends_at_its_limit() {
    let time_limit = Duration::from_millis(100);
    let arrivals = "constant:40".parse().unwrap();
    let settings = Settings { time_limit, arrivals, ..settings(serve_and_wait(3, ""), 1000) };
    let record = run_to_end(&settings);
    assert!(record.samples.len() <= 3, "nothing is due between 100 and 120 ms");
    assert_eq!(record.samples.len() + record.unsent, 1000);
    assert_eq!(kinds(&record), vec![FailureKind::TimeLimit; record.samples.len()]);
}

/// Runs the program against `address` and returns its exit code, its output and its JSON report.
fn program(address: SocketAddr, name: &str, extra: &[&str]) -> (i32, String, serde_json::Value) {
    let file = std::env::temp_dir().join(format!("load_tests-{}-{name}.json", std::process::id()));
    let output = Command::new(env!("CARGO_BIN_EXE_load_tests"))
        .args(["--url", &format!("http://{address}"), "--requests", "5", "--output-tokens", "4", "--json"])
        .arg(&file)
        .args(extra)
        .output()
        .unwrap();
    let report = std::fs::read(&file).map(|text| serde_json::from_slice(&text).unwrap()).unwrap_or_default();
    let _ = std::fs::remove_file(&file);
    let text = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
    (output.status.code().unwrap(), text, report)
}

#[test]
fn the_program_asks_for_the_model_reports_and_succeeds() {
    let address = serve(6, |mut stream, body| {
        if !body.is_empty() {
            assert!(body.contains("\"model\":\"tiny\""), "{body}");
            return answer_well(stream, body);
        }
        let models = "{\"object\":\"list\",\"data\":[{\"id\":\"tiny\",\"object\":\"model\"}]}";
        let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", models.len());
        stream.write_all((head + models).as_bytes()).unwrap();
    });
    let (code, text, report) = program(address, "good", &["--detailed"]);
    assert_eq!(code, 0, "{text}");
    assert!(text.contains("5 sent, 5 completed, 0 failed"), "{text}");
    assert_eq!(report["model_id"], "tiny");
    assert_eq!(report["completed"], 5);
    assert_eq!(report["total_output_tokens"], 20);
    assert_eq!(report["ttfts"].as_array().unwrap().len(), 5);
    assert!(report["p99_ttft_ms"].as_f64().unwrap() > 0.0);
}

#[test]
fn the_program_fails_with_its_requests_and_says_why_it_cannot_run() {
    let address = serve(5, |mut stream, _| {
        stream.write_all(b"HTTP/1.1 500 X\r\ncontent-length: 4\r\n\r\noops").unwrap()
    });
    let (code, text, report) = program(address, "bad", &["--model", "m"]);
    assert_eq!(code, 1, "{text}");
    assert!(text.contains("5 x status 500, first: oops"), "{text}");
    assert_eq!(report["failed"], 5);
    let (listener, address) = listen();
    drop(listener);
    let (code, text, _) = program(address, "none", &[]);
    assert_eq!(code, 2, "{text}");
    assert!(text.contains("/v1/models"), "{text}");
}
