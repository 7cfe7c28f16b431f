//! Tests of models with an encoder through the API and the whole engine, compared with the recorded answers
//! of Hugging Face transformers (tests/oracle).

use crate::common::{Copied, config, fixture, mainstem};
use crate::families::family;
use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use futures_util::StreamExt;
use mainstem::cli::start;
use mainstem::server::{LocalApi, ResponseBody, ServeParts};
use serde::Deserialize;
use serde_json::{Value, json};
use std::process::Output;

/// Tolerance of hidden states and log-probabilities.
const TOLERANCE: f64 = 1e-3;
/// Token ids of the tokenizer shared by all families.
const MASK: u32 = 4;
const DE: u32 = 6;

/// Returns the API of a model with small step limits, so that texts are processed in several steps.
async fn local(model: &Copied) -> LocalApi {
    let config =
        config(&model.0, &[("scheduler.token_budget", 48.into()), ("scheduler.max_waiting", 8.into())]);
    let engine = start::start_engine(&config).await.expect("the fixture loads");
    LocalApi::new(ServeParts::from(&engine), config.server)
}

async fn post(local: &LocalApi, path: &str, body: Value) -> Value {
    let answer = local.post(path, &body).await.unwrap_or_else(|error| panic!("{path} {body}: {error}"));
    match answer {
        ResponseBody::Json(bytes) => serde_json::from_slice(&bytes).expect("it is JSON"),
        ResponseBody::Events(_) => panic!("nothing was to be streamed"),
    }
}

/// Returns the code and message of a refused request.
async fn refusal(local: &LocalApi, path: &str, body: Value) -> (String, String) {
    match local.post(path, &body).await {
        Ok(_) => panic!("{path} {body} is answered"),
        Err(error) => {
            let error = serde_json::to_value(error.body()).expect("plain data")["error"].take();
            let text = |key: &str| error[key].as_str().expect("it is a text").to_owned();
            (text("code"), text("message"))
        }
    }
}

fn recorded<T: for<'a> Deserialize<'a>>(family: &str) -> T {
    let file = fixture(&format!("families/{family}/answers.json"));
    serde_json::from_slice(&std::fs::read(file).expect("it is there")).expect("it is in its form")
}

#[derive(Deserialize)]
struct Encoder {
    inputs: Vec<Input>,
}

#[derive(Deserialize)]
struct Input {
    ids: Vec<u32>,
    hidden: Vec<Vec<f64>>,
    masks: Vec<Mask>,
}

#[derive(Deserialize)]
struct Mask {
    at: usize,
    top5_ids: Vec<u32>,
    top5_logprobs: Vec<f64>,
}

#[derive(Deserialize)]
struct Decoder {
    answers: Vec<Recorded>,
}

#[derive(Deserialize)]
struct Recorded {
    source: Vec<u32>,
    prompt: Vec<u32>,
    answer: Vec<u32>,
    answer_logprobs: Vec<f64>,
}

impl Input {
    /// Pools the recorded hidden states to one vector.
    fn pooled(&self, pooling: &str, dimensions: usize, normalize: bool) -> Vec<f64> {
        let rows = self.hidden.len() as f64;
        let mean = |column: usize| self.hidden.iter().map(|row| row[column]).sum::<f64>() / rows;
        let mut vector: Vec<f64> = match pooling {
            "mean" => (0..self.hidden[0].len()).map(mean).collect(),
            "cls" => self.hidden[0].clone(),
            _ => self.hidden[self.hidden.len() - 1].clone(),
        };
        vector.truncate(dimensions);
        let length = vector.iter().map(|x| x * x).sum::<f64>().sqrt();
        vector.iter().map(|x| if normalize { x / length } else { *x }).collect()
    }
}

/// Decodes a vector in either encoding.
fn numbers(embedding: &Value) -> Vec<f64> {
    match embedding {
        Value::String(text) => {
            let bytes = BASE64_STANDARD.decode(text).expect("it is base64");
            bytes.chunks(4).map(|four| f32::from_le_bytes(four.try_into().expect("four")).into()).collect()
        }
        list => list.as_array().expect("a list").iter().map(|x| x.as_f64().expect("a number")).collect(),
    }
}

fn all_close(ours: &[f64], theirs: &[f64], what: &str) {
    assert_eq!(ours.len(), theirs.len(), "{what}");
    for (ours, theirs) in ours.iter().zip(theirs) {
        assert!((ours - theirs).abs() <= TOLERANCE, "{what}: {ours}, recorded {theirs}");
    }
}

#[actix::test]
async fn embeddings_are_those_recorded_however_they_are_requested() {
    let local = local(&family("bert", "embeddings")).await;
    let Encoder { inputs } = recorded("bert");
    let ids: Vec<&[u32]> = inputs.iter().map(|input| input.ids.as_slice()).collect();
    for (pooling, dimensions, normalize, form) in [
        ("mean", 32, true, "float"),
        ("mean", 32, false, "base64"),
        ("cls", 32, true, "base64"),
        ("last", 7, true, "float"),
        ("mean", 7, false, "float"),
    ] {
        let body = json!({
            "input": ids, "pooling": pooling, "dimensions": dimensions, "normalize": normalize,
            "encoding_format": form,
        });
        let answer = post(&local, "/v1/embeddings", body).await;
        for (index, input) in inputs.iter().enumerate() {
            let theirs = input.pooled(pooling, dimensions, normalize);
            let what = format!("{pooling} {dimensions} {normalize} {form}, input {index}");
            all_close(&numbers(&answer["data"][index]["embedding"]), &theirs, &what);
        }
        let tokens: usize = ids.iter().map(|ids| ids.len()).sum();
        assert_eq!(answer["usage"]["prompt_tokens"], tokens);
    }
    // Many more inputs than fit at once, each with the same result as alone.
    let many: Vec<&[u32]> = ids.iter().cycle().take(100).copied().collect();
    let answer = post(&local, "/v1/embeddings", json!({ "input": many })).await;
    let alone = post(&local, "/v1/embeddings", json!({ "input": ids })).await;
    for index in 0..many.len() {
        assert_eq!(answer["data"][index]["embedding"], alone["data"][index % ids.len()]["embedding"]);
    }
}

/// Writes the files of sentence-transformers with this pooling mode.
fn write_sentence(model: &Copied, mode: &str) {
    let modules = json!([
        {"path": "", "type": "sentence_transformers.models.Transformer"},
        {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]);
    std::fs::write(model.file("modules.json"), modules.to_string()).expect("it can be written");
    std::fs::create_dir(model.file("1_Pooling")).expect("a folder");
    let mut pooling = json!({"pooling_mode_mean_tokens": false});
    pooling[format!("pooling_mode_{mode}")] = true.into();
    std::fs::write(model.file("1_Pooling/config.json"), pooling.to_string()).expect("it can be written");
}

/// A model with an unsupported pooling mode can be inspected and fills masks; `run` refuses it as an
/// encoder-only model.
#[actix::test]
async fn a_pooling_that_is_not_served_stops_nothing_but_embeddings() {
    let model = family("bert", "unserved-pooling");
    write_sentence(&model, "max_tokens");
    let output = mainstem().arg("inspect").arg(&model.0).output().expect("it starts");
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success() && printed.contains("the pooling mode is max_tokens"), "{printed}");
    let output = run(&model, &["the rain"]);
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && printed.contains("as an encoder-only model"), "{printed}");
    let local = local(&model).await;
    let filled = post(&local, "/v1/fill-mask", json!({ "input": [8, MASK, 9] })).await;
    assert_eq!(filled["data"][0]["masks"][0]["position"], 1);
    let (code, message) = refusal(&local, "/v1/embeddings", json!({ "input": [8, 9] })).await;
    assert!(code == "unsupported_parameter" && message.contains("max_tokens"), "{message}");
    let input = &recorded::<Encoder>("bert").inputs[2];
    let body = json!({ "input": input.ids, "pooling": "cls", "normalize": false });
    let answer = post(&local, "/v1/embeddings", body).await;
    all_close(&numbers(&answer["data"][0]["embedding"]), &input.pooled("cls", 32, false), "as it was told");
}

#[actix::test]
async fn a_folder_says_how_vectors_are_made() {
    let model = family("bert", "sentence");
    write_sentence(&model, "cls_token");
    let input = &recorded::<Encoder>("bert").inputs[2];
    let answer = post(&local(&model).await, "/v1/embeddings", json!({ "input": input.ids })).await;
    let theirs = input.pooled("cls", 32, false);
    all_close(&numbers(&answer["data"][0]["embedding"]), &theirs, "the first token's, as it is");
}

#[actix::test]
async fn a_text_is_its_tokens() {
    let local = local(&family("bert", "texts")).await;
    let body = |input: Value| json!({ "input": input });
    let text = post(&local, "/v1/embeddings", body("the rain in <mask> of water".into())).await;
    let ids = post(&local, "/v1/embeddings", body(json!([8, 94, 13, MASK, 10, 77]))).await;
    assert_eq!(text["data"], ids["data"]);
    let filled = post(&local, "/v1/fill-mask", body("the rain in <mask> of water".into())).await;
    let mask = &filled["data"][0]["masks"][0];
    assert_eq!(mask["position"], 3);
    let candidate = &mask["candidates"][0];
    let (token, sequence) =
        (candidate["token_str"].as_str().unwrap(), candidate["sequence"].as_str().unwrap());
    let is_special = token.starts_with(['<', '_']);
    let word = if is_special { String::new() } else { format!("{token} ") };
    assert_eq!(sequence, format!("the rain in {word}of water"));
}

#[actix::test]
async fn masks_are_filled_as_recorded() {
    let local = local(&family("bert", "masks")).await;
    let inputs: Vec<Input> =
        recorded::<Encoder>("bert").inputs.into_iter().filter(|input| !input.masks.is_empty()).collect();
    assert!(inputs.iter().any(|input| input.masks.len() > 1), "some have several masks");
    let ids: Vec<&[u32]> = inputs.iter().map(|input| input.ids.as_slice()).collect();
    let answer = post(&local, "/v1/fill-mask", json!({ "input": ids })).await;
    for (index, input) in inputs.iter().enumerate() {
        let masks = answer["data"][index]["masks"].as_array().expect("a list");
        assert_eq!(masks.len(), input.masks.len());
        for (ours, theirs) in masks.iter().zip(&input.masks) {
            assert_eq!(ours["position"], theirs.at);
            let candidates = ours["candidates"].as_array().expect("a list");
            let of = |key: &str| {
                candidates.iter().map(|it| it[key].as_f64().expect("a number")).collect::<Vec<_>>()
            };
            let tokens: Vec<u32> = of("token").into_iter().map(|id| id as u32).collect();
            assert_eq!(tokens, theirs.top5_ids, "input {index}");
            all_close(&of("logprob"), &theirs.top5_logprobs, "log-probabilities");
            let shares: Vec<f64> = theirs.top5_logprobs.iter().map(|logprob| logprob.exp()).collect();
            all_close(&of("score"), &shares, "probabilities");
        }
    }
}

/// Every position of the longest text, with the maximum number of candidates.
#[actix::test]
async fn a_text_may_be_nothing_but_masks() {
    let local = local(&family("bert", "many-masks")).await;
    let answer = post(&local, "/v1/fill-mask", json!({ "input": vec![MASK; 40], "top_k": 20 })).await;
    let masks = answer["data"][0]["masks"].as_array().expect("a list");
    for (place, mask) in masks.iter().enumerate() {
        let candidates = mask["candidates"].as_array().expect("a list");
        assert_eq!((mask["position"].as_u64(), candidates.len()), (Some(place as u64), 20));
        let scores = candidates.iter().map(|it| it["score"].as_f64().expect("a number"));
        assert!(scores.clone().is_sorted_by(|a, b| a >= b) && scores.sum::<f64>() <= 1.0 + TOLERANCE);
    }
    assert_eq!(masks.len(), 40);
}

/// All encoder inputs at once, each with the recorded decoder prompt.
#[actix::test]
async fn encoder_inputs_are_answered_as_recorded() {
    for name in ["m2m100", "t5"] {
        let local = local(&family(name, "sources")).await;
        for recorded in recorded::<Decoder>(name).answers {
            let Recorded { source, prompt, answer, answer_logprobs } = recorded;
            let body = json!({
                "prompt": source, "decoder_prompt": prompt, "max_tokens": answer.len(), "temperature": 0,
                "ignore_eos": true, "return_token_ids": true, "logprobs": 0, "n": 2,
            });
            let got = post(&local, "/v1/completions", body).await;
            for choice in got["choices"].as_array().expect("a list") {
                assert_eq!(choice["token_ids"], json!(answer), "{name}");
                assert_eq!(choice["prompt_token_ids"], json!(source), "{name}");
                let logprobs = &choice["logprobs"]["token_logprobs"];
                all_close(&numbers(logprobs), &answer_logprobs, name);
            }
            assert_eq!(got["usage"]["prompt_tokens"], source.len() + prompt.len());
        }
    }
}

#[actix::test]
async fn a_language_is_forced_by_its_code_or_by_the_models_settings() {
    let model = family("m2m100", "forced");
    let answer = recorded::<Decoder>("m2m100").answers.swap_remove(1);
    assert_eq!(answer.prompt, [2, DE], "the fixture's decoder starts with 2");
    let body = |more: Value| {
        let mut body = json!({
            "prompt": answer.source, "max_tokens": answer.answer.len(), "temperature": 0, "ignore_eos": true,
            "return_token_ids": true,
        });
        body.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
        body
    };
    let plain = local(&model).await;
    let first = async |local: &LocalApi, more: Value| {
        post(local, "/v1/completions", body(more)).await["choices"][0]["token_ids"].take()
    };
    for more in [
        json!({ "forced_bos_token": "de" }),
        json!({ "forced_bos_token": "__de__" }),
        json!({ "forced_bos_token_id": DE }),
    ] {
        assert_eq!(first(&plain, more.clone()).await, json!(answer.answer), "{more}");
    }
    assert_ne!(first(&plain, json!({})).await, json!(answer.answer), "what is forced matters");
    let settings = json!({ "decoder_start_token_id": 2, "forced_bos_token_id": DE });
    std::fs::write(model.file("generation_config.json"), settings.to_string()).expect("it can be written");
    assert_eq!(first(&local(&model).await, json!({})).await, json!(answer.answer));
}

/// The concatenated stream equals the whole answer, while other requests are running.
#[actix::test]
async fn streams_of_encoder_inputs_go_on_together() {
    let local = local(&family("m2m100", "streams")).await;
    let body = |stream: bool| {
        json!({
            "prompt": ["the rain", "a river of oil", "look"], "forced_bos_token": "fr", "max_tokens": 12,
            "temperature": 0, "ignore_eos": true, "stream": stream, "skip_special_tokens": false,
        })
    };
    let whole = post(&local, "/v1/completions", body(false)).await;
    let Ok(ResponseBody::Events(mut events)) = local.post("/v1/completions", &body(true)).await else {
        panic!("it is streamed")
    };
    let mut texts = vec![String::new(); 3];
    let mut read = Vec::new();
    while let Some(bytes) = events.next().await {
        read.extend_from_slice(&bytes);
    }
    let read = String::from_utf8(read).expect("it is text");
    for data in read.lines().filter_map(|line| line.strip_prefix("data: ")).filter(|data| *data != "[DONE]") {
        let event: Value = serde_json::from_str(data).expect("it is JSON");
        let choice = &event["choices"][0];
        texts[choice["index"].as_u64().expect("an index") as usize] +=
            choice["text"].as_str().expect("a text");
    }
    let wholes: Vec<&str> =
        (0..3).map(|index| whole["choices"][index]["text"].as_str().expect("a text")).collect();
    assert_eq!(texts, wholes);
}

#[actix::test]
async fn each_kind_refuses_what_is_not_its_own_and_what_is_too_long() {
    let encoder = local(&family("bert", "refusals")).await;
    for path in ["/v1/completions", "/v1/chat/completions"] {
        let (code, message) = refusal(&encoder, path, json!({ "prompt": "a" })).await;
        assert!(
            code == "wrong_endpoint" && message.contains("/v1/embeddings and /v1/fill-mask"),
            "{message}"
        );
    }
    let (code, message) = refusal(&encoder, "/v1/embeddings", json!({ "input": vec![8; 41] })).await;
    assert!(
        code == "context_length_exceeded" && message.contains("41") && message.contains("40"),
        "{message}"
    );
    let translator = local(&family("m2m100", "refusals")).await;
    for path in ["/v1/embeddings", "/v1/fill-mask", "/v1/chat/completions"] {
        let (code, message) = refusal(&translator, path, json!({ "input": "a" })).await;
        assert!(code == "wrong_endpoint" && message.ends_with("use /v1/completions"), "{message}");
    }
    let (code, message) = refusal(&translator, "/v1/completions", json!({ "prompt": vec![8; 65] })).await;
    assert!(
        code == "context_length_exceeded" && message.contains("65") && message.contains("64"),
        "{message}"
    );
    let body = json!({ "prompt": [8], "decoder_prompt": vec![8; 64] });
    let (code, message) = refusal(&translator, "/v1/completions", body).await;
    assert!(code == "context_length_exceeded" && message.contains("the decoder_prompt has 64"), "{message}");
}

#[test]
fn inspect_reports_how_a_model_is_prompted() {
    let inspect = |model: &Copied| -> (Value, String) {
        let printed = |args: &[&str]| {
            let output = mainstem().arg("inspect").arg(&model.0).args(args).output().expect("it starts");
            String::from_utf8(output.stdout).expect("it is text")
        };
        (serde_json::from_str(&printed(&["--json"])).expect("it is JSON"), printed(&[]))
    };
    let cut = family("bert", "inspect-cut");
    write_sentence(&cut, "cls_token");
    std::fs::write(cut.file("sentence_bert_config.json"), r#"{"max_seq_length": 10}"#)
        .expect("it can be written");
    let (answer, text) = inspect(&cut);
    assert_eq!(answer["conventions"]["pooling"], "cls");
    assert!(text.contains("unsupported_texts") && text.contains("max_seq_length is 10"), "{text}");
    let (answer, text) = inspect(&family("bert", "inspect"));
    assert_eq!(answer["conventions"], json!({ "pooling": "mean", "normalize": true, "dimensions": 32 }));
    let serves = json!(["/v1/embeddings", "/v1/fill-mask", "/v1/score", "/v1/rerank"]);
    assert_eq!(answer["architecture"]["serves"], serves);
    assert!(text.contains("pooling mean, normalize true, dimensions 32"), "{text}");
    let model = family("m2m100", "inspect");
    let (answer, text) = inspect(&model);
    assert_eq!(answer["conventions"], json!({ "decoder_start": 2, "forced_bos": null }));
    assert!(text.contains("decoder_start 2\n"), "{text}");
    let settings = json!({ "decoder_start_token_id": 2, "forced_bos_token_id": DE, "num_beams": 5 });
    std::fs::write(model.file("generation_config.json"), settings.to_string()).expect("it can be written");
    let (answer, _) = inspect(&model);
    assert_eq!(answer["conventions"]["forced_bos"], DE);
    assert_eq!(answer["unserved"], json!({ "num_beams": 5 }), "what is served is not among what is not");
    // Without a decoder start token, the model is refused.
    model.configure("decoder_start_token_id", Value::Null);
    model.configure("bos_token_id", Value::Null);
    std::fs::remove_file(model.file("generation_config.json")).expect("it was there");
    let output = run(&model, &["the rain"]);
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && printed.contains("'decoder_start_token_id'"), "{printed}");
}

fn run(model: &Copied, args: &[&str]) -> Output {
    let mut command = mainstem();
    command.arg("run").arg(&model.0).args(args).args(["--threads", "2", "--kv-type", "f32"]);
    command.output().expect("the program starts")
}

#[actix::test]
async fn run_answers_an_encoder_input_and_refuses_an_encoder() {
    let model = family("m2m100", "run");
    let output = run(&model, &["the rain", "--temperature", "0", "--max-tokens", "8"]);
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && printed.contains("is an encoder-decoder"), "{printed}");
    let body = json!({ "prompt": "the rain", "temperature": 0, "max_tokens": 8 });
    let whole = post(&local(&model).await, "/v1/completions", body).await;
    let text = whole["choices"][0]["text"].as_str().expect("a text");
    assert!(!text.is_empty());
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim_end(), text.trim_end());

    let output = run(&family("bert", "run"), &["the rain"]);
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && output.stdout.is_empty(), "{printed}");
    assert!(
        printed.contains("as an encoder-only model") && printed.contains("/v1/embeddings and /v1/fill-mask"),
        "{printed}"
    );
}
