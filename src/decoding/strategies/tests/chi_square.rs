//! Every strategy against its definition in numpy (`tests/oracle/make_sampling.py`), by 50,000 draws.

use super::*;
use mainstem_kernels::reference::draw::draw;
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

/// Counts the draws of a case. Without a chooser or XTC, the candidates are the same at every position: then
/// the sampler reports them once and draws at some positions, and the others are drawn directly, which is
/// faster in a debug build.
fn counts(answers: &Answers, params: &Json) -> Vec<u32> {
    let mut params = params.clone();
    params["logprobs_mode"] = "processed_logprobs".into();
    let plan = parse(&params, answers.logits.len()).unwrap_or_else(|error| panic!("{params}: {error}"));
    let state = state(&plan, &answers.prompt, &answers.generated);
    let mut sampler = HostSampler::new();
    let row = Row { logits: &answers.logits, seed: 11, position: 0, mask: None, logprobs: Some(usize::MAX) };
    sampler.draw(&plan, &state, &row).expect("no mask");
    let mut candidates = vec![f32::NEG_INFINITY; answers.logits.len()];
    sampler.top().iter().for_each(|&(id, logprob)| candidates[id as usize] = logprob);
    let is_fixed = plan.chooser.is_none() && !plan.active().contains(&"xtc");
    let mut counts = vec![0u32; candidates.len()];
    for position in 0..answers.draws {
        let token = || draw((0..).zip(candidates.iter().copied()), 11, position).expect("a candidate");
        if is_fixed && position >= 500 {
            counts[token() as usize] += 1;
            continue;
        }
        let row = Row { position, logprobs: None, ..row };
        let drawn = sampler.draw(&plan, &state, &row).expect("no mask").token;
        assert!(!is_fixed || drawn == token(), "{params} at {position}");
        counts[drawn as usize] += 1;
    }
    counts
}

/// Returns Pearson's statistic of the draws of a case; infinity if an impossible token was drawn.
fn statistic(answers: &Answers, params: &Json, probabilities: &[f64]) -> f64 {
    let term = |(&count, &probability): (&u32, &f64)| match (count, probability) {
        (0, 0.0) => 0.0,
        (_, 0.0) => f64::INFINITY,
        _ => {
            let expected = probability * answers.draws as f64;
            (f64::from(count) - expected).powi(2) / expected
        }
    };
    counts(answers, params).iter().zip(probabilities).map(term).sum()
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
