//! Setup of a perplexity measurement: a model, a text divided into chunks, and the reference.
//!
//! Invariant: each chunk fits the model's context, and each token is in its vocabulary.

use super::{PerplexityOptions, ReferenceWeights, usage};
use crate::cli::evaluation::{Chunk, Chunking, DEFAULT_CONTEXT, check_decoder_only, read_text, tokenize};
use crate::cli::start::{self, fetch_model_async};
use crate::config::{Config, ModelConfig};
use crate::model::{ModelRef, ModelSource};
use crate::quantize::WeightRules;
use crate::text::Tokenizer;
use anyhow::{Context, Result, ensure};
use mainstem_kernels::{ActivationPrecision, Fraction, QuantType};
use std::path::PathBuf;
use std::sync::Arc;

/// An opened model with a tokenized text and an optional reference.
pub struct Evaluation {
    pub config: Config,
    pub source: Arc<ModelSource>,
    pub tokenizer: Arc<Tokenizer>,
    /// File of the text.
    pub text: PathBuf,
    /// Tokens of the whole text; at least two.
    pub tokens: Vec<u32>,
    pub chunking: Chunking,
    /// Maximum number of chunks to evaluate.
    pub limit: usize,
    pub reference: Option<Reference>,
}

/// The reference that the model is compared with.
pub struct Reference {
    /// The flag that selects it, for error messages.
    pub flag: &'static str,
    /// Its weight formats, as the user gave them.
    pub name: String,
    /// Model name; `None` if it is the measured model.
    pub model: Option<String>,
    pub config: Config,
    pub source: Arc<ModelSource>,
}

impl Evaluation {
    /// Opens the configured model and the reference, and reads the text; weights are not loaded yet. Fails if
    /// a model is not decoder-only, or if the text or the chunk length does not suit it.
    pub async fn open(options: &PerplexityOptions, mut config: Config) -> Result<Evaluation> {
        let text = read_text(&options.text)?;
        config.model = fetch_model_async(config.model.clone(), config.hub.clone()).await?;
        let model = ModelRef::parse(&config.model.path).map_err(|error| usage(format!("{error:#}")))?;
        let (source, tokenizer) = start::open_configured(&model, &config)?;
        check_decoder_only(&source, "perplexity supports")?;
        check_config(&config)?;
        let cut = chunking(options, &config, &source)?;
        let tokens = tokenize(&text, &tokenizer, &source);
        let tokens = tokens.with_context(|| format!("{} with {}", options.text.display(), source.name()))?;
        let reference = match (&options.reference, &options.against) {
            (Some(other), against) => {
                let reference = Reference::open_other_model(other, against.as_ref(), &config).await;
                let reference = reference.context("--reference")?;
                reference.check_same_tokens(&source, &text, &tokens).context("--reference")?;
                reference.check_context(&cut).context("--reference")?;
                Some(reference)
            }
            (None, Some(against)) => Some(Reference::open(against, &model, &config).context("--against")?),
            (None, None) => None,
        };
        let limit = options.limit_chunks.map_or(usize::MAX, |chunks| chunks as usize);
        Ok(Evaluation {
            config,
            source,
            tokenizer,
            text: options.text.clone(),
            tokens,
            chunking: cut,
            limit,
            reference,
        })
    }

    /// Returns the selected chunks; at least one.
    pub fn chunks(&self) -> Vec<Chunk<'_>> {
        self.chunking.chunks(&self.tokens).take(self.limit).collect()
    }
}

impl Reference {
    /// Opens `model` as the reference, with the given weight formats and with F32 activations and KV cache.
    fn open(against: &ReferenceWeights, model: &ModelRef, config: &Config) -> Result<Reference> {
        let mut config = config.clone();
        config.model.weights = against.weights.clone();
        config.device.activation_precision = ActivationPrecision::F32;
        config.kv.ty = QuantType::F32;
        let source = Arc::new(start::open_source(model, &config.model)?);
        Ok(Reference { flag: "--against", name: against.name.clone(), model: None, config, source })
    }

    /// Opens another model as the reference, as stored if `against` is `None`. The specification,
    /// tokenizers and chat template configured for the measured model do not apply to it.
    async fn open_other_model(
        path: &str,
        against: Option<&ReferenceWeights>,
        config: &Config,
    ) -> Result<Reference> {
        let mut config = config.clone();
        let own = ModelConfig {
            path: path.to_owned(),
            spec: None,
            tokenizer: None,
            target_tokenizer: None,
            chat_template: None,
            ..config.model
        };
        config.model = fetch_model_async(own, config.hub.clone()).await?;
        let model = ModelRef::parse(&config.model.path)?;
        let stored = ReferenceWeights { name: "as stored".to_owned(), weights: WeightRules::default() };
        let same = Reference::open(against.unwrap_or(&stored), &model, &config)?;
        Ok(Reference { flag: "--reference", model: Some(same.source.name()), ..same })
    }

    /// Fails if the reference has another vocabulary size than `measured` or tokenizes the text differently.
    fn check_same_tokens(&self, measured: &ModelSource, text: &str, tokens: &[u32]) -> Result<()> {
        let (own, other) = (self.source.spec.vocab, measured.spec.vocab);
        ensure!(
            own == other,
            "cannot compare {}, whose vocabulary has {own} tokens, with {}, whose vocabulary has {other}",
            self.source.name(),
            measured.name()
        );
        let read = start::open_tokenizer(&self.source)?.encode(text, true)?;
        ensure!(
            read == tokens,
            "the tokenizer of {} produces different tokens for the text",
            self.source.name()
        );
        Ok(())
    }

    /// Fails if the reference cannot evaluate the chunks.
    fn check_context(&self, cut: &Chunking) -> Result<()> {
        check_decoder_only(&self.source, "perplexity supports")?;
        let context = self.source.spec.context;
        ensure!(
            cut.context <= context,
            "{} has a context length of {context} tokens, but chunks have {}; set --context",
            self.source.name(),
            cut.context
        );
        Ok(())
    }
}

/// Fails for options that do not affect the measurement.
fn check_config(config: &Config) -> Result<()> {
    match config.kv.sparse_attention == Fraction::ONE {
        true => Ok(()),
        false => Err(usage(
            "kv.sparse_attention must be 1, because it applies to generated tokens and not to those of \
             a text",
        )),
    }
}

/// Returns chunk length and stride. Fails if they exceed the model's context or `kv.max_context`.
fn chunking(options: &PerplexityOptions, config: &Config, source: &ModelSource) -> Result<Chunking> {
    let made_for = source.spec.context;
    let limit = config.kv.max_context.map_or(made_for, |limit| limit.min(made_for));
    let context = options.context.map_or(DEFAULT_CONTEXT.min(limit), |tokens| tokens as usize);
    if context > limit {
        return Err(usage(format!("--context {context}: {} has a context of {limit} tokens", source.name())));
    }
    let stride = options.stride.map_or(context, |tokens| tokens as usize);
    if stride > context {
        return Err(usage(format!("--stride {stride}: must be at most the chunk length, {context}")));
    }
    Ok(Chunking { context, stride })
}
