//! The definition of token sampling, and of the log-probabilities that are reported with a token.
//!
//! Invariant: pure functions of logits, biases, mask and the sampling parameters of one row.

use crate::batch::{SamplingParams, is_allowed};
use crate::random::uniform;

/// The log-probabilities for one row of raw logits.
#[derive(Clone, Debug)]
pub struct LogProbs {
    /// Logarithm of the sum of the exponentials.
    log_sum: f64,
    /// The most likely tokens (id, log-probability), most likely first, ties by id.
    pub top: Vec<(u32, f32)>,
}

impl LogProbs {
    /// Returns the log-probability of a token with this raw logit.
    pub fn logprob(&self, logit: f32) -> f32 {
        (f64::from(nan_to_lowest(logit)) - self.log_sum) as f32
    }
}

/// Samples a token from `logits` (vocabulary) with logit biases, a mask and the sampling parameters `row`.
/// [`Backend::sample`](crate::Backend::sample) must return exactly this token.
///
/// 1. Biases are added first, in their order. Then the logits of tokens that the mask does not allow
///    ([`is_allowed`]) become negative infinity, as if they had that bias. If no
///    logit above negative infinity is left, biases and mask are ignored, because a token must be sampled.
/// 2. Greedy rows take the largest logit, and the lowest id on ties. So do rows whose largest scaled logit is
///    not finite, because then there are no weights.
/// 3. Scaled = logit / temperature. Candidates are ordered by scaled value, descending, ties by id.
///    Weights = exp(scaled - largest), in F32; their sums are F64.
/// 4. Top-k keeps the first k. Top-p keeps the shortest prefix, at least one candidate, whose weight reaches
///    that fraction of what top-k kept. Min-p then keeps those of at least that fraction of the largest
///    weight.
/// 5. The result is the first candidate whose cumulative weight exceeds `uniform(seed, position)` times the
///    total weight of the kept candidates, or the last kept candidate if there is none.
///
/// A NaN logit counts as negative infinity.
pub fn sample(logits: &[f32], biases: &[(u32, f32)], mask: Option<&[u32]>, row: &SamplingParams) -> u32 {
    let logits = &apply_biases(logits, biases, mask)[..];
    let scaled: Vec<f32> = logits.iter().map(|l| nan_to_lowest(l / row.temperature)).collect();
    let largest = scaled.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if row.is_greedy() || !largest.is_finite() {
        return greedy_token(logits);
    }
    let weights: Vec<f32> = scaled.iter().map(|s| (s - largest).exp()).collect();
    let kept = filter_candidates(&scaled, &weights, row);
    let weight_of = |&id: &u32| f64::from(weights[id as usize]);
    let threshold =
        f64::from(uniform(row.seed, row.position.into())) * kept.iter().map(weight_of).sum::<f64>();
    let len = shortest_prefix(&kept, weight_of, |sum| sum > threshold);
    kept[len - 1]
}

/// Returns the log-probabilities for `logits` (vocabulary), with the `n` most likely tokens. All are NaN if
/// the largest logit is not finite. A NaN logit counts as negative infinity.
pub fn logprobs(logits: &[f32], n: usize) -> LogProbs {
    let values: Vec<f32> = logits.iter().map(|&l| nan_to_lowest(l)).collect();
    let largest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = values.iter().map(|v| f64::from((v - largest).exp())).sum();
    let mut result = LogProbs { log_sum: f64::from(largest) + sum.ln(), top: Vec::new() };
    let most_likely = ids_descending(&values).into_iter().take(n);
    result.top = most_likely.map(|id| (id, result.logprob(values[id as usize]))).collect();
    result
}

/// Returns the logits with biases and mask applied, or unchanged if that would forbid every token.
pub(super) fn apply_biases(logits: &[f32], biases: &[(u32, f32)], mask: Option<&[u32]>) -> Vec<f32> {
    let mut biased = logits.to_vec();
    for &(id, bias) in biases {
        biased[id as usize] += bias;
    }
    for (id, logit) in biased.iter_mut().enumerate() {
        if mask.is_some_and(|mask| !is_allowed(mask, id as u32)) {
            *logit = f32::NEG_INFINITY;
        }
    }
    let forbids_all = biased.iter().all(|&logit| nan_to_lowest(logit) == f32::NEG_INFINITY);
    if forbids_all { logits.to_vec() } else { biased }
}

/// Returns the ids that top-k, top-p and min-p keep, most likely first; at least one.
fn filter_candidates(scaled: &[f32], weights: &[f32], row: &SamplingParams) -> Vec<u32> {
    let weight_of = |&id: &u32| f64::from(weights[id as usize]);
    let mut kept = ids_descending(scaled);
    let mut total: f64 = weights.iter().map(|&w| f64::from(w)).sum();
    if row.top_k > 0 {
        kept.truncate(row.top_k as usize);
        total = kept.iter().map(weight_of).sum();
    }
    if row.top_p < 1.0 {
        let threshold = f64::from(row.top_p) * total;
        kept.truncate(shortest_prefix(&kept, weight_of, |sum| sum >= threshold));
    }
    let min_weight = row.min_p * weights[kept[0] as usize];
    let likely = kept.iter().filter(|&&id| weights[id as usize] >= min_weight).count();
    kept.truncate(likely.max(1));
    kept
}

/// Returns the length of the shortest prefix, at least 1, whose sum of weights is `enough`, or of the whole
/// list if there is none.
fn shortest_prefix(ids: &[u32], weight_of: impl Fn(&u32) -> f64, enough: impl Fn(f64) -> bool) -> usize {
    let mut sum = 0.0;
    for (i, id) in ids.iter().enumerate() {
        sum += weight_of(id);
        if enough(sum) {
            return i + 1;
        }
    }
    ids.len()
}

/// Returns the id of the largest logit, the lowest id on ties, and 0 if no logit is above negative infinity.
pub(super) fn greedy_token(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (id, &logit) in logits.iter().enumerate() {
        if logit > nan_to_lowest(logits[best]) {
            best = id;
        }
    }
    best as u32
}

/// Returns the ids by value, descending, ties by id. No value may be NaN.
pub(super) fn ids_descending(values: &[f32]) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..values.len() as u32).collect();
    let value = |id: &u32| values[*id as usize];
    // The sort is stable, and 0.0 ties with -0.0.
    ids.sort_by(|a, b| value(b).partial_cmp(&value(a)).expect("NaN was replaced; this is a bug"));
    ids
}

/// Replaces NaN by negative infinity.
pub(super) fn nan_to_lowest(value: f32) -> f32 {
    if value.is_nan() { f32::NEG_INFINITY } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn assert_near(got: &[f32], want: &[f64]) {
        assert_eq!(got.len(), want.len());
        for (got, want) in got.iter().zip(want) {
            assert!((f64::from(*got) - want).abs() < 1e-6, "{got} is not {want}");
        }
    }

    #[test]
    fn greedy_rows_take_the_lowest_id_of_the_largest_logit() {
        let greedy = SamplingParams::GREEDY;
        assert_eq!(sample(&[1.0, 3.0, 3.0, 2.0], &[], None, &greedy), 1);
        assert_eq!(sample(&[f32::NAN, -3.0, f32::NAN, -2.0], &[], None, &greedy), 3);
        assert_eq!(sample(&[f32::NAN; 3], &[], None, &greedy), 0);
        assert_eq!(sample(&[-0.0, 0.0], &[], None, &greedy), 0);
        let without_weights = SamplingParams { temperature: 1.0, ..greedy };
        assert_eq!(sample(&[1.0, f32::INFINITY, f32::INFINITY], &[], None, &without_weights), 1);
    }

    #[test]
    fn biases_are_added_first() {
        const FORBID: f32 = f32::NEG_INFINITY;
        let sampled = SamplingParams { temperature: 0.5, top_k: 2, seed: 3, ..SamplingParams::GREEDY };
        for row in [SamplingParams::GREEDY, sampled, SamplingParams { top_p: 0.1, top_k: 0, ..sampled }] {
            let logits = [1.0, 3.0, 2.0, f32::NAN];
            assert_eq!(sample(&logits, &[(0, 90.0)], None, &row), 0, "{row:?}: raised above all others");
            assert_eq!(
                sample(&logits, &[(1, FORBID), (2, -90.0)], None, &row),
                0,
                "{row:?}: the only one left"
            );
            assert_eq!(sample(&logits, &[(1, FORBID), (1, 90.0), (2, FORBID)], None, &row), 0, "{row:?}");
            let all = [(0, FORBID), (1, FORBID), (2, FORBID)];
            assert_eq!(
                sample(&logits, &all, None, &row),
                sample(&logits, &[], None, &row),
                "{row:?}: ignored"
            );
        }
        assert_eq!(sample(&[f32::INFINITY, 0.0], &[(0, FORBID)], None, &SamplingParams::GREEDY), 1);
    }

    #[test]
    fn a_mask_forbids_the_tokens_without_a_bit() {
        let sampled = SamplingParams { temperature: 0.5, seed: 3, ..SamplingParams::GREEDY };
        for row in [SamplingParams::GREEDY, sampled] {
            let logits: Vec<f32> = (0..40).map(|id| id as f32).collect();
            let masked = |mask, biases| sample(&logits, biases, Some(mask), &row);
            assert_eq!(masked(&[1 << 7, 0], &[]), 7, "{row:?}");
            assert_eq!(masked(&[0, 1 << 6], &[(39, f32::INFINITY)]), 38, "{row:?}: a bias allows nothing");
            let any = sample(&logits, &[], None, &row);
            assert_eq!(masked(&[u32::MAX; 2], &[]), any, "{row:?}");
            // Bits beyond the vocabulary count for nothing, and what forbids everything is ignored.
            assert_eq!(masked(&[0, 1 << 9], &[(0, 90.0)]), any, "{row:?}");
            assert_eq!(masked(&[1, 0], &[(0, f32::NEG_INFINITY)]), any, "{row:?}");
        }
    }

    /// Weights 8, 4, 2, 1 of ids 2, 0, 3, 1 at temperature 1.
    const LOGITS: [f32; 4] =
        [std::f32::consts::LN_2 * 2.0, 0.0, std::f32::consts::LN_2 * 3.0, std::f32::consts::LN_2];

    /// Returns the frequency of each id in 4096 positions.
    fn frequencies(row: SamplingParams) -> [f64; 4] {
        let mut frequencies = [0.0; 4];
        for position in 0..4096 {
            frequencies[sample(&LOGITS, &[], None, &SamplingParams { position, ..row }) as usize] +=
                1.0 / 4096.0;
        }
        frequencies
    }

    #[test]
    fn each_filter_keeps_the_documented_tokens() {
        let plain = SamplingParams { temperature: 1.0, seed: 11, ..SamplingParams::GREEDY };
        let check = |row, want: [f64; 4]| {
            let got = frequencies(row);
            for (got, want) in got.iter().zip(want) {
                assert!(
                    (got - want).abs() < 0.03 && (want > 0.0 || *got == 0.0),
                    "{row:?}: {got} is not {want}"
                );
            }
        };
        check(plain, [4.0 / 15.0, 1.0 / 15.0, 8.0 / 15.0, 2.0 / 15.0]);
        check(
            SamplingParams { temperature: 0.5, ..plain },
            [16.0 / 85.0, 1.0 / 85.0, 64.0 / 85.0, 4.0 / 85.0],
        );
        check(SamplingParams { top_k: 3, ..plain }, [4.0 / 14.0, 0.0, 8.0 / 14.0, 2.0 / 14.0]);
        check(SamplingParams { top_p: 0.79, ..plain }, [4.0 / 12.0, 0.0, 8.0 / 12.0, 0.0]);
        // 12 of the 14 parts that top-k keeps suffice, but not 12 of all 15.
        check(SamplingParams { top_p: 0.82, top_k: 3, ..plain }, [4.0 / 12.0, 0.0, 8.0 / 12.0, 0.0]);
        check(SamplingParams { top_p: 0.82, ..plain }, [4.0 / 14.0, 0.0, 8.0 / 14.0, 2.0 / 14.0]);
        check(SamplingParams { min_p: 0.4, ..plain }, [4.0 / 12.0, 0.0, 8.0 / 12.0, 0.0]);
        check(SamplingParams { top_p: 1e-9, ..plain }, [0.0, 0.0, 1.0, 0.0]);
    }

    #[test]
    fn log_probabilities_use_the_raw_logits() {
        let result = logprobs(&LOGITS, 3);
        assert_eq!(result.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [2, 0, 3]);
        assert_near(&[result.top[1].1, result.logprob(LOGITS[1])], &[(4f64 / 15.0).ln(), (1f64 / 15.0).ln()]);
        assert_eq!(
            logprobs(&[1.0, 2.0, 2.0], 9).top.iter().map(|(id, _)| *id).collect::<Vec<_>>(),
            [1, 2, 0]
        );
        assert_eq!(logprobs(&[0.0, f32::NAN], 0).logprob(f32::NAN), f32::NEG_INFINITY);
    }
}
