//! Tests of completions by encoder-decoder models: the prompt is the encoder input, and the decoder has its
//! own start tokens.

use super::test_server::{
    BOS, COMPLETIONS, Client, DEADLINE, Response, TestServer, answer, bare, model, scored, tokenizer_with,
};
use crate::actors::{EncoderDecoderPrompting, ModelInfo, PromptingDefaults};
use crate::model::spec::Kind;
use crate::request::{FinishReason, Request, Token, TokenEvent};
use serde_json::{Value, json};
use std::sync::Arc;

const EOS: u32 = 257;
pub(super) const EN: u32 = 258;
pub(super) const DE: u32 = 259;
const FR: u32 = 260;
/// Maximum number of encoder input tokens.
const LONGEST: usize = 12;

fn translator(forced_bos: Option<u32>) -> ModelInfo {
    let roles = ["<s>", "</s>"].map(str::to_owned).into();
    ModelInfo {
        kind: Kind::EncoderDecoder,
        encoder_context: LONGEST,
        vocab: 261,
        source_vocab: 261,
        endpoints: vec![COMPLETIONS],
        prompting: PromptingDefaults::EncoderDecoder(EncoderDecoderPrompting {
            start_token: EOS,
            forced_bos,
            special_tokens: roles,
        }),
        ..model()
    }
}

/// Starts a server whose tokenizer adds the tokens `before` and `after` around texts.
fn server_with_tokens(model: ModelInfo, before: &[&str], after: &[&str]) -> TestServer {
    let names = ["<s>", "</s>", "__en__", "__de__", "fra_Latn"];
    let special = |name: &&str| json!({ "SpecialToken": { "id": name, "type_id": 0 } });
    let text = json!({ "Sequence": { "id": "A", "type_id": 0 } });
    let single: Value = before.iter().map(special).chain([text]).chain(after.iter().map(special)).collect();
    let ids = names.iter().zip(BOS..);
    let tokens: serde_json::Map<_, _> = ids
        .map(|(name, id)| (name.to_string(), json!({ "id": name, "ids": [id], "tokens": [name] })))
        .collect();
    let around =
        json!({ "type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": tokens });
    TestServer::for_model(model, tokenizer_with(&names, around), None, |_| {}, DEADLINE)
}

pub(super) fn translation_server(forced_bos: Option<u32>) -> TestServer {
    server_with_tokens(translator(forced_bos), &["__en__"], &["</s>"])
}

async fn ask(server: &mut TestServer, body: Value) -> (Request, Response) {
    server.exchange(body, answer("x")).await
}

#[actix_web::test]
async fn the_prompt_is_the_encoder_input_and_the_decoder_starts() {
    for (forced, start_ids) in [(None, vec![EOS]), (Some(DE), vec![EOS, DE])] {
        let mut server = translation_server(forced);
        let body = json!({ "prompt": "ab", "return_token_ids": true, "max_tokens": 3 });
        let (request, response) = server.exchange(body, answer("xyz")).await;
        assert_eq!(
            (&request.encoder_input[..], &request.prompt[..]),
            (&[EN, 97, 98, EOS][..], &start_ids[..])
        );
        assert_eq!(request.max_tokens, 3);
        let mut json = response.json();
        let usage = json["usage"].take();
        assert_eq!(usage["prompt_tokens"], 4 + start_ids.len(), "of encoder input and decoder start");
        let choice = json!({
            "index": 0, "text": "xyz", "logprobs": null, "finish_reason": "length",
            "token_ids": [120, 121, 122], "prompt_token_ids": [EN, 97, 98, EOS],
            "decoder_prompt_token_ids": start_ids
        });
        assert_eq!(json["choices"], json!([choice]));
        server.close().await;
    }
}

#[actix_web::test]
async fn the_request_determines_the_decoder_start() {
    let mut server = translation_server(Some(FR));
    for (params, start_ids) in [
        (json!({ "forced_bos_token": "__de__" }), vec![EOS, DE]),
        (json!({ "forced_bos_token": "de" }), vec![EOS, DE]),
        (json!({ "forced_bos_token": "</s>" }), vec![EOS, EOS]),
        (json!({ "forced_bos_token": "fra_Latn" }), vec![EOS, FR]),
        (json!({ "forced_bos_token": "d" }), vec![EOS, 100]),
        (json!({ "forced_bos_token_id": EN }), vec![EOS, EN]),
        (json!({ "decoder_prompt": "hi" }), vec![EOS, FR, 104, 105]),
        (json!({ "decoder_prompt": "" }), vec![EOS, FR]),
        (json!({ "decoder_prompt": "h", "forced_bos_token": "de" }), vec![EOS, DE, 104]),
        (json!({ "decoder_prompt": [BOS, 104] }), vec![BOS, 104]),
        (json!({ "decoder_prompt": null, "forced_bos_token_id": null }), vec![EOS, FR]),
    ] {
        let mut body = params.clone();
        body["prompt"] = "a".into();
        let (request, response) = ask(&mut server, body).await;
        assert_eq!(request.prompt[..], start_ids[..], "{params}: {}", response.body);
        assert_eq!(request.encoder_input[..], [EN, 97, EOS], "{params}");
    }
    server.close().await;
}

/// The encoder input has a tokenizer of its own; everything else is in tokens of the output.
#[actix_web::test]
async fn the_encoder_input_has_tokens_of_its_own() {
    let text = json!({ "Sequence": { "id": "A", "type_id": 0 } });
    let end = json!({ "SpecialToken": { "id": "</s>", "type_id": 0 } });
    let around = json!({
        "type": "TemplateProcessing", "single": [text, end], "pair": [],
        "special_tokens": { "</s>": { "id": "</s>", "ids": [257], "tokens": ["</s>"] } }
    });
    let source = tokenizer_with(&["__de__", "</s>", "<s>", "__fr__"], around);
    let target = tokenizer_with(&["<s>", "</s>", "__en__", "__de__", "fra_Latn"], Value::Null);
    let (model, both) = (ModelInfo { source_vocab: 260, ..translator(None) }, target.with_source(source));
    let mut server = TestServer::for_model(model, both, None, |_| {}, DEADLINE);
    let body = json!({
        "prompt": "a", "source_lang": "de", "forced_bos_token": "de", "logit_bias": { "260": 1 }, "stop": "yz"
    });
    let (request, response) = server.exchange(body, answer("xyz")).await;
    assert_eq!(request.encoder_input[..], [256, 97, 257]);
    assert_eq!(request.prompt[..], [EOS, DE]);
    assert_eq!(response.json()["choices"][0]["text"], "x");
    let (request, _) = ask(&mut server, json!({ "prompt": [259, 1], "decoder_prompt": [260, 1] })).await;
    assert_eq!((&request.encoder_input[..], &request.prompt[..]), (&[259, 1][..], &[260, 1][..]));
    for (body, param) in [
        (json!({ "prompt": [260] }), "prompt"),
        (json!({ "prompt": "a", "decoder_prompt": [261] }), "decoder_prompt"),
        (json!({ "prompt": "a", "source_lang": "fra_Latn" }), "source_lang"),
        (json!({ "prompt": "a", "forced_bos_token": "__fr__" }), "forced_bos_token"),
    ] {
        let response = server.post(&body.to_string()).await;
        assert_eq!((response.status, response.error().1), (400, param.into()), "{body}");
    }
    let address = server.address;
    let ask = async |path, body: Value| {
        Client::send(address, "POST", path, "", &body.to_string()).await.response().await.json()
    };
    let tokens = ask("/tokenize", json!({ "prompt": "a", "return_token_strs": true })).await;
    assert_eq!((&tokens["tokens"], &tokens["token_strs"]), (&json!([97, 257]), &json!(["a", "</s>"])));
    let text = ask("/detokenize", json!({ "tokens": [97, 256] })).await;
    assert_eq!(text["prompt"], "a<s>");
    server.close().await;
}

/// The language token replaces the tokenizer's own, or else comes first. Token ids are unchanged.
#[actix_web::test]
async fn the_language_token_is_set() {
    let cases: [(&[&str], &[&str], Vec<u32>); 4] = [
        (&["__en__"], &["</s>"], vec![DE, 97, EOS]),
        (&[], &["</s>", "__en__"], vec![97, EOS, DE]),
        (&[], &["</s>"], vec![DE, 97, EOS]),
        (&["<s>"], &["</s>"], vec![DE, BOS, 97, EOS]),
    ];
    for (before, after, encoder_input) in cases {
        let mut server = server_with_tokens(translator(None), before, after);
        for name in ["de", "__de__"] {
            let (request, _) = ask(&mut server, json!({ "prompt": "a", "source_lang": name })).await;
            assert_eq!(request.encoder_input[..], encoder_input[..], "{before:?} {after:?}");
        }
        let bare = json!({ "prompt": "a", "source_lang": "de", "add_special_tokens": false });
        assert_eq!(ask(&mut server, bare).await.0.encoder_input[..], [DE, 97]);
        let (request, _) = ask(&mut server, json!({ "prompt": [FR, 7] })).await;
        assert_eq!(request.encoder_input[..], [FR, 7]);
        server.close().await;
    }
}

#[actix_web::test]
async fn each_encoder_input_gets_its_choices() {
    let mut server = translation_server(None);
    let client = server
        .send(r#"{"prompt": ["a", "bc"], "n": 2, "seed": 3, "stream": true, "return_token_ids": true}"#)
        .await;
    for (prompt, seed) in [("a", 3), ("a", 4), ("bc", 3), ("bc", 4)] {
        let (request, sender) = server.next_request().await;
        assert_eq!((request.encoder_input.len(), request.sampling.seed), (prompt.len() + 2, seed));
        answer(prompt).into_iter().for_each(|event| sender.send(event));
    }
    let events = client.response().await.events();
    for (index, prompt) in ["a", "a", "bc", "bc"].iter().enumerate() {
        let mine =
            || events.iter().map(|event| &event["choices"][0]).filter(|choice| choice["index"] == index);
        let text: String = mine().map(|choice| choice["text"].as_str().unwrap()).collect();
        assert_eq!(text, *prompt);
        assert_eq!(mine().filter(|choice| choice.get("decoder_prompt_token_ids").is_some()).count(), 1);
    }
    server.close().await;
}

#[actix_web::test]
async fn echo_repeats_the_decoder_prompt() {
    let mut server = translation_server(None);
    let body = json!({ "prompt": "a", "decoder_prompt": "hi", "echo": true });
    let (_, response) = server.exchange(body, answer("!")).await;
    assert_eq!(response.json()["choices"][0]["text"], "hi!");
    let body = json!({ "prompt": "a", "decoder_prompt": "h", "echo": true, "logprobs": 0 });
    let events = vec![
        TokenEvent::Prompt(vec![bare(EOS), scored(104, -1.0, &[])]),
        TokenEvent::Token(scored(105, -0.5, &[])),
        TokenEvent::Finished(FinishReason::Stop),
    ];
    let (request, response) = server.exchange(body, events).await;
    assert_eq!(request.prompt_logprobs, Some(0));
    let logprobs = response.json()["choices"][0]["logprobs"].clone();
    assert_eq!(logprobs["tokens"], json!(["</s>", "h", "i"]));
    assert_eq!(logprobs["token_logprobs"], json!([null, -1.0, -0.5]));
    let body = json!({ "prompt": "a", "decoder_prompt": "h", "prompt_logprobs": 0 });
    let scores = vec![bare(EOS), Token { rank: Some(3), ..scored(104, -1.0, &[]) }];
    let events = [vec![TokenEvent::Prompt(scores)], answer("!")].concat();
    let choice = server.exchange(body, events).await.1.json()["choices"][0].take();
    let expected = json!([null, { "104": { "logprob": -1.0, "rank": 3, "decoded_token": "h" } }]);
    assert_eq!((&choice["prompt_logprobs"], &choice["text"]), (&expected, &json!("!")));
    server.close().await;
}

#[actix_web::test]
async fn errors_name_the_parameter() {
    let server = translation_server(None);
    for (params, code, param, part) in [
        (json!({ "decoder_prompt": 5 }), "invalid_value", "decoder_prompt", "not 5"),
        (json!({ "decoder_prompt": [] }), "invalid_value", "decoder_prompt", "at least one token id"),
        (json!({ "decoder_prompt": [261] }), "invalid_value", "decoder_prompt", "token id 261"),
        (json!({ "decoder_prompt": [["a"]] }), "invalid_value", "decoder_prompt", "a list"),
        (
            json!({ "decoder_prompt": [1], "forced_bos_token": "de" }),
            "invalid_value",
            "decoder_prompt",
            "cannot be combined",
        ),
        (json!({ "forced_bos_token": "xx" }), "invalid_value", "forced_bos_token", "no token 'xx'"),
        (json!({ "forced_bos_token": 5 }), "invalid_value", "forced_bos_token", "a string"),
        (json!({ "forced_bos_token_id": 261 }), "invalid_value", "forced_bos_token_id", "261"),
        (
            json!({ "forced_bos_token": "de", "forced_bos_token_id": DE }),
            "invalid_value",
            "forced_bos_token_id",
            "mutually exclusive",
        ),
        (json!({ "source_lang": "d" }), "invalid_value", "source_lang", "no language token for 'd'"),
        (json!({ "source_lang": "</s>" }), "invalid_value", "source_lang", "no language token for '</s>'"),
        (json!({ "source_lang": "<s>" }), "invalid_value", "source_lang", "no language token for '<s>'"),
        (json!({ "source_lang": "de", "prompt": [1] }), "invalid_value", "source_lang", "cannot be combined"),
        (json!({ "prompt": [] }), "invalid_value", "prompt", "needs at least one token"),
        (
            json!({ "prompt": "", "add_special_tokens": false }),
            "invalid_value",
            "prompt",
            "needs at least one token",
        ),
        (
            json!({ "prompt": vec![1; 13] }),
            "context_length_exceeded",
            "prompt",
            "13 tokens, more than the 12",
        ),
    ] {
        let mut body = json!({ "prompt": "a" });
        body.as_object_mut().unwrap().extend(params.as_object().unwrap().clone());
        let response = server.post(&body.to_string()).await;
        let message = response.json()["error"]["message"].as_str().unwrap().to_owned();
        assert_eq!(
            (response.status, response.error()),
            (400, (code.into(), json!(param))),
            "{body}: {message}"
        );
        assert!(message.contains(part), "{body}: {message}");
    }
    server.close().await;
}

/// Errors name the index of a prompt in a list. Decoder start ids are checked once, before they are used per
/// prompt.
#[actix_web::test]
async fn errors_name_the_index_of_the_prompt() {
    let short = TestServer::for_model(
        ModelInfo { context: 20, max_sequence_tokens: 20, vocab: 258, source_vocab: 258, ..translator(None) },
        tokenizer_with(&["<s>", "</s>", "__en__", "<extra_id_0>"], Value::Null),
        None,
        |_| {},
        DEADLINE,
    );
    for (params, code, param, part) in [
        (
            json!({ "prompt": ["a", vec!["b"; 13].concat()] }),
            "context_length_exceeded",
            "prompt",
            "'prompt[1]' has 13",
        ),
        (json!({ "prompt": [[1], []] }), "invalid_value", "prompt", "'prompt[1]' is empty"),
        (
            json!({ "prompt": ["a", "b", "__en__"] }),
            "invalid_value",
            "prompt",
            "'prompt[2]' has the token '__en__'",
        ),
        (json!({ "decoder_prompt": "__en__" }), "invalid_value", "decoder_prompt", "id 258"),
        (json!({ "forced_bos_token": "en" }), "invalid_value", "forced_bos_token", "id 258"),
        (json!({ "source_lang": "en" }), "invalid_value", "source_lang", "id 258"),
        (json!({ "source_lang": "<extra_id_0>" }), "invalid_value", "source_lang", "no language"),
        (json!({ "decoder_prompt": vec![1; 21] }), "context_length_exceeded", "decoder_prompt", "21 tokens"),
    ] {
        let mut body = json!({ "prompt": ["a", "b"] });
        body.as_object_mut().unwrap().extend(params.as_object().unwrap().clone());
        let response = short.post(&body.to_string()).await;
        let message = response.json()["error"]["message"].as_str().unwrap().to_owned();
        assert_eq!(response.error(), (code.into(), json!(param)), "{body}: {message}");
        assert!(message.contains(part), "{body}: {message}");
    }
    short.close().await;
}

/// All prompts of a request share one allocation of the decoder start ids.
#[actix_web::test]
async fn decoder_start_ids_are_shared() {
    let mut server = translation_server(None);
    let client = server.send(r#"{"prompt": ["a", "b", "c"], "decoder_prompt": "hi"}"#).await;
    let calls = [server.next_request().await, server.next_request().await, server.next_request().await];
    assert!(calls.iter().all(|(request, _)| Arc::ptr_eq(&request.prompt, &calls[0].0.prompt)));
    calls.iter().for_each(|(_, sender)| answer("x").into_iter().for_each(|event| sender.send(event)));
    assert_eq!(client.response().await.status, 200);
    server.close().await;
}

/// Decoders reject the encoder-decoder parameters; an encoder-decoder has no chat endpoint.
#[actix_web::test]
async fn endpoints_and_parameters_depend_on_the_kind_of_model() {
    let decoders = TestServer::start();
    for (params, param) in [
        (json!({ "decoder_prompt": "a" }), "decoder_prompt"),
        (json!({ "forced_bos_token": "a" }), "forced_bos_token"),
        (json!({ "forced_bos_token_id": 1 }), "forced_bos_token_id"),
        (json!({ "source_lang": "en" }), "source_lang"),
    ] {
        let mut body = params;
        body["prompt"] = "a".into();
        let response = decoders.post(&body.to_string()).await;
        assert_eq!(response.error(), ("unsupported_parameter".into(), json!(param)));
    }
    decoders.close().await;
    let server = translation_server(None);
    let body = json!({ "messages": [{ "role": "user", "content": "hi" }] }).to_string();
    let chat = super::test_server::Client::send(server.address, "POST", "/v1/chat/completions", "", &body);
    let response = chat.await.response().await;
    assert_eq!((response.status, response.error()), (400, ("wrong_endpoint".into(), json!("model"))));
    let message = response.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("an encoder-decoder") && message.contains(COMPLETIONS), "{message}");
    let card = server.get("/v1/models/tiny").await.json();
    assert_eq!((&card["kind"], &card["source_context"]), (&json!("encoder_decoder"), &json!(12)));
    assert_eq!((&card["endpoints"], card.get("dimensions")), (&json!([COMPLETIONS]), None));
    let body = json!({ "prompt": "ab" }).to_string();
    let tokenized = super::test_server::Client::send(server.address, "POST", "/v1/tokenize", "", &body).await;
    assert_eq!(
        tokenized.response().await.json()["max_model_len"],
        LONGEST,
        "the limit is that of the encoder input"
    );
    server.close().await;
}
