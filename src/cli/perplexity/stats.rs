//! Perplexity statistics: scores of a text's tokens by a model's logits, and their difference from a
//! reference.
//!
//! Logarithms and sums are computed in F64, in the order of token ids and of the text's tokens.
//! Invariant: only per-token scores are stored; all statistics are computed from them.

use anyhow::{Result, ensure};
use serde::Serialize;

/// Scores of all tokens so far.
#[derive(Debug, Default)]
pub struct TokenScores {
    /// Negative log-probability of each token.
    nll: Vec<f64>,
    /// Negative log-probability of each token under the reference.
    reference_nll: Vec<f64>,
    /// KL(reference || model) of the distributions before each token.
    kl: Vec<f64>,
    /// Number of tokens for which model and reference have the same top token.
    same_top_token: usize,
    /// Buffers for the log-probabilities of model and reference, (vocab,) each.
    scratch: [Vec<f64>; 2],
}

/// Statistics of the scored tokens. Log-probabilities and divergences are in nats.
#[derive(Debug, PartialEq, Serialize)]
pub struct PerplexityStats {
    /// Number of scored tokens.
    pub tokens: usize,
    pub perplexity: Estimate,
    /// Mean negative log-probability per token.
    pub nll: Estimate,
    /// Comparison with the reference, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub against: Option<ReferenceStats>,
}

/// Comparison of a model with its reference.
#[derive(Debug, PartialEq, Serialize)]
pub struct ReferenceStats {
    /// Perplexity of the reference.
    pub perplexity: Estimate,
    /// Mean negative log-probability per token under the reference.
    pub nll: Estimate,
    /// Mean KL(reference || model) of the distributions before a token.
    pub kl: Estimate,
    pub kl_median: f64,
    /// The 99th percentile of the KL divergences.
    pub kl_p99: f64,
    pub kl_max: f64,
    /// Fraction of tokens for which model and reference have the same top token.
    pub same_choice: f64,
    /// Mean absolute difference of the true tokens' log-probabilities.
    pub logprob: f64,
}

/// A mean, or a value derived from one, with its standard error.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    pub value: f64,
    /// Standard error; `None` for a single sample.
    pub error: Option<f64>,
}

impl TokenScores {
    /// The number of scored tokens.
    pub fn len(&self) -> usize {
        self.nll.len()
    }

    /// The perplexity so far; `None` before the first token.
    pub fn perplexity(&self) -> Option<Estimate> {
        (!self.nll.is_empty()).then(|| Estimate::mean(&self.nll).exp())
    }

    /// Scores `token` by the logits before it, (vocab,) F32 in little-endian bytes, and by those of the
    /// reference if there is one. Either all tokens have a reference or none. Fails if the logits do not
    /// define a distribution.
    pub fn add(&mut self, token: u32, logits: &[u8], reference: Option<&[u8]>) -> Result<()> {
        let [own, other] = &mut self.scratch;
        log_softmax(logits, own)?;
        if let Some(reference) = reference {
            log_softmax(reference, other)?;
            ensure!(own.len() == other.len(), "logits of different vocabularies; this is a bug");
            self.reference_nll.push(-other[token as usize]);
            self.kl.push(kl_divergence(other, own));
            self.same_top_token += usize::from(most_likely(own) == most_likely(other));
        }
        self.nll.push(-own[token as usize]);
        Ok(())
    }

    /// Computes the statistics of all tokens so far; `None` before the first.
    pub fn stats(&self) -> Option<PerplexityStats> {
        let perplexity = self.perplexity()?;
        Some(PerplexityStats {
            tokens: self.len(),
            perplexity,
            nll: Estimate::mean(&self.nll),
            against: (!self.kl.is_empty()).then(|| self.reference_stats()),
        })
    }

    fn reference_stats(&self) -> ReferenceStats {
        let mut kl = self.kl.clone();
        kl.sort_by(f64::total_cmp);
        let nll = Estimate::mean(&self.reference_nll);
        let apart = self.nll.iter().zip(&self.reference_nll).map(|(own, other)| (own - other).abs());
        ReferenceStats {
            perplexity: nll.exp(),
            nll,
            kl: Estimate::mean(&self.kl),
            kl_median: percentile(&kl, 0.5),
            kl_p99: percentile(&kl, 0.99),
            kl_max: percentile(&kl, 1.0),
            same_choice: self.same_top_token as f64 / self.len() as f64,
            logprob: apart.sum::<f64>() / self.len() as f64,
        }
    }
}

impl Estimate {
    /// Computes the mean of at least one value. The standard error assumes independent values.
    fn mean(values: &[f64]) -> Estimate {
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        let error = (values.len() > 1).then(|| (squares / (count - 1.0) / count).sqrt());
        Estimate { value: mean, error }
    }

    /// Returns the exponential, with the error propagated to first order.
    fn exp(self) -> Estimate {
        let value = self.value.exp();
        Estimate { value, error: self.error.map(|error| value * error) }
    }
}

/// Computes the log-probabilities of all tokens into `to`. Fails for a NaN, for an infinite logit, and if all
/// logits are negative infinity.
fn log_softmax(logits: &[u8], to: &mut Vec<f64>) -> Result<()> {
    to.clear();
    let (logits, _) = logits.as_chunks::<4>();
    to.extend(logits.iter().map(|bytes| f64::from(f32::from_le_bytes(*bytes))));
    let largest = to.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = to.iter().map(|logit| (logit - largest).exp()).sum();
    let log_sum = largest + sum.ln();
    ensure!(log_sum.is_finite(), "the model's logits are not finite numbers, so perplexity is undefined");
    to.iter_mut().for_each(|logit| *logit -= log_sum);
    Ok(())
}

/// Computes KL(p || q) of distributions given by their logarithms. A negative result, which rounding can
/// cause, is returned as 0.
fn kl_divergence(p: &[f64], q: &[f64]) -> f64 {
    let of_token = |(p, q): (&f64, &f64)| if p.exp() == 0.0 { 0.0 } else { p.exp() * (p - q) };
    let sum: f64 = p.iter().zip(q).map(of_token).sum();
    if sum < 0.0 { 0.0 } else { sum }
}

/// Returns the most likely token, the lowest id on ties, like greedy sampling.
fn most_likely(logprobs: &[f64]) -> usize {
    let better = |best: usize, id: usize| if logprobs[id] > logprobs[best] { id } else { best };
    (0..logprobs.len()).fold(0, better)
}

/// Returns the smallest of the sorted values that at least this fraction of them does not exceed.
fn percentile(sorted: &[f64], share: f64) -> f64 {
    let rank = (share * sorted.len() as f64).ceil() as usize;
    sorted[rank.clamp(1, sorted.len()) - 1]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bytes(logits: &[f32]) -> Vec<u8> {
        logits.iter().flat_map(|logit| logit.to_le_bytes()).collect()
    }

    fn near(got: f64, want: f64) {
        assert!((got - want).abs() <= 1e-12 * want.abs().max(1.0), "{got} is not {want}");
    }

    /// Logits whose distributions are known fractions: a half and two quarters, and thirds.
    const HALVES: [f32; 3] = [std::f32::consts::LN_2, 0.0, 0.0];
    const THIRDS: [f32; 3] = [700.0, 700.0, 700.0];

    /// The statistics match their formulas for probabilities that are fractions. The logits are F32, and so
    /// is ln 2.
    #[test]
    fn figures_are_what_the_formulas_give() {
        let mut samples = TokenScores::default();
        samples.add(0, &bytes(&HALVES), Some(&bytes(&THIRDS))).unwrap();
        samples.add(2, &bytes(&THIRDS), Some(&bytes(&HALVES))).unwrap();
        let e = f64::from(std::f32::consts::LN_2).exp();
        let half = [e / (e + 2.0), 1.0 / (e + 2.0), 1.0 / (e + 2.0)].map(f64::ln);
        let third = (1.0f64 / 3.0).ln();
        let kl = [
            half.iter().map(|q| (third - q) / 3.0).sum::<f64>(),
            half.iter().map(|p| p.exp() * (p - third)).sum(),
        ];
        let nll = [-half[0], -third];
        let mean = (nll[0] + nll[1]) / 2.0;
        // The standard error of two samples is half of their difference.
        let error = (nll[0] - nll[1]).abs() / 2.0;
        let figures = samples.stats().unwrap();
        assert_eq!(figures.tokens, 2);
        near(figures.nll.value, mean);
        near(figures.nll.error.unwrap(), error);
        near(figures.perplexity.value, mean.exp());
        near(figures.perplexity.error.unwrap(), mean.exp() * error);
        let against = figures.against.unwrap();
        near(against.nll.value, (-third - half[2]) / 2.0);
        near(against.kl.value, (kl[0] + kl[1]) / 2.0);
        near(against.kl.error.unwrap(), (kl[0] - kl[1]).abs() / 2.0);
        near(against.kl_median, kl[0].min(kl[1]));
        near(against.kl_p99, kl[0].max(kl[1]));
        near(against.kl_max, kl[0].max(kl[1]));
        near(against.logprob, ((half[0] - third).abs() + (half[2] - third).abs()) / 2.0);
        // On ties the first token is the most likely one.
        near(against.same_choice, 1.0);
    }

    #[test]
    fn a_model_does_not_differ_from_itself() {
        let mut samples = TokenScores::default();
        let row: Vec<f32> = (0..997).map(|id| (id as f32 * 0.77).sin() * 30.0).collect();
        for token in 0..40 {
            samples.add(token, &bytes(&row), Some(&bytes(&row))).unwrap();
        }
        let figures = samples.stats().unwrap();
        let against = figures.against.unwrap();
        assert_eq!((against.perplexity, against.nll), (figures.perplexity, figures.nll));
        assert_eq!(against.kl, Estimate { value: 0.0, error: Some(0.0) });
        assert_eq!((against.kl_max, against.same_choice, against.logprob), (0.0, 1.0, 0.0));
    }

    /// Probability 0 contributes nothing if the reference has it, and an infinite divergence if only the
    /// model has it.
    #[test]
    fn zero_probabilities_have_the_right_divergence() {
        let (all, some) = (bytes(&[0.0, 0.0]), bytes(&[0.0, f32::NEG_INFINITY]));
        let kl = |model: &[u8], reference: &[u8]| {
            let mut samples = TokenScores::default();
            samples.add(0, model, Some(reference)).unwrap();
            samples.stats().unwrap().against.unwrap().kl.value
        };
        near(kl(&all, &some), std::f64::consts::LN_2);
        assert_eq!(kl(&some, &all), f64::INFINITY);
        assert_eq!(kl(&some, &some), 0.0);
        // A probability that underflows in F64 counts as 0.
        let faint = bytes(&[0.0, -800.0]);
        assert_eq!((kl(&some, &faint), kl(&faint, &some)), (0.0, 0.0));
    }

    #[test]
    fn one_token_has_no_error_and_none_no_figures() {
        let mut samples = TokenScores::default();
        assert_eq!(samples.stats(), None);
        samples.add(1, &bytes(&THIRDS), None).unwrap();
        let figures = samples.stats().unwrap();
        near(figures.perplexity.value, 3.0);
        assert_eq!((figures.perplexity.error, figures.nll.error, figures.against), (None, None, None));
    }

    #[test]
    fn logits_without_a_distribution_are_refused() {
        for row in [[0.0, f32::NAN], [f32::INFINITY, 0.0], [f32::NEG_INFINITY; 2]] {
            let error = TokenScores::default().add(0, &bytes(&row), None).unwrap_err();
            assert!(error.to_string().contains("not finite"), "{error}");
        }
    }

    #[test]
    fn percentiles_are_values_that_were_seen() {
        let values: Vec<f64> = (1..=200).map(f64::from).collect();
        assert_eq!([0.5, 0.99, 1.0].map(|share| percentile(&values, share)), [100.0, 198.0, 200.0]);
        assert_eq!(percentile(&[4.0], 0.5), 4.0);
        assert_eq!(percentile(&[1.0, 2.0, 3.0], 0.5), 2.0);
    }
}
