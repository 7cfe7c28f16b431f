//! Distributions of lengths in tokens: fixed, uniform, lognormal.
//!
//! Invariant: a parsed length, and every length sampled from it, is between 1 and `LENGTH_MAX`.

use std::{fmt, str::FromStr};

use rand_distr::{Distribution, LogNormal};

use super::random::RandomStream;

/// A distribution of lengths in tokens, at least 1. Text forms: `128`; `128-512`, uniform;
/// `lognormal:MEDIAN:SIGMA` or `lognormal:MEDIAN:SIGMA:MAX`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LengthDistribution {
    Fixed(u32),
    /// Uniform in `low..=high`.
    Uniform {
        low: u32,
        high: u32,
    },
    /// exp(N(ln median, sigma²)), rounded and clamped to `1..=max`.
    Lognormal {
        median: f64,
        sigma: f64,
        max: u32,
    },
}

/// Maximum length: more than the context of any model, but small enough that a typo does not exhaust memory.
pub const LENGTH_MAX: u32 = 10_000_000;

/// Maximum sigma: above it, nearly every length is 1 or the maximum.
const SIGMA_MAX: f64 = 10.0;

impl LengthDistribution {
    /// Samples a length.
    pub fn sample(self, draws: &mut RandomStream) -> u32 {
        match self {
            LengthDistribution::Fixed(length) => length,
            LengthDistribution::Uniform { low, high } => draws.between(low, high),
            LengthDistribution::Lognormal { median, sigma, max } => {
                let lengths = LogNormal::new(median.ln(), sigma).expect("sigma is finite");
                lengths.sample(draws).round().clamp(1.0, f64::from(max)) as u32
            }
        }
    }

    /// Returns the maximum length.
    pub fn max(self) -> u32 {
        match self {
            LengthDistribution::Fixed(length) => length,
            LengthDistribution::Uniform { high, .. } => high,
            LengthDistribution::Lognormal { max, .. } => max,
        }
    }
}

impl FromStr for LengthDistribution {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(parameters) = text.strip_prefix("lognormal:") {
            return parse_lognormal(parameters).ok_or_else(|| {
                format!(
                    "'{text}' is not lognormal:MEDIAN:SIGMA[:MAX] with 1 <= MEDIAN <= MAX <= {LENGTH_MAX} \
                     and SIGMA from 0 to \
                     {SIGMA_MAX}"
                )
            });
        }
        let (low, high) = text.split_once('-').unwrap_or((text, text));
        let (low, high) = (parse_tokens(low)?, parse_tokens(high)?);
        if low > high {
            return Err(format!("'{text}' is an empty range: expected LOW-HIGH"));
        }
        Ok(if low == high {
            LengthDistribution::Fixed(low)
        } else {
            LengthDistribution::Uniform { low, high }
        })
    }
}

fn parse_tokens(text: &str) -> Result<u32, String> {
    let tokens = text.parse().ok().filter(|tokens| (1..=LENGTH_MAX).contains(tokens));
    tokens.ok_or_else(|| {
        format!(
            "'{text}' is not a number of tokens from 1 to {LENGTH_MAX}: expected N, LOW-HIGH or \
             lognormal:MEDIAN:SIGMA[:MAX]"
        )
    })
}

fn parse_lognormal(parameters: &str) -> Option<LengthDistribution> {
    let (median, sigma, max) = match parameters.split(':').collect::<Vec<_>>()[..] {
        [median, sigma] => (median, sigma, LENGTH_MAX),
        [median, sigma, max] => (median, sigma, parse_tokens(max).ok()?),
        _ => return None,
    };
    let median = median.parse().ok().filter(|median| (1.0..=f64::from(max)).contains(median))?;
    let sigma = sigma.parse().ok().filter(|sigma| (0.0..=SIGMA_MAX).contains(sigma))?;
    Some(LengthDistribution::Lognormal { median, sigma, max })
}

impl fmt::Display for LengthDistribution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            LengthDistribution::Fixed(length) => write!(f, "{length}"),
            LengthDistribution::Uniform { low, high } => write!(f, "{low}-{high}"),
            LengthDistribution::Lognormal { median, sigma, max: LENGTH_MAX } => {
                write!(f, "lognormal:{median}:{sigma}")
            }
            LengthDistribution::Lognormal { median, sigma, max } => {
                write!(f, "lognormal:{median}:{sigma}:{max}")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use statrs::distribution::{ContinuousCDF, LogNormal};

    use super::*;
    use crate::plan::{
        random::Purpose,
        testing::{KS_CRITICAL, ks_distance_discrete},
    };

    const N: u64 = 20_000;

    /// Samples lengths as a load does: each from its own stream.
    fn sampled(length: &str) -> Vec<u32> {
        let length: LengthDistribution = length.parse().unwrap();
        (0..N).map(|index| length.sample(&mut RandomStream::new(8, Purpose::PromptLength(index)))).collect()
    }

    fn assert_fits(values: &[u32], cdf: impl Fn(u32) -> f64) {
        let distance = ks_distance_discrete(values, cdf);
        assert!(distance < KS_CRITICAL / (N as f64).sqrt(), "{distance}");
    }

    #[test]
    fn uniform_lengths_are_uniform_with_both_ends() {
        let values = sampled("128-512");
        assert_fits(&values, |k| f64::from(k - 127) / 385.0);
        assert_eq!((values.iter().min(), values.iter().max()), (Some(&128), Some(&512)));
    }

    #[test]
    fn lognormal_lengths_are_the_rounded_distribution() {
        let exact = LogNormal::new(300f64.ln(), 0.8).unwrap();
        assert_fits(&sampled("lognormal:300:0.8"), |k| exact.cdf(f64::from(k) + 0.5));
        let held = sampled("lognormal:300:0.8:400");
        assert_fits(&held, |k| if k == 400 { 1.0 } else { exact.cdf(f64::from(k) + 0.5) });
        assert!(sampled("lognormal:1:3").contains(&1));
    }

    #[test]
    fn fixed_lengths_and_a_lognormal_of_no_width_do_not_vary() {
        assert!(sampled("64").iter().chain(&sampled("lognormal:64:0")).all(|&length| length == 64));
    }

    #[test]
    fn text_form_goes_both_ways() {
        for text in ["1", "64", "10000000", "128-512", "lognormal:300:0.8", "lognormal:90.5:1:4096"] {
            assert_eq!(
                text.parse::<LengthDistribution>().map(|length| length.to_string()),
                Ok(text.to_string())
            );
        }
        assert_eq!("5-5".parse(), Ok(LengthDistribution::Fixed(5)));
        let max = |text: &str| text.parse::<LengthDistribution>().map(LengthDistribution::max);
        assert_eq!((max("7"), max("7-9")), (Ok(7), Ok(9)));
        assert_eq!((max("lognormal:5:1"), max("lognormal:5:1:6")), (Ok(10_000_000), Ok(6)));
    }

    #[test]
    fn nonsense_is_refused_with_what_is_expected() {
        for text in ["", "0", "-4", "4-", "a", "1-2-3", "0-3", "99999999999", "10000001", "1.5", "NaN"] {
            let refused = text.parse::<LengthDistribution>().unwrap_err();
            assert!(refused.contains("expected N, LOW-HIGH or lognormal"), "{text}: {refused}");
        }
        for text in ["5", "5:", ":1", "0.5:1", "5:-1", "5:NaN", "inf:1", "5:1:4", "5:1:0", "5:1:6:7", "5:11"]
        {
            let refused = format!("lognormal:{text}").parse::<LengthDistribution>().unwrap_err();
            assert!(refused.contains("1 <= MEDIAN <= MAX <= 10000000"), "{text}: {refused}");
        }
        assert!("5-4".parse::<LengthDistribution>().is_err());
    }
}
