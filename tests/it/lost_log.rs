//! Tests of the program whose log nobody takes: what reads stderr is gone, or full, or has stopped reading.

use crate::common::{self, PATIENCE, fixture, mainstem, signal};
use crate::http::split;
use serde_json::{Value, json};
use std::fs::OpenOptions;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Child, ChildStderr, ExitStatus, Stdio};
use std::time::Instant;

/// A server of the fixture `gqa`.
struct Server {
    child: Child,
    port: u16,
}

impl Server {
    /// Starts a server whose log goes to `stderr`, and waits until it listens.
    fn start(stderr: impl Into<Stdio>) -> Server {
        // The log, which would name a free port, is what the tests take away.
        let free = TcpListener::bind("127.0.0.1:0").expect("there is a free port");
        let port = free.local_addr().expect("it is bound").port();
        drop(free);
        let mut command = mainstem();
        command.arg("serve").arg(fixture("gqa")).args(["--threads", "2", "--port", &port.to_string()]);
        // At this level, each of many rejected requests has a line.
        command.args(["--log-level", "mainstem=debug"]);
        let mut server = Server { child: command.stderr(stderr).spawn().expect("the program starts"), port };
        let began = Instant::now();
        while let Err(error) = TcpStream::connect(("127.0.0.1", port)) {
            assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
            assert_eq!(server.child.try_wait().expect("it can be asked"), None, "the program has ended");
            assert!(began.elapsed() < PATIENCE, "the server does not listen");
        }
        server
    }

    /// Takes what reads the log, after the line that is the last one at start.
    fn log(&mut self) -> BufReader<ChildStderr> {
        let mut log = BufReader::new(self.child.stderr.take().expect("it is piped"));
        let mut line = String::new();
        while !line.contains("listening on") {
            line.clear();
            assert_ne!(log.read_line(&mut line).expect("the log is read"), 0);
        }
        log
    }

    fn send(&self, path: &str, body: &str) -> TcpStream {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).expect("the server accepts");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
        let method = if body.is_empty() { "GET" } else { "POST" };
        let length = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
             Content-Length: {length}\r\n\r\n{body}"
        )
        .expect("the request is sent");
        stream
    }

    fn ask(&self, path: &str, body: &str) -> (u16, String) {
        let mut answer = Vec::new();
        self.send(path, body).read_to_end(&mut answer).expect("the answer comes to its end");
        split(&answer)
    }

    /// Checks that the server answers, says that lines of the log are lost, and drains at SIGTERM.
    fn check_service(mut self) {
        let completion = json!({ "prompt": "the rain", "max_tokens": 4, "ignore_eos": true });
        for _ in 0..3 {
            let (status, body) = self.ask("/v1/completions", &completion.to_string());
            let body: Value = serde_json::from_str(&body).expect("JSON");
            assert_eq!((status, &body["usage"]["completion_tokens"]), (200, &json!(4)));
            assert_eq!(self.ask("/v1/completions", "not JSON").0, 400);
        }
        self.check_losses_are_reported();
        let long = json!({ "prompt": "the", "max_tokens": 100, "ignore_eos": true, "stream": true });
        let mut stream = self.send("/v1/completions", &long.to_string());
        let mut answer = vec![0; 64];
        stream.read_exact(&mut answer).expect("the stream begins");
        signal(&self.child, "TERM");
        stream.read_to_end(&mut answer).expect("the stream comes to its end");
        let (status, events) = split(&answer);
        assert!(status == 200 && events.ends_with("data: [DONE]\n\n"), "{status} {events}");
        assert_eq!(self.exit().code(), Some(0));
    }

    fn check_losses_are_reported(&self) {
        let began = Instant::now();
        loop {
            let (status, health) = self.ask("/health", "");
            let health: Value = serde_json::from_str(&health).expect("JSON");
            assert_eq!((status, health["status"].as_str()), (200, Some("ok")));
            let metrics = self.ask("/metrics", "").1;
            let total = metrics.lines().find(|line| line.starts_with("mainstem_log_lines_dropped_total{"));
            let total = total.expect("the metric is there").rsplit(' ').next();
            if health["log_lines_dropped"].as_u64().is_some() && total != Some("0") {
                return;
            }
            assert!(began.elapsed() < PATIENCE, "nothing is reported as lost: {health} {total:?}");
        }
    }

    fn exit(&mut self) -> ExitStatus {
        common::wait_for_exit(&mut self.child)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_full_disk_takes_the_log_and_nothing_else() {
    let Ok(full) = OpenOptions::new().write(true).open("/dev/full") else { return };
    Server::start(full).check_service();
}

#[test]
fn a_closed_pipe_takes_the_log_and_nothing_else() {
    let mut server = Server::start(Stdio::piped());
    drop(server.log());
    server.check_service();
}

/// The reader keeps the pipe open and has stopped reading, like a pager or a hung log collector.
#[test]
fn a_pipe_that_nobody_reads_holds_up_nobody() {
    let mut server = Server::start(Stdio::piped());
    let log = server.log();
    // Each is logged with its path: more than the pipe, the thread that writes to it and the queue hold.
    let path = format!("/{}", "a".repeat(30_000));
    for _ in 0..100 {
        assert_eq!(server.ask(&path, "").0, 404);
    }
    server.check_service();
    drop(log);
}

/// The error is lost, and the exit code is not.
#[test]
fn errors_at_start_keep_their_exit_code() {
    let Ok(full) = OpenOptions::new().write(true).open("/dev/full") else { return };
    for (flags, code) in [(["--slots", "0"], 2), (["--log-level", "a=b=c"], 2), (["--spec", "/no.toml"], 1)] {
        let stderr = full.try_clone().expect("it can be shared");
        let status = mainstem().arg("serve").args(flags).stderr(stderr).status().expect("it starts");
        assert_eq!(status.code(), Some(code), "{flags:?}");
    }
}
