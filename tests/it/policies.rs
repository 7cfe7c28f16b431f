//! Tests that the baseline policies of the papers generate the same tokens as the fused loop.

use crate::common::{all_home, complete_all, engine, greedy, prompt, sampled};
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
