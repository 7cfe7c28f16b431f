//! Formatting of SVG paths.
//!
//! Invariant: coordinates have at most one decimal, which is finer than screens and printers show.

use serde::Serialize;

use super::{scale::Ruler, ticks::Tick};
use crate::report::html::{CurveForm, numbers};

/// A mark at a point, with a tooltip.
#[derive(Clone, Debug, Serialize)]
pub struct Mark {
    pub path: String,
    /// Tooltip text: the values of the point.
    pub says: String,
}

type Point = (f64, f64);

/// Formats a coordinate.
pub fn px(at: f64) -> String {
    let text = format!("{at:.1}");
    text.strip_suffix(".0").map(str::to_owned).unwrap_or(text)
}

/// Returns grid lines at these ticks.
pub fn lines<'a>(
    ruler: &Ruler,
    ticks: impl Iterator<Item = &'a Tick>,
    line: impl Fn(String) -> String,
) -> String {
    ticks.map(|tick| line(px(ruler.position(tick.value)))).collect()
}

/// Returns the coordinates and texts of the labels.
pub fn labels(ruler: &Ruler) -> Vec<(String, String)> {
    ruler.labelled().map(|tick| (px(ruler.position(tick.value)), tick.label.clone())).collect()
}

/// Returns the path of a curve through the places.
pub fn line(places: &[Point], form: CurveForm) -> String {
    let start = |&(x, y): &Point| format!("M{} {}", px(x), px(y));
    let to = |&(x, y): &Point| match form {
        CurveForm::Steps => format!("H{}V{}", px(x), px(y)),
        _ => format!("L{} {}", px(x), px(y)),
    };
    match (places, form) {
        ([], _) | (_, CurveForm::Points) => String::new(),
        ([first, rest @ ..], _) => start(first) + &rest.iter().map(to).collect::<String>(),
    }
}

/// Returns the path of the area between the curve and `base`.
pub fn area(places: &[Point], form: CurveForm, base: f64) -> String {
    match (places, form) {
        ([first, .., _], CurveForm::Steps | CurveForm::Line) => {
            format!("{}V{}H{}Z", line(places, form), px(base), px(first.0))
        }
        _ => String::new(),
    }
}

/// Returns a mark at a place, with the point's values as tooltip.
pub fn mark(place: Point, shape: usize, (x, y): (f64, f64)) -> Mark {
    Mark {
        path: self::shape(place, shape),
        says: format!("{}, {}", numbers::format_value(x), numbers::format_value(y)),
    }
}

/// Returns the outline of a mark: a disc, a square, a triangle or a diamond.
pub fn shape((x, y): Point, shape: usize) -> String {
    let at = |dx: f64, dy: f64| format!("M{} {}", px(x + dx), px(y + dy));
    match shape % 4 {
        0 => at(-3.5, 0.0) + "a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0Z",
        1 => at(-3.0, -3.0) + "h6v6h-6Z",
        2 => at(0.0, -4.0) + "l4 7h-8Z",
        _ => at(0.0, -4.5) + "l4.5 4.5l-4.5 4.5l-4.5-4.5Z",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_hold_their_value_until_the_next_point() {
        let places = [(0.0, 10.0), (5.0, 20.04), (7.25, 0.0)];
        assert_eq!(line(&places, CurveForm::Steps), "M0 10H5V20H7.2V0");
        assert_eq!(line(&places, CurveForm::Line), "M0 10L5 20L7.2 0");
        assert_eq!(area(&places, CurveForm::Steps, 30.0), "M0 10H5V20H7.2V0V30H0Z");
        assert_eq!(area(&places[..1], CurveForm::Steps, 30.0), "");
    }
}
