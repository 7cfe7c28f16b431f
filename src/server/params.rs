//! Parameters of the text generation APIs: those that both share, and those of each.
//!
//! Invariant: no parameter is silently ignored, see [`Fields`].

use super::access::random;
use super::decoder_start::DecoderStartParams;
use super::error::ApiError;
use super::fields::{Fields, NoOpValue, UnsupportedParams, describe, to_finite_f32};
use super::prompts::{Prompt, parse_prompts, parse_token_id};
use crate::actors::SamplingDefaults;
use crate::actors::engine::TOP_LOGPROBS;
use crate::request::Sampling;
use crate::text::chat_template::{Content, Message};
use serde_json::{Map, Value};
use std::sync::Arc;

/// Default of `max_tokens` in the completions API.
const MAX_TOKENS_DEFAULT: u32 = 16;

/// Maximum number of most likely tokens per position that a request can ask for.
const LOGPROBS_MAX: i64 = TOP_LOGPROBS as i64;

/// Maximum number of choices per prompt.
const CHOICES_MAX: i64 = 128;

/// Maximum number of stop strings and stop tokens together.
const STOPS_MAX: usize = 64;
/// Maximum length of a stop string in bytes.
const STOP_BYTES_MAX: usize = 1024;

/// Largest absolute value of a logit bias.
const BIAS_MAX: f32 = 100.0;

/// Generation parameters, with defaults filled in. Intake checks the ranges of the sampling parameters and
/// those that depend on the model.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerationParams {
    /// Maximum number of generated tokens; `None` is what remains of the context.
    pub max_tokens: Option<u32>,
    /// Name under which the client gave `max_tokens`.
    pub limit_name: &'static str,
    pub min_tokens: u32,
    /// Number of choices per prompt; at least 1.
    pub n: u32,
    pub sampling: Sampling,
    /// Logit biases as in [`Request`](crate::request::Request), each id once.
    pub logit_bias: Arc<[(u32, f32)]>,
    pub stops: StopConditions,
    pub include_stop: bool,
    pub show_special: bool,
    pub ignore_eos: bool,
    pub return_token_ids: bool,
    pub delivery: Delivery,
}

/// Stop conditions in addition to the model's own end tokens.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StopConditions {
    /// Stop strings; none is empty.
    pub strings: Arc<[String]>,
    /// Stop token ids, each below the vocabulary size, each once.
    pub ids: Arc<[u32]>,
}

/// Parameters of a completions request.
#[derive(Clone, Debug, PartialEq)]
pub struct CompletionParams {
    pub generation: GenerationParams,
    /// At least one.
    pub prompts: Vec<Prompt>,
    pub decoder_start: DecoderStartParams,
    pub logprobs: Option<u8>,
    pub echo: bool,
    /// Whether the tokenizer adds its special tokens around texts.
    pub add_special_tokens: bool,
}

/// Parameters of a chat completions request.
#[derive(Debug)]
pub struct ChatParams {
    pub generation: GenerationParams,
    pub conversation: Conversation,
    pub logprobs: Option<u8>,
}

/// Messages, and the options for rendering them with the chat template.
#[derive(Debug)]
pub struct Conversation {
    /// At least one.
    pub messages: Vec<Message>,
    pub add_generation_prompt: bool,
    pub continue_final_message: bool,
    pub template_kwargs: Map<String, Value>,
}

/// The form in which a response is delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    Json,
    Stream {
        /// Whether a last chunk contains the usage.
        usage: bool,
    },
}

/// Unsupported parameters of both OpenAI APIs and of other servers.
const UNSUPPORTED: UnsupportedParams = &[
    ("user", NoOpValue::Any),
    ("metadata", NoOpValue::Any),
    ("safety_identifier", NoOpValue::Any),
    ("prompt_cache_key", NoOpValue::Any),
    ("store", NoOpValue::Bool(false)),
    ("best_of", NoOpValue::Number(1.0)),
    ("presence_penalty", NoOpValue::Number(0.0)),
    ("frequency_penalty", NoOpValue::Number(0.0)),
    ("repetition_penalty", NoOpValue::Number(1.0)),
    ("length_penalty", NoOpValue::Number(1.0)),
    ("spaces_between_special_tokens", NoOpValue::Bool(true)),
    ("truncate_prompt_tokens", NoOpValue::OnlyNull),
    ("prompt_logprobs", NoOpValue::OnlyNull),
    ("allowed_token_ids", NoOpValue::OnlyNull),
    ("bad_words", NoOpValue::Empty),
    ("use_beam_search", NoOpValue::Bool(false)),
    ("structured_outputs", NoOpValue::OnlyNull),
    ("priority", NoOpValue::Number(0.0)),
    ("service_tier", NoOpValue::Text("auto")),
];

/// Unsupported parameters of the completions API only.
const UNSUPPORTED_COMPLETIONS: UnsupportedParams =
    &[("suffix", NoOpValue::Empty), ("response_format", NoOpValue::OnlyNull)];

/// Unsupported parameters of the chat API only.
const UNSUPPORTED_CHAT: UnsupportedParams = &[
    ("tools", NoOpValue::Empty),
    ("functions", NoOpValue::Empty),
    ("tool_choice", NoOpValue::Text("none")),
    ("function_call", NoOpValue::Text("none")),
    ("parallel_tool_calls", NoOpValue::Any),
    ("modalities", NoOpValue::OnlyNull),
    ("audio", NoOpValue::OnlyNull),
    ("prediction", NoOpValue::OnlyNull),
    ("reasoning_effort", NoOpValue::OnlyNull),
    ("verbosity", NoOpValue::OnlyNull),
    ("web_search_options", NoOpValue::OnlyNull),
    ("chat_template", NoOpValue::OnlyNull),
    ("documents", NoOpValue::Empty),
    ("echo", NoOpValue::Bool(false)),
    ("add_special_tokens", NoOpValue::Bool(false)),
];

/// Unsupported fields of messages. Their empty values are accepted, since clients send responses back
/// unchanged.
const UNSUPPORTED_IN_MESSAGES: UnsupportedParams = &[
    ("tool_calls", NoOpValue::Empty),
    ("function_call", NoOpValue::OnlyNull),
    ("refusal", NoOpValue::Empty),
    ("audio", NoOpValue::OnlyNull),
    ("annotations", NoOpValue::Empty),
    ("reasoning_content", NoOpValue::Empty),
    ("reasoning", NoOpValue::Empty),
];

impl CompletionParams {
    /// Parses a request body, from which `model` has been taken out. `vocab` is the vocabulary size.
    pub fn parse(
        mut fields: Fields,
        vocab: usize,
        defaults: &SamplingDefaults,
    ) -> Result<CompletionParams, ApiError> {
        let mut generation = parse_generation(&mut fields, vocab, defaults)?;
        generation.max_tokens.get_or_insert(MAX_TOKENS_DEFAULT);
        let params = CompletionParams {
            generation,
            prompts: parse_prompts("prompt", fields.take("prompt"), vocab)?,
            decoder_start: DecoderStartParams::parse(&mut fields, vocab)?,
            logprobs: fields.take_integer("logprobs", 0, LOGPROBS_MAX)?.map(|n| n as u8),
            echo: fields.take_bool("echo", false)?,
            add_special_tokens: fields.take_bool("add_special_tokens", true)?,
        };
        fields.reject_unknown(&[UNSUPPORTED, UNSUPPORTED_COMPLETIONS])?;
        if params.generation.max_tokens == Some(0) && !params.echo {
            return Err(ApiError::invalid("max_tokens", "'max_tokens' can be 0 only with 'echo'"));
        }
        Ok(params)
    }
}

impl ChatParams {
    /// Parses a request body, from which `model` has been taken out. `vocab` is the vocabulary size.
    pub fn parse(
        mut fields: Fields,
        vocab: usize,
        defaults: &SamplingDefaults,
    ) -> Result<ChatParams, ApiError> {
        let generation = parse_generation(&mut fields, vocab, defaults)?;
        if generation.max_tokens == Some(0) {
            let name = generation.limit_name;
            return Err(ApiError::invalid(name, format!("'{name}' must be at least 1")));
        }
        let conversation = parse_conversation(&mut fields)?;
        let logprobs = parse_chat_logprobs(&mut fields)?;
        let plain_text = |value: &Value| (value["type"] == "text").then_some(());
        fields.take_with(
            "response_format",
            "of type \"text\" (other types are not supported yet)",
            plain_text,
        )?;
        fields.reject_unknown(&[UNSUPPORTED, UNSUPPORTED_CHAT])?;
        Ok(ChatParams { generation, conversation, logprobs })
    }
}

/// Parses the parameters that both APIs share.
fn parse_generation(
    fields: &mut Fields,
    vocab: usize,
    defaults: &SamplingDefaults,
) -> Result<GenerationParams, ApiError> {
    let (max_tokens, limit_name) = parse_max_tokens(fields)?;
    Ok(GenerationParams {
        max_tokens,
        limit_name,
        min_tokens: fields.take_integer("min_tokens", 0, u32::MAX.into())?.unwrap_or(0) as u32,
        n: fields.take_integer("n", 1, CHOICES_MAX)?.unwrap_or(1) as u32,
        sampling: parse_sampling(fields, defaults)?,
        logit_bias: parse_logit_bias(fields, vocab)?,
        stops: parse_stops(fields, vocab)?,
        include_stop: fields.take_bool("include_stop_str_in_output", false)?,
        show_special: !fields.take_bool("skip_special_tokens", true)?,
        ignore_eos: fields.take_bool("ignore_eos", false)?,
        return_token_ids: fields.take_bool("return_token_ids", false)?,
        delivery: parse_delivery(fields)?,
    })
}

/// Parses the limit of generated tokens. Returns it with the name under which it was given.
fn parse_max_tokens(fields: &mut Fields) -> Result<(Option<u32>, &'static str), ApiError> {
    const NAMES: [&str; 2] = ["max_tokens", "max_completion_tokens"];
    let [old, new] = NAMES.map(|name| fields.take_integer(name, 0, u32::MAX.into()));
    match (old?, new?) {
        (Some(old), Some(new)) if old != new => {
            let message =
                format!("'max_completion_tokens' is {new} and 'max_tokens' is {old}: give only one of them");
            Err(ApiError::invalid(NAMES[1], message))
        }
        (None, Some(limit)) => Ok((Some(limit as u32), NAMES[1])),
        (limit, _) => Ok((limit.map(|limit| limit as u32), NAMES[0])),
    }
}

/// Parses the sampling parameters.
fn parse_sampling(fields: &mut Fields, defaults: &SamplingDefaults) -> Result<Sampling, ApiError> {
    // -1 also means all tokens.
    let top_k = fields.take_integer("top_k", -1, u32::MAX.into())?.map(|k| k.max(0) as u32);
    let seed = fields.take_with("seed", "a 64-bit integer", |value| {
        value.as_u64().or_else(|| value.as_i64().map(|seed| seed as u64))
    })?;
    Ok(Sampling {
        temperature: fields.take_number("temperature")?.or(defaults.temperature).unwrap_or(1.0),
        top_k: top_k.or(defaults.top_k).unwrap_or(0),
        top_p: fields.take_number("top_p")?.or(defaults.top_p).unwrap_or(1.0),
        min_p: fields.take_number("min_p")?.or(defaults.min_p).unwrap_or(0.0),
        seed: seed.unwrap_or_else(random),
    })
}

/// Parses `logit_bias`, an object from token ids as strings to biases.
fn parse_logit_bias(fields: &mut Fields, vocab: usize) -> Result<Arc<[(u32, f32)]>, ApiError> {
    let Some(entries) = fields.take_object("logit_bias")? else { return Ok(Arc::default()) };
    let entry = |(id, bias): (&String, &Value)| {
        let error = |message| ApiError::invalid("logit_bias", message);
        let known = id.parse().ok().filter(|id: &u32| (*id as usize) < vocab);
        let known = known
            .ok_or_else(|| error(format!("'{id}' is not a token id of the vocabulary of {vocab} tokens")))?;
        let number = bias.as_f64().map(to_finite_f32).filter(|bias| bias.abs() <= BIAS_MAX);
        let number = number.ok_or_else(|| {
            error(format!(
                "the bias of token {id} must be a number from -{BIAS_MAX} to {BIAS_MAX}, not {}",
                describe(bias)
            ))
        })?;
        // In the API the lower limit bans the token.
        Ok((known, if number == -BIAS_MAX { f32::NEG_INFINITY } else { number }))
    };
    entries.iter().map(entry).collect()
}

/// Parses the stop conditions: `stop` may hold strings and token ids, `stop_token_ids` only token ids.
fn parse_stops(fields: &mut Fields, vocab: usize) -> Result<StopConditions, ApiError> {
    let (mut strings, mut ids) = (Vec::new(), Vec::new());
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
                Value::Number(_) => ids.push(parse_token_id(&entry, vocab).map_err(error)?),
                other => {
                    return Err(error(format!("'{name}' must not contain {}", describe(other))));
                }
            }
        }
    }
    if strings.len() + ids.len() > STOPS_MAX {
        return Err(ApiError::invalid("stop", format!("'stop' must not have more than {STOPS_MAX} entries")));
    }
    ids.sort_unstable();
    ids.dedup();
    Ok(StopConditions { strings: strings.into(), ids: ids.into() })
}

/// Parses `stream` and `stream_options`.
fn parse_delivery(fields: &mut Fields) -> Result<Delivery, ApiError> {
    let stream = fields.take_bool("stream", false)?;
    let Some(options) = fields.take_object("stream_options")? else {
        return Ok(if stream { Delivery::Stream { usage: false } } else { Delivery::Json });
    };
    if !stream {
        return Err(ApiError::invalid("stream_options", "'stream_options' needs 'stream' to be true"));
    }
    let mut options = Fields::from_object("stream_options", options);
    let usage = options.take_bool("include_usage", false)?;
    options.reject_unknown(&[&[
        ("continuous_usage_stats", NoOpValue::Bool(false)),
        ("include_obfuscation", NoOpValue::Bool(false)),
    ]])?;
    Ok(Delivery::Stream { usage })
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

/// Parses the messages and the template options of a body of the chat or the tokenize API.
pub fn parse_conversation(fields: &mut Fields) -> Result<Conversation, ApiError> {
    let bad = |message: &str| ApiError::invalid("messages", message);
    let list = match fields.take("messages") {
        None => return Err(bad("'messages' is missing")),
        Some(Value::Array(list)) if list.is_empty() => return Err(bad("'messages' is empty")),
        Some(Value::Array(list)) => list,
        Some(_) => return Err(bad("'messages' must be a list")),
    };
    let conversation = Conversation {
        messages: list
            .into_iter()
            .enumerate()
            .map(|(i, value)| parse_message(i, value))
            .collect::<Result<_, _>>()?,
        add_generation_prompt: fields.take_bool("add_generation_prompt", true)?,
        continue_final_message: fields.take_bool("continue_final_message", false)?,
        template_kwargs: fields.take_object("chat_template_kwargs")?.unwrap_or_default(),
    };
    if conversation.continue_final_message && conversation.add_generation_prompt {
        let message = "'continue_final_message' needs 'add_generation_prompt' to be false";
        return Err(ApiError::invalid("continue_final_message", message));
    }
    Ok(conversation)
}

/// Parses a message, whose content is a string or a list of text parts.
fn parse_message(index: usize, value: Value) -> Result<Message, ApiError> {
    let path = format!("messages[{index}]");
    let Value::Object(members) = value else {
        return Err(ApiError::invalid(path.clone(), format!("'{path}' must be an object")));
    };
    let mut fields = Fields::from_object(&path, members);
    let missing =
        |name: &str| ApiError::invalid(format!("{path}.{name}"), format!("'{path}.{name}' is missing"));
    let role = fields.take_string("role")?.filter(|role| !role.is_empty()).ok_or_else(|| missing("role"))?;
    let content = match fields.take("content") {
        Some(Value::String(text)) => Content::Text(text),
        Some(Value::Array(parts)) => Content::Parts(
            parts
                .into_iter()
                .enumerate()
                .map(|(part, value)| parse_text_part(&format!("{path}.content[{part}]"), value))
                .collect::<Result<_, _>>()?,
        ),
        Some(other) => {
            let path = format!("{path}.content");
            let message = format!("'{path}' must be a string or a list of parts, not {}", describe(&other));
            return Err(ApiError::invalid(path, message));
        }
        None if role == "assistant" => Content::Text(String::new()),
        None => return Err(missing("content")),
    };
    let name = fields.take_string("name")?;
    fields.reject_unknown(&[UNSUPPORTED_IN_MESSAGES])?;
    let extra = name.map(|name| ("name".to_owned(), name.into())).into_iter().collect();
    Ok(Message { role, content: Some(content), extra })
}

/// Parses a part of a message's content, which must be text.
fn parse_text_part(path: &str, value: Value) -> Result<String, ApiError> {
    let Value::Object(members) = value else {
        return Err(ApiError::invalid(path, format!("'{path}' must be an object")));
    };
    let mut fields = Fields::from_object(path, members);
    match fields.take_string("type")?.as_deref() {
        Some("text") => {}
        other => {
            let path = fields.path("type");
            let found = other.map_or("missing".to_owned(), |found| format!("\"{found}\""));
            let message = format!("'{path}' is {found}: only parts of type \"text\" are supported");
            return Err(ApiError::unsupported(path, message));
        }
    }
    let text = fields.take_string("text")?;
    let path = fields.path("text");
    fields.reject_unknown(&[])?;
    text.ok_or_else(|| ApiError::invalid(path.clone(), format!("'{path}' is missing")))
}
