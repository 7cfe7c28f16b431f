//! Arrival processes: the due times of requests.
//!
//! Invariant: in an open loop the due times are fixed before the first request is sent, and the first is due
//! at once.

mod ramp;
#[cfg(test)]
mod tests;
mod text;

use std::{sync::Arc, time::Duration};

use rand_distr::{Distribution, Exp1, Gamma};

use super::random::RandomStream;
use ramp::Ramp;

/// An arrival process.
///
/// Text forms, with R a rate such as `20/s` or a mean gap such as `50ms` (a bare number is milliseconds):
/// `all`, `constant:R`, `poisson:R`, `gamma:R:SHAPE`, `ramp:RATE-RATE:TIME`,
/// `ramp-exponential:RATE-RATE:TIME`, `users:N`, `users:N:THINK`. A RATE is a number per second, with or
/// without `/s`; times have the unit us, ms or s. A trace is displayed as `trace`, which cannot be parsed.
#[derive(Clone, Debug, PartialEq)]
pub enum Arrivals {
    AllAtOnce,
    Constant {
        gap: Duration,
    },
    Poisson {
        mean_gap: Duration,
    },
    /// Gamma-distributed gaps: shape 1 is Poisson, smaller shapes are burstier, larger ones more regular.
    Gamma {
        mean_gap: Duration,
        shape: f64,
    },
    /// A Poisson process whose rate (per second) changes from one value to another over a time and then stays
    /// constant. Only a linear ramp can start at 0, and none can end there.
    Ramp {
        from: f64,
        to: f64,
        over: Duration,
        kind: RampKind,
    },
    /// Recorded due times, ascending, at least one. A trace shorter than the run is repeated.
    Trace(Arc<[Duration]>),
    /// A closed loop: each of `count` users sends a request, waits for the complete response, pauses for the
    /// think time, and sends the next.
    Users {
        count: usize,
        think: Duration,
    },
}

/// The shape of a rate ramp over time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RampKind {
    Linear,
    Exponential,
}

/// The due times of the requests of a run.
#[derive(Clone, Debug, PartialEq)]
pub enum Schedule {
    /// Open loop: due times since the start of the run, ascending, starting at 0.
    Open(Vec<Duration>),
    /// Closed loop: a request is due when its user is ready to send it.
    Closed { users: usize, think: Duration },
}

impl Arrivals {
    /// Computes the due times of `count` requests. A shorter schedule is a prefix of a longer one.
    pub fn schedule(&self, count: usize, draws: &mut RandomStream) -> Schedule {
        Schedule::Open(match *self {
            Arrivals::AllAtOnce => vec![Duration::ZERO; count],
            Arrivals::Constant { gap } => (0..count).map(|index| scale_duration(gap, index as f64)).collect(),
            Arrivals::Poisson { mean_gap } => {
                cumulative_gaps(Exp1, count, draws).map(|sum| scale_duration(mean_gap, sum)).collect()
            }
            Arrivals::Gamma { mean_gap, shape } => {
                let gaps = Gamma::new(shape, 1.0 / shape).expect("shapes are above 0");
                cumulative_gaps(gaps, count, draws).map(|sum| scale_duration(mean_gap, sum)).collect()
            }
            Arrivals::Ramp { from, to, over, kind } => {
                let ramp = Ramp { from, to, over_s: over.as_secs_f64(), kind };
                cumulative_gaps(Exp1, count, draws).map(|sum| ramp.time_at(sum)).collect()
            }
            Arrivals::Trace(ref recorded) => repeat_times(recorded, count),
            Arrivals::Users { count, think } => return Schedule::Closed { users: count, think },
        })
    }

    /// Returns the mean rate in requests per second, infinite for all at once, or `None` for a ramp, a trace
    /// of one request, and a closed loop.
    pub fn rate(&self) -> Option<f64> {
        match self {
            Arrivals::AllAtOnce => Some(f64::INFINITY),
            Arrivals::Constant { gap: mean_gap }
            | Arrivals::Poisson { mean_gap }
            | Arrivals::Gamma { mean_gap, .. } => Some(1.0 / mean_gap.as_secs_f64()),
            Arrivals::Trace(recorded) if recorded.len() > 1 => {
                mean_gap(recorded).map(|gap| 1.0 / gap.as_secs_f64())
            }
            Arrivals::Trace(_) | Arrivals::Ramp { .. } | Arrivals::Users { .. } => None,
        }
    }

    /// Returns the shape of the gamma distribution of gaps: 1 for Poisson, infinite for a constant gap,
    /// `None` if the gaps are not gamma-distributed.
    pub fn burstiness(&self) -> Option<f64> {
        match *self {
            Arrivals::Constant { .. } => Some(f64::INFINITY),
            Arrivals::Poisson { .. } => Some(1.0),
            Arrivals::Gamma { shape, .. } => Some(shape),
            _ => None,
        }
    }

    /// Returns the process with every gap, ramp duration and think time multiplied by `factor`, which must be
    /// above 0.
    pub fn scaled(&self, factor: f64) -> Self {
        assert!(factor > 0.0, "the factor {factor} is not above 0");
        match *self {
            Arrivals::AllAtOnce => Arrivals::AllAtOnce,
            Arrivals::Constant { gap } => Arrivals::Constant { gap: scale_duration(gap, factor) },
            Arrivals::Poisson { mean_gap } => {
                Arrivals::Poisson { mean_gap: scale_duration(mean_gap, factor) }
            }
            Arrivals::Gamma { mean_gap, shape } => {
                Arrivals::Gamma { mean_gap: scale_duration(mean_gap, factor), shape }
            }
            Arrivals::Ramp { from, to, over, kind } => Arrivals::Ramp {
                from: from / factor,
                to: to / factor,
                over: scale_duration(over, factor),
                kind,
            },
            Arrivals::Trace(ref recorded) => {
                Arrivals::Trace(recorded.iter().map(|&due| scale_duration(due, factor)).collect())
            }
            Arrivals::Users { count, think } => {
                Arrivals::Users { count, think: scale_duration(think, factor) }
            }
        }
    }
}

/// Multiplies a duration by `factor`, rounding to the nanosecond; the result is at most 584 years.
fn scale_duration(duration: Duration, factor: f64) -> Duration {
    Duration::from_nanos((duration.as_nanos() as f64 * factor).round() as u64)
}

/// Returns the cumulative sums of 0, 1, 2, ... gaps of mean 1. The caller scales each sum, so that each is
/// rounded only once.
fn cumulative_gaps(
    gaps: impl Distribution<f64>,
    count: usize,
    draws: &mut RandomStream,
) -> impl Iterator<Item = f64> {
    let mut sum = 0.0;
    (0..count).map(move |index| {
        if index > 0 {
            sum += gaps.sample(draws);
        }
        sum
    })
}

/// Repeats the recorded times up to `count`, with a mean gap between repetitions.
fn repeat_times(recorded: &[Duration], count: usize) -> Vec<Duration> {
    let (Some(&last), Some(gap)) = (recorded.last(), mean_gap(recorded)) else {
        panic!("a trace has at least one entry");
    };
    let due = |index: usize| {
        let (round, place) = (index / recorded.len(), index % recorded.len());
        recorded[place].saturating_add(scale_duration(last.saturating_add(gap), round as f64))
    };
    (0..count).map(due).collect()
}

/// Returns the mean gap of recorded times: zero for a single one, `None` for none.
fn mean_gap(recorded: &[Duration]) -> Option<Duration> {
    let gaps = recorded.len().saturating_sub(1).max(1) as f64;
    recorded.last().map(|&last| scale_duration(last, 1.0 / gaps))
}
