//! The results of a scenario, and the values of its tables and plots.
//!
//! Invariant: the value of several runs is their median, and a ratio is that of two medians. Rows that were
//! not run have no value.

use std::{collections::BTreeMap, time::Duration};

use super::file::{Metric, Quantity, SOLO, Scenario};
use crate::{measure::percentile, report::RunReport};

/// The results of all runs of a scenario.
#[derive(Clone, Debug)]
pub struct ScenarioResults {
    /// Latency of a single request without load.
    pub solo: Duration,
    /// Factor that was applied to response lengths.
    pub token_scale: f64,
    /// Runs by (variant, row).
    runs: BTreeMap<(usize, usize), Vec<RunReport>>,
}

impl ScenarioResults {
    /// Creates empty results.
    pub fn new(solo: Duration, token_scale: f64) -> Self {
        Self { solo, token_scale, runs: BTreeMap::new() }
    }

    /// Adds a run of the variant with this index at this row.
    pub fn add(&mut self, variant: usize, row: usize, run: RunReport) {
        self.runs.entry((variant, row)).or_default().push(run);
    }

    /// Returns every run with its variant and row.
    pub fn all(&self) -> impl Iterator<Item = (usize, usize, &RunReport)> {
        self.runs.iter().flat_map(|(&(variant, row), runs)| runs.iter().map(move |run| (variant, row, run)))
    }

    /// Returns the run of median duration, if there is any.
    pub fn median_run(&self, variant: usize, row: usize) -> Option<&RunReport> {
        let mut runs: Vec<&RunReport> = self.runs.get(&(variant, row))?.iter().collect();
        runs.sort_by(|one, two| one.duration_s.total_cmp(&two.duration_s));
        runs.get(runs.len() / 2).copied()
    }

    /// Returns the value of a quantity in a row of a table or plot. Without a varied parameter, the rows are
    /// the variants.
    pub fn value(&self, scenario: &Scenario, quantity: &Quantity, row: usize) -> Option<f64> {
        if let Some(paper) = &quantity.paper {
            return paper.get_ref().get(row).copied().filter(|value| value.is_finite());
        }
        let figure = quantity.figure?;
        let (own, row) = if scenario.vary.is_some() { (None, row) } else { (Some(row), 0) };
        let number = |name: &str| scenario.variants.iter().position(|variant| variant.name() == name);
        let of = quantity.of.as_ref().map_or(own, |of| number(of.get_ref()))?;
        let value = self.metric(figure, of, row)?;
        let over = match quantity.over.as_ref().map(|over| over.get_ref().as_str()) {
            None => return Some(value),
            Some(SOLO) => self.solo.as_secs_f64(),
            Some(name) => self.metric(figure, number(name)?, row)?,
        };
        Some(value / over).filter(|ratio| ratio.is_finite())
    }

    fn metric(&self, figure: Metric, variant: usize, row: usize) -> Option<f64> {
        let runs = self.runs.get(&(variant, row))?;
        let mut values = runs.iter().filter_map(|run| self.run_metric(figure, run)).collect::<Vec<f64>>();
        values.sort_by(f64::total_cmp);
        (!values.is_empty()).then(|| percentile(&values, 50.0))
    }

    fn run_metric(&self, figure: Metric, run: &RunReport) -> Option<f64> {
        let steps = run.server.as_ref().and_then(|server| server.steps).map(|steps| steps as f64);
        let mean_s = |of: &Option<crate::report::Distribution>| Some(of.as_ref()?.stats.mean / 1e3);
        match figure {
            Metric::Total => Some(run.duration_s),
            Metric::Latency => mean_s(&run.latencies.e2el),
            Metric::Ttft => mean_s(&run.latencies.ttft),
            Metric::Throughput => Some(run.output_throughput),
            Metric::Steps => steps,
            Metric::StepsUnscaled => Some(steps? / self.token_scale),
            Metric::Overlap => Some(run.overlap * 100.0),
            Metric::InFlight => Some(run.mean_concurrency),
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::{
        report::ServerReport,
        testing::{constant_distribution, report},
    };

    /// A scenario with two variants and two rows.
    const TEXT: &str = "title = \"Two\"\ntext = \"Why.\"\ntoken_scale = 0.25\n\
        [load]\nrequests = 8\nprompt_tokens = 8\noutput_tokens = 504\nprocess = \"constant\"\n\
        [paper]\nsolo_ms = 5600\nsolo_tokens = 504\n\
        [vary]\nwhat = \"gap-ms\"\nvalues = [500, 1000]\nlabel = \"gap, ms\"\n\
        [[variant]]\nname = \"fused\"\n[[variant]]\nname = \"alone\"\npolicy = \"concurrent\"\n\
        [[table]]\ntitle = \"Table\"\n\
        [[table.column]]\nname = \"total\"\nfigure = \"total\"\nof = \"fused\"\n\
        [[table.column]]\nname = \"speed-up\"\nfigure = \"total\"\nof = \"alone\"\nover = \"fused\"\n\
        [[table.column]]\nname = \"latency\"\nfigure = \"latency\"\nof = \"alone\"\nover = \"solo\"\n\
        [[table.column]]\nname = \"steps\"\nfigure = \"steps-unscaled\"\nof = \"fused\"\n\
        [[table.column]]\nname = \"overlap\"\nfigure = \"overlap\"\nof = \"fused\"\n\
        [[table.column]]\nname = \"paper\"\npaper = [10.9, nan]\n\
        [[plot]]\ntitle = \"Plot\"\nlabel = \"speed-up\"\nx_scale = \"log\"\n\
        [[plot.curve]]\nname = \"ours\"\nfigure = \"total\"\nof = \"alone\"\nover = \"fused\"\n\
        [[plot.curve]]\nname = \"theirs\"\npaper = [10.9, nan]\n\
        [[runs]]\ntitle = \"Runs\"\n";

    pub fn scenario() -> Scenario {
        Scenario::parse("f", TEXT).unwrap()
    }

    fn run(total_s: f64, latency_ms: f64, steps: u64) -> RunReport {
        let mut run = report(8);
        run.duration_s = total_s;
        run.overlap = total_s / 100.0;
        run.latencies.e2el = constant_distribution(latency_ms);
        run.server = Some(ServerReport { rows: vec![], steps: Some(steps), sequences_per_step: None });
        run
    }

    /// Returns results in which a single request takes half a second and the slower variant lacks the second
    /// row.
    pub fn results() -> ScenarioResults {
        let mut results = ScenarioResults::new(Duration::from_millis(500), 0.25);
        for (total_s, steps) in [(2.0, 126), (9.0, 300), (3.0, 140)] {
            results.add(0, 0, run(total_s, 600.0, steps));
        }
        results.add(1, 0, run(12.0, 4_000.0, 1008));
        results.add(0, 1, run(5.0, 500.0, 1000));
        results
    }

    #[test]
    fn figures_and_ratios_are_those_of_the_medians() {
        let (scenario, results) = (scenario(), results());
        let row = |row: usize| -> Vec<Option<f64>> {
            let columns = &scenario.tables[0].columns;
            columns.iter().map(|column| results.value(&scenario, column, row)).collect()
        };
        // 12 s over the median of 2, 3 and 9; 4 s over 0.5; 140 steps at a scale of a quarter.
        assert_eq!(row(0), [Some(3.0), Some(4.0), Some(8.0), Some(560.0), Some(3.0), Some(10.9)]);
        assert_eq!(row(1), [Some(5.0), None, None, Some(4000.0), Some(5.0), None]);
        assert_eq!(results.median_run(0, 0).map(|run| run.duration_s), Some(3.0));
        assert!(results.median_run(1, 1).is_none());
        assert_eq!(results.all().count(), 5);
    }

    /// Without a varied parameter, each variant is a row.
    #[test]
    fn variants_are_rows_where_nothing_is_varied() {
        let text = TEXT
            .split("[vary]")
            .next()
            .unwrap()
            .replace("\"constant\"", "\"constant\"\ngap_ms = 1")
            .to_owned()
            + "[[variant]]\nname = \"fused\"\n[[variant]]\nname = \"alone\"\n[[table]]\ntitle = \"t\"\n\
               [[table.column]]\nname = \"c\"\nfigure = \"total\"\nover = \"fused\"\n";
        let scenario = Scenario::parse("f", &text).unwrap();
        let column = &scenario.tables[0].columns[0];
        let values = [0, 1].map(|row| results().value(&scenario, column, row));
        assert_eq!(values, [Some(1.0), Some(4.0)]);
    }
}
