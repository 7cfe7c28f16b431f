//! Detects whether the server of an open loop falls behind.
//!
//! High latency alone is not lag, nor is a temporary increase. The criterion is that the state worsens as
//! long as requests arrive: either the time to first token keeps growing (all slots of the server are busy),
//! or the number of requests in flight keeps growing (slots are free, but the server completes requests more
//! slowly than they arrive). Both are slopes over the run, estimated as the median of the slopes between all
//! pairs of points (Theil-Sen estimator), which is robust against outliers. The first quarter of the run, in
//! which the server fills, is ignored.
//!
//! Invariant: the result depends only on when requests were due and sent, their first tokens, and their ends.

use std::{fmt, time::Duration};

use crate::sample::Sample;

/// Initial fraction of the run that is ignored while the server fills.
const WARMUP_FRACTION: f64 = 0.25;
/// Minimum growth of a wait in seconds per second; slower growth is noise.
const WAIT_GROWTH_MIN: f64 = 0.05;
/// Minimum growth of a wait over the run, as a multiple of the latency of the lowest step.
const WAIT_GROWTH_LATENCIES: f64 = 0.5;
/// Minimum fraction of arriving requests that stay in flight; below it, the number in flight may still
/// converge.
const PILE_SHARE_MIN: f64 = 0.3;
/// Minimum growth of the number in flight, as the arrivals within this many latencies of the lowest step.
const PILE_LATENCIES: f64 = 3.0;

/// Minimum number of points for a slope.
const POINTS_MIN: usize = 10;
/// Maximum number of points, because all pairs are evaluated; more points are downsampled.
const POINTS_MAX: usize = 150;

/// The way in which an open loop falls behind.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Lag {
    /// The generator falls behind: the send delay grows by this many seconds per second.
    Late(f64),
    /// The time to first token grows by this many seconds per second.
    Waiting(f64),
    /// This fraction of the arriving requests stays in flight.
    PilingUp(f64),
}

impl fmt::Display for Lag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Lag::Late(slope) => {
                write!(f, "the send delay of the load generator grows by {slope:.2} s per second")
            }
            Lag::Waiting(slope) => write!(f, "TTFT grows by {slope:.2} s per second"),
            Lag::PilingUp(share) => write!(f, "{:.0} % of the arriving requests pile up", share * 100.0),
        }
    }
}

/// Returns how the server falls behind, if it does. `latency_s` is the latency at low load in seconds.
pub(super) fn lag(samples: &[Sample], latency_s: f64) -> Option<Lag> {
    let mut samples: Vec<&Sample> = samples.iter().collect();
    samples.sort_by_key(|sample| sample.scheduled);
    let over_s = samples.last()?.scheduled.as_secs_f64();
    let judged_s = over_s * (1.0 - WARMUP_FRACTION);
    let slope_of = |value: &dyn Fn(&Sample) -> Option<f64>| {
        let points = samples.iter().map(|sample| (sample.scheduled.as_secs_f64(), value(sample)));
        let points = points.filter_map(|(at, value)| Some((at, value?)));
        slope(&points.filter(|(at, _)| *at >= over_s * WARMUP_FRACTION).collect::<Vec<_>>()).unwrap_or(0.0)
    };
    let grows = |slope: f64| slope > WAIT_GROWTH_MIN && slope * judged_s > WAIT_GROWTH_LATENCIES * latency_s;
    let wait = slope_of(&|sample| sample.ttft().map(|ttft| ttft.as_secs_f64()));
    let late = slope_of(&|sample| Some(sample.lateness().as_secs_f64()));
    if grows(late) && late > wait / 2.0 {
        return Some(Lag::Late(late));
    }
    if grows(wait) {
        return Some(Lag::Waiting(wait));
    }
    let in_flight = PendingRequests::from_samples(&samples);
    let share =
        slope_of(&|sample| Some(in_flight.count_at(sample.scheduled))) * over_s / samples.len() as f64;
    // By Little's law, the growth corresponds to the arrivals within `share` of the time.
    let piles = share > PILE_SHARE_MIN && share * judged_s > PILE_LATENCIES * latency_s;
    piles.then_some(Lag::PilingUp(share))
}

/// The number of requests that are due and not ended, as a function of time.
struct PendingRequests {
    due: Vec<Duration>,
    ended: Vec<Duration>,
}

impl PendingRequests {
    fn from_samples(samples: &[&Sample]) -> Self {
        let mut due: Vec<Duration> = samples.iter().map(|sample| sample.scheduled).collect();
        let mut ended: Vec<Duration> = samples.iter().map(|sample| sample.ended).collect();
        due.sort();
        ended.sort();
        Self { due, ended }
    }

    fn count_at(&self, time: Duration) -> f64 {
        let until = |times: &[Duration]| times.partition_point(|other| *other <= time) as f64;
        until(&self.due) - until(&self.ended)
    }
}

/// Returns the Theil-Sen slope of points with ascending x: the median of the slopes between all pairs.
/// Returns `None` if there are too few points.
fn slope(points: &[(f64, f64)]) -> Option<f64> {
    if points.len() < POINTS_MIN {
        return None;
    }
    let points = downsample(points);
    let pairs =
        points.iter().enumerate().flat_map(|(n, one)| points[n + 1..].iter().map(move |two| (one, two)));
    let slopes = pairs.filter(|(one, two)| two.0 > one.0).map(|(one, two)| (two.1 - one.1) / (two.0 - one.0));
    let mut slopes: Vec<f64> = slopes.collect();
    let middle = slopes.len() / 2;
    (!slopes.is_empty()).then(|| *slopes.select_nth_unstable_by(middle, f64::total_cmp).1)
}

/// Selects at most [`POINTS_MAX`] evenly spaced points, including the first and the last.
fn downsample(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    if points.len() <= POINTS_MAX {
        return points.to_vec();
    }
    (0..POINTS_MAX).map(|n| points[n * (points.len() - 1) / (POINTS_MAX - 1)]).collect()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::{
        plan::random::{Purpose, RandomStream},
        sample::Delivery,
        testing::sample,
    };

    /// Returns the arrival times of a Poisson process in seconds.
    fn poisson(rate: f64, count: usize, draws: &mut RandomStream) -> Vec<f64> {
        let gaps = (0..count).map(|_| -(1.0 - draws.unit()).ln() / rate);
        gaps.scan(0.0, |at, gap| Some(std::mem::replace(at, *at + gap))).collect()
    }

    pub fn constant(rate: f64, count: usize) -> Vec<f64> {
        (0..count).map(|n| n as f64 / rate).collect()
    }

    /// Simulates a server with one slot, where each request takes a second.
    pub fn queue(arrivals: &[f64]) -> Vec<Sample> {
        let served = |free: &mut f64, (index, &at): (usize, &f64)| {
            let begun = free.max(at);
            *free = begun + 1.0;
            Some(sample(index, at, begun + 0.1, *free))
        };
        arrivals.iter().enumerate().scan(0.0, served).collect()
    }

    /// Simulates a fused loop: a step takes `step_s` plus `row_s` per request, and each request needs
    /// `tokens` steps.
    fn fused(arrivals: &[f64], slots: usize, step_s: f64, row_s: f64, tokens: &[u32]) -> Vec<Sample> {
        let (mut now, mut come, mut live, mut samples) = (0.0, 0, Vec::new(), Vec::new());
        while samples.len() < arrivals.len() {
            while come < arrivals.len() && arrivals[come] <= now && live.len() < slots {
                live.push((come, tokens[come % tokens.len()], 0.0));
                come += 1;
            }
            if live.is_empty() {
                now = arrivals[come];
                continue;
            }
            now += step_s + row_s * live.len() as f64;
            live.retain_mut(|(index, left, first)| {
                *first = if *first == 0.0 { now } else { *first };
                *left -= 1;
                if *left == 0 {
                    samples.push(sample(*index, arrivals[*index], *first, now));
                }
                *left > 0
            });
        }
        samples
    }

    /// Returns for how many of the seeds the server falls behind.
    fn count_lagging(
        seeds: u64,
        latency_s: f64,
        samples: impl Fn(&mut RandomStream) -> Vec<Sample>,
    ) -> usize {
        let of = |seed| lag(&samples(&mut RandomStream::new(seed, Purpose::Arrivals)), latency_s);
        (0..seeds).filter(|seed| of(*seed).is_some()).count()
    }

    #[test]
    fn a_queue_below_its_capacity_is_not_behind_and_one_above_is() {
        let found = |load: f64| count_lagging(40, 1.0, |draws| queue(&poisson(load, 1000, draws)));
        assert_eq!([found(0.3), found(0.6), found(0.8)], [0, 0, 0]);
        assert!(found(1.15) >= 38, "{}", found(1.15));
        assert_eq!([found(1.5), found(3.0)], [40, 40]);
        // With constant gaps, a few requests suffice.
        assert_eq!(lag(&queue(&constant(0.95, 60)), 1.0), None);
        let Some(Lag::Waiting(slope)) = lag(&queue(&constant(1.15, 60)), 1.0) else { panic!("it is behind") };
        assert!((slope - 0.15).abs() < 0.001, "{slope}");
    }

    /// A single request takes 2.7 s; 32 concurrent requests reach 4.8 requests per second.
    #[test]
    fn a_fused_loop_of_few_places_is_behind_when_they_are_full() {
        let tokens: Vec<u32> = (0..32).map(|n| 64 + n * 4).collect();
        let found = |load: f64| {
            let served =
                |draws: &mut RandomStream| fused(&poisson(4.8 * load, 400, draws), 32, 0.02, 0.001, &tokens);
            count_lagging(20, 2.7, served)
        };
        assert_eq!([found(0.2), found(0.5), found(0.8)], [0, 0, 0]);
        assert!(found(1.2) >= 18, "{}", found(1.2));
        assert_eq!(found(2.0), 20);
    }

    /// With 256 slots no request waits, but at twice the capacity of 7.2 requests per second, each is slower
    /// than the one before.
    #[test]
    fn a_fused_loop_of_many_places_is_behind_when_requests_pile_up() {
        let served = |load: f64, draws: &mut RandomStream| {
            fused(&poisson(7.2 * load, 300, draws), 256, 0.02, 0.001, &[128])
        };
        let found = |load: f64| count_lagging(20, 2.7, |draws| served(load, draws));
        assert_eq!([found(0.2), found(0.5), found(0.7)], [0, 0, 0]);
        assert!(found(2.0) >= 19, "{}", found(2.0));
        let lag = lag(&served(2.0, &mut RandomStream::new(1, Purpose::Arrivals)), 2.7);
        assert!(matches!(lag, Some(Lag::PilingUp(_))), "{lag:?}");
    }

    /// With unlimited slots and responses of 16 to 240 steps, the arrivals may end before the first response.
    #[test]
    fn long_answers_are_no_lag_however_short_the_run() {
        for (count, rate) in
            [(20, 0.5), (20, 2.0), (50, 5.0), (50, 20.0), (100, 5.0), (400, 20.0), (400, 400.0)]
        {
            let tokens: Vec<u32> = (0..29).map(|n| 16 + (n * 97 % 29) * 8).collect();
            let served = |draws: &mut RandomStream| {
                fused(&poisson(rate, count, draws), usize::MAX, 0.08, 0.0, &tokens)
            };
            assert_eq!(count_lagging(20, 10.0, served), 0, "{count} requests at {rate}/s");
        }
    }

    /// Cold caches, and a random tenth of the requests delayed by a second.
    #[test]
    fn a_slow_beginning_and_noise_are_no_lag() {
        let served = |draws: &mut RandomStream| {
            let one = |(index, at): (usize, f64)| {
                let cold = (2.0 - at / 10.0).max(0.0);
                let odd = if draws.unit() < 0.1 { 1.0 } else { 0.0 };
                let first = at + 0.2 + cold + odd + 0.1 * draws.unit();
                sample(index, at, first, first + 0.5)
            };
            constant(1.0, 100).into_iter().enumerate().map(one).collect()
        };
        assert_eq!(count_lagging(20, 0.7, served), 0);
        // The same with a growing delay.
        let worse = |draws: &mut RandomStream| {
            let mut samples = served(draws);
            for sample in &mut samples {
                let later = sample.scheduled.mul_f64(0.1);
                sample.deliveries =
                    sample.deliveries.iter().map(|d| Delivery::new(d.at() + later, 1)).collect();
            }
            samples
        };
        assert_eq!(count_lagging(20, 0.7, worse), 20);
    }

    #[test]
    fn a_generator_that_is_late_is_distinguished() {
        let mut samples = queue(&constant(0.5, 50));
        for sample in &mut samples {
            let late = sample.scheduled / 4;
            sample.sent += late;
            sample.deliveries[0] = Delivery::new(sample.deliveries[0].at() + late, 1);
        }
        assert_eq!(lag(&samples, 1.0), Some(Lag::Late(0.25)));
    }

    #[test]
    fn too_few_requests_and_all_at_once_tell_nothing() {
        assert_eq!(lag(&[], 1.0), None);
        assert_eq!(lag(&queue(&constant(9.0, 9)), 1.0), None);
        assert_eq!(lag(&queue(&[0.0; 50]), 1.0), None);
    }
}
