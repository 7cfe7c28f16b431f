//! What is measured: a model, a text that is cut for it, and what the model is compared with.
//!
//! A text is encoded as a whole, as a prompt is: a token that the tokenizer puts before a prompt comes once, before the first
//! chunk, and special tokens that the text spells out are those tokens.
//! Invariant: each chunk is within the model's context, and each token within its vocabulary.

use super::chunks::{Chunk, Cut};
use super::{Against, Asked, usage};
use crate::cli::start::{self, fetched_aside};
use crate::config::Config;
use crate::model::spec::Kind;
use crate::model::{ModelRef, ModelSource};
use crate::text::Tokenizer;
use anyhow::{Context, Result, anyhow, bail, ensure};
use mainstem_kernels::{Inputs, QuantType, Share};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Tokens of a chunk, where the model was made for as many.
const CONTEXT: usize = 512;

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
    /// What the user calls it.
    pub name: String,
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
        check_kind(&source)?;
        check_config(&config)?;
        let cut = cut(asked, &config, &source)?;
        let tokens = tokens_of(&text, &tokenizer, &source);
        let tokens = tokens.with_context(|| format!("{} with {}", asked.text.display(), source.name()))?;
        let reference = asked.against.as_ref().map(|against| Reference::open(against, &model, &config));
        let reference = reference.transpose().context("--against")?;
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
        Ok(Reference { name: against.name.clone(), config, source })
    }
}

fn text_of(path: &Path) -> Result<String> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let text = String::from_utf8(bytes);
    text.map_err(|error| {
        anyhow!("{}: no UTF-8 from byte {} on", path.display(), error.utf8_error().valid_up_to())
    })
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

/// Refuses a model that foretells nothing.
fn check_kind(source: &ModelSource) -> Result<()> {
    let kind = match source.spec.kind {
        Kind::Decoder => return Ok(()),
        Kind::Encoder => "an encoder",
        Kind::EncoderDecoder => "an encoder-decoder",
    };
    bail!("{} is {kind}, and perplexity is measured of decoders alone", source.name())
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

/// The text's tokens, at least two.
fn tokens_of(text: &str, tokenizer: &Tokenizer, source: &ModelSource) -> Result<Vec<u32>> {
    let tokens = tokenizer.encode(text, true)?;
    let vocab = source.spec.vocab;
    if let Some(foreign) = tokens.iter().find(|token| **token as usize >= vocab) {
        bail!("the tokenizer gives token {foreign}, and the model's vocabulary has {vocab}");
    }
    ensure!(tokens.len() >= 2, "fewer than two tokens, and nothing foretells the first");
    Ok(tokens)
}
