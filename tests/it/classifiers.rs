//! Tests of classifiers against transformers (tests/oracle/make_classifiers.py): alone, fused with others, in
//! chunks, and on every partition; and of dense modules and prompts against sentence-transformers.

use crate::common::{Copied, complete, complete_all, config, fixture, greedy};
use mainstem::actors::Engine;
use mainstem::cli::start;
use mainstem::decoding::Classifier;
use mainstem::model::{ModelRef, ModelSource};
use mainstem::request::{Pooling, Request, Task};
use mainstem::server::{LocalApi, ResponseBody, ServeParts};
use mainstem::text::TokenLimits;
use serde::Deserialize;
use serde_json::json;
use std::path::Path;
use toml::Value;

const ENCODERS: [&str; 13] = [
    "albert",
    "bert_reranker",
    "bert_tokens",
    "deberta_v3",
    "distilbert",
    "electra",
    "megatron_bert",
    "modernbert",
    "modernbert_tokens",
    "mpnet",
    "roberta",
    "roberta_tokens",
    "roformer",
];
const DECODERS: [&str; 4] = ["gemma", "llama", "qwen3", "qwen3_tokens"];

const TOLERANCE: f32 = 1e-4;
const VECTOR_TOLERANCE: f32 = 1e-5;

#[derive(Deserialize)]
struct Recorded {
    texts: Vec<Text>,
}

#[derive(Deserialize)]
struct Text {
    texts: Vec<String>,
    ids: Vec<u32>,
    types: Vec<u8>,
    logits: Vec<Vec<f32>>,
}

fn folder(name: &str) -> String {
    format!("classifiers/{name}")
}

fn recorded<T: for<'a> Deserialize<'a>>(name: &str) -> T {
    let text = std::fs::read(fixture(&folder(name)).join("answers.json")).expect("the answers are there");
    serde_json::from_slice(&text).expect("they have their form")
}

async fn engine(name: &str, settings: &[(&'static str, Value)]) -> Engine {
    start::start_engine(&config(&fixture(&folder(name)), settings)).await.expect("the fixture loads")
}

impl Text {
    fn request(&self, classifier: &Classifier, is_decoder: bool) -> Request {
        let task = classifier.pooling.map_or(Task::EmbedTokens, Task::Embed);
        let second = self.types.iter().position(|kind| *kind == 1).map(|at| at as u32);
        match is_decoder {
            true => Request { task, ..greedy(&self.ids, 0) },
            false => {
                Request { task, encoder_input: self.ids[..].into(), second_text: second, ..greedy(&[], 0) }
            }
        }
    }

    fn check(&self, name: &str, classifier: &Classifier, vectors: &[f32]) {
        let width = vectors.len() / self.logits.len();
        for (vector, theirs) in vectors.chunks_exact(width).zip(&self.logits) {
            let ours = classifier.logits(vector);
            assert_eq!(ours.len(), theirs.len());
            let is_close = |(a, b): (&f32, &f32)| (a - b).abs() <= TOLERANCE;
            assert!(ours.iter().zip(theirs).all(is_close), "{name} {:?}: {ours:?}, {theirs:?}", self.texts);
        }
    }
}

/// Checks all texts, one after another and then together.
async fn check(name: &str, settings: &[(&'static str, Value)]) {
    let engine = engine(name, settings).await;
    let classifier = engine.model.classifier.clone().expect("the model has a classifier");
    let texts = recorded::<Recorded>(name).texts;
    let request = |text: &Text| text.request(&classifier, DECODERS.contains(&name));
    for text in &texts {
        let vectors = complete(&engine, request(text)).await.embedding.expect("there is a vector");
        text.check(name, &classifier, &vectors);
    }
    // Several times, so that prompts are found in the prefix cache, too.
    let many: Vec<&Text> = texts.iter().chain(&texts).chain(&texts).collect();
    for (text, outcome) in many.iter().zip(complete_all(&engine, many.iter().map(|text| request(text))).await)
    {
        text.check(name, &classifier, &outcome.embedding.expect("there is a vector"));
    }
    engine.stop();
}

#[actix::test]
async fn classifiers_give_the_recorded_logits_alone_and_fused() {
    for name in ENCODERS.into_iter().chain(DECODERS) {
        check(name, &[]).await;
    }
}

#[actix::test]
async fn and_so_they_do_in_chunks_and_on_the_reference_backend() {
    for name in ENCODERS.into_iter().chain(DECODERS) {
        check(name, &[("scheduler.token_budget", 5.into()), ("device.kind", "reference".into())]).await;
    }
}

#[actix::test]
async fn and_so_they_do_on_every_partition() {
    for groups in ["0;1", "0&1"] {
        for name in ["bert_reranker", "modernbert_tokens", "qwen3", "qwen3_tokens"] {
            let settings = [("device.groups", groups.into()), ("device.threads", 1.into())];
            check(name, &settings).await;
        }
    }
    check("llama", &[("device.groups", "0&1;2".into()), ("device.threads", 1.into())]).await;
}

#[actix::test]
async fn pairs_are_tokenized_as_the_template_says_and_truncated_from_the_longer_one() {
    for name in ["bert_reranker", "roberta", "qwen3"] {
        let engine = engine(name, &[]).await;
        for text in recorded::<Recorded>(name).texts {
            let second = text.texts.get(1).map(String::as_str);
            let typed =
                engine.tokenizer.encode_texts(&text.texts[0], second, true, TokenLimits::whole(99)).unwrap();
            assert_eq!(typed.ids, text.ids, "{name}");
            assert_eq!(typed.second, text.types.iter().position(|kind| *kind == 1), "{name}");
        }
        engine.stop();
    }
    let engine = engine("bert_reranker", &[]).await;
    let encode = |most| {
        engine.tokenizer.encode_texts(
            "panda",
            Some("the giant panda is a bear"),
            true,
            TokenLimits::whole(most),
        )
    };
    let whole = encode(10).unwrap();
    let cut = encode(7).unwrap();
    assert_eq!((whole.ids.len(), cut.ids.len()), (10, 7));
    assert_eq!((&cut.ids[..6], cut.ids[6], cut.second), (&whole.ids[..6], whole.ids[9], whole.second));
    engine.stop();
}

/// A written model keeps its classifier, and in what it is stored.
#[test]
fn an_export_keeps_classifiers_and_dense_modules() {
    use mainstem::export::{self, ExportTarget, OutputFormat};
    for name in ["bert_reranker", "qwen3", "sentences", "qwen3_sentences"] {
        let copy = Copied::of(&folder(name), &format!("exported-{name}"));
        let mut source = ModelSource::open(&ModelRef::Path(copy.0.clone()), None).unwrap();
        source.weight_rules = mainstem::quantize::WeightRules::parse("*=f16").unwrap();
        let path = copy.0.with_extension("written");
        let _ = std::fs::remove_dir_all(&path);
        let existing = mainstem::formats::save::Existing::Replace;
        let target = ExportTarget {
            path: path.clone(),
            format: OutputFormat::Safetensors,
            existing,
            spec: None,
            threads: 1,
        };
        export::write_model(&source, &target).unwrap();
        let written = ModelSource::open(&ModelRef::Path(path.clone()), None).unwrap();
        assert_eq!(written.spec.classifier, source.spec.classifier);
        let dtype = |name: &str| written.checkpoint.tensor(name).map(|tensor| tensor.dtype.to_string());
        assert!(dtype("classifier.weight").or(dtype("score.weight")).is_none_or(|ty| ty == "f32"), "{name}");
        assert_eq!(path.join("3_Dense/model.safetensors").exists(), name.ends_with("sentences"));
        std::fs::remove_dir_all(path).unwrap();
    }
}

#[derive(Deserialize)]
struct Sentences {
    texts: Vec<String>,
    plain: Vec<Vec<f32>>,
    query: Vec<Vec<f32>>,
    document: Vec<Vec<f32>>,
    /// Vectors of a decoder by the mean of all tokens.
    mean: Option<Vec<Vec<f32>>>,
}

/// Checks the vectors of all texts together, with each prompt, by the model's own pooling and then by `mean`.
async fn check_vectors(name: &str, settings: &[(&'static str, Value)]) {
    let config = config(&fixture(&folder(name)), settings);
    let engine = start::start_engine(&config).await.expect("the fixture loads");
    let (dimensions, layers) = {
        let defaults = engine.model.prompting.embedding().expect("the model embeds texts");
        (defaults.dimensions, defaults.dense.len())
    };
    assert_eq!((dimensions, layers, engine.model.generates()), (8, 2, false));
    let api = LocalApi::new(ServeParts::from(&engine), config.server);
    let Sentences { texts, plain, query, document, mean } = recorded(name);
    let cases = [(json!({}), Some(plain)), (json!({ "prompt_name": "query" }), Some(query))];
    let more = [(json!({ "input_type": "passage" }), Some(document)), (json!({ "pooling": "mean" }), mean)];
    for (mut body, expected) in cases.into_iter().chain(more) {
        let Some(expected) = expected else { continue };
        body["input"] = json!(texts);
        let answer = post(&api, "/v1/embeddings", body.clone()).await;
        for (index, theirs) in expected.iter().enumerate() {
            let ours = answer["data"][index]["embedding"].as_array().expect("a vector");
            let is_close = |(a, b): (&serde_json::Value, &f32)| {
                (a.as_f64().expect("a number") as f32 - b).abs() <= VECTOR_TOLERANCE
            };
            assert!(ours.len() == 8 && ours.iter().zip(theirs).all(is_close), "{body} {ours:?}, {theirs:?}");
        }
    }
    engine.stop();
}

#[actix::test]
async fn dense_modules_and_prompts_give_the_vectors_of_sentence_transformers() {
    for name in ["sentences", "qwen3_sentences"] {
        check_vectors(name, &[]).await;
        check_vectors(name, &[("scheduler.token_budget", 5.into()), ("device.kind", "reference".into())])
            .await;
    }
    for groups in ["0;1", "0&1"] {
        let settings = [("device.groups", groups.into()), ("device.threads", 1.into())];
        check_vectors("qwen3_sentences", &settings).await;
    }
}

/// A document's tokens are counted in its template, where one may span their border, here at the space.
#[actix::test]
async fn documents_in_templates_keep_as_many_tokens_as_are_permitted() {
    let config = config(
        Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/assets/demo")),
        &[
            ("model.classifier_tokens", "a,b".into()),
            ("model.pair_template", "Who? {query} Document: {document}\nIs it?".into()),
        ],
    );
    let engine = start::start_engine(&config).await.expect("the demo loads");
    let api = LocalApi::new(ServeParts::from(&engine), config.server);
    let text = "there was a king, and he was old.";
    let spaced = format!(" {text}");
    let body = json!({ "prompt": spaced, "add_special_tokens": false });
    let count = post(&api, "/v1/tokenize", body).await["count"].as_u64().expect("a number");
    assert!(count > 6, "{count}");
    let mut body = json!({ "query": "the king", "documents": [text] });
    let used = |answer: serde_json::Value| answer["usage"]["total_tokens"].as_u64().expect("a number");
    let whole = used(post(&api, "/v1/rerank", body.clone()).await);
    for most in [1, 2, count - 1, count, count + 1] {
        body["max_tokens_per_doc"] = most.into();
        let kept = used(post(&api, "/v1/rerank", body.clone()).await);
        assert_eq!(kept, whole - count.saturating_sub(most), "{most} of {count} tokens, {whole} in all");
    }
    // What fits is not refused for what is around it.
    body["max_tokens_per_doc"] = 1.into();
    body["truncate_prompt_tokens"] = (whole - count + 1).into();
    assert_eq!(used(post(&api, "/v1/rerank", body).await), whole - count + 1);
    engine.stop();
}

/// A folder with a pooling module is a model for embeddings; a generative one becomes one, too, by
/// `model.pooling`.
#[actix::test]
async fn decoders_embed_instead_of_generating_or_beside_it() {
    let config = |name: &str, settings: &[_]| config(&fixture(&folder(name)), settings);
    let embedder = config("qwen3_sentences", &[]);
    let engine = start::start_engine(&embedder).await.expect("the fixture loads");
    assert_eq!(engine.model.endpoints, ["/v1/embeddings", "/v1/score", "/v1/rerank"]);
    let api = LocalApi::new(ServeParts::from(&engine), embedder.server);
    for (path, body, word) in [
        ("/v1/completions", json!({ "prompt": "bear" }), "/v1/embeddings and /v1/score"),
        ("/v1/embeddings", json!({ "input": "bear", "pooling": "cls" }), "first token"),
        ("/v1/embeddings", json!({ "input": vec!["bear"; 64].join(" ") }), "65 tokens, more than the 64"),
    ] {
        let error = api.post(path, &body).await.map(drop).expect_err("it is refused").to_string();
        assert!(error.contains(word), "{path}: {error}");
    }
    let body = json!({ "query": "bear", "documents": ["paris", "it is bear", "bear"] });
    let ranked = post(&api, "/v1/rerank", body).await;
    assert_eq!(ranked["results"].as_array().map(Vec::len), Some(3));
    let long = post(&api, "/v1/embeddings", json!({ "input": vec!["bear"; 63].join(" ") })).await;
    assert_eq!(long["usage"]["prompt_tokens"], 64, "the token that ends the text is in the context");
    engine.stop();
    let both = config("qwen3_tokens", &[("model.pooling", "mean".into())]);
    let engine = start::start_engine(&both).await.expect("the fixture loads");
    let generation = ["/v1/embeddings", "/v1/chat/completions", "/v1/completions", "/v1/classify"];
    assert_eq!(engine.model.endpoints[..4], generation);
    let ids = [9, 7, 20, 11, 6, 30, 12];
    let alone = complete(&engine, greedy(&ids, 6)).await.ids();
    let embed = |task: Pooling| Request { task: Task::Embed(task), ..greedy(&ids, 0) };
    let vectors = [Pooling::Mean, Pooling::Last].map(embed);
    let mut first = Vec::new();
    for request in vectors.clone() {
        first.push(complete(&engine, request).await.embedding);
    }
    // Together, and with the prompt in the prefix cache.
    let mut all = complete_all(&engine, vectors.into_iter().chain([greedy(&ids, 6)])).await;
    assert_eq!(all.pop().map(|generated| generated.ids()), Some(alone));
    assert!(first[0] != first[1] && all.into_iter().map(|outcome| outcome.embedding).eq(first));
    engine.stop();
    let cls = config("qwen3_tokens", &[("model.pooling", "cls".into())]);
    let error = format!("{:#}", start::start_engine(&cls).await.err().expect("it is refused"));
    assert!(error.contains("model.pooling"), "{error}");
}

/// Regression: what an unused classifier has in the files was not known. A key that says that tokens see
/// later ones refuses the model.
#[actix::test]
async fn a_folder_for_embeddings_may_have_a_classifier() {
    let model = Copied::of(&folder("qwen3"), "embeds-and-classifies");
    let modules =
        json!([{ "type": "a.Transformer", "path": "" }, { "type": "a.Pooling", "path": "1_Pooling" }]);
    std::fs::write(model.file("modules.json"), modules.to_string()).expect("it can be written");
    std::fs::create_dir(model.file("1_Pooling")).expect("it can be created");
    std::fs::copy(
        fixture(&folder("qwen3_sentences")).join("1_Pooling/config.json"),
        model.file("1_Pooling/config.json"),
    )
    .expect("it is copied");
    let engine = start::start_engine(&config(&model.0, &[])).await.expect("the copy loads");
    assert_eq!(engine.model.endpoints, ["/v1/embeddings", "/v1/score", "/v1/rerank"]);
    engine.stop();
    model.configure("is_causal", json!(false));
    let error = format!("{:#}", start::start_engine(&config(&model.0, &[])).await.err().expect("refused"));
    assert!(error.contains("is_causal"), "{error}");
}

/// The whole way: text, tokens, token types, scores, order.
#[actix::test]
async fn the_api_ranks_by_the_recorded_logits() {
    for name in ["bert_reranker", "qwen3", "qwen3_tokens"] {
        let config = config(&fixture(&folder(name)), &[]);
        let engine = start::start_engine(&config).await.expect("the fixture loads");
        let api = LocalApi::new(ServeParts::from(&engine), config.server);
        let texts = recorded::<Recorded>(name).texts;
        let pairs: Vec<&Text> = texts.iter().filter(|text| text.texts.len() == 2).collect();
        let side = |at: usize| pairs.iter().map(|text| &*text.texts[at]).collect::<Vec<_>>();
        let body = json!({ "text_1": side(0), "text_2": side(1) });
        let answer = post(&api, "/v1/score", body).await;
        for (index, text) in pairs.iter().enumerate() {
            let score = 1.0 / (1.0 + f64::from(-text.logits[0][0]).exp());
            let ours = answer["data"][index]["score"].as_f64().expect("a number");
            assert!((ours - score).abs() <= f64::from(TOLERANCE), "{name} {:?}: {ours}, {score}", text.texts);
        }
        let of_query: Vec<&&Text> = pairs.iter().filter(|text| text.texts[0] == "what is a panda").collect();
        let documents: Vec<&str> = of_query.iter().map(|text| &*text.texts[1]).collect();
        let body = json!({ "query": "what is a panda", "documents": documents });
        let results = post(&api, "/v1/rerank", body).await;
        let best = usize::from(of_query[1].logits[0][0] > of_query[0].logits[0][0]);
        assert_eq!((of_query.len(), &results["results"][0]["index"]), (2, &json!(best)));
        engine.stop();
    }
}

async fn post(api: &LocalApi, path: &str, body: serde_json::Value) -> serde_json::Value {
    match api.post(path, &body).await.unwrap_or_else(|error| panic!("{path} {body}: {error}")) {
        ResponseBody::Json(bytes) => serde_json::from_slice(&bytes).expect("it is JSON"),
        ResponseBody::Events(_) => panic!("nothing was to be streamed"),
    }
}
