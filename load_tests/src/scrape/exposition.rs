//! A parser of the Prometheus text format.
//!
//! The existing crate does not accept colons in names, which `vllm:` and `llamacpp:` metrics have.
//! Invariant: an invalid line is skipped and does not affect other lines.

use std::collections::BTreeMap;

/// The labels of a series, unescaped.
pub type Labels = BTreeMap<String, String>;

/// All series of a scrape, by name and labels.
pub type MetricSet = BTreeMap<String, BTreeMap<Labels, f64>>;

/// Parses all series; comments, types and non-finite values are skipped.
pub fn parse(text: &str) -> MetricSet {
    let mut reading = MetricSet::new();
    for (name, labels, value) in text.lines().filter_map(parse_series) {
        reading.entry(name.to_owned()).or_default().insert(labels, value);
    }
    reading
}

fn parse_series(line: &str) -> Option<(&str, Labels, f64)> {
    let line = line.trim();
    let name_len = line.find(|c: char| c == '{' || c.is_whitespace())?;
    let (name, rest) = line.split_at(name_len);
    if name.is_empty() || !name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_' || c == ':') {
        return None;
    }
    let (labels, rest) = match rest.trim_start().strip_prefix('{') {
        Some(rest) => parse_labels(rest)?,
        None => (Labels::new(), rest),
    };
    // A timestamp or an exemplar may follow.
    let value: f64 = rest.split_whitespace().next()?.parse().ok()?;
    value.is_finite().then_some((name, labels, value))
}

/// Parses labels. Returns them with the text after the closing brace.
fn parse_labels(mut rest: &str) -> Option<(Labels, &str)> {
    let mut labels = Labels::new();
    loop {
        rest = rest.trim_start_matches([' ', '\t', ',']);
        if let Some(after) = rest.strip_prefix('}') {
            return Some((labels, after));
        }
        let (name, value) = rest.split_once('=')?;
        let (value, after) = parse_quoted(value.trim_start().strip_prefix('"')?)?;
        labels.insert(name.trim().to_owned(), value);
        rest = after;
    }
}

/// Parses a quoted string. Returns it unescaped, with the text after the closing quotation mark.
fn parse_quoted(rest: &str) -> Option<(String, &str)> {
    let mut text = String::new();
    let mut chars = rest.char_indices();
    loop {
        match chars.next()? {
            (at, '"') => return Some((text, &rest[at + 1..])),
            (_, '\\') => match chars.next()?.1 {
                'n' => text.push('\n'),
                escaped => text.push(escaped),
            },
            (_, c) => text.push(c),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_of_a_line_is_read() {
        let text = "# HELP a help {with=\"braces\"} 7\n\
                    # TYPE a counter\n\
                    plain 1\n\
                    vllm:colon{} 2.5 1700000000000\n\
                    labelled{path=\"/v1/{id}, \\\"x\\\"\\\\\\n\",le=\"+Inf\",} 3e2\n\
                    \tspaced { a = \"b\" , c = \"\" }  4\r\n\
                    bucket_bucket{le=\"1\"} 5 # {trace_id=\"x\"} 0.5\n";
        let reading = parse(text);
        let labels = |labels: &[(&str, &str)]| -> Labels {
            labels.iter().map(|(name, value)| (name.to_string(), value.to_string())).collect()
        };
        let series = |labels: Labels, value: f64| BTreeMap::from([(labels, value)]);
        let expected = [
            ("bucket_bucket", series(labels(&[("le", "1")]), 5.0)),
            ("labelled", series(labels(&[("le", "+Inf"), ("path", "/v1/{id}, \"x\"\\\n")]), 300.0)),
            ("plain", series(Labels::new(), 1.0)),
            ("spaced", series(labels(&[("a", "b"), ("c", "")]), 4.0)),
            ("vllm:colon", series(Labels::new(), 2.5)),
        ];
        assert_eq!(reading, expected.map(|(name, series)| (name.to_owned(), series)).into());
    }

    #[test]
    fn what_is_no_line_is_passed_over() {
        for garbage in [
            "",
            "name",
            "name x",
            "na-me 1",
            "{a=\"b\"} 1",
            "name{a=\"b\" 1",
            "name{a=\"b",
            "name{a=b} 1",
            "name{a=\"b\\",
            "name{a} 1",
            "name NaN",
            "name +Inf",
            "<html><body>404</body></html>",
            "\u{0}\u{1b}[2J \u{1f30a}",
        ] {
            assert_eq!(parse(garbage), MetricSet::new(), "{garbage}");
            let reading = parse(&format!("{garbage}\ngood 1\n"));
            assert_eq!(reading.keys().collect::<Vec<_>>(), ["good"], "after {garbage}");
        }
    }
}
