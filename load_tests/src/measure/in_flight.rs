//! The number of requests in flight over time.
//!
//! Invariant: a downsampled curve keeps the maximum, minimum and mean of each interval.

use std::time::Duration;

use super::{POINTS_MAX, TimeSpan, seconds};
use crate::sample::Sample;

/// The number of requests in flight as a step function of time.
#[derive(Clone, Debug)]
pub struct InFlight {
    /// Start time and value of each step; times ascend, and the last value is 0.
    steps: Vec<(Duration, usize)>,
}

impl InFlight {
    /// Builds the step function. A request is in flight from its first send until its end.
    pub fn from_samples(samples: &[Sample]) -> Self {
        let mut changes: Vec<(Duration, isize)> =
            samples.iter().flat_map(|s| [(s.sent, 1), (s.ended.max(s.sent), -1)]).collect();
        changes.sort_unstable();
        let mut steps: Vec<(Duration, usize)> = Vec::new();
        let mut live = 0isize;
        for at_once in changes.chunk_by(|a, b| a.0 == b.0) {
            live += at_once.iter().map(|change| change.1).sum::<isize>();
            let live = usize::try_from(live).expect("no request ends before it is sent; this is a bug");
            if steps.last().map(|step| step.1) != Some(live) {
                steps.push((at_once[0].0, live));
            }
        }
        Self { steps }
    }

    /// Returns the maximum.
    pub fn peak(&self) -> usize {
        self.steps.iter().map(|step| step.1).max().unwrap_or(0)
    }

    /// Returns the mean over the span, or 0 if the span is empty.
    pub fn mean(&self, span: TimeSpan) -> f64 {
        let area: f64 =
            step_durations(&self.steps, span).map(|(length, live)| length.as_secs_f64() * live as f64).sum();
        span.per_second(area)
    }

    /// Returns the curve as (seconds, requests), downsampled to at most [`POINTS_MAX`] points.
    pub fn curve(&self) -> Vec<(f64, f64)> {
        let (&[(begin, _), .., (end, last)], true) = (self.steps.as_slice(), self.steps.len() > POINTS_MAX)
        else {
            return self.steps.iter().map(|&(at, live)| (seconds(at), live as f64)).collect();
        };
        let (mut curve, mut steps) = (Vec::new(), self.steps.as_slice());
        let whole = TimeSpan { begin, end };
        // Two points per interval, and one for the end.
        for piece in whole.split((POINTS_MAX - 1) / 2) {
            // Drops the steps that end before the interval begins.
            let passed = steps.partition_point(|step| step.0 <= piece.begin).saturating_sub(1);
            steps = &steps[passed..];
            curve.extend(reduce_interval(steps, piece));
        }
        curve.push((seconds(end), last as f64));
        curve
    }
}

/// Returns the duration and the value of each step within the span.
fn step_durations(steps: &[(Duration, usize)], span: TimeSpan) -> impl Iterator<Item = (Duration, usize)> {
    let ends = steps.iter().skip(1).map(|step| step.0).chain([Duration::MAX]);
    steps
        .iter()
        .zip(ends)
        .skip_while(move |(_, end)| *end <= span.begin)
        .take_while(move |(step, _)| step.0 < span.end)
        .map(move |(step, end)| (end.min(span.end) - step.0.max(span.begin), step.1))
}

/// Reduces an interval to its maximum and minimum, with durations that preserve the mean. If the first value
/// is at most the last one, the minimum comes first.
fn reduce_interval(steps: &[(Duration, usize)], piece: TimeSpan) -> Vec<(f64, f64)> {
    let held: Vec<(f64, f64)> =
        step_durations(steps, piece).map(|(length, live)| (seconds(length), live as f64)).collect();
    let (first, last) = held.first().zip(held.last()).map_or((0.0, 0.0), |(first, last)| (first.1, last.1));
    let low = held.iter().map(|held| held.1).fold(first, f64::min);
    let high = held.iter().map(|held| held.1).fold(first, f64::max);
    if low == high {
        return vec![(seconds(piece.begin), low)];
    }
    let above_low: f64 = held.iter().map(|(length, live)| length * (live - low)).sum();
    let (begin, high_for) = (seconds(piece.begin), above_low / (high - low));
    if first <= last {
        vec![(begin, low), (seconds(piece.end) - high_for, high)]
    } else {
        vec![(begin, high), (begin + high_for, low)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        measure::testing::{completed, ms},
        plan::random::{Purpose, RandomStream},
    };

    /// The area below a step function, in seconds.
    fn area(curve: &[(f64, f64)]) -> f64 {
        curve.windows(2).map(|pair| (pair[1].0 - pair[0].0) * pair[0].1).sum()
    }

    #[test]
    fn a_short_run_is_counted_step_by_step() {
        // The second begins when the first ends; the third ends at once.
        let samples = [
            completed(0, 10, &[20]),
            completed(0, 20, &[30]),
            completed(0, 25, &[]),
            completed(0, 26, &[28, 29]),
        ];
        let in_flight = InFlight::from_samples(&samples);
        let expected = [(0.01, 1.0), (0.026, 2.0), (0.029, 1.0), (0.03, 0.0)];
        assert_eq!(in_flight.curve(), expected);
        assert_eq!(in_flight.peak(), 2);
        assert!((in_flight.mean(TimeSpan { begin: ms(10), end: ms(30) }) - 23.0 / 20.0).abs() < 1e-12);
        // The 5 ms before the first request and the first 5 ms of it.
        assert!((in_flight.mean(TimeSpan { begin: ms(5), end: ms(15) }) - 0.5).abs() < 1e-12);
        assert_eq!(in_flight.mean(TimeSpan { begin: ms(10), end: ms(10) }), 0.0);
        assert_eq!(InFlight::from_samples(&[]).curve(), []);
    }

    #[test]
    fn thinning_keeps_the_peak_and_the_area_of_every_piece() {
        let mut draws = RandomStream::new(5, Purpose::Request(0));
        let mut samples: Vec<Sample> = (0..3000)
            .map(|_| {
                let sent = u64::from(draws.between(0, 100_000));
                completed(sent, sent, &[sent + u64::from(draws.between(1, 2000))])
            })
            .collect();
        // A burst of a millisecond in a run of a hundred seconds.
        samples.extend((0..500).map(|_| completed(50_000, 50_000, &[50_001])));
        let in_flight = InFlight::from_samples(&samples);
        let curve = in_flight.curve();
        assert!(in_flight.steps.len() > 2000 && curve.len() <= POINTS_MAX, "{} points", curve.len());
        assert!(curve.is_sorted_by(|a, b| a.0 < b.0));
        let peak = curve.iter().map(|point| point.1).fold(0.0, f64::max);
        assert_eq!(peak as usize, in_flight.peak());
        assert!(peak > 500.0);
        assert_eq!(curve.last(), Some(&(in_flight.steps.last().unwrap().0.as_secs_f64(), 0.0)));
        // Each request adds its duration to the area.
        let whole: f64 = samples.iter().map(|s| (s.ended - s.sent).as_secs_f64()).sum();
        assert!((area(&curve) / whole - 1.0).abs() < 1e-6, "{} and {whole}", area(&curve));
        let before = |at: f64| {
            let until: Vec<_> = curve.iter().copied().filter(|point| point.0 <= at).collect();
            area(&[until.as_slice(), &[(at, 0.0)]].concat())
        };
        // Up to any time, the area is off by at most that of one of the 199 intervals.
        for cut in [10.0, 33.3, 49.9, 77.7] {
            let in_time = |s: &Sample| (s.ended.as_secs_f64().min(cut) - s.sent.as_secs_f64()).max(0.0);
            let exact: f64 = samples.iter().map(in_time).sum();
            let piece = 102.0 / 199.0 * 100.0;
            assert!((before(cut) - exact).abs() < piece, "to {cut} s: {} and {exact}", before(cut));
        }
    }
}
