//! Hand-worked examples: which candidates a strategy keeps, and what it does to logits.

use super::super::History;
use super::super::fsd::add_penalties;
use super::super::unit::Context;
use super::*;
use mainstem_kernels::candidates::{Buffers, Candidates};
use std::collections::BTreeSet;

/// Returns the ids that the filters of a plan keep of tokens with these probabilities.
fn kept(params: &str, probabilities: &[f64]) -> Vec<u32> {
    let plan = plan(params, probabilities.len());
    let mut buffers = Buffers::default();
    buffers.values = probabilities.iter().map(|p| p.ln() as f32 + 2.0).collect();
    let mut candidates = Candidates::new(&mut buffers);
    let history = History::default();
    let context = Context { history: &history, seed: 1, position: 2 };
    plan.filters.iter().for_each(|filter| filter.filter(&mut candidates, &context));
    let mut ids = Vec::new();
    candidates.visit(|id, _| ids.push(id));
    ids.sort_unstable();
    ids
}

/// Returns the set of tokens that a plan draws in 400 positions.
fn drawn(params: &str, probabilities: &[f64]) -> Vec<u32> {
    let plan = plan(params, probabilities.len());
    let logits: Vec<f32> = probabilities.iter().map(|p| p.ln() as f32).collect();
    let set: BTreeSet<u32> = (0..400).map(|position| draw(&plan, &logits, position).token).collect();
    set.into_iter().collect()
}

/// Probabilities of tokens 0 to 4; in descending order: 3, 1, 0, 4, 2.
const FIVE: [f64; 5] = [0.15, 0.25, 0.05, 0.45, 0.1];

#[test]
fn filters_keep_what_their_definition_says() {
    let cases: [(&str, &[u32]); 24] = [
        (r#"{}"#, &[0, 1, 2, 3, 4]),
        (r#"{"top_k": 2}"#, &[1, 3]),
        (r#"{"top_k": -1}"#, &[0, 1, 2, 3, 4]),
        (r#"{"top_k": 99}"#, &[0, 1, 2, 3, 4]),
        (r#"{"top_p": 0.69}"#, &[1, 3]),
        (r#"{"top_p": 0.71}"#, &[0, 1, 3]),
        (r#"{"top_p": 0.01}"#, &[3]),
        (r#"{"min_p": 0.3}"#, &[0, 1, 3]),
        (r#"{"min_p": 1}"#, &[3]),
        // Of what top-k keeps, 0.45 is 0.643.
        (r#"{"top_k": 2, "top_p": 0.64}"#, &[3]),
        (r#"{"epsilon_cutoff": 0.12}"#, &[0, 1, 3]),
        (r#"{"epsilon_cutoff": 0.9}"#, &[3]),
        // The entropy is 1.37 nats, so sqrt(0.16) e^-H = 0.1015; the other bound is 0.16.
        (r#"{"eta_cutoff": 0.16}"#, &[0, 1, 3]),
        (r#"{"eta_cutoff": 0.15}"#, &[0, 1, 3, 4]),
        // -ln p is 1.90, 1.39, 3.00, 0.80, 2.30; the distances from 1.37 are 0.53, 0.02, 1.63, 0.57, 0.94.
        (r#"{"typical_p": 0.2}"#, &[1]),
        (r#"{"typical_p": 0.3}"#, &[0, 1]),
        (r#"{"typical_p": 0.5}"#, &[0, 1, 3]),
        // First differences: 0.2, 0.1, 0.05, 0.05; second: 0.1, 0.05, 0; shares 2/3, 1/3, 0.
        (r#"{"tfs_z": 0.5}"#, &[3]),
        (r#"{"tfs_z": 0.7}"#, &[3]),
        (r#"{"tfs_z": 0.6667, "temperature": 1}"#, &[3]),
        // The standard deviation of ln p is 0.755; the distances from the first: 1.10, 0.59, 2.20, 0, 1.50.
        (r#"{"top_n_sigma": 0.77}"#, &[3]),
        (r#"{"top_n_sigma": 1.5}"#, &[0, 1, 3]),
        (r#"{"xtc_probability": 1, "xtc_threshold": 0.12}"#, &[0, 2, 4]),
        (r#"{"xtc_probability": 1, "xtc_threshold": 0.3}"#, &[0, 1, 2, 3, 4]),
    ];
    for (params, expected) in cases {
        assert_eq!(kept(params, &FIVE), expected, "{params}");
    }
}

#[test]
fn tail_free_sampling_keeps_what_stands_before_the_tail() {
    // Second differences: 0.02, 0.18, 0, 0, 0.01: shares 0.095, 0.857, 0, 0, 0.048.
    let seven = [0.35, 0.28, 0.19, 0.1 - 0.02, 0.05, 0.02 + 0.01, 0.02];
    let second: Vec<f64> = seven.windows(3).map(|w: &[f64]| (w[0] - 2.0 * w[1] + w[2]).abs()).collect();
    let total: f64 = second.iter().sum();
    for z in [0.1, 0.3, 0.5, 0.9] {
        let mut running = 0.0;
        let before = second.iter().take_while(|s| {
            running += **s / total;
            running <= z
        });
        let expected: Vec<u32> = (0..(before.count() as u32).max(1)).collect();
        assert_eq!(kept(&format!(r#"{{"tfs_z": {z}}}"#), &seven), expected, "{z}");
    }
    assert_eq!(kept(r#"{"tfs_z": 0.5}"#, &[0.25; 4]), [0, 1, 2, 3], "no curvature, no tail");
}

#[test]
fn ties_go_by_id() {
    let even = [0.25; 4];
    assert_eq!(kept(r#"{"top_k": 2}"#, &even), [0, 1]);
    assert_eq!(kept(r#"{"top_p": 0.5}"#, &even), [0, 1]);
    assert_eq!(kept(r#"{"typical_p": 0.5}"#, &even), [0, 1]);
    assert_eq!(kept(r#"{"xtc_probability": 1}"#, &even), [3]);
    assert_eq!(kept(r#"{"min_p": 1}"#, &even), [0, 1, 2, 3]);
}

#[test]
fn an_order_of_samplers_is_kept() {
    let three = [0.5, 0.3, 0.2];
    // Squared: 0.658, 0.237, 0.105.
    assert_eq!(kept(r#"{"temperature": 0.5, "top_p": 0.6}"#, &three), [0]);
    let last = r#"{"temperature": 0.5, "top_p": 0.6, "samplers": ["top_p", "temperature"]}"#;
    assert_eq!(kept(last, &three), [0, 1]);
    assert_eq!(kept(r#"{"top_k": 1, "samplers": ["top_p", "temp"]}"#, &three), [0, 1, 2], "not listed, off");
    assert_eq!(kept(r#"{"top_k": 1, "samplers": []}"#, &three), [0, 1, 2]);
}

/// The pools of Inferflow, of six tokens in descending order.
#[test]
fn pools_keep_what_their_definition_says() {
    let six = [0.4, 0.25, 0.15, 0.1, 0.06, 0.04];
    let cases: [(&str, &str, &[u32]); 12] = [
        ("sample.std", r#"{"top_p": 0.7}"#, &[0, 1, 2]),
        ("top_p", r#"{"top_p": 0.9, "max_k": 2}"#, &[0, 1]),
        ("sample.std", r#"{"top_p": 0.1, "min_k": 3}"#, &[0, 1, 2]),
        // Of a pool of 2, the first has 0.615.
        ("sample.std", r#"{"top_p": 0.6, "pool_size": 2}"#, &[0]),
        ("top_k", r#"{"max_k": 4}"#, &[0, 1, 2, 3]),
        ("min_p", r#"{"min_p": 0.3}"#, &[0, 1, 2]),
        // Second differences: 0.05, 0.05, 0.01, 0.02; shares 0.385, 0.385, 0.077, 0.154. Without the first:
        // 0.385, 0.462, 0.615.
        ("tfs", r#"{"z": 0.3}"#, &[0]),
        ("tfs", r#"{"z": 0.4}"#, &[0, 1]),
        ("tfs", r#"{"z": 0.99}"#, &[0, 1, 2, 3]),
        // The entropy is 1.53; the distances are 0.61, 0.14, 0.37, 0.78, 1.29, 1.69. Token 1 is not counted.
        ("typical", r#"{"p": 0.1}"#, &[1]),
        ("typical", r#"{"p": 0.2}"#, &[1, 2]),
        // 2 bits are kept up to a probability of 0.25.
        ("mirostat", r#"{"tau": 1.0001}"#, &[0, 1]),
    ];
    for (name, params, expected) in cases {
        let params = format!(r#"{{"strategy": "{name}", "strategy_params": {params}}}"#);
        assert_eq!(drawn(&params, &six), expected, "{params}");
    }
    assert_eq!(drawn(r#"{"strategy": "greedy", "temperature": 9}"#, &six), [0]);
    assert_eq!(drawn(r#"{"strategy": "sample", "top_k": 2}"#, &six), [0, 1]);
    // The temperature of a pool is at least 0.001.
    assert_eq!(drawn(r#"{"strategy": "sample.std", "temperature": 0}"#, &six), [0]);
    assert_eq!(drawn(r#"{"mirostat": 2, "temperature": 0}"#, &six), [0]);
}

/// The values of the paper's released code.
#[test]
fn fsd_penalties_have_their_golden_values() {
    let mut penalties = [0.0; 4];
    add_penalties(&[1, 2, 3, 1, 2], 3, 0.9, &[3, 1, 2, 9], &mut penalties);
    for (got, want) in penalties.iter().zip([0.497, 0.4, 0.4, 0.0]) {
        assert!((got - want).abs() < 1e-6, "{penalties:?}");
    }
}

#[test]
fn fsd_avoids_a_repetition_and_is_deterministic() {
    let plan = plan(r#"{"strategy": "fsd"}"#, 5);
    let logits = [0.0f32, 0.01, 0.1, 0.9, 0.05].map(|p| (p + 1e-6).ln());
    let token = |prompt: &[u32], seed| {
        let row = Row { logits: &logits, seed, position: 5, mask: None, logprobs: None };
        HostSampler::new().draw(&plan, &state(&plan, prompt, &[]), &row).expect("no mask").token
    };
    assert_eq!(token(&[1], 1), 3, "too short for a penalty");
    // 0.5 * 0.85 - 0.5 * 0.497 is still the largest; after more repetitions it is not.
    assert_eq!(token(&[1, 2, 3, 1, 2], 1), 3);
    assert_eq!(token(&[1, 2, 3, 1, 2, 3, 1, 2], 1), 3);
    let long: Vec<u32> = [1, 2, 3].into_iter().cycle().take(602).collect();
    let chosen = token(&long, 1);
    assert_ne!(chosen, 3);
    assert!((2..40).all(|seed| token(&long, seed) == chosen));
}

#[test]
fn random_fsd_draws_among_its_first_tokens_only() {
    let plan = plan(r#"{"strategy": "random_fsd"}"#, 5);
    let logits = [0.2f32, 0.19, 0.21, 0.22, 0.18].map(f32::ln);
    let tokens = |generated: usize| -> BTreeSet<u32> {
        let state = state(&plan, &[0, 1], &vec![4; generated]);
        let draw = |seed| {
            let row = Row { logits: &logits, seed, position: 7, mask: None, logprobs: None };
            HostSampler::new().draw(&plan, &state, &row).expect("no mask").token
        };
        (0..200).map(draw).collect()
    };
    assert!(tokens(0).len() > 2 && tokens(9).len() > 2);
    assert_eq!(tokens(10).len(), 1);
}

#[test]
fn end_tokens_are_bypassed_as_often_as_allowed() {
    let params = r#"{"strategy": "sample.std", "strategy_params": {"eos_bypassing_max": 2, "max_k": 3}}"#;
    let plan = plan(params, 4);
    let mut state = state(&plan, &[], &[]);
    // Token 1 ends the sequence; token 3 is the next one.
    let logits = [0.0, 30.0, 0.0, 1.0];
    let mut tokens = Vec::new();
    for position in 0..4 {
        let row = Row { logits: &logits, seed: 1, position, mask: None, logprobs: None };
        let draw = HostSampler::new().draw(&plan, &state, &row).expect("no mask");
        state.accept(&draw);
        tokens.push(draw.token);
    }
    // top_p 0.9 keeps the end token alone, so there is nothing else to take.
    assert_eq!(tokens, [1, 1, 1, 1]);
    let logits = [0.0, 3.0, 0.0, 1.5];
    let mut tokens = Vec::new();
    for position in 0..40 {
        let row = Row { logits: &logits, seed: 1, position, mask: None, logprobs: None };
        let draw = HostSampler::new().draw(&plan, &state, &row).expect("no mask");
        state.accept(&draw);
        tokens.push(draw.token);
    }
    let first_end = tokens.iter().position(|&token| token == 1).expect("an end token");
    assert!(first_end >= 2 && tokens[..first_end].iter().all(|&token| token != 1), "{tokens:?}");
    assert_eq!(state.registers()[1], 2.0);
}

#[test]
fn edits_change_logits_as_defined() {
    let edited = |params: &str, prompt: &[u32], generated: &[u32]| -> Vec<f32> {
        let plan = plan(params, 24);
        let mut logits: Vec<f32> = (0..24).map(|id| if id < 12 { 2.0 } else { -2.0 }).collect();
        let history = state(&plan, prompt, generated);
        let mut scratch = super::super::unit::EditScratch::default();
        scratch.marks.resize(24, 0);
        plan.edits.iter().for_each(|edit| edit.edit(&mut logits, history.history(), &mut scratch));
        assert!(scratch.marks.iter().all(|&mark| mark == 0), "{params} leaves marks");
        logits
    };
    let changed = |params: &str, prompt: &[u32], generated: &[u32]| -> Vec<(u32, f32)> {
        let logits = edited(params, prompt, generated);
        let plain = |id: u32| if id < 12 { 2.0 } else { -2.0 };
        (0..).zip(logits).filter(|&(id, logit)| logit != plain(id)).collect()
    };
    const FORBID: f32 = f32::NEG_INFINITY;
    // A positive logit is divided, a negative one multiplied, once each; the prompt counts.
    assert_eq!(changed(r#"{"repetition_penalty": 2}"#, &[3, 15], &[3, 4]), [(3, 1.0), (4, 1.0), (15, -4.0)]);
    assert_eq!(changed(r#"{"repetition_penalty": 2, "repeat_last_n": 1}"#, &[3, 15], &[3, 4]), [(4, 1.0)]);
    assert_eq!(changed(r#"{"repetition_penalty": 2, "repeat_last_n": 0}"#, &[3], &[3]), []);
    // The other two look at the output only.
    let both = r#"{"presence_penalty": 0.5, "frequency_penalty": 0.25}"#;
    assert_eq!(changed(both, &[3, 15], &[4, 4, 5]), [(4, 1.0), (5, 1.25)]);
    assert_eq!(changed(r#"{"no_repeat_ngram_size": 1}"#, &[3], &[5]), [(3, FORBID), (5, FORBID)]);
    assert_eq!(
        changed(r#"{"no_repeat_ngram_size": 3}"#, &[3, 4, 5, 3, 4, 6], &[3, 4]),
        [(5, FORBID), (6, FORBID)]
    );
    assert_eq!(changed(r#"{"no_repeat_ngram_size": 3}"#, &[3], &[4]), []);
    // After 3 4 5, token 6 followed once; after 4 5, token 7 followed too.
    let dry = r#"{"dry_multiplier": 1, "dry_base": 1.5, "dry_sequence_breakers": ["j"]}"#;
    assert_eq!(changed(dry, &[3, 4, 5, 6, 8, 4, 5, 7, 8, 3, 4], &[5]), [(6, 0.5), (7, 1.0)]);
    assert_eq!(changed(dry, &[3, 4, 9, 6, 8, 3, 4], &[9]), [], "a breaker ends the repetition");
    assert_eq!(changed(dry, &[3, 9, 4, 5, 6, 3, 9, 4], &[5]), [(6, 1.0)], "of length 2, not 4");
    let budget = r#"{"thinking_token_budget": 2}"#;
    assert_eq!(changed(budget, &[20, 5], &[]), []);
    let forced = |generated: &[u32]| {
        let logits = edited(budget, &[20], generated);
        (0u32..24).filter(|&id| logits[id as usize] > FORBID).collect::<Vec<_>>()
    };
    assert_eq!(forced(&[5, 6]), [21]);
    assert_eq!(forced(&[5, 6, 21]), [22]);
    assert_eq!(forced(&[5, 6, 21, 22, 7, 8]).len(), 24);
    // A text stands for its tokens, with and without a space before it.
    assert_eq!(changed(r#"{"bad_words": ["cd"]}"#, &[2], &[]), [], "only what is generated counts");
    assert_eq!(changed(r#"{"bad_words": ["cd"]}"#, &[], &[2]), [(3, FORBID)]);
    assert_eq!(changed(r#"{"bad_words": [[4, 5, 6]]}"#, &[], &[4, 5]), [(6, FORBID)]);
}
