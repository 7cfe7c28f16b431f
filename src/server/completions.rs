//! `POST /v1/completions`: takes texts or token ids, returns generated text.
//!
//! Invariant: the choices of one prompt are adjacent, in the order of the prompts.

use super::ServeParts;
use super::error::ApiError;
use super::inputs::Prompt;
use super::params::CompletionParams;
use super::respond::{Api, Asked, Job, Wording, check_choices, encode, fields_of};
use super::wire::completion::{Choice, Logprobs};
use super::wire::{Part, TokenIds};
use crate::actors::Conventions;
use std::sync::Arc;

/// The completions API.
pub struct Completions;

/// Response format of the completions API.
pub struct CompletionWording {
    logprobs: bool,
    ids: Ids,
}

/// Token ids to include in the choices of a response, if the request asks for them.
pub struct Ids {
    pub wanted: bool,
    pub prompts: Vec<Asked>,
    /// Number of choices per prompt.
    pub n: usize,
}

impl Api for Completions {
    type Wording = CompletionWording;
    const PATH: &'static str = "/v1/completions";
    const PROMPT: &'static str = "prompt";

    fn read(parts: &ServeParts, body: &[u8]) -> Result<Job<CompletionWording>, ApiError> {
        let params =
            CompletionParams::parse(fields_of(parts, body)?, parts.model.vocab, &parts.model.defaults)?;
        check_choices(parts, params.prompts.len(), params.generation.n)?;
        let CompletionParams { generation, prompts, opening, logprobs, echo, add_special_tokens } = params;
        let prompts = match &parts.model.conventions {
            Conventions::EncoderDecoder(conventions) => {
                opening.asked(parts, conventions, prompts, add_special_tokens)?
            }
            Conventions::Decoder | Conventions::Encoder(_) => {
                opening.refuse()?;
                let tokens = prompts.into_iter().map(|prompt| tokens(parts, prompt, add_special_tokens));
                tokens.map(|ids| ids.map(Asked::plainly)).collect::<Result<_, _>>()?
            }
        };
        let ids =
            Ids { wanted: generation.return_token_ids, prompts: prompts.clone(), n: generation.n as usize };
        let wording = CompletionWording { logprobs: logprobs.is_some(), ids };
        Ok(Job { generation, prompts, echo, logprobs, wording })
    }
}

/// Returns the token ids of a prompt. An empty prompt becomes the BOS token; without one it is an error.
fn tokens(parts: &ServeParts, prompt: Prompt, add_special: bool) -> Result<Arc<[u32]>, ApiError> {
    let ids = match prompt {
        Prompt::Ids(ids) => ids,
        Prompt::Text(text) => encode(parts, &text, add_special, "prompt")?,
    };
    if !ids.is_empty() {
        return Ok(ids.into());
    }
    let empty = || ApiError::invalid("prompt", "'prompt' is empty, and the tokenizer has no BOS token");
    parts.tokenizer.bos_id().map(|bos| [bos].into()).ok_or_else(empty)
}

impl Ids {
    /// Returns the token ids of a choice's output, with those of its prompt if `first` is set.
    pub fn of(&self, index: usize, part: &Part, first: bool) -> TokenIds {
        if !self.wanted {
            return TokenIds::default();
        }
        let prompt = first.then(|| &self.prompts[index / self.n]);
        let encoder_decoder = prompt.filter(|prompt| !prompt.source.is_empty());
        TokenIds {
            token_ids: Some(part.token_ids()),
            prompt_token_ids: prompt
                .map(|ids| encoder_decoder.map_or(&ids.prompt, |ids| &ids.source).to_vec()),
            decoder_prompt_token_ids: encoder_decoder.map(|ids| ids.prompt.to_vec()),
        }
    }
}

impl CompletionWording {
    fn of(&self, parts: &ServeParts, index: usize, part: Part, logprobs: bool, first: bool) -> Choice {
        let logprobs = logprobs.then(|| Logprobs::of(&part, &parts.tokenizer));
        let ids = self.ids.of(index, &part, first);
        Choice { index, logprobs, ids, finish: part.end.as_ref().into(), text: part.text }
    }
}

impl Wording for CompletionWording {
    const ID: &'static str = "cmpl-";
    const OBJECT: &'static str = "text_completion";
    const CHUNK_OBJECT: &'static str = Self::OBJECT;
    type Choice = Choice;
    type ChunkChoice = Choice;

    fn choice(&self, parts: &ServeParts, index: usize, part: Part) -> Choice {
        self.of(parts, index, part, self.logprobs, true)
    }

    fn opening(&self, _: usize) -> Option<Choice> {
        None
    }

    fn chunk(&self, parts: &ServeParts, index: usize, part: Part, first: bool) -> Choice {
        // A chunk without tokens has null rather than an object of empty lists.
        let with_logprobs = self.logprobs && !part.tokens.is_empty();
        self.of(parts, index, part, with_logprobs, first)
    }
}
