//! Every strategy against its definition in numpy (`tests/oracle/make_sampling.py`), by 50,000 draws.

use super::*;
use serde::Deserialize;

#[derive(Deserialize)]
struct Answers {
    draws: u64,
    prompt: Vec<u32>,
    generated: Vec<u32>,
    logits: Vec<f32>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    params: Json,
    probabilities: Vec<f64>,
    critical: f64,
}

fn answers() -> Answers {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/sampling/answers.json");
    serde_json::from_str(&std::fs::read_to_string(path).expect("the fixture exists")).expect("valid JSON")
}

/// Returns Pearson's statistic of the draws of a case; infinity if an impossible token was drawn.
fn statistic(answers: &Answers, params: &Json, probabilities: &[f64]) -> f64 {
    let plan = parse(params, answers.logits.len()).unwrap_or_else(|error| panic!("{params}: {error}"));
    let state = state(&plan, &answers.prompt, &answers.generated);
    let mut sampler = HostSampler::new();
    let mut counts = vec![0u32; probabilities.len()];
    for position in 0..answers.draws {
        let row = Row { logits: &answers.logits, seed: 11, position, mask: None, logprobs: None };
        counts[sampler.draw(&plan, &state, &row).expect("no mask").token as usize] += 1;
    }
    let term = |(&count, &probability): (&u32, &f64)| match (count, probability) {
        (0, 0.0) => 0.0,
        (_, 0.0) => f64::INFINITY,
        _ => {
            let expected = probability * answers.draws as f64;
            (f64::from(count) - expected).powi(2) / expected
        }
    };
    counts.iter().zip(probabilities).map(term).sum()
}

/// Checks every `step`-th case from `first`.
fn check(first: usize, step: usize) {
    let answers = answers();
    for case in answers.cases.iter().skip(first).step_by(step) {
        let statistic = statistic(&answers, &case.params, &case.probabilities);
        assert!(statistic <= case.critical.max(1e-9), "{}: {statistic} above {}", case.params, case.critical);
    }
}

#[test]
fn even_cases_follow_their_definition() {
    check(0, 2);
}

#[test]
fn odd_cases_follow_their_definition() {
    check(1, 2);
}

#[test]
fn the_statistic_notices_other_strategies() {
    let mut answers = answers();
    answers.draws = 5_000;
    let plain = &answers.cases[0];
    for case in answers.cases.iter().filter(|case| case.probabilities != plain.probabilities).take(9) {
        assert!(statistic(&answers, &case.params, &plain.probabilities) > plain.critical, "{}", case.params);
    }
}
