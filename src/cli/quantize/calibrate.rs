//! What the columns of a model's matrices count, by a text that the model reads.
//!
//! Invariant: the model reads as it is stored, on one device and without roundings on the way; all of the text's chunks are
//! read, or there is no answer.

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

/// A text, and how much of it is read.
#[derive(Clone, Debug)]
pub struct Calibration {
    pub text: PathBuf,
    /// At most.
    pub chunks: usize,
}

/// A model that is ready to read the text.
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
    /// Opens the configured model once more, and reads the text from its file. Refuses a model that is no decoder or has no
    /// tokenizer, and a text of less than one whole chunk. Loading tells `progress`, and both end when that is stopped.
    pub fn prepare(&self, config: &Config, progress: &Arc<Progress>) -> Result<Prepared> {
        let text = reading::text_of(&self.text)?;
        let config = as_stored(config);
        let mut source = start::source(&ModelRef::parse(&config.model.path)?, &config.model)?;
        reading::check_kind(&source, "a text calibrates")?;
        let tokenizer = Arc::new(start::tokenizer(&source)?);
        let context = CONTEXT.min(source.spec.context);
        let named = || format!("{} with {}", self.text.display(), source.name());
        let tokens = reading::tokens_of(&text, &tokenizer, &source).with_context(named)?;
        ensure!(
            tokens.len() >= context,
            "{}: {} tokens, and a text calibrates from {context} on",
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
    /// What the text says of the model's matrices. Blocks.
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
                // What it foretells is not asked for, but that the head is multiplied.
                let _logits = model.read(chunk, rows, wanted).await?;
            }
            bar.inc(1);
        }
        bar.finish_and_clear();
        Ok(())
    }
}

/// The configuration for the model as it is stored, on its first device alone.
fn as_stored(config: &Config) -> Config {
    let mut config = config.clone();
    config.model = ModelConfig { weights: Weights::default(), ..config.model };
    config.device = config.device.regrouped(&[vec![config.device.groups[0][0]]]);
    config.device.inputs = Inputs::Plain;
    config.kv.ty = QuantType::F32;
    config
}
