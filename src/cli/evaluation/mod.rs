//! Evaluation of a text by a model, chunk by chunk, for `perplexity` and `quantize --calibrate`.
//!
//! The text is tokenized as a whole, like a prompt: a token that the tokenizer puts before a prompt occurs
//! once, before the first chunk, and special tokens spelled out in the text become those tokens.
//! Invariant: evaluation uses the same devices, kernels, cache and scheduling as serving.

mod chunks;
mod evaluator;

pub use chunks::{Chunk, Chunking};
pub use evaluator::Evaluator;

use crate::model::ModelSource;
use crate::model::spec::Kind;
use crate::text::Tokenizer;
use anyhow::{Context, Result, anyhow, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use std::path::Path;

/// Default tokens per chunk; a model with a shorter context length uses that.
pub const DEFAULT_CONTEXT: usize = 512;

/// Reads a text file, which must be UTF-8.
pub fn read_text(path: &Path) -> Result<String> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let text = String::from_utf8(bytes);
    text.map_err(|error| {
        anyhow!("{}: not UTF-8 from byte {} on", path.display(), error.utf8_error().valid_up_to())
    })
}

/// Tokenizes a text. Fails if it has fewer than two tokens, or a token outside the model's vocabulary.
pub fn tokenize(text: &str, tokenizer: &Tokenizer, source: &ModelSource) -> Result<Vec<u32>> {
    let tokens = tokenizer.encode(text, true)?;
    let vocab = source.spec.vocab;
    if let Some(foreign) = tokens.iter().find(|token| **token as usize >= vocab) {
        bail!("the tokenizer produces token {foreign}, but the model's vocabulary has {vocab} tokens");
    }
    ensure!(tokens.len() >= 2, "fewer than two tokens, and the first has no prediction to score");
    Ok(tokens)
}

/// Fails if the model is not decoder-only. `what` begins the reason, such as "perplexity is measured of".
pub fn check_decoder_only(source: &ModelSource, what: &str) -> Result<()> {
    let kind = match source.spec.kind {
        Kind::Decoder if source.spec.has_head() => return Ok(()),
        Kind::Decoder => "a decoder without a head",
        Kind::Encoder => "an encoder-only model",
        Kind::EncoderDecoder => "an encoder-decoder model",
    };
    bail!("{} is {kind}, but {what} generative decoder-only models only", source.name())
}

/// Creates a progress bar over chunks. It is drawn only if stderr is a terminal.
pub fn progress_bar(chunks: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} chunks, {eta} left, {msg}");
    let style = style.expect("the template is well formed; anything else is a bug");
    ProgressBar::new(chunks as u64).with_style(style)
}
