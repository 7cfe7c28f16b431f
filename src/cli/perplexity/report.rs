//! Perplexity report, as a table and as JSON.
//!
//! Invariant: both formats show the same values, and only of the chunks that were evaluated.

use super::setup::Evaluation;
use super::stats::{Estimate, PerplexityStats, ReferenceStats, TokenScores};
use crate::cli::bench::report::ModelFacts;
use crate::cli::escape::one_line;
use crate::cli::evaluation::Evaluator;
use crate::cli::to_json;
use mainstem_kernels::ActivationPrecision;
use serde::Serialize;
use std::fmt::{self, Write};
use std::time::Duration;

/// The results of one run.
pub struct PerplexityReport {
    model: ModelFacts,
    settings: EvaluationSettings,
    text: TextFacts,
    reference: Option<ReferenceFacts>,
    /// Device name, instruction set and threads. Empty if nothing was loaded.
    pub device: String,
    pub scores: TokenScores,
    /// Chunks evaluated so far.
    chunks: usize,
    /// Rows evaluated so far by the model.
    rows: usize,
    /// Time of the model's steps so far.
    time: Duration,
    /// Whether the run ended before all chunks were evaluated.
    pub interrupted: bool,
}

/// Configured values that affect the result.
#[derive(Serialize)]
struct EvaluationSettings {
    activations: &'static str,
    kv_type: &'static str,
    /// KV page size in tokens.
    page_size: usize,
}

/// The text and its division into chunks.
#[derive(Serialize)]
struct TextFacts {
    file: String,
    tokens: usize,
    /// Tokens per chunk.
    context: usize,
    /// Tokens between the beginnings of successive chunks.
    stride: usize,
    /// Number of selected chunks.
    chunks: usize,
}

/// The reference model. Its activations and KV cache are F32.
#[derive(Serialize)]
struct ReferenceFacts {
    /// Name of the reference; null if it is the measured model.
    model: Option<String>,
    weights: String,
    weight_bytes: usize,
    dtype: String,
}

/// The report in JSON.
#[derive(Serialize)]
struct JsonReport<'a> {
    mainstem: &'static str,
    device: &'a str,
    model: &'a ModelFacts,
    /// Bits per weight, including scales.
    bits: f64,
    settings: &'a EvaluationSettings,
    text: &'a TextFacts,
    reference: &'a Option<ReferenceFacts>,
    /// Statistics; null if no token was scored.
    figures: Option<PerplexityStats>,
    chunks_read: usize,
    tokens_per_s: Option<f64>,
    interrupted: bool,
}

impl PerplexityReport {
    /// Creates a report without results.
    pub fn new(subject: &Evaluation) -> PerplexityReport {
        let config = &subject.config;
        PerplexityReport {
            model: ModelFacts::from_source(&subject.source),
            settings: EvaluationSettings {
                activations: match config.device.activation_precision {
                    ActivationPrecision::F32 => "f32",
                    _ => "fast",
                },
                kv_type: config.kv.ty.name(),
                page_size: config.kv.page_size,
            },
            text: TextFacts {
                file: subject.text.display().to_string(),
                tokens: subject.tokens.len(),
                context: subject.chunking.context,
                stride: subject.chunking.stride,
                chunks: subject.chunks().len(),
            },
            reference: subject.reference.as_ref().map(|reference| {
                let ModelFacts { weight_bytes, dtype, .. } = ModelFacts::from_source(&reference.source);
                ReferenceFacts {
                    model: reference.model.clone(),
                    weights: reference.name.clone(),
                    weight_bytes,
                    dtype,
                }
            }),
            device: String::new(),
            scores: TokenScores::default(),
            chunks: 0,
            rows: 0,
            time: Duration::ZERO,
            interrupted: false,
        }
    }

    /// Records that the model has evaluated another chunk.
    pub fn record_chunk(&mut self, model: &Evaluator) {
        self.chunks += 1;
        (self.rows, self.time) = (model.rows_read, model.time);
    }

    /// Rows per second of the model's step time.
    fn tokens_per_s(&self) -> Option<f64> {
        (self.rows > 0).then(|| self.rows as f64 / self.time.as_secs_f64())
    }

    /// Bits per weight, including scales.
    fn bits(&self) -> f64 {
        8.0 * self.model.weight_bytes as f64 / self.model.parameters.max(1) as f64
    }

    /// Formats the report as JSON.
    pub fn json(&self) -> String {
        to_json(&JsonReport {
            mainstem: env!("CARGO_PKG_VERSION"),
            device: &self.device,
            model: &self.model,
            bits: self.bits(),
            settings: &self.settings,
            text: &self.text,
            reference: &self.reference,
            figures: self.scores.stats(),
            chunks_read: self.chunks,
            tokens_per_s: self.tokens_per_s(),
            interrupted: self.interrupted,
        })
    }

    /// Formats the report as text, one line per value.
    pub fn table(&self) -> String {
        let mut lines = self.head();
        match self.scores.stats() {
            Some(figures) => lines.extend(self.stats_lines(&figures)),
            None => lines.push(("note", "interrupted before a chunk was evaluated".to_owned())),
        }
        if self.interrupted && self.scores.stats().is_some() {
            let PerplexityReport { chunks, text, .. } = self;
            let note = format!("interrupted after {chunks} of {} chunks and a part of the next", text.chunks);
            lines.push(("note", note));
        }
        let mut table = String::new();
        for (name, value) in lines {
            let _ = writeln!(table, "{:<20}{}", format!("{name}:"), one_line(&value));
        }
        table
    }

    fn head(&self) -> Vec<(&'static str, String)> {
        let PerplexityReport { model, settings, text, .. } = self;
        let TextFacts { file, tokens, context, stride, .. } = text;
        vec![
            ("model", format!("{}, {}, {:.3} bits per weight", model.name, model.dtype, self.bits())),
            ("computed with", format!("activations {}, cache {}", settings.activations, settings.kv_type)),
            ("text", format!("{file}, {tokens} tokens, chunks of {context} every {stride}")),
        ]
    }

    fn stats_lines(&self, figures: &PerplexityStats) -> Vec<(&'static str, String)> {
        let PerplexityStats { tokens, perplexity, nll, against } = figures;
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
            ("NLL", format!("{nll} nats per token")),
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

impl ReferenceStats {
    fn lines(&self, reference: &ReferenceFacts) -> [(&'static str, String); 6] {
        let ReferenceStats { perplexity, kl, kl_median, kl_p99, kl_max, same_choice, logprob, .. } = self;
        let ReferenceFacts { weights, dtype, .. } = reference;
        let error = kl.error.map_or_else(String::new, |error| format!(" ± {error:.1e}"));
        [
            ("reference", format!("{weights} ({dtype}), activations f32, cache f32")),
            ("  perplexity", perplexity.to_string()),
            ("  KL", format!("{:.3e}{error} nats per token", kl.value)),
            ("  KL per token", format!("median {kl_median:.3e}, p99 {kl_p99:.3e}, max {kl_max:.3e}")),
            ("  same top token", format!("{:.3} %", 100.0 * same_choice)),
            ("  log-probability", format!("mean difference {logprob:.3e} nats")),
        ]
    }
}

/// Formats the value with its standard error, to four decimals.
impl fmt::Display for Estimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.4}", self.value)?;
        self.error.map_or(Ok(()), |error| write!(f, " ± {error:.4}"))
    }
}
