//! The definition of token sampling, and of the log-probabilities that are reported with a token.
//!
//! Invariant: pure functions of logits, biases, mask and the sampling parameters of one row.

use super::draw::{draw, exp, weight};
use crate::batch::{RowFailure, SamplingParams, is_allowed, lowest_allowed};

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

/// Samples a token from `logits` (vocabulary) with logit biases, the counts of the tokens of its sequence
/// (vocabulary, or none), a mask and the sampling parameters `row`.
/// [`Backend::sample`](crate::Backend::sample) must return exactly this token.
///
/// 1. Biases are added, in their order; then penalties apply by the counts
///    ([`Penalties::apply`](crate::Penalties::apply)); and the logits of tokens that the mask does not allow
///    ([`is_allowed`]) become negative infinity. If no logit above negative infinity is left, biases and
///    penalties are ignored, all of them; the mask never is. If there still is none, the token is the lowest
///    id that the mask allows. A mask that allows no token of the vocabulary fails the row.
/// 2. Greedy rows take the largest logit, and the lowest id on ties. So do rows whose largest scaled logit is
///    not finite.
/// 3. Scaled = logit / temperature, in F32. Candidates are ordered by scaled value, descending, ties by id.
///    Their weights are integers, [`weight`] of (scaled - largest).
/// 4. Top-k keeps the first k. Top-p keeps the shortest prefix, at least one candidate, whose weights sum up
///    to that fraction of what top-k kept. Min-p then keeps those whose [`exp`] of (scaled - largest) is at
///    least that fraction.
/// 5. The result is the [`draw`] from the scaled values of the kept candidates.
///
/// A NaN logit counts as negative infinity.
pub fn sample_counted(
    logits: &[f32],
    biases: &[(u32, f32)],
    counts: &[u16],
    mask: Option<&[u32]>,
    row: &SamplingParams,
) -> Result<u32, RowFailure> {
    let lowest = mask.map_or(Some(0), |mask| lowest_allowed(mask, logits.len()));
    let lowest = lowest.ok_or(RowFailure::EmptyMask)?;
    let is_possible = |logits: &Vec<f32>| logits.iter().any(|&logit| logit > f32::NEG_INFINITY);
    let edits: [(_, &[u16]); 2] = [(biases, counts), (&[], &[])];
    let edited = edits.into_iter().map(|(biases, counts)| edit(logits, biases, (counts, row), mask));
    let Some(logits) = edited.into_iter().find(is_possible) else { return Ok(lowest) };
    let scaled: Vec<f32> = logits.iter().map(|l| l / row.temperature).collect();
    let largest = scaled.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if row.is_greedy() || !largest.is_finite() {
        return Ok(ids_descending(&logits)[0]);
    }
    let kept = filter_candidates(&scaled, largest, row);
    let candidates = kept.iter().map(|&id| (id, scaled[id as usize]));
    let drawn = draw(candidates, row.seed, row.position.into());
    Ok(drawn.expect("the most likely candidate is kept; this is a bug"))
}

/// Samples a token as [`sample_counted`] does, without penalties.
pub fn sample(
    logits: &[f32],
    biases: &[(u32, f32)],
    mask: Option<&[u32]>,
    row: &SamplingParams,
) -> Result<u32, RowFailure> {
    sample_counted(logits, biases, &[], mask, row)
}

/// Returns whether the largest of `logits` is finite, where a NaN logit counts as negative infinity. A row
/// for which it is not fails ([`RowFailure::NotFinite`]), whatever its parameters, once its late input is
/// there.
pub fn is_finite_row(logits: &[f32]) -> bool {
    logits.iter().copied().fold(f32::NEG_INFINITY, f32::max).is_finite()
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

/// Returns the rank of a token in `logits` (vocabulary): 1 is the most likely, ties by id. A NaN logit counts
/// as negative infinity.
pub fn rank(logits: &[f32], token: u32) -> u32 {
    let values: Vec<f32> = logits.iter().map(|&l| nan_to_lowest(l)).collect();
    let position = ids_descending(&values).into_iter().position(|id| id == token);
    1 + position.expect("a scored token is in the vocabulary; anything else is a bug") as u32
}

/// Returns the logits with biases, penalties by the counts, and mask applied, none of them NaN.
fn edit(
    logits: &[f32],
    biases: &[(u32, f32)],
    (counts, row): (&[u16], &SamplingParams),
    mask: Option<&[u32]>,
) -> Vec<f32> {
    let mut edited = logits.to_vec();
    for &(id, bias) in biases {
        // A draft model may have fewer tokens than the target.
        if let Some(logit) = edited.get_mut(id as usize) {
            *logit += bias;
        }
    }
    edited.iter_mut().zip(counts).for_each(|(logit, count)| *logit = row.penalties.apply(*logit, *count));
    for (id, logit) in edited.iter_mut().enumerate() {
        let is_forbidden = mask.is_some_and(|mask| !is_allowed(mask, id as u32));
        *logit = if is_forbidden { f32::NEG_INFINITY } else { nan_to_lowest(*logit) };
    }
    edited
}

/// Returns the ids that top-k, top-p and min-p keep, most likely first; at least one if min-p is at most 1.
fn filter_candidates(scaled: &[f32], largest: f32, row: &SamplingParams) -> Vec<u32> {
    let relative = |id: u32| scaled[id as usize] - largest;
    let mut kept = ids_descending(scaled);
    if row.top_k > 0 {
        kept.truncate(row.top_k as usize);
    }
    if row.top_p < 1.0 {
        let total: u64 = kept.iter().map(|&id| weight(relative(id))).sum();
        let enough = f64::from(row.top_p) * total as f64;
        let sums = kept.iter().scan(0, |sum, &id| {
            *sum += weight(relative(id));
            Some(*sum)
        });
        let below = sums.take_while(|&sum| (sum as f64) < enough).count();
        kept.truncate(below + 1);
    }
    kept.retain(|&id| exp(relative(id)) >= row.min_p);
    kept
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
    use crate::batch::{IN_PROMPT, Penalties};

    fn assert_near(got: &[f32], want: &[f64]) {
        assert_eq!(got.len(), want.len());
        for (got, want) in got.iter().zip(want) {
            assert!((f64::from(*got) - want).abs() < 1e-6, "{got} is not {want}");
        }
    }

    /// Samples a row that does not fail.
    fn token(logits: &[f32], biases: &[(u32, f32)], mask: Option<&[u32]>, row: &SamplingParams) -> u32 {
        sample(logits, biases, mask, row).expect("the mask allows a token")
    }

    #[test]
    fn greedy_rows_take_the_lowest_id_of_the_largest_logit() {
        let greedy = SamplingParams::GREEDY;
        let of = |logits: &[f32], row| token(logits, &[], None, &row);
        assert_eq!(of(&[1.0, 3.0, 3.0, 2.0], greedy), 1);
        assert_eq!(of(&[f32::NAN, -3.0, f32::NAN, -2.0], greedy), 3);
        assert_eq!(of(&[f32::NAN; 3], greedy), 0);
        assert_eq!(of(&[-0.0, 0.0], greedy), 0);
        let drawn = SamplingParams { temperature: 1.0, ..greedy };
        assert_eq!(of(&[1.0, f32::INFINITY, f32::INFINITY], drawn), 1);
        // The scaled logits are infinite, but not the logits.
        assert_eq!(of(&[1e38, 2e38, 2e38], SamplingParams { temperature: 0.1, ..greedy }), 1);
    }

    const FORBID: f32 = f32::NEG_INFINITY;

    #[test]
    fn penalties_apply_after_biases_by_the_counts() {
        let halving = Penalties { repetition: 2.0, presence: 1.0, frequency: 0.5 };
        let row = SamplingParams { penalties: halving, ..SamplingParams::GREEDY };
        let token = |logits: &[f32], biases: &[(u32, f32)], counts: &[u16]| {
            sample_counted(logits, biases, counts, None, &row).expect("there is no mask")
        };
        assert_eq!(token(&[3.0, 2.0, 1.0], &[], &[0, 0, 0]), 0);
        assert_eq!(token(&[3.0, 2.0, 1.0], &[], &[IN_PROMPT, 0, 0]), 1, "halved");
        assert_eq!(token(&[3.0, 1.0, -0.1], &[], &[1, 0, 0]), 1, "halved, and 1.5 less");
        assert_eq!(token(&[3.0, 1.0, -0.1], &[], &[2, 2, 0]), 2);
        assert_eq!(token(&[-1.0, -1.5, -9.0], &[], &[IN_PROMPT, 0, 0]), 1, "doubled");
        // The bias makes the logit positive before it is halved.
        assert_eq!(token(&[-1.0, 2.0, 1.0], &[(0, 4.5)], &[IN_PROMPT, 0, 0]), 1);
        // Edits that leave nothing are ignored, all of them.
        let row = SamplingParams { penalties: Penalties { repetition: f32::MAX, ..halving }, ..row };
        let all = sample_counted(&[-3.0, -2.0], &[(0, 90.0), (0, -90.0)], &[1, 1], None, &row);
        assert_eq!(all, Ok(1));
        assert_eq!(sample_counted(&[-3.0, 2.0], &[(0, 9.0)], &[1, 1], Some(&[1]), &row), Ok(0));
    }

    #[test]
    fn biases_are_added_first() {
        let sampled = SamplingParams { temperature: 0.5, top_k: 2, seed: 3, ..SamplingParams::GREEDY };
        for row in [SamplingParams::GREEDY, sampled, SamplingParams { top_p: 0.1, top_k: 0, ..sampled }] {
            let logits = [1.0, 3.0, 2.0, f32::NAN];
            let biased = |biases| token(&logits, biases, None, &row);
            assert_eq!(biased(&[(0, 90.0)]), 0, "{row:?}: raised above all others");
            assert_eq!(biased(&[(1, FORBID), (2, -90.0)]), 0, "{row:?}: the only one left");
            assert_eq!(biased(&[(1, FORBID), (1, 90.0), (2, FORBID)]), 0, "{row:?}");
            let all = [(0, FORBID), (1, FORBID), (2, FORBID)];
            assert_eq!(biased(&all), biased(&[]), "{row:?}: ignored");
            let raised = [(0, FORBID), (2, 90.0), (1, FORBID), (2, FORBID)];
            assert_eq!(biased(&raised), biased(&[]), "{row:?}: ignored as a whole");
        }
        assert_eq!(token(&[f32::INFINITY, 0.0], &[(0, FORBID)], None, &SamplingParams::GREEDY), 1);
    }

    #[test]
    fn a_mask_is_never_ignored() {
        let sampled = SamplingParams { temperature: 0.5, seed: 3, ..SamplingParams::GREEDY };
        for row in [SamplingParams::GREEDY, sampled, SamplingParams { top_k: 3, top_p: 0.5, ..sampled }] {
            let mut logits: Vec<f32> = (0..40).map(|id| id as f32).collect();
            (logits[0], logits[1]) = (f32::NEG_INFINITY, f32::NAN);
            let masked = |mask: &[u32], biases: &[_]| sample(&logits, biases, Some(mask), &row);
            assert_eq!(masked(&[1 << 7, 0], &[]), Ok(7), "{row:?}");
            let raised = masked(&[0, 1 << 6], &[(39, f32::INFINITY)]);
            assert_eq!(raised, Ok(38), "{row:?}: a bias allows nothing");
            assert_eq!(masked(&[u32::MAX; 2], &[]), sample(&logits, &[], None, &row), "{row:?}");
            // Only the biases are ignored if they forbid what the mask allows.
            assert_eq!(masked(&[1 << 9, 0], &[(9, FORBID), (39, 90.0)]), Ok(9), "{row:?}");
            // If the model forbids that too, the lowest allowed id is taken.
            assert_eq!(masked(&[0b11, 0], &[(1, 90.0)]), Ok(0), "{row:?}");
            assert_eq!(masked(&[0b10, 0], &[]), Ok(1), "{row:?}");
            for empty in [&[0, 0][..], &[0, 1 << 9], &[]] {
                assert_eq!(masked(empty, &[(0, 90.0)]), Err(RowFailure::EmptyMask), "{row:?} {empty:?}");
            }
        }
    }

    /// Weights 8, 4, 2, 1 of ids 2, 0, 3, 1 at temperature 1.
    const LOGITS: [f32; 4] =
        [std::f32::consts::LN_2 * 2.0, 0.0, std::f32::consts::LN_2 * 3.0, std::f32::consts::LN_2];

    /// Returns the frequency of each id in 4096 positions.
    fn frequencies(row: SamplingParams) -> [f64; 4] {
        let mut frequencies = [0.0; 4];
        for position in 0..4096 {
            let row = SamplingParams { position, ..row };
            frequencies[token(&LOGITS, &[], None, &row) as usize] += 1.0 / 4096.0;
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
    fn tokens_are_drawn_with_their_probabilities() {
        let weights = [8.0f32, 4.0, 2.0, 1.0, 0.0];
        let logits = weights.map(|w| w.ln() + 7.0);
        let row = SamplingParams { temperature: 1.0, seed: 3, ..SamplingParams::GREEDY };
        let mut counts = [0u32; 5];
        for position in 0..50_000 {
            counts[token(&logits, &[], None, &SamplingParams { position, ..row }) as usize] += 1;
        }
        let terms = counts.iter().zip(weights).take(4).map(|(&count, weight)| {
            let expected = 50_000.0 * f64::from(weight) / 15.0;
            (f64::from(count) - expected).powi(2) / expected
        });
        // The value that 3 degrees of freedom exceed once in 1,000 times.
        assert!(terms.sum::<f64>() < 16.27, "{counts:?}");
        assert_eq!(counts[4], 0);
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

    #[test]
    fn ranks_are_those_of_the_most_likely_tokens() {
        let logits = [1.0, 2.0, f32::NAN, 2.0, f32::NEG_INFINITY, -0.0, 0.0];
        let ranks = [0, 1, 2, 3, 4, 5, 6].map(|token| rank(&logits, token));
        assert_eq!(ranks, [3, 1, 6, 2, 7, 4, 5]);
        for (at, (id, _)) in logprobs(&logits, 7).top.into_iter().enumerate() {
            assert_eq!(ranks[id as usize] as usize, at + 1);
        }
    }
}
