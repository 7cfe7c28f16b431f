//! Calibration: computes the importance matrix of a model from a text that the model evaluates.
//!
//! Invariant: the model is evaluated as stored, on one device, with F32 activations and KV cache. The result
//! covers all selected chunks of the text, or there is none.

use crate::cli::evaluation::{self, Chunk, Chunking, DEFAULT_CONTEXT, Evaluator};
use crate::cli::start;
use crate::config::{Config, ModelConfig};
use crate::model::progress::Progress;
use crate::model::source::ModelSource;
use crate::quantize::WeightRules;
use crate::quantize::{ImportanceMatrix, Observations};
use crate::text::Tokenizer;
use actix_web::rt::System;
use anyhow::{Context, Result, ensure};
use mainstem_kernels::{ActivationPrecision, QuantType};
use std::path::PathBuf;
use std::sync::Arc;

/// A calibration text.
#[derive(Clone, Debug)]
pub struct Calibration {
    /// File of the text.
    pub text: PathBuf,
    /// Maximum number of chunks to evaluate.
    pub chunks: usize,
}

/// A model opened for calibration, with the text to evaluate.
pub struct PreparedCalibration {
    config: Config,
    source: Arc<ModelSource>,
    tokenizer: Arc<Tokenizer>,
    observations: Arc<Observations>,
    tokens: Vec<u32>,
    chunking: Chunking,
    chunks: usize,
}

impl Calibration {
    /// Opens the configured model again and reads the text file. Fails if the model is not decoder-only or
    /// has no tokenizer, and if the text is shorter than one chunk. Loading reports to `progress`; loading
    /// and evaluation end when `progress` is stopped.
    pub fn prepare(&self, config: &Config, progress: &Arc<Progress>) -> Result<PreparedCalibration> {
        let text = evaluation::read_text(&self.text)?;
        let config = stored_model_config(config);
        let mut source = start::open_source(&start::configured_model(&config.model)?, &config.model)?;
        evaluation::check_decoder_only(&source, "calibration supports")?;
        let tokenizer = Arc::new(start::open_tokenizer(&source)?);
        let context = DEFAULT_CONTEXT.min(source.spec.context);
        let named = || format!("{} with {}", self.text.display(), source.name());
        let tokens = evaluation::tokenize(&text, &tokenizer, &source).with_context(named)?;
        ensure!(
            tokens.len() >= context,
            "{}: {} tokens, but calibration requires at least {context}",
            named(),
            tokens.len()
        );
        source.progress = progress.clone();
        let cut = Chunking { context, stride: context };
        Ok(PreparedCalibration {
            config,
            source: Arc::new(source),
            tokenizer,
            observations: Arc::default(),
            tokens,
            chunking: cut,
            chunks: self.chunks,
        })
    }
}

impl PreparedCalibration {
    /// Evaluates the text and returns the importance matrix. Blocks.
    pub fn run(self) -> Result<ImportanceMatrix> {
        System::new().block_on(self.evaluate())?;
        self.observations.importance_matrix()
    }

    async fn evaluate(&self) -> Result<()> {
        let PreparedCalibration { config, source, tokenizer, observations, chunking: cut, .. } = self;
        let chunks: Vec<Chunk> = cut.chunks(&self.tokens).take(self.chunks).collect();
        let bar = evaluation::progress_bar(chunks.len());
        bar.set_message("loading");
        let mut model = Evaluator::start(config, source, tokenizer, cut.context, Some(observations)).await?;
        bar.set_message("calibrating");
        for chunk in &chunks {
            for (rows, wanted) in chunk.steps(model.rows) {
                ensure!(!source.progress.is_stopped(), "stopped");
                // The logits are unused; computing them lets the head's inputs be observed.
                let _logits = model.evaluate(chunk, rows, wanted).await?;
            }
            bar.inc(1);
        }
        bar.finish_and_clear();
        Ok(())
    }
}

/// Returns the configuration for the model as stored, on the first configured device.
fn stored_model_config(config: &Config) -> Config {
    let mut config = config.clone();
    config.model = ModelConfig { weights: WeightRules::default(), ..config.model };
    config.device = config.device.regrouped(&[vec![config.device.groups[0][0]]]);
    config.device.activation_precision = ActivationPrecision::F32;
    config.kv.ty = QuantType::F32;
    config
}
