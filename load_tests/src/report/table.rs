//! The report as a plain-text table for the terminal.
//!
//! Invariant: text sent by a server stays on its line and is printed without control characters.

use std::fmt::Write;

use super::{Distribution, RunReport, ServerReport, bars};
use crate::measure::Stats;

/// Minimum p99 lateness in milliseconds that causes a warning.
const LATE_MS: f64 = 10.0;
/// Minimum p99 lateness that causes a warning, as a fraction of the median time to first token.
const LATE_SHARE: f64 = 0.05;

/// Renders the table.
pub fn table(report: &RunReport) -> String {
    let mut table = TextTable(String::new());
    table.plan(report);
    table.requests(report);
    table.rates(report);
    table.latencies(report);
    table.models(report);
    if let Some(server) = &report.server {
        table.server(server);
    }
    table.warnings(report);
    table.0 + &bars::chart("requests in flight", &report.series.in_flight)
}

struct TextTable(String);

impl TextTable {
    fn line(&mut self, label: &str, value: impl AsRef<str>) {
        let line = format!("{label:<21}{}", value.as_ref());
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "{}", line.trim_end());
    }

    fn plan(&mut self, report: &RunReport) {
        let RunReport { url, models, plan, .. } = report;
        self.line("server", one_line(&format!("{url}, {}, model {}", plan.endpoint, models.join(", "))));
        let rate = plan.rate.map_or(String::new(), |rate| format!(" ({rate:.2} req/s)"));
        let at_most =
            plan.max_concurrency.map_or(String::new(), |most| format!(", at most {most} in flight"));
        self.line("arrivals", format!("{}{rate}{at_most}, seed {}", plan.arrivals, plan.seed));
        self.line("tokens", format!("prompts {}, outputs {}", plan.prompt, plan.output));
    }

    fn requests(&mut self, report: &RunReport) {
        let counts = &report.counts;
        self.line(
            "requests",
            format!("{} planned, {} sent, {} unsent", counts.planned, counts.sent, counts.unsent),
        );
        let ends = [(counts.completed, "completed"), (counts.failed, "failed"), (counts.hung_up, "hung up")];
        self.line("", ends.map(|(count, end)| format!("{count} {end}")).join(", "));
        for (kind, failures) in &counts.failures {
            let first = one_line(&failures.first);
            self.line("failed", format!("{} x {kind}, first: {first}", failures.count));
        }
        if counts.short > 0 {
            self.line("short responses", format!("{} with fewer tokens than requested", counts.short));
        }
        if counts.retries > 0 {
            self.line("retries", counts.retries.to_string());
        }
    }

    fn rates(&mut self, report: &RunReport) {
        self.line("duration", format!("{:.3} s, first send to last token", report.duration_s));
        let RunReport { output_throughput, output_tokens, peak_output_tokens_per_s: peak, .. } = report;
        self.line(
            "output",
            format!("{output_throughput:.1} tok/s ({output_tokens} tokens, peak {peak} per second)"),
        );
        self.line(
            "prompts",
            format!("{:.1} tok/s ({} tokens)", report.input_throughput, report.input_tokens),
        );
        self.line("completed", format!("{:.2} req/s", report.request_throughput));
        if let Some(goodput) = &report.goodput {
            let limits: Vec<String> =
                goodput.limits_ms.iter().map(|(name, limit)| format!("{name} {limit} ms")).collect();
            let (rate, good, share) = (goodput.throughput, goodput.good, goodput.share * 100.0);
            let limits = limits.join(", ");
            self.line("goodput", format!("{rate:.2} req/s ({good} requests, {share:.1} %) within {limits}"));
        }
        let (peak, mean, overlap) =
            (report.peak_concurrency, report.mean_concurrency, report.overlap * 100.0);
        self.line("in flight", format!("peak {peak}, mean {mean:.2}, overlap {overlap:.1} %"));
    }

    fn latencies(&mut self, report: &RunReport) {
        self.line("", "");
        self.line("ms", columns(["mean", "median", "std", "p90", "p95", "p99", "max"].map(String::from)));
        for (_, label, distribution) in report.latencies.named() {
            let stats = distribution.map(|distribution| distribution.stats.named());
            let values = stats.map(|stats| columns(stats.map(|(_, value)| format!("{value:.2}"))));
            self.line(label, values.unwrap_or_else(|| columns(["-".into()])));
        }
    }

    fn models(&mut self, report: &RunReport) {
        let heads = [
            "sent",
            "completed",
            "failed",
            "tokens",
            "ttft med",
            "ttft p99",
            "itl med",
            "itl p99",
            "e2e med",
        ];
        if !report.by_model.is_empty() {
            self.line("", "");
            self.line("model (ms)", columns(heads.map(String::from)));
        }
        for model in &report.by_model {
            let counts =
                [model.sent as u64, model.completed as u64, model.failed as u64, model.output_tokens];
            let figure = |stats: Option<Stats>, of: fn(Stats) -> f64| {
                stats.map_or("-".into(), |s| format!("{:.2}", of(s)))
            };
            let times = [
                figure(model.ttft, |stats| stats.median),
                figure(model.ttft, |stats| stats.p99),
                figure(model.itl, |stats| stats.median),
                figure(model.itl, |stats| stats.p99),
                figure(model.e2el, |stats| stats.median),
            ];
            self.line(&one_line(&model.model), "");
            self.line("", columns(counts.map(|count| count.to_string())) + &columns(times));
        }
    }

    fn server(&mut self, server: &ServerReport) {
        self.line("", "");
        let heads = columns(["server", "client"].map(String::from));
        self.line("server metrics", heads + " (percentiles are estimated from histogram buckets)");
        for row in &server.rows {
            let client = row.client.map_or(String::new(), format_value);
            let figures = columns([format_value(row.server), client]);
            self.line(&row.name, format!("{figures} {}", row.unit));
        }
    }

    fn warnings(&mut self, report: &RunReport) {
        if let Some(p99) = late_ms(report) {
            self.line("", "");
            self.line(
                "WARNING",
                format!("requests were sent late (p99 {p99:.2} ms), and their latencies include the delay:"),
            );
            let waits = report.plan.max_concurrency.map_or("", |_| "the concurrency limit was reached, or ");
            self.line("", format!("{waits}the client machine is too slow for the load"));
        }
        if report.plan.closed_loop {
            self.line("", "");
            self.line("WARNING", "closed loop: a slow server receives fewer requests, so that slow phases");
            self.line("", "are underrepresented in the latencies (coordinated omission)");
        }
    }
}

/// Returns the 99th percentile of lateness in milliseconds if it is large enough for a warning.
fn late_ms(report: &RunReport) -> Option<f64> {
    let stats =
        |distribution: &Option<Distribution>| distribution.as_ref().map(|distribution| distribution.stats);
    let p99 = stats(&report.latencies.lateness)?.p99;
    let share_ms = stats(&report.latencies.ttft).map_or(f64::INFINITY, |ttft| ttft.median * LATE_SHARE);
    (p99 > LATE_MS || p99 > share_ms).then_some(p99)
}

fn columns<const N: usize>(values: [String; N]) -> String {
    values.iter().map(|value| format!("{value:>11}")).collect()
}

/// Formats a value: whole numbers without decimals, small ones with more digits.
fn format_value(value: f64) -> String {
    match value {
        whole if whole.fract() == 0.0 => format!("{whole:.0}"),
        small if small.abs() < 1.0 => format!("{small:.4}"),
        _ => format!("{value:.2}"),
    }
}

/// Escapes control characters.
fn one_line(text: &str) -> String {
    let mut line = String::with_capacity(text.len());
    for c in text.chars() {
        match c.is_control() {
            true => line.extend(c.escape_default()),
            false => line.push(c),
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        measure::{
            GoodputLimits, report,
            testing::{completed, failed, record, settings},
        },
        plan::arrivals::Arrivals,
        report::ServerRow,
        run::RunSettings,
        sample::{FailureKind, Outcome, Sample},
    };

    fn report_of(samples: Vec<Sample>) -> RunReport {
        report(&settings(), &record(samples), &GoodputLimits::from([("ttft".to_owned(), 200.0)]))
    }

    fn line<'a>(text: &'a str, label: &str) -> &'a str {
        text.lines().find(|line| line.starts_with(label)).unwrap_or_else(|| panic!("no {label} in\n{text}"))
    }

    #[test]
    fn every_figure_has_its_line() {
        let retried = Sample { retries: 2, ..completed(0, 0, &[100, 1000]) };
        let text = table(&report_of(vec![retried, completed(0, 0, &[300, 400, 2000]), failed(0, 0)]));
        assert_eq!(line(&text, "requests"), "requests             5 planned, 3 sent, 1 unsent");
        assert!(text.contains("2 completed, 1 failed, 0 hung up"), "{text}");
        assert_eq!(line(&text, "failed"), "failed               1 x status 500, first: out of luck");
        assert_eq!(line(&text, "retries"), "retries              2");
        assert!(line(&text, "short responses").contains("1 with fewer tokens"), "{text}");
        assert!(line(&text, "output").contains("2.5 tok/s (5 tokens, peak 3 per second)"), "{text}");
        assert!(line(&text, "prompts").contains("10.0 tok/s (20 tokens)"), "{text}");
        assert!(
            line(&text, "goodput").contains("0.50 req/s (1 requests, 33.3 %) within ttft 200 ms"),
            "{text}"
        );
        assert!(line(&text, "in flight").contains("peak 2, mean 1.50, overlap 50.0 %"), "{text}");
        let figures: Vec<&str> = line(&text, "time to first token").split_whitespace().skip(4).collect();
        assert_eq!(figures, ["200.00", "200.00", "100.00", "280.00", "290.00", "298.00", "300.00"]);
        assert!(!text.contains("WARNING"), "{text}");
    }

    #[test]
    fn the_chart_has_the_shape_of_the_run() {
        // Two requests in flight for the first half, one for the second.
        let text = table(&report_of(vec![completed(0, 0, &[1000]), completed(0, 0, &[2000])]));
        let chart: Vec<&str> =
            text.lines().skip_while(|line| *line != "requests in flight").skip(1).collect();
        assert_eq!(chart.len(), 10);
        assert_eq!(chart[0], format!("      2 |{}", "█".repeat(50)));
        assert_eq!(chart[7], format!("        |{}", "█".repeat(100)));
        assert_eq!(chart[8], format!("      0 +{}", "-".repeat(100)));
        assert_eq!(chart[9], format!("         0.00 s{:>94}", "2.00 s"));
    }

    #[test]
    fn a_server_cannot_write_to_the_terminal() {
        let evil = FailureKind::Status(503).with_message("\x1b[2Jgone\nrequests 9");
        let mut report = report_of(vec![Sample { outcome: Outcome::Failed(evil), ..failed(0, 0) }]);
        report.models = vec!["m\x07\r".into()];
        let text = table(&report);
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
        assert!(text.contains("first: \\u{1b}[2Jgone\\nrequests 9"), "{text}");
    }

    #[test]
    fn a_late_generator_and_a_closed_loop_are_warned_of() {
        let late =
            |ms: u64| table(&report_of(vec![completed(0, ms, &[ms + 5000]), completed(0, ms, &[ms + 5000])]));
        assert!(late(11).contains("sent late (p99 11.00 ms), and"), "{}", late(11));
        assert!(!late(9).contains("WARNING"));
        let quick = table(&report_of(vec![completed(0, 3, &[40]), completed(0, 3, &[41])]));
        assert!(quick.contains("sent late (p99 3.00 ms)"), "{quick}");
        let users =
            RunSettings { arrivals: Arrivals::Users { count: 2, think: Default::default() }, ..settings() };
        let text = table(&report(&users, &record(vec![]), &GoodputLimits::new()));
        assert!(text.contains("coordinated omission"), "{text}");
    }

    #[test]
    fn models_and_the_server_have_their_lines() {
        let mut two = record(vec![completed(0, 0, &[10, 20]), Sample { model: 1, ..completed(0, 0, &[40]) }]);
        two.models.push("other".into());
        let mut report = report(&settings(), &two, &GoodputLimits::new());
        let row = |name: &str, unit: &str, server, client| ServerRow {
            name: name.into(),
            unit: unit.into(),
            server,
            client,
        };
        let rows = vec![row("steps", "", 12.0, None), row("TTFT mean", "ms", 0.1234, Some(25.0))];
        report.server = Some(ServerReport { rows, steps: Some(12), sequences_per_step: None });
        let text = table(&report);
        let words =
            |label: &str| line(&text, label).split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        let below = text.lines().skip_while(|line| *line != "other").nth(1).unwrap();
        let figures: Vec<&str> = below.split_whitespace().collect();
        assert_eq!(figures, ["1", "1", "0", "1", "40.00", "40.00", "-", "-", "40.00"]);
        assert_eq!(words("TTFT mean"), ["TTFT", "mean", "0.1234", "25", "ms"]);
        assert_eq!(words("steps"), ["steps", "12"]);
    }

    #[test]
    fn nothing_at_all_has_a_table_too() {
        let text = table(&report(&settings(), &record(vec![]), &GoodputLimits::new()));
        assert!(text.contains("0 sent") && text.contains("0.0 tok/s"), "{text}");
        assert!(!text.contains("requests in flight") && !text.contains("NaN"), "{text}");
    }
}
