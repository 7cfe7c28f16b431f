//! `POST /v1/fill-mask`: takes texts with mask tokens, returns the most likely tokens for each mask.
//!
//! Invariant: each mask is scored and filled while all other masks of the text stay in place.

use super::ServeParts;
use super::encoders::{Found, INLINE_INPUTS, Input, Question, texts};
use super::error::ApiError;
use super::fields::{Neutral, Unserved};
use super::respond::fields_of;
use super::wire::fill_mask::{Candidate, Filling, Fillings, Mask};
use super::wire::{InputUsage, writable};
use crate::actors::engine::TOP_LOGPROBS;
use crate::request::{Task, Token, TokenEvent};
use std::sync::Arc;

/// Default number of candidates per mask.
const TOP: i64 = 5;

/// Maximum number of tokens of all texts in a response together: each candidate repeats the whole text.
const SHOWN_MAX: usize = 2 << 20;

/// Responses with more tokens than this are serialized off the event loop.
const INLINE_SHOWN: usize = 4096;

/// A parsed fill-mask request.
pub struct Masks {
    /// Number of tokens of the texts in the response.
    shown: usize,
}

/// Parameters of the OpenAI API and of other servers that are accepted only without effect.
const UNSERVED: Unserved = &[("user", Neutral::Anything), ("targets", Neutral::Nothing)];

impl Question for Masks {
    const PATH: &'static str = "/v1/fill-mask";
    type Answer = Fillings;

    fn read(parts: &ServeParts, body: &[u8]) -> Result<(Masks, Vec<Input>), ApiError> {
        let mut fields = fields_of(parts, body)?;
        let unknown = "the model's tokenizer has no mask token";
        let mask = parts.tokens.mask.ok_or_else(|| ApiError::invalid("input", unknown))?;
        let top = fields.integer("top_k", 1, TOP_LOGPROBS as i64)?.unwrap_or(TOP) as u8;
        let texts = texts(fields, parts, UNSERVED)?;
        let inputs = texts.into_iter().enumerate().map(|(index, ids)| {
            let at = places(&ids, mask);
            if at.is_empty() {
                let name = parts.tokenizer.token_text(mask);
                let message = format!("text {index} of 'input' has no mask token ({})", name.trim());
                return Err(ApiError::invalid("input", message));
            }
            Ok(Input { ids, task: Task::Fill { at, top } })
        });
        let inputs: Vec<Input> = inputs.collect::<Result<_, _>>()?;
        let shown = inputs.iter().map(shown).sum();
        check_shown(shown, top)?;
        Ok((Masks { shown }, inputs))
    }

    fn is_long(&self, texts: usize) -> bool {
        texts > INLINE_INPUTS || self.shown > INLINE_SHOWN
    }

    fn answer(&self, parts: &ServeParts, found: Vec<Found>) -> Result<Fillings, ApiError> {
        let usage = InputUsage::of(found.iter().map(|found| found.input.ids.len()).sum());
        let one = |(index, found): (usize, Found)| {
            let masks = masks(parts, &found)?;
            Ok(Filling { object: "fill_mask", index, masks })
        };
        let data = found.into_iter().enumerate().map(one).collect::<Result<_, ApiError>>()?;
        Ok(Fillings { object: "list", data, model: parts.model.name.clone(), usage })
    }
}

/// Returns the number of tokens of the texts that the response contains for one input.
fn shown(Input { ids, task }: &Input) -> usize {
    match task {
        Task::Fill { at, top } => at.len() * usize::from(*top) * ids.len(),
        Task::Generate | Task::Embed(_) => 0,
    }
}

/// Returns an error if the response would contain too much text.
fn check_shown(shown: usize, top: u8) -> Result<(), ApiError> {
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
fn places(ids: &[u32], token: u32) -> Arc<[u32]> {
    let at = ids.iter().zip(0..).filter(|(id, _)| **id == token);
    at.map(|(_, position)| position).collect()
}

/// Builds the response for each mask of a text.
fn masks(parts: &ServeParts, Found { input, events }: &Found) -> Result<Vec<Mask>, ApiError> {
    let Task::Fill { at, .. } = &input.task else {
        unreachable!("fill-mask requests have only fill tasks; this is a bug");
    };
    let tokens: Vec<_> = events.iter().filter_map(filled).collect();
    if tokens.len() != at.len() {
        return Err(ApiError::internal("the engine returned no candidates for a mask; this is a bug"));
    }
    let skips_special = at.len() == 1;
    let mask = |(position, token): (&u32, &Token)| {
        let position = *position as usize;
        let text = Text { parts, ids: &input.ids, position, skips_special };
        let candidates = token.top.iter().map(|top| text.candidate(*top));
        Ok(Mask { position, candidates: candidates.collect::<Result<_, ApiError>>()? })
    };
    at.iter().zip(tokens).map(mask).collect()
}

fn filled(event: &TokenEvent) -> Option<&Token> {
    match event {
        TokenEvent::Filled(token) => Some(token),
        _ => None,
    }
}

/// A text with a mask in it.
struct Text<'a> {
    parts: &'a ServeParts,
    ids: &'a [u32],
    /// Position of the mask.
    position: usize,
    /// Omit special tokens from the shown text. False if the text has further masks, which are special tokens
    /// too.
    skips_special: bool,
}

impl Text<'_> {
    fn candidate(&self, (token, logprob): (u32, f32)) -> Result<Candidate, ApiError> {
        let mut filled = self.ids.to_vec();
        filled[self.position] = token;
        filled.retain(|id| Some(*id) != self.parts.tokens.pad);
        Ok(Candidate {
            token,
            token_str: self.decode(&[token], false)?,
            score: logprob.exp(),
            logprob: writable(logprob),
            sequence: self.decode(&filled, self.skips_special)?,
        })
    }

    fn decode(&self, ids: &[u32], skips_special: bool) -> Result<String, ApiError> {
        let text = self.parts.tokenizer.decode(ids, skips_special);
        text.map_err(|error| ApiError::internal(format!("a candidate cannot be decoded: {error}")))
    }
}
