//! Tests of the limits of clients over TCP.

use crate::security::Served;
use mainstem::request::client::ClientSettings;
use serde_json::{Value, json};

fn completion(fields: &Value) -> String {
    let mut body = json!({ "prompt": "a", "max_tokens": 1 });
    for (name, value) in fields.as_object().expect("an object") {
        body[name] = value.clone();
    }
    body.to_string()
}

#[test]
fn requests_beyond_the_limit_of_a_minute_are_rejected_and_told_when_to_retry() {
    let served = Served::with(|config| {
        config.clients = ClientSettings { requests_per_minute: Some(3), ..ClientSettings::default() };
    });
    let ask = |fields: &Value| served.ask("POST", "/v1/completions", &[], &completion(fields));
    let refused = ask(&json!({ "priority": -1 }));
    assert_eq!((refused.status(), refused.error()["param"].as_str()), (400, Some("priority")));
    for fields in [json!({}), json!({ "service_tier": "flex" }), json!({ "priority": 2 })] {
        assert_eq!(ask(&fields).status(), 200, "{fields}");
    }
    let limited = ask(&json!({}));
    assert_eq!((limited.status(), limited.error()["code"].as_str()), (429, Some("rate_limit_exceeded")));
    let retry: u64 = limited.header("retry-after").and_then(|it| it.parse().ok()).expect("a number");
    assert!((15..=20).contains(&retry), "{retry}");
    let metrics = served.get("/metrics", &[]).body;
    assert!(metrics.contains("mainstem_admission_rejections_total{reason=\"rate_limit\"}"));
    assert!(metrics.contains("mainstem_request_queue_time_seconds_count{class=\"batch\"}"));
}

#[test]
fn a_client_that_has_used_up_its_tokens_waits_for_more() {
    let served = Served::with(|config| {
        config.clients = ClientSettings { tokens_per_minute: Some(10), ..ClientSettings::default() };
    });
    let long = completion(&json!({ "max_tokens": 20, "ignore_eos": true }));
    let ask = || served.ask("POST", "/v1/completions", &[], &long);
    assert_eq!(ask().status(), 200, "what a request needs is not known before");
    let limited = ask();
    let retry: u64 = limited.header("retry-after").and_then(|it| it.parse().ok()).expect("a number");
    assert!(limited.status() == 429 && retry > 50, "{retry}");
}
