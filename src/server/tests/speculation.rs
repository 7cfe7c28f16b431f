//! Tests of speculative decoding in requests: what reaches the engine, what is refused, and how the response
//! reports drafts.

use super::test_server::{Client, DEADLINE, TestServer, answer, model, tokenizer_with};
use crate::actors::ModelInfo;
use crate::actors::speculation::{DraftModelFacts, SpeculationSetup};
use crate::config::LookupSizes;
use crate::request::{AcceptanceRule, DraftSource, Request, Speculation, TokenEvent};
use serde_json::{Value, json};

const LOOKUP: DraftSource = DraftSource::PromptLookup { shortest: 2, longest: 4 };

/// Returns speculative decoding as the server offers it, with or without a draft model.
fn setup(has_draft: bool) -> SpeculationSetup {
    let draft = DraftModelFacts { name: "small".into(), weight_bytes: 9, context: 32 };
    SpeculationSetup {
        drafter: Some(if has_draft { DraftSource::Model } else { LOOKUP }),
        draft: has_draft.then_some(draft),
        max_drafts: 5,
        acceptance: AcceptanceRule::Coupled,
        lookup: LookupSizes { min: 2, max: 4 },
    }
}

fn server(speculation: Option<SpeculationSetup>) -> TestServer {
    // Constrained output needs an end token.
    let model = ModelInfo { speculation, eos: vec![257], vocab: 258, ..model() };
    let tokenizer = tokenizer_with(&["<s>", "</s>"], Value::Null);
    TestServer::for_model(model, tokenizer, None, |_| {}, DEADLINE)
}

/// Returns a body with `params`.
fn body(params: &Value) -> String {
    let mut body = json!({ "prompt": "p", "max_tokens": 8 });
    body.as_object_mut().unwrap().extend(params.as_object().unwrap().clone());
    body.to_string()
}

/// Posts a prompt with `params`, and returns the engine's request.
async fn request(server: &mut TestServer, params: Value) -> Request {
    let client = server.send(&body(&params)).await;
    let (request, sender) = server.next_request().await;
    answer("x").into_iter().for_each(|event| sender.send(event));
    let response = client.response().await;
    assert_eq!(response.status, 200, "{}", response.body);
    request
}

fn speculation(drafter: DraftSource, max_drafts: usize, rule: AcceptanceRule) -> Option<Speculation> {
    Some(Speculation { drafter, max_drafts, rule })
}

#[actix_web::test]
async fn a_request_chooses_drafter_number_and_rule() {
    use AcceptanceRule::{Coupled, Rejection, TopSampling};
    let (draft, coupled) = (DraftSource::Model, Coupled);
    let mut server = server(Some(setup(true)));
    for (params, expected) in [
        (json!({}), speculation(draft, 5, coupled)),
        (json!({ "speculation": "auto" }), speculation(draft, 5, coupled)),
        (json!({ "speculation": "draft", "acceptance": "rejection" }), speculation(draft, 5, Rejection)),
        (json!({ "speculation": "prompt_lookup" }), speculation(LOOKUP, 5, coupled)),
        (json!({ "speculation": "off" }), None),
        (json!({ "acceptance": "top_sampling" }), speculation(draft, 5, TopSampling)),
        (json!({ "speculative.n_max": 2 }), speculation(draft, 2, coupled)),
        (json!({ "speculative.n_max": 99 }), speculation(draft, 5, coupled)),
        (json!({ "speculative.n_max": -1 }), speculation(draft, 5, coupled)),
        (json!({ "speculative.n_max": 0 }), None),
        (json!({ "speculative.n_min": 3, "speculative.p_min": 0.5 }), speculation(draft, 5, coupled)),
        (json!({ "max_tokens": 1 }), None),
        (json!({ "use_beam_search": true, "n": 1, "beam_width": 1 }), None),
    ] {
        let request = request(&mut server, params.clone()).await;
        assert_eq!(request.speculation, expected, "{params}");
    }
    server.close().await;
}

/// The device verifies drafts by its own draws; the host does it with a grammar, or if a rule compares
/// probabilities, of which a greedy request has none.
#[actix_web::test]
async fn the_host_draws_where_the_device_cannot_verify() {
    let mut server = server(Some(setup(true)));
    let regex = json!({ "structured_outputs": { "regex": "x+" } });
    for (params, is_planned) in [
        (json!({ "temperature": 0.5 }), false),
        (json!({ "temperature": 0.5, "acceptance": "coupled" }), false),
        (json!({ "temperature": 0.5, "acceptance": "rejection" }), true),
        (json!({ "temperature": 0.5, "acceptance": "rejection", "speculation": "off" }), false),
        (json!({ "temperature": 0, "acceptance": "rejection" }), false),
        (regex.clone(), true),
        (json!({ "structured_outputs": { "regex": "x+" }, "speculation": "off" }), false),
    ] {
        let request = request(&mut server, params.clone()).await;
        assert_eq!(request.plan.is_some(), is_planned, "{params}");
    }
    server.close().await;
}

#[actix_web::test]
async fn what_the_server_does_not_have_is_refused() {
    for (setup, method, says) in [
        (None, "draft", "no speculative decoding"),
        (None, "prompt_lookup", "no speculative decoding"),
        (Some(setup(false)), "draft", "has no draft model"),
    ] {
        let server = server(setup);
        let response = server.post(&body(&json!({ "speculation": method }))).await;
        assert_eq!((response.status, response.error().1), (400, json!("speculation")));
        let message = response.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(says) && message.contains(method), "{message}");
        server.close().await;
    }
    let mut server = server(None);
    let plain = json!({ "speculation": "off", "acceptance": "rejection", "speculative.n_max": 3 });
    assert_eq!(request(&mut server, plain).await.speculation, None);
    assert_eq!(request(&mut server, json!({ "speculation": "auto" })).await.speculation, None);
    for (params, param) in [
        (json!({ "speculation": "eagle" }), "speculation"),
        (json!({ "speculation": true }), "speculation"),
        (json!({ "acceptance": "typical" }), "acceptance"),
        (json!({ "speculative.n_max": 1.5 }), "speculative.n_max"),
    ] {
        let response = server.post(&body(&params)).await;
        assert_eq!((response.status, response.error().1), (400, json!(param)), "{params}");
    }
    server.close().await;
}

/// A server without a default source of drafts has prompt lookup for requests that choose it.
#[actix_web::test]
async fn prompt_lookup_can_be_chosen_without_being_the_default() {
    let mut server = server(Some(SpeculationSetup { drafter: None, ..setup(false) }));
    assert_eq!(request(&mut server, json!({})).await.speculation, None);
    let chosen = request(&mut server, json!({ "speculation": "prompt_lookup" })).await;
    assert_eq!(chosen.speculation, speculation(LOOKUP, 5, AcceptanceRule::Coupled));
    let card = server.get("/v1/models/tiny").await.json();
    assert_eq!(
        (&card["speculation"]["method"], &card["speculation"]["draft_model"]),
        (&json!("off"), &Value::Null)
    );
    server.close().await;
}

/// A choice that ends with a stop string counts the drafts up to it, and so does every chunk with a usage.
#[actix_web::test]
async fn drafts_before_a_stop_string_count() {
    let mut server = server(Some(setup(true)));
    let speculated = |drafted, accepted| TokenEvent::Speculated { drafted, accepted };
    for stream in [false, true] {
        let options = json!({ "include_usage": true, "continuous_usage_stats": true });
        let options = if stream { options } else { Value::Null };
        let params = json!({ "n": 2, "stop": "y", "stream": stream, "stream_options": options });
        let client = server.send(&body(&params)).await;
        for number in 0..2 {
            let (_, sender) = server.next_request().await;
            let [x, y, end] = answer("xy").try_into().expect("two tokens and an end");
            let events = match number {
                0 => vec![speculated(3, 1), x, speculated(3, 2), y, speculated(6, 5), end],
                _ => vec![speculated(5, 0), x, end],
            };
            events.into_iter().for_each(|event| sender.send(event));
        }
        let response = client.response().await;
        let objects = if stream { response.events() } else { vec![response.json()] };
        assert!(objects.iter().all(|object| object["usage"]["completion_tokens_details"].is_object()));
        let details = &objects.last().unwrap()["usage"]["completion_tokens_details"];
        let expected = json!({ "accepted_prediction_tokens": 2, "rejected_prediction_tokens": 6 });
        assert_eq!(*details, expected);
    }
    server.close().await;
}

/// The usage adds up the drafts of all choices, and is without them where nothing speculated.
#[actix_web::test]
async fn the_usage_has_the_drafts() {
    let mut server = server(Some(setup(true)));
    for stream in [false, true] {
        let options = if stream { json!({ "include_usage": true }) } else { Value::Null };
        let params = json!({ "n": 2, "stream": stream, "stream_options": options });
        let client = server.send(&body(&params)).await;
        for (drafted, accepted) in [(10, 7), (5, 0)] {
            let (_, sender) = server.next_request().await;
            let mut events = answer("x");
            events.insert(events.len() - 1, TokenEvent::Speculated { drafted, accepted });
            events.into_iter().for_each(|event| sender.send(event));
        }
        let response = client.response().await;
        let usage = match stream {
            true => response.events().last().unwrap()["usage"].clone(),
            false => response.json()["usage"].clone(),
        };
        let details = json!({ "accepted_prediction_tokens": 7, "rejected_prediction_tokens": 8 });
        assert_eq!(usage["completion_tokens_details"], details);
    }
    let response = server.send(&body(&json!({ "speculation": "off" }))).await;
    let (_, sender) = server.next_request().await;
    answer("x").into_iter().for_each(|event| sender.send(event));
    assert!(response.response().await.json()["usage"].get("completion_tokens_details").is_none());
    server.close().await;
}

/// A rule that changes the distribution is named in the response and in every chunk, if it applies.
#[actix_web::test]
async fn lossy_acceptance_is_marked() {
    let mut server = server(Some(setup(false)));
    for stream in [false, true] {
        for (params, marked) in [
            (json!({ "acceptance": "top_sampling", "temperature": 0.5 }), true),
            (json!({ "acceptance": "top_sampling", "temperature": 0 }), false),
            (json!({ "acceptance": "top_sampling", "temperature": 0.5, "speculation": "off" }), false),
            (json!({ "acceptance": "rejection", "temperature": 0.5 }), false),
        ] {
            let mut params = params;
            params["stream"] = stream.into();
            let client: Client = server.send(&body(&params)).await;
            let (_, sender) = server.next_request().await;
            answer("x").into_iter().for_each(|event| sender.send(event));
            let response = client.response().await;
            let objects = if stream { response.events() } else { vec![response.json()] };
            let expected = if marked { json!("top_sampling") } else { Value::Null };
            assert!(objects.iter().all(|object| object["acceptance"] == expected), "{params}: {objects:?}");
        }
    }
    server.close().await;
}

#[actix_web::test]
async fn the_model_card_shows_the_draft_model() {
    let server = server(Some(setup(true)));
    let card = server.get("/v1/models/tiny").await.json();
    let expected =
        json!({ "method": "draft", "draft_model": "small", "max_drafts": 5, "acceptance": "coupled" });
    assert_eq!(card["speculation"], expected);
    server.close().await;
}
