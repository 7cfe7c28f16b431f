//! A text read by a model, chunk by chunk, as `perplexity` and `quantize --calibrate` do.
//!
//! A text is encoded as a whole, as a prompt is: a token that the tokenizer puts before a prompt comes once, before the first
//! chunk, and special tokens that the text spells out are those tokens.
//! Invariant: what is read goes the way of what is served: the same devices, kernels, cache and schedule.

mod chunks;
mod reader;

pub use chunks::{Chunk, Cut};
pub use reader::Reader;

use crate::model::ModelSource;
use crate::model::spec::Kind;
use crate::text::Tokenizer;
use anyhow::{Context, Result, anyhow, bail, ensure};
use indicatif::{ProgressBar, ProgressStyle};
use std::path::Path;

/// Tokens of a chunk, where the model was made for as many.
pub const CONTEXT: usize = 512;

/// The text in a file.
pub fn text_of(path: &Path) -> Result<String> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let text = String::from_utf8(bytes);
    text.map_err(|error| {
        anyhow!("{}: no UTF-8 from byte {} on", path.display(), error.utf8_error().valid_up_to())
    })
}

/// Its tokens, at least two, each within the model's vocabulary.
pub fn tokens_of(text: &str, tokenizer: &Tokenizer, source: &ModelSource) -> Result<Vec<u32>> {
    let tokens = tokenizer.encode(text, true)?;
    let vocab = source.spec.vocab;
    if let Some(foreign) = tokens.iter().find(|token| **token as usize >= vocab) {
        bail!("the tokenizer gives token {foreign}, and the model's vocabulary has {vocab}");
    }
    ensure!(tokens.len() >= 2, "fewer than two tokens, and nothing foretells the first");
    Ok(tokens)
}

/// Refuses a model that does not read as decoders do; `what` is not done with it.
pub fn check_kind(source: &ModelSource, what: &str) -> Result<()> {
    let kind = match source.spec.kind {
        Kind::Decoder => return Ok(()),
        Kind::Encoder => "an encoder",
        Kind::EncoderDecoder => "an encoder-decoder",
    };
    bail!("{} is {kind}, and {what} decoders alone", source.name())
}

/// A bar on a terminal's standard error; elsewhere nothing is drawn.
pub fn progress(chunks: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:30} {pos}/{len} chunks, {eta} left, {msg}");
    let style = style.expect("the template is well formed; anything else is a bug");
    ProgressBar::new(chunks as u64).with_style(style)
}
