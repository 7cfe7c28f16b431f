//! What is measured: a model, a text that is cut for it, and what the model is compared with.
//!
//! Invariant: each chunk is within the model's context, and each token within its vocabulary.

use super::{Against, Asked, usage};
use crate::cli::reading::{CONTEXT, Chunk, Cut, check_kind, text_of, tokens_of};
use crate::cli::start::{self, fetched_aside};
use crate::config::{Config, ModelConfig};
use crate::model::weights::Weights;
use crate::model::{ModelRef, ModelSource};
use crate::text::Tokenizer;
use anyhow::{Context, Result, ensure};
use mainstem_kernels::{Inputs, QuantType, Share};
use std::path::PathBuf;
use std::sync::Arc;

/// A model and a text.
pub struct Subject {
    pub config: Config,
    pub source: Arc<ModelSource>,
    pub tokenizer: Arc<Tokenizer>,
    /// Where the text is.
    pub text: PathBuf,
    /// All of it; at least two.
    pub tokens: Vec<u32>,
    pub cut: Cut,
    /// Chunks to read, at most.
    pub limit: usize,
    pub reference: Option<Reference>,
}

/// What the model is compared with.
pub struct Reference {
    /// The flag that it came with.
    pub flag: &'static str,
    /// What the user calls its number formats.
    pub name: String,
    /// Of another model.
    pub model: Option<String>,
    pub config: Config,
    pub source: Arc<ModelSource>,
}

impl Subject {
    /// Opens the configured model and reads the text; weights are not loaded yet. Fails for what is no decoder, and for a text or a
    /// context that does not suit it.
    pub async fn open(asked: &Asked, mut config: Config) -> Result<Subject> {
        let text = text_of(&asked.text)?;
        config.model = fetched_aside(config.model.clone(), config.hub.clone()).await?;
        let model = ModelRef::parse(&config.model.path).map_err(|error| usage(format!("{error:#}")))?;
        let (source, tokenizer) = start::configured(&model, &config.model)?;
        check_kind(&source, "perplexity is measured of")?;
        check_config(&config)?;
        let cut = cut(asked, &config, &source)?;
        let tokens = tokens_of(&text, &tokenizer, &source);
        let tokens = tokens.with_context(|| format!("{} with {}", asked.text.display(), source.name()))?;
        let reference = match (&asked.reference, &asked.against) {
            (Some(other), against) => {
                let reference = Reference::other(other, against.as_ref(), &config).await;
                let reference = reference.context("--reference")?;
                reference.check_same(&source, &text, &tokens).context("--reference")?;
                reference.check_reads(&cut).context("--reference")?;
                Some(reference)
            }
            (None, Some(against)) => Some(Reference::open(against, &model, &config).context("--against")?),
            (None, None) => None,
        };
        let limit = asked.limit_chunks.map_or(usize::MAX, |chunks| chunks as usize);
        Ok(Subject { config, source, tokenizer, text: asked.text.clone(), tokens, cut, limit, reference })
    }

    /// The chunks that are read; at least one.
    pub fn chunks(&self) -> Vec<Chunk<'_>> {
        self.cut.chunks(&self.tokens).take(self.limit).collect()
    }
}

impl Reference {
    /// The same model, loaded as is said, and computed without roundings on the way: neither activations nor cache are coded.
    fn open(against: &Against, model: &ModelRef, config: &Config) -> Result<Reference> {
        let mut config = config.clone();
        config.model.weights = against.weights.clone();
        config.device.inputs = Inputs::Plain;
        config.kv.ty = QuantType::F32;
        let source = Arc::new(start::source(model, &config.model)?);
        Ok(Reference { flag: "--against", name: against.name.clone(), model: None, config, source })
    }

    /// Another model, loaded likewise; as it is stored if nothing is said. What is configured of the model that is measured is not
    /// for this one.
    async fn other(path: &str, against: Option<&Against>, config: &Config) -> Result<Reference> {
        let mut config = config.clone();
        let own = ModelConfig { path: path.to_owned(), spec: None, chat_template: None, ..config.model };
        config.model = fetched_aside(own, config.hub.clone()).await?;
        let model = ModelRef::parse(&config.model.path)?;
        let stored = Against { name: "as stored".to_owned(), weights: Weights::default() };
        let same = Reference::open(against.unwrap_or(&stored), &model, &config)?;
        Ok(Reference { flag: "--reference", model: Some(same.source.name()), ..same })
    }

    /// Refuses a model that has another vocabulary, or reads other tokens in the text.
    fn check_same(&self, measured: &ModelSource, text: &str, tokens: &[u32]) -> Result<()> {
        let (own, other) = (self.source.spec.vocab, measured.spec.vocab);
        ensure!(
            own == other,
            "{} has a vocabulary of {own}, and {} one of {other}: they cannot be compared",
            self.source.name(),
            measured.name()
        );
        let read = start::tokenizer(&self.source)?.encode(text, true)?;
        ensure!(read == tokens, "the tokenizer of {} makes other tokens of the text", self.source.name());
        Ok(())
    }

    /// Refuses what cannot read chunks like that.
    fn check_reads(&self, cut: &Cut) -> Result<()> {
        check_kind(&self.source, "perplexity is measured against")?;
        let context = self.source.spec.context;
        ensure!(
            cut.context <= context,
            "{} was made for {context} tokens, and chunks have {}: --context says otherwise",
            self.source.name(),
            cut.context
        );
        Ok(())
    }
}

/// Refuses what would have no part in what is measured.
fn check_config(config: &Config) -> Result<()> {
    match config.kv.attended == Share::ALL {
        true => Ok(()),
        false => Err(usage(
            "kv.attended_share is for tokens that are drawn, and a text's are read: only 1 can be measured",
        )),
    }
}

/// How the text is cut, as far as the model's context and the configured one allow.
fn cut(asked: &Asked, config: &Config, source: &ModelSource) -> Result<Cut> {
    let made_for = source.spec.context;
    let most = config.kv.max_context.map_or(made_for, |most| most.min(made_for));
    let context = asked.context.map_or(CONTEXT.min(most), |tokens| tokens as usize);
    if context > most {
        return Err(usage(format!("--context {context}: {} has a context of {most} tokens", source.name())));
    }
    let stride = asked.stride.map_or(context, |tokens| tokens as usize);
    if stride > context {
        return Err(usage(format!(
            "--stride {stride}: tokens between chunks of {context} would never be read"
        )));
    }
    Ok(Cut { context, stride })
}
