//! The report sections of a scenario.
//!
//! Invariant: nothing is computed here; a missing value is shown as a dash or as a missing point.

use super::{
    file::{AxisScale, Metric, PlotSpec, Quantity, RunsSpec, Scenario, TableSpec, VariedParameter},
    head::ReportHead,
    results::ScenarioResults,
    scale::{ScenarioScale, scaled_tokens},
};
use crate::report::html::{Axis, Curve, CurveForm, Scale as PlotScale, Section};

/// Returns the sections, starting with the head.
pub fn sections(scenario: &Scenario, head: &ReportHead, results: &ScenarioResults) -> Vec<Section> {
    let page = Page { scenario, scale: &head.scale, results };
    let tables = scenario.tables.iter().map(|table| page.table(table));
    let plots = scenario.plots.iter().map(|plot| page.plot(plot));
    let runs = scenario.runs.iter().map(|runs| page.runs(runs));
    [head.section(scenario, results)].into_iter().chain(tables).chain(plots).chain(runs).collect()
}

struct Page<'a> {
    scenario: &'a Scenario,
    scale: &'a ScenarioScale,
    results: &'a ScenarioResults,
}

impl Page<'_> {
    fn table(&self, table: &TableSpec) -> Section {
        let names = table.columns.iter().map(|column| column.name.get_ref().clone());
        let rows = (0..self.rows()).map(|row| {
            let figures = table.columns.iter().map(|column| self.cell(column, row));
            self.row_names(row).into_iter().chain(figures).collect()
        });
        Section::Table {
            title: table.title.clone(),
            text: table.text.clone(),
            columns: self.row_titles().into_iter().chain(names).collect(),
            rows: rows.collect(),
        }
    }

    fn rows(&self) -> usize {
        match self.scenario.vary {
            Some(_) => self.scenario.rows(),
            None => self.scenario.variants.len(),
        }
    }

    fn cell(&self, column: &Quantity, row: usize) -> String {
        let is_count = matches!(column.figure, Some(Metric::Steps)) && column.over.is_none();
        let shown = if is_count { |value: f64| format!("{value:.0}") } else { number };
        self.results.value(self.scenario, column, row).map_or("-".into(), shown)
    }

    /// Returns the titles of the columns that name a row: the varied parameter, and its scaled value.
    fn row_titles(&self) -> Vec<String> {
        let Some(vary) = &self.scenario.vary else { return vec!["variant".into()] };
        let here = match vary.what.get_ref() {
            VariedParameter::Requests => None,
            VariedParameter::GapMs => Some("ms (scaled)"),
            VariedParameter::OutputTokens => Some("tokens (scaled)"),
        };
        [vary.label.as_str()].into_iter().chain(here).map(str::to_owned).collect()
    }

    fn row_names(&self, row: usize) -> Vec<String> {
        let Some(vary) = &self.scenario.vary else {
            return vec![self.scenario.variants[row].name().to_owned()];
        };
        let value = vary.values.get_ref()[row];
        let here = match vary.what.get_ref() {
            VariedParameter::Requests => None,
            VariedParameter::GapMs => Some(number(self.scale.time(value).as_secs_f64() * 1e3)),
            VariedParameter::OutputTokens => Some(scaled_tokens(value as u32, self.scale.tokens).to_string()),
        };
        [value.to_string()].into_iter().chain(here).collect()
    }

    fn plot(&self, plot: &PlotSpec) -> Section {
        let label = self.scenario.vary.as_ref().map_or("", |vary| &vary.label);
        Section::Plot {
            title: plot.title.get_ref().clone(),
            text: plot.text.clone(),
            x: Axis { label: label.into(), scale: plot_scale(plot.x_scale) },
            y: Axis { label: plot.label.clone(), scale: plot_scale(plot.y_scale) },
            curves: plot.curves.iter().map(|curve| self.curve(curve)).collect(),
        }
    }

    fn curve(&self, curve: &Quantity) -> Curve {
        let point = |row| Some((self.scenario.value(row)?, self.results.value(self.scenario, curve, row)?));
        let form = if curve.paper.is_some() { CurveForm::Reference } else { CurveForm::LineAndPoints };
        let points = (0..self.rows()).filter_map(point).collect();
        Curve { label: curve.name.get_ref().clone(), points, form }
    }

    /// Returns the median run of each variant, labelled with the variant's name.
    fn runs(&self, runs: &RunsSpec) -> Section {
        let values =
            self.scenario.vary.as_ref().map(|vary| vary.values.get_ref().as_slice()).unwrap_or_default();
        let at = runs.at.as_ref().and_then(|at| values.iter().position(|value| value == at.get_ref()));
        let row = at.unwrap_or(self.scenario.rows() - 1);
        let of_variant = |(number, variant): (usize, &super::file::Variant)| {
            let mut run = self.results.median_run(number, row)?.clone();
            run.label = variant.name().to_owned();
            Some(run)
        };
        let shown = self.scenario.variants.iter().enumerate().filter_map(of_variant).collect();
        Section::Runs { title: runs.title.clone(), text: runs.text.clone(), runs: shown }
    }
}

fn plot_scale(scale: AxisScale) -> PlotScale {
    match scale {
        AxisScale::Linear => PlotScale::Linear,
        AxisScale::Log => PlotScale::Log,
    }
}

/// Formats a value with three digits, or with all its integer digits.
fn number(value: f64) -> String {
    match value.abs() {
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario::results::tests::{results, scenario};

    fn page(scenario: &Scenario) -> Vec<Section> {
        let results = results();
        let scale = ScenarioScale::from_solo(scenario.paper.as_ref(), 0.25, results.solo);
        let head = ReportHead {
            server: "mainstem 0.1.0".into(),
            model: "tiny".into(),
            scale,
            repeats: 3,
            notes: vec!["something".into()],
        };
        sections(scenario, &head, &results)
    }

    #[test]
    fn every_part_of_the_file_is_a_section() {
        let scenario = scenario();
        let sections = page(&scenario);
        let [
            Section::Table { title, text, rows: head, .. },
            Section::Table { columns, rows, .. },
            Section::Plot { x, curves, .. },
            Section::Runs { runs, .. },
        ] = &sections[..]
        else {
            panic!("{sections:?}")
        };
        assert_eq!((title.as_str(), text.as_str()), ("Two", "Why."));
        assert!(head.contains(&vec!["model".into(), "tiny".into()]), "{head:?}");
        assert!(
            head.contains(&vec!["time scale".into(), "0.0893: 500 ms of the paper are 44.6 ms here".into()])
        );
        assert_eq!(columns[..3], ["gap, ms", "ms (scaled)", "total"]);
        assert_eq!(rows[0], ["500", "44.6", "3.00", "4.00", "8.00", "560", "3.00", "10.9"]);
        assert_eq!(rows[1], ["1000", "89.3", "5.00", "-", "-", "4000", "5.00", "-"]);
        assert_eq!((x.label.as_str(), x.scale), ("gap, ms", PlotScale::Log));
        let shown: Vec<_> = curves.iter().map(|curve| (curve.form, curve.points.clone())).collect();
        let expected =
            [(CurveForm::LineAndPoints, vec![(500.0, 4.0)]), (CurveForm::Reference, vec![(500.0, 10.9)])];
        assert_eq!(shown, expected);
        // The last row, where only one variant was run.
        assert_eq!(runs.iter().map(|run| run.label.as_str()).collect::<Vec<_>>(), ["fused"]);
        assert_eq!(runs[0].duration_s, 5.0);
    }

    #[test]
    fn numbers_have_three_digits() {
        assert_eq!(
            [0.123456, 9.5, 12.345, 560.4, 12345.6].map(number),
            ["0.12", "9.50", "12.3", "560", "12346"]
        );
    }
}
