//! Tests of the memory and time that strangers and model files can take: hopeless prompts, and templates that
//! multiply texts. The server is a process of its own, so that its memory can be read.

use crate::common::{Copied, PATIENCE};
use crate::edge::{Logged, read_answer};
use serde_json::{Value, json};
use std::io::Write;
use std::net::TcpStream;
use std::time::Instant;

const MIB: usize = 1 << 20;

/// Sends a request; its answer is the connection's end.
fn post(served: &Logged, path: &str, body: &Value) -> TcpStream {
    let (mut stream, body) = (served.connect(), body.to_string());
    let length = body.len();
    let head =
        format!("POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {length}");
    write!(stream, "{head}\r\n\r\n{body}").expect("the request is sent");
    stream
}

/// Returns a size of the server's process in bytes: what it takes ("VmRSS"), or took at most ("VmHWM").
fn memory(served: &Logged, key: &str) -> usize {
    let status = std::fs::read_to_string(format!("/proc/{}/status", served.child.id())).expect("it runs");
    let line = status.lines().find(|line| line.starts_with(key)).expect("the size is there");
    let number = line.split_whitespace().nth(1).and_then(|number| number.parse::<usize>().ok());
    number.expect("a number of KiB") << 10
}

/// Regression: 64 prompts of 4 MB took 1.7 GB, and much of it for good.
#[test]
#[cfg_attr(not(target_os = "linux"), ignore = "reads /proc")]
fn hopeless_prompts_take_little_memory_and_give_it_back() {
    let served = Logged::start(&[]);
    let answer = |body: &Value| read_answer(post(&served, "/v1/completions", body));
    assert_eq!(answer(&json!({ "prompt": "the", "max_tokens": 1 })).0, 200);
    let before = memory(&served, "VmRSS");
    let hopeless = json!({ "prompt": "the rain in Spain ".repeat(200_000) });
    let waiting: Vec<TcpStream> = (0..12).map(|_| post(&served, "/v1/completions", &hopeless)).collect();
    // In between, a body that is long, too, is answered.
    let long = json!({ "prompt": "the", "max_tokens": 1, "user": "u".repeat(20_000) });
    assert_eq!(answer(&long).0, 200);
    for stream in waiting {
        let (status, text) = read_answer(stream);
        assert!(status == 400 && text.contains("context_length_exceeded"), "{text}");
        assert!(text.contains("the prompt has at least"), "{text}");
    }
    let most = memory(&served, "VmHWM");
    assert!(most < before + 256 * MIB, "{} MiB, of {} before", most / MIB, before / MIB);
    let began = Instant::now();
    while memory(&served, "VmRSS") > before + 48 * MIB {
        let now = memory(&served, "VmRSS") / MIB;
        assert!(began.elapsed() < PATIENCE, "{now} MiB are left of {}, {} before", most / MIB, before / MIB);
        std::thread::yield_now();
    }
    served.stop();
}

/// Regression: each of the templates makes terabytes.
#[test]
#[cfg_attr(not(target_os = "linux"), ignore = "reads /proc")]
fn a_template_that_multiplies_texts_takes_bounded_memory_and_no_other_request() {
    let folder = Copied::of("gqa", "multiplied");
    let file = folder.file("mine.jinja");
    let named = file.display().to_string();
    let raw = "text of the template ".repeat(5000);
    for source in [
        format!(
            "{{% set x %}}{{% for i in range(99999) %}}{raw}{{% endfor %}}{{% endset %}}{{{{ x|length }}}}"
        ),
        "{% set n = namespace(l=[], s='abc ' * 4000000) %}\
         {% for i in range(99999) %}{% set n.l = n.l + [n.s|upper] %}{% endfor %}"
            .to_owned(),
    ] {
        std::fs::write(&file, source).expect("it can be written");
        let served = Logged::start(&["--chat-template", &named]);
        let chat = json!({ "messages": [{ "role": "user", "content": "hello" }] });
        let (status, text) = read_answer(post(&served, "/v1/chat/completions", &chat));
        assert!(status == 400 && text.contains("the chat template failed to render"), "{text}");
        let plain = json!({ "prompt": "the", "max_tokens": 1 });
        assert_eq!(read_answer(post(&served, "/v1/completions", &plain)).0, 200);
        let most = memory(&served, "VmHWM");
        assert!(most < 1024 * MIB, "{} MiB", most / MIB);
        served.stop();
    }
}
