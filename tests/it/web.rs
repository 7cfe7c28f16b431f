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

/// Frames that are read at most until a condition is true.
const FRAMES_MAX: usize = 400;

/// Reads frames until one satisfies a condition; `None` if none of many does.
fn frame_with(events: &mut impl BufRead, wanted: impl Fn(&Value) -> bool) -> Option<Value> {
    for _ in 0..FRAMES_MAX {
        let mut line = String::new();
        while !line.starts_with("data: ") {
            line.clear();
            assert!(events.read_line(&mut line).expect("it can be read") > 0, "the stream has ended");
        }
        let event: Value = serde_json::from_str(&line["data: ".len()..]).expect("it is JSON");
        if event["object"] == "inflight.frame" && wanted(&event) {
            return Some(event);
        }
    }
    None
}

fn sequences(frame: &Value) -> Vec<Vec<u64>> {
    let rows = frame["lanes"][0]["sequences"].as_array().expect("it is a list");
    rows.iter().map(|row| row.as_array().unwrap().iter().map(|it| it.as_u64().unwrap()).collect()).collect()
}

/// Sequences are shown with slot, prompt and limit, and are gone at their end; the totals count what was
/// generated, whether someone watched or not. A frame may miss a short answer, so there are many.
#[test]
fn sequences_are_shown_while_they_run() {
    let served = Served::with(|_| {});
    let body = r#"{"prompt": [5, 6, 7], "max_tokens": 3, "ignore_eos": true}"#;
    served.ask("POST", "/v1/completions", &[], body);
    let watching = request(&served, "GET /v1/inflight?interval_ms=50", "");
    let mut events = BufReader::new(watching);
    let idle = frame_with(&mut events, |_| true).expect("there is one");
    assert_eq!((sequences(&idle), &idle["generated_tokens"]), (Vec::new(), &Value::from(3)));
    let body = r#"{"prompt": [5, 6, 7, 8], "max_tokens": 100, "ignore_eos": true, "n": 64}"#;
    let running = request(&served, "POST /v1/completions", body);
    let shown = frame_with(&mut events, |frame| !sequences(frame).is_empty()).expect("some are shown");
    for (row, at) in sequences(&shown).iter().zip(0..) {
        let [slot, _, prompt, computed, generated, limit] = row[..] else { panic!("{shown}") };
        assert_eq!((slot, prompt, limit), (at, 4, 100), "{shown}");
        assert!(computed <= 4 && generated <= 100, "{shown}");
    }
    assert!(shown["pages"]["used"].as_u64() > Some(0), "{shown}");
    let is_over = |frame: &Value| frame["generated_tokens"] == 3 + 64 * 100 && sequences(frame).is_empty();
    let ended = frame_with(&mut events, is_over).expect("all of them end");
    assert_eq!((&ended["running"], &ended["pages"]["used"]), (&Value::from(0), &Value::from(0)));
    drop(running);
}
