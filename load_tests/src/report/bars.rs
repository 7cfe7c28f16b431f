//! Bar charts of block characters for terminals.
//!
//! Invariant: a bar shows the maximum of its time interval, and a non-zero bar is visible.

/// Block characters by height in eighths of a line.
const EIGHTHS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Width and height of a chart in characters.
const CHART: (usize, usize) = (100, 8);

/// Renders a step function over seconds with a title and labelled axes. Returns an empty string if there is
/// no curve.
pub fn chart(title: &str, curve: &[(f64, f64)]) -> String {
    let (Some(first), Some(last)) = (curve.first(), curve.last()) else { return String::new() };
    let (width, height) = CHART;
    let values = interval_maxima(curve, width);
    let peak = values.iter().copied().fold(0.0, f64::max).to_string();
    let bars = bar_lines(&values, height);
    let labels = std::iter::once(peak.as_str()).chain(std::iter::repeat(""));
    let bars = bars.iter().zip(labels).map(|(bar, label)| format!("{label:>7} |{}\n", bar.trim_end()));
    let (begin, end) = (format!("{:.2} s", first.0), format!("{:.2} s", last.0));
    let rest = values.len().saturating_sub(begin.len());
    let axis = format!("{:>7} +{}\n{:9}{begin}{end:>rest$}\n", 0, "-".repeat(values.len()), "");
    format!("\n{title}\n{}{axis}", bars.collect::<String>())
}

/// Returns the maxima of a step function over `columns` equal time intervals.
pub fn interval_maxima(curve: &[(f64, f64)], columns: usize) -> Vec<f64> {
    let (Some(first), Some(last)) = (curve.first(), curve.last()) else { return Vec::new() };
    let length = last.0 - first.0;
    if length <= 0.0 {
        return vec![first.1];
    }
    let column = |at: f64| ((at - first.0) / length * columns as f64) as usize;
    let mut greatest = vec![0.0f64; columns];
    for step in curve.windows(2) {
        let (begin, end) = (column(step[0].0).min(columns - 1), column(step[1].0));
        // A step that ends exactly at the start of a column is not part of it.
        let ends_within = step[1].0 > first.0 + length * end as f64 / columns as f64;
        let end = if ends_within { end + 1 } else { end }.clamp(begin + 1, columns);
        greatest[begin..end].iter_mut().for_each(|value| *value = value.max(step[0].1));
    }
    greatest
}

/// Renders values as lines from top to bottom; the maximum fills the full height.
pub fn bar_lines(values: &[f64], height: usize) -> Vec<String> {
    let greatest = values.iter().copied().fold(0.0, f64::max);
    let eighths = |value: f64| match value / greatest {
        share if share > 0.0 => ((share * (height * 8) as f64).round() as usize).max(1),
        _ => 0,
    };
    let line = |floor: usize| {
        values.iter().map(|&value| EIGHTHS[eighths(value).saturating_sub(floor * 8).min(8)]).collect()
    };
    (0..height).rev().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_column_is_as_high_as_what_it_covers() {
        // 1 for four seconds, 5 for a tenth, 2 for 3.9, 0 at the end.
        let curve = [(1.0, 1.0), (5.0, 5.0), (5.1, 2.0), (9.0, 0.0)];
        assert_eq!(interval_maxima(&curve, 4), [1.0, 1.0, 5.0, 2.0]);
        assert_eq!(interval_maxima(&curve, 2), [1.0, 5.0]);
        assert_eq!(interval_maxima(&curve, 1), [5.0]);
        assert!(interval_maxima(&[], 4).is_empty());
        assert_eq!(interval_maxima(&[(2.0, 3.0)], 4), [3.0]);
    }

    #[test]
    fn bars_end_in_eighths_of_a_line() {
        assert_eq!(bar_lines(&[0.0, 1.0, 8.0, 12.0, 16.0], 2), ["   ▄█", " ▁███"]);
        assert_eq!(bar_lines(&[0.001, 100.0], 1), ["▁█"]);
        assert_eq!(bar_lines(&[0.0, 0.0], 1), ["  "]);
    }
}
