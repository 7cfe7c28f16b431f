//! Validation of scenario files beyond their syntax.
//!
//! Invariant: every error names its position in the text, and no accepted number overflows a time.

use std::{collections::HashSet, ops::RangeInclusive};

use toml::Spanned;

use super::file::{ArrivalKind, Quantity, SOLO, Scenario, ScenarioLoad, Variant, VariedParameter, VarySpec};

/// Bounds of times in milliseconds, shapes and factors.
const BOUNDS: RangeInclusive<f64> = 1e-6..=1e9;

/// A validation error and its position in the text.
pub struct ScenarioError {
    /// Byte offset in the text.
    pub at: usize,
    pub message: String,
}

fn reject<T, U>(spanned: &Spanned<T>, message: impl Into<String>) -> Result<U, ScenarioError> {
    Err(ScenarioError { at: spanned.span().start, message: message.into() })
}

impl Scenario {
    /// Validates what the field types do not guarantee.
    pub fn check(&self) -> Result<(), ScenarioError> {
        self.check_variants()?;
        self.check_numbers()?;
        self.check_process()?;
        self.vary.as_ref().map_or(Ok(()), |vary| self.check_values(vary))?;
        let columns = self.tables.iter().flat_map(|table| &table.columns);
        let curves = self.plots.iter().flat_map(|plot| &plot.curves);
        columns.chain(curves).try_for_each(|quantity| self.check_quantity(quantity))?;
        if let (None, Some(plot)) = (&self.vary, self.plots.first()) {
            return reject(&plot.title, "a plot needs [vary], which defines its x axis");
        }
        self.runs.iter().filter_map(|runs| runs.at.as_ref()).try_for_each(|at| self.check_row(at))
    }

    fn check_variants(&self) -> Result<(), ScenarioError> {
        let mut names = HashSet::from([SOLO]);
        for variant in &self.variants {
            let Variant { name, policy, window_ms, .. } = variant;
            if name.get_ref().is_empty() || !names.insert(name.get_ref()) {
                return reject(name, "a [[variant]] needs a unique name");
            }
            if window_ms.is_some() != (policy.as_deref() == Some("window")) {
                return reject(name, "window_ms and policy = \"window\" require each other");
            }
            if window_ms.is_some_and(|ms| !BOUNDS.contains(&ms)) {
                return reject(name, "window_ms is out of range");
            }
            if self.server.url.is_some() && !variant.is_plain() {
                return reject(name, "a running server (url) cannot be combined with variant settings");
            }
        }
        Ok(())
    }

    fn check_numbers(&self) -> Result<(), ScenarioError> {
        let load = &self.load;
        check_bounds(&self.token_scale)?;
        if let Some(paper) = &self.paper {
            check_bounds(&paper.solo_ms)?;
            check_count(&paper.solo_tokens, *paper.solo_tokens.get_ref())?;
        }
        check_count(&load.requests, u32::try_from(*load.requests.get_ref()).unwrap_or(u32::MAX))?;
        check_count(&load.output_tokens, *load.output_tokens.get_ref())?;
        match &load.output_tokens_min {
            Some(min) if min.get_ref() > load.output_tokens.get_ref() => {
                reject(min, "must not exceed output_tokens")
            }
            Some(min) => check_count(min, *min.get_ref()),
            None => Ok(()),
        }
    }

    fn check_process(&self) -> Result<(), ScenarioError> {
        let ScenarioLoad { process, gap_ms, shape, .. } = &self.load;
        let gap_is_varied =
            self.vary.as_ref().is_some_and(|vary| *vary.what.get_ref() == VariedParameter::GapMs);
        match (process.get_ref(), gap_ms) {
            (ArrivalKind::All, Some(gap)) => {
                return reject(gap, "gap_ms is not allowed with process \"all\"");
            }
            (ArrivalKind::All, None) if gap_is_varied => {
                return reject(process, "gap-ms cannot be varied with process \"all\"");
            }
            (ArrivalKind::All, None) => {}
            (_, None) if !gap_is_varied => return reject(process, "requires gap_ms"),
            (_, gap) => gap.iter().try_for_each(check_bounds)?,
        }
        match (process.get_ref(), shape) {
            (ArrivalKind::Gamma, None) => reject(process, "requires shape"),
            (ArrivalKind::Gamma, Some(shape)) => check_bounds(shape),
            (_, Some(shape)) => reject(shape, "is only allowed with process \"gamma\""),
            (_, None) => Ok(()),
        }
    }

    fn check_values(&self, vary: &VarySpec) -> Result<(), ScenarioError> {
        let values = vary.values.get_ref();
        let minimum = match (vary.what.get_ref(), &self.load.output_tokens_min) {
            (VariedParameter::GapMs, _) => *BOUNDS.start(),
            (VariedParameter::OutputTokens, Some(min)) => f64::from(*min.get_ref()),
            (VariedParameter::Requests | VariedParameter::OutputTokens, _) => 1.0,
        };
        let must_be_whole = *vary.what.get_ref() != VariedParameter::GapMs;
        let is_wrong =
            |value: &&f64| !(minimum..=1e7).contains(*value) || must_be_whole && value.fract() != 0.0;
        if values.is_empty() {
            return reject(&vary.values, "must not be empty");
        }
        match values.iter().find(is_wrong) {
            Some(value) => {
                reject(&vary.values, format!("{value} is invalid: too small, too large or not an integer"))
            }
            None => Ok(()),
        }
    }

    fn check_quantity(&self, quantity: &Quantity) -> Result<(), ScenarioError> {
        let Quantity { name, figure, of, over, paper } = quantity;
        let rows = if self.vary.is_some() { self.rows() } else { self.variants.len() };
        match (figure, paper) {
            (None, Some(paper)) if of.is_some() || over.is_some() => {
                reject(paper, "paper values cannot be combined with of or over")
            }
            (None, Some(paper)) if paper.get_ref().len() != rows => reject(
                paper,
                format!("expected {rows} values, one per row, but found {}", paper.get_ref().len()),
            ),
            (None, Some(_)) => Ok(()),
            (Some(figure), None) => {
                if of.is_none() && self.vary.is_some() {
                    return reject(name, "requires of = \"VARIANT\", because rows are not variants");
                }
                of.iter().try_for_each(|of| self.check_name(of))?;
                match over {
                    Some(over) if over.get_ref() == SOLO && !figure.is_time() => {
                        reject(over, "only total, latency and ttft can be divided by solo")
                    }
                    Some(over) if over.get_ref() == SOLO => Ok(()),
                    over => over.iter().try_for_each(|over| self.check_name(over)),
                }
            }
            _ => reject(name, "requires either figure or paper"),
        }
    }

    fn check_name(&self, name: &Spanned<String>) -> Result<(), ScenarioError> {
        match self.variants.iter().any(|variant| variant.name() == name.get_ref()) {
            true => Ok(()),
            false => reject(name, format!("there is no [[variant]] named '{}'", name.get_ref())),
        }
    }

    fn check_row(&self, at: &Spanned<f64>) -> Result<(), ScenarioError> {
        let values = self.vary.as_ref().map(|vary| vary.values.get_ref().as_slice()).unwrap_or_default();
        match values.contains(at.get_ref()) {
            true => Ok(()),
            false => reject(at, format!("{} is not one of the varied values", at.get_ref())),
        }
    }
}

fn check_bounds(value: &Spanned<f64>) -> Result<(), ScenarioError> {
    match BOUNDS.contains(value.get_ref()) {
        true => Ok(()),
        false => reject(value, "must be from 0.000001 to 1000000000"),
    }
}

fn check_count<T>(at: &Spanned<T>, number: u32) -> Result<(), ScenarioError> {
    match number {
        1..=10_000_000 => Ok(()),
        _ => reject(at, "must be from 1 to 10000000"),
    }
}

#[cfg(test)]
mod tests {
    use crate::scenario::file::{Scenario, tests::GOOD};

    /// Returns the text with the first line that sets the same key replaced by `with`.
    fn changed(with: &str) -> String {
        let key = with.split('=').next().unwrap();
        let mut lines: Vec<&str> = GOOD.lines().collect();
        let at = lines.iter().position(|line| line.starts_with(key)).unwrap_or_else(|| panic!("{key}"));
        lines[at] = with;
        lines.join("\n")
    }

    #[test]
    fn what_is_wrong_is_reported_by_file_line_and_key() {
        for (line, expected) in [
            ("title = 5", "f:1: title: invalid type: integer"),
            ("requests = 0", "f:3: requests: must be from 1"),
            ("requests = -1", "f:3: requests: invalid value"),
            ("prompt_tokens = \"8\"", "f:4: prompt_tokens: invalid type: string"),
            ("prompt_tokens = 0", "f:4: prompt_tokens: invalid value: integer `0`"),
            ("process = \"burst\"", "f:6: process: unknown variant `burst`"),
            ("process = \"all\"", "f:7: gap_ms: gap_ms is not allowed with process \"all\""),
            ("process = \"gamma\"", "f:6: process: requires shape"),
            ("gap_ms = 0", "f:7: gap_ms: must be from 0.000001"),
            ("gap_ms = nan", "f:7: gap_ms: must be from 0.000001"),
            ("solo_ms = -3", "f:9: solo_ms: must be from 0.000001"),
            ("solo_tokens = 0", "f:10: solo_tokens: must be from 1"),
            ("what = \"rate\"", "f:12: what: unknown variant `rate`"),
            ("values = []", "f:13: values: must not be empty"),
            ("values = [1, 2.5]", "f:13: values: 2.5 is invalid"),
            ("values = [1, 2, 3]", "f:30: paper: expected 3 values, one per row, but found 2"),
            ("name = \"window\"", "f:18: name: a [[variant]] needs a unique name"),
            ("name = \"solo\"", "f:16: name: a [[variant]] needs a unique name"),
            ("policy = \"fused\"", "f:18: name: window_ms and policy"),
            ("window_ms = 0", "f:18: name: window_ms is out of range"),
            ("figure = \"speed\"", "f:25: figure: unknown variant `speed`"),
            ("figure = \"overlap\"", "f:27: over: only total, latency and ttft"),
            ("of = \"nobody\"", "f:26: of: there is no [[variant]] named 'nobody'"),
            ("over = \"nobody\"", "f:27: over: there is no [[variant]] named 'nobody'"),
        ] {
            let text = changed(line);
            let error =
                Scenario::parse("f", &text).err().unwrap_or_else(|| panic!("{line} is accepted")).to_string();
            assert!(error.starts_with("f:") && error.contains(expected), "{line}: {error}");
        }
    }

    #[test]
    fn what_does_not_belong_is_reported() {
        for (more, expected) in [
            ("[[table]]\ntitle = \"t\"\ncolumns = []\n", "unknown field `columns`"),
            ("[[table.column]]\nname = \"x\"\n", "f:32: name: requires either figure or paper"),
            ("[[table.column]]\nname = \"x\"\nfigure = \"total\"\n", "f:32: name: requires of = "),
            ("[[table.column]]\nname = \"x\"\npaper = [1, 2]\nof = \"fused\"\n", "f:33: paper: paper values"),
            ("[[runs]]\ntitle = \"r\"\nat = 3\n", "f:33: at: 3 is not one of"),
            ("[server]\nurl = \"http://x\"\n", "f:18: name: a running server"),
            ("[sever]\n", "unknown field `sever`"),
            ("[[variant]]\nname = \"x\"\npolice = \"fused\"\n", "unknown field `police`"),
            ("x = \n", "f:31: "),
        ] {
            let error = Scenario::parse("f", &(GOOD.to_owned() + more)).unwrap_err().to_string();
            assert!(error.starts_with("f:") && error.contains(expected), "{more}: {error}");
        }
        let without_vary =
            GOOD.replace("[vary]\nwhat = \"requests\"\nvalues = [1, 2]\nlabel = \"requests\"\n", "");
        let plot = "[[plot]]\ntitle = \"p\"\nlabel = \"y\"\ncurve = []\n";
        let error = Scenario::parse("f", &(without_vary + plot)).unwrap_err().to_string();
        assert!(error.contains("f:28: title: a plot needs [vary]"), "{error}");
    }
}
