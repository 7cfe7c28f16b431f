//! Scenario files in TOML: the load, the varied parameter, the server variants, and the tables and plots that
//! compare the results with a paper's values. Unknown keys are errors.
//!
//! Invariant: a parsed scenario is valid: every referenced name exists, and every list of paper values has
//! one value per row.

use std::{num::NonZeroU32, path::Path};

use anyhow::{Context, anyhow};
use serde::Deserialize;
use toml::Spanned;

use super::{check::ScenarioError, shipped};

/// An experiment: a load with one varied parameter, run on several server variants.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    pub title: String,
    /// Description of the experiment, shown at the head of the report.
    #[serde(default)]
    pub text: String,
    /// Factor applied to response lengths, unless overridden on the command line.
    #[serde(default = "one")]
    pub token_scale: Spanned<f64>,
    #[serde(default)]
    pub server: ServerSpec,
    pub load: ScenarioLoad,
    /// The paper's reference for scaling times; without it, times are not scaled.
    pub paper: Option<PaperReference>,
    /// The varied parameter; without it, there is one run per variant.
    pub vary: Option<VarySpec>,
    #[serde(rename = "variant")]
    pub variants: Vec<Variant>,
    #[serde(default, rename = "table")]
    pub tables: Vec<TableSpec>,
    #[serde(default, rename = "plot")]
    pub plots: Vec<PlotSpec>,
    #[serde(default)]
    pub runs: Vec<RunsSpec>,
}

/// The server to start, or a running one.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServerSpec {
    /// URL of a running server, which is neither started nor stopped.
    pub url: Option<String>,
    /// URL of the running server's Prometheus metrics.
    pub metrics_url: Option<String>,
    /// Model argument of `mainstem serve`; by default the built-in model.
    pub model: Option<String>,
    /// Additional arguments of `mainstem serve`.
    #[serde(default)]
    pub args: Vec<String>,
}

/// The load of every run, except for the varied parameter.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScenarioLoad {
    pub requests: Spanned<usize>,
    /// Prompt length; not scaled.
    pub prompt_tokens: NonZeroU32,
    /// Response length, or its maximum if a minimum is given.
    pub output_tokens: Spanned<u32>,
    /// Minimum response length; if given, lengths are uniform.
    pub output_tokens_min: Option<Spanned<u32>>,
    pub process: Spanned<ArrivalKind>,
    /// Mean gap between requests, in the paper's milliseconds.
    pub gap_ms: Option<Spanned<f64>>,
    /// Shape of the gamma distribution of gaps, for process `gamma`.
    pub shape: Option<Spanned<f64>>,
    /// Exclusive upper bound of random prompt token ids.
    #[serde(default = "vocab")]
    pub vocab: NonZeroU32,
    #[serde(default)]
    pub seed: u64,
}

/// The arrival process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ArrivalKind {
    All,
    Constant,
    Poisson,
    Gamma,
}

/// The latency of a single request without concurrent load, in the paper.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PaperReference {
    pub solo_ms: Spanned<f64>,
    /// Tokens of its response.
    pub solo_tokens: Spanned<u32>,
}

/// The parameter that differs from row to row.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VarySpec {
    pub what: Spanned<VariedParameter>,
    pub values: Spanned<Vec<f64>>,
    /// Label in tables and plots.
    pub label: String,
}

/// The kinds of parameters that can be varied.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum VariedParameter {
    Requests,
    /// The gap between requests, in the paper's milliseconds.
    GapMs,
    /// The maximum response length, before scaling.
    OutputTokens,
}

/// A server configuration.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Variant {
    pub name: Spanned<String>,
    pub policy: Option<String>,
    /// Window in the paper's milliseconds; only with policy `window`.
    pub window_ms: Option<f64>,
    pub shuffle: Option<String>,
    #[serde(default)]
    pub args: Vec<String>,
}

/// A table of the report.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableSpec {
    pub title: String,
    #[serde(default)]
    pub text: String,
    #[serde(rename = "column")]
    pub columns: Vec<Quantity>,
}

/// A plot of curves over the varied parameter.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlotSpec {
    pub title: Spanned<String>,
    #[serde(default)]
    pub text: String,
    /// Label of the y axis.
    pub label: String,
    #[serde(default)]
    pub x_scale: AxisScale,
    #[serde(default)]
    pub y_scale: AxisScale,
    #[serde(rename = "curve")]
    pub curves: Vec<Quantity>,
}

/// The scale of a plot axis.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AxisScale {
    #[default]
    Linear,
    Log,
}

/// A comparison of the variants' runs of one row in shared axes.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RunsSpec {
    pub title: String,
    #[serde(default)]
    pub text: String,
    /// Value of the varied parameter that selects the row; by default the last.
    pub at: Option<Spanned<f64>>,
}

/// A table column or curve: a measured value, a ratio of two, or a paper's value for each row.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Quantity {
    pub name: Spanned<String>,
    pub figure: Option<Metric>,
    /// Variant of the value; by default the variant of the row, if rows are variants.
    pub of: Option<Spanned<String>>,
    /// Divisor: the same value of this variant, or of a single request without load (`solo`).
    pub over: Option<Spanned<String>>,
    /// The paper's values; `nan` for a missing one.
    pub paper: Option<Spanned<Vec<f64>>>,
}

/// A metric of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Metric {
    /// Seconds from the first request to the last token.
    Total,
    /// Mean seconds of a request.
    Latency,
    /// Mean seconds to the first token of a request.
    Ttft,
    /// Output tokens per second.
    Throughput,
    /// Decode steps of the server.
    Steps,
    /// Decode steps, divided by the token scale.
    StepsUnscaled,
    /// Mean percentage of the requests in flight.
    Overlap,
    /// Mean number of requests in flight.
    InFlight,
}

/// Value of `over` that divides by the latency of a single request without load.
pub const SOLO: &str = "solo";

fn one() -> Spanned<f64> {
    Spanned::new(0..0, 1.0)
}

fn vocab() -> NonZeroU32 {
    const { NonZeroU32::new(256).unwrap() }
}

impl Scenario {
    /// Reads the file at `path`, or the built-in scenario of that name if there is no such file. Errors name
    /// the file, line and key.
    pub fn read(path: &Path) -> anyhow::Result<Scenario> {
        let text = match shipped::find(path) {
            Some(text) if !path.exists() => text.to_owned(),
            _ => std::fs::read_to_string(path).with_context(|| path.display().to_string())?,
        };
        Scenario::parse(&path.display().to_string(), &text)
    }

    /// Parses and validates a scenario; `name` is the file name in errors.
    pub fn parse(name: &str, text: &str) -> anyhow::Result<Scenario> {
        let scenario: Scenario = toml::from_str(text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start);
            error_at(name, text, at, error.message())
        })?;
        scenario.check().map_err(|ScenarioError { at, message }| error_at(name, text, at, &message))?;
        Ok(scenario)
    }

    /// Returns the number of rows per variant.
    pub fn rows(&self) -> usize {
        self.vary.as_ref().map_or(1, |vary| vary.values.get_ref().len())
    }
}

/// Creates an error for a byte offset of the text, with the line and the key at the start of that line.
fn error_at(name: &str, text: &str, at: usize, message: &str) -> anyhow::Error {
    let at = at.min(text.len());
    let line = 1 + text.bytes().take(at).filter(|byte| *byte == b'\n').count();
    let shown = text.lines().nth(line - 1).unwrap_or("").trim();
    match shown.split_once('=') {
        Some((key, _)) if !key.contains(['"', '[', '{']) => {
            anyhow!("{name}:{line}: {}: {message}", key.trim())
        }
        _ => anyhow!("{name}:{line}: {message}"),
    }
}

impl Variant {
    /// Returns the name of the variant.
    pub fn name(&self) -> &str {
        self.name.get_ref()
    }

    /// Returns whether the variant has no settings of its own.
    pub fn is_plain(&self) -> bool {
        self.policy.is_none() && self.shuffle.is_none() && self.args.is_empty()
    }
}

impl Metric {
    /// Returns whether the metric is a time in seconds.
    pub fn is_time(self) -> bool {
        matches!(self, Metric::Total | Metric::Latency | Metric::Ttft)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub const GOOD: &str = "title = \"t\"\n\
        [load]\nrequests = 8\nprompt_tokens = 8\noutput_tokens = 504\nprocess = \"constant\"\ngap_ms = 500\n\
        [paper]\nsolo_ms = 5600\nsolo_tokens = 504\n\
        [vary]\nwhat = \"requests\"\nvalues = [1, 2]\nlabel = \"requests\"\n\
        [[variant]]\nname = \"fused\"\n\
        [[variant]]\nname = \"window\"\npolicy = \"window\"\nwindow_ms = 2000\n\
        [[table]]\ntitle = \"t\"\n\
        [[table.column]]\nname = \"c\"\nfigure = \"total\"\nof = \"fused\"\nover = \"solo\"\n\
        [[table.column]]\nname = \"p\"\npaper = [1.0, nan]\n";

    #[test]
    fn a_good_file_is_read() {
        let scenario = Scenario::parse("f", GOOD).unwrap();
        assert_eq!((scenario.rows(), scenario.variants[1].window_ms), (2, Some(2000.0)));
        assert_eq!((*scenario.token_scale.get_ref(), scenario.load.vocab), (1.0, vocab()));
        assert_eq!(scenario.tables[0].columns[0].figure, Some(Metric::Total));
        assert!(scenario.tables[0].columns[1].paper.as_ref().unwrap().get_ref()[1].is_nan());
    }

    #[test]
    fn a_file_that_is_not_there_is_named() {
        let error = format!("{:#}", Scenario::read(Path::new("no/such/file.toml")).unwrap_err());
        assert!(error.starts_with("no/such/file.toml: No such file"), "{error}");
    }
}
