//! The sequences in flight as the engine shows them to those who watch.

use crate::security::Served;
use serde_json::Value;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;

/// Begins a request, and returns its connection.
fn request(served: &Served, head: &str, body: &str) -> TcpStream {
    let mut stream = served.connect();
    let length = body.len();
    write!(stream, "{head} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n{body}")
        .expect("it is sent");
    stream
}

/// Reads frames until one satisfies a condition.
fn frame_with(events: &mut impl BufRead, wanted: impl Fn(&Value) -> bool) -> Value {
    loop {
        let mut line = String::new();
        assert!(events.read_line(&mut line).expect("it can be read") > 0, "the stream has ended");
        let Some(json) = line.strip_prefix("data: ") else { continue };
        let event: Value = serde_json::from_str(json).expect("it is JSON");
        if event["object"] == "inflight.frame" && wanted(&event) {
            return event;
        }
    }
}

fn sequences(frame: &Value) -> Vec<Vec<u64>> {
    let rows = frame["lanes"][0]["sequences"].as_array().expect("it is a list");
    rows.iter().map(|row| row.as_array().unwrap().iter().map(|it| it.as_u64().unwrap()).collect()).collect()
}

/// A sequence is shown with its slot, prompt and limit, grows, and is gone at its end; the totals count what was
/// generated, whether someone watched or not.
#[test]
fn a_sequence_is_shown_while_it_runs() {
    let served = Served::with(|_| {});
    let body = r#"{"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": true}"#;
    served.ask("POST", "/v1/completions", &[], body);
    let watching = request(&served, "GET /v1/inflight?interval_ms=50", "");
    let mut events = BufReader::new(watching);
    let idle = frame_with(&mut events, |_| true);
    assert_eq!((sequences(&idle), &idle["generated_tokens"]), (Vec::new(), &Value::from(3)));
    let body = r#"{"prompt": [5, 6, 7, 8], "max_tokens": 100, "ignore_eos": true, "stream": true}"#;
    let running = request(&served, "POST /v1/completions", body);
    let shown = frame_with(&mut events, |frame| !sequences(frame).is_empty());
    let [slot, _, prompt, computed, generated, limit] = sequences(&shown)[0][..] else { panic!("{shown}") };
    assert_eq!((slot, prompt, computed, limit), (0, 4, 4, 100));
    assert!(generated <= 100 && shown["pages"]["used"].as_u64() > Some(0), "{shown}");
    let ended = frame_with(&mut events, |frame| sequences(frame).is_empty());
    assert_eq!((&ended["generated_tokens"], &ended["pages"]["used"]), (&Value::from(103), &Value::from(0)));
    drop(running);
}
