//! Scaling of a paper's times and lengths to the model under test.
//!
//! Invariant: all times of a scenario are scaled by the same factor, which preserves the overlap of requests.

use std::time::Duration;

use super::file::{ArrivalKind, PaperReference, Scenario, Variant, VariedParameter};
use crate::plan::{arrivals::Arrivals, lengths::LengthDistribution};

/// The scale factors of a scenario.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScenarioScale {
    /// Factor of response lengths.
    pub tokens: f64,
    /// Factor of gaps between requests and of windows.
    pub time: f64,
    /// Measured latency of a single request without load.
    pub solo: Duration,
}

/// The parameters of a run's load that depend on scaling and the varied parameter.
#[derive(Clone, Debug, PartialEq)]
pub struct RowLoad {
    pub requests: usize,
    pub output: LengthDistribution,
    pub arrivals: Arrivals,
}

/// Minimum gap after scaling, so that no gap becomes zero.
const GAP_MIN: Duration = Duration::from_nanos(1);

impl ScenarioScale {
    /// Computes the scale from the paper's latency of a single request and the measured latency `solo`.
    pub fn from_solo(paper: Option<&PaperReference>, tokens: f64, solo: Duration) -> ScenarioScale {
        let time = paper.map_or(1.0, |paper| solo.as_secs_f64() * 1e3 / paper.solo_ms.get_ref());
        ScenarioScale { tokens, time, solo }
    }

    /// Scales a time given in the paper's milliseconds.
    pub fn time(&self, ms: f64) -> Duration {
        Duration::from_secs_f64(ms * self.time / 1e3).max(GAP_MIN)
    }
}

/// Scales a response length; the result is at least 1.
pub fn scaled_tokens(tokens: u32, scale: f64) -> u32 {
    (f64::from(tokens) * scale).round().max(1.0) as u32
}

impl Scenario {
    /// Returns the scaled response length of the single request: the paper's, else the maximum of the load.
    pub fn solo_tokens(&self, scale: f64) -> u32 {
        let tokens = self.paper.as_ref().map_or(&self.load.output_tokens, |paper| &paper.solo_tokens);
        scaled_tokens(*tokens.get_ref(), scale)
    }

    /// Returns the varied value of a row, or `None` if nothing is varied.
    pub fn value(&self, row: usize) -> Option<f64> {
        self.vary.as_ref().map(|vary| vary.values.get_ref()[row])
    }

    /// Returns the scaled load parameters of a row.
    pub fn shape(&self, row: usize, scale: &ScenarioScale) -> RowLoad {
        let load = &self.load;
        let varied = |what| {
            let vary = self.vary.as_ref().filter(|vary| *vary.what.get_ref() == what)?;
            Some(vary.values.get_ref()[row])
        };
        let requests =
            varied(VariedParameter::Requests).map_or(*load.requests.get_ref(), |value| value as usize);
        let most =
            varied(VariedParameter::OutputTokens).map_or(*load.output_tokens.get_ref(), |value| value as u32);
        let high = scaled_tokens(most, scale.tokens);
        let output = match &load.output_tokens_min {
            Some(min) => {
                LengthDistribution::Uniform { low: scaled_tokens(*min.get_ref(), scale.tokens), high }
            }
            None => LengthDistribution::Fixed(high),
        };
        let gap_ms = varied(VariedParameter::GapMs).or(load.gap_ms.as_ref().map(|gap| *gap.get_ref()));
        RowLoad { requests, output, arrivals: self.arrivals(gap_ms, scale) }
    }

    fn arrivals(&self, gap_ms: Option<f64>, scale: &ScenarioScale) -> Arrivals {
        let gap = scale.time(gap_ms.unwrap_or(0.0));
        match self.load.process.get_ref() {
            ArrivalKind::All => Arrivals::AllAtOnce,
            ArrivalKind::Constant => Arrivals::Constant { gap },
            ArrivalKind::Poisson => Arrivals::Poisson { mean_gap: gap },
            ArrivalKind::Gamma => {
                let shape = self.load.shape.as_ref().map_or(1.0, |shape| *shape.get_ref());
                Arrivals::Gamma { mean_gap: gap, shape }
            }
        }
    }

    /// Estimates the duration of a row on a variant in seconds: until the last request is due, plus the
    /// remaining work. The `concurrent` policy steps each request alone, so it takes at least the sum over
    /// all requests.
    pub fn estimate(&self, variant: &Variant, row: usize, scale: &ScenarioScale) -> f64 {
        let RowLoad { requests, output, arrivals } = self.shape(row, scale);
        let gap = match arrivals {
            Arrivals::Constant { gap } => gap,
            Arrivals::Poisson { mean_gap } | Arrivals::Gamma { mean_gap, .. } => mean_gap,
            _ => Duration::ZERO,
        };
        let (mean, most) = match output {
            LengthDistribution::Uniform { low, high } => {
                ((f64::from(low) + f64::from(high)) / 2.0, f64::from(high))
            }
            LengthDistribution::Fixed(tokens) => (f64::from(tokens), f64::from(tokens)),
            LengthDistribution::Lognormal { median, max, .. } => (median, f64::from(max)),
        };
        let solo_per_token = scale.solo.as_secs_f64() / f64::from(self.solo_tokens(scale.tokens));
        let due = gap.as_secs_f64() * requests.saturating_sub(1) as f64;
        let window = variant.window_ms.map_or(0.0, |ms| scale.time(ms).as_secs_f64());
        let fused = due + window + most * solo_per_token;
        let alone = requests as f64 * mean * solo_per_token;
        let is_alone = variant.policy.as_deref() == Some("concurrent");
        if is_alone { fused.max(alone) } else { fused }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scenario(load: &str, vary: &str) -> Scenario {
        let text = format!(
            "title = \"t\"\n[load]\nrequests = 32\nprompt_tokens = 8\n{load}\n\
             [paper]\nsolo_ms = 5600\nsolo_tokens = 504\n{vary}\n\
             [[variant]]\nname = \"fused\"\n[[variant]]\nname = \"alone\"\npolicy = \"concurrent\"\n\
             [[variant]]\nname = \"window\"\npolicy = \"window\"\nwindow_ms = 2000"
        );
        Scenario::parse("f", &text).unwrap()
    }

    fn vary(what: &str, values: &str) -> String {
        format!("[vary]\nwhat = \"{what}\"\nvalues = [{values}]\nlabel = \"x\"")
    }

    fn scale(scenario: &Scenario, tokens: f64, solo_ms: u64) -> ScenarioScale {
        ScenarioScale::from_solo(scenario.paper.as_ref(), tokens, Duration::from_millis(solo_ms))
    }

    #[test]
    fn a_gap_is_to_ours_as_the_papers_solo_time_is_to_ours() {
        let fixed = scenario("output_tokens = 504\nprocess = \"constant\"\ngap_ms = 500", "");
        let shape = fixed.shape(0, &scale(&fixed, 0.25, 700));
        assert_eq!(shape.arrivals, Arrivals::Constant { gap: Duration::from_micros(62_500) });
        assert_eq!((shape.requests, shape.output), (32, LengthDistribution::Fixed(126)));
        assert_eq!(fixed.solo_tokens(0.25), 126);
        // At the paper's own speed nothing is scaled.
        let same = fixed.shape(0, &scale(&fixed, 1.0, 5600));
        assert_eq!(same.arrivals, Arrivals::Constant { gap: Duration::from_millis(500) });
        let unscaled = ScenarioScale::from_solo(None, 1.0, Duration::from_millis(3));
        assert_eq!(unscaled.time(500.0), Duration::from_millis(500));
        assert_eq!(scale(&fixed, 1.0, 0).time(500.0), GAP_MIN);
    }

    #[test]
    fn what_is_varied_goes_before_the_load() {
        let load = "output_tokens = 512\noutput_tokens_min = 128\nprocess = \"poisson\"\ngap_ms = 500";
        let bounds = scenario(load, &vary("output-tokens", "512, 2048"));
        let half = |scenario: &Scenario, row| scenario.shape(row, &scale(scenario, 0.5, 2800));
        assert_eq!(half(&bounds, 1).output, LengthDistribution::Uniform { low: 64, high: 1024 });
        let poisson = |ms| Arrivals::Poisson { mean_gap: Duration::from_millis(ms) };
        assert_eq!((half(&bounds, 0).arrivals, bounds.value(1)), (poisson(250), Some(2048.0)));
        let gaps = scenario(load, &vary("gap-ms", "20, 5000"));
        assert_eq!((half(&gaps, 0).arrivals, half(&gaps, 1).arrivals), (poisson(10), poisson(2500)));
        let gamma = load.replace("poisson\"", "gamma\"\nshape = 0.5");
        let requests = scenario(&gamma, &vary("requests", "1, 16"));
        let arrivals = Arrivals::Gamma { mean_gap: Duration::from_millis(250), shape: 0.5 };
        assert_eq!((half(&requests, 1).requests, half(&requests, 1).arrivals), (16, arrivals));
    }

    #[test]
    fn no_answer_is_scaled_to_nothing() {
        assert_eq!((scaled_tokens(504, 0.0001), scaled_tokens(7, 0.5), scaled_tokens(7, 3.0)), (1, 4, 21));
    }

    /// At the paper's scale: 31 gaps of 500 ms and a request of 5.6 s, plus a window of 2 s, or 32 requests
    /// in sequence.
    #[test]
    fn times_are_estimated_by_what_must_be_waited_for() {
        let fixed = scenario("output_tokens = 504\nprocess = \"constant\"\ngap_ms = 500", "");
        let scale = scale(&fixed, 1.0, 5600);
        let estimates = [0, 1, 2].map(|n| fixed.estimate(&fixed.variants[n], 0, &scale).round());
        assert_eq!(estimates, [21.0, 179.0, 23.0]);
    }
}
