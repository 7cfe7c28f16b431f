//! The documented memory budget, held against hostile traffic.

use crate::common::{PATIENCE, mainstem, signal};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::Stdio;
use std::time::Instant;

/// Connections that the server accepts in this test.
const CONNECTIONS: usize = 200;

fn connect(address: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(address).expect("the server accepts");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
    stream
}

/// Sends a completion request and returns its connection.
fn post(address: SocketAddr, body: &str) -> TcpStream {
    post_to(address, "/v1/completions", body)
}

/// Sends a request and returns its connection.
fn post_to(address: SocketAddr, path: &str, body: &str) -> TcpStream {
    let (mut stream, length) = (connect(address), body.len());
    let head = format!("POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n");
    let head = format!("{head}Content-Length: {length}\r\n\r\n");
    // A server that is full may close it.
    _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes()));
    stream
}

/// Reads a whole answer; empty if the connection was closed without one.
fn read(mut stream: TcpStream) -> String {
    let mut bytes = Vec::new();
    _ = stream.read_to_end(&mut bytes);
    String::from_utf8_lossy(&bytes).into_owned()
}

const GET: &[u8] = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";

/// Waits until as many sequences are queued, so that the requests before have been taken in.
fn wait_for_sequences(address: SocketAddr, count: usize) {
    let began = Instant::now();
    loop {
        let mut stream = connect(address);
        stream.write_all(GET).expect("it is sent");
        let metrics = read(stream);
        let line = metrics.lines().find(|line| line.starts_with("mainstem_num_requests_waiting{"));
        let waiting = line.and_then(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        if waiting.is_some_and(|waiting| waiting >= count as f64) {
            return;
        }
        assert!(began.elapsed() < PATIENCE, "{metrics}");
    }
}

/// Returns a value of `/proc/PID/status` in KiB.
fn status_kib(pid: u32, key: &str) -> f64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status.lines().find_map(|line| line.strip_prefix(key)).expect("the key is there");
    line.trim_matches([':', '\t', ' ']).trim_end_matches(" kB").trim().parse().expect("a number")
}

/// Returns the size of a part in the line of the budget, in MiB; 0 if it is not there.
fn part(line: &str, name: &str) -> f64 {
    let rest = line.split(&format!("{name} ")).nth(1).unwrap_or("0");
    let number = rest.split([',', '\n']).next().unwrap_or_default();
    number.parse().expect("a number of MiB")
}

/// Regression: unread streams and answers with log-probabilities took any amount of memory.
#[test]
#[cfg(target_os = "linux")]
fn hostile_clients_stay_within_the_memory_budget() {
    let mut command = mainstem();
    command.args(["serve", "--port", "0", "--threads", "2", "--max-connections", &CONNECTIONS.to_string()]);
    // So small that what is not bounded soon exceeds them.
    for (setting, size) in [
        ("SERVER_RESPONSE_MEMORY", "24MiB"),
        ("SERVER_REQUEST_MEMORY", "32MiB"),
        ("SERVER_BODY_LIMIT", "2MiB"),
        ("GRAMMAR_CACHE_SIZE", "1MiB"),
    ] {
        command.env(format!("MAINSTEM_{setting}"), size);
    }
    let mut child = command.stderr(Stdio::piped()).spawn().expect("the program starts");
    let mut log = BufReader::new(child.stderr.take().expect("it is piped"));
    let mut lines = String::new();
    while !lines.contains("listening on") {
        assert_ne!(log.read_line(&mut lines).expect("the log is read"), 0, "{lines}");
    }
    let rest = std::thread::spawn(move || std::io::copy(&mut log, &mut std::io::sink()));
    let address: SocketAddr = lines.trim_end().rsplit('/').next().and_then(|it| it.parse().ok()).expect("it");
    let budget = lines.split("at most ").nth(1).and_then(|rest| rest.split(' ').next());
    let budget_mib: f64 = budget.and_then(|mib| mib.parse().ok()).expect("the budget is in the log");
    // No conversation is rendered here.
    let budget_mib = budget_mib - part(&lines, "templates");

    let choices = r#""prompt": "Once", "logprobs": 20, "max_tokens": 100, "ignore_eos": true"#;
    let large = format!(r#"{{{choices}, "n": 64}}"#);
    let answers: Vec<_> = (0..2).map(|_| post(address, &large)).collect();
    // Streams of which nobody reads more than the first byte.
    let unread = format!(r#"{{{choices}, "n": 32, "stream": true}}"#);
    let slow: Vec<_> = (0..5).map(|_| post(address, &unread)).collect();
    slow.iter().for_each(|mut stream| stream.read_exact(&mut [0; 1]).expect("it begins"));
    wait_for_sequences(address, 193);
    let long = format!(r#"{{"prompt": "{}", "max_tokens": 1}}"#, "Once upon a time ".repeat(8 << 10));
    let prompts: Vec<_> = (0..8).map(|_| post(address, &long)).collect();
    // Requests that never end, on more connections than the server accepts.
    let heads: Vec<_> = (0..2 * CONNECTIONS)
        .map(|_| {
            let mut stream = connect(address);
            _ = stream.write_all(b"GET /health HTTP/1.1\r\nX-Long: ");
            _ = stream.write_all(&[b'x'; 100 << 10]);
            stream
        })
        .collect();
    // Written, each would take more than responses may.
    for answer in answers.into_iter().map(read) {
        let is_refused = ["HTTP/1.1 429", "HTTP/1.1 400"].iter().any(|status| answer.starts_with(status));
        assert!(is_refused && answer.contains("response_memory"), "{answer}");
    }
    prompts.into_iter().map(read).for_each(drop);
    // The largest body takes more than the memory of requests, while it is alone.
    let longest = format!(r#"{{"prompt": "{}"}}"#, "Once upon a time ".repeat((2 << 20) / 17 - 1));
    let tokenized: Vec<_> = (0..2).map(|_| post_to(address, "/v1/tokenize", &longest)).collect();
    for answer in tokenized.into_iter().map(read) {
        assert!(answer.starts_with("HTTP/1.1 200") || answer.contains("response_memory"), "{answer:.200}");
    }
    let health = "GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    let mut stream = connect(address);
    stream.write_all(health.as_bytes()).expect("it is sent");
    assert!(read(stream).starts_with("HTTP/1.1 200"));
    // Pages of files can be taken back at any time.
    let peak = (status_kib(child.id(), "VmHWM") - status_kib(child.id(), "RssFile")) / 1024.0;
    assert!(peak <= budget_mib, "{peak} MiB of {budget_mib}: {lines}");
    drop((slow, heads));
    // An honest request is answered once the others are gone.
    let small = r#"{"prompt": "Once", "max_tokens": 2}"#;
    let mut answer = read(post(address, small));
    let began = Instant::now();
    while !answer.starts_with("HTTP/1.1 200") {
        assert!(began.elapsed() < PATIENCE, "{answer}");
        answer = read(post(address, small));
    }
    signal(&child, "TERM");
    assert!(child.wait().expect("it ends").success());
    _ = rest.join();
}
