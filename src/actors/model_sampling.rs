//! The sampling parameters of the served model's requests: defaults and what parameters need to know of the
//! model.
//!
//! Invariant: defaults are checked against the vocabulary once, when the engine starts.

use crate::decoding::SamplingPlan;
use crate::decoding::strategies::{CheckedDefaults, ParamError, Vocabulary};
use crate::formats::sampling_keys;
use crate::request::SamplingDefaults;
use crate::text::Tokenizer;
use crate::text::output::OutputFormats;
use anyhow::{Result, anyhow};
use serde_json::Value;
use std::borrow::Cow;
use std::sync::Arc;

/// Builds the sampling plans of the served model's requests.
#[derive(Debug)]
pub struct ModelSampling {
    tokenizer: Arc<Tokenizer>,
    /// Number of logits of a row.
    size: usize,
    eos: Vec<u32>,
    /// The token before reasoning, and those after it.
    thinking: Option<(u32, Vec<u32>)>,
    defaults: CheckedDefaults,
}

/// The model's vocabulary, for one request.
struct RequestVocabulary<'a> {
    model: &'a ModelSampling,
    end_tokens: Vec<u32>,
}

impl ModelSampling {
    /// Creates the plan builder of a model with rows of `size` logits. Fails for defaults (`given`) that the
    /// model cannot serve.
    pub fn new(
        tokenizer: Arc<Tokenizer>,
        size: usize,
        eos: Vec<u32>,
        formats: &OutputFormats,
        given: &SamplingDefaults,
    ) -> Result<ModelSampling> {
        let thinking = thinking_tokens(&tokenizer, formats);
        let defaults = CheckedDefaults::default();
        let mut sampling = ModelSampling { tokenizer, size, eos, thinking, defaults };
        let by_server = |error: ParamError| anyhow!("model.sampling: {error}");
        let by_model = |error: ParamError| {
            anyhow!("generation_config.json: key '{}' {}", sampling_keys::key(&error.param), error.rest())
        };
        // The server's own parameters must not contradict each other, just like those of a request.
        sampling.plan(given.server.pairs(), true, &[]).map_err(by_server)?;
        let vocabulary = sampling.vocabulary(true, &[]);
        let server = CheckedDefaults::parse(given.server.pairs(), &vocabulary).map_err(by_server)?;
        let of_model = CheckedDefaults::parse(given.model.pairs(), &vocabulary).map_err(by_model)?;
        SamplingPlan::parse(&of_model, [], &vocabulary).map_err(by_model)?;
        let defaults = server.or(of_model);
        SamplingPlan::parse(&defaults, [], &vocabulary).map_err(by_server)?;
        sampling.defaults = defaults;
        Ok(sampling)
    }

    /// Builds the plan of a request. Its end tokens are the model's, unless they are ignored, and `stop_ids`.
    pub fn plan<'v>(
        &self,
        params: impl IntoIterator<Item = (&'v str, &'v Value)>,
        ignore_eos: bool,
        stop_ids: &[u32],
    ) -> Result<SamplingPlan, ParamError> {
        SamplingPlan::parse(&self.defaults, params, &self.vocabulary(ignore_eos, stop_ids))
    }

    /// Builds the plan that a request's parameters would have without defaults and end tokens.
    pub fn plan_without_defaults<'v>(
        &self,
        params: impl IntoIterator<Item = (&'v str, &'v Value)>,
    ) -> Result<SamplingPlan, ParamError> {
        SamplingPlan::parse(&CheckedDefaults::default(), params, &self.vocabulary(true, &[]))
    }

    fn vocabulary(&self, ignore_eos: bool, stop_ids: &[u32]) -> RequestVocabulary<'_> {
        let eos = if ignore_eos { &[][..] } else { &self.eos };
        RequestVocabulary { model: self, end_tokens: [eos, stop_ids].concat() }
    }
}

/// Returns the token before the model's reasoning and those after it, if it has a token that marks the begin.
fn thinking_tokens(tokenizer: &Tokenizer, formats: &OutputFormats) -> Option<(u32, Vec<u32>)> {
    let (open, close) = formats.reasoning?.delimiters()?;
    let start = open.iter().find_map(|marker| tokenizer.token_id(marker))?;
    let end = tokenizer.encode(close.first()?, false).ok()?;
    Some((start, end))
}

impl Vocabulary for RequestVocabulary<'_> {
    fn size(&self) -> usize {
        self.model.size
    }

    fn end_tokens(&self) -> Cow<'_, [u32]> {
        Cow::Borrowed(&self.end_tokens)
    }

    fn encode(&self, text: &str) -> Vec<u32> {
        self.model.tokenizer.encode(text, false).unwrap_or_default()
    }

    fn tokens_with(&self, text: &str) -> Vec<u32> {
        self.model.tokenizer.tokens_containing(text)
    }

    fn thinking(&self) -> Option<(u32, Cow<'_, [u32]>)> {
        self.model.thinking.as_ref().map(|(start, end)| (*start, Cow::Borrowed(&end[..])))
    }
}
