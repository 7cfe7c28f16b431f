//! Tests of what strangers send: other hosts, wrong keys, bodies that are too long and requests that are not
//! HTTP; and of SIGHUP, which reads keys and certificate again.

use crate::common::{PATIENCE, alone, fixture, mainstem, signal, skipped};
use crate::security::{Identity, Served, client, keys};
use mainstem::config::MetricsAccess;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::{Child, ChildStderr, Stdio};
use std::time::{Duration, Instant};

/// Returns status and body of the answer to a request for a host.
fn ask_for_host(served: &Served, path: &str, host: &str) -> (u16, String) {
    let mut stream = served.connect();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n").expect("it is sent");
    read_answer(stream)
}

/// Returns status and text of the answer that a connection ends with.
pub fn read_answer(mut stream: TcpStream) -> (u16, String) {
    let mut text = String::new();
    stream.read_to_string(&mut text).expect("the answer comes to its end");
    let status = text.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
    (status, text)
}

/// With DNS rebinding, a page's own name leads to this machine, so its requests are not cross-origin.
#[test]
fn a_page_cannot_reach_the_server_under_a_name_of_its_own() {
    let served = Served::with(|_| {});
    let port = served.address.port();
    for path in ["/v1/models", "/metrics", "/health", "/nowhere"] {
        let (status, text) = ask_for_host(&served, path, &format!("evil.example:{port}"));
        assert!(status == 403 && text.contains("host_not_allowed"), "{path}: {text}");
    }
    for host in [
        format!("127.0.0.1:{port}"),
        format!("localhost:{port}"),
        format!("[::1]:{port}"),
        // A proxy passes these on.
        "llm.example.com".to_owned(),
        "llm.example.com:8443".to_owned(),
    ] {
        assert_eq!(ask_for_host(&served, "/v1/models", &host).0, 200, "{host}");
    }
    let listed = Served::with(|config| config.allowed_hosts = vec!["llm.example.com".into()]);
    assert_eq!(ask_for_host(&listed, "/v1/models", "llm.example.com:1").0, 200);
    assert_eq!(ask_for_host(&listed, "/v1/models", "other.example.com").0, 403);
    let any = Served::with(|config| config.allowed_hosts = vec!["*".into()]);
    assert_eq!(ask_for_host(&any, "/v1/models", &format!("evil.example:{}", any.address.port())).0, 200);
}

#[test]
fn metrics_can_want_a_key() {
    let served = Served::with(|config| {
        config.api_keys = keys(&["key"]);
        config.metrics_access = MetricsAccess::Key;
    });
    assert_eq!(served.get("/metrics", &[]).status(), 401);
    assert_eq!(served.get("/health", &[]).status(), 200);
    let metrics = served.get("/metrics", &["Authorization: Bearer key"]);
    assert!(metrics.status() == 200 && metrics.body.contains("mainstem_slots"), "{}", metrics.body);
}

/// Twenty wrong keys are answered at once, the next two only after 100 and 200 ms. A right one never waits.
#[test]
fn wrong_keys_are_answered_ever_later() {
    let served = Served::with(|config| config.api_keys = keys(&["key"]));
    for i in 0..20 {
        assert_eq!(served.get("/v1/models", &[&format!("Authorization: Bearer {i}")]).status(), 401);
    }
    let began = Instant::now();
    for _ in 0..2 {
        assert_eq!(served.get("/v1/models", &["Authorization: Bearer wrong"]).status(), 401);
    }
    // What passed before counts too: wrong keys are forgotten after a while, but not faster than this.
    assert!(began.elapsed() >= Duration::from_millis(100), "{:?}", began.elapsed());
    assert_eq!(served.get("/v1/models", &["Authorization: Bearer key"]).status(), 200);
}

/// The body never comes, so an answer shows that it was not waited for.
#[test]
fn a_body_that_is_announced_to_be_too_long_is_refused_at_once() {
    let served = Served::with(|config| config.body_limit_bytes = 1 << 20);
    for path in ["/v1/completions", "/v1/chat/completions", "/tokenize", "/v1/embeddings"] {
        let mut stream = served.connect();
        let length = (1 << 20) + 1;
        write!(stream, "POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n")
            .expect("it is sent");
        let mut answer = [0; 12];
        stream.read_exact(&mut answer).expect("there is an answer");
        assert_eq!(&answer, b"HTTP/1.1 413", "{path}");
    }
}

/// A server whose log is read.
pub struct Logged {
    pub child: Child,
    log: BufReader<ChildStderr>,
    address: SocketAddr,
}

impl Logged {
    pub fn start(flags: &[&str]) -> Logged {
        let mut command = mainstem();
        command.arg("serve").arg(fixture("gqa")).args(["--threads", "2", "--port", "0"]).args(flags);
        let mut child = command.stderr(Stdio::piped()).spawn().expect("the program starts");
        let log = BufReader::new(child.stderr.take().expect("it is piped"));
        let mut server = Logged { child, log, address: SocketAddr::from(([127, 0, 0, 1], 0)) };
        let line = server.line_with("listening on ");
        let address = line.trim_end().rsplit('/').next().expect("an address");
        server.address = address.parse().expect("an address");
        server
    }

    /// Returns the next line of the log with `text`.
    fn line_with(&mut self, text: &str) -> String {
        let mut line = String::new();
        while !line.contains(text) {
            line.clear();
            assert_ne!(self.log.read_line(&mut line).expect("the log is read"), 0, "no line with {text:?}");
        }
        line
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).expect("the server accepts");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
        stream
    }

    /// Stops the server and returns the rest of its log.
    pub fn stop(mut self) -> String {
        signal(&self.child, "TERM");
        let mut rest = String::new();
        self.log.read_to_string(&mut rest).expect("the log is read");
        assert_eq!(self.child.wait().expect("it ends").code(), Some(0));
        rest
    }
}

impl Drop for Logged {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn requests_that_are_not_http_do_not_fill_the_log() {
    let server = Logged::start(&[]);
    for _ in 0..40 {
        let mut stream = server.connect();
        stream.write_all(b"\x16\x03\x01 what is this\r\n\r\n").expect("it is sent");
        assert_eq!(read_answer(stream).0, 400);
    }
    let log = server.stop();
    let lines = log.lines().filter(|line| line.contains("actix_http")).count();
    // One in ten seconds.
    assert!((1..10).contains(&lines), "{log}");
}

/// Anyone can send such requests, and as many as they like.
#[test]
fn rejected_requests_do_not_fill_the_log() {
    let server = Logged::start(&["--api-key", "key"]);
    for _ in 0..60 {
        let mut stream = server.connect();
        let head = "GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
        stream.write_all(head.as_bytes()).expect("it is sent");
        assert_eq!(read_answer(stream).0, 401);
    }
    let log = server.stop();
    let lines = log.lines().filter(|line| line.contains("rejected") && line.contains("401")).count();
    // Twenty in ten seconds.
    assert!((1..60).contains(&lines), "{log}");
}

/// A server at a terminal that is closed gets SIGHUP too, and is not to stay behind unseen.
#[test]
fn a_server_ends_with_its_terminal() {
    let serve = format!("exec {} serve {}", env!("CARGO_BIN_EXE_mainstem"), fixture("gqa").display());
    let mut command = alone("script");
    command.args(["-qfc", &format!("{serve} --port 0 --threads 1"), "/dev/null"]);
    command.env("SHELL", "/bin/sh");
    let Ok(mut terminal) = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn() else {
        return skipped("no script on this machine");
    };
    let mut lines = BufReader::new(terminal.stdout.take().expect("it is piped"));
    let mut line = String::new();
    while !line.contains("listening on") {
        line.clear();
        assert_ne!(lines.read_line(&mut line).expect("it is text"), 0);
    }
    let address: SocketAddr = line.trim_end().rsplit('/').next().and_then(|it| it.parse().ok()).expect("it");
    terminal.kill().expect("it can be ended");
    terminal.wait().expect("it ends");
    let began = Instant::now();
    while TcpStream::connect(address).is_ok() {
        assert!(began.elapsed() < PATIENCE, "the server goes on without its terminal");
        std::thread::yield_now();
    }
}

#[test]
fn sighup_reads_keys_and_certificate_again() {
    let identity = Identity::new("sighup");
    let files = identity.files();
    let key_file = files.cert.with_file_name("keys");
    let write_keys = |text: &str| std::fs::write(&key_file, text).expect("it can be written");
    let read_certificate = || CertificateDer::from_pem_file(&files.cert).expect("it is read back");
    write_keys("old\n");
    let paths = [&files.cert, &files.key, &key_file].map(|path| path.display().to_string());
    let flags = ["--tls-cert", &paths[0], "--tls-key", &paths[1], "--api-key-file", &paths[2]];
    let mut server = Logged::start(&flags);
    let url = format!("https://localhost:{}/v1/models", server.address.port());
    let address = server.address;
    let status = |certificate: &CertificateDer<'static>, key: &str| {
        let request = client(std::slice::from_ref(certificate), address).get(&url);
        match request.set("Authorization", &format!("Bearer {key}")).call() {
            Ok(answer) => Some(answer.status()),
            Err(ureq::Error::Status(status, _)) => Some(status),
            Err(_) => None,
        }
    };
    let old = read_certificate();
    assert_eq!((status(&old, "old"), status(&old, "new")), (Some(200), Some(401)));

    identity.renew();
    write_keys("new\n");
    let new = read_certificate();
    signal(&server.child, "HUP");
    server.line_with("keys and certificate reloaded");
    assert_eq!((status(&new, "old"), status(&new, "new"), status(&old, "new")), (Some(401), Some(200), None));

    // An error in one file leaves everything as it was.
    identity.renew();
    write_keys("# none\n");
    signal(&server.child, "HUP");
    let line = server.line_with("SIGHUP");
    assert!(line.contains("server.api_key_file") && line.contains("no API key"), "{line}");
    assert_eq!(status(&new, "new"), Some(200));
    server.stop();
}
