//! When requests are due: at once, evenly, at random, along a ramp, as in a trace; or whenever a user is ready.
//!
//! Invariant: in an open loop the times are fixed before the first request is sent, and the first is due at once.

mod ramp;
#[cfg(test)]
mod tests;
mod text;

use std::{sync::Arc, time::Duration};

use rand_distr::{Distribution, Exp1, Gamma};

use super::draws::Draws;
use ramp::Ramp;

/// An arrival process. Text forms, with R a rate such as `20/s` or a mean gap such as `50ms` (a bare number is
/// milliseconds): `all`, `constant:R`, `poisson:R`, `gamma:R:SHAPE`, `ramp:RATE-RATE:TIME`,
/// `ramp-exponential:RATE-RATE:TIME`, `users:N`, `users:N:THINK`. A RATE is a number per second, with or without
/// `/s`; times have the unit us, ms or s. A trace has no text form: it shows as `trace`, which cannot be read.
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
    /// Only a linear ramp can begin at 0, and none can end there.
    Ramp {
        from: f64,
        to: f64,
        over: Duration,
        kind: RampKind,
    },
    /// As a trace has them: ascending, at least one. One that is shorter than the run begins anew after its end.
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
    /// When each of `count` requests is due. A longer schedule begins with the shorter ones.
    pub fn schedule(&self, count: usize, draws: &mut Draws) -> Schedule {
        Schedule::Open(match *self {
            Arrivals::AllAtOnce => vec![Duration::ZERO; count],
            Arrivals::Constant { gap } => (0..count).map(|index| times(gap, index as f64)).collect(),
            Arrivals::Poisson { mean_gap } => {
                sums(Exp1, count, draws).map(|sum| times(mean_gap, sum)).collect()
            }
            Arrivals::Gamma { mean_gap, shape } => {
                let gaps = Gamma::new(shape, 1.0 / shape).expect("shapes are above 0; this is a bug");
                sums(gaps, count, draws).map(|sum| times(mean_gap, sum)).collect()
            }
            Arrivals::Ramp { from, to, over, kind } => {
                let ramp = Ramp { from, to, over_s: over.as_secs_f64(), kind };
                sums(Exp1, count, draws).map(|sum| ramp.when(sum)).collect()
            }
            Arrivals::Trace(ref recorded) => repeated(recorded, count),
            Arrivals::Users { count, think } => return Schedule::Closed { users: count, think },
        })
    }

    /// Requests per second on the mean, where that is told beforehand; infinite for all at once. `None` for a ramp,
    /// a trace of one request, and a closed loop.
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

    /// Shape of the gaps' gamma distribution: 1 for Poisson, infinite for a constant gap; `None` where the gaps
    /// have no such distribution.
    pub fn burstiness(&self) -> Option<f64> {
        match *self {
            Arrivals::Constant { .. } => Some(f64::INFINITY),
            Arrivals::Poisson { .. } => Some(1.0),
            Arrivals::Gamma { shape, .. } => Some(shape),
            _ => None,
        }
    }

    /// The same process with every gap (and ramp and think time) `factor` times as long. The factor is above 0.
    pub fn stretched(&self, factor: f64) -> Self {
        assert!(factor > 0.0, "no gap is {factor} times as long; this is a bug");
        match *self {
            Arrivals::AllAtOnce => Arrivals::AllAtOnce,
            Arrivals::Constant { gap } => Arrivals::Constant { gap: times(gap, factor) },
            Arrivals::Poisson { mean_gap } => Arrivals::Poisson { mean_gap: times(mean_gap, factor) },
            Arrivals::Gamma { mean_gap, shape } => {
                Arrivals::Gamma { mean_gap: times(mean_gap, factor), shape }
            }
            Arrivals::Ramp { from, to, over, kind } => {
                Arrivals::Ramp { from: from / factor, to: to / factor, over: times(over, factor), kind }
            }
            Arrivals::Trace(ref recorded) => {
                Arrivals::Trace(recorded.iter().map(|&due| times(due, factor)).collect())
            }
            Arrivals::Users { count, think } => Arrivals::Users { count, think: times(think, factor) },
        }
    }
}

/// `duration` times `factor`, to the nanosecond; at most 584 years.
fn times(duration: Duration, factor: f64) -> Duration {
    Duration::from_nanos((duration.as_nanos() as f64 * factor).round() as u64)
}

/// The sums of none, one, two and more gaps, whose mean is 1. Scaled once each, they round once each.
fn sums(gaps: impl Distribution<f64>, count: usize, draws: &mut Draws) -> impl Iterator<Item = f64> {
    let mut sum = 0.0;
    (0..count).map(move |index| {
        if index > 0 {
            sum += gaps.sample(draws);
        }
        sum
    })
}

/// The recorded times over and over, a mean gap apart.
fn repeated(recorded: &[Duration], count: usize) -> Vec<Duration> {
    let (Some(&last), Some(gap)) = (recorded.last(), mean_gap(recorded)) else {
        panic!("a trace has entries; this is a bug");
    };
    let due = |index: usize| {
        let (round, place) = (index / recorded.len(), index % recorded.len());
        recorded[place].saturating_add(times(last.saturating_add(gap), round as f64))
    };
    (0..count).map(due).collect()
}

/// The mean gap of recorded times; zero of a single one, `None` of none.
fn mean_gap(recorded: &[Duration]) -> Option<Duration> {
    let gaps = recorded.len().saturating_sub(1).max(1) as f64;
    recorded.last().map(|&last| times(last, 1.0 / gaps))
}
