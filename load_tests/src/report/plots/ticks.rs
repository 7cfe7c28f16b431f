//! Ticks at round numbers, and their labels.
//!
//! Invariant: labels have enough digits to distinguish neighbouring ticks.

/// A tick of an axis. A tick without a label is only a fine grid line.
#[derive(Clone, Debug, PartialEq)]
pub struct Tick {
    pub value: f64,
    pub label: String,
}

/// Returns ticks at the multiples of `step` within the ends.
pub fn linear(ends: (f64, f64), step: f64) -> Vec<Tick> {
    // Tolerates rounding errors of up to half a thousandth of a step.
    let (first, last) = ((ends.0 / step - 5e-4).ceil(), (ends.1 / step + 5e-4).floor());
    let largest = ends.0.abs().max(ends.1.abs());
    let count = (last - first + 1.0) as usize;
    let values = (0..count).map(|index| (first + index as f64) * step);
    values.map(|value| Tick { value, label: label(value, step, largest) }).collect()
}

/// Returns ticks of a logarithmic axis: labels at the decades, and at 2 and 5 if there is space; within a
/// single decade, at the multiples of a step. Fine lines are added if they are distinguishable.
pub fn log(ends: (f64, f64), labels: usize) -> Vec<Tick> {
    let decades = ends.1.log10() - ends.0.log10();
    if decades < 1.0 {
        let step = round_up((ends.1 - ends.0) / labels as f64);
        return linear(ends, step).into_iter().filter(|tick| tick.value > 0.0).collect();
    }
    let stride = (decades / labels.max(1) as f64).ceil() as i32;
    let digits: &[u32] = if 2.0 * decades <= labels as f64 { &[1, 2, 5] } else { &[1] };
    let (first, last) = (ends.0.log10().floor() as i32, ends.1.log10().ceil() as i32);
    let within = (ends.0 * (1.0 - 1e-9))..=(ends.1 * (1.0 + 1e-9));
    let mut ticks = Vec::new();
    for decade in (first..=last).filter(|decade| decade % stride == 0) {
        for digit in 1..=(if decades <= 5.0 && stride == 1 { 9 } else { 1 }) {
            let value = f64::from(digit) * 10f64.powi(decade);
            let label = if digits.contains(&digit) { label(value, value, value) } else { String::new() };
            ticks.push(Tick { value, label });
        }
    }
    ticks.retain(|tick| within.contains(&tick.value));
    ticks
}

/// Returns ticks at 0, 50, 90, 99, 99.9, ... up to `nines` nines.
pub fn percentiles(nines: f64) -> Vec<Tick> {
    let tick = |value: f64| Tick { value, label: value.to_string() };
    let more = (1..=(nines + 1e-9) as i32).map(|n| match n {
        1 => tick(90.0),
        // Parsed from text, so that 99.9 is the closest number to its label.
        _ => tick(format!("99.{}", "9".repeat(n as usize - 2)).parse().unwrap_or(99.0)),
    });
    [tick(0.0), tick(50.0)].into_iter().chain(more).collect()
}

/// Rounds a positive value down to 1, 2 or 5 times a power of 10.
pub fn round_down(value: f64) -> f64 {
    let decade = decade(value);
    let digit = [5.0, 2.0].into_iter().find(|digit| digit * decade <= value * (1.0 + 1e-9));
    digit.unwrap_or(1.0) * decade
}

/// Rounds a positive value up to 1, 2 or 5 times a power of 10.
pub fn round_up(value: f64) -> f64 {
    let decade = decade(value);
    let digit = [1.0, 2.0, 5.0].into_iter().find(|digit| digit * decade >= value * (1.0 - 1e-9));
    digit.unwrap_or(10.0) * decade
}

fn decade(value: f64) -> f64 {
    10f64.powf((value * (1.0 + 1e-12)).max(f64::MIN_POSITIVE).log10().floor())
}

/// Formats a value with as few digits as distinguish it from a neighbour a `step` away; all labels of an axis
/// share the unit that fits the `largest` value.
fn label(value: f64, step: f64, largest: f64) -> String {
    if value == 0.0 {
        return "0".into();
    }
    if largest >= 1e13 || step < 1e-4 {
        let digits = (largest.log10().floor() - step.log10().floor()).clamp(0.0, 3.0) as usize;
        return format!("{value:.digits$e}");
    }
    let (unit, suffix) = match largest {
        1e9.. => (1e9, "G"),
        1e6.. => (1e6, "M"),
        1e4.. => (1e3, "k"),
        _ => (1.0, ""),
    };
    let decimals = (-((step / unit) * (1.0 + 1e-9)).log10().floor()).max(0.0) as usize;
    format!("{:.decimals$}{suffix}", value / unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn labels(ticks: &[Tick]) -> Vec<&str> {
        ticks.iter().map(|tick| tick.label.as_str()).filter(|label| !label.is_empty()).collect()
    }

    #[test]
    fn labels_are_short_and_tell_neighbours_apart() {
        assert_eq!(labels(&linear((0.0, 1.0), 0.2)), ["0", "0.2", "0.4", "0.6", "0.8", "1.0"]);
        assert_eq!(labels(&linear((0.0, 15e3), 5e3)), ["0", "5k", "10k", "15k"]);
        assert_eq!(labels(&linear((1.0, 1.3), 0.1)), ["1.0", "1.1", "1.2", "1.3"]);
        assert_eq!(labels(&linear((-10.0, 10.0), 5.0)), ["-10", "-5", "0", "5", "10"]);
        assert_eq!(labels(&linear((0.0, 2e-5), 1e-5)), ["0", "1e-5", "2e-5"]);
        assert_eq!(labels(&linear((0.0, 2.5e6), 5e5)), ["0", "0.5M", "1.0M", "1.5M", "2.0M", "2.5M"]);
    }

    #[test]
    fn log_ticks_follow_the_span() {
        assert_eq!(labels(&log((0.01, 20_000.0), 7)), ["0.01", "0.1", "1", "10", "100", "1000", "10k"]);
        assert_eq!(labels(&log((1.0, 100.0), 5)), ["1", "2", "5", "10", "20", "50", "100"]);
        assert_eq!(labels(&log((1.0, 1000.0), 5)), ["1", "10", "100", "1000"]);
        assert_eq!(labels(&log((20.0, 60.0), 5)), ["20", "30", "40", "50", "60"]);
        assert!(log((1e-12, 1e12), 5).len() <= 6);
    }

    #[test]
    fn round_numbers_bracket_the_value() {
        for value in [1e-9, 0.03, 0.7, 1.0, 1.01, 2.0, 4.9, 5.0, 5.1, 999.0, 1000.0, 1234.5, 7e12] {
            let (down, up) = (round_down(value), round_up(value));
            assert!(down <= value * 1.000_001 && value <= up * 1.000_001, "{down} {value} {up}");
            assert!(up / down <= 2.5 + 1e-6, "{down} {value} {up}");
        }
    }

    #[test]
    fn percentile_ticks_are_the_usual_ones() {
        assert_eq!(labels(&percentiles(1.0)), ["0", "50", "90"]);
        assert_eq!(labels(&percentiles(4.2)), ["0", "50", "90", "99", "99.9", "99.99"]);
    }
}
