//! What was measured, as a table to read and as JSON.
//!
//! Invariant: both forms show the same figures, of what was read and no more.

use super::figures::{Difference, Estimate, Figures, Samples};
use super::subject::Subject;
use crate::cli::bench::report::ModelFacts;
use crate::cli::escape::one_line;
use crate::cli::reading::Reader;
use mainstem_kernels::Inputs;
use serde::Serialize;
use std::fmt::{self, Write};
use std::time::Duration;

/// All that one run has to tell.
pub struct Report {
    model: ModelFacts,
    settings: Settings,
    text: TextFacts,
    reference: Option<ReferenceFacts>,
    /// What computed: its name, instruction set and threads. Empty if nothing was loaded.
    pub device: String,
    pub samples: Samples,
    /// Chunks that were read; rows of the model's, and the time they took.
    chunks: usize,
    rows: usize,
    time: Duration,
    /// It ended before everything was read.
    pub interrupted: bool,
}

#[derive(Serialize)]
struct Settings {
    activations: &'static str,
    kv_type: &'static str,
    page_positions: usize,
}

/// What there was to read.
#[derive(Serialize)]
struct TextFacts {
    file: String,
    tokens: usize,
    /// Tokens of a chunk, and from one chunk's first to the next one's.
    context: usize,
    stride: usize,
    /// Chunks that were to be read.
    chunks: usize,
}

/// What the model was compared with; its activations and cache are F32.
#[derive(Serialize)]
struct ReferenceFacts {
    /// Null where it is the same.
    model: Option<String>,
    weights: String,
    weight_bytes: usize,
    dtype: String,
}

/// The report as JSON has it.
#[derive(Serialize)]
struct Document<'a> {
    mainstem: &'static str,
    device: &'a str,
    model: &'a ModelFacts,
    /// Of a number, its share of scales counted.
    bits: f64,
    settings: &'a Settings,
    text: &'a TextFacts,
    reference: &'a Option<ReferenceFacts>,
    /// Null if nothing was scored.
    figures: Option<Figures>,
    chunks_read: usize,
    tokens_per_s: Option<f64>,
    interrupted: bool,
}

impl Report {
    /// A report on that subject, with nothing read yet.
    pub fn new(subject: &Subject) -> Report {
        let config = &subject.config;
        Report {
            model: ModelFacts::of(&subject.source),
            settings: Settings {
                activations: match config.device.inputs {
                    Inputs::Coded | Inputs::CodedAndHalves => "fast",
                    Inputs::Plain => "f32",
                },
                kv_type: config.kv.ty.name(),
                page_positions: config.kv.page_positions,
            },
            text: TextFacts {
                file: subject.text.display().to_string(),
                tokens: subject.tokens.len(),
                context: subject.cut.context,
                stride: subject.cut.stride,
                chunks: subject.chunks().len(),
            },
            reference: subject.reference.as_ref().map(|reference| {
                let ModelFacts { weight_bytes, dtype, .. } = ModelFacts::of(&reference.source);
                ReferenceFacts {
                    model: reference.model.clone(),
                    weights: reference.name.clone(),
                    weight_bytes,
                    dtype,
                }
            }),
            device: String::new(),
            samples: Samples::default(),
            chunks: 0,
            rows: 0,
            time: Duration::ZERO,
            interrupted: false,
        }
    }

    /// Notes that the model is through with another chunk.
    pub fn read(&mut self, model: &Reader) {
        self.chunks += 1;
        (self.rows, self.time) = (model.read, model.time);
    }

    /// Rows of the model in a second of its own time.
    fn tokens_per_s(&self) -> Option<f64> {
        (self.rows > 0).then(|| self.rows as f64 / self.time.as_secs_f64())
    }

    fn bits(&self) -> f64 {
        8.0 * self.model.weight_bytes as f64 / self.model.parameters.max(1) as f64
    }

    pub fn json(&self) -> String {
        let document = Document {
            mainstem: env!("CARGO_PKG_VERSION"),
            device: &self.device,
            model: &self.model,
            bits: self.bits(),
            settings: &self.settings,
            text: &self.text,
            reference: &self.reference,
            figures: self.samples.figures(),
            chunks_read: self.chunks,
            tokens_per_s: self.tokens_per_s(),
            interrupted: self.interrupted,
        };
        let text = serde_json::to_string_pretty(&document);
        text.expect("a report is plain data; anything else is a bug") + "\n"
    }

    /// A line for each figure.
    pub fn table(&self) -> String {
        let mut lines = self.head();
        match self.samples.figures() {
            Some(figures) => lines.extend(self.figures(&figures)),
            None => lines.push(("note", "interrupted before a chunk was read".to_owned())),
        }
        if self.interrupted && self.samples.figures().is_some() {
            let Report { chunks, text, .. } = self;
            let told =
                format!("interrupted after {chunks} of {} whole chunks, and a part of the next", text.chunks);
            lines.push(("note", told));
        }
        let mut table = String::new();
        for (name, value) in lines {
            let _ = writeln!(table, "{:<20}{}", format!("{name}:"), one_line(&value));
        }
        table
    }

    fn head(&self) -> Vec<(&'static str, String)> {
        let Report { model, settings, text, .. } = self;
        let TextFacts { file, tokens, context, stride, .. } = text;
        vec![
            ("model", format!("{}, {}, {:.3} bits a weight", model.name, model.dtype, self.bits())),
            ("computed with", format!("activations {}, cache {}", settings.activations, settings.kv_type)),
            ("text", format!("{file}, {tokens} tokens, chunks of {context} every {stride}")),
        ]
    }

    fn figures(&self, figures: &Figures) -> Vec<(&'static str, String)> {
        let Figures { tokens, perplexity, nll, against } = figures;
        let mut lines = vec![
            (
                "scored",
                format!(
                    "{tokens} tokens in {} chunk{}",
                    self.chunks,
                    if self.chunks == 1 { "" } else { "s" }
                ),
            ),
            ("perplexity", perplexity.to_string()),
            ("NLL", format!("{nll} nats a token")),
        ];
        if let Some(speed) = self.tokens_per_s() {
            lines.push(("speed", format!("{speed:.0} tokens/s")));
        }
        if let (Some(reference), Some(against)) = (&self.reference, against) {
            lines.extend(against.lines(reference));
        }
        lines
    }
}

impl Difference {
    fn lines(&self, reference: &ReferenceFacts) -> [(&'static str, String); 6] {
        let Difference { perplexity, kl, kl_median, kl_p99, kl_max, same_choice, logprob, .. } = self;
        let ReferenceFacts { weights, dtype, .. } = reference;
        let error = kl.error.map_or_else(String::new, |error| format!(" ± {error:.1e}"));
        [
            ("reference", format!("{weights} ({dtype}), activations f32, cache f32")),
            ("  perplexity", perplexity.to_string()),
            ("  KL", format!("{:.3e}{error} nats a token", kl.value)),
            ("  KL of a token", format!("median {kl_median:.3e}, 99 % {kl_p99:.3e}, largest {kl_max:.3e}")),
            ("  same choice", format!("{:.3} %", 100.0 * same_choice)),
            ("  log-probability", format!("{logprob:.3e} nats apart")),
        ]
    }
}

/// With its error, to its fourth decimal.
impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.4}", self.value)?;
        self.error.map_or(Ok(()), |error| write!(f, " ± {error:.4}"))
    }
}
