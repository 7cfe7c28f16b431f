//! Parameters of the text generation APIs: those that both share, and those of each.
//!
//! Invariant: a parameter that would change the answer and is not supported is rejected. What only advises is
//! listed as such, and unknown fields are named, see [`Fields`].

mod beams;

mod constraint;

mod conversation;

mod generation;

mod sampling;

mod speculation;

mod unsupported;

pub use constraint::ConstraintParams;
pub use conversation::{Conversation, parse_conversation};
pub use generation::{ChoiceSelection, Delivery, GenerationParams, StreamUsage};

use super::ServeParts;
use super::decoder_start::DecoderStartParams;
use super::error::ApiError;
use super::fields::Fields;
use super::fill_in_the_middle;
use super::prompts::{Prompt, parse_prompts};
use crate::actors::engine::TOP_LOGPROBS;
use crate::text::tools::ToolChoice;
use beams::{Conflict, NO_USE};
use constraint::{UNSUPPORTED_CONSTRAINTS, check_tools, find_cut, parse_constraint};
use generation::parse_generation;
use serde_json::Value;
use unsupported::{UNSUPPORTED, UNSUPPORTED_CHAT};

/// Default of `max_tokens` in the completions API.
const MAX_TOKENS_DEFAULT: u32 = 16;

/// Parameter with the maximum number of tokens of a prompt.
const TRUNCATE: &str = "truncate_prompt_tokens";

/// Maximum number of choices per prompt.
const CHOICES_MAX: i64 = 128;

/// Maximum number of most likely tokens per position that a request can ask for.
const LOGPROBS_MAX: i64 = TOP_LOGPROBS as i64;

/// Parameters of a completions request.
#[derive(Clone, Debug)]
pub struct CompletionParams {
    pub generation: GenerationParams,
    /// At least one.
    pub prompts: Vec<Prompt>,
    pub decoder_start: DecoderStartParams,
    pub logprobs: Option<u8>,
    pub echo: bool,
    /// Text after the generated one, for models that can fill in the middle.
    pub suffix: Option<String>,
    pub constraint: Option<ConstraintParams>,
    /// Whether the tokenizer adds its special tokens around texts.
    pub add_special_tokens: bool,
    /// Maximum number of tokens of a prompt, of which the last ones are kept.
    pub truncate: Option<usize>,
}

/// Parameters of a chat completions request.
#[derive(Debug)]
pub struct ChatParams {
    pub generation: GenerationParams,
    pub conversation: Conversation,
    pub logprobs: Option<u8>,
    pub constraint: Option<ConstraintParams>,
    /// Whether the response has the reasoning.
    pub include_reasoning: bool,
}

impl CompletionParams {
    /// Parses a request body, from which `model` has been taken out.
    pub fn parse(mut fields: Fields, parts: &ServeParts) -> Result<CompletionParams, ApiError> {
        let constraint = parse_constraint(&mut fields)?;
        let vocab = parts.model.vocab;
        let suffix = fields.take_string("suffix")?.filter(|suffix| !suffix.is_empty());
        let stop = suffix.as_ref().and_then(|_| fill_in_the_middle::end_token(parts));
        let mut generation = parse_generation(&mut fields, parts, stop)?;
        if !generation.is_unlimited {
            generation.max_tokens.get_or_insert(MAX_TOKENS_DEFAULT);
        }
        let logprobs_name = if fields.get("logprobs").is_some() { "logprobs" } else { "n_probs" };
        let params = CompletionParams {
            generation,
            prompts: parse_prompts("prompt", fields.take("prompt"), parts.model.source_vocab)?,
            decoder_start: DecoderStartParams::parse(&mut fields, vocab)?,
            logprobs: parse_logprobs(&mut fields)?,
            echo: fields.take_bool("echo", false)?,
            suffix,
            constraint,
            add_special_tokens: fields.take_bool("add_special_tokens", true)?,
            truncate: fields.take_integer(TRUNCATE, 1, u32::MAX.into())?.map(|most| most as usize),
        };
        fields.finish(&[UNSUPPORTED, UNSUPPORTED_CONSTRAINTS])?;
        if params.truncate.is_some() && (params.suffix.is_some() || parts.model.encoder_context > 0) {
            let message =
                format!("'{TRUNCATE}' is not available with 'suffix' and for encoder-decoder models");
            return Err(ApiError::unsupported(TRUNCATE, message));
        }
        let scores_only = params.echo || params.generation.prompt_logprobs.is_some();
        if params.generation.max_tokens == Some(0) && !scores_only {
            let message = "'max_tokens' can be 0 only with 'echo' or 'prompt_logprobs'";
            return Err(ApiError::invalid("max_tokens", message));
        }
        let conflicts = [
            constraint_conflict(params.constraint.as_ref()),
            top_conflict(logprobs_name, params.logprobs),
            Conflict {
                is_given: params.echo && params.logprobs.is_some(),
                param: "echo",
                rest: ECHOES_SCORES,
            },
        ];
        params.generation.check_search(parts, conflicts)?;
        Ok(params)
    }
}

impl ChatParams {
    /// Parses a request body, from which `model` has been taken out.
    pub fn parse(mut fields: Fields, parts: &ServeParts) -> Result<ChatParams, ApiError> {
        let cut = find_cut(&fields);
        let constraint = parse_constraint(&mut fields)?;
        let generation = parse_generation(&mut fields, parts, None)?;
        if generation.max_tokens == Some(0) {
            let name = generation.limit_name;
            return Err(ApiError::invalid(name, format!("'{name}' must be at least 1")));
        }
        let mut conversation = parse_conversation(&mut fields)?;
        check_tools(&conversation.tools, constraint.as_ref(), cut)?;
        // Templates of models with several efforts read it; others ignore it.
        if let Some(Value::String(effort)) = fields.take("reasoning_effort") {
            conversation.template_kwargs.entry("reasoning_effort").or_insert(effort.into());
        }
        let logprobs = parse_chat_logprobs(&mut fields)?;
        let include_reasoning = fields.take_bool("include_reasoning", true)?;
        fields.finish(&[UNSUPPORTED, UNSUPPORTED_CONSTRAINTS, UNSUPPORTED_CHAT])?;
        let must_call = matches!(conversation.tools.choice, ToolChoice::Required | ToolChoice::Named(_));
        let conflicts = [
            constraint_conflict(constraint.as_ref()),
            Conflict { is_given: must_call, param: "tool_choice", rest: NO_USE },
            top_conflict("top_logprobs", logprobs),
        ];
        generation.check_search(parts, conflicts)?;
        Ok(ChatParams { generation, conversation, logprobs, constraint, include_reasoning })
    }
}

/// The rest of a sentence about `echo`.
const ECHOES_SCORES: &str = "cannot be given together with a beam search and 'logprobs'";

/// Returns the conflict of a beam search with a constraint, if there is one.
fn constraint_conflict(constraint: Option<&ConstraintParams>) -> Conflict<'_> {
    let param = constraint.map_or("", |constraint| &constraint.param);
    Conflict { is_given: constraint.is_some(), param, rest: NO_USE }
}

/// Returns the conflict of a beam search with the number of most likely tokens to list.
fn top_conflict(param: &str, logprobs: Option<u8>) -> Conflict<'_> {
    let rest = "must be 0 in a beam search, which has the log-probabilities of its own tokens only";
    Conflict { is_given: logprobs.is_some_and(|top| top > 0), param, rest }
}

/// Parses `logprobs` of completions, or `n_probs`, as llama.cpp calls it, where 0 means none.
fn parse_logprobs(fields: &mut Fields) -> Result<Option<u8>, ApiError> {
    let logprobs = fields.take_integer("logprobs", 0, LOGPROBS_MAX)?;
    let n_probs = fields.take_integer("n_probs", 0, LOGPROBS_MAX)?.filter(|count| *count > 0);
    match (logprobs, n_probs) {
        (Some(logprobs), Some(n_probs)) if logprobs != n_probs => {
            let message =
                format!("'n_probs' is {n_probs} and 'logprobs' is {logprobs}: give only one of them");
            Err(ApiError::invalid("n_probs", message))
        }
        (logprobs, n_probs) => Ok(logprobs.or(n_probs).map(|count| count as u8)),
    }
}

/// Parses `logprobs`, a switch, and `top_logprobs`, the number of most likely tokens per position.
fn parse_chat_logprobs(fields: &mut Fields) -> Result<Option<u8>, ApiError> {
    let on = fields.take_bool("logprobs", false)?;
    let top = fields.take_integer("top_logprobs", 0, LOGPROBS_MAX)?;
    match (on, top) {
        (true, top) => Ok(Some(top.unwrap_or(0) as u8)),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => {
            Err(ApiError::invalid("top_logprobs", "'top_logprobs' needs 'logprobs' to be true"))
        }
    }
}
