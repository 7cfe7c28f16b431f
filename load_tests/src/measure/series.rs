//! Output tokens over time: the progress of a run, and tokens per second.
//!
//! Invariant: every curve adds up to the output tokens of the report.

use std::{collections::BTreeMap, time::Duration};

use super::{POINTS_MAX, TimeSpan, seconds};
use crate::sample::Sample;

/// Maximum number of intervals of the throughput curve.
const THROUGHPUT_INTERVALS: usize = 150;

/// Returns the times and numbers of output tokens received, request by request. If the server's token count
/// differs from the tokens seen in events, its count is distributed over the events in proportion.
pub fn token_arrivals(samples: &[Sample]) -> impl Iterator<Item = (Duration, f64)> {
    samples.iter().flat_map(|sample| {
        let seen: u64 = sample.deliveries.iter().map(|delivery| u64::from(delivery.tokens())).sum();
        let weight = f64::from(sample.output_len) / seen.max(1) as f64;
        sample.deliveries.iter().map(move |delivery| (delivery.at(), f64::from(delivery.tokens()) * weight))
    })
}

/// Returns the times at which tokens were received, ascending, with the fraction of all tokens received by
/// then.
pub fn progress(samples: &[Sample]) -> Vec<(Duration, f64)> {
    let mut progress: Vec<(Duration, f64)> = token_arrivals(samples).collect();
    progress.sort_unstable_by_key(|point| point.0);
    progress.dedup_by(|next, kept| {
        let same = next.0 == kept.0;
        kept.1 += if same { next.1 } else { 0.0 };
        same
    });
    accumulate(&mut progress);
    progress
}

/// Returns the progress as a curve from 0 to 1, downsampled to at most [`POINTS_MAX`] points.
pub fn progress_curve(samples: &[Sample], span: TimeSpan) -> Vec<(f64, f64)> {
    let moments = samples.iter().map(|sample| sample.deliveries.len()).sum::<usize>();
    if moments == 0 {
        return Vec::new();
    }
    let mut points = match moments < POINTS_MAX {
        true => progress(samples),
        false => progress_by_intervals(samples, span),
    };
    points.insert(0, (span.begin, 0.0));
    points.into_iter().map(|(at, share)| (seconds(at), share)).collect()
}

/// Returns the fraction received at the end of each of equal intervals, without sorting the tokens.
fn progress_by_intervals(samples: &[Sample], span: TimeSpan) -> Vec<(Duration, f64)> {
    let mut points: Vec<(Duration, f64)> = span.split(POINTS_MAX - 1).map(|piece| (piece.end, 0.0)).collect();
    for (at, tokens) in token_arrivals(samples) {
        let piece = points.partition_point(|point| point.0 < at);
        points[piece].1 += tokens;
    }
    accumulate(&mut points);
    points
}

/// Replaces token counts by the cumulative fraction of all tokens.
fn accumulate(points: &mut [(Duration, f64)]) {
    let mut sum = 0.0;
    for point in points.iter_mut() {
        sum += point.1;
        point.1 = sum;
    }
    // With no tokens, the progress is complete by definition.
    points.iter_mut().for_each(|point| point.1 = if sum > 0.0 { point.1 / sum } else { 1.0 });
}

/// Returns the output tokens per second as a step function; the last point marks the end of the last step.
pub fn output_throughput(samples: &[Sample], span: TimeSpan) -> Vec<(f64, f64)> {
    let moments = samples.iter().map(|sample| sample.deliveries.len()).sum::<usize>();
    if moments == 0 || span.length().is_zero() {
        return Vec::new();
    }
    let pieces: Vec<TimeSpan> = span.split(moments.min(THROUGHPUT_INTERVALS)).collect();
    let mut tokens = vec![0.0; pieces.len()];
    for (at, count) in token_arrivals(samples) {
        tokens[pieces.partition_point(|piece| piece.end < at)] += count;
    }
    let rates: Vec<f64> = pieces.iter().zip(tokens).map(|(piece, tokens)| piece.per_second(tokens)).collect();
    let last = rates.last().map(|&rate| (seconds(span.end), rate));
    pieces.iter().map(|piece| seconds(piece.begin)).zip(rates).chain(last).collect()
}

/// Returns the maximum number of output tokens received within one of the whole seconds since the start of
/// the run.
pub fn peak_per_second(samples: &[Sample]) -> u64 {
    let mut tokens: BTreeMap<u64, f64> = BTreeMap::new();
    for (at, count) in token_arrivals(samples) {
        *tokens.entry(at.as_secs()).or_default() += count;
    }
    tokens.into_values().fold(0.0, f64::max).round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        measure::testing::{completed, ms},
        sample::Delivery,
    };

    /// Returns `count` requests, 20 ms apart, with 50 tokens at intervals of 1 ms.
    fn many(count: u64) -> Vec<Sample> {
        let tokens = |sent: u64| (1..=50).map(|token| sent + token).collect::<Vec<_>>();
        (0..count).map(|i| completed(i * 20, i * 20, &tokens(i * 20))).collect()
    }

    #[test]
    fn progress_counts_tokens_not_events() {
        let mut samples = [completed(0, 1, &[5, 9]), completed(0, 0, &[5, 20])];
        samples[1].deliveries[1] = Delivery::new(ms(20), 7);
        samples[1].output_len = 8;
        assert_eq!(progress(&samples), [(ms(5), 0.2), (ms(9), 0.3), (ms(20), 1.0)]);
        let curve = progress_curve(&samples, TimeSpan::from_samples(&samples));
        assert_eq!(curve, [(0.0, 0.0), (0.005, 0.2), (0.009, 0.3), (0.02, 1.0)]);
    }

    #[test]
    fn a_count_of_the_server_is_spread_over_what_was_seen() {
        // Two events in which the server counted nine tokens, and two tokens of another request.
        let mut samples = [completed(0, 0, &[100, 1200]), completed(0, 0, &[1300, 1400])];
        samples[0].output_len = 9;
        assert_eq!(peak_per_second(&samples), 7);
        assert_eq!(progress(&samples)[0], (ms(100), 4.5 / 11.0));
    }

    #[test]
    fn a_long_progress_is_thinned_exactly_and_never_falls() {
        let samples = many(100);
        let curve = progress_curve(&samples, TimeSpan::from_samples(&samples));
        let exact = progress(&samples);
        assert!(exact.len() > 2 * POINTS_MAX && curve.len() <= POINTS_MAX, "{} points", curve.len());
        assert!(curve.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1));
        assert_eq!((curve[0].1, curve.last().unwrap().1), (0.0, 1.0));
        for &(at, share) in &curve[1..] {
            let come = exact.iter().rev().find(|point| seconds(point.0) <= at).map_or(0.0, |point| point.1);
            assert!((share - come).abs() < 1e-9, "at {at} s: {share}, not {come}");
        }
    }

    #[test]
    fn the_rate_adds_up_to_the_tokens() {
        let samples = many(100);
        let curve = output_throughput(&samples, TimeSpan::from_samples(&samples));
        assert_eq!(curve.len(), THROUGHPUT_INTERVALS + 1);
        let tokens: f64 = curve.windows(2).map(|pair| (pair[1].0 - pair[0].0) * pair[0].1).sum();
        assert!((tokens - 5000.0).abs() < 1e-6, "{tokens}");
        // Away from the ends, 50 tokens arrive every 20 ms.
        let middle = &curve[10..140];
        assert!(middle.iter().all(|point| (2000.0..3000.0).contains(&point.1)), "{middle:?}");
    }

    #[test]
    fn without_tokens_there_are_no_curves() {
        let samples = [completed(0, 0, &[])];
        let span = TimeSpan::from_samples(&samples);
        assert_eq!((progress_curve(&samples, span), output_throughput(&samples, span)), (vec![], vec![]));
        assert_eq!(peak_per_second(&samples), 0);
        // All tokens at the time of the first send.
        let at_once = vec![completed(7, 7, &[7]); 500];
        let span = TimeSpan::from_samples(&at_once);
        assert_eq!(progress_curve(&at_once, span).last(), Some(&(0.007, 1.0)));
        assert_eq!(output_throughput(&at_once, span), []);
    }
}
