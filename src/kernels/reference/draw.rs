//! The one definition of drawing a token, and of the log-probabilities reported beside it.
//!
//! Invariant: a function of logits, biases and one row of parameters; nothing is remembered.

use crate::batch::SampleRow;
use crate::random::uniform;

/// The log-probabilities of one row of raw logits.
#[derive(Clone, Debug)]
pub struct LogProbs {
    /// Logarithm of the sum of the exponentials.
    log_sum: f64,
    /// The most likely tokens, likeliest first, ties by id: (id, log-probability).
    pub top: Vec<(u32, f32)>,
}

impl LogProbs {
    /// The log-probability of a token whose raw logit is `logit`.
    pub fn of(&self, logit: f32) -> f32 {
        (f64::from(or_lowest(logit)) - self.log_sum) as f32
    }
}

/// The token that `row` draws from `logits` (vocabulary) with its `biases`. What `Backend::sample` must
/// give, exactly.
///
/// 1. Biases are added first, in their order. Biases that leave no logit above negative infinity are void:
///    something must be drawn.
/// 2. Greedy rows take the largest logit, the lowest id on ties. So do rows without a finite largest
///    scaled logit, since nothing can be weighed there.
/// 3. Scaled = logit / temperature; candidates by scaled descending, ties by id.
///    Weights = exp(scaled - largest), in F32; their sums are F64.
/// 4. Top-k keeps the first k; top-p the shortest prefix that holds its share of what top-k kept, at
///    least one; min-p then those of at least its share of the largest weight.
/// 5. The first candidate whose running sum of weights exceeds `uniform(seed, position)` times the sum of
///    the kept; the last kept if none does.
///
/// A NaN logit counts as negative infinity.
pub fn draw(logits: &[f32], biases: &[(u32, f32)], row: &SampleRow) -> u32 {
    let logits = &biased(logits, biases)[..];
    let scaled: Vec<f32> = logits.iter().map(|l| or_lowest(l / row.temperature)).collect();
    let largest = scaled.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    if row.is_greedy() || !largest.is_finite() {
        return greedy(logits);
    }
    let weights: Vec<f32> = scaled.iter().map(|s| (s - largest).exp()).collect();
    let kept = candidates(&scaled, &weights, row);
    let weight_of = |&id: &u32| f64::from(weights[id as usize]);
    let threshold =
        f64::from(uniform(row.seed, row.position.into())) * kept.iter().map(weight_of).sum::<f64>();
    let drawn = prefix_where(&kept, weight_of, |sum| sum > threshold);
    kept[drawn - 1]
}

/// The log-probabilities of `logits` (vocabulary), with the `n` likeliest tokens. All are NaN when the
/// largest logit is not finite; a NaN logit counts as negative infinity.
pub fn logprobs(logits: &[f32], n: usize) -> LogProbs {
    let values: Vec<f32> = logits.iter().map(|&l| or_lowest(l)).collect();
    let largest = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = values.iter().map(|v| f64::from((v - largest).exp())).sum();
    let mut result = LogProbs { log_sum: f64::from(largest) + sum.ln(), top: Vec::new() };
    let likeliest = descending(&values).into_iter().take(n);
    result.top = likeliest.map(|id| (id, result.of(values[id as usize]))).collect();
    result
}

fn biased(logits: &[f32], biases: &[(u32, f32)]) -> Vec<f32> {
    let mut biased = logits.to_vec();
    for &(id, bias) in biases {
        biased[id as usize] += bias;
    }
    let is_void = biased.iter().all(|&logit| or_lowest(logit) == f32::NEG_INFINITY);
    if is_void { logits.to_vec() } else { biased }
}

/// The ids that top-k, top-p and min-p leave over, likeliest first; at least one.
fn candidates(scaled: &[f32], weights: &[f32], row: &SampleRow) -> Vec<u32> {
    let weight_of = |&id: &u32| f64::from(weights[id as usize]);
    let mut kept = descending(scaled);
    let mut total: f64 = weights.iter().map(|&w| f64::from(w)).sum();
    if row.top_k > 0 {
        kept.truncate(row.top_k as usize);
        total = kept.iter().map(weight_of).sum();
    }
    if row.top_p < 1.0 {
        let share = f64::from(row.top_p) * total;
        kept.truncate(prefix_where(&kept, weight_of, |sum| sum >= share));
    }
    let least = row.min_p * weights[kept[0] as usize];
    let likely = kept.iter().filter(|&&id| weights[id as usize] >= least).count();
    kept.truncate(likely.max(1));
    kept
}

/// Length of the shortest prefix, at least 1, whose sum of weights is `enough`; the whole if none is.
fn prefix_where(ids: &[u32], weight_of: impl Fn(&u32) -> f64, enough: impl Fn(f64) -> bool) -> usize {
    let mut sum = 0.0;
    for (i, id) in ids.iter().enumerate() {
        sum += weight_of(id);
        if enough(sum) {
            return i + 1;
        }
    }
    ids.len()
}

/// The largest logit's id; the lowest on ties; 0 when no logit is above negative infinity.
fn greedy(logits: &[f32]) -> u32 {
    let mut best = 0;
    for (id, &logit) in logits.iter().enumerate() {
        if logit > or_lowest(logits[best]) {
            best = id;
        }
    }
    best as u32
}

/// Ids by value, largest first, ties by id. No value may be NaN.
pub(super) fn descending(values: &[f32]) -> Vec<u32> {
    let mut ids: Vec<u32> = (0..values.len() as u32).collect();
    let value = |id: &u32| values[*id as usize];
    // The sort is stable, and 0.0 ties with -0.0.
    ids.sort_by(|a, b| value(b).partial_cmp(&value(a)).expect("NaN was replaced; this is a bug"));
    ids
}

pub(super) fn or_lowest(value: f32) -> f32 {
    if value.is_nan() { f32::NEG_INFINITY } else { value }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(got: &[f32], want: &[f64]) {
        assert_eq!(got.len(), want.len());
        for (got, want) in got.iter().zip(want) {
            assert!((f64::from(*got) - want).abs() < 1e-6, "{got} is not {want}");
        }
    }

    #[test]
    fn greedy_rows_take_the_lowest_of_the_largest() {
        let greedy = SampleRow::GREEDY;
        assert_eq!(draw(&[1.0, 3.0, 3.0, 2.0], &[], &greedy), 1);
        assert_eq!(draw(&[f32::NAN, -3.0, f32::NAN, -2.0], &[], &greedy), 3);
        assert_eq!(draw(&[f32::NAN; 3], &[], &greedy), 0);
        assert_eq!(draw(&[-0.0, 0.0], &[], &greedy), 0);
        let unweighable = SampleRow { temperature: 1.0, ..greedy };
        assert_eq!(draw(&[1.0, f32::INFINITY, f32::INFINITY], &[], &unweighable), 1);
    }

    #[test]
    fn biases_come_before_everything_else() {
        const FORBID: f32 = f32::NEG_INFINITY;
        let drawn = SampleRow { temperature: 0.5, top_k: 2, seed: 3, ..SampleRow::GREEDY };
        for row in [SampleRow::GREEDY, drawn, SampleRow { top_p: 0.1, top_k: 0, ..drawn }] {
            let logits = [1.0, 3.0, 2.0, f32::NAN];
            assert_eq!(draw(&logits, &[(0, 90.0)], &row), 0, "{row:?}: lifted over all others");
            assert_eq!(draw(&logits, &[(1, FORBID), (2, -90.0)], &row), 0, "{row:?}: what is left");
            assert_eq!(draw(&logits, &[(1, FORBID), (1, 90.0), (2, FORBID)], &row), 0, "{row:?}");
            let all = [(0, FORBID), (1, FORBID), (2, FORBID)];
            assert_eq!(draw(&logits, &all, &row), draw(&logits, &[], &row), "{row:?}: void");
        }
        assert_eq!(draw(&[f32::INFINITY, 0.0], &[(0, FORBID)], &SampleRow::GREEDY), 1);
    }

    /// Weights 8, 4, 2, 1 of ids 2, 0, 3, 1 at temperature 1.
    const LOGITS: [f32; 4] =
        [std::f32::consts::LN_2 * 2.0, 0.0, std::f32::consts::LN_2 * 3.0, std::f32::consts::LN_2];

    /// How often each id is drawn in 4096 positions, as shares of the whole.
    fn shares(row: SampleRow) -> [f64; 4] {
        let mut shares = [0.0; 4];
        for position in 0..4096 {
            shares[draw(&LOGITS, &[], &SampleRow { position, ..row }) as usize] += 1.0 / 4096.0;
        }
        shares
    }

    #[test]
    fn each_filter_keeps_what_it_says() {
        let plain = SampleRow { temperature: 1.0, seed: 11, ..SampleRow::GREEDY };
        let check = |row, want: [f64; 4]| {
            let got = shares(row);
            for (got, want) in got.iter().zip(want) {
                assert!(
                    (got - want).abs() < 0.03 && (want > 0.0 || *got == 0.0),
                    "{row:?}: {got} is not {want}"
                );
            }
        };
        check(plain, [4.0 / 15.0, 1.0 / 15.0, 8.0 / 15.0, 2.0 / 15.0]);
        check(SampleRow { temperature: 0.5, ..plain }, [16.0 / 85.0, 1.0 / 85.0, 64.0 / 85.0, 4.0 / 85.0]);
        check(SampleRow { top_k: 3, ..plain }, [4.0 / 14.0, 0.0, 8.0 / 14.0, 2.0 / 14.0]);
        check(SampleRow { top_p: 0.79, ..plain }, [4.0 / 12.0, 0.0, 8.0 / 12.0, 0.0]);
        // Of the 14 parts that top-k leaves, 12 suffice; of all 15 they would not.
        check(SampleRow { top_p: 0.82, top_k: 3, ..plain }, [4.0 / 12.0, 0.0, 8.0 / 12.0, 0.0]);
        check(SampleRow { top_p: 0.82, ..plain }, [4.0 / 14.0, 0.0, 8.0 / 14.0, 2.0 / 14.0]);
        check(SampleRow { min_p: 0.4, ..plain }, [4.0 / 12.0, 0.0, 8.0 / 12.0, 0.0]);
        check(SampleRow { top_p: 1e-9, ..plain }, [0.0, 0.0, 1.0, 0.0]);
    }

    #[test]
    fn log_probabilities_are_of_the_raw_logits() {
        let result = logprobs(&LOGITS, 3);
        assert_eq!(result.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [2, 0, 3]);
        near(&[result.top[1].1, result.of(LOGITS[1])], &[(4f64 / 15.0).ln(), (1f64 / 15.0).ln()]);
        assert_eq!(
            logprobs(&[1.0, 2.0, 2.0], 9).top.iter().map(|(id, _)| *id).collect::<Vec<_>>(),
            [1, 2, 0]
        );
        assert_eq!(logprobs(&[0.0, f32::NAN], 0).of(f32::NAN), f32::NEG_INFINITY);
    }
}
