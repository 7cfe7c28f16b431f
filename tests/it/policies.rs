//! Tests that the baseline policies of the papers generate the same tokens as the fused loop, and that
//! running ahead changes no result.

use crate::common::{Outcome, all_home, complete_all, engine, greedy, prompt, sampled};
use mainstem::request::Request;
use toml::Value;

fn requests() -> Vec<Request> {
    let greedy = (0..6).map(|i| greedy(&prompt(i, 3 + 11 * i), 5 + 4 * i as u32));
    let sampled = (6..12).map(|i| sampled(&prompt(i, 2 + i), 20 - i as u32, 1000 + i as u64));
    greedy.chain(sampled).collect()
}

async fn ids(settings: &[(&'static str, Value)]) -> Vec<Vec<u32>> {
    let engine = engine("gqa", settings).await;
    let outcomes = complete_all(&engine, requests()).await;
    all_home(&engine, 4).await;
    engine.stop();
    outcomes.iter().map(|outcome| outcome.ids()).collect()
}

#[actix::test]
async fn every_policy_gives_the_same_tokens_with_and_without_shuffle_and_in_lanes() {
    let expected = ids(&[]).await;
    assert!(expected.iter().zip(requests()).all(|(ids, request)| ids.len() == request.max_tokens as usize));
    let policies: [&[(&'static str, Value)]; 3] = [
        &[("scheduler.policy", Value::from("fused"))],
        &[("scheduler.policy", Value::from("concurrent"))],
        &[("scheduler.policy", Value::from("window")), ("scheduler.window", Value::from("20ms"))],
    ];
    for policy in policies {
        for shuffle in ["on", "off"] {
            for (budget, lanes) in [(8, 1), (512, 1), (8, 2), (512, 3)] {
                let mut settings = vec![
                    ("scheduler.shuffle", Value::from(shuffle)),
                    ("scheduler.token_budget", Value::from(budget)),
                    ("scheduler.lanes", Value::from(lanes)),
                ];
                settings.extend(policy.iter().map(|(key, value)| (*key, value.clone())));
                assert_eq!(ids(&settings).await, expected, "{settings:?}");
            }
        }
    }
}

/// Requests that end at stop tokens, at random steps, or at their maximum lengths, which begin with 0.
fn ending_requests(number: usize) -> Request {
    let max_tokens = (number * 5 % 23) as u32;
    let request = match number % 2 {
        0 => greedy(&prompt(number, 1 + number * 7 % 40), max_tokens),
        _ => sampled(&prompt(number, 1 + number * 7 % 40), max_tokens, number as u64),
    };
    Request {
        stop_ids: (0..10).map(|i| 3 + ((i * 19 + number) % 200) as u32).collect(),
        min_tokens: (number as u32 % 4).min(max_tokens),
        prompt_logprobs: (number.is_multiple_of(3) || max_tokens == 0).then_some(number as u8 % 4),
        logprobs: Some(number as u8 % 3),
        ..request
    }
}

/// The tokens and log-probabilities of the prompt and of the answer, the stop token, and the end.
fn bits(outcome: &Outcome) -> String {
    format!("{:?}", (&outcome.prompt, &outcome.tokens, &outcome.last, &outcome.end))
}

#[actix::test]
async fn running_ahead_changes_no_bit_of_a_result() {
    let mut expected: Option<Vec<String>> = None;
    for run_ahead in ["off", "on"] {
        for (shuffle, budget) in [("on", 512), ("off", 512), ("on", 8)] {
            let settings = [
                ("scheduler.run_ahead", Value::from(run_ahead)),
                ("scheduler.shuffle", Value::from(shuffle)),
                ("scheduler.token_budget", Value::from(budget)),
            ];
            let engine = engine("gqa", &settings).await;
            let outcomes = complete_all(&engine, (0..24).map(ending_requests)).await;
            all_home(&engine, 4).await;
            engine.stop();
            let results: Vec<String> = outcomes.iter().map(bits).collect();
            assert!(outcomes.iter().filter(|outcome| outcome.last.is_some()).count() > 3, "some stop");
            assert_eq!(&results, expected.get_or_insert(results.clone()), "{settings:?}");
        }
    }
}
