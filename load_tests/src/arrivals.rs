//! When requests are due: all at once, at a constant interval, or as a Poisson process.
//!
//! Invariant: the times are fixed before the first request is sent.

use std::{fmt, str::FromStr, time::Duration};

use crate::draws::Draws;

/// An arrival process. Its text form, with gaps in milliseconds: `all`, `constant:500`, `poisson:50`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Arrivals {
    AllAtOnce,
    Constant { gap: Duration },
    Poisson { mean_gap: Duration },
}

impl Arrivals {
    /// When each of `count` requests is due, from the start of the run, ascending; the first at once.
    pub fn schedule(&self, count: usize, draws: &mut Draws) -> Vec<Duration> {
        let mut due = Duration::ZERO;
        (0..count)
            .map(|index| {
                if index > 0 {
                    due = due.saturating_add(self.next_gap(draws));
                }
                due
            })
            .collect()
    }

    fn next_gap(&self, draws: &mut Draws) -> Duration {
        match *self {
            Arrivals::AllAtOnce => Duration::ZERO,
            Arrivals::Constant { gap } => gap,
            // 1 - u lies in (0, 1]: the logarithm is finite.
            Arrivals::Poisson { mean_gap } => mean_gap.mul_f64(-(1.0 - draws.unit()).ln()),
        }
    }

    /// Requests per second on the mean; infinite for all at once.
    pub fn rate(&self) -> f64 {
        match self {
            Arrivals::AllAtOnce => f64::INFINITY,
            Arrivals::Constant { gap } => 1.0 / gap.as_secs_f64(),
            Arrivals::Poisson { mean_gap } => 1.0 / mean_gap.as_secs_f64(),
        }
    }
}

impl FromStr for Arrivals {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.split_once(':') {
            None if text == "all" => Ok(Arrivals::AllAtOnce),
            Some(("constant", gap)) => Ok(Arrivals::Constant { gap: parse_gap(gap)? }),
            Some(("poisson", gap)) => Ok(Arrivals::Poisson { mean_gap: parse_gap(gap)? }),
            _ => Err("expected all, constant:MS or poisson:MS".into()),
        }
    }
}

/// A gap in milliseconds, fractions allowed: from a microsecond to a day.
fn parse_gap(text: &str) -> Result<Duration, String> {
    let gap_ms: f64 = text.parse().map_err(|_| format!("'{text}' is not a number of milliseconds"))?;
    if !(0.001..=86_400_000.0).contains(&gap_ms) {
        return Err(format!("a gap of {gap_ms} ms is not within 0.001 and 86400000"));
    }
    Ok(Duration::from_secs_f64(gap_ms / 1e3))
}

impl fmt::Display for Arrivals {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Arrivals::AllAtOnce => write!(f, "all"),
            Arrivals::Constant { gap } => write!(f, "constant:{}", gap.as_secs_f64() * 1e3),
            Arrivals::Poisson { mean_gap } => write!(f, "poisson:{}", mean_gap.as_secs_f64() * 1e3),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::draws::Purpose;

    fn schedule(arrivals: Arrivals, count: usize, seed: u64) -> Vec<Duration> {
        arrivals.schedule(count, &mut Draws::new(seed, Purpose::Arrivals))
    }

    #[test]
    fn poisson_gaps_are_exponential() {
        let mean_gap = Duration::from_millis(50);
        let times = schedule(Arrivals::Poisson { mean_gap }, 40_001, 11);
        let gaps: Vec<f64> = times.windows(2).map(|w| (w[1] - w[0]).as_secs_f64() / 0.05).collect();
        let n = gaps.len() as f64;
        let mean = gaps.iter().sum::<f64>() / n;
        let variance = gaps.iter().map(|g| (g - mean).powi(2)).sum::<f64>() / n;
        let share_above_two = gaps.iter().filter(|&&g| g > 2.0).count() as f64 / n;
        assert!((mean - 1.0).abs() < 0.02, "{mean}");
        assert!((variance - 1.0).abs() < 0.05, "{variance}");
        assert!((share_above_two - (-2.0f64).exp()).abs() < 0.01, "{share_above_two}");
        // No memory: a gap says nothing about the next.
        let covariance = gaps.windows(2).map(|w| (w[0] - mean) * (w[1] - mean)).sum::<f64>() / n;
        assert!(covariance.abs() < 0.02, "{covariance}");
    }

    #[test]
    fn the_seed_decides() {
        let poisson = Arrivals::Poisson { mean_gap: Duration::from_millis(20) };
        assert_eq!(schedule(poisson, 100, 5), schedule(poisson, 100, 5));
        assert_ne!(schedule(poisson, 100, 5), schedule(poisson, 100, 6));
        assert_eq!(schedule(poisson, 100, 5)[..50], schedule(poisson, 50, 5));
    }

    #[test]
    fn constant_and_all_at_once_are_exact() {
        let gap = Duration::from_millis(500);
        assert_eq!(schedule(Arrivals::Constant { gap }, 32, 0)[31], Duration::from_millis(15_500));
        assert_eq!(schedule(Arrivals::AllAtOnce, 3, 0), [Duration::ZERO; 3]);
    }

    #[test]
    fn text_form_goes_both_ways_and_nonsense_is_refused() {
        for text in ["all", "constant:500", "poisson:0.5"] {
            assert_eq!(text.parse::<Arrivals>().map(|a| a.to_string()), Ok(text.to_string()));
        }
        for text in
            ["", "all:5", "constant", "poisson:", "poisson:0", "poisson:-1", "poisson:NaN", "constant:inf"]
        {
            assert!(text.parse::<Arrivals>().is_err(), "{text}");
        }
    }
}
