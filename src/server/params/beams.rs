//! Beam search in requests: the parameters of vLLM and of Hugging Face transformers.
//!
//! Invariant: a request with a search has no parameter that the search would ignore and that would otherwise
//! change the answer.

use super::CHOICES_MAX;
use crate::actors::limits::BEAMS_MAX;
use crate::decoding::{BeamParams, BeamSearch, EarlyStopping};
use crate::server::error::ApiError;
use crate::server::fields::Fields;
use serde_json::Value;

/// Names of the width.
const WIDTH: [&str; 2] = ["beam_width", "num_beams"];

/// The beam search of a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BeamSettings {
    /// Number of beams, at least that of the returned choices.
    pub width: usize,
    /// Name of the parameter that determines the width.
    pub width_name: &'static str,
    pub length_penalty: f64,
    pub early_stopping: EarlyStopping,
}

/// A parameter that a beam search cannot stand beside.
pub struct Conflict<'a> {
    pub is_given: bool,
    pub param: &'a str,
    /// The rest of a sentence that begins with the parameter.
    pub rest: &'static str,
}

/// The rest of a sentence about a parameter that a beam search has no use for.
pub const NO_USE: &str = "cannot be given together with a beam search";

/// Parses the beam search that a request asks for, with `use_beam_search` or, as in transformers, with a
/// width above 1. `n` is the number of returned choices.
pub fn parse_beams(fields: &mut Fields, n: u32) -> Result<Option<BeamSettings>, ApiError> {
    let wanted = fields.take_with("use_beam_search", "true or false", Value::as_bool)?;
    let width = parse_width(fields)?;
    let length_penalty = fields.take_with("length_penalty", "a number", Value::as_f64)?.unwrap_or(1.0);
    let early_stopping = fields.take("early_stopping").map(|value| EarlyStopping::parse(&value));
    let early_stopping = early_stopping.transpose()?.unwrap_or_default();
    if !wanted.unwrap_or(width.is_some_and(|(width, _)| width > 1)) {
        check_unused(width, length_penalty, early_stopping)?;
        return Ok(None);
    }
    let best_of = fields.take_integer("best_of", 1, CHOICES_MAX)?.map(|best_of| (best_of as u32, "best_of"));
    if let (Some((width, name)), Some((best_of, _))) = (width, best_of)
        && width != best_of
    {
        let message = format!("'best_of' is {best_of} and '{name}' is {width}: give only one of them");
        return Err(ApiError::invalid("best_of", message));
    }
    let (width, width_name) = width.or(best_of).unwrap_or((n, "n"));
    if width < n {
        let message = format!("'{width_name}' is {width} but must be at least n, which is {n}");
        return Err(ApiError::invalid(width_name, message));
    }
    Ok(Some(BeamSettings { width: width as usize, width_name, length_penalty, early_stopping }))
}

/// Parses the width. Returns it with the name under which it was given.
fn parse_width(fields: &mut Fields) -> Result<Option<(u32, &'static str)>, ApiError> {
    let mut given: Option<(u32, &'static str)> = None;
    for name in WIDTH {
        let width = fields.take_integer(name, 1, BEAMS_MAX as i64)?.map(|width| width as u32);
        match (width, given) {
            (Some(width), Some((other, first))) if width != other => {
                let message = format!("'{name}' is {width} and '{first}' is {other}: give only one of them");
                return Err(ApiError::invalid(name, message));
            }
            (Some(width), None) => given = Some((width, name)),
            _ => {}
        }
    }
    Ok(given)
}

/// Checks that parameters of a search have no effect in a request without one.
fn check_unused(
    width: Option<(u32, &'static str)>,
    length_penalty: f64,
    early_stopping: EarlyStopping,
) -> Result<(), ApiError> {
    let width = width.filter(|(width, _)| *width > 1).map(|(_, name)| name);
    let penalty = (length_penalty != 1.0).then_some("length_penalty");
    let stopping = (early_stopping != EarlyStopping::default()).then_some("early_stopping");
    match width.or(penalty).or(stopping) {
        Some(name) => Err(ApiError::invalid(name, format!("'{name}' needs 'use_beam_search' to be true"))),
        None => Ok(()),
    }
}

impl BeamSettings {
    /// Checks the search of up to `max_tokens` tokens (named `limit_name`), and that the request has none of
    /// the `conflicts`. Intake checks that the width is within the slots.
    pub fn check<'a>(
        &self,
        (max_tokens, limit_name): (u32, &str),
        mut conflicts: impl Iterator<Item = Conflict<'a>>,
    ) -> Result<(), ApiError> {
        if let Some(Conflict { param, rest, .. }) = conflicts.find(|conflict| conflict.is_given) {
            return Err(ApiError::invalid(param, format!("'{param}' {rest}")));
        }
        let search = BeamSearch::new(BeamParams {
            width: self.width,
            max_tokens,
            min_tokens: 0,
            length_penalty: self.length_penalty,
            early_stopping: self.early_stopping,
            end_tokens: Vec::new(),
            // At most; which prompts have one is not known yet.
            forced_tokens: 1,
        });
        search.map(drop).map_err(|error| ApiError::from(error).rename_param("max_tokens", limit_name))
    }
}
