//! `mainstem perplexity`: measures a model's perplexity on a text, and the difference of its distributions
//! from those of a reference, such as the same model in other number formats.
//!
//! Invariant: the measured model is the one that would be served: the same devices, weights, cache and
//! scheduling.

mod report;
mod setup;
mod stats;

use super::evaluation::{Chunk, Evaluator, progress_bar};
use super::flags::{ConfigFlags, ModelArgument};
use super::{INTERRUPTED, print, start_log};
use crate::config::{Config, ConfigError, ConfigSource, Overrides};
use crate::quantize::WeightRules;
use actix_web::rt::System;
use anyhow::{Context, Error, Result};
use clap::{Args, ValueHint};
use indicatif::ProgressBar;
use mainstem_kernels::QuantType;
use report::PerplexityReport;
use setup::{Evaluation, Reference};
use stats::TokenScores;
use std::path::PathBuf;
use std::process::ExitCode;
use tokio::select;

/// Measure perplexity on a text, and the difference from a reference model.
///
/// The text is tokenized as a whole and divided into chunks. Each chunk is evaluated independently, with the
/// kernels and the KV cache used for serving, one sequence at a time; scheduler options have no effect.
/// docs/quantization.md explains each value.
#[derive(Args)]
#[command(after_help = "\
Examples:
  mainstem perplexity path/to/model --text wiki.test.raw
  mainstem perplexity path/to/model --text wiki.test.raw --context 1024 --stride 512
  mainstem perplexity path/to/model --text wiki.test.raw --weights q4 --against f32 --limit-chunks 20
  mainstem perplexity path/to/model --text wiki.test.raw --weights q4 --against q8 --json
  mainstem perplexity models/small --text wiki.test.raw --reference path/to/model")]
pub struct PerplexityArgs {
    #[command(flatten)]
    path: ModelArgument,
    #[command(flatten)]
    options: PerplexityOptions,
    #[command(flatten)]
    config: ConfigFlags,
}

/// Options of the measurement.
#[derive(Args)]
struct PerplexityOptions {
    /// Text to evaluate (UTF-8).
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    text: PathBuf,
    /// Tokens per chunk; by default 512, or the model's context length if that is less.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(2..))]
    context: Option<u32>,
    /// Tokens between the beginnings of successive chunks; by default the chunk length.
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    stride: Option<u32>,
    /// Maximum number of chunks to evaluate.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    limit_chunks: Option<u32>,
    /// Compare with the model as stored (f32) or in other formats, such as q8; computed in f32.
    #[arg(long, value_name = "RULES", value_parser = parse_against)]
    against: Option<ReferenceWeights>,
    /// Compare with this model of the same vocabulary, as stored or in the formats of --against.
    #[arg(long, value_name = "MODEL", value_hint = ValueHint::AnyPath)]
    reference: Option<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Weight formats of the reference.
#[derive(Clone, Debug)]
struct ReferenceWeights {
    /// The formats as the user gave them.
    name: String,
    weights: WeightRules,
}

/// Parses the value of `--against`: `f32` keeps the stored weights, since they widen to F32 exactly; anything
/// else is a list of weight rules.
fn parse_against(text: &str) -> Result<ReferenceWeights, String> {
    let is_stored = QuantType::by_name(text) == Some(QuantType::F32);
    let weights = if is_stored { WeightRules::default() } else { WeightRules::parse(text)? };
    if !is_stored && weights == WeightRules::default() {
        return Err("no number format is given; f32 is the model as stored".to_owned());
    }
    Ok(ReferenceWeights { name: text.to_owned(), weights })
}

/// Runs the measurement and prints the report. The exit code is 0, or 130 after an interruption.
pub fn run(args: PerplexityArgs) -> Result<ExitCode> {
    let (options, file, flags) = args.layers();
    let config = Config::from_process(file.as_deref(), flags)?;
    start_log(&config)?;
    let report = System::new().block_on(measure(&options, config))?;
    let text = if options.json { report.json() } else { report.table() };
    print("report", &text)?;
    Ok(if report.interrupted { ExitCode::from(INTERRUPTED) } else { ExitCode::SUCCESS })
}

impl PerplexityArgs {
    /// Returns the measurement options, the configuration file, if given, and the flags that override it.
    fn layers(self) -> (PerplexityOptions, Option<PathBuf>, Overrides) {
        let mut flags = Overrides::default();
        flags.set("model.path", self.path.name());
        flags.set_default("log.level", "warn");
        let file = self.config.add_to(&mut flags);
        (self.options, file, flags)
    }
}

/// Evaluates the text until its end or a SIGINT. The report covers what was evaluated.
async fn measure(options: &PerplexityOptions, config: Config) -> Result<PerplexityReport> {
    let subject = Evaluation::open(options, config).await?;
    let mut report = PerplexityReport::new(&subject);
    let bar = progress_bar(subject.chunks().len());
    let interrupted = select! {
        outcome = score_all(&subject, &mut report, &bar) => outcome.map(|()| false)?,
        caught = tokio::signal::ctrl_c() => caught.map(|()| true).context("cannot listen for signals")?,
    };
    report.interrupted = interrupted;
    bar.finish_and_clear();
    Ok(report)
}

/// Loads the models and scores all chunks into the report. If the future is dropped, the report keeps what
/// was done.
async fn score_all(subject: &Evaluation, report: &mut PerplexityReport, bar: &ProgressBar) -> Result<()> {
    bar.set_message("loading");
    let Evaluation { config, source, tokenizer, chunking: cut, .. } = subject;
    let mut model = Evaluator::start(config, source, tokenizer, cut.context, None).await?;
    report.device = model.device.clone();
    let mut reference = match &subject.reference {
        Some(Reference { flag, config, source, .. }) => {
            Some(Evaluator::start(config, source, tokenizer, cut.context, None).await.context(*flag)?)
        }
        None => None,
    };
    for chunk in subject.chunks() {
        score_chunk(&chunk, &mut model, reference.as_mut(), &mut report.scores).await?;
        report.record_chunk(&model);
        bar.set_message(report.scores.perplexity().map(|value| value.to_string()).unwrap_or_default());
        bar.inc(1);
    }
    Ok(())
}

/// Evaluates a chunk and scores its tokens. Only one step's logits are held at a time.
async fn score_chunk(
    chunk: &Chunk<'_>,
    model: &mut Evaluator,
    mut reference: Option<&mut Evaluator>,
    samples: &mut TokenScores,
) -> Result<()> {
    for (rows, wanted) in chunk.steps(model.rows) {
        let first = rows.start + 1;
        let mut others = match &mut reference {
            Some(reference) => {
                Some(reference.evaluate(chunk, rows.clone(), wanted).await.context("the reference")?)
            }
            None => None,
        };
        for (logits, token) in model.evaluate(chunk, rows, wanted).await?.zip(&chunk.tokens[first..]) {
            samples.add(*token, logits, others.as_mut().and_then(Iterator::next))?;
        }
    }
    Ok(())
}

/// Returns an error in the command line.
fn usage(message: impl Into<String>) -> Error {
    ConfigError { origin: ConfigSource::CommandLine, message: message.into() }.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::{CommandFactory, Parser};

    #[derive(Parser)]
    struct Alone {
        #[command(flatten)]
        args: PerplexityArgs,
    }

    #[test]
    fn flags_are_well_formed_and_name_keys() {
        Alone::command().debug_assert();
        let line = "perplexity m --text t --weights q4 --threads 3 --against F32";
        let alone = Alone::try_parse_from(line.split(' ')).unwrap();
        let (options, file, flags) = alone.args.layers();
        let config = Config::load(file.as_deref(), flags).unwrap();
        assert_eq!((config.model.path.as_str(), config.device.threads), ("m", 3));
        assert_eq!(options.against.unwrap().weights, WeightRules::default());
    }

    #[test]
    fn a_reference_is_the_stored_model_or_has_rules() {
        assert_eq!(parse_against("fp32").unwrap().weights, WeightRules::default());
        assert_eq!(parse_against("head=q6,q4").unwrap().weights, WeightRules::parse("head=q6,q4").unwrap());
        for (wrong, part) in [("", "no number format"), ("q9", "'q9'"), ("stored", "'stored'")] {
            let error = parse_against(wrong).unwrap_err();
            assert!(error.contains(part), "{wrong}: {error}");
        }
    }
}
