//! The mapping from values to coordinates along an axis, and the axis ticks.
//!
//! Invariant: every value maps to a finite coordinate between the ends of the axis; ticks are few and
//! distinct.

use crate::report::html::Scale;

use super::ticks::{self, Tick};

/// An axis with fixed ends.
#[derive(Clone, Debug)]
pub struct Ruler {
    scale: Scale,
    /// The ends in transformed units, see [`transform`].
    ends: (f64, f64),
    /// The ends in plot coordinates.
    pixels: (f64, f64),
    pub ticks: Vec<Tick>,
}

/// The layout constraints of an axis.
#[derive(Clone, Copy, Debug)]
pub struct AxisLayout {
    pub fit: Fit,
    /// Approximate number of labels.
    pub labels: usize,
    /// The ends in plot coordinates.
    pub pixels: (f64, f64),
}

/// Rule by which the ends of an axis are chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// At the minimum and maximum, but a linear axis starts at zero if the minimum is close to it.
    Tight,
    /// At round numbers beyond the minimum and maximum; a linear axis includes zero.
    Round,
}

/// Maximum magnitude of a drawable value; larger values are considered errors.
const VALUE_MAX: f64 = 1e100;
/// Minimum value treated as positive on a logarithmic axis; smaller values count as zero.
const POSITIVE_MIN: f64 = 1e-100;

/// Returns whether a value can be drawn.
pub fn is_drawable(value: f64) -> bool {
    value.abs() <= VALUE_MAX
}

impl Ruler {
    /// Creates an axis that covers all drawable values.
    pub fn new(scale: Scale, values: &[f64], room: AxisLayout) -> Self {
        let drawn = || values.iter().copied().filter(|&value| is_drawable(value));
        let all = extent(drawn()).unwrap_or((0.0, 1.0));
        let positive = extent(drawn().filter(|&value| value >= POSITIVE_MIN));
        let (scale, ends, ticks) = match (scale, positive) {
            (Scale::Log, Some(positive)) => log(positive, all.0, room),
            (Scale::Log | Scale::Linear, _) => linear(all, room),
            (Scale::Percentile, _) => {
                let high = transform(scale, all.1).max(1.0);
                (scale, (0.0, high), ticks::percentiles(high))
            }
        };
        Self { scale, ends, pixels: room.pixels, ticks }
    }

    /// Returns the ticks with a label.
    pub fn labelled(&self) -> impl Iterator<Item = &Tick> {
        self.ticks.iter().filter(|tick| !tick.label.is_empty())
    }

    /// Returns the ticks without a label.
    pub fn fine(&self) -> impl Iterator<Item = &Tick> {
        self.ticks.iter().filter(|tick| tick.label.is_empty())
    }

    /// Maps a value to a plot coordinate. Values beyond an end map to it.
    pub fn position(&self, value: f64) -> f64 {
        let (low, high) = self.ends;
        let share = ((transform(self.scale, value) - low) / (high - low)).clamp(0.0, 1.0);
        self.pixels.0 + share * (self.pixels.1 - self.pixels.0)
    }
}

/// A scale, its ends in transformed units, and its ticks.
type AxisExtent = (Scale, (f64, f64), Vec<Tick>);

fn linear(extent: (f64, f64), room: AxisLayout) -> AxisExtent {
    let (low, high) = match (room.fit, extent) {
        (Fit::Tight, (low, high)) if (0.0..0.1 * high).contains(&low) => (0.0, high),
        (Fit::Tight, extent) => extent,
        (Fit::Round, (low, high)) => (low.min(0.0), high.max(0.0)),
    };
    let (low, high) = widen(low, high);
    let step = ticks::round_up((high - low) / room.labels as f64);
    let ends = match room.fit {
        Fit::Tight => (low, high),
        Fit::Round => ((low / step).floor() * step, (high / step).ceil() * step),
    };
    (Scale::Linear, ends, ticks::linear(ends, step))
}

/// Lays out a logarithmic axis. If the minimum of all values is at or below zero, the axis has an extra tick
/// at the lower end for all values below the other ticks.
fn log(positive: (f64, f64), minimum: f64, room: AxisLayout) -> AxisExtent {
    let (low, high) = match positive {
        (low, high) if high / low < 1.0 + 1e-9 => (low / 2.0, high * 2.0),
        apart => apart,
    };
    let (low, high) = match room.fit {
        Fit::Tight => (low, high),
        Fit::Round => (ticks::round_down(low), ticks::round_up(high)),
    };
    let mut ticks = ticks::log((low, high), room.labels);
    let mut ends = (low.log10(), high.log10());
    if minimum < POSITIVE_MIN {
        ends.0 -= (0.15 * (ends.1 - ends.0)).max(0.2);
        // A logarithmic axis has no zero.
        let label = ticks.first().map_or_else(String::new, |lowest| format!("<{}", lowest.label));
        ticks.insert(0, Tick { value: 0.0, label });
    }
    (Scale::Log, ends, ticks)
}

/// Transforms a value so that the scale becomes linear.
fn transform(scale: Scale, value: f64) -> f64 {
    match scale {
        Scale::Linear => value,
        // Zero has no logarithm; it is placed below all positive values.
        Scale::Log => value.max(POSITIVE_MIN).log10(),
        // 100 % would be at infinity; eight nines stand for it.
        Scale::Percentile => -(1.0 - value.clamp(0.0, 99.999_999) / 100.0).log10(),
    }
}

fn extent(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.fold(None, |extent, value| match extent {
        None => Some((value, value)),
        Some((low, high)) => Some((value.min(low), value.max(high))),
    })
}

/// Widens an interval that is empty or too narrow for floating-point precision.
fn widen(low: f64, high: f64) -> (f64, f64) {
    let largest = low.abs().max(high.abs());
    match largest {
        ..POSITIVE_MIN => (-0.5, 0.5),
        _ if high - low > largest * 1e-9 => (low, high),
        _ => (low - largest * 0.1, high + largest * 0.1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCALES: [Scale; 3] = [Scale::Linear, Scale::Log, Scale::Percentile];

    fn room(fit: Fit, pixels: (f64, f64)) -> AxisLayout {
        AxisLayout { fit, labels: 5, pixels }
    }

    #[test]
    fn whatever_is_drawn_has_a_finite_place_within_the_axis() {
        let odd = [0.0, -1.0, 1e-300, 5e-324, 1e99, -1e99, 1e100, 3.0, 100.0, f64::NAN, f64::INFINITY];
        for scale in SCALES {
            for fit in [Fit::Tight, Fit::Round] {
                for first in odd {
                    for second in odd {
                        let ruler = Ruler::new(scale, &[first, second], room(fit, (10.0, 20.0)));
                        let places: Vec<_> = odd[..9].iter().map(|&value| ruler.position(value)).collect();
                        assert!(
                            places.iter().all(|place| (10.0..=20.0).contains(place)),
                            "{scale:?} {fit:?} over {first} and {second}: {places:?}"
                        );
                        assert!(ruler.ticks.len() <= 40, "{scale:?} over {first} and {second}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_log_axis_gives_each_decade_the_same_room_and_zero_a_place_below_all() {
        let ruler = Ruler::new(Scale::Log, &[1.0, 10.0, 1000.0], room(Fit::Tight, (0.0, 300.0)));
        let places = [1.0, 10.0, 100.0, 1000.0].map(|value| ruler.position(value).round());
        assert_eq!(places, [0.0, 100.0, 200.0, 300.0]);

        let ruler = Ruler::new(Scale::Log, &[0.0, 1.0, 1000.0], room(Fit::Tight, (0.0, 300.0)));
        assert_eq!(ruler.position(0.0), 0.0);
        assert!(ruler.position(1.0) > 20.0, "zero and the smallest positive value coincide");
        assert_eq!(ruler.ticks[0].label, "<1", "a logarithmic axis has no zero");
    }

    #[test]
    fn a_linear_axis_begins_at_zero_when_its_values_begin_near_it() {
        let zero = |values, fit| Ruler::new(Scale::Linear, values, room(fit, (0.0, 100.0))).position(0.0);
        let begins =
            |values| Ruler::new(Scale::Linear, values, room(Fit::Tight, (0.0, 100.0))).position(values[0]);
        assert_eq!((zero(&[0.3, 10.0], Fit::Tight), zero(&[8.0, 10.0], Fit::Round)), (0.0, 0.0));
        assert_eq!(begins(&[0.3, 10.0]).round(), 3.0);
        assert_eq!((begins(&[8.0, 10.0]), begins(&[-2.0, 10.0])), (0.0, 0.0));
    }

    #[test]
    fn percentiles_are_a_decade_of_the_rest_apart() {
        let ruler = Ruler::new(Scale::Percentile, &[0.0, 99.9], room(Fit::Tight, (0.0, 300.0)));
        let places = [0.0, 90.0, 99.0, 99.9, 100.0].map(|percent| ruler.position(percent).round());
        assert_eq!(places, [0.0, 100.0, 200.0, 300.0, 300.0]);
    }
}
