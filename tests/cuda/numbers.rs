//! Checks of answers: GPUs give what the CPU gives within bounds, and exactly what GPUs give otherwise.
//!
//! Invariant: where an answer differs from the CPU's, the CPU found two tokens about as likely.

use crate::common::{
    self, Copied, Outcome, Story, all_home, complete, complete_all, config, fixture, greedy, sampled,
};
use mainstem::actors::Engine;
use mainstem::cli::start;
use mainstem::decoding::SamplingPlan;
use mainstem::decoding::strategies::{AnyVocabulary, CheckedDefaults, DeviceSampling};
use mainstem::request::{
    AcceptanceRule, DraftSource, FinishReason, Pooling, Request, Sampling, Speculation, Task, Token,
};
use std::path::Path;
use std::sync::Arc;
use toml::Value;

/// Largest difference of log-probabilities from the CPU's, without rounding of activations.
const BOUND: f32 = 1e-3;

/// Largest difference if activations, keys or values are rounded to 8 bits or less: a number between two
/// steps of the rounding may be rounded either way. The CPU's fast backend and the reference differ by half
/// of it.
const ROUNDED_BOUND: f32 = 0.4;

/// Settings besides the usual ones of tests.
pub type Settings = Vec<(&'static str, Value)>;

/// Returns the settings of an engine on these devices.
pub fn on(devices: &str, more: &[(&'static str, Value)]) -> Settings {
    let mut settings = vec![
        ("device.groups", devices.into()),
        // The two layers of the tiny models; nothing is measured.
        ("device.layers", if devices.contains("cpu") && devices.contains(';') { "1;1" } else { "" }.into()),
        ("device.kernel_cache", concat!(env!("CARGO_TARGET_TMPDIR"), "/kernels").into()),
        ("device.activations", "f32".into()),
        ("device.threads", 1.into()),
        // Prompts are processed in chunks.
        ("scheduler.token_budget", 24.into()),
    ];
    if let Ok(folder) = std::env::var("NVRTC_FOLDER") {
        settings.push(("device.nvrtc", folder.into()));
    }
    settings.extend_from_slice(more);
    settings
}

/// Runs a check on actors.
pub fn with_actors(check: impl Future<Output = ()>) {
    actix::System::new().block_on(check);
}

/// Starts an engine of a fixture, or of a model at an absolute path.
pub async fn start_on(model: &Path, settings: &Settings) -> Engine {
    start::start_engine(&config(model, settings)).await.expect("the model loads")
}

/// Returns token ids that exist in every vocabulary used here.
fn words(number: usize, len: usize) -> Vec<u32> {
    (0..len).map(|i| 8 + ((number * 31 + i * 7 + i * i) % 80) as u32).collect()
}

/// Returns greedy requests with all log-probabilities.
pub fn requests(count: usize, is_encoded: bool) -> Vec<Request> {
    let request = |i: usize| Request {
        logprobs: Some(5),
        prompt_logprobs: Some(5),
        encoder_input: if is_encoded { words(40 + i, 3 + 6 * i).into() } else { Vec::new().into() },
        ..greedy(&words(i, 3 + 13 * i), 6)
    };
    (0..count).map(request).collect()
}

/// Returns the answers of an engine to all requests at once.
pub async fn answers(model: &Path, settings: &Settings, requests: &[Request]) -> Vec<Outcome> {
    let engine = start_on(model, settings).await;
    let outcomes = complete_all(&engine, requests.iter().cloned()).await;
    all_home(&engine, 4).await;
    engine.stop();
    outcomes
}

/// Asserts that the log-probabilities of a token are within a bound of those of the CPU.
fn assert_near(got: &Token, right: &Token, bound: f32, what: &str) {
    let is_near = |got: f32, right: f32| (got - right).abs() <= bound;
    if let (true, Some(got), Some(right)) = (got.id == right.id, got.logprob, right.logprob) {
        assert!(is_near(got, right), "{what}: {got}, {right} on the CPU");
    }
    for (id, right) in &right.top {
        if let Some((_, got)) = got.top.iter().find(|(other, _)| other == id) {
            assert!(is_near(*got, *right), "{what}: {got} of token {id}, {right} on the CPU");
        }
    }
}

/// Asserts that answers are those of the CPU, up to tokens that are as likely as others within the bound.
pub fn assert_like_cpu(what: &str, got: &[Outcome], right: &[Outcome], bound: f32) {
    let mut compared = 0;
    for (number, (got, right)) in got.iter().zip(right).enumerate() {
        let what = format!("{what}, request {number}");
        assert_eq!((&got.end, got.tokens.len()), (&right.end, right.tokens.len()), "{what}");
        assert!(matches!(right.end, Some(Ok(FinishReason::Length))), "{what}: {:?}", right.end);
        assert_eq!(got.prompt.len(), right.prompt.len(), "{what}");
        for (at, (got, right)) in got.prompt.iter().zip(&right.prompt).enumerate() {
            assert_near(got, right, bound, &format!("{what}, prompt token {at}"));
        }
        for (at, (got, right)) in got.tokens.iter().zip(&right.tokens).enumerate() {
            let what = format!("{what}, token {at}");
            assert_near(got, right, bound, &what);
            compared += 1;
            if got.id != right.id {
                let margin = right.top[0].1 - right.top[1].1;
                assert!(margin <= 2.0 * bound, "{what}: {} for {}, by {margin}", got.id, right.id);
                break;
            }
        }
    }
    assert!(compared > right.len(), "{what}: only {compared} tokens are compared");
}

/// Asserts that answers are the same, with all log-probabilities.
pub fn assert_same(what: &str, got: &[Outcome], right: &[Outcome]) {
    for (number, (got, right)) in got.iter().zip(right).enumerate() {
        assert_eq!(got.end, right.end, "{what}, request {number}");
        assert_eq!((&got.prompt, &got.tokens), (&right.prompt, &right.tokens), "{what}, request {number}");
    }
}

/// Every way to divide two layers among two GPUs and the CPU, and whether the sums are those of one GPU.
pub fn partitions() {
    with_actors(async {
        let (model, requests) = (fixture("gqa"), requests(4, false));
        let right = answers(&model, &on("cpu:0", &[]), &requests).await;
        let alone = answers(&model, &on("cuda", &[]), &requests).await;
        assert_like_cpu("cuda", &alone, &right, BOUND);
        let lanes = [("scheduler.lanes", 2.into()), ("scheduler.shuffle", "off".into())];
        for devices in ["cuda:1", "cuda:0;cuda:1"] {
            for more in [&[][..], &lanes] {
                let got = answers(&model, &on(devices, more), &requests).await;
                assert_same(&format!("{devices}, {more:?}"), &got, &alone);
            }
        }
        for devices in
            ["cuda:0&cuda:1", "cuda:0;cpu", "cpu;cuda:1", "cuda:0&cuda:1;cpu", "cpu:0&cpu:1;cuda:0&cuda:1"]
        {
            let got = answers(&model, &on(devices, &lanes), &requests).await;
            assert_like_cpu(devices, &got, &right, BOUND);
        }
    });
}

/// Returns a request with penalties that the GPU applies, and one with the same that the host applies.
fn penalized(prompt: &[u32], max_tokens: u32) -> (Request, Request) {
    let params = [("repetition_penalty", 1.3), ("presence_penalty", 0.4), ("frequency_penalty", 0.3)]
        .map(|(name, value)| (name, serde_json::Value::from(value)));
    let pairs = params.iter().map(|(name, value)| (*name, value));
    let plan = SamplingPlan::parse(&CheckedDefaults::default(), pairs, &AnyVocabulary).expect("valid");
    let DeviceSampling { temperature, penalties, .. } = plan.device().expect("the GPU can do this");
    let request = |sampling| Request { sampling, logprobs: Some(5), ..greedy(prompt, max_tokens) };
    let on_host = Request { plan: Some(Arc::new(plan)), ..request(Sampling { seed: 3, ..Sampling::GREEDY }) };
    (request(Sampling { temperature, penalties, seed: 3, ..Sampling::GREEDY }), on_host)
}

/// A request's answer has the same bits alone, with others, sampled or not, and with its prompt cached. With
/// penalties, it is also that of the host.
pub fn company() {
    with_actors(async {
        let model = fixture("biased");
        let mut requests = requests(4, false);
        let random = |i: usize| Request { logprobs: Some(5), ..sampled(&words(i, 4 + 3 * i), 8, i as u64) };
        requests.extend((0..4).map(random));
        let (drawn, on_host) = (requests.len(), (0..3).map(|i| penalized(&words(i, 4 + 3 * i), 12)));
        let (on_device, on_host): (Vec<Request>, Vec<Request>) = on_host.unzip();
        requests.extend(on_device.into_iter().chain(on_host));
        let off = [("kv.prefix_cache", "off".into())];
        let together = answers(&model, &on("cuda:0", &off), &requests).await;
        for (number, [device, host]) in [0, 1, 2].map(|i| (i, [drawn + i, drawn + 3 + i])) {
            let ids = [device, host].map(|at| together[at].ids());
            assert_eq!(ids[0], ids[1], "request {number} with penalties, of the GPU and of the host");
        }
        for (slots, budget, devices) in [(1, 24, "cuda:0"), (2, 9, "cuda:0;cuda:1"), (4, 64, "cuda:1")] {
            let sizes = [("scheduler.slots", slots.into()), ("scheduler.token_budget", budget.into())];
            let engine = start_on(&model, &on(devices, &sizes)).await;
            for (number, (request, right)) in requests.iter().zip(&together).enumerate() {
                let got = complete(&engine, request.clone()).await;
                let what = format!("request {number} alone on {devices}");
                assert_same(&what, &[got], std::slice::from_ref(right));
            }
            engine.stop();
        }
    });
}

/// Returns a copy of a family's model with the tokenizer that all families share.
fn family(name: &str) -> Copied {
    let model = Copied::of(&format!("families/{name}"), &format!("cuda-{name}"));
    for file in ["tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(fixture("families").join(file), model.file(file)).expect("a file is copied");
    }
    model
}

/// Checks a family on a GPU against the CPU.
async fn check_family(name: &str, devices: &str, is_encoded: bool) {
    let (model, requests) = (family(name), requests(3, is_encoded));
    let right = answers(&model.0, &on("cpu:0", &[]), &requests).await;
    let got = answers(&model.0, &on(devices, &[]), &requests).await;
    assert_like_cpu(&format!("{name} on {devices}"), &got, &right, BOUND);
}

/// Families that differ in norms, positions, attention, activations and mixtures.
const DECODERS: [(&str, &str); 17] = [
    ("bloom", "cuda:0"),
    ("chatglm2", "cuda:0"),
    ("deepseek_moe", "cuda:0"),
    ("deepseek_v2", "cuda:0&cuda:1"),
    ("falcon_7b", "cuda:0;cpu"),
    ("gemma2", "cuda:0"),
    ("gemma3", "cuda:0"),
    ("gpt2", "cuda:0&cuda:1"),
    ("minicpm", "cuda:0"),
    ("mistral", "cuda:0"),
    ("mixtral", "cpu;cuda:0&cuda:1"),
    ("opt_350m", "cuda:0"),
    ("phi3_longrope", "cuda:0"),
    ("apertus", "cuda:0"),
    ("phimoe", "cuda:0&cuda:1"),
    ("qwen2_moe", "cuda:1;cuda:0"),
    ("qwen3_moe", "cuda:0"),
];

/// Decoders of many families.
pub fn decoders() {
    with_actors(async {
        for (name, devices) in DECODERS {
            check_family(name, devices, false).await;
        }
    });
}

/// Prompts that begin with attention to keys and values of all heads.
pub fn openings() {
    with_actors(async {
        let model = family("deepseek_v2");
        let more = [("attention.mla", "fast".into()), ("scheduler.token_budget", 40.into())];
        let requests = [36, 20, 50].map(|len| Request { logprobs: Some(5), ..greedy(&words(len, len), 4) });
        let right = answers(&model.0, &on("cpu:0", &more), &requests).await;
        let got = answers(&model.0, &on("cuda:0&cuda:1", &more), &requests).await;
        assert_like_cpu("openings", &got, &right, BOUND);
    });
}

/// Encoders, alone and with decoders.
pub fn encoders() {
    with_actors(async {
        for (name, devices) in [("t5", "cuda:0"), ("m2m100", "cuda:0&cuda:1"), ("bart", "cuda:0")] {
            check_family(name, devices, true).await;
        }
        let embed = |i: usize| Request {
            task: Task::Embed(Pooling::Mean),
            encoder_input: words(i, 3 + 5 * i).into(),
            ..greedy(&[], 0)
        };
        let requests: Vec<Request> = (0..3).map(embed).collect();
        for (name, devices) in [("bert", "cuda:0"), ("deberta_v3", "cuda:0&cuda:1")] {
            let model = family(name);
            let right = answers(&model.0, &on("cpu:0", &[]), &requests).await;
            let got = answers(&model.0, &on(devices, &[]), &requests).await;
            for (got, right) in got.iter().zip(&right) {
                let [got, right] =
                    [got, right].map(|it| it.embedding.as_ref().expect("there is an embedding"));
                let worst = got.iter().zip(right).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                assert!(got.len() == right.len() && worst <= BOUND, "{name}: {worst}");
            }
        }
    });
}

/// Weights and caches in other number formats. Caches are rounded, too.
pub fn formats() {
    with_actors(async {
        let requests = requests(3, false);
        let cases =
            [("f16", "f16", 10.0 * BOUND), ("bf16", "q8", ROUNDED_BOUND), ("tied", "q4", ROUNDED_BOUND)];
        for (model, cache, bound) in cases {
            let more = [("kv.type", cache.into())];
            let right = answers(&fixture(model), &on("cpu:0", &more), &requests).await;
            let got = answers(&fixture(model), &on("cuda:0", &more), &requests).await;
            assert_like_cpu(&format!("{model}, cache {cache}"), &got, &right, bound);
        }
    });
}

/// The demo model: as it is, with a draft model, with weights in 4 bits, and with activations in 8.
pub fn demo() {
    with_actors(async {
        let (model, prompt) = (Path::new("demo"), words(1, 12));
        let plain = [Request { logprobs: Some(5), ..greedy(&prompt, 8) }];
        for (weights, activations, bound) in
            [("", "f32", BOUND), ("q4", "f32", BOUND), ("q4", "fast", ROUNDED_BOUND)]
        {
            let more = [
                ("model.weights", weights.into()),
                ("device.activations", activations.into()),
                ("kv.max_context", 64.into()),
            ];
            let right = answers(model, &on("cpu:0", &more), &plain).await;
            let got = answers(model, &on("cuda:0", &more), &plain).await;
            assert_like_cpu(&format!("demo, {weights:?}, {activations}"), &got, &right, bound);
            if !weights.is_empty() {
                continue;
            }
            let drafting = [&more[..], &[("speculation.draft", "demo-draft".into())]].concat();
            let (drafter, rule) = (DraftSource::Model, AcceptanceRule::Coupled);
            let speculation = Some(Speculation { drafter, max_drafts: 3, rule });
            let drafted = [Request { speculation, ..plain[0].clone() }];
            let drafted = answers(model, &on("cuda:0", &drafting), &drafted).await;
            let (count, _) = drafted[0].speculated.expect("drafts are made");
            assert!(count > 0);
            assert_eq!(drafted[0].ids(), got[0].ids(), "drafts change no token");
        }
    });
}

/// The trained model next to the checkout, if present, generates the beginnings of its recorded texts.
pub fn stories() {
    let Some(folder) = common::stories() else { return };
    with_actors(async {
        let stories = Story::all(&folder);
        let requests = stories.iter().map(|story| greedy(&story.prompt_ids, 24));
        let engine = start_on(&folder.join("hf"), &on("cuda:0", &[])).await;
        for (story, outcome) in stories.iter().zip(complete_all(&engine, requests).await) {
            let sure = &story.sure_ids()[..24.min(story.sure_ids().len())];
            assert_eq!(&outcome.ids()[..sure.len()], sure, "{:?}", story.prompt);
        }
        engine.stop();
    });
}
