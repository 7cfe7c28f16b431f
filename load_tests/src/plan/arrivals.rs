//! When requests are due: all at once, at a constant interval, or as a Poisson process.
//!
//! Invariant: the times are fixed before the first request is sent.

use std::{fmt, str::FromStr, sync::Arc, time::Duration};

use super::draws::Draws;

/// An arrival process. Text forms, with R a rate such as `20/s` or a mean gap such as `50ms` (a bare number is
/// milliseconds): `all`, `constant:R`, `poisson:R`, `gamma:R:SHAPE`, `ramp:RATE-RATE:TIME`,
/// `ramp-exponential:RATE-RATE:TIME`, `users:N`, `users:N:THINK`.
#[derive(Clone, Debug, PartialEq)]
pub enum Arrivals {
    AllAtOnce,
    Constant {
        gap: Duration,
    },
    Poisson {
        mean_gap: Duration,
    },
    /// Gamma-distributed gaps: the shape is 1 for Poisson, less for bursts, more for regularity.
    Gamma {
        mean_gap: Duration,
        shape: f64,
    },
    /// A Poisson process whose rate goes from one value (per second) to another over a time, and stays there.
    Ramp {
        from: f64,
        to: f64,
        over: Duration,
        kind: RampKind,
    },
    /// As a trace has them.
    Trace(Arc<[Duration]>),
    /// A closed loop: each of so many users sends a request, reads its end, thinks, and sends the next.
    Users {
        count: usize,
        think: Duration,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RampKind {
    Linear,
    Exponential,
}

/// When requests are to be sent.
#[derive(Clone, Debug, PartialEq)]
pub enum Schedule {
    /// From the start of the run, ascending, the first at once.
    Open(Vec<Duration>),
    /// A request is due when its user is ready for it.
    Closed { users: usize, think: Duration },
}

impl Arrivals {
    /// When each of `count` requests is due.
    pub fn schedule(&self, _count: usize, _draws: &mut Draws) -> Schedule {
        todo!()
    }

    /// Requests per second on the mean, where that is told beforehand; infinite for all at once.
    pub fn rate(&self) -> Option<f64> {
        todo!()
    }

    /// The same process with every gap (and ramp and think time) `factor` times as long.
    pub fn stretched(&self, _factor: f64) -> Self {
        todo!()
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
    fn fmt(&self, _f: &mut fmt::Formatter<'_>) -> fmt::Result {
        todo!()
    }
}
