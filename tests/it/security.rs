//! Tests of access control over TCP: API keys, CORS, TLS.

use crate::common::{PATIENCE, engine};
use mainstem::config::{ApiKeys, Config, Overrides, ServerConfig, TlsFiles};
use mainstem::server::{ServeParts, Server, ShutdownOutcome};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::JoinHandle;
use tokio::sync::mpsc::{UnboundedSender, unbounded_channel};

/// A server on its own thread, shut down on drop.
pub struct Served {
    pub address: SocketAddr,
    stops: UnboundedSender<()>,
    thread: Option<JoinHandle<ShutdownOutcome>>,
}

impl Served {
    pub fn with(configure: impl FnOnce(&mut ServerConfig)) -> Served {
        let mut config = Config::load(None, Overrides::default()).expect("the defaults are valid").server;
        config.port = 0;
        config.workers = 1;
        configure(&mut config);
        let (stops, stopped) = unbounded_channel();
        let (sender, address) = channel();
        let serve = async move {
            let engine = engine("gqa", &[]).await;
            let server = Server::bind(ServeParts::from(&engine), config).expect("the server binds");
            sender.send(server.address()).expect("the test listens");
            let ending = server.run(stopped, PATIENCE).await.expect("the server runs");
            engine.stop();
            ending
        };
        let thread = std::thread::spawn(|| actix::System::new().block_on(serve));
        let address = address.recv_timeout(PATIENCE).expect("the server comes up");
        Served { address, stops, thread: Some(thread) }
    }

    pub fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).expect("the server accepts");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
        stream
    }

    /// Sends one request with these header lines.
    pub fn ask(&self, method: &str, path: &str, headers: &[&str], body: &str) -> Answer {
        let lines: String = headers.iter().map(|line| format!("{line}\r\n")).collect();
        let length = body.len();
        let mut stream = self.connect();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Length: \
             {length}\r\n{lines}\r\n{body}"
        )
        .expect("the request is sent");
        let mut text = String::new();
        stream.read_to_string(&mut text).expect("the answer comes to its end");
        let (head, body) = text.split_once("\r\n\r\n").expect("an HTTP answer");
        Answer { head: head.to_ascii_lowercase(), body: body.to_string() }
    }

    pub fn get(&self, path: &str, headers: &[&str]) -> Answer {
        self.ask("GET", path, headers, "")
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.stops.send(());
        let ending = self.thread.take().map(JoinHandle::join);
        if !std::thread::panicking() {
            assert!(matches!(ending, Some(Ok(ShutdownOutcome::Drained))), "{ending:?}");
        }
    }
}

pub struct Answer {
    /// In lower case.
    pub head: String,
    pub body: String,
}

impl Answer {
    pub fn status(&self) -> u16 {
        self.head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status")
    }

    /// The error object.
    pub fn error(&self) -> Value {
        let mut body: Value = serde_json::from_str(&self.body).expect("it is JSON");
        body["error"].take()
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.head
            .lines()
            .filter_map(|line| line.split_once(": "))
            .find(|(key, _)| *key == name)
            .map(|(_, v)| v)
    }
}

pub fn keys(keys: &[&str]) -> ApiKeys {
    ApiKeys(keys.iter().map(|key| key.to_string()).collect())
}

#[test]
fn who_shows_no_key_gets_health_and_metrics_only() {
    let served = Served::with(|config| config.api_keys = keys(&["first-key", "second-key"]));
    let completion = json!({ "prompt": "a", "max_tokens": 1 }).to_string();
    for key in ["first-key", "second-key"] {
        for shown in [format!("Authorization: Bearer {key}"), format!("X-Api-Key: {key}")] {
            assert_eq!(served.get("/v1/models", &[&shown]).status(), 200);
            assert_eq!(served.ask("POST", "/v1/completions", &[&shown], &completion).status(), 200);
        }
    }
    for shown in [
        &[][..],
        &["Authorization: Bearer third-key"],
        &["Authorization: Bearer first-ke"],
        &["Authorization: Bearer first-keys"],
        &["Authorization: Bearer "],
        &["Authorization: Basic first-key"],
        &["Authorization: first-key"],
        &["X-Api-Key: first-ke"],
        &["X-Api-Key: Bearer first-key"],
        &["Authorization: Bearer third-key", "X-Api-Key: first-key"],
    ] {
        for (method, path) in
            [("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/version"), ("GET", "/nowhere")]
        {
            let answer = served.ask(method, path, shown, &completion);
            assert_eq!(answer.status(), 401, "{shown:?} {path}");
            assert_eq!(answer.header("www-authenticate"), Some("bearer"));
            assert!(answer.header("x-request-id").is_some());
            assert!(!answer.body.contains("first-ke"), "{}", answer.body);
            let error: Value = serde_json::from_str(&answer.body).expect("the error object");
            assert_eq!(error["error"]["code"], "invalid_api_key");
            assert_eq!(error["error"]["type"], "authentication_error");
        }
        assert_eq!(served.get("/health", shown).status(), 200);
    }
    let metrics = served.get("/metrics", &[]);
    let line =
        metrics.body.lines().find(|line| line.contains("reason=\"unauthorized\"")).expect("it is counted");
    assert!(!line.ends_with(" 0"), "{line}");
}

/// Without keys, a browser would send requests of any page, although the page could not read the answer.
#[test]
fn pages_of_other_sites_may_not_have_anything_computed() {
    let body = r#"{"prompt": [5], "max_tokens": 1}"#;
    for (listed, origin, status) in [
        (&[][..], "https://evil.example", 403),
        (&[][..], "http://localhost:3000", 200),
        (&["https://chat.example"][..], "https://evil.example", 403),
        (&["https://chat.example"][..], "https://chat.example", 200),
        (&["*"][..], "https://evil.example", 200),
    ] {
        let served =
            Served::with(|config| config.cors_origins = listed.iter().map(|o| o.to_string()).collect());
        let answer = served.ask("POST", "/v1/completions", &[&format!("Origin: {origin}")], body);
        assert_eq!(answer.status(), status, "{listed:?} {origin}");
    }
}

#[test]
fn only_the_pages_of_named_origins_may_read() {
    let served = Served::with(|config| {
        config.api_keys = keys(&["key"]);
        config.cors_origins = vec!["https://chat.example".into(), "http://localhost:3000".into()];
    });
    let ask_first = [
        "Access-Control-Request-Method: POST",
        "Access-Control-Request-Headers: authorization,content-type,x-stainless-lang",
    ];
    for origin in ["https://chat.example", "http://localhost:3000"] {
        let from = format!("Origin: {origin}");
        let preflight = served.ask("OPTIONS", "/v1/completions", &[&from, ask_first[0], ask_first[1]], "");
        assert_eq!(preflight.status(), 200, "a browser shows no key yet");
        assert_eq!(preflight.header("access-control-allow-origin"), Some(origin));
        assert!(preflight.header("access-control-allow-methods").is_some_and(|m| m.contains("post")));
        let headers = preflight.header("access-control-allow-headers").expect("they are named");
        assert!(headers.contains("authorization") && headers.contains("x-stainless-lang"), "{headers}");
        assert!(preflight.header("access-control-max-age").is_some());

        let refused = served.get("/v1/models", &[&from]);
        assert_eq!((refused.status(), refused.header("access-control-allow-origin")), (401, Some(origin)));
        let exposed = refused.header("access-control-expose-headers").expect("they are named");
        assert!(exposed.contains("x-request-id") && exposed.contains("retry-after"), "{exposed}");
        let let_in = served.get("/v1/models", &[&from, "Authorization: Bearer key"]);
        assert_eq!((let_in.status(), let_in.header("access-control-allow-origin")), (200, Some(origin)));
    }
    let strange = "Origin: https://elsewhere.example";
    let preflight = served.ask("OPTIONS", "/v1/completions", &[strange, ask_first[0]], "");
    assert_eq!((preflight.status(), preflight.header("access-control-allow-origin")), (400, None));
    let page = served.get("/v1/models", &[strange, "Authorization: Bearer key"]);
    assert_eq!(page.header("access-control-allow-origin"), None);
    // A request that is not a preflight needs a key.
    assert_eq!(served.ask("OPTIONS", "/v1/models", &["Origin: https://chat.example"], "").status(), 401);
}

#[test]
fn any_page_may_read_where_that_is_wanted_and_none_where_nothing_is() {
    let any = Served::with(|config| config.cors_origins = vec!["*".into()]);
    let answer = any.get("/v1/models", &["Origin: https://anywhere.example"]);
    assert_eq!((answer.status(), answer.header("access-control-allow-origin")), (200, Some("*")));
    let none = Served::with(|_| {});
    let answer = none.get("/v1/models", &["Origin: https://anywhere.example"]);
    assert_eq!(answer.status(), 200);
    assert!(!answer.head.contains("access-control"), "{}", answer.head);
}

/// A self-signed certificate for localhost, and its key.
pub struct Identity {
    folder: PathBuf,
}

impl Identity {
    /// Creates one in a folder whose name ends in `name`, which must be unique among the tests.
    pub fn new(name: &str) -> Identity {
        let folder = std::env::temp_dir().join(format!("mainstem-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).expect("a temporary folder");
        let identity = Identity { folder };
        identity.renew();
        identity
    }

    /// Replaces certificate and key by new ones.
    pub fn renew(&self) {
        let folder = &self.folder;
        let made = rcgen::generate_simple_self_signed(["localhost".to_string()]).expect("a certificate");
        std::fs::write(folder.join("cert.pem"), made.cert.pem()).expect("it can be written");
        std::fs::write(folder.join("key.pem"), made.signing_key.serialize_pem()).expect("it can be written");
    }

    pub fn files(&self) -> TlsFiles {
        TlsFiles { cert: self.folder.join("cert.pem"), key: self.folder.join("key.pem") }
    }
}

impl Drop for Identity {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.folder);
    }
}

/// Returns a client that trusts `roots` and resolves localhost to `address`.
pub fn client(roots: &[CertificateDer<'static>], address: SocketAddr) -> ureq::Agent {
    let mut store = rustls::RootCertStore::empty();
    store.add_parsable_certificates(roots.iter().cloned());
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .expect("the versions are there")
        .with_root_certificates(store)
        .with_no_client_auth();
    let resolver = move |_: &str| Ok(vec![address]);
    ureq::AgentBuilder::new().tls_config(Arc::new(config)).resolver(resolver).timeout(PATIENCE).build()
}

#[test]
fn tls_is_spoken_with_who_trusts_the_certificate_and_with_nobody_else() {
    let identity = Identity::new("tls");
    let files = identity.files();
    let cert = CertificateDer::from_pem_file(&files.cert).expect("the certificate is read back");
    let served = Served::with(|config| config.tls = Some(files));
    let url = format!("https://localhost:{}/v1/completions", served.address.port());
    let complete = |roots: &[CertificateDer<'static>]| -> Option<Value> {
        let request = client(roots, served.address).post(&url);
        request.send_json(json!({ "prompt": "a", "max_tokens": 2 })).ok()?.into_json().ok()
    };

    let trusted = [cert];
    let answer = complete(&trusted).expect("the handshake succeeds");
    assert_eq!(answer["usage"]["completion_tokens"], 2);
    assert_eq!(complete(&[]), None);

    let mut plain = served.connect();
    plain.write_all(b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n").expect("the request is sent");
    let mut got = Vec::new();
    // The server sends a TLS alert or closes the connection; it neither responds nor hangs.
    let ended = plain.read_to_end(&mut got);
    assert!(!matches!(&ended, Err(error) if error.kind() == std::io::ErrorKind::WouldBlock), "{ended:?}");
    assert!(!String::from_utf8_lossy(&got).contains("HTTP/"), "{got:?}");
    complete(&trusted).expect("the server goes on");
}
