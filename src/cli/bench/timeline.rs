//! The picture of a step: what it read, wrote and computed, and when. It is an SVG file that browsers open.
//!
//! Invariant: names are escaped, and nothing is drawn outside of the picture.

use crate::model::offload::{Activity, Timeline, TimelineRow, TimelineSpan};
use std::fmt::Write;

/// Sizes in pixels: of the column of names, of the axis, of a row, and of what is above the rows.
const NAMES: f64 = 190.0;
const AXIS: f64 = 1200.0;
const ROW: f64 = 24.0;
const TOP: f64 = 64.0;

/// Least number of marks on the axis.
const MARKS: f64 = 8.0;

/// Activities in the order of their rows, with their names and colours.
const ACTIVITIES: [(Activity, &str, &str); 4] = [
    (Activity::Compute, "compute", "#7aa6d8"),
    (Activity::LoadWeights, "load weights", "#f2b263"),
    (Activity::LoadCache, "load KV", "#8cc584"),
    (Activity::StoreCache, "store KV", "#d09ac6"),
];

/// Draws a step: a row for each device and thread, with its pieces of work.
pub fn svg(timeline: &Timeline) -> String {
    let seconds = timeline.seconds.max(1e-9);
    let rows = |activity| timeline.rows.iter().filter(move |row| row.activity == activity);
    let all = || ACTIVITIES.into_iter().flat_map(|style| rows(style.0).map(move |row| (row, style)));
    let (width, height) = (NAMES + AXIS + 20.0, TOP + ROW * all().count() as f64 + 10.0);
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"11\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"10\" y=\"20\" font-size=\"14\">One step: {}</text>\n",
        milliseconds(seconds)
    );
    for (at, (_, name, colour)) in ACTIVITIES.into_iter().enumerate() {
        let x = NAMES + 130.0 * at as f64;
        let _ = writeln!(
            text,
            "<rect x=\"{x}\" y=\"10\" width=\"12\" height=\"12\" fill=\"{colour}\"/><text x=\"{}\" \
             y=\"20\">{name}</text>",
            x + 17.0
        );
    }
    draw_axis(&mut text, seconds, height);
    for (at, (row, style)) in all().enumerate() {
        draw_row(&mut text, row, style, (TOP + ROW * at as f64, seconds));
    }
    text + "</svg>\n"
}

/// Draws the axis of time, with lines at round times.
fn draw_axis(text: &mut String, seconds: f64, height: f64) {
    let unit = round_below(seconds / MARKS);
    for mark in 0..=(seconds / unit) as usize {
        let (time, x) = (unit * mark as f64, NAMES + AXIS * unit * mark as f64 / seconds);
        let _ = writeln!(
            text,
            "<line x1=\"{x:.2}\" y1=\"{}\" x2=\"{x:.2}\" y2=\"{height}\" stroke=\"#ddd\"/><text x=\"{x:.2}\" \
             y=\"{}\" text-anchor=\"middle\">{}</text>",
            TOP - 6.0,
            TOP - 12.0,
            milliseconds(time)
        );
    }
}

/// Draws a row at `top`, of a step of so many seconds.
fn draw_row(
    text: &mut String,
    row: &TimelineRow,
    (_, activity, colour): (Activity, &str, &str),
    (top, seconds): (f64, f64),
) {
    let name = escape(&row.name);
    let _ = writeln!(text, "<text x=\"10\" y=\"{}\">{activity} ({name})</text>", top + 16.0);
    for TimelineSpan { name, times } in &row.spans {
        let [began, ended] = times.map(|time| AXIS * (time / seconds).clamp(0.0, 1.0));
        let (name, [from, to]) = (escape(name), times.map(milliseconds));
        // A picture in the picture, which cuts off names that are too long.
        let _ = writeln!(
            text,
            "<svg x=\"{:.2}\" y=\"{}\" width=\"{:.2}\" height=\"{}\">\
             <title>{name}: {from} to {to}, {}</title>\
             <rect width=\"100%\" height=\"100%\" fill=\"{colour}\" stroke=\"white\" stroke-width=\"0.5\"/>\
             <text x=\"2\" y=\"14\">{name}</text></svg>",
            NAMES + began,
            top + 1.0,
            (ended - began).max(0.5),
            ROW - 3.0,
            milliseconds(times[1] - times[0])
        );
    }
}

/// Returns the largest of 1, 2 and 5 times a power of 10 that is at most `value`, a positive number.
fn round_below(value: f64) -> f64 {
    let power = 10.0_f64.powf(value.log10().floor());
    let factors = [5.0, 2.0, 1.0].into_iter().map(|factor| factor * power);
    factors.into_iter().find(|round| *round <= value).unwrap_or(power)
}

fn milliseconds(seconds: f64) -> String {
    format!("{:.3} ms", 1e3 * seconds)
}

/// Escapes a text for XML. Characters that XML does not allow are replaced.
fn escape(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => escaped += "&amp;",
            '<' => escaped += "&lt;",
            '>' => escaped += "&gt;",
            '"' => escaped += "&quot;",
            c if c.is_control() => escaped.push('\u{fffd}'),
            c => escaped.push(c),
        }
    }
    escaped
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(activity: Activity, name: &str, spans: &[(&str, [f64; 2])]) -> TimelineRow {
        let span = |(name, times): &(&str, [f64; 2])| TimelineSpan { name: name.to_string(), times: *times };
        TimelineRow { activity, name: name.into(), spans: spans.iter().map(span).collect() }
    }

    /// Returns the values of an attribute of the pictures of spans.
    fn values(svg: &str, attribute: &str) -> Vec<f64> {
        let spans = svg.lines().filter(|line| line.starts_with("<svg x="));
        let value = |line: &str| line.split_once(&format!(" {attribute}=\"")).unwrap().1.to_owned();
        spans.map(|line| value(line).split('"').next().unwrap().parse().unwrap()).collect()
    }

    #[test]
    fn spans_are_where_their_times_are_and_inside_the_picture() {
        let reader = Activity::LoadWeights;
        let rows = vec![
            row(reader, "weights-0", &[("a", [-0.1, 0.05]), ("b", [0.05, 0.3])]),
            row(Activity::Compute, "dev cpu:0", &[("layer 0", [0.1, 0.15])]),
        ];
        let svg = svg(&Timeline { seconds: 0.2, rows });
        assert_eq!(values(&svg, "x"), [NAMES + 0.5 * AXIS, NAMES, NAMES + 0.25 * AXIS]);
        assert_eq!(values(&svg, "width"), [0.25 * AXIS, 0.25 * AXIS, 0.75 * AXIS]);
        assert_eq!(values(&svg, "y"), [TOP + 1.0, TOP + ROW + 1.0, TOP + ROW + 1.0], "computing is first");
        assert!(svg.contains("<title>b: 50.000 ms to 300.000 ms, 250.000 ms</title>"), "{svg}");
        assert!(svg.contains(">200.000 ms</text>"), "the axis has marks: {svg}");
    }

    #[test]
    fn names_are_escaped() {
        let rows = vec![row(Activity::Compute, "<&\u{1}", &[("\"</title><script>", [0.0, 1.0])])];
        let svg = svg(&Timeline { seconds: 1.0, rows });
        assert!(svg.contains("(&lt;&amp;\u{fffd})"), "{svg}");
        assert!(svg.contains("<title>&quot;&lt;/title&gt;&lt;script&gt;:"), "{svg}");
        assert_eq!(svg.matches("<svg").count(), svg.matches("</svg>").count());
    }

    #[test]
    fn marks_are_round() {
        let found = [0.0123, 0.021, 0.0799, 7.0].map(round_below);
        for (found, expected) in found.into_iter().zip([0.01, 0.02, 0.05, 5.0]) {
            assert!((found - expected).abs() < 1e-12, "{found} is not {expected}");
        }
        let instant = svg(&Timeline { seconds: 0.0, rows: Vec::new() });
        assert!(instant.ends_with("</svg>\n") && !instant.contains("NaN"), "{instant}");
    }
}
