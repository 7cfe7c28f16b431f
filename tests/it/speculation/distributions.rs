//! Tests of the distribution of answers whose drafts are accepted by rejection sampling.

use super::{Drafts, Served, change_weights, words};
use crate::common::{complete, complete_all, fixture, greedy};
use crate::families::family;
use mainstem::decoding::SamplingPlan;
use mainstem::request::{AcceptanceRule, DraftSource, Request, Sampling, Speculation};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

/// Number of tokens that an answer may have at each position.
const TOP_K: usize = 3;

/// Number of tokens of an answer: the first one, up to two drafts, and one more.
const TOKENS: u32 = 4;

const TEMPERATURE: f64 = 1.5;

/// A model whose drafts are accepted often, but not always, and one prompt.
struct Case {
    served: Served,
    prompt: Vec<u32>,
    plan: Arc<SamplingPlan>,
}

impl Case {
    async fn start(test: &str) -> Case {
        let (model, draft) = (family("qwen3", test), family("qwen3", &format!("{test}-draft")));
        change_weights(&draft.file("model.safetensors"), 0.2);
        let settings = [("scheduler.slots", 64.into()), ("scheduler.max_waiting", 4096.into())];
        let served = Served::start(&model.0, &draft.0, &settings).await;
        let params = json!({ "temperature": TEMPERATURE, "top_k": TOP_K });
        let pairs = params.as_object().expect("an object").iter().map(|(name, value)| (name.as_str(), value));
        let plan = served.engine.sampling.plan(pairs, true, &[]).expect("valid");
        let prompt: Vec<u32> = words(3, 8).into_iter().map(|id| id as u32).collect();
        let case = Case { served, prompt, plan: Arc::new(plan) };
        // The loop learns what rows cost from this one, in whose steps no prompts are computed.
        let first = Request { max_tokens: 100, ..case.request(0, AcceptanceRule::Coupled) };
        assert!(complete(&case.served.engine, first).await.speculated.is_some_and(|(made, _)| made > 50));
        case
    }

    fn request(&self, seed: u64, rule: AcceptanceRule) -> Request {
        Request {
            sampling: Sampling { seed, ..Sampling::GREEDY },
            plan: Some(self.plan.clone()),
            speculation: Some(Speculation { drafter: DraftSource::Model, max_drafts: 5, rule }),
            ..greedy(&self.prompt, TOKENS)
        }
    }

    /// Returns the most likely tokens after the prompt and each of these beginnings, with their
    /// probabilities.
    async fn next(&self, beginnings: &[Vec<u32>]) -> Vec<Vec<(u32, f64)>> {
        let requests = beginnings.iter().map(|tokens| Request {
            logprobs: Some(TOP_K as u8),
            ..greedy(&[&self.prompt, &tokens[..]].concat(), 1)
        });
        let outcomes = complete_all(&self.served.engine, requests).await;
        let shares = outcomes.iter().map(|outcome| {
            let top = &outcome.tokens[0].top;
            let weight = |logprob: f32| (f64::from(logprob) / TEMPERATURE).exp();
            let total: f64 = top.iter().map(|(_, logprob)| weight(*logprob)).sum();
            top.iter().map(|(id, logprob)| (*id, weight(*logprob) / total)).collect()
        });
        shares.collect()
    }

    /// Returns all answers with their probabilities.
    async fn probabilities(&self) -> HashMap<Vec<u32>, f64> {
        let mut answers = HashMap::from([(Vec::new(), 1.0)]);
        for _ in 0..TOKENS {
            let beginnings: Vec<Vec<u32>> = answers.keys().cloned().collect();
            let next = self.next(&beginnings).await;
            let longer = beginnings.iter().zip(next).flat_map(|(tokens, next)| {
                let share = answers[tokens];
                next.into_iter().map(move |(id, own)| ([&tokens[..], &[id]].concat(), share * own))
            });
            answers = longer.collect();
        }
        answers
    }

    /// Returns the answers to this many requests with different seeds, and the numbers of drafts that were
    /// made and accepted.
    async fn answers(&self, count: u64, rule: AcceptanceRule) -> (HashMap<Vec<u32>, u32>, (usize, usize)) {
        let (mut counts, mut drafts) = (HashMap::new(), (0, 0));
        let seeds: Vec<u64> = (0..count).collect();
        for seeds in seeds.chunks(2048) {
            let requests = seeds.iter().map(|seed| self.request(*seed, rule));
            for outcome in complete_all(&self.served.engine, requests).await {
                let (made, accepted) = outcome.speculated.unwrap_or_default();
                drafts = (drafts.0 + made, drafts.1 + accepted);
                *counts.entry(outcome.ids()).or_insert(0) += 1;
            }
        }
        (counts, drafts)
    }
}

/// Returns Pearson's statistic, infinity if an impossible answer occurs, and a bound that a true distribution
/// exceeds about once in 30,000 times (Wilson and Hilferty's approximation).
fn chi_square(counts: &HashMap<Vec<u32>, u32>, probabilities: &HashMap<Vec<u32>, f64>) -> (f64, f64) {
    let is_possible = counts.keys().all(|answer| probabilities.contains_key(answer));
    let total = f64::from(counts.values().sum::<u32>());
    let terms = probabilities.iter().map(|(answer, share)| {
        let expected = share * total;
        (f64::from(counts.get(answer).copied().unwrap_or(0)) - expected).powi(2) / expected
    });
    let statistic = if is_possible { terms.sum() } else { f64::INFINITY };
    let freedom = probabilities.len() as f64 - 1.0;
    let spread = 2.0 / (9.0 * freedom);
    (statistic, freedom * (1.0 - spread + 4.0 * spread.sqrt()).powi(3))
}

async fn check_rejection(count: u64) {
    let case = Case::start(&format!("distribution-{count}")).await;
    let probabilities = case.probabilities().await;
    assert_eq!(probabilities.len(), TOP_K.pow(TOKENS));
    let (counts, (made, accepted)) = case.answers(count, AcceptanceRule::Rejection).await;
    let (statistic, bound) = chi_square(&counts, &probabilities);
    let least = probabilities.values().copied().fold(1.0, f64::min) * count as f64;
    println!(
        "{count} answers: statistic {statistic:.1}, bound {bound:.1}; each answer is expected at least \
         {least:.1} times; {accepted} of {made} drafts accepted"
    );
    assert!(least > 5.0, "{least}");
    let rate = accepted as f64 / made as f64;
    assert!(made as u64 > 2 * count && (0.2..0.8).contains(&rate), "{accepted} of {made}");
    assert!(statistic < bound, "{statistic} exceeds {bound}");
    case.served.engine.stop();
}

/// Catches acceptance by another ratio, a replacement from another distribution, drafts that depend on the
/// random numbers which accept them, and logits of other drafts.
#[actix::test]
async fn rejection_keeps_the_distribution_of_answers() {
    check_rejection(15_000).await;
}

/// Top sampling accepts every draft that is a candidate of the target, so it changes the distribution.
#[actix::test]
async fn top_sampling_accepts_more_and_gives_possible_answers() {
    let case = Case::start("top-sampling").await;
    let probabilities = case.probabilities().await;
    let mut rates = Vec::new();
    for rule in [AcceptanceRule::Rejection, AcceptanceRule::TopSampling] {
        let (counts, (made, accepted)) = case.answers(2_000, rule).await;
        rates.push(accepted as f64 / made as f64);
        let (statistic, bound) = chi_square(&counts, &probabilities);
        assert!(statistic.is_finite(), "an answer is impossible");
        assert_eq!(statistic < bound, rule == AcceptanceRule::Rejection, "{rule}: {statistic}, {bound}");
    }
    assert!(rates[1] > rates[0] + 0.05, "{rates:?}");
    case.served.engine.stop();
}

#[actix::test]
#[ignore = "takes 13 s; .ci/long runs it"]
async fn rejection_keeps_the_distribution_of_many_answers() {
    check_rejection(50_000).await;
}

/// Numbers of drafts of the demo model's answers to the beginnings of texts, four to each.
async fn drafts_of_demo(served: &Served, params: &Value) -> Drafts {
    let texts = std::fs::read_to_string(fixture("perplexity/held_out.txt")).expect("the texts are there");
    let beginnings = texts.split("<|begin|>").filter(|text| text.len() > 100);
    let beginnings = beginnings.map(|text| text.chars().take(text.len() / 3).collect::<String>());
    let body = |(seed, prompt): (usize, String)| {
        let mut body = json!({ "prompt": prompt, "max_tokens": 128, "seed": 100 * seed, "n": 4 });
        body.as_object_mut().expect("an object").extend(params.as_object().expect("an object").clone());
        body
    };
    served.complete(beginnings.enumerate().map(body)).await.iter().map(|answer| answer.drafts).sum()
}

/// Prints the table of docs/speculative_decoding.md.
#[actix::test]
#[ignore = "a measurement of a minute; .ci/long runs it"]
async fn acceptance_rates_of_the_rules() {
    let settings = [("scheduler.slots", 32.into()), ("scheduler.max_waiting", 512.into())];
    let served = Served::start(Path::new("demo"), Path::new("demo-draft"), &settings).await;
    for top_p in [1.0, 0.9] {
        for temperature in [0.5, 0.8, 1.0] {
            let (mut rates, mut made) = (Vec::new(), 0);
            for rule in AcceptanceRule::ALL {
                for most in [1, 5] {
                    let params = json!({ "temperature": temperature, "top_p": top_p,
                        "acceptance": rule.name(), "speculative.n_max": most });
                    let Drafts { accepted, rejected } = drafts_of_demo(&served, &params).await;
                    rates.push(most as f64 * accepted as f64 / (accepted + rejected) as f64);
                    made += accepted + rejected;
                }
            }
            println!("top_p {top_p}, temperature {temperature}: {rates:.3?} of 1 and of 5 of {made} drafts");
            // No coupling accepts more than rejection does.
            assert!(rates[0] < rates[2] + 0.03 && rates[2] < rates[4] + 0.03, "{rates:?}");
        }
    }
    served.engine.stop();
}
