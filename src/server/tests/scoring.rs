//! Tests of the APIs that compare and classify texts, with a fake engine.

use super::encoder_server::{EOS, around, encoder, play, post, prompting, server_for};
use super::test_server::{BOS, TestServer};
use crate::actors::{EmbeddingDefaults, ModelInfo};
use crate::config::PairTemplate;
use crate::decoding::{Classifier, DenseLayer, OutputFunction};
use crate::formats::{Prompts, Similarity};
use crate::request::{Pooling, Task, TokenEvent};
use serde_json::{Value, json};
use std::sync::Arc;

const RERANK: &str = "/v1/rerank";
const SCORE: &str = "/v1/score";
const CLASSIFY: &str = "/v1/classify";

fn vector(numbers: &[f32]) -> Vec<TokenEvent> {
    vec![TokenEvent::Embedding(numbers.to_vec())]
}

/// A classifier whose logits are the first numbers of a vector of three.
fn classifier(labels: &[&str], pooling: Option<Pooling>, function: OutputFunction) -> Classifier {
    let (n, k) = (labels.len(), 3);
    let weight = (0..n * k).map(|at| if at / k == at % k { 1.0 } else { 0.0 }).collect();
    let layers = vec![DenseLayer { weight, n, k, bias: None, activation: None, norm: None }];
    let labels = labels.iter().map(|label| (*label).to_owned()).collect();
    Classifier { pooling, layers, labels, function }
}

fn model(classifier: Classifier) -> ModelInfo {
    ModelInfo {
        endpoints: vec![CLASSIFY, SCORE, RERANK],
        classifier: Some(Arc::new(classifier)),
        ..encoder(prompting())
    }
}

fn reranker() -> ModelInfo {
    model(classifier(&["LABEL_0"], Some(Pooling::Cls), OutputFunction::Sigmoid))
}

fn embedder(prompting: EmbeddingDefaults) -> TestServer {
    server_for(ModelInfo { endpoints: vec!["/v1/embeddings", SCORE, RERANK], ..encoder(prompting) })
}

/// The tokens of a pair, as the template has them.
fn pair(first: &str, second: &str) -> Vec<u32> {
    let bytes = |text: &str| text.bytes().map(u32::from).collect::<Vec<_>>();
    [&[BOS][..], &bytes(first), &[EOS], &bytes(second), &[EOS]].concat()
}

fn numbers(value: &Value) -> Vec<f32> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap() as f32).collect()
}

#[actix_web::test]
async fn documents_are_sorted_by_the_scores_of_their_pairs() {
    let mut server = server_for(reranker());
    for (path, shows) in [(RERANK, true), ("/rerank", true), ("/v2/rerank", false)] {
        let body =
            json!({ "model": "tiny", "query": "ab", "documents": ["c", { "text": "de" }, "f"], "top_n": 2 });
        let answers = [-1.0, 2.0, 0.0].map(|logit| vector(&[logit, 9.0, 9.0])).to_vec();
        let (requests, response) = play(&mut server, path, body, answers).await;
        assert_eq!(requests[1].encoder_input[..], pair("ab", "de"));
        assert_eq!((&requests[1].task, requests[1].second_text), (&Task::Embed(Pooling::Cls), Some(4)));
        let mut answer = response.json();
        let scores = [0, 1].map(|at| answer["results"][at]["relevance_score"].take().as_f64().unwrap());
        assert!((scores[0] - 0.880797).abs() < 1e-5 && (scores[1] - 0.5).abs() < 1e-6, "{scores:?}");
        assert!(answer["id"].as_str().unwrap().starts_with("rerank-"));
        assert_eq!((&answer["model"], &answer["usage"]["total_tokens"]), (&json!("tiny"), &json!(19)));
        let results = answer["results"].as_array().unwrap();
        assert_eq!((results.len(), &results[0]["index"], &results[1]["index"]), (2, &json!(1), &json!(2)));
        assert_eq!(results[0].get("document"), shows.then_some(&json!({ "text": "de" })));
    }
    server.close().await;
}

#[actix_web::test]
async fn pairs_are_scored_one_to_one_one_to_many_and_many_to_many() {
    let mut server = server_for(reranker());
    for (names, first, second, expected) in [
        (["text_1", "text_2"], json!("a"), json!("b"), vec![("a", "b")]),
        (["text_1", "text_2"], json!("a"), json!(["b", "c"]), vec![("a", "b"), ("a", "c")]),
        (["queries", "items"], json!(["a", "d"]), json!(["b", "c"]), vec![("a", "b"), ("d", "c")]),
        (["queries", "documents"], json!(["a"]), json!(["b", "c"]), vec![("a", "b"), ("a", "c")]),
    ] {
        let body = json!({ names[0]: first, names[1]: second, "use_activation": false });
        let answers = (0..expected.len()).map(|at| vector(&[at as f32 - 0.5, 0.0, 0.0])).collect();
        let (requests, response) = play(&mut server, SCORE, body, answers).await;
        for (index, (a, b)) in expected.iter().enumerate() {
            assert_eq!(requests[index].encoder_input[..], pair(a, b));
            let one = json!({ "index": index, "object": "score", "score": index as f32 - 0.5 });
            assert_eq!(response.json()["data"][index], one);
        }
        assert_eq!(response.json()["object"], "list");
    }
    server.close().await;
}

#[actix_web::test]
async fn a_text_gets_the_label_with_the_largest_score() {
    let labels = ["bad", "good", "odd"];
    for (function, expected) in [
        (OutputFunction::Softmax, [0.106507, 0.786986, 0.106507]),
        (OutputFunction::Sigmoid, [0.5, 0.880797, 0.5]),
        (OutputFunction::Identity, [0.0, 2.0, 0.0]),
    ] {
        let mut server = server_for(model(classifier(&labels, Some(Pooling::Mean), function)));
        for (path, input) in
            [(CLASSIFY, json!("ab")), ("/classify", json!(["ab"])), (CLASSIFY, json!([7, 8]))]
        {
            let (requests, response) =
                play(&mut server, path, json!({ "input": input }), vec![vector(&[0.0, 2.0, 0.0])]).await;
            let ids = if input == json!([7, 8]) { vec![7, 8] } else { around("ab") };
            assert_eq!((&requests[0].encoder_input[..], requests[0].second_text), (&ids[..], None));
            let data = &response.json()["data"][0];
            assert_eq!((&data["label"], &data["num_classes"]), (&json!("good"), &json!(3)));
            let probs = numbers(&data["probs"]);
            assert!(probs.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-5), "{probs:?}");
        }
        server.close().await;
    }
}

#[actix_web::test]
async fn tokens_get_labels_of_their_own_without_special_and_ignored_ones() {
    let mut server = server_for(model(classifier(&["O", "B-X"], None, OutputFunction::Softmax)));
    let states = [9.0, 0.0, 0.0, 0.0, 2.0, 0.0, 2.0, 0.0, 0.0, 0.0, 9.0, 0.0];
    for (ignored, positions) in [(None, vec![1]), (Some(json!([])), vec![1, 2])] {
        let body = json!({ "input": "ab", "ignore_labels": ignored });
        let (requests, response) = play(&mut server, CLASSIFY, body, vec![vector(&states)]).await;
        assert_eq!(requests[0].task, Task::EmbedTokens);
        let data = &response.json()["data"][0];
        let entities = data["entities"].as_array().unwrap();
        let found: Vec<u64> = entities.iter().map(|entity| entity["index"].as_u64().unwrap()).collect();
        assert_eq!(found, positions);
        let mut first = entities[0].clone();
        assert!((first["score"].take().as_f64().unwrap() - 0.880797).abs() < 1e-5);
        assert_eq!(first, json!({"entity": "B-X", "score": null, "index": 1, "token": 97, "word": "a"}));
    }
    server.close().await;
}

#[actix_web::test]
async fn an_embedding_model_compares_embeddings_with_its_prompts_and_function() {
    let texts = [("query", "q:"), ("document", "d:")].map(|(name, text)| (name.to_owned(), text.to_owned()));
    let prompts = Prompts { texts: texts.into(), ..Prompts::default() };
    for (similarity, expected) in
        [(Similarity::Cosine, 0.6), (Similarity::Dot, 6.0), (Similarity::Euclidean, -(17f32).sqrt())]
    {
        let mut server = embedder(EmbeddingDefaults {
            prompts: prompts.clone(),
            similarity,
            normalize: false,
            ..prompting()
        });
        let answers = || vec![vector(&[2.0, 0.0, 0.0]), vector(&[3.0, 4.0, 0.0]), vector(&[5.0, 0.0, 0.0])];
        let body = json!({ "query": "a", "documents": ["b", "c"] });
        let (requests, response) = play(&mut server, RERANK, body, answers()).await;
        assert_eq!(requests[0].encoder_input[..], around("q:a"));
        assert_eq!(requests[1].encoder_input[..], around("d:b"));
        let body = json!({ "query": "abc", "documents": ["bcd", "c"], "max_tokens_per_doc": 2 });
        let (short, _) = play(&mut server, RERANK, body, answers()).await;
        let inputs = short.iter().map(|request| &request.encoder_input[..]);
        assert!(inputs.eq(["q:abc", "d:bc", "d:c"].map(around)), "{short:?}");
        let results = &response.json()["results"];
        assert_eq!((&results[0]["index"], &results[1]["index"]), (&json!(1), &json!(0)));
        let score = results[1]["relevance_score"].as_f64().unwrap() as f32;
        assert!((score - expected).abs() < 1e-6, "{similarity:?}: {score}");
        let body = json!({ "text_1": "a", "text_2": ["b", "c"] });
        let (requests, _) = play(&mut server, SCORE, body, answers()).await;
        assert_eq!(requests[0].encoder_input[..], around("a"));
        server.close().await;
    }
}

#[actix_web::test]
async fn prompts_and_dense_layers_apply_to_embeddings() {
    let texts = [("query", "q:"), ("passage", "p:")].map(|(name, text)| (name.to_owned(), text.to_owned()));
    let dense = vec![DenseLayer {
        weight: vec![0.0, 1.0, 0.0, 1.0, 0.0, 0.0],
        n: 2,
        k: 3,
        bias: None,
        activation: None,
        norm: None,
    }];
    let prompts = Prompts { texts: texts.into(), default: Some("passage".into()), are_left_out: false };
    let mut server = embedder(EmbeddingDefaults { prompts, dense, dimensions: 2, ..prompting() });
    for (params, prompted) in [
        (json!({}), "p:a"),
        (json!({ "prompt_name": "query" }), "q:a"),
        (json!({ "input_type": "search_query" }), "q:a"),
        (json!({ "input_type": "document" }), "p:a"),
        (json!({ "prompt": "x" }), "xa"),
        (json!({ "prompt": "" }), "a"),
    ] {
        let mut body = params.clone();
        body["input"] = "a".into();
        let (requests, response) =
            play(&mut server, "/v1/embeddings", body, vec![vector(&[3.0, 4.0, 9.0])]).await;
        assert_eq!(requests[0].encoder_input[..], around(prompted), "{params}");
        assert_eq!(numbers(&response.json()["data"][0]["embedding"]), [0.8, 0.6]);
    }
    for (params, param) in [
        (json!({ "prompt_name": "other" }), "prompt_name"),
        (json!({ "prompt_name": "query", "prompt": "x" }), "prompt_name"),
        (json!({ "input_type": "song" }), "input_type"),
    ] {
        let mut body = params.clone();
        body["input"] = "a".into();
        let response = post(&server, "/v1/embeddings", &body).await;
        assert_eq!((response.status, response.error().1), (400, json!(param)), "{params}");
    }
    server.close().await;
}

#[actix_web::test]
async fn long_pairs_are_refused_or_truncated() {
    let mut server = server_for(reranker());
    let body = json!({ "query": "abcd", "documents": ["b", "x".repeat(12)] });
    let response = post(&server, RERANK, &body).await;
    assert_eq!((response.status, response.error().1), (400, json!("documents")));
    assert!(
        response.body.contains("'query' with 'documents[1]' has 19 tokens, more than the 16"),
        "{}",
        response.body
    );
    for (params, document) in [
        (json!({ "truncate": true }), 9),
        (json!({ "truncate_prompt_tokens": 12 }), 5),
        (json!({ "max_tokens_per_doc": 3 }), 3),
        (json!({ "max_tokens_per_doc": 7, "truncate_prompt_tokens": 11 }), 4),
        (json!({ "max_tokens_per_doc": 1, "truncate": true }), 1),
    ] {
        let mut body = params.clone();
        body["query"] = "abcd".into();
        body["documents"] = json!(["x".repeat(12)]);
        let (requests, _) = play(&mut server, RERANK, body, vec![vector(&[0.0; 3])]).await;
        assert_eq!(requests[0].encoder_input[..], pair("abcd", &"x".repeat(document)), "{params}");
    }
    server.close().await;
}

/// Only the document is truncated, not what follows it.
#[actix_web::test]
async fn a_template_takes_the_place_of_the_tokenizers() {
    let template = PairTemplate::parse("{query}?{document}!").ok();
    let mut server = server_for(ModelInfo { pair_template: template, ..reranker() });
    for (params, document, text) in [
        (json!({ "truncate": true }), "{query}", "q?{query}!"),
        (json!({ "truncate": true }), "a very long document", "q?a very long!"),
        (json!({ "max_tokens_per_doc": 4 }), "a very long document", "q?a ve!"),
        (json!({ "max_tokens_per_doc": 4 }), "abcd", "q?abcd!"),
        (json!({ "max_tokens_per_doc": 4 }), "!!!!!!", "q?!!!!!"),
        (json!({ "max_tokens_per_doc": 7, "truncate_prompt_tokens": 8 }), "a very long document", "q?a v!"),
    ] {
        let mut body = params.clone();
        body["query"] = "q".into();
        body["documents"] = json!([document]);
        let (requests, _) = play(&mut server, RERANK, body, vec![vector(&[0.0; 3])]).await;
        let ids = &requests[0].encoder_input;
        assert_eq!(ids[ids.len() - 1], EOS);
        let shown: String =
            ids.iter().filter_map(|id| char::from_u32(*id).filter(|c| c.is_ascii())).collect();
        assert_eq!((shown.as_str(), ids.len() <= 16, requests[0].second_text), (text, true, None));
    }
    server.close().await;
    let template = PairTemplate::parse("{query}?{document}!").ok();
    let server = server_for(ModelInfo { pair_template: template, ..reranker() });
    let body = json!({ "query": "q".repeat(16), "documents": ["a document"], "truncate": true });
    let response = post(&server, RERANK, &body).await;
    assert_eq!((response.status, response.error().1), (400, json!("query")));
    assert!(response.body.contains("no token to the document"), "{}", response.body);
    server.close().await;
    for wrong in ["{query}", "{document}", "{query}{document}{document}"] {
        assert!(PairTemplate::parse(wrong).is_err(), "{wrong}");
    }
}

#[actix_web::test]
async fn errors_name_the_parameter() {
    let server = server_for(reranker());
    for (path, body, param) in [
        (RERANK, json!({ "documents": ["a"] }), "query"),
        (RERANK, json!({ "query": "", "documents": ["a"] }), "query"),
        (RERANK, json!({ "query": "a" }), "documents"),
        (RERANK, json!({ "query": "a", "documents": [] }), "documents"),
        (RERANK, json!({ "query": "a", "documents": ["a", 5] }), "documents"),
        (RERANK, json!({ "query": "a", "documents": ["a"], "top_n": -1 }), "top_n"),
        (RERANK, json!({ "query": "a", "documents": ["a"], "max_tokens_per_doc": 0 }), "max_tokens_per_doc"),
        (
            RERANK,
            json!({ "query": "a", "documents": ["a"], "truncate_prompt_tokens": 17 }),
            "truncate_prompt_tokens",
        ),
        (
            RERANK,
            json!({ "query": "a", "documents": ["a"], "truncate_prompt_tokens": 0 }),
            "truncate_prompt_tokens",
        ),
        (SCORE, json!({ "text_1": ["a", "b"], "text_2": ["a", "b", "c"] }), "text_1"),
        (SCORE, json!({ "text_1": "a" }), "text_2"),
        (SCORE, json!({ "queries": "a" }), "documents"),
        (SCORE, json!({ "text_1": vec!["a"; 2049], "text_2": "b" }), "text_1"),
        (CLASSIFY, json!({}), "input"),
        (CLASSIFY, json!({ "input": "" }), "input"),
        (CLASSIFY, json!({ "input": "x".repeat(15) }), "input"),
        (CLASSIFY, json!({ "input": "a", "ignore_labels": [1] }), "ignore_labels"),
    ] {
        let response = post(&server, path, &body).await;
        assert_eq!(
            (response.status, response.error().1),
            (400, json!(param)),
            "{path} {body}: {}",
            response.body
        );
    }
    server.close().await;
    let server = embedder(prompting());
    let response = post(&server, CLASSIFY, &json!({ "input": "a" })).await;
    assert!(response.status >= 400 && response.body.contains(RERANK), "{}", response.body);
    server.close().await;
}
