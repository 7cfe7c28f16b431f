//! `POST /v1/fill-mask`: takes texts with mask tokens, returns the most likely tokens for each mask.
//!
//! Invariant: each mask is scored and filled while all other masks of the text stay in place.

use super::ServeParts;
use super::encoders::{EncoderApi, EncoderInput, EncoderOutput, INLINE_INPUTS, parse_texts};
use super::error::ApiError;
use super::fields::{Fields, NoOpValue, UnsupportedParams};
use super::openapi::describe::Api;
use super::openapi::requests::FillMaskBody;
use super::respond::Turn;
use super::wire::fill_mask::{FillMaskResponse, FilledMask, FilledText, MaskCandidate};
use super::wire::{InputUsage, finite_logprob};
use crate::actors::engine::TOP_LOGPROBS;
use crate::request::{Task, Token, TokenEvent};
use std::sync::Arc;

/// Default number of candidates per mask.
const TOP_K_DEFAULT: i64 = 5;

/// Maximum number of tokens of all texts in a response together: each candidate repeats the whole text.
const SHOWN_MAX: usize = 2 << 20;

/// Responses with more tokens than this are serialized off the event loop.
const INLINE_SHOWN_TOKENS: usize = 4096;

/// Describes the path of the API.
pub fn describe_paths(api: &mut Api) {
    api.post(FillMaskRequest::PATH, "Fills masks of texts.")
        .body::<FillMaskBody>()
        .returns::<FillMaskResponse>();
}

/// A parsed fill-mask request.
pub struct FillMaskRequest {
    /// Number of tokens of the texts in the response.
    shown_tokens: usize,
}

/// Parameters of the OpenAI API and of other servers that are accepted only without effect.
const UNSUPPORTED: UnsupportedParams = &[("user", NoOpValue::Any), ("targets", NoOpValue::OnlyNull)];

impl EncoderApi for FillMaskRequest {
    const PATH: &'static str = "/v1/fill-mask";
    type Response = FillMaskResponse;

    fn parse(
        parts: &ServeParts,
        turn: &Turn,
        mut fields: Fields,
    ) -> Result<(FillMaskRequest, Vec<EncoderInput>), ApiError> {
        let unknown = "the model's tokenizer has no mask token";
        let mask = parts.special_tokens.mask.ok_or_else(|| ApiError::invalid("input", unknown))?;
        let top = fields.take_integer("top_k", 1, TOP_LOGPROBS as i64)?.unwrap_or(TOP_K_DEFAULT) as u8;
        let texts = parse_texts(fields, (parts, turn), UNSUPPORTED, "")?;
        let inputs = texts.into_iter().enumerate().map(|(index, ids)| {
            let at = positions_of(&ids, mask);
            if at.is_empty() {
                let name = parts.tokenizer.token_text(mask);
                let message = format!("text {index} of 'input' has no mask token ({})", name.trim());
                return Err(ApiError::invalid("input", message));
            }
            Ok(EncoderInput { ids, second_text: None, task: Task::FillMask { positions: at, top_k: top } })
        });
        let inputs: Vec<EncoderInput> = inputs.collect::<Result<_, _>>()?;
        let shown = inputs.iter().map(count_shown_tokens).sum();
        check_shown_tokens(shown, top)?;
        Ok((FillMaskRequest { shown_tokens: shown }, inputs))
    }

    fn is_large(&self, texts: usize) -> bool {
        texts > INLINE_INPUTS || self.shown_tokens > INLINE_SHOWN_TOKENS
    }

    fn build_response(
        &self,
        parts: &ServeParts,
        _id: &str,
        found: Vec<EncoderOutput>,
    ) -> Result<FillMaskResponse, ApiError> {
        let usage = InputUsage::new(found.iter().map(|found| found.input.ids.len()).sum());
        let one = |(index, found): (usize, EncoderOutput)| {
            let masks = build_masks(parts, &found)?;
            Ok(FilledText { object: "fill_mask", index, masks })
        };
        let data = found.into_iter().enumerate().map(one).collect::<Result<_, ApiError>>()?;
        Ok(FillMaskResponse { object: "list", data, model: parts.model.name.clone(), usage })
    }
}

/// Returns the number of tokens of the texts that the response contains for one input.
fn count_shown_tokens(EncoderInput { ids, task, .. }: &EncoderInput) -> usize {
    match task {
        Task::FillMask { positions: at, top_k: top } => at.len() * usize::from(*top) * ids.len(),
        Task::Generate | Task::Embed(_) | Task::EmbedTokens => 0,
    }
}

/// Returns an error if the response would contain too much text.
fn check_shown_tokens(shown: usize, top: u8) -> Result<(), ApiError> {
    if shown <= SHOWN_MAX {
        return Ok(());
    }
    let message = format!(
        "the response would contain {shown} tokens, more than the maximum of {SHOWN_MAX}: each of the {top} \
         candidates per mask repeats the whole text; use fewer masks, texts or candidates ('top_k')"
    );
    Err(ApiError::invalid("input", message))
}

/// Returns the positions of a token in a text.
fn positions_of(ids: &[u32], token: u32) -> Arc<[u32]> {
    let at = ids.iter().zip(0..).filter(|(id, _)| **id == token);
    at.map(|(_, position)| position).collect()
}

/// Builds the response for each mask of a text.
fn build_masks(
    parts: &ServeParts,
    EncoderOutput { input, events }: &EncoderOutput,
) -> Result<Vec<FilledMask>, ApiError> {
    let Task::FillMask { positions: at, .. } = &input.task else {
        return Err(ApiError::internal("an input was not to be filled; this is a bug"));
    };
    let tokens: Vec<_> = events.iter().filter_map(filled_token).collect();
    if tokens.len() != at.len() {
        return Err(ApiError::internal("the engine returned no candidates for a mask; this is a bug"));
    }
    let skips_special = at.len() == 1;
    let mask = |(position, token): (&u32, &Token)| {
        let position = *position as usize;
        let text = MaskedText { parts, ids: &input.ids, position, skip_special: skips_special };
        let candidates = token.top.iter().map(|top| text.candidate(*top));
        Ok(FilledMask { position, candidates: candidates.collect::<Result<_, ApiError>>()? })
    };
    at.iter().zip(tokens).map(mask).collect()
}

fn filled_token(event: &TokenEvent) -> Option<&Token> {
    match event {
        TokenEvent::MaskFilled(token) => Some(token),
        _ => None,
    }
}

/// A text with a mask in it.
struct MaskedText<'a> {
    parts: &'a ServeParts,
    ids: &'a [u32],
    /// Position of the mask.
    position: usize,
    /// Omit special tokens from the shown text. False if the text has further masks, which are special tokens
    /// too.
    skip_special: bool,
}

impl MaskedText<'_> {
    fn candidate(&self, (token, logprob): (u32, f32)) -> Result<MaskCandidate, ApiError> {
        let mut filled = self.ids.to_vec();
        filled[self.position] = token;
        filled.retain(|id| Some(*id) != self.parts.special_tokens.pad);
        Ok(MaskCandidate {
            token,
            token_str: self.decode(&[token], false)?,
            score: logprob.exp(),
            logprob: finite_logprob(logprob),
            sequence: self.decode(&filled, self.skip_special)?,
        })
    }

    fn decode(&self, ids: &[u32], skips_special: bool) -> Result<String, ApiError> {
        let text = self.parts.tokenizer.decode(ids, skips_special);
        text.map_err(|error| ApiError::internal(format!("a candidate cannot be decoded: {error}")))
    }
}
