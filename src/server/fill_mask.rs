//! `POST /v1/fill-mask`: texts with masks in, what fits each of them out.
//!
//! Invariant: every mask of a text is judged with all the others in place.

use super::ServeParts;
use super::encoders::{Found, INLINE_INPUTS, Input, Question, texts};
use super::error::ApiError;
use super::fields::{Fields, Neutral, Unserved};
use super::wire::fill_mask::{Candidate, Filling, Fillings, Mask};
use super::wire::{InputUsage, writable};
use crate::actors::engine::TOP_LOGPROBS;
use crate::request::{Task, TokenEvent};
use crate::text::Tokenizer;
use std::sync::Arc;

/// Candidates of a mask, if not told otherwise.
const TOP: i64 = 5;

/// Tokens of all the texts of an answer together, at most: each candidate shows the whole text.
const SHOWN_MAX: usize = 2 << 20;

/// Answers of more of them are written off the event loop.
const INLINE_SHOWN: usize = 4096;

/// What is asked of the API.
pub struct Masks {
    mask: u32,
    /// Tokens of the texts in the answer.
    shown: usize,
}

/// What is the client's own, or of the programs whose clients we meet.
const UNSERVED: Unserved = &[("user", Neutral::Anything), ("targets", Neutral::Nothing)];

impl Question for Masks {
    const PATH: &'static str = "/v1/fill-mask";
    type Answer = Fillings;

    fn read(parts: &ServeParts, body: &[u8]) -> Result<(Masks, Vec<Input>), ApiError> {
        let unknown = "the model's tokenizer has no mask token, so there is none to fill";
        let mask = parts.tokens.mask.ok_or_else(|| ApiError::invalid("input", unknown))?;
        let mut fields = Fields::of_body(body)?;
        let top = fields.integer("top_k", 1, TOP_LOGPROBS as i64)?.unwrap_or(TOP) as u8;
        let texts = texts(fields, parts, UNSERVED)?;
        let inputs = texts.into_iter().enumerate().map(|(index, ids)| {
            let at = places(&ids, mask);
            if at.is_empty() {
                let name = parts.tokenizer.token_text(mask);
                let message = format!("text {index} of 'input' has no mask token, which is {}", name.trim());
                return Err(ApiError::invalid("input", message));
            }
            Ok(Input { ids, task: Task::Fill { at, top } })
        });
        let inputs: Vec<Input> = inputs.collect::<Result<_, _>>()?;
        let shown = inputs.iter().map(shown).sum();
        check_shown(shown, top)?;
        Ok((Masks { mask, shown }, inputs))
    }

    fn is_long(&self, texts: usize) -> bool {
        texts > INLINE_INPUTS || self.shown > INLINE_SHOWN
    }

    fn answer(&self, parts: &ServeParts, found: Vec<Found>) -> Result<Fillings, ApiError> {
        let usage = InputUsage::of(found.iter().map(|found| found.ids.len()).sum());
        let one = |(index, found): (usize, Found)| {
            let masks = self.masks(&parts.tokenizer, &found)?;
            Ok(Filling { object: "fill_mask", index, masks })
        };
        let data = found.into_iter().enumerate().map(one).collect::<Result<_, ApiError>>()?;
        Ok(Fillings { object: "list", data, model: parts.model.name.clone(), usage })
    }
}

/// Tokens of the texts that the answer shows for one.
fn shown(Input { ids, task }: &Input) -> usize {
    match task {
        Task::Fill { at, top } => at.len() * usize::from(*top) * ids.len(),
        Task::Generate | Task::Embed(_) => 0,
    }
}

/// Refuses what would be answered with more text than is good for anyone.
fn check_shown(shown: usize, top: u8) -> Result<(), ApiError> {
    if shown <= SHOWN_MAX {
        return Ok(());
    }
    let message = format!(
        "with {top} candidates for each mask, and the whole text for each candidate, the answer would be {shown} \
         tokens, more than the {SHOWN_MAX} that can be: fewer masks, texts or candidates (top_k) make it less"
    );
    Err(ApiError::invalid("input", message))
}

/// Where a token stands.
fn places(ids: &[u32], token: u32) -> Arc<[u32]> {
    let at = ids.iter().zip(0..).filter(|(id, _)| **id == token);
    at.map(|(_, place)| place).collect()
}

impl Masks {
    fn masks(&self, tokenizer: &Tokenizer, found: &Found) -> Result<Vec<Mask>, ApiError> {
        let tokens = found.events.iter().filter_map(|event| match event {
            TokenEvent::Filled(token) => Some(token),
            _ => None,
        });
        let places = places(&found.ids, self.mask);
        let masks = places.iter().zip(tokens).map(|(place, token)| {
            let position = *place as usize;
            let candidates =
                token.top.iter().map(|top| self.candidate(tokenizer, &found.ids, position, *top));
            Ok(Mask { position, candidates: candidates.collect::<Result<_, ApiError>>()? })
        });
        let masks: Vec<Mask> = masks.collect::<Result<_, ApiError>>()?;
        match masks.len() == places.len() {
            true => Ok(masks),
            false => Err(ApiError::internal("a mask came back unfilled; this is a bug")),
        }
    }

    fn candidate(
        &self,
        tokenizer: &Tokenizer,
        ids: &[u32],
        position: usize,
        (token, logprob): (u32, f32),
    ) -> Result<Candidate, ApiError> {
        let failed = |error| ApiError::internal(format!("a candidate cannot be put into text: {error}"));
        let decode = |ids: &[u32]| tokenizer.decode(ids, false).map_err(failed);
        let mut filled = ids.to_vec();
        filled[position] = token;
        // Of the tokens that are no text, only masks that are still open are shown.
        filled.retain(|id| *id == self.mask || !tokenizer.is_special(*id));
        Ok(Candidate {
            token,
            token_str: decode(&[token])?,
            score: logprob.exp(),
            logprob: writable(logprob),
            sequence: decode(&filled)?,
        })
    }
}
