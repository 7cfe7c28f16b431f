//! Tests with complete, unusual and broken responses.
//!
//! Invariant: a sample matches what was sent on the wire, whatever its form.

use std::{
    io::{Read, Write},
    sync::{
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    time::Duration,
};

use load_tests::{
    plan::{lengths::LengthDistribution, prompts::PromptSource, requests::Endpoint, requests::LoadSpec},
    run::{RunSettings, Target},
    sample::{FailureKind, Outcome},
};

use super::support::{
    DONE, HEAD, PATIENCE, TOKEN, all_completed, chunk, closed_port, failure_kinds, good_response, one_sample,
    page, run_to_end, serve, serve_bytes, settings, stream,
};

#[test]
fn a_good_server_completes_every_request_in_full() {
    let address = serve_bytes(|request| good_response(&request));
    let record = run_to_end(&settings(address, 20));
    assert!(all_completed(&record), "{:?}", record.samples);
    assert_eq!((record.samples.len(), record.unsent), (20, 0));
    for (index, sample) in record.samples.iter().enumerate() {
        assert_eq!((sample.index, sample.output_len), (index, sample.requested_output_len));
        assert_eq!(sample.deliveries.len(), sample.output_len as usize);
        assert!(sample.deliveries.is_sorted());
        assert!(sample.sent <= sample.deliveries[0].at() && sample.deliveries[0].at() <= sample.ended);
        assert!((4..=8).contains(&sample.prompt_len), "without usage, the prompt length is as planned");
    }
}

#[test]
fn a_request_says_what_it_wants_and_who_it_is() {
    let (seen, request) = mpsc::channel();
    let address = serve(move |mut stream, request| {
        stream.write_all(good_response(&request).as_bytes()).unwrap();
        seen.send(request).unwrap();
    });
    one_sample(&settings(address, 1));
    let request = request.recv_timeout(PATIENCE).unwrap();
    assert_eq!(request.line(), "post /v1/completions http/1.1");
    assert_eq!(request.header("host"), Some(address.to_string().as_str()));
    assert_eq!(request.header("content-type"), Some("application/json"));
    assert_eq!(request.header("accept"), Some("text/event-stream"));
    assert!(request.header("user-agent").unwrap().starts_with("load_tests/"));
    assert_eq!((request.header("connection"), request.header("authorization")), (Some("close"), None));
    assert_eq!(request.json()["model"], "m");
}

/// Returns what four different servers send for three tokens, and the prompt length if they report it.
fn wire_forms() -> Vec<(&'static str, String, Option<u32>)> {
    let done = "data: [DONE]\r\n\r\n";
    // llama-cpp-python: CRLF, keep-alive comments, spaces in the JSON, no usage.
    let text = |text: &str, finish: &str| {
        format!(
            "data: {{\"id\": \"cmpl-5e0a\", \"object\": \"text_completion\", \"created\": 1721155320, \
             \"model\": \"m\", \
             \"choices\": [{{\"text\": \"{text}\", \"index\": 0, \"logprobs\": null, \"finish_reason\": \
             {finish}}}]}}\r\n\r\n"
        )
    };
    let ping = ": ping - 2025-03-16 06:41:51.280928+00:00\r\n\r\n";
    let llama_cpp_python =
        [&text(" a", "null"), ping, &text("\\n", "null"), &text(" \u{e9}", "\"length\""), done];
    // vLLM: several token ids per event, the prompt's ids first, usage in a separate event.
    let vllm = "data: {\"id\":\"cmpl-1\",\"choices\":[{\"index\":0,\"text\":\"a\",\"logprobs\":null,\
                \"finish_reason\":null,\"stop_reason\":null,\"prompt_token_ids\":[1,2,3,4,5],\
                \"token_ids\":[7]}]}\n\n\
                data: {\"id\":\"cmpl-1\",\"choices\":[{\"index\":0,\"text\":\"bc\",\
                \"finish_reason\":\"length\",\"stop_reason\":null,\"token_ids\":[8,9]}]}\n\n\
                data: {\"id\":\"cmpl-1\",\"choices\":[],\"usage\":{\"prompt_tokens\":5,\"total_tokens\":8,\
                \"completion_tokens\":3,\"prompt_tokens_details\":null}}\n\ndata: [DONE]\n\n";
    // A server with token counts only in its usage, and empty keep-alive events.
    let usage = "event: ping\ndata: \n\ndata: {\"choices\":[{\"text\":\"abc\",\"finish_reason\":\"length\"}],\
                 \"usage\":{\"prompt_tokens\":4,\"completion_tokens\":3}}\n\ndata: [DONE]\n\n";
    vec![
        ("llama-cpp-python", llama_cpp_python.concat(), None),
        ("vLLM", vllm.into(), Some(5)),
        ("usage", usage.into(), Some(4)),
        ("ours", format!("{}{DONE}", TOKEN.repeat(3)), None),
    ]
}

#[test]
fn every_servers_form_counts_the_same_in_every_framing() {
    for (server, events, prompt_len) in wire_forms() {
        let head = "content-type: text/event-stream; charset=utf-8\r\n";
        let bytes: String = events.split_inclusive('}').map(chunk).collect();
        for (framing, answer) in [
            ("chunks", stream(&events)),
            ("many chunks", format!("{HEAD}{bytes}0\r\nx-trailer: 1\r\n\r\n")),
            ("length", page("200 OK", head, &events)),
            ("closing", format!("HTTP/1.1 200 OK\r\n{head}\r\n{events}")),
            ("HTTP/1.0", format!("HTTP/1.0 200 OK\r\n{head}\r\n{events}")),
        ] {
            let address = serve(move |mut stream, _| stream.write_all(answer.as_bytes()).unwrap());
            let sample = one_sample(&settings(address, 1));
            assert_eq!(sample.outcome, Outcome::Completed, "{server}, {framing}");
            assert_eq!(sample.output_len, 3, "{server}, {framing}");
            assert_eq!(prompt_len.unwrap_or(sample.prompt_len), sample.prompt_len, "{server}, {framing}");
        }
    }
}

#[test]
fn a_chat_is_requested_as_one_and_its_thoughts_count() {
    let delta = |delta: &str, finish: &str| {
        format!(
            "data: {{\"choices\":[{{\"index\":0,\"delta\":{{{delta}}},\"finish_reason\":{finish}}}]}}\n\n"
        )
    };
    let events = [
        delta("\"role\":\"assistant\",\"content\":\"\"", "null"),
        delta("\"content\":null,\"reasoning_content\":\"Hm\"", "null"),
        delta("\"content\":\"Hi\"", "null"),
        delta("\"tool_calls\":[{\"index\":0,\"function\":{\"arguments\":\"{}\"}}]", "null"),
        delta("", "\"stop\""),
        DONE.to_string(),
    ];
    let (seen, request) = mpsc::channel();
    let address = serve(move |mut connection, request| {
        connection.write_all(stream(&events.concat()).as_bytes()).unwrap();
        seen.send(request).unwrap();
    });
    let good = settings(address, 1);
    let settings = RunSettings {
        target: Target { endpoint: Endpoint::Chat, ..good.target },
        load: LoadSpec { prompts: PromptSource::Words, ..good.load },
        ..good
    };
    let sample = one_sample(&settings);
    assert_eq!((sample.outcome, sample.output_len, sample.deliveries.len()), (Outcome::Completed, 3, 3));
    let request = request.recv_timeout(PATIENCE).unwrap();
    assert_eq!(request.line(), "post /v1/chat/completions http/1.1");
    assert_eq!(request.json()["messages"][0]["role"], "user");
}

#[test]
fn broken_answers_are_counted_by_kind() {
    let begun = format!("{HEAD}{}{}", chunk(TOKEN), chunk(TOKEN));
    let error = format!("{TOKEN}data: {{\"error\":{{\"message\":\"gone\"}}}}\n\n{DONE}");
    let length = |events: &str| format!("HTTP/1.1 200 OK\r\ncontent-length: 9999\r\n\r\n{events}");
    for (answer, kind, tokens) in [
        (String::new(), FailureKind::EarlyClose, 0),
        ("HTTP/1.1 200 O".into(), FailureKind::EarlyClose, 0),
        ("\x01\x02 rubbish\r\n\r\n".into(), FailureKind::BadHttp, 0),
        (page("500 X", "", "oops"), FailureKind::Status(500), 0),
        ("HTTP/1.1 429 X\r\ncontent-length: 900\r\n\r\ncut".into(), FailureKind::Status(429), 0),
        (page("301 X", "location: /\r\n", ""), FailureKind::Status(301), 0),
        (begun.clone(), FailureKind::EarlyClose, 2),
        (format!("{begun}0\r\n\r\n"), FailureKind::EarlyClose, 2),
        (format!("{begun}zz\r\n"), FailureKind::EarlyClose, 2),
        // All events are complete, but the end of the framing is missing.
        (format!("{begun}{}", chunk(DONE)), FailureKind::EarlyClose, 2),
        (length(&format!("{TOKEN}{DONE}")), FailureKind::EarlyClose, 1),
        (format!("HTTP/1.0 200 OK\r\n\r\n{TOKEN}"), FailureKind::EarlyClose, 1),
        (page("200 OK", "", "<html>\n</html>\n"), FailureKind::BadSse, 0),
        (page("200 OK", "content-type: application/json\r\n", "{\"choices\":[]}"), FailureKind::BadSse, 0),
        (stream("data: {\"choices\":[{\n\n"), FailureKind::BadSse, 0),
        (stream(&error), FailureKind::ErrorEvent, 1),
        (stream(DONE), FailureKind::NoTokens, 0),
    ] {
        let bytes = answer.clone();
        let address = serve(move |mut stream, _| stream.write_all(bytes.as_bytes()).unwrap());
        let record = run_to_end(&settings(address, 2));
        assert_eq!(failure_kinds(&record), [kind; 2], "{answer:?}: {:?}", record.samples);
        assert!(record.samples.iter().all(|s| s.output_len == tokens), "{answer:?}");
    }
}

#[test]
fn answers_that_never_end_are_given_up() {
    for begin in
        ["", "H", "HTTP/1.1 200 OK\r\ncontent-le", HEAD, "HTTP/1.1 503 X\r\ncontent-length: 9\r\n\r\n"]
    {
        let address = serve(move |mut stream, _| {
            stream.write_all(begin.as_bytes()).unwrap();
            let _ = stream.read(&mut [0]);
        });
        let request_timeout = Duration::from_millis(60);
        let record = run_to_end(&RunSettings { request_timeout, ..settings(address, 2) });
        assert_eq!(failure_kinds(&record), [FailureKind::Timeout; 2], "{begin:?}");
        assert!(record.samples.iter().all(|s| s.ended - s.sent >= request_timeout));
    }
}

#[test]
fn a_server_that_never_pauses_does_not_outlast_the_deadline() {
    let address = serve(|mut stream, _| {
        stream.write_all(HEAD.as_bytes()).unwrap();
        let tokens = chunk(TOKEN).repeat(1000);
        while stream.write_all(tokens.as_bytes()).is_ok() {}
    });
    let sample = one_sample(&RunSettings { request_timeout: Duration::from_secs(1), ..settings(address, 1) });
    assert!(matches!(&sample.outcome, Outcome::Failed(failure) if failure.kind == FailureKind::Timeout));
    assert!(sample.output_len > 0 && sample.deliveries.len() == sample.output_len as usize);
}

#[test]
fn clients_that_leave_really_leave_and_are_no_failures() {
    let (left, seen) = mpsc::channel();
    let address = serve(move |mut stream, _| {
        stream.write_all(HEAD.as_bytes()).unwrap();
        // Sends until the client disconnects.
        while stream.write_all(chunk(TOKEN).as_bytes()).is_ok() {}
        left.send(()).unwrap();
    });
    let mut settings = settings(address, 4);
    settings.load.hangup_share = 1.0;
    let record = run_to_end(&settings);
    assert!(record.samples.iter().all(|s| s.outcome == Outcome::HungUp && s.output_len == 2));
    (0..4).for_each(|_| seen.recv_timeout(PATIENCE).unwrap());
}

/// Rejects the first `refusals` requests with `refusal` and completes the later ones.
fn serve_after(refusals: usize, refusal: String) -> std::net::SocketAddr {
    let count = AtomicUsize::new(0);
    serve_bytes(move |request| {
        if count.fetch_add(1, Ordering::SeqCst) < refusals {
            refusal.clone()
        } else {
            good_response(&request)
        }
    })
}

#[test]
fn a_temporary_refusal_is_retried_and_counted() {
    for status in ["503 X", "429 X"] {
        let busy = page(status, "retry-after: 0\r\n", "busy");
        let sample = one_sample(&RunSettings { retries: 3, ..settings(serve_after(2, busy), 1) });
        assert_eq!((sample.outcome, sample.retries), (Outcome::Completed, 2), "{status}");
        assert!(sample.sent < sample.deliveries[0].at());
    }
}

#[test]
fn a_refusal_that_stays_is_the_failure() {
    let refused = |status: &str, headers: &str, retries| {
        let address = serve_after(usize::MAX, page(status, headers, "no"));
        let sample = one_sample(&RunSettings { retries, ..settings(address, 1) });
        let Outcome::Failed(failure) = sample.outcome else { panic!("{:?}", sample.outcome) };
        assert_eq!(failure.message, "no");
        (failure.kind, sample.retries)
    };
    assert_eq!(refused("503 X", "retry-after: 0\r\n", 2), (FailureKind::Status(503), 2));
    assert_eq!(refused("503 X", "retry-after: 0\r\n", 0), (FailureKind::Status(503), 0));
    // A delay beyond the deadline is not waited for; other statuses are not retried.
    assert_eq!(refused("429 X", "retry-after: 61\r\n", 2), (FailureKind::Status(429), 0));
    assert_eq!(refused("500 X", "retry-after: 0\r\n", 2), (FailureKind::Status(500), 0));
}

#[test]
fn a_closed_port_is_a_failure_to_connect_however_often_it_is_tried() {
    let record = run_to_end(&RunSettings { retries: 1, ..settings(closed_port(), 3) });
    assert_eq!(failure_kinds(&record), [FailureKind::Connect; 3]);
    assert!(record.samples.iter().all(|sample| sample.retries == 1));
}

#[test]
fn an_answer_of_one_token_and_one_of_thousands_are_read_alike() {
    for tokens in [1, 5000] {
        let address = serve_bytes(|request| good_response(&request));
        let mut settings = settings(address, 1);
        settings.load.output = Some(LengthDistribution::Fixed(tokens));
        let sample = one_sample(&settings);
        assert_eq!((sample.outcome, sample.output_len), (Outcome::Completed, tokens));
    }
}
