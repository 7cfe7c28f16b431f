//! `POST /v1/completions`: takes texts or token ids, returns generated text.
//!
//! Invariant: the choices of one prompt are adjacent, in the order of the prompts.

use super::ServeParts;
use super::error::ApiError;
use super::fields::Fields;
use super::fill_in_the_middle::FillInTheMiddle;
use super::openapi::describe::Api;
use super::openapi::requests::CompletionRequest;
use super::params::CompletionParams;
use super::prompt_ids::{PromptIds, encode, encode_any};
use super::prompts::Prompt;
use super::respond::{GenerationApi, PreparedRequest, ResponseFormat, Turn, check_choices};
use super::wire::Envelope;
use super::wire::completion::{CompletionChoice, CompletionLogprobs};
use super::wire::{ChoiceOutput, PromptLogprobs, TokenIds, TokenNames};
use crate::actors::PromptingDefaults;
use std::sync::Arc;

/// Describes the path of the API.
pub fn describe_paths(api: &mut Api) {
    api.post(CompletionsApi::PATH, "Continues prompts.")
        .body::<CompletionRequest>()
        .returns_generic::<Envelope<'static, CompletionChoice>, CompletionChoice>("Completion")
        .streams();
}

/// The completions API.
pub struct CompletionsApi;

/// Response format of the completions API.
pub struct CompletionFormat {
    logprobs: Option<u8>,
    ids: ResponseTokenIds,
}

/// Token ids to include in the choices of a response, if the request asks for them.
pub struct ResponseTokenIds {
    pub enabled: bool,
    /// Whether log-probabilities have ids in place of texts.
    pub as_names: bool,
    pub prompts: Vec<PromptIds>,
    /// Number of choices per prompt.
    pub choices_per_prompt: usize,
}

impl GenerationApi for CompletionsApi {
    type Format = CompletionFormat;
    const PATH: &'static str = "/v1/completions";
    const PROMPT_PARAM: &'static str = "prompt";

    fn parse(
        parts: &ServeParts,
        _: &Turn,
        fields: Fields,
    ) -> Result<PreparedRequest<CompletionFormat>, ApiError> {
        let params = CompletionParams::parse(fields, parts)?;
        check_choices(parts, params.prompts.len(), &params.generation)?;
        let CompletionParams {
            generation,
            prompts,
            decoder_start,
            logprobs,
            echo,
            suffix,
            constraint,
            add_special_tokens,
            truncate,
        } = params;
        let middle = suffix.map(|suffix| FillInTheMiddle::new(parts, suffix, echo)).transpose()?;
        let prompts = match &parts.model.prompting {
            PromptingDefaults::EncoderDecoder(prompting) => {
                decoder_start.prompt_ids(parts, prompting, prompts, add_special_tokens)?
            }
            PromptingDefaults::Decoder(_) | PromptingDefaults::Encoder(_) => {
                decoder_start.reject_if_given()?;
                let tokens = prompts.into_iter().map(|prompt| match &middle {
                    Some(middle) => middle.prompt_ids(parts, prompt, add_special_tokens),
                    None => prompt_ids(parts, prompt, add_special_tokens, truncate),
                });
                tokens.map(|ids| ids.map(PromptIds::decoder_only)).collect::<Result<_, _>>()?
            }
        };
        let ids = ResponseTokenIds {
            enabled: generation.return_token_ids,
            as_names: generation.ids_as_tokens,
            prompts: prompts.clone(),
            choices_per_prompt: generation.n as usize,
        };
        let format = CompletionFormat { logprobs, ids };
        Ok(PreparedRequest {
            generation,
            prompts,
            echo,
            logprobs,
            constraint,
            shown_tokens: Arc::default(),
            format,
        })
    }
}

/// Returns the token ids of a prompt, of which at most `truncate` are kept. An empty prompt becomes the BOS
/// token; without one it is an error.
fn prompt_ids(
    parts: &ServeParts,
    prompt: Prompt,
    add_special: bool,
    truncate: Option<usize>,
) -> Result<Arc<[u32]>, ApiError> {
    let mut ids = match (prompt, truncate) {
        (Prompt::Ids(ids), _) => ids,
        (Prompt::Text(text), None) => encode(parts, &text, add_special, "prompt")?,
        (Prompt::Text(text), Some(_)) => {
            // What is longer has more tokens than the context.
            let mut start = text.len().saturating_sub(parts.longest_text);
            while !text.is_char_boundary(start) {
                start += 1;
            }
            encode_any(parts, &text[start..], add_special, "prompt")?
        }
    };
    if let Some(cut) = truncate.and_then(|most| ids.len().checked_sub(most)) {
        let kept = usize::from(ids.first().is_some_and(|first| Some(*first) == parts.tokenizer.bos_id()));
        ids.drain(kept..kept + cut);
    }
    if !ids.is_empty() {
        return Ok(ids.into());
    }
    let empty = || ApiError::invalid("prompt", "'prompt' is empty, and the tokenizer has no BOS token");
    parts.tokenizer.bos_id().map(|bos| [bos].into()).ok_or_else(empty)
}

impl ResponseTokenIds {
    /// Returns the names of tokens in log-probabilities.
    pub fn names<'a>(&self, parts: &'a ServeParts) -> TokenNames<'a> {
        TokenNames { tokenizer: &parts.tokenizer, are_ids: self.as_names }
    }

    /// Returns the token ids of a choice's output, with those of its prompt if `first` is set.
    pub fn for_choice(&self, index: usize, part: &ChoiceOutput, first: bool) -> TokenIds {
        if !self.enabled {
            return TokenIds::default();
        }
        let prompt = first.then(|| &self.prompts[index / self.choices_per_prompt]);
        let encoder_decoder = prompt.filter(|prompt| !prompt.encoder_input.is_empty());
        TokenIds {
            token_ids: Some(part.token_ids()),
            prompt_token_ids: prompt
                .map(|ids| encoder_decoder.map_or(&ids.prompt, |ids| &ids.encoder_input).to_vec()),
            decoder_prompt_token_ids: encoder_decoder.map(|ids| ids.prompt.to_vec()),
        }
    }
}

impl CompletionFormat {
    fn build_choice(
        &self,
        parts: &ServeParts,
        index: usize,
        part: ChoiceOutput,
        logprobs: Option<u8>,
        first: bool,
    ) -> CompletionChoice {
        let logprobs =
            logprobs.map(|top| CompletionLogprobs::from_output(&part, top, &self.ids.names(parts)));
        let (ids, finish) = (self.ids.for_choice(index, &part, first), (&part).into());
        CompletionChoice { index, logprobs, ids, finish, text: part.text, prompt_logprobs: None }
    }
}

impl ResponseFormat for CompletionFormat {
    const ID_PREFIX: &'static str = "cmpl-";
    const OPERATION: &'static str = "text_completion";
    const OBJECT: &'static str = "text_completion";
    const CHUNK_OBJECT: &'static str = Self::OBJECT;
    const PROMPT_LOGPROBS_IN_CHOICES: bool = true;
    type Choice = CompletionChoice;
    type ChunkChoice = CompletionChoice;
    type ChoiceState = ();

    fn begin_choice(&self, _: usize) {}

    fn choice(
        &self,
        parts: &ServeParts,
        index: usize,
        part: ChoiceOutput,
        prompt_logprobs: Option<PromptLogprobs>,
    ) -> CompletionChoice {
        let choice = self.build_choice(parts, index, part, self.logprobs, true);
        CompletionChoice { prompt_logprobs, ..choice }
    }

    fn first_chunk(&self, _: usize) -> Option<CompletionChoice> {
        None
    }

    fn chunk(
        &self,
        parts: &ServeParts,
        index: usize,
        part: ChoiceOutput,
        first: bool,
        (): &mut (),
    ) -> CompletionChoice {
        // A chunk without tokens has null rather than an object of empty lists.
        let logprobs = self.logprobs.filter(|_| !part.tokens.is_empty());
        self.build_choice(parts, index, part, logprobs, first)
    }
}
