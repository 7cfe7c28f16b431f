//! Tests of connections: new or reused, closed by the server, read slowly, encrypted.
//!
//! Invariant: the connection policy does not affect outcomes.

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpStream},
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::SeqCst},
        mpsc,
    },
    time::Duration,
};

use load_tests::{
    plan::lengths::LengthDistribution,
    run::{Connections, RunSettings, Target},
    sample::{FailureKind, Outcome},
};
use rustls::{
    ServerConfig, ServerConnection, StreamOwned,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer},
};

use super::support::{
    DONE, HEAD, PATIENCE, TOKEN, all_completed, chunk, failure_kinds, good_response, one_sample,
    read_request, run_to_end, serve, serve_connections, settings, users,
};

/// Starts a server that counts its connections and closes each after `answers` responses; the next request is
/// read and dropped.
fn serve_counted(answers: usize) -> (SocketAddr, Arc<AtomicUsize>) {
    let count = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&count);
    let address = serve_connections(move |mut stream| {
        counted.fetch_add(1, SeqCst);
        for _ in 0..answers {
            let Some(request) = read_request(&stream) else { return };
            stream.write_all(good_response(&request).as_bytes()).unwrap();
        }
        read_request(&stream);
    });
    (address, count)
}

fn run_one_user(address: SocketAddr, connections: Connections) -> load_tests::run::RunRecord {
    run_to_end(&RunSettings { arrivals: users(1), connections, ..settings(address, 10) })
}

#[test]
fn an_idle_connection_is_used_again_where_that_is_wanted() {
    for (connections, expected) in [(Connections::Reused, 1), (Connections::New, 10)] {
        let (address, count) = serve_counted(100);
        assert!(all_completed(&run_one_user(address, connections)));
        assert_eq!(count.load(SeqCst), expected, "{connections:?}");
    }
}

#[test]
fn a_connection_closed_under_the_client_costs_no_failure() {
    // Each connection reads its second request and closes without a response: the worst case.
    let (address, count) = serve_counted(1);
    let record = run_one_user(address, Connections::Reused);
    assert!(all_completed(&record), "{:?}", failure_kinds(&record));
    assert!(record.samples.iter().all(|sample| sample.retries == 0));
    assert_eq!(count.load(SeqCst), 10);
}

#[test]
fn a_fresh_connection_closed_without_a_word_is_a_failure() {
    let (address, count) = serve_counted(0);
    let record = run_one_user(address, Connections::Reused);
    assert_eq!(failure_kinds(&record), [FailureKind::EarlyClose; 10]);
    assert_eq!(count.load(SeqCst), 10);
}

/// Sends tokens until the client disconnects, and reports the number of bytes sent.
fn serve_and_measure() -> (SocketAddr, mpsc::Receiver<usize>) {
    let (pushed, seen) = mpsc::channel();
    let address = serve(move |mut stream, _| {
        let piece = chunk(TOKEN).repeat(100);
        let mut bytes = HEAD.len();
        stream.write_all(HEAD.as_bytes()).unwrap();
        while stream.write_all(piece.as_bytes()).is_ok() {
            bytes += piece.len();
        }
        pushed.send(bytes).unwrap();
    });
    (address, seen)
}

#[test]
fn a_slow_reader_reads_slowly_and_its_server_feels_it() {
    const RATE: u32 = 40_000;
    // Upper bound of the kernel's socket buffers.
    const BUFFERS: usize = 6 << 20;
    let (address, pushed) = serve_and_measure();
    let mut slow = settings(address, 1);
    slow.request_timeout = Duration::from_secs(1);
    (slow.load.slow_share, slow.load.slow_rate) = (1.0, RATE);
    let sample = one_sample(&slow);
    let bytes = HEAD.len() + sample.output_len as usize * chunk(TOKEN).len();
    let allowed = (sample.ended - sample.sent).as_secs_f64() * f64::from(RATE) + f64::from(RATE / 20);
    assert!(bytes as f64 <= allowed, "{bytes} bytes of {allowed}");
    assert!(pushed.recv_timeout(PATIENCE).unwrap() < BUFFERS, "the server was never throttled");
}

#[test]
fn a_slow_reader_has_its_whole_answer_in_the_end() {
    for connections in [Connections::New, Connections::Reused] {
        let (address, _) = serve_counted(100);
        let mut slow = RunSettings { connections, ..settings(address, 2) };
        (slow.load.slow_share, slow.load.slow_rate) = (1.0, 20_000);
        slow.load.output = Some(LengthDistribution::Fixed(30));
        let record = run_to_end(&slow);
        assert!(all_completed(&record));
        let answer = 30 * chunk(TOKEN).len();
        // Every chunk but the first is delayed by the rate limit.
        let minimum = Duration::from_secs_f64((answer - 1000) as f64 / 20_000.0);
        assert!(
            record.samples.iter().all(|s| s.output_len == 30 && s.ended - s.sent >= minimum),
            "{minimum:?}"
        );
    }
}

type TlsStream = StreamOwned<ServerConnection, TcpStream>;

/// Starts a server with a self-signed certificate for 127.0.0.1. Returns its address and the certificate
/// file.
fn serve_tls(name: &str, talk: impl Fn(TlsStream) + Send + Sync + 'static) -> (SocketAddr, PathBuf) {
    let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_string()]).unwrap();
    let file = std::env::temp_dir().join(format!("load_tests-{}-{name}.pem", std::process::id()));
    std::fs::write(&file, made.cert.pem()).unwrap();
    let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![CertificateDer::from(made.cert.der().to_vec())], key)
        .unwrap();
    let config = Arc::new(config);
    let address = serve_connections(move |tcp| {
        talk(StreamOwned::new(ServerConnection::new(Arc::clone(&config)).unwrap(), tcp));
    });
    (address, file)
}

fn answer_all(mut stream: TlsStream) {
    while let Some(request) = read_request(&mut stream) {
        stream.write_all(good_response(&request).as_bytes()).unwrap();
        stream.flush().unwrap();
    }
}

fn tls_settings(address: SocketAddr, ca: Option<PathBuf>) -> RunSettings {
    let plain = settings(address, 3);
    RunSettings { target: Target { url: format!("https://{address}"), ca, ..plain.target }, ..plain }
}

#[test]
fn a_certificate_is_taken_when_the_file_vouches_for_it_and_refused_otherwise() {
    let (address, file) = serve_tls("trusted", answer_all);
    for connections in [Connections::New, Connections::Reused] {
        let record = run_to_end(&RunSettings { connections, ..tls_settings(address, Some(file.clone())) });
        assert!(all_completed(&record), "{:?}", record.samples);
    }
    let record = run_to_end(&tls_settings(address, None));
    assert_eq!(failure_kinds(&record), [FailureKind::Tls; 3]);
    std::fs::remove_file(file).unwrap();
}

#[test]
fn an_answer_that_ends_by_closing_needs_its_mark_but_no_goodbye_of_tls() {
    let runs = [(format!("{TOKEN}{DONE}"), Vec::new()), (TOKEN.into(), vec![FailureKind::EarlyClose; 3])];
    for (events, expected) in runs {
        let (address, file) = serve_tls("rude", move |mut stream| {
            read_request(&mut stream);
            stream.write_all(format!("HTTP/1.0 200 OK\r\n\r\n{events}").as_bytes()).unwrap();
            stream.flush().unwrap();
        });
        let record = run_to_end(&tls_settings(address, Some(file.clone())));
        assert_eq!(failure_kinds(&record), expected);
        assert!(record.samples.iter().all(|sample| sample.output_len == 1));
        std::fs::remove_file(file).unwrap();
    }
}

#[test]
fn a_server_without_tls_is_no_tls_session() {
    let address = serve_connections(|mut stream| {
        let _ = stream.read(&mut [0]);
        stream.write_all(b"HTTP/1.1 400 X\r\n\r\n").unwrap();
    });
    let record = run_to_end(&tls_settings(address, None));
    assert_eq!(failure_kinds(&record), [FailureKind::Tls; 3]);
    assert!(record.samples.iter().all(|s| matches!(&s.outcome, Outcome::Failed(_)) && s.retries == 0));
}

#[test]
fn files_of_certificates_that_are_none_are_named() {
    let refused = |file: PathBuf| {
        let settings = tls_settings("127.0.0.1:1".parse().unwrap(), Some(file));
        format!("{:#}", load_tests::run::run(&settings, &Default::default()).unwrap_err())
    };
    let file = std::env::temp_dir().join(format!("load_tests-{}-empty.pem", std::process::id()));
    std::fs::write(&file, "nothing").unwrap();
    let error = refused(file.clone());
    assert!(error.contains("-empty.pem") && error.contains("no certificate"), "{error}");
    std::fs::remove_file(&file).unwrap();
    assert!(refused(file).contains("-empty.pem"));
}
