//! Scenario files: what is sent, what is varied, which servers are compared, what is shown of it beside a paper's
//! figures. TOML; a key that is not known is an error.
//!
//! Invariant: a scenario that was read is one that can be run: every name in it is somebody's, every list of a
//! paper's figures has one for each row.

use std::{num::NonZeroU32, path::Path};

use anyhow::{Context, anyhow};
use serde::Deserialize;
use toml::Spanned;

use super::{check::Fault, shipped};

/// One experiment: a load, one quantity of it varied, on several variants of the server.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    pub title: String,
    /// What is measured and why, for the head of the report.
    #[serde(default)]
    pub text: String,
    /// Answers are this many times as long as the file says, unless the command line knows better.
    #[serde(default = "one")]
    pub token_scale: Spanned<f64>,
    #[serde(default)]
    pub server: ServerPart,
    pub load: LoadPart,
    /// What times are scaled by; without it they are taken as they stand.
    pub paper: Option<Paper>,
    /// Without it there is one run for each variant.
    pub vary: Option<Vary>,
    #[serde(rename = "variant")]
    pub variants: Vec<Variant>,
    #[serde(default, rename = "table")]
    pub tables: Vec<Table>,
    #[serde(default, rename = "plot")]
    pub plots: Vec<Plot>,
    #[serde(default)]
    pub runs: Vec<Runs>,
}

/// The server that is started, or one that runs already.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ServerPart {
    /// Of a server that runs; it is neither started nor stopped.
    pub url: Option<String>,
    /// Where that server's Prometheus metrics are.
    pub metrics_url: Option<String>,
    /// As `mainstem serve` takes it; without it, the model that is built in.
    pub model: Option<String>,
    /// Further arguments of `mainstem serve`.
    #[serde(default)]
    pub args: Vec<String>,
}

/// What every run sends, but for what is varied.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoadPart {
    pub requests: Spanned<usize>,
    /// Not scaled.
    pub prompt_tokens: NonZeroU32,
    /// Of each answer; the most of them where a least is given.
    pub output_tokens: Spanned<u32>,
    /// With it, lengths are uniform from here on.
    pub output_tokens_min: Option<Spanned<u32>>,
    pub process: Spanned<Process>,
    /// Between requests, on the mean, in the paper's milliseconds.
    pub gap_ms: Option<Spanned<f64>>,
    /// Shape of the gaps, where the process is `gamma`.
    pub shape: Option<Spanned<f64>>,
    /// Prompts are random ids below this.
    #[serde(default = "vocab")]
    pub vocab: NonZeroU32,
    #[serde(default)]
    pub seed: u64,
}

/// When requests come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Process {
    All,
    Constant,
    Poisson,
    Gamma,
}

/// One request alone, in the paper.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Paper {
    pub solo_ms: Spanned<f64>,
    /// Tokens of its answer.
    pub solo_tokens: Spanned<u32>,
}

/// What differs from row to row.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Vary {
    pub what: Spanned<What>,
    pub values: Spanned<Vec<f64>>,
    /// What tables and plots call it.
    pub label: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum What {
    Requests,
    /// Milliseconds of the paper.
    GapMs,
    /// The longest answer, before scaling.
    OutputTokens,
}

/// A way to run the server.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Variant {
    pub name: Spanned<String>,
    pub policy: Option<String>,
    /// Milliseconds of the paper; of use with policy `window`.
    pub window_ms: Option<f64>,
    pub shuffle: Option<String>,
    #[serde(default)]
    pub args: Vec<String>,
}

/// A table with a line for each row.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Table {
    pub title: String,
    #[serde(default)]
    pub text: String,
    #[serde(rename = "column")]
    pub columns: Vec<Quantity>,
}

/// Curves over what is varied.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Plot {
    pub title: Spanned<String>,
    #[serde(default)]
    pub text: String,
    /// What the curves show.
    pub label: String,
    #[serde(default)]
    pub x_scale: AxisScale,
    #[serde(default)]
    pub y_scale: AxisScale,
    #[serde(rename = "curve")]
    pub curves: Vec<Quantity>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum AxisScale {
    #[default]
    Linear,
    Log,
}

/// The variants' runs of one row in the same axes.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Runs {
    pub title: String,
    #[serde(default)]
    pub text: String,
    /// Which of the values that are varied; the last unless said.
    pub at: Option<Spanned<f64>>,
}

/// A figure of ours, or a ratio of two, or a paper's; one for each row.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Quantity {
    pub name: Spanned<String>,
    pub figure: Option<Figure>,
    /// Whose; the row's own where rows are variants.
    pub of: Option<Spanned<String>>,
    /// What it is divided by: the same figure of this variant, or of one request alone (`solo`).
    pub over: Option<Spanned<String>>,
    /// The paper's; `nan` where it has none.
    pub paper: Option<Spanned<Vec<f64>>>,
}

/// What can be told of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Figure {
    /// Seconds from the first request to the last token.
    Total,
    /// Seconds of a request, on the mean.
    Latency,
    /// Seconds to a request's first token, on the mean.
    Ttft,
    /// Output tokens per second.
    Throughput,
    /// Steps of the server.
    Steps,
    /// The same for answers as long as the file says, before scaling.
    StepsUnscaled,
    /// Percent of the requests that are in flight, on the mean.
    Overlap,
    /// How many are.
    InFlight,
}

/// What a quantity is divided by when it is divided by what one request alone takes.
pub const SOLO: &str = "solo";

fn one() -> Spanned<f64> {
    Spanned::new(0..0, 1.0)
}

fn vocab() -> NonZeroU32 {
    const { NonZeroU32::new(256).unwrap() }
}

impl Scenario {
    /// Reads the file at `path`, or the shipped scenario of that name where there is no such file. Errors name file,
    /// line and key.
    pub fn read(path: &Path) -> anyhow::Result<Scenario> {
        let text = match shipped::named(path) {
            Some(text) if !path.exists() => text.to_owned(),
            _ => std::fs::read_to_string(path).with_context(|| path.display().to_string())?,
        };
        Scenario::parse(&path.display().to_string(), &text)
    }

    /// Reads a scenario's text; `name` is what errors call it.
    pub fn parse(name: &str, text: &str) -> anyhow::Result<Scenario> {
        let scenario: Scenario = toml::from_str(text).map_err(|error| {
            let at = error.span().map_or(0, |span| span.start);
            told(name, text, at, error.message())
        })?;
        scenario.check().map_err(|Fault { at, message }| told(name, text, at, &message))?;
        Ok(scenario)
    }

    /// How many rows there are for each variant.
    pub fn rows(&self) -> usize {
        self.vary.as_ref().map_or(1, |vary| vary.values.get_ref().len())
    }
}

/// An error at a place of the text, with the key that its line begins with.
fn told(name: &str, text: &str, at: usize, message: &str) -> anyhow::Error {
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
    pub fn name(&self) -> &str {
        self.name.get_ref()
    }

    /// Whether it is the server as it is.
    pub fn is_plain(&self) -> bool {
        self.policy.is_none() && self.shuffle.is_none() && self.args.is_empty()
    }
}

impl Figure {
    /// Whether it is a time, in seconds.
    pub fn is_time(self) -> bool {
        matches!(self, Figure::Total | Figure::Latency | Figure::Ttft)
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
        assert_eq!(scenario.tables[0].columns[0].figure, Some(Figure::Total));
        assert!(scenario.tables[0].columns[1].paper.as_ref().unwrap().get_ref()[1].is_nan());
    }

    #[test]
    fn a_file_that_is_not_there_is_named() {
        let error = format!("{:#}", Scenario::read(Path::new("no/such/file.toml")).unwrap_err());
        assert!(error.starts_with("no/such/file.toml: No such file"), "{error}");
    }
}
