//! Tests of sampling strategies in the whole program: the tokens are those of the sampler's definition on the
//! model's logits, and depend neither on other requests nor on how the model is divided.

use crate::common::{Outcome, all_home, complete, complete_all, engine, fixture, greedy, prompt};
use crate::http::Server;
use mainstem::actors::Engine;
use mainstem::decoding::SamplingPlan;
use mainstem::decoding::strategies::{
    AnyVocabulary, CheckedDefaults, DeviceSampling, HostSampler, Row, SequenceState,
};
use mainstem::model::executor::{Executor, KvCacheConfig, ModelExecutor};
use mainstem::model::{ModelRef, ModelSource, Shard};
use mainstem::request::{Request, Sampling};
use mainstem_kernels::random::uniform;
use mainstem_kernels::reference::Reference;
use mainstem_kernels::{
    Fraction, HandoffPorts, KvTable, QuantType, SamplingParams, Span, SpanModel, SpanOutput, SpanStack,
    SpanTable, SpanTokens, StepBatch, StepLimits, StepOutput, TableUpdate,
};
use serde_json::{Value, json};
use std::sync::Arc;

const MODEL: &str = "gqa";
/// Most tokens of a sequence whose tokens are worked out by the definition.
const POSITIONS: usize = 32;

/// The model's logits, computed by the reference.
struct Definition {
    executor: ModelExecutor<Reference>,
}

impl Definition {
    fn new() -> Definition {
        let source = ModelSource::open(&ModelRef::Path(fixture(MODEL)), None).expect("the fixture opens");
        let limits = StepLimits {
            slots: 1,
            rows: POSITIONS,
            batch_rows: usize::MAX,
            logit_rows: 1,
            positions: POSITIONS,
            encoder_positions: 0,
            page_positions: POSITIONS,
            window: None,
            top_logprobs: 0,
            vocab: source.spec.vocab,
            hidden: 0,
            drafts: 0,
            draft_logits: false,
            counts_tokens: false,
            opening_rows: 0,
            attended_fraction: Fraction::ONE,
        };
        let kv = KvCacheConfig { ty: QuantType::F32, pages: 2, window_pages: 0 };
        let whole = Shard::whole(&source.spec);
        let executor = ModelExecutor::new(Reference::new(), &source, &whole, kv, limits);
        Definition { executor: executor.expect("the fixture loads") }
    }

    /// Returns the logits of the token after `tokens`.
    fn logits(&mut self, tokens: &[u32]) -> Vec<f32> {
        let len = tokens.len() as u32;
        let mut batch = StepBatch { tokens: tokens.to_vec(), return_logits: true, ..StepBatch::default() };
        batch.table_updates.push(TableUpdate { slot: 0, table: KvTable::Own, index: 0, page: 1 });
        batch.spans.push(Span {
            model: SpanModel::Target,
            stack: SpanStack::Decoder,
            slot: 0,
            start: 0,
            tokens: SpanTokens::Given { at: 0, len },
            table: SpanTable::Own,
            reserved: len,
            encoder_len: 0,
            output: SpanOutput::Last,
        });
        batch.sampling.push(SamplingParams::GREEDY);
        let mut output = StepOutput::default();
        self.executor.run(&batch, HandoffPorts::default(), &mut output).expect("the step runs");
        output.logits.as_chunks().0.iter().map(|value| f32::from_le_bytes(*value)).collect()
    }

    /// Returns the tokens that the sampler's definition gives.
    fn tokens(&mut self, params: &Value, seed: u64, prompt: &[u32], count: usize) -> Vec<u32> {
        let pairs = params.as_object().expect("an object").iter().map(|(name, value)| (name.as_str(), value));
        let plan = SamplingPlan::parse(&CheckedDefaults::default(), pairs, &AnyVocabulary).expect("valid");
        let mut state = SequenceState::new(&plan, prompt, count);
        let mut sampler = HostSampler::new();
        for _ in 0..count {
            let tokens = state.history().tokens().to_vec();
            let logits = self.logits(&tokens);
            let position = tokens.len() as u64;
            let row = Row { logits: &logits, seed, position, mask: None, logprobs: None };
            let draw = sampler.draw(&plan, &state, &row).expect("there is no mask");
            state.accept(&draw);
        }
        state.history().generated().to_vec()
    }
}

/// Each strategy over HTTP, whole and streamed, and two choices at once.
#[test]
fn answers_over_http_are_those_of_the_definition() {
    const SEED: u64 = 11;
    const COUNT: usize = 16;
    let server = Server::start(MODEL, &["--device", "reference", "--sampling", "repeat_last_n=20"]);
    let mut definition = Definition::new();
    let prompt = prompt(3, 9);
    let plain = definition.tokens(&json!({ "temperature": 0 }), 0, &prompt, COUNT);
    let cases = [
        json!({ "temperature": 0, "repetition_penalty": 1.8 }),
        json!({ "temperature": 0.8, "repetition_penalty": 1.5, "presence_penalty": 0.4,
            "frequency_penalty": 0.3, "repeat_last_n": -1, "top_p": 0.9,
            "logit_bias": { "12": 2, "13": false } }),
        json!({ "temperature": 0, "no_repeat_ngram_size": 1 }),
        json!({ "mirostat": 2, "mirostat_tau": 4 }),
        json!({ "typical_p": 0.7, "temperature": 1.3, "presence_penalty": 1.5 }),
        json!({ "xtc_probability": 0.5, "xtc_threshold": 0.02, "min_p": 0.01 }),
        json!({ "strategy": "random_fsd", "strategy_params": { "k": 8, "pool_size": 100 } }),
        json!({ "dynatemp_range": 0.7, "samplers": ["top_k", "temperature"], "top_k": 30 }),
    ];
    for params in &cases {
        let mut with_default = params.clone();
        with_default["repeat_last_n"] = params.get("repeat_last_n").cloned().unwrap_or(20.into());
        let expected = [0, 1].map(|choice| definition.tokens(&with_default, SEED + choice, &prompt, COUNT));
        assert_ne!(expected[0], plain, "{params} changes nothing");
        let mut body = json!({
            "prompt": prompt, "max_tokens": COUNT, "seed": SEED, "ignore_eos": true, "return_token_ids": true,
        });
        body.as_object_mut().expect("an object").extend(params.as_object().expect("an object").clone());
        let ids: Vec<u64> = expected[0].iter().map(|&id| id.into()).collect();
        body["stream"] = true.into();
        assert_eq!(server.stream(&body).ids, ids, "{params}");
        body["stream"] = false.into();
        body["n"] = 2.into();
        let (status, answer) = server.post(body);
        assert_eq!(status, 200, "{answer}");
        for (choice, expected) in expected.iter().enumerate() {
            assert_eq!(answer["choices"][choice]["token_ids"], json!(expected), "{params}, choice {choice}");
        }
    }
    let (_, metrics) = server.ask("/metrics", None);
    let count = |strategy: &str| -> u32 {
        let label = format!("strategy=\"{strategy}\"");
        let lines = metrics.lines().filter(|line| line.starts_with("mainstem_requests_by_strategy_total"));
        lines
            .filter(|line| line.contains(&label))
            .filter_map(|line| line.rsplit(' ').next()?.parse::<u32>().ok())
            .sum()
    };
    // Each case was requested twice; a request counts once, whatever its number of choices.
    assert_eq!([count("penalties"), count("xtc"), count("random_fsd")], [6, 2, 2], "{metrics}");
}

/// Defaults that the model cannot serve are refused at start, with the key.
#[test]
fn defaults_that_do_not_fit_the_model_are_refused_at_start() {
    for (sampling, named) in [
        ("allowed_token_ids=[99999]", "model.sampling: allowed_token_ids is [99999] but must be a list"),
        ("strategy=fsd,top_p=0.5", "model.sampling: strategy is \"fsd\", which replaces top_p"),
        ("top_q=1", "top_q is not a sampling parameter"),
    ] {
        let mut command = crate::common::mainstem();
        let output = command.arg("run").arg(fixture(MODEL)).args(["Hi", "--raw", "--sampling", sampling]);
        let output = output.output().expect("the program starts");
        let printed = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && printed.contains(named), "{printed}");
    }
}

/// Parameters of all kinds of strategies: drawn by the device, and by the host with and without state.
const STRATEGIES: [&str; 19] = [
    r#"{"temperature": 0}"#,
    r#"{"temperature": 0.9, "top_p": 0.95, "top_k": 40}"#,
    r#"{"temperature": 0, "repetition_penalty": 1.3}"#,
    r#"{"presence_penalty": 1, "frequency_penalty": 0.5, "repeat_last_n": 8}"#,
    r#"{"repetition_penalty": 1.2, "presence_penalty": 1, "frequency_penalty": 0.5, "logit_bias": [[9, 4]]}"#,
    r#"{"frequency_penalty": -0.4, "temperature": 0.7, "min_p": 0.02, "min_tokens": 3}"#,
    r#"{"no_repeat_ngram_size": 2, "temperature": 0.7}"#,
    r#"{"dry_multiplier": 0.8, "dry_allowed_length": 1, "dry_sequence_breakers": []}"#,
    r#"{"typical_p": 0.6, "tfs_z": 0.9}"#,
    r#"{"mirostat": 2, "mirostat_tau": 4}"#,
    r#"{"mirostat": 1, "mirostat_tau": 3, "mirostat_eta": 0.3}"#,
    r#"{"xtc_probability": 0.5, "xtc_threshold": 0.01, "top_n_sigma": 2}"#,
    r#"{"dynatemp_range": 0.5, "eta_cutoff": 0.001}"#,
    r#"{"epsilon_cutoff": 0.002, "min_tokens": 6, "logprobs_mode": "processed_logprobs"}"#,
    r#"{"allowed_token_ids": [5, 6, 7, 8, 9, 10, 11, 12], "frequency_penalty": 1}"#,
    r#"{"temperature": 1.2, "min_tokens": 4}"#,
    r#"{"strategy": "fsd"}"#,
    r#"{"strategy": "random_fsd", "strategy_params": {"random_tokens": 30}}"#,
    r#"{"strategy": "sample.std", "bad_words": [[9], [10]], "logit_bias": [[12, 3]]}"#,
];

/// Random numbers of a test case.
struct Dice(u64, u64);

impl Dice {
    fn below(&mut self, end: usize) -> usize {
        self.1 += 1;
        (uniform(self.0, self.1, 0) * end as f32) as usize % end
    }

    fn shuffle<T>(&mut self, list: &mut [T]) {
        (1..list.len()).rev().for_each(|last| list.swap(last, self.below(last + 1)));
    }
}

/// Returns a request with a random strategy, seed, prompt and length; and one whose tokens the host draws by
/// the same parameters, if they are penalties that the device applies.
fn random_request(engine: &Engine, dice: &mut Dice) -> (Request, Option<Request>) {
    let params: Value = serde_json::from_str(STRATEGIES[dice.below(STRATEGIES.len())]).expect("JSON");
    let pairs = params.as_object().expect("an object").iter().map(|(name, value)| (name.as_str(), value));
    // Some sequences end early, so that others move to their slots.
    let stop_ids: Vec<u32> = (0..dice.below(40) as u32).map(|id| 3 * id).collect();
    let plan = engine.sampling.plan(pairs, true, &stop_ids).expect("valid");
    let min_tokens = params.get("min_tokens").and_then(Value::as_u64).unwrap_or(0) as u32;
    let (number, len) = (dice.below(1000), 1 + dice.below(40));
    let max_tokens = min_tokens + 1 + dice.below(24) as u32;
    let request =
        Request { stop_ids: stop_ids.into(), min_tokens, ..greedy(&prompt(number, len), max_tokens) };
    let seed = dice.below(1 << 20) as u64;
    let (device, logit_bias) = (plan.device(), plan.logit_bias().clone());
    let on_host = Request {
        plan: Some(Arc::new(plan)),
        sampling: Sampling { seed, ..Sampling::GREEDY },
        ..request.clone()
    };
    match device {
        Some(DeviceSampling { temperature, top_k, top_p, min_p, penalties }) => {
            let sampling = Sampling { temperature, top_k, top_p, min_p, penalties, seed };
            (Request { sampling, logit_bias, ..request }, (!penalties.is_none()).then_some(on_host))
        }
        None => (on_host, None),
    }
}

/// Mixtures of 8 requests: each alone, all at once in two orders, so that they end at different steps and
/// move between slots, and with the model divided by layers and by tensors.
#[actix::test]
async fn tokens_depend_on_nothing_but_the_request() {
    let settings = |groups: &str| {
        let mut settings = vec![
            ("scheduler.slots", 5.into()),
            ("scheduler.token_budget", 12.into()),
            ("device.threads", 1.into()),
            ("device.activations", "f32".into()),
        ];
        if !groups.is_empty() {
            settings.push(("device.groups", groups.into()));
        }
        settings
    };
    let whole = engine(MODEL, &settings("")).await;
    let divided = [engine(MODEL, &settings("0;1")).await, engine(MODEL, &settings("0&1")).await];
    let mut ahead = settings("");
    ahead.push(("scheduler.run_ahead", "on".into()));
    let ahead = engine(MODEL, &ahead).await;
    let mut compared = 0;
    for case in 0..6 {
        let mut dice = Dice(case, 0);
        let (requests, on_host): (Vec<Request>, Vec<Option<Request>>) =
            (0..8).map(|_| random_request(&whole, &mut dice)).unzip();
        let mut requests: Vec<(usize, Request)> = requests.into_iter().enumerate().collect();
        let (mut alone, mut ends) = (Vec::new(), Vec::new());
        for (_, request) in &requests {
            let outcome = complete(&whole, request.clone()).await;
            ends.push(outcome.end.clone());
            alone.push(outcome.ids());
        }
        for (number, request) in (0..).zip(on_host).filter_map(|(number, it)| Some((number, it?))) {
            let drawn = complete(&whole, request).await.ids();
            assert_eq!(drawn, alone[number], "case {case}, request {number}: the host and the device");
            compared += 1;
        }
        for engine in [&whole, &whole, &divided[0], &divided[1], &ahead] {
            let outcomes = complete_all(engine, requests.iter().map(|(_, request)| request.clone())).await;
            for ((number, request), outcome) in requests.iter().zip(&outcomes) {
                let plan = request.plan.as_ref().map(|plan| plan.active());
                assert_eq!(Outcome::ids(outcome), alone[*number], "case {case}, request {number}, {plan:?}");
                assert_eq!(outcome.end, ends[*number], "case {case}, request {number}, {plan:?}");
                assert!(matches!(outcome.end, Some(Ok(_))), "{:?}", outcome.end);
            }
            dice.shuffle(&mut requests);
        }
    }
    assert!(compared > 3, "{compared} requests had penalties on the device");
    for engine in divided.into_iter().chain([whole, ahead]) {
        all_home(&engine, 5).await;
        engine.stop();
    }
}
