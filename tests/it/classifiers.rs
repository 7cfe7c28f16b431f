//! Tests of classifiers against transformers (tests/oracle/make_classifiers.py): alone, fused with others, in
//! chunks, and on every partition; and of dense modules and prompts against sentence-transformers.

use crate::common::{Copied, complete, complete_all, config, fixture, greedy};
use mainstem::actors::{Engine, PromptingDefaults};
use mainstem::cli::start;
use mainstem::decoding::{Classifier, apply_all};
use mainstem::formats::PoolingConfig;
use mainstem::model::{ModelRef, ModelSource};
use mainstem::request::{Request, Task};
use mainstem::server::{LocalApi, ResponseBody, ServeParts};
use serde::Deserialize;
use serde_json::json;
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
            let typed = engine.tokenizer.encode_texts(&text.texts[0], second, true, 99).unwrap();
            assert_eq!(typed.ids, text.ids, "{name}");
            assert_eq!(typed.second, text.types.iter().position(|kind| *kind == 1), "{name}");
        }
        engine.stop();
    }
    let engine = engine("bert_reranker", &[]).await;
    let encode = |most| engine.tokenizer.encode_texts("panda", Some("the giant panda is a bear"), true, most);
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
    for name in ["bert_reranker", "qwen3", "sentences"] {
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
        assert_eq!(path.join("3_Dense/model.safetensors").exists(), name == "sentences");
        std::fs::remove_dir_all(path).unwrap();
    }
}

#[derive(Deserialize)]
struct Sentences {
    texts: Vec<String>,
    plain: Vec<Vec<f32>>,
    query: Vec<Vec<f32>>,
    document: Vec<Vec<f32>>,
}

#[actix::test]
async fn dense_modules_and_prompts_give_the_vectors_of_sentence_transformers() {
    let engine = engine("sentences", &[]).await;
    let PromptingDefaults::Encoder(prompting) = &engine.model.prompting else { panic!("it is an encoder") };
    let PoolingConfig::Supported(pooling) = prompting.pooling else { panic!("{:?}", prompting.pooling) };
    assert_eq!((prompting.dimensions, prompting.normalize, prompting.dense.len()), (8, true, 2));
    let Sentences { texts, plain, query, document } = recorded("sentences");
    for (names, expected) in [(&[][..], plain), (&["query"], query), (&["document"], document)] {
        for (text, theirs) in texts.iter().zip(expected) {
            let prompted = [prompting.prompts.of_role(names), text].concat();
            let ids = engine.tokenizer.encode(&prompted, true).unwrap();
            let request = Request { task: Task::Embed(pooling), encoder_input: ids.into(), ..greedy(&[], 0) };
            let pooled = complete(&engine, request).await.embedding.expect("there is a vector");
            let ours = apply_all(&prompting.dense, pooled);
            let length = ours.iter().map(|x| x * x).sum::<f32>().sqrt();
            let is_close = |(a, b): (&f32, &f32)| (a / length - b).abs() <= TOLERANCE;
            assert!(ours.iter().zip(&theirs).all(is_close), "{names:?} {text}: {ours:?}, {theirs:?}");
        }
    }
    engine.stop();
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
