//! Layout of plots of [`WIDTH`] by [`HEIGHT`] units. The template adds the SVG markup and the style sheet the
//! colours, so that a plot follows the reader's colour scheme and scales with the page.
//!
//! Invariant: every coordinate is finite and within the plot, whatever the values are.

mod downsample;
mod path;
mod scale;
mod style;
mod ticks;

use serde::Serialize;

use super::html::{Axis, Curve, CurveForm};
use path::Mark;
use scale::{AxisLayout, Fit, Ruler, is_drawable};
use style::CurveStyle;

pub use style::key_classes;

/// Width of a plot in coordinate units.
pub const WIDTH: u32 = 600;
/// Height of a plot in coordinate units.
pub const HEIGHT: u32 = 320;

/// Margin above the axes, for the name of the y axis.
const TOP: f64 = 30.0;
/// Margin to the right of the axes, for the last x label.
const RIGHT: f64 = 22.0;
/// Margin below the axes, for the x labels and the name of the x axis.
const BOTTOM: f64 = 46.0;
/// Upper bound of the width of a digit in a label.
const DIGIT: f64 = 7.0;

/// Maximum number of points of a curve.
const POINTS_MAX: usize = 400;
/// Maximum number of points of a curve with marks; more marks would overlap.
const MARKS_MAX: usize = 100;

/// A laid-out plot. Coordinates are already formatted as text for the template.
#[derive(Clone, Debug, Serialize)]
pub struct Plot {
    pub title: String,
    /// Alternative text.
    pub description: String,
    pub width: u32,
    pub height: u32,
    pub x: PlotAxis,
    pub y: PlotAxis,
    pub curves: Vec<PlotCurve>,
    /// Whether the area under the curves is filled.
    pub filled: bool,
    /// Whether there is nothing to draw.
    pub empty: bool,
}

/// A laid-out axis.
#[derive(Clone, Debug, Serialize)]
pub struct PlotAxis {
    pub label: String,
    /// Path of the grid lines at the labels.
    pub grid: String,
    /// Path of the finer grid lines between them.
    pub fine: String,
    /// Path of the baseline.
    pub base: String,
    /// Coordinates along the axis and texts of the labels.
    pub labels: Vec<(String, String)>,
    /// Coordinate of all labels across the axis.
    pub labels_at: String,
}

/// A laid-out curve.
#[derive(Clone, Debug, Serialize)]
pub struct PlotCurve {
    pub label: String,
    /// CSS classes.
    pub style: String,
    /// Path of the line; empty if the points are not connected.
    pub line: String,
    /// Path of the area under the line; empty for references and points.
    pub area: String,
    pub marks: Vec<Mark>,
    /// Path of the mark in the legend; empty for none.
    pub key: String,
    pub empty: bool,
}

/// Lays out a plot.
pub fn plot(title: impl Into<String>, x: &Axis, y: &Axis, curves: &[Curve]) -> Plot {
    let title = title.into();
    let values = |of: fn(&(f64, f64)) -> f64| -> Vec<f64> {
        let points = curves.iter().flat_map(|curve| &curve.points);
        points.filter(|point| is_drawable(point.0) && is_drawable(point.1)).map(of).collect()
    };
    let floor = f64::from(HEIGHT) - BOTTOM;
    let room = AxisLayout { fit: Fit::Round, labels: 5, pixels: (floor, TOP) };
    let y_ruler = Ruler::new(y.scale, &values(|point| point.1), room);
    let widest = y_ruler.ticks.iter().map(|tick| tick.label.chars().count()).max().unwrap_or(0);
    let (left, right) = (14.0 + DIGIT * widest as f64, f64::from(WIDTH) - RIGHT);
    let room = AxisLayout { fit: Fit::Tight, labels: 7, pixels: (left, right) };
    let x_ruler = Ruler::new(x.scale, &values(|point| point.0), room);
    let styles = style::styles(curves);
    let drawn = |(curve, style)| layout_curve(curve, style, &x_ruler, &y_ruler);
    Plot {
        description: describe(&title, x, y, curves),
        title,
        width: WIDTH,
        height: HEIGHT,
        x: layout_x_axis(x, &x_ruler, floor),
        y: layout_y_axis(y, &y_ruler, (left, right)),
        filled: false,
        empty: !curves.iter().any(|curve| downsample::runs(&curve.points).next().is_some()),
        curves: curves.iter().zip(styles).map(drawn).collect(),
    }
}

impl Plot {
    /// Fills the area under the curves, for a quantity over time.
    pub fn filled(self) -> Self {
        Self { filled: true, ..self }
    }
}

fn describe(title: &str, x: &Axis, y: &Axis, curves: &[Curve]) -> String {
    let names: Vec<_> =
        curves.iter().map(|curve| curve.label.as_str()).filter(|name| !name.is_empty()).collect();
    let of = if names.is_empty() { String::new() } else { format!(": {}", names.join(", ")) };
    format!("{title}: {} against {}{of}", y.label, x.label)
}

fn layout_x_axis(axis: &Axis, ruler: &Ruler, floor: f64) -> PlotAxis {
    let line = |at: String| format!("M{at} {}V{}", path::px(TOP), path::px(floor));
    PlotAxis {
        label: axis.label.clone(),
        grid: path::lines(ruler, ruler.labelled(), line),
        fine: path::lines(ruler, ruler.fine(), line),
        base: String::new(),
        labels: path::labels(ruler),
        labels_at: path::px(floor + 17.0),
    }
}

fn layout_y_axis(axis: &Axis, ruler: &Ruler, (left, right): (f64, f64)) -> PlotAxis {
    let line = |at: String| format!("M{} {at}H{}", path::px(left), path::px(right));
    PlotAxis {
        label: axis.label.clone(),
        grid: path::lines(ruler, ruler.labelled(), line),
        fine: path::lines(ruler, ruler.fine(), line),
        base: line(path::px(f64::from(HEIGHT) - BOTTOM)),
        labels: path::labels(ruler),
        labels_at: path::px(left - 7.0),
    }
}

fn layout_curve(curve: &Curve, style: CurveStyle, x: &Ruler, y: &Ruler) -> PlotCurve {
    let runs: Vec<_> = downsample::runs(&curve.points).collect();
    let total: usize = runs.iter().map(|run| run.len()).sum();
    let pieces: Vec<_> =
        runs.iter().map(|run| downsample::downsample(run, POINTS_MAX * run.len() / total)).collect();
    let place = |&(a, b): &(f64, f64)| (x.position(a), y.position(b));
    let placed: Vec<Vec<_>> = pieces.iter().map(|piece| piece.iter().map(place).collect()).collect();
    let mark = |point| path::mark(place(point), style.shape, *point);
    let marked = shows_marks(curve.form, total);
    PlotCurve {
        label: curve.label.clone(),
        style: style.classes(curve.form),
        line: placed.iter().map(|piece| path::line(piece, curve.form)).collect(),
        area: placed.iter().map(|piece| path::area(piece, curve.form, f64::from(HEIGHT) - BOTTOM)).collect(),
        marks: pieces.iter().flatten().filter(|_| marked).map(mark).collect(),
        key: if marked { path::shape((13.0, 6.0), style.shape) } else { String::new() },
        empty: runs.is_empty(),
    }
}

/// Returns whether points have marks. A line of a single point would be invisible without one, and reference
/// values are few and meant to be read off.
fn shows_marks(form: CurveForm, points: usize) -> bool {
    match form {
        CurveForm::Points => true,
        CurveForm::LineAndPoints => points <= MARKS_MAX,
        CurveForm::Reference => points == 1 || (3..=MARKS_MAX).contains(&points),
        CurveForm::Steps | CurveForm::Line => points == 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::html::Scale;

    fn drawn(points: &[(f64, f64)], form: CurveForm) -> Plot {
        let axis = Axis { label: String::new(), scale: Scale::Linear };
        plot("", &axis, &axis, &[Curve { label: String::new(), points: points.to_vec(), form }])
    }

    #[test]
    fn a_point_that_is_not_drawn_does_not_stretch_the_axes() {
        let [plain, odd] =
            [(1.0, 2.0), (f64::NAN, 5e3)].map(|last| drawn(&[(0.0, 1.0), last, (2.0, 2.0)], CurveForm::Line));
        assert_eq!((plain.x.labels, plain.y.labels), (odd.x.labels, odd.y.labels));
    }

    #[test]
    fn a_curve_has_few_points_however_long_and_however_broken_it_is() {
        let gap = |n: u32| if n % 10_000 == 9_999 { f64::NAN } else { f64::from(n % 97) };
        let points: Vec<_> = (0..100_000).map(|n| (f64::from(n), gap(n))).collect();
        let line = &drawn(&points, CurveForm::Line).curves[0].line;
        assert_eq!(line.matches('M').count(), 10);
        assert!((300..=POINTS_MAX).contains(&line.matches(['M', 'L']).count()));
    }

    #[test]
    fn a_single_point_can_be_seen_whatever_its_form() {
        for form in [
            CurveForm::Steps,
            CurveForm::Line,
            CurveForm::LineAndPoints,
            CurveForm::Points,
            CurveForm::Reference,
        ] {
            assert_eq!(drawn(&[(1.0, 1.0)], form).curves[0].marks.len(), 1, "{form:?}");
        }
    }
}
