//! Tests of the limits of connections, and of the metrics' own listener.

use crate::common::{PATIENCE, alone, fixture, signal};
use crate::security::{Identity, Served, client, keys};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::num::NonZero;
use std::process::Stdio;

/// Returns whether the server has closed a connection that got no response.
fn is_closed(mut stream: &TcpStream) -> bool {
    stream.set_nonblocking(true).expect("it can be set");
    match stream.read(&mut [0; 1]) {
        Ok(bytes) => bytes == 0,
        Err(error) => error.kind() != ErrorKind::WouldBlock,
    }
}

/// Sends a request and returns the whole answer.
fn get(address: SocketAddr, path: &str, header: &str) -> String {
    let mut stream = TcpStream::connect(address).expect("the server accepts");
    stream.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
    write!(stream, "GET {path} HTTP/1.1\r\n{header}\r\nConnection: close\r\n\r\n").expect("it is sent");
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("the answer comes to its end");
    text
}

/// Regression: 256 connections that sent nothing took all handshakes of a worker, until they timed out.
#[test]
fn half_open_handshakes_hold_up_nobody() {
    let identity = Identity::new("half-open");
    let certificate = CertificateDer::from_pem_file(&identity.files().cert).expect("it is read back");
    let served = Served::with(|config| config.tls = Some(identity.files()));
    let idle: Vec<_> = (0..400).map(|_| served.connect()).collect();
    let url = format!("https://localhost:{}/health", served.address.port());
    let answer = client(&[certificate], served.address).get(&url).call().expect("an answer");
    assert_eq!(answer.status(), 200);
    // The answer did not wait until they were given up.
    assert!(!is_closed(idle.last().expect("there are some")));
}

/// Without this, connections that send nothing would keep clients out.
#[test]
fn the_longest_idle_connection_of_a_full_server_makes_room() {
    let served = Served::with(|config| config.max_connections = 3);
    let idle: Vec<_> = (0..3).map(|_| served.connect()).collect();
    // All three are accepted before the fourth.
    assert!(get(served.address, "/health", "Host: localhost").starts_with("HTTP/1.1 200"));
    let mut first = &idle[0];
    assert!(!matches!(first.read(&mut [0; 1]), Ok(1..)), "it was closed for the new one");
    assert!(!is_closed(&idle[2]));
}

#[test]
fn an_address_can_have_a_limit() {
    let served = Served::with(|config| config.max_connections_per_address = NonZero::new(2));
    let mut two = [served.connect(), served.connect()];
    let mut refused = String::new();
    served.connect().read_to_string(&mut refused).expect("it is closed");
    assert!(refused.starts_with("HTTP/1.1 503") && refused.contains("Retry-After: "), "{refused}");
    write!(two[0], "GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").expect("sent");
    let mut answer = String::new();
    two[0].read_to_string(&mut answer).expect("the answer comes to its end");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[test]
fn metrics_can_have_a_port_of_their_own() {
    let free = TcpListener::bind("127.0.0.1:0").and_then(|free| free.local_addr()).expect("a free port");
    let served = Served::with(|config| {
        config.api_keys = keys(&["key"]);
        config.metrics_listener = NonZero::new(free.port()).map(|port| ("127.0.0.1".to_owned(), port));
    });
    let there = get(free, "/metrics", "Host: localhost");
    assert!(there.starts_with("HTTP/1.1 200") && there.contains("mainstem_slots"), "{there}");
    let rebound = get(free, "/metrics", &format!("Host: evil.example:{}", free.port()));
    assert!(rebound.starts_with("HTTP/1.1 403"), "{rebound}");
    assert!(get(free, "/v1/models", "Host: localhost").starts_with("HTTP/1.1 404"));
    assert_eq!(served.get("/metrics", &["Authorization: Bearer key"]).status(), 404);
    assert_eq!(served.get("/v1/models", &[]).status(), 401);
    assert_eq!(served.get("/v1/models", &["Authorization: Bearer key"]).status(), 200);
}

/// With more connections than open files, accepting would fail for whoever comes next, scrapes included.
#[test]
fn connections_are_limited_by_the_open_files() {
    let serve = format!("exec {} serve {}", env!("CARGO_BIN_EXE_mainstem"), fixture("gqa").display());
    let mut command = alone("sh");
    command.args(["-c", &format!("ulimit -n 300; {serve} --port 0 --threads 1")]);
    let mut child = command.stderr(Stdio::piped()).spawn().expect("the program starts");
    let mut log = BufReader::new(child.stderr.take().expect("it is piped"));
    let mut lines = String::new();
    while !lines.contains("listening on") {
        assert_ne!(log.read_line(&mut lines).expect("the log is read"), 0, "{lines}");
    }
    signal(&child, "TERM");
    assert!(child.wait().expect("it ends").success());
    assert!(lines.contains("server.max_connections = 2048 is lowered to "), "{lines}");
}
