//! Weights in every number format that is written: what is loaded, and that company changes nothing.

use crate::common::{Outcome, all_home, complete, complete_all, config, drawn, greedy, mainstem, prompt};
use mainstem::actors::Engine;
use mainstem::cli::start;
use mainstem::request::Request;
use mainstem_kernels::QuantType;
use std::path::Path;
use toml::Value;

/// Prompts of many lengths, greedy and by chance.
pub fn requests() -> Vec<Request> {
    let request = |i: usize| {
        let request = match i % 2 {
            0 => greedy(&prompt(i, 3 + 9 * i), 6),
            _ => drawn(&prompt(i, 3 + 9 * i), 6, i as u64),
        };
        Request { prompt_logprobs: true, logprobs: Some(0), ..request }
    };
    (0..6).map(request).collect()
}

fn settings(weights: &str, slots: i64, budget: i64, activations: &str) -> Vec<(&'static str, Value)> {
    vec![
        ("model.weights", weights.into()),
        ("scheduler.slots", slots.into()),
        ("scheduler.token_budget", budget.into()),
        ("device.activations", activations.into()),
    ]
}

/// The demo model, with prompts in pieces or whole.
async fn demo(weights: &str, activations: &str, slots: i64, budget: i64) -> Engine {
    let config = config(Path::new(""), &settings(weights, slots, budget, activations));
    start::engine(&config).await.expect("the demo model loads")
}

/// One after another with whole prompts, or all together with prompts in pieces.
async fn answers(weights: &str, together: bool) -> Vec<Outcome> {
    let (slots, budget) = if together { (4, 24) } else { (1, 512) };
    answers_of(demo(weights, "fast", slots, budget).await, slots as usize, together).await
}

/// To all requests, together or one after another, of an engine with so many slots, which is stopped then.
pub async fn answers_of(engine: Engine, slots: usize, together: bool) -> Vec<Outcome> {
    let answers = if together {
        complete_all(&engine, requests()).await
    } else {
        let mut answers = Vec::new();
        for request in requests() {
            answers.push(complete(&engine, request).await);
        }
        answers
    };
    all_home(&engine, slots).await;
    engine.stop();
    answers
}

/// Log-probabilities of the tokens of some texts.
async fn scores(weights: &str, activations: &str, texts: &[Vec<u32>]) -> Vec<f32> {
    scored(demo(weights, activations, 4, 512).await, texts).await
}

async fn scored(engine: Engine, texts: &[Vec<u32>]) -> Vec<f32> {
    let request = |text: &Vec<u32>| Request { prompt_logprobs: true, logprobs: Some(0), ..greedy(text, 1) };
    let outcomes = complete_all(&engine, texts.iter().map(request)).await;
    engine.stop();
    outcomes.iter().flat_map(|outcome| &outcome.prompt).filter_map(|token| token.logprob).collect()
}

/// Texts as the demo model tells them.
pub async fn texts() -> Vec<Vec<u32>> {
    let engine = demo("", "f32", 4, 512).await;
    let begins = (0..6).map(|seed| drawn(&[0], 120, seed));
    let outcomes = complete_all(&engine, begins).await;
    engine.stop();
    outcomes.iter().map(|outcome| [&[0][..], &outcome.ids()].concat()).collect()
}

/// The mean difference.
pub fn apart(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).sum::<f32>() / a.len() as f32
}

#[actix::test]
async fn alone_and_in_company_answers_have_the_same_bits_in_every_format() {
    for ty in QuantType::all().filter(|ty| ty.row().quantize.is_some()) {
        let rules = format!("embedding={ty},{ty}");
        let [alone, together] = [false, true].map(|together| answers(&rules, together));
        let (alone, together) = (alone.await, together.await);
        for (number, (alone, together)) in alone.iter().zip(&together).enumerate() {
            assert_eq!(alone.end, together.end, "{ty}, request {number}");
            assert_eq!(
                (&alone.tokens, &alone.prompt),
                (&together.tokens, &together.prompt),
                "{ty}, request {number}"
            );
        }
    }
}

/// More bits are nearer to what is stored, and rounding activations costs little beside.
#[actix::test]
async fn formats_of_more_bits_are_nearer_to_the_stored_model() {
    let texts = texts().await;
    let stored = scores("", "f32", &texts).await;
    let bounds = [
        ("q8", 0.004),
        ("q6", 0.02),
        ("q5", 0.03),
        ("q4", 0.05),
        ("q4_b64t1", 0.06),
        ("q3h", 0.1),
        ("q3", 0.2),
        ("q2", 0.4),
    ];
    let mut last = 0.0;
    for (weights, bound) in bounds {
        let rules = format!("embedding={weights},{weights}");
        let exact = apart(&stored, &scores(&rules, "f32", &texts).await);
        let fast = apart(&stored, &scores(&rules, "fast", &texts).await);
        assert!(last < exact && exact < bound, "{weights}: {exact}, before it {last}");
        assert!(
            (fast - exact).abs() < 0.25 * exact + 0.002,
            "{weights}: {exact}, {fast} with fast activations"
        );
        last = exact;
    }
}

/// Members cut matrices where neither what is stored nor what is loaded has a block, and choose the same formats.
#[actix::test]
async fn members_of_a_stage_load_what_one_device_does() {
    let texts = texts().await;
    for rules in ["embedding=q8,q4", "*.down_proj.*=q4_K,q3h"] {
        let whole = scores(rules, "f32", &texts).await;
        for devices in ["cpu:0&cpu:1", "cpu:0;cpu:1"] {
            let mut settings = settings(rules, 4, 512, "f32");
            settings.extend([("device.groups", devices.into()), ("device.threads", 1.into())]);
            let engine = start::engine(&config(Path::new(""), &settings)).await.expect("it can be divided");
            let parted = scored(engine, &texts).await;
            let most = whole.iter().zip(&parted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(most < 1e-4, "{rules} on {devices}: {most}");
        }
    }
}

#[test]
fn rules_say_what_is_loaded_and_inspect_tells() {
    let inspect = |rules: &str| {
        let output = mainstem().args(["inspect", "--json", "--weights", rules]).output().expect("it starts");
        (output.status.success(), output)
    };
    let (ok, output) = inspect("*.down_proj.*=q6,q4");
    assert!(ok, "{}", String::from_utf8_lossy(&output.stderr));
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).expect("it is JSON");
    let types: Vec<(&str, &str)> = told["tensors"]
        .as_array()
        .expect("a list")
        .iter()
        .map(|tensor| (tensor["role"].as_str().expect("a text"), tensor["type"].as_str().expect("a text")))
        .collect();
    for (role, ty) in
        [("embedding", "q8_0"), ("down", "q6_b64t1"), ("q", "q4_b32t1a"), ("attention_norm", "bf16")]
    {
        assert!(types.contains(&(role, ty)), "{role} as {ty}: {types:?}");
    }
    let (ok, output) = inspect("q4,head=q8");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!ok && error.contains("model.weights") && error.contains("'head=q8'"), "{error}");
    let (ok, output) = inspect("head=f16,q4");
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(
        !ok && error.contains("model.weights") && error.contains("'head'"),
        "the demo's is tied: {error}"
    );
}
