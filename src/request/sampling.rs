//! Sampling parameters: their bounds, and their conversion to a device's sample row.
//!
//! Invariant: every backend can sample with parameters that [`validate`] accepts; [`sample_row`] changes no
//! value.

use super::Sampling;
use mainstem_kernels::{Penalties, SampleMode, SamplingParams};

/// Checks the parameters. The error is the name of the first invalid one, and a message with its value and
/// bounds.
pub fn validate(sampling: &Sampling) -> Result<(), (&'static str, String)> {
    // Conditions are written such that NaN fails them.
    let Sampling { temperature, top_p, min_p, penalties, .. } = *sampling;
    let Penalties { repetition, presence, frequency } = penalties;
    let rules = [
        ("temperature", temperature, temperature.is_finite() && temperature >= 0.0, "finite and at least 0"),
        ("top_p", top_p, top_p > 0.0 && top_p <= 1.0, "above 0 and at most 1"),
        ("min_p", min_p, (0.0..=1.0).contains(&min_p), "from 0 to 1"),
        ("repetition_penalty", repetition, repetition.is_finite() && repetition > 0.0, "finite and above 0"),
        ("presence_penalty", presence, presence.is_finite(), "finite"),
        ("frequency_penalty", frequency, frequency.is_finite(), "finite"),
    ];
    match rules.into_iter().find(|&(_, _, holds, _)| !holds) {
        Some((param, value, _, bounds)) => Err((param, format!("{param} is {value} but must be {bounds}"))),
        None => Ok(()),
    }
}

/// Returns the row that samples the token at `position` of its sequence. `logprobs` is the number of most
/// likely tokens to report, as in [`Request`](super::Request). The caller adds the biases to the
/// batch and sets their range, and sets whether the row is masked.
pub fn sample_row(sampling: &Sampling, position: u32, logprobs: Option<u8>) -> SamplingParams {
    SamplingParams {
        mode: SampleMode::Sample,
        position,
        seed: sampling.seed,
        temperature: sampling.temperature,
        top_k: sampling.top_k,
        top_p: sampling.top_p,
        min_p: sampling.min_p,
        penalties: sampling.penalties,
        bias_at: 0,
        bias_len: 0,
        masked: false,
        logprob: logprobs.is_some(),
        top_logprobs: logprobs.unwrap_or(0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Sampling = Sampling { temperature: 1.0, ..Sampling::GREEDY };

    fn penalized(penalties: Penalties) -> Sampling {
        Sampling { penalties, ..PLAIN }
    }

    #[test]
    fn bounds_are_kept_to_the_edge() {
        let accepted = [
            PLAIN,
            Sampling { temperature: 0.0, ..PLAIN },
            Sampling { temperature: f32::MAX, ..PLAIN },
            Sampling { top_p: f32::MIN_POSITIVE, min_p: 1.0, top_k: u32::MAX, ..PLAIN },
        ];
        for sampling in accepted {
            assert_eq!(validate(&sampling), Ok(()), "{sampling:?}");
        }
        let refused = [
            (Sampling { temperature: -0.1, ..PLAIN }, "temperature", "-0.1"),
            (Sampling { temperature: f32::NAN, ..PLAIN }, "temperature", "NaN"),
            (Sampling { temperature: f32::INFINITY, ..PLAIN }, "temperature", "inf"),
            (Sampling { top_p: 0.0, ..PLAIN }, "top_p", "0"),
            (Sampling { top_p: 1.5, ..PLAIN }, "top_p", "1.5"),
            (Sampling { top_p: f32::NAN, ..PLAIN }, "top_p", "NaN"),
            (Sampling { min_p: -0.25, ..PLAIN }, "min_p", "-0.25"),
            (Sampling { min_p: 1.25, ..PLAIN }, "min_p", "1.25"),
            (Sampling { min_p: f32::NAN, ..PLAIN }, "min_p", "NaN"),
            (penalized(Penalties { repetition: 0.0, ..Penalties::NONE }), "repetition_penalty", "0"),
            (penalized(Penalties { presence: f32::NAN, ..Penalties::NONE }), "presence_penalty", "NaN"),
            (
                penalized(Penalties { frequency: f32::INFINITY, ..Penalties::NONE }),
                "frequency_penalty",
                "inf",
            ),
        ];
        for (sampling, param, value) in refused {
            let (named, message) = validate(&sampling).expect_err(param);
            assert_eq!(named, param);
            assert!(message.starts_with(&format!("{param} is {value} ")), "{message}");
        }
    }

    #[test]
    fn every_field_reaches_the_row() {
        let penalties = Penalties { repetition: 1.5, presence: 0.5, frequency: -0.5 };
        let seed = u64::MAX - 1;
        let sampling = Sampling { temperature: 0.75, top_k: 40, top_p: 0.9, min_p: 0.05, penalties, seed };
        let expected = SamplingParams {
            mode: SampleMode::Sample,
            position: 17,
            seed: u64::MAX - 1,
            temperature: 0.75,
            top_k: 40,
            top_p: 0.9,
            min_p: 0.05,
            penalties,
            bias_at: 0,
            bias_len: 0,
            masked: false,
            logprob: true,
            top_logprobs: 5,
        };
        assert_eq!(sample_row(&sampling, 17, Some(5)), expected);
        assert_eq!(sample_row(&sampling, 17, Some(0)), SamplingParams { top_logprobs: 0, ..expected });
        let silent = SamplingParams { logprob: false, top_logprobs: 0, ..expected };
        assert_eq!(sample_row(&sampling, 17, None), silent);
    }
}
