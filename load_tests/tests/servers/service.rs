//! Tests of the other requests of a run (models, metrics, warm-ups) and of API key secrecy.
//!
//! Invariant: an API key is sent only to the server it is for.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use load_tests::{
    plan::requests::LoadSpec,
    run::{Progress, RunSettings, Target, run},
    sample::{FailureKind, Outcome},
};

use super::support::{
    ReceivedRequest, all_completed, closed_port, failure_kinds, good_response, one_sample, page, run_to_end,
    serve_bytes, settings, stream, users, with_keys,
};

const MODELS: &str =
    "{\"object\":\"list\",\"data\":[{\"id\":\"tiny\",\"object\":\"model\"},{\"id\":\"other\"}]}";

/// Serves every request that a run may send, and records them. Its metrics count the requests so far.
fn serve_service() -> (SocketAddr, Arc<Mutex<Vec<ReceivedRequest>>>) {
    let log = Arc::new(Mutex::new(Vec::new()));
    let kept = Arc::clone(&log);
    let address = serve_bytes(move |request| {
        let mut log = log.lock().unwrap();
        log.push(request.clone());
        match request.line() {
            line if line.contains("/v1/models") => page("200 OK", "", MODELS),
            line if line.contains("/metrics") => page("200 OK", "", &format!("asked {}\n", log.len())),
            _ => good_response(&request),
        }
    });
    (address, kept)
}

fn lines(log: &Mutex<Vec<ReceivedRequest>>) -> Vec<String> {
    log.lock()
        .unwrap()
        .iter()
        .map(|request| request.line().trim_end_matches(" http/1.1").to_string())
        .collect()
}

/// Returns `settings` with a changed target.
fn with_target(settings: RunSettings, change: impl Fn(Target) -> Target) -> RunSettings {
    RunSettings { target: change(settings.target), ..settings }
}

#[test]
fn the_model_is_requested_under_the_prefix_of_the_servers_url_with_the_key() {
    let (address, log) = serve_service();
    let url = format!("http://{address}/a/b/");
    let settings = with_target(with_keys(settings(address, 1), &["sesame"]), |target| Target {
        url: url.clone(),
        models: Vec::new(),
        ..target
    });
    let record = run_to_end(&settings);
    assert!(all_completed(&record));
    assert_eq!(record.models, ["tiny"]);
    assert_eq!(lines(&log), ["get /a/b/v1/models", "post /a/b/v1/completions"]);
    let log = log.lock().unwrap();
    assert!(log.iter().all(|request| request.header("authorization") == Some("bearer sesame")));
    assert_eq!(log[1].json()["model"], "tiny");
}

#[test]
fn models_and_keys_are_spread_over_the_requests() {
    let (address, log) = serve_service();
    let mut settings = with_keys(settings(address, 40), &["ka", "kb", "kc"]);
    settings.target.models = vec!["first".into(), "second".into()];
    settings.load.models = 2;
    let record = run_to_end(&settings);
    assert!(all_completed(&record));
    let log = log.lock().unwrap();
    for (model, name) in ["first", "second"].iter().enumerate() {
        let sampled = record.samples.iter().filter(|s| s.model == model).count();
        assert!(sampled > 0);
        assert_eq!(log.iter().filter(|request| request.json()["model"] == *name).count(), sampled);
    }
    for key in ["bearer ka", "bearer kb", "bearer kc"] {
        assert!(log.iter().any(|request| request.header("authorization") == Some(key)), "{key}");
    }
}

#[test]
fn no_key_is_ever_shown() {
    // The server echoes the key, as some servers do.
    let echo = |request: &ReceivedRequest| format!("who is {}?", request.header("authorization").unwrap());
    let address = serve_bytes(move |request| page("401 X", "", &echo(&request)));
    let good = with_keys(settings(address, 2), &["sk-hunter2"]);
    let mut shown = format!("{good:?}");
    let record = run_to_end(&good);
    assert_eq!(failure_kinds(&record), [FailureKind::Status(401); 2]);
    shown += &format!("{record:?}");
    assert!(shown.contains("who is bearer [key]?"), "{shown}");
    let address =
        serve_bytes(move |request| stream(&format!("data: {{\"error\":\"{}\"}}\n\n", echo(&request))));
    let within = run_to_end(&with_keys(settings(address, 1), &["sk-hunter2"]));
    shown += &format!("{within:?}");
    let asking = with_target(good.clone(), |target| Target { models: Vec::new(), ..target });
    shown += &format!("{:#}", run(&asking, &Progress::default()).unwrap_err());
    let impossible = with_keys(settings(address, 1), &["fine", "sk-hunter2\n"]);
    let error = format!("{:#}", run(&impossible, &Progress::default()).unwrap_err());
    assert!(error.contains("key 2"), "{error}");
    shown += &error;
    assert!(!shown.contains("hunter2"), "{shown}");
}

#[test]
fn metrics_are_read_before_the_run_and_after_it() {
    let (address, log) = serve_service();
    let url = format!("http://{address}/metrics");
    let settings =
        with_target(settings(address, 2), |target| Target { metrics_url: Some(url.clone()), ..target });
    let (before, after) = run_to_end(&RunSettings { warmups: 1, ..settings }).server.unwrap();
    assert_eq!((before.text.as_str(), after.text.as_str()), ("asked 2\n", "asked 5\n"));
    assert_eq!(lines(&log)[1], "get /metrics");
}

#[test]
fn a_key_is_not_shown_in_the_metrics() {
    let (address, _) = serve_service();
    let (elsewhere, log) = serve_service();
    let url = format!("http://{elsewhere}/metrics");
    let settings = with_keys(settings(address, 1), &["sesame"]);
    run_to_end(&with_target(settings, |target| Target { metrics_url: Some(url.clone()), ..target }));
    let log = log.lock().unwrap();
    assert_eq!(log.len(), 2);
    assert!(log.iter().all(|request| request.header("authorization").is_none()));
}

#[test]
fn metrics_that_cannot_be_read_are_none_and_no_failure() {
    let missing = serve_bytes(|_| page("404 X", "", "no"));
    for other in [missing, closed_port()] {
        let address = serve_bytes(|request| good_response(&request));
        let url = format!("http://{other}/metrics");
        let settings =
            with_target(settings(address, 1), |target| Target { metrics_url: Some(url.clone()), ..target });
        let record = run_to_end(&settings);
        assert!(record.server.is_none() && all_completed(&record));
    }
}

#[test]
fn warm_ups_come_first_one_by_one_with_other_prompts_and_do_not_count() {
    let (address, log) = serve_service();
    let record = run_to_end(&RunSettings { warmups: 3, arrivals: users(1), ..settings(address, 2) });
    assert_eq!((record.samples.len(), record.unsent), (2, 0));
    assert!(record.samples.iter().all(|s| s.retries == 0 && s.outcome == Outcome::Completed));
    let prompts: Vec<_> =
        log.lock().unwrap().iter().map(|request| request.json()["prompt"].clone()).collect();
    assert_eq!(prompts.len(), 5);
    assert!(prompts[..3].iter().all(|prompt| !prompts[3..].contains(prompt)), "{prompts:?}");
}

#[test]
fn a_warm_up_that_fails_says_what_failed() {
    let address = serve_bytes(|_| page("500 X", "", "oops"));
    let error = run(&RunSettings { warmups: 2, ..settings(address, 1) }, &Progress::default()).unwrap_err();
    assert_eq!(error.to_string(), "warm-up 1 of 2 failed: status 500: oops");
}

#[test]
fn a_run_that_cannot_begin_says_why() {
    let failing = |change: &dyn Fn(RunSettings) -> RunSettings| {
        let settings = change(settings(closed_port(), 1));
        format!("{:#}", run(&settings, &Progress::default()).unwrap_err())
    };
    let asking = failing(&|s| with_target(s, |target| Target { models: Vec::new(), ..target }));
    assert!(asking.contains("/v1/models") && asking.contains("connect"), "{asking}");
    let scheme = failing(&|s| with_target(s, |target| Target { url: "ftp://h".into(), ..target }));
    assert!(scheme.contains("the server's URL") && scheme.contains("ftp"), "{scheme}");
    let metrics = failing(&|s| with_target(s, |target| Target { metrics_url: Some("x".into()), ..target }));
    assert!(metrics.contains("the metrics URL"), "{metrics}");
    let load = failing(&|s| RunSettings { load: LoadSpec { temperature: -1.0, ..s.load }, ..s });
    assert!(load.contains("temperature"), "{load}");
    let models = failing(&|s| RunSettings { load: LoadSpec { models: 2, ..s.load }, ..s });
    assert!(models.contains("2 models"), "{models}");
}

#[test]
fn lists_that_name_no_model_are_refused() {
    let cut = "HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\n{".to_string();
    for (answer, timeout_ms, expected) in [
        (page("404 X", "", "no"), 60_000, "404"),
        (page("200 OK", "", "{\"data\":[]}"), 60_000, "empty"),
        (page("200 OK", "", "hello"), 60_000, "not a list of models"),
        (cut, 50, "no response after 50ms"),
    ] {
        let address = serve_bytes(move |_| answer.clone());
        let mut asking = with_target(settings(address, 1), |target| Target { models: Vec::new(), ..target });
        asking.request_timeout = Duration::from_millis(timeout_ms);
        let error = format!("{:#}", run(&asking, &Progress::default()).unwrap_err());
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn a_server_that_requires_a_key_is_distinguished() {
    let address = serve_bytes(|request| match request.header("authorization") {
        Some("bearer right") => good_response(&request),
        _ => page("401 X", "", ""),
    });
    assert_eq!(one_sample(&with_keys(settings(address, 1), &["right"])).outcome, Outcome::Completed);
    assert_eq!(failure_kinds(&run_to_end(&settings(address, 1))), [FailureKind::Status(401)]);
}
