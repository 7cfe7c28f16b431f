//! The head of a scenario report: environment, scales, and problems.
//!
//! Invariant: the head contains everything needed to compare results, including problems.

use super::{
    file::Scenario,
    results::ScenarioResults,
    scale::{ScenarioScale, scaled_tokens},
};
use crate::report::{RunReport, html::Section};

/// The data of the report head.
pub struct ReportHead {
    /// The server: program and version, or URL.
    pub server: String,
    pub model: String,
    pub scale: ScenarioScale,
    /// Number of runs per variant and row.
    pub repeats: usize,
    /// Notes that affect the interpretation of the results.
    pub notes: Vec<String>,
}

/// Returns the CPU's name, if known, and the number of cores available to this process.
pub fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    format!("{}, {cores} cores", cpu_name(&text).unwrap_or("unknown CPU"))
}

/// Returns the name of the first CPU in the text of `/proc/cpuinfo`.
fn cpu_name(cpuinfo: &str) -> Option<&str> {
    let line = cpuinfo.lines().find(|line| line.starts_with("model name"))?;
    line.split_once(':').map(|(_, name)| name.trim())
}

impl ReportHead {
    /// Builds the head section.
    pub fn section(&self, scenario: &Scenario, results: &ScenarioResults) -> Section {
        let ScenarioScale { tokens, time, solo } = self.scale;
        let solo_tokens = scenario.solo_tokens(tokens);
        let mut rows = vec![
            ("machine", machine()),
            ("server", self.server.clone()),
            ("model", self.model.clone()),
            ("single request", format!("{:.1} ms for {solo_tokens} tokens", solo.as_secs_f64() * 1e3)),
            ("token scale", format!("{tokens}: {}", self.describe_token_scale(scenario))),
            ("time scale", format!("{time:.4}: {}", self.describe_time_scale(scenario))),
            ("runs per variant and row", self.repeats.to_string()),
        ];
        rows.extend(self.notes.iter().map(|note| ("note", note.clone())));
        rows.extend(results.all().filter_map(|(variant, row, run)| {
            let of = scenario.variants[variant].name();
            let at = scenario.value(row).map_or(String::new(), |value| format!(" at {value}"));
            Some(("problem", format!("{of}{at}: {}", describe_problems(run)?)))
        }));
        Section::Table {
            title: scenario.title.clone(),
            text: scenario.text.clone(),
            columns: vec!["".into(), "".into()],
            rows: rows.into_iter().map(|(name, value)| vec![name.to_owned(), value]).collect(),
        }
    }

    fn describe_token_scale(&self, scenario: &Scenario) -> String {
        let tokens = *scenario.load.output_tokens.get_ref();
        format!("responses of {tokens} tokens have {} here", scaled_tokens(tokens, self.scale.tokens))
    }

    fn describe_time_scale(&self, scenario: &Scenario) -> String {
        match scenario.paper {
            None => "times are not scaled".into(),
            Some(_) => {
                let here = self.scale.time(500.0).as_secs_f64() * 1e3;
                format!("500 ms of the paper are {here:.1} ms here")
            }
        }
    }
}

/// Describes the problems of a run, if there are any.
fn describe_problems(run: &RunReport) -> Option<String> {
    let counts = &run.counts;
    let parts =
        [(counts.failed, "failed"), (counts.unsent, "were not sent"), (counts.short, "got fewer tokens")];
    let parts = parts.iter().filter(|(number, _)| *number > 0);
    let problems: Vec<String> = parts.map(|(number, what)| format!("{number} {what}")).collect();
    let first =
        counts.failures.values().next().map_or(String::new(), |failure| format!(" ({})", failure.first));
    (!problems.is_empty()).then(|| format!("of {} requests {}{first}", counts.planned, problems.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{report::Failures, testing::report};

    #[test]
    fn the_cpu_is_named_where_the_system_names_it() {
        let text = "processor\t: 0\nvendor_id\t: X\nmodel name\t: A CPU @ 2.10GHz\nmodel name\t: B\n";
        assert_eq!((cpu_name(text), cpu_name("Hardware: x\n")), (Some("A CPU @ 2.10GHz"), None));
        assert!(machine().ends_with(" cores"));
    }

    #[test]
    fn trouble_is_reported_and_a_clean_run_is_not() {
        let mut run = report(8);
        assert_eq!(describe_problems(&run), None);
        run.counts.failed = 2;
        run.counts.short = 1;
        run.counts.failures.insert("status 500".into(), Failures { count: 2, first: "out of luck".into() });
        assert_eq!(
            describe_problems(&run).as_deref(),
            Some("of 8 requests 2 failed, 1 got fewer tokens (out of luck)")
        );
    }
}
