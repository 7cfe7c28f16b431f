//! Downsampling of long curves without changing their appearance.
//!
//! Invariant: the first and last point and the extremes of every chunk are kept.

use super::scale::is_drawable;

/// Splits a curve into runs without gaps; a point that cannot be drawn is a gap.
pub fn runs(points: &[(f64, f64)]) -> impl Iterator<Item = &[(f64, f64)]> {
    points.split(|&(x, y)| !(is_drawable(x) && is_drawable(y))).filter(|run| !run.is_empty())
}

/// Keeps at most `count` points (at least 4): the first, last, highest and lowest of each chunk.
pub fn downsample(points: &[(f64, f64)], count: usize) -> Vec<(f64, f64)> {
    let count = count.max(4);
    if points.len() <= count {
        return points.to_vec();
    }
    let stretch = points.len().div_ceil(count / 4);
    points.chunks(stretch).flat_map(chunk_extremes).collect()
}

fn chunk_extremes(stretch: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let by_value = |&a: &usize, &b: &usize| stretch[a].1.total_cmp(&stretch[b].1);
    let low = (0..stretch.len()).min_by(by_value);
    let high = (0..stretch.len()).max_by(by_value);
    let mut kept: Vec<_> = [Some(0), low, high, stretch.len().checked_sub(1)].into_iter().flatten().collect();
    kept.sort_unstable();
    kept.dedup();
    kept.into_iter().map(|index| stretch[index]).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn thinning_keeps_the_ends_the_extremes_and_the_order() {
        // A noisy curve with a single peak and a single dip.
        let mut points: Vec<_> = (0..100_000u32)
            .map(|n| (f64::from(n), f64::from(n.wrapping_mul(2_654_435_761) >> 16) / 65_536.0))
            .collect();
        points[31_337].1 = 50.0;
        points[77_777].1 = -50.0;
        let thinned = downsample(&points, 400);
        assert!((300..=400).contains(&thinned.len()), "{}", thinned.len());
        assert!(thinned.is_sorted_by(|a, b| a.0 < b.0));
        assert_eq!((thinned.first(), thinned.last()), (points.first(), points.last()));
        assert!(thinned.contains(&(31_337.0, 50.0)) && thinned.contains(&(77_777.0, -50.0)));
    }

    #[test]
    fn short_curves_stay_as_they_are() {
        let points: Vec<_> = (0..400).map(|n| (f64::from(n), 1.0)).collect();
        assert_eq!(downsample(&points, 400), points);
        assert_eq!(downsample(&points[..2], 0), points[..2]);
    }

    #[test]
    fn what_cannot_be_drawn_is_a_gap() {
        let points =
            [(0.0, 1.0), (1.0, f64::NAN), (2.0, 3.0), (3.0, 4.0), (f64::INFINITY, 0.0), (5.0, -1e200)];
        let runs: Vec<_> = runs(&points).collect();
        assert_eq!(runs, [&points[..1], &points[2..4]]);
    }
}
