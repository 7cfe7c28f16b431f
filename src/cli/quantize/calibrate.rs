//! Calibration: computes the importance matrix of a model from a text that the model evaluates.
//!
//! Invariant: the model is evaluated as stored, on one device, with F32 activations and KV cache. The result
//! covers all selected chunks of the text, or there is none.

use crate::cli::reading::{self, CONTEXT, Chunk, Cut, Reader};
use crate::cli::start;
use crate::config::{Config, ModelConfig};
use crate::model::importance::{Importance, Observations};
use crate::model::progress::Progress;
use crate::model::source::{ModelRef, ModelSource};
use crate::model::weights::Weights;
use crate::text::Tokenizer;
use actix_web::rt::System;
use anyhow::{Context, Result, ensure};
use mainstem_kernels::{Inputs, QuantType};
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
pub struct Prepared {
    config: Config,
    source: Arc<ModelSource>,
    tokenizer: Arc<Tokenizer>,
    seen: Arc<Observations>,
    tokens: Vec<u32>,
    cut: Cut,
    chunks: usize,
}

impl Calibration {
    /// Opens the configured model again and reads the text file. Fails if the model is not decoder-only or
    /// has no tokenizer, and if the text is shorter than one chunk. Loading reports to `progress`; loading
    /// and evaluation end when `progress` is stopped.
    pub fn prepare(&self, config: &Config, progress: &Arc<Progress>) -> Result<Prepared> {
        let text = reading::text_of(&self.text)?;
        let config = as_stored(config);
        let mut source = start::source(&ModelRef::parse(&config.model.path)?, &config.model)?;
        reading::check_kind(&source, "calibration supports")?;
        let tokenizer = Arc::new(start::tokenizer(&source)?);
        let context = CONTEXT.min(source.spec.context);
        let named = || format!("{} with {}", self.text.display(), source.name());
        let tokens = reading::tokens_of(&text, &tokenizer, &source).with_context(named)?;
        ensure!(
            tokens.len() >= context,
            "{}: {} tokens, but calibration requires at least {context}",
            named(),
            tokens.len()
        );
        let seen = Arc::<Observations>::default();
        (source.observations, source.progress) = (Some(seen.clone()), progress.clone());
        let cut = Cut { context, stride: context };
        Ok(Prepared { config, source: Arc::new(source), tokenizer, seen, tokens, cut, chunks: self.chunks })
    }
}

impl Prepared {
    /// Evaluates the text and returns the importance matrix. Blocks.
    pub fn run(self) -> Result<Importance> {
        System::new().block_on(self.read())?;
        self.seen.importance()
    }

    async fn read(&self) -> Result<()> {
        let Prepared { config, source, tokenizer, cut, .. } = self;
        let chunks: Vec<Chunk> = cut.chunks(&self.tokens).take(self.chunks).collect();
        let bar = reading::progress(chunks.len());
        bar.set_message("loading");
        let mut model = Reader::start(config, source, tokenizer, cut.context).await?;
        bar.set_message("calibrating");
        for chunk in &chunks {
            for (rows, wanted) in chunk.steps(model.rows) {
                ensure!(!source.progress.is_stopped(), "stopped");
                // The logits are unused; computing them lets the head's inputs be observed.
                let _logits = model.read(chunk, rows, wanted).await?;
            }
            bar.inc(1);
        }
        bar.finish_and_clear();
        Ok(())
    }
}

/// Returns the configuration for the model as stored, on the first configured device.
fn as_stored(config: &Config) -> Config {
    let mut config = config.clone();
    config.model = ModelConfig { weights: Weights::default(), ..config.model };
    config.device = config.device.regrouped(&[vec![config.device.groups[0][0]]]);
    config.device.inputs = Inputs::Plain;
    config.kv.ty = QuantType::F32;
    config
}
