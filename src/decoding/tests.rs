//! Tests of the definition of sampling: which tokens are sampled, how often, and what they depend on.
//!
//! Invariant: seeds are fixed, so every statistic is a fixed number that is either within its bound or not.

use super::{logprobs, sample};
use crate::request::{Sampling, sample_row};
use mainstem_kernels::SamplingParams;
use mainstem_kernels::random::uniform;
use std::collections::BTreeSet;

const PLAIN: Sampling = Sampling { temperature: 1.0, seed: 42, ..Sampling::GREEDY };

/// Probabilities of tokens 0..10 at temperature 1. In descending order: 2, 5, 0, 7, 9, 4, 1, 8, 3, 6.
const PROBABILITIES: [f64; 10] = [0.15, 0.04, 0.30, 0.015, 0.06, 0.22, 0.005, 0.10, 0.03, 0.08];

/// Chi-square values that a true distribution exceeds once in 1000 times, for 1 to 9 degrees of freedom.
const CRITICAL: [f64; 9] = [10.828, 13.816, 16.266, 18.467, 20.515, 22.458, 24.322, 26.124, 27.877];

/// Logits whose softmax at temperature 1 is `shares`; the offset must not matter.
fn logits(shares: &[f64]) -> Vec<f32> {
    shares.iter().map(|share| share.ln() as f32 + 3.0).collect()
}

/// The token of a row without biases and mask.
fn token(logits: &[f32], row: &SamplingParams) -> u32 {
    sample(logits, &[], None, row).expect("there is no mask")
}

/// The tokens sampled at positions `0..draws`.
fn sampled(logits: &[f32], sampling: &Sampling, draws: u32) -> Vec<u32> {
    (0..draws).map(|position| token(logits, &sample_row(sampling, position, None))).collect()
}

/// The set of sampled tokens: with 2000 samples, every token of probability 0.01 or more.
fn sampled_set(shares: &[f64], sampling: Sampling) -> Vec<u32> {
    let set: BTreeSet<u32> = sampled(&logits(shares), &sampling, 2000).into_iter().collect();
    set.into_iter().collect()
}

/// Pearson's chi-square statistic of `tokens` against `weights` (of any scale), and its degrees of freedom.
fn chi_square(tokens: &[u32], weights: &[f64]) -> (f64, usize) {
    let total: f64 = weights.iter().sum();
    let terms = weights.iter().enumerate().filter(|&(_, &weight)| weight > 0.0).map(|(token, weight)| {
        let expected = tokens.len() as f64 * weight / total;
        let observed = tokens.iter().filter(|&&sampled| sampled as usize == token).count() as f64;
        (observed - expected).powi(2) / expected
    });
    let terms: Vec<f64> = terms.collect();
    (terms.iter().sum(), terms.len() - 1)
}

/// Samples from `PROBABILITIES`, and asserts that only `tokens` are sampled, with their probabilities at the
/// temperature of `sampling`.
fn assert_follows(sampling: Sampling, tokens: &[u32]) {
    let samples = sampled(&logits(&PROBABILITIES), &sampling, 20_000);
    assert!(samples.iter().all(|token| tokens.contains(token)), "{sampling:?}");
    let (statistic, freedom) = chi_square(&samples, &weights(sampling.temperature, tokens));
    assert!(statistic < CRITICAL[freedom - 1], "{sampling:?}: {statistic} at {freedom} degrees of freedom");
}

/// The softmax of the logits of `PROBABILITIES` at a temperature, up to a factor; 0 for all but `tokens`.
fn weights(temperature: f32, tokens: &[u32]) -> Vec<f64> {
    let weight = |(token, share): (u32, &f64)| {
        if tokens.contains(&token) { share.powf(1.0 / f64::from(temperature)) } else { 0.0 }
    };
    (0..).zip(&PROBABILITIES).map(weight).collect()
}

const ALL: &[u32] = &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9];

#[test]
fn plain_temperature_samples_the_softmax() {
    for temperature in [0.5, 0.7, 1.0, 1.6] {
        assert_follows(Sampling { temperature, ..PLAIN }, ALL);
    }
}

#[test]
fn top_k_samples_the_k_most_likely() {
    assert_follows(Sampling { top_k: 4, ..PLAIN }, &[2, 5, 0, 7]);
    assert_follows(Sampling { top_k: 2, temperature: 1.6, ..PLAIN }, &[2, 5]);
    assert_follows(Sampling { top_k: 1000, ..PLAIN }, ALL);
}

#[test]
fn top_p_samples_the_smallest_set_with_the_probability() {
    // 0.30 + 0.22 + 0.15 = 0.67; the next makes 0.77.
    assert_follows(Sampling { top_p: 0.7, ..PLAIN }, &[2, 5, 0, 7]);
    assert_follows(Sampling { top_p: 0.65, ..PLAIN }, &[2, 5, 0]);
    assert_eq!(
        sampled_set(&PROBABILITIES, Sampling { top_p: 1e-6, ..PLAIN }),
        [2],
        "one token is always kept"
    );
}

#[test]
fn min_p_drops_what_is_far_below_the_likeliest() {
    // 0.25 of 0.30 is 0.075; of the squares, 0.25 of 0.09 is 0.0225, that of a probability of 0.15.
    assert_follows(Sampling { min_p: 0.25, ..PLAIN }, &[2, 5, 0, 7, 9]);
    assert_follows(Sampling { min_p: 0.26, temperature: 0.5, ..PLAIN }, &[2, 5]);
    assert_eq!(sampled_set(&PROBABILITIES, Sampling { min_p: 1.0, ..PLAIN }), [2]);
}

#[test]
fn the_statistic_notices_a_wrong_distribution() {
    let samples = sampled(&logits(&PROBABILITIES), &PLAIN, 20_000);
    let (statistic, freedom) = chi_square(&samples, &weights(1.1, ALL));
    assert!(statistic > CRITICAL[freedom - 1], "{statistic}");
}

/// Each case would keep other tokens if two of the filters were swapped.
#[test]
fn filters_apply_in_their_order() {
    let three = [0.5, 0.3, 0.2];
    // Temperature 0.5 squares the probabilities: 0.658, 0.237, 0.105. Before it, top_p would keep 0.5 + 0.3.
    assert_eq!(sampled_set(&three, Sampling { temperature: 0.5, top_p: 0.6, ..PLAIN }), [0]);
    // And min_p would keep token 1, whose ratio to the most likely token is 0.6 before and 0.36 after the
    // temperature.
    assert_eq!(sampled_set(&three, Sampling { temperature: 0.5, min_p: 0.5, ..PLAIN }), [0]);

    let four = [0.4, 0.3, 0.2, 0.1];
    // Of the two that top_k keeps, token 0 has 0.571. Of all four it has 0.4, and top_p would need both.
    assert_eq!(sampled_set(&four, Sampling { top_k: 2, top_p: 0.55, ..PLAIN }), [0]);
    // 0.4 of all is not 0.55, so top_p keeps two. If min_p dropped the others first, 0.571 would do.
    assert_eq!(sampled_set(&four, Sampling { top_p: 0.55, min_p: 0.6, ..PLAIN }), [0, 1]);
}

#[test]
fn ties_go_by_id() {
    let even = [1.0; 4];
    assert_eq!(sampled_set(&even, PLAIN), [0, 1, 2, 3]);
    assert_eq!(sampled_set(&even, Sampling { top_k: 2, ..PLAIN }), [0, 1]);
    assert_eq!(sampled_set(&even, Sampling { top_p: 0.5, ..PLAIN }), [0, 1]);
    assert_eq!(sampled_set(&even, Sampling { min_p: 1.0, ..PLAIN }), [0, 1, 2, 3]);
    assert_eq!(sampled_set(&even, Sampling { temperature: 0.0, ..PLAIN }), [0]);
    assert_eq!(token(&[0.5, 2.0, 2.0, -1.0], &SamplingParams::GREEDY), 1);
}

#[test]
fn temperature_zero_top_k_one_and_greedy_are_the_same() {
    for case in 0..200u64 {
        let logits: Vec<f32> = (0..50).map(|token| 8.0 * uniform(case, token, 0) - 4.0).collect();
        let likeliest = (0..50usize).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).expect("fifty") as u32;
        for sampling in [
            Sampling { temperature: 0.0, seed: case, ..PLAIN },
            Sampling { temperature: 1e-6, seed: case, ..PLAIN },
            Sampling { top_k: 1, seed: case, ..PLAIN },
            Sampling { temperature: 0.0, top_k: 5, top_p: 0.3, min_p: 0.5, seed: case, ..PLAIN },
        ] {
            let row = sample_row(&sampling, case as u32, None);
            assert_eq!(token(&logits, &row), likeliest, "{sampling:?}");
        }
        assert_eq!(token(&logits, &SamplingParams::GREEDY), likeliest);
    }
}

#[test]
fn impossible_tokens_are_never_sampled() {
    let masked = [f32::NEG_INFINITY, 0.0, f32::NEG_INFINITY, 0.5, f32::NEG_INFINITY];
    for sampling in [PLAIN, Sampling { temperature: 50.0, ..PLAIN }, Sampling { top_k: 4, ..PLAIN }] {
        let set: BTreeSet<u32> = sampled(&masked, &sampling, 2000).into_iter().collect();
        assert_eq!(set, BTreeSet::from([1, 3]), "{sampling:?}");
    }
    assert_eq!(token(&[f32::NAN, -3.0, f32::NAN, -2.0], &SamplingParams::GREEDY), 3);
}

#[test]
fn a_seed_and_a_position_fix_the_token() {
    let logits = logits(&PROBABILITIES);
    assert_eq!(sampled(&logits, &PLAIN, 500), sampled(&logits, &PLAIN, 500));
    let others = [PLAIN.seed + 1, PLAIN.seed ^ 1 << 40];
    for seed in others {
        assert_ne!(
            sampled(&logits, &PLAIN, 500),
            sampled(&logits, &Sampling { seed, ..PLAIN }, 500),
            "{seed}"
        );
    }
    // The random number depends on the seed and the position only, so sampling one position alone gives the
    // same token as sampling all of them.
    let alone = token(&logits, &sample_row(&PLAIN, 321, None));
    assert_eq!(alone, sampled(&logits, &PLAIN, 500)[321]);
}

/// Pairs of samples from three tokens, as one of nine outcomes, against the product of their probabilities.
#[test]
fn samples_of_two_seeds_and_of_neighbouring_positions_are_independent() {
    let shares = [0.5, 0.3, 0.2];
    let products: Vec<f64> = shares.iter().flat_map(|a| shares.map(|b| a * b)).collect();
    let logits = logits(&shares);
    let one = sampled(&logits, &Sampling { seed: 1, ..PLAIN }, 20_000);
    let two = sampled(&logits, &Sampling { seed: 2, ..PLAIN }, 20_000);
    let pairs = |a: &[u32], b: &[u32]| -> Vec<u32> { a.iter().zip(b).map(|(a, b)| 3 * a + b).collect() };
    // Disjoint pairs of neighbours; overlapping ones would not be independent of each other.
    let neighbours: Vec<u32> = one.chunks_exact(2).map(|pair| 3 * pair[0] + pair[1]).collect();
    for outcomes in [pairs(&one, &two), neighbours] {
        let (statistic, freedom) = chi_square(&outcomes, &products);
        assert_eq!(freedom, 8);
        assert!(statistic < CRITICAL[freedom - 1], "{statistic}");
    }
}

#[test]
fn log_probabilities_are_those_of_the_raw_logits() {
    let report = logprobs(&logits(&PROBABILITIES), 3);
    assert_eq!(report.top.iter().map(|&(id, _)| id).collect::<Vec<_>>(), [2, 5, 0]);
    for (id, value) in report.top {
        assert!((f64::from(value) - PROBABILITIES[id as usize].ln()).abs() < 1e-5, "{id}: {value}");
    }
    let even = logprobs(&[1.0; 4], 2).top;
    assert_eq!(even.iter().map(|&(id, _)| id).collect::<Vec<_>>(), [0, 1], "ties go by id");
}
