//! Generation parameters that both text generation APIs share.

use super::beams::{BeamSettings, Conflict, NO_USE, parse_beams};
use super::sampling::RequestSampling;
use super::speculation::parse_speculation;
use super::{CHOICES_MAX, LOGPROBS_MAX};
use crate::request::{AcceptanceRule, Speculation};
use crate::server::ServeParts;
use crate::server::error::ApiError;
use crate::server::fields::{Fields, NoOpValue, describe};
use crate::server::prompts::parse_token_id;
use crate::server::wire::ChoiceOutput;
use serde_json::Value;
use std::sync::Arc;

/// Maximum number of stop strings and stop tokens together.
const STOPS_MAX: usize = 64;
/// Maximum length of a stop string in bytes.
const STOP_BYTES_MAX: usize = 1024;

/// Maximum length of a salt of the prefix cache, in characters.
const CACHE_SALT_MAX: usize = 1024;

/// Generation parameters, with defaults filled in. Intake checks those that depend on the model's limits.
#[derive(Clone, Debug)]
pub struct GenerationParams {
    /// Maximum number of generated tokens; `None` is what remains of the context.
    pub max_tokens: Option<u32>,
    /// Whether the request asks for the rest of the context with -1, as llama.cpp's clients do.
    pub is_unlimited: bool,
    /// Name under which the client gave `max_tokens`.
    pub limit_name: &'static str,
    /// Number of choices per prompt in the response; at least 1.
    pub n: u32,
    /// Number of choices per prompt that are computed, of which the best are returned; at least `n`.
    pub best_of: u32,
    /// The beam search to find the choices with, the best first.
    pub beams: Option<BeamSettings>,
    pub sampling: RequestSampling,
    /// Speculative decoding, unless a choice is too short for it.
    pub speculation: Option<Speculation>,
    pub stops: StopConditions,
    pub include_stop: bool,
    pub show_special: bool,
    pub ignore_eos: bool,
    pub return_token_ids: bool,
    /// Number of most likely tokens to list for each token of the prompt; never in a stream.
    pub prompt_logprobs: Option<u8>,
    /// Text that separates the request in the prefix cache; not empty.
    pub cache_salt: Option<Arc<str>>,
    /// Whether log-probabilities have the ids of tokens in place of their texts.
    pub ids_as_tokens: bool,
    /// Whether the response has the times that the request took.
    pub timings: bool,
    pub delivery: Delivery,
}

/// Stop conditions in addition to the model's own end tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct StopConditions {
    /// Stop strings; none is empty.
    pub strings: Arc<[String]>,
    /// Stop token ids, each below the vocabulary size, each once.
    pub ids: Arc<[u32]>,
    /// Name of the parameter with the ids.
    pub ids_name: &'static str,
}

/// The form in which a response is delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    Json,
    Stream { usage: StreamUsage },
}

/// The chunks of a stream that contain the usage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StreamUsage {
    None,
    /// An additional last chunk.
    LastChunk,
    /// Every chunk has the usage so far, and an additional last chunk the whole.
    EveryChunk,
}

/// Selection of the best choices per prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChoiceSelection {
    /// Number of computed choices per prompt.
    computed: usize,
    /// Number of returned choices per prompt.
    returned: usize,
}

impl ChoiceSelection {
    /// Returns the choices of each prompt with the highest mean log-probability per generated token, the best
    /// first, ties in their order.
    pub fn apply(self, choices: Vec<ChoiceOutput>) -> Vec<ChoiceOutput> {
        let mut scored = choices.into_iter().map(|choice| (choice.mean_logprob(), choice));
        let mut selected = Vec::new();
        loop {
            let mut group: Vec<_> = scored.by_ref().take(self.computed).collect();
            if group.is_empty() {
                return selected;
            }
            group.sort_by(|(a, _), (b, _)| b.total_cmp(a));
            selected.extend(group.into_iter().take(self.returned).map(|(_, choice)| choice));
        }
    }
}

impl GenerationParams {
    /// Returns the number of choices per prompt that are computed.
    pub fn computed_choices(&self) -> u32 {
        self.best_of
    }

    /// Returns the rule by which drafts are accepted, if it changes the distribution of the answer.
    pub fn lossy_acceptance(&self) -> Option<AcceptanceRule> {
        let rule = self.speculation.map(|speculation| self.sampling.acceptance(speculation.rule));
        rule.filter(|rule| *rule == AcceptanceRule::TopSampling)
    }

    /// Returns how the returned choices are selected; `None` if all computed ones are returned.
    pub fn selection(&self) -> Option<ChoiceSelection> {
        let (computed, returned) = (self.best_of as usize, self.n as usize);
        (computed > returned).then_some(ChoiceSelection { computed, returned })
    }

    /// Returns an error of the engine with the names under which the client gave the parameters; that of the
    /// prompt is `prompt`.
    pub fn with_own_names(&self, error: ApiError, prompt: &str) -> ApiError {
        let width = self.beams.map_or("beam_width", |beams| beams.width_name);
        error
            .rename_param("prompt", prompt)
            .rename_param("stop_token_ids", self.stops.ids_name)
            .rename_everywhere("max_tokens", self.limit_name)
            .rename_everywhere("beam_width", width)
    }

    /// Checks the beam search, if there is one, with the rest of the request: the conflicts that its API
    /// knows, and those of these parameters.
    pub(super) fn check_search<'a>(
        &self,
        parts: &ServeParts,
        conflicts: impl IntoIterator<Item = Conflict<'a>>,
    ) -> Result<(), ApiError> {
        let Some(beams) = &self.beams else { return Ok(()) };
        let is_given = self.prompt_logprobs.is_some();
        let scores = Conflict { is_given, param: "prompt_logprobs", rest: NO_USE };
        let longest = u32::try_from(parts.model.max_sequence_tokens).unwrap_or(u32::MAX);
        let limit = (self.max_tokens.unwrap_or(longest), self.limit_name);
        beams.check(limit, conflicts.into_iter().chain([scores]))
    }
}

/// Parses the parameters that both APIs share. `stop` is a further stop token.
pub(super) fn parse_generation(
    fields: &mut Fields,
    parts: &ServeParts,
    stop: Option<u32>,
) -> Result<GenerationParams, ApiError> {
    let (max_tokens, limit_name) = parse_max_tokens(fields)?;
    let n = fields.take_integer("n", 1, CHOICES_MAX)?.unwrap_or(1) as u32;
    let delivery = parse_delivery(fields)?;
    let beams = parse_beams(fields, n)?;
    // A search computes all choices at once.
    let best_of = if beams.is_some() { n } else { parse_best_of(fields, n, delivery)? };
    let stops = parse_stops(fields, parts.model.vocab, stop)?;
    let ignore_eos = fields.take_bool("ignore_eos", false)?;
    let limit = max_tokens.and_then(|limit| u32::try_from(limit).ok());
    let speculation = parse_speculation(fields, parts.model.speculation.as_ref())?;
    Ok(GenerationParams {
        max_tokens: limit,
        is_unlimited: max_tokens.is_some_and(|limit| limit < 0),
        limit_name,
        n,
        best_of,
        beams,
        sampling: RequestSampling::parse(
            fields,
            &parts.sampling,
            beams.is_some(),
            (limit, limit_name),
            ignore_eos,
            &stops.ids,
        )?,
        // A step without drafts gives a token, and the beams of a search change from step to step.
        speculation: speculation.filter(|_| beams.is_none() && limit.is_none_or(|limit| limit > 1)),
        stops,
        include_stop: fields.take_bool("include_stop_str_in_output", false)?,
        show_special: !fields.take_bool("skip_special_tokens", true)?,
        ignore_eos,
        return_token_ids: fields.take_bool("return_token_ids", false)?,
        prompt_logprobs: parse_prompt_logprobs(fields, delivery)?,
        cache_salt: parse_cache_salt(fields)?,
        timings: fields.take_bool("timings_per_token", false)?,
        ids_as_tokens: fields.take_bool("return_tokens_as_token_ids", false)?,
        delivery,
    })
}

/// Parses `prompt_logprobs`. As in vLLM, a stream has none.
fn parse_prompt_logprobs(fields: &mut Fields, delivery: Delivery) -> Result<Option<u8>, ApiError> {
    let top = fields.take_integer("prompt_logprobs", 0, LOGPROBS_MAX)?;
    if top.is_some() && delivery != Delivery::Json {
        let message = "'prompt_logprobs' is not available in a stream: set 'stream' to false";
        return Err(ApiError::invalid("prompt_logprobs", message));
    }
    Ok(top.map(|top| top as u8))
}

/// Parses `cache_salt`. As in vLLM it is not empty; the maximum length is this server's own.
fn parse_cache_salt(fields: &mut Fields) -> Result<Option<Arc<str>>, ApiError> {
    let Some(salt) = fields.take_string("cache_salt")? else { return Ok(None) };
    match salt.chars().count() {
        1..=CACHE_SALT_MAX => Ok(Some(salt.into())),
        length => {
            let message =
                format!("'cache_salt' has {length} characters, but must have 1 to {CACHE_SALT_MAX}");
            Err(ApiError::invalid("cache_salt", message))
        }
    }
}

/// Parses `best_of`, the number of choices of which the best `n` are returned.
fn parse_best_of(fields: &mut Fields, n: u32, delivery: Delivery) -> Result<u32, ApiError> {
    let best_of = fields.take_integer("best_of", 1, CHOICES_MAX)?.map_or(n, |best_of| best_of as u32);
    let error = |message: String| Err(ApiError::invalid("best_of", message));
    match delivery {
        _ if best_of < n => error(format!("'best_of' is {best_of} but must be at least n, which is {n}")),
        Delivery::Stream { .. } if best_of > n => {
            error("a stream cannot select the best choices: 'best_of' must equal n".to_owned())
        }
        Delivery::Stream { .. } | Delivery::Json => Ok(best_of),
    }
}

/// Parses the limit of generated tokens. Returns it with the name under which it was given.
fn parse_max_tokens(fields: &mut Fields) -> Result<(Option<i64>, &'static str), ApiError> {
    const NAMES: [&str; 4] = ["max_tokens", "max_completion_tokens", "n_predict", "max_new_tokens"];
    let mut given: Option<(i64, &str)> = None;
    for name in NAMES {
        match (fields.take_integer(name, -1, u32::MAX.into())?, given) {
            (Some(limit), Some((other, first))) if limit != other => {
                let message = format!("'{name}' is {limit} and '{first}' is {other}: give only one of them");
                return Err(ApiError::invalid(name, message));
            }
            (Some(limit), None) => given = Some((limit, name)),
            _ => {}
        }
    }
    Ok(given.map_or((None, NAMES[0]), |(limit, name)| (Some(limit), name)))
}

/// Parses the stop conditions: `stop` may hold strings and token ids, `stop_token_ids` only token ids.
/// `more` is a further stop token.
fn parse_stops(fields: &mut Fields, vocab: usize, more: Option<u32>) -> Result<StopConditions, ApiError> {
    let (mut strings, mut ids, mut ids_name) = (Vec::new(), Vec::new(), "stop_token_ids");
    for name in ["stop", "stop_token_ids"] {
        let error = |message: String| ApiError::invalid(name, message);
        let list = match fields.take(name) {
            None => continue,
            Some(Value::Array(list)) => list,
            Some(Value::String(text)) if text.is_empty() => continue,
            Some(single) => vec![single],
        };
        for entry in list {
            match &entry {
                Value::String(text) if name == "stop" => match text.len() {
                    0 => return Err(error("'stop' must not contain an empty string".into())),
                    1..=STOP_BYTES_MAX => strings.push(text.clone()),
                    _ => return Err(error(format!("'stop' has a string of over {STOP_BYTES_MAX} bytes"))),
                },
                Value::Number(_) => {
                    ids.push(parse_token_id(&entry, vocab).map_err(error)?);
                    ids_name = name;
                }
                other => {
                    return Err(error(format!("'{name}' must not contain {}", describe(other))));
                }
            }
        }
    }
    if strings.len() + ids.len() > STOPS_MAX {
        return Err(ApiError::invalid("stop", format!("'stop' must not have more than {STOPS_MAX} entries")));
    }
    ids.extend(more);
    ids.sort_unstable();
    ids.dedup();
    Ok(StopConditions { strings: strings.into(), ids: ids.into(), ids_name })
}

/// Parses `stream` and `stream_options`.
fn parse_delivery(fields: &mut Fields) -> Result<Delivery, ApiError> {
    let stream = fields.take_bool("stream", false)?;
    let Some(options) = fields.take_object("stream_options")? else {
        return Ok(if stream { Delivery::Stream { usage: StreamUsage::None } } else { Delivery::Json });
    };
    if !stream {
        return Err(ApiError::invalid("stream_options", "'stream_options' needs 'stream' to be true"));
    }
    let mut options = fields.nested("stream_options", options);
    let in_last_chunk = options.take_bool("include_usage", false)?;
    let in_every_chunk = options.take_bool("continuous_usage_stats", false)?;
    // Obfuscation is a random padding against observers of the connection; without it, nothing is wrong.
    options.finish(&[&[("include_obfuscation", NoOpValue::Any)]])?;
    let usage = match (in_last_chunk, in_every_chunk) {
        (true, true) => StreamUsage::EveryChunk,
        (true, false) => StreamUsage::LastChunk,
        (false, _) => StreamUsage::None,
    };
    Ok(Delivery::Stream { usage })
}
