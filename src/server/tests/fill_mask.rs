//! Tests of the fill-mask API with a fake encoder-only engine.

use super::encoder_server::{
    EOS, FILL_MASK, MASK, encoder, encoder_server, play, post, prompting, server_for,
};
use super::test_server::BOS;
use crate::actors::{EmbeddingDefaults, ModelInfo};
use crate::request::{Task, Token, TokenEvent};
use serde_json::json;

/// Returns the engine's event for a mask: tokens with their probabilities.
fn filled(candidates: &[(u32, f32)]) -> TokenEvent {
    let top: Vec<(u32, f32)> = candidates.iter().map(|(id, probability)| (*id, probability.ln())).collect();
    TokenEvent::MaskFilled(Token { id: top[0].0, logprob: Some(top[0].1), rank: None, top })
}

#[actix_web::test]
async fn a_mask_is_filled_as_transformers_fills_it() {
    let mut server = encoder_server();
    let body = json!({ "input": "a<mask>c", "top_k": 2 });
    let answers = vec![vec![filled(&[(98, 0.25), (BOS, 0.0)])]];
    let (requests, response) = play(&mut server, FILL_MASK, body, answers).await;
    assert_eq!(requests[0].encoder_input[..], [BOS, 97, MASK, 99, EOS]);
    assert_eq!(requests[0].task, Task::FillMask { positions: [2].into(), top_k: 2 });
    assert_eq!(
        response.json(),
        json!({
            "object": "list", "model": "tiny", "usage": { "prompt_tokens": 5, "total_tokens": 5 },
            "data": [{
                "object": "fill_mask", "index": 0,
                "masks": [{
                    "position": 2,
                    "candidates": [
                        {
                            "token": 98, "token_str": "b", "score": 0.25, "logprob": -1.3862944,
                            "sequence": "abc"
                        },
                        {
                            "token": BOS, "token_str": "<s>", "score": 0.0, "logprob": -9999.0,
                            "sequence": "ac"
                        }
                    ]
                }]
            }]
        })
    );
    server.close().await;
}

#[actix_web::test]
async fn each_mask_of_each_text_has_its_own_candidates() {
    let mut server = encoder_server();
    let body = json!({ "input": [[97, MASK, MASK], [MASK, 98]] });
    let answers =
        vec![vec![filled(&[(98, 1.0)]), filled(&[(99, 1.0), (100, 0.25)])], vec![filled(&[(101, 1.0)])]];
    let (requests, response) = play(&mut server, FILL_MASK, body, answers).await;
    let tasks: Vec<Task> = requests.iter().map(|request| request.task.clone()).collect();
    assert_eq!(tasks, [&[1, 2][..], &[0]].map(|at| Task::FillMask { positions: at.into(), top_k: 5 }));
    let answer = response.json();
    let sequences = |text: usize, mask: usize| -> Vec<String> {
        let candidates = answer["data"][text]["masks"][mask]["candidates"].as_array().unwrap();
        candidates.iter().map(|candidate| candidate["sequence"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(sequences(0, 0), ["ab<mask>"]);
    assert_eq!(sequences(0, 1), ["a<mask>c", "a<mask>d"]);
    assert_eq!(sequences(1, 0), ["eb"]);
    assert_eq!(
        (&answer["data"][0]["masks"][1]["position"], &answer["data"][1]["index"]),
        (&json!(2), &json!(1))
    );
    server.close().await;
}

/// With one mask, special tokens are omitted; with several, only padding is.
#[actix_web::test]
async fn special_tokens_are_shown_where_there_are_other_masks() {
    let mut server =
        server_for(encoder(EmbeddingDefaults { pad_token: Some("c".to_owned()), ..prompting() }));
    let body = json!({ "input": ["acb<mask>", "<mask>acb<mask>"], "top_k": 1 });
    let answers = vec![vec![filled(&[(MASK, 1.0)])], vec![filled(&[(97, 1.0)]), filled(&[(EOS, 1.0)])]];
    let (_, response) = play(&mut server, FILL_MASK, body, answers).await;
    let answer = response.json();
    let sequence =
        |text: usize, mask: usize| answer["data"][text]["masks"][mask]["candidates"][0]["sequence"].clone();
    assert_eq!(sequence(0, 0), "ab");
    assert_eq!([sequence(1, 0), sequence(1, 1)], ["<s>aab<mask></s>", "<s><mask>ab</s></s>"]);
    server.close().await;
}

#[actix_web::test]
async fn errors_name_the_parameter() {
    let mut filling = encoder_server();
    for (body, code, param, part) in [
        (json!({ "input": "abc", "top_k": 0, "model": "big" }), "model_not_found", "model", "'big'"),
        (json!({ "input": "abc" }), "invalid_value", "input", "text 0 of 'input' has no mask token (<mask>)"),
        (json!({ "input": ["<mask>", "b"] }), "invalid_value", "input", "text 1"),
        (json!({ "input": "<mask>", "top_k": 0 }), "invalid_value", "top_k", "from 1 to 20"),
        (json!({ "input": "<mask>", "top_k": 21 }), "invalid_value", "top_k", "not 21"),
        (json!({ "input": "<mask>", "targets": ["a"] }), "unsupported_parameter", "targets", "not supported"),
    ] {
        let response = post(&filling, FILL_MASK, &body).await;
        let message = response.json()["error"]["message"].as_str().unwrap().to_owned();
        assert_eq!(response.error(), (code.to_owned(), json!(param)), "{message}");
        assert!(message.contains(part), "{message}");
    }
    let lost = vec![vec![]];
    let (_, response) = play(&mut filling, FILL_MASK, json!({ "input": "<mask>" }), lost).await;
    assert_eq!((response.status, response.error().0.as_str()), (500, "internal_error"));
    filling.close().await;
    let without =
        server_for(encoder(EmbeddingDefaults { mask_tokens: vec!["[MASK]".into()], ..prompting() }));
    let response = post(&without, FILL_MASK, &json!({ "input": "[MASK]" })).await;
    assert!(response.json()["error"]["message"].as_str().unwrap().contains("no mask token"));
    without.close().await;
}

/// Every candidate repeats its whole text, so that masks, candidates and length multiply.
#[actix_web::test]
async fn an_answer_has_a_bound() {
    let model = encoder(prompting());
    let server =
        server_for(ModelInfo { encoder_context: 512, max_sequence_tokens: 512, context: 512, ..model });
    let masks = vec![MASK; 512];
    for (body, tokens) in [
        (json!({ "input": masks, "top_k": 20 }), 512 * 20 * 512),
        (json!({ "input": [masks, masks, masks], "top_k": 3 }), 3 * 512 * 3 * 512),
    ] {
        let response = post(&server, FILL_MASK, &body).await;
        assert_eq!((response.status, response.error().1), (400, json!("input")));
        let message = response.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(&tokens.to_string()) && message.contains("2097152"), "{message}");
    }
    // A request exactly at the limit is accepted.
    let mut server = server;
    let answers = vec![(0..512).map(|_| filled(&[(98, 1.0)])).collect()];
    let (_, response) = play(&mut server, FILL_MASK, json!({ "input": masks, "top_k": 8 }), answers).await;
    assert_eq!(response.json()["data"][0]["masks"].as_array().unwrap().len(), 512, "{}", response.status);
    server.close().await;
}
