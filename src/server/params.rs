//! The body of a completions request, parameter by parameter.
//!
//! Invariant: no parameter is passed over in silence. What the server does not do is refused by name, unless
//! its value asks for nothing.

use super::access::random;
use super::error::ApiError;
use crate::actors::engine::TOP_LOGPROBS;
use crate::actors::reply::Echo;
use crate::request::Sampling;
use serde_json::{Map, Value};

/// The OpenAI API's own limit when none is given.
const MAX_TOKENS: u32 = 16;

/// Most likely tokens that can be asked for beside each token.
const LOGPROBS_MAX: i64 = TOP_LOGPROBS as i64;

/// What a client wants, with the API's defaults filled in. Ranges are intake's to check.
#[derive(Clone, Debug, PartialEq)]
pub struct CompletionParams {
    pub model: Option<String>,
    pub prompt: Prompt,
    pub max_tokens: u32,
    pub sampling: Sampling,
    pub logprobs: Option<u8>,
    pub echo: Echo,
    pub ignore_eos: bool,
    pub return_token_ids: bool,
    pub delivery: Delivery,
}

/// The prompt as given.
#[derive(Clone, Debug, PartialEq)]
pub enum Prompt {
    Text(String),
    /// Each below the vocabulary's size.
    Ids(Vec<u32>),
}

/// How the answer comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    Whole,
    Stream {
        /// A last chunk tells the usage.
        usage: bool,
    },
}

/// The value of a parameter that asks for nothing.
enum Neutral {
    Number(f64),
    Bool(bool),
    Text(&'static str),
    /// An empty text, list or object.
    Empty,
    /// There is none but null.
    Nothing,
}

/// Parameters of the API, or of the servers whose clients we meet, that are not served.
const UNSUPPORTED: &[(&str, Neutral)] = &[
    ("n", Neutral::Number(1.0)),
    ("best_of", Neutral::Number(1.0)),
    ("stop", Neutral::Empty),
    ("suffix", Neutral::Empty),
    ("presence_penalty", Neutral::Number(0.0)),
    ("frequency_penalty", Neutral::Number(0.0)),
    ("repetition_penalty", Neutral::Number(1.0)),
    ("length_penalty", Neutral::Number(1.0)),
    ("logit_bias", Neutral::Empty),
    ("min_tokens", Neutral::Number(0.0)),
    ("stop_token_ids", Neutral::Empty),
    ("include_stop_str_in_output", Neutral::Bool(false)),
    ("skip_special_tokens", Neutral::Bool(true)),
    ("spaces_between_special_tokens", Neutral::Bool(true)),
    ("add_special_tokens", Neutral::Bool(true)),
    ("truncate_prompt_tokens", Neutral::Nothing),
    ("prompt_logprobs", Neutral::Nothing),
    ("allowed_token_ids", Neutral::Nothing),
    ("bad_words", Neutral::Empty),
    ("use_beam_search", Neutral::Bool(false)),
    ("structured_outputs", Neutral::Nothing),
    ("response_format", Neutral::Nothing),
    ("priority", Neutral::Number(0.0)),
    ("service_tier", Neutral::Text("auto")),
];

impl CompletionParams {
    /// Reads a body. `vocab` is the number of token ids there are.
    pub fn parse(body: &[u8], vocab: usize) -> Result<CompletionParams, ApiError> {
        let value: Value = serde_json::from_slice(body)
            .map_err(|error| ApiError::malformed(format!("the body is no JSON: {error}")))?;
        let Value::Object(fields) = value else {
            return Err(ApiError::malformed("the body is no JSON object"));
        };
        let mut fields = Fields(fields);
        let echo = if fields.flag("echo")? { Echo::Prompt } else { Echo::Nothing };
        let params = CompletionParams {
            model: fields.text("model")?,
            prompt: prompt(fields.0.remove("prompt").unwrap_or(Value::Null), vocab)?,
            max_tokens: fields.integer("max_tokens", 0, u32::MAX.into())?.map_or(MAX_TOKENS, |n| n as u32),
            sampling: sampling(&mut fields)?,
            logprobs: fields.integer("logprobs", 0, LOGPROBS_MAX)?.map(|n| n as u8),
            echo,
            ignore_eos: fields.flag("ignore_eos")?,
            return_token_ids: fields.flag("return_token_ids")?,
            delivery: delivery(&mut fields)?,
        };
        // A name for the client's own bookkeeping.
        fields.text("user")?;
        fields.refuse_others()?;
        if params.max_tokens == 0 && echo == Echo::Nothing {
            return Err(ApiError::invalid("max_tokens", "max_tokens can be 0 only together with echo"));
        }
        Ok(params)
    }
}

/// A body's members that have not been read yet.
struct Fields(Map<String, Value>);

impl Fields {
    /// Takes a member out; null is as good as absent.
    fn take(&mut self, name: &str) -> Option<Value> {
        self.0.remove(name).filter(|value| !value.is_null())
    }

    fn read<T>(
        &mut self,
        name: &str,
        wanted: &str,
        read: impl Fn(&Value) -> Option<T>,
    ) -> Result<Option<T>, ApiError> {
        let Some(value) = self.take(name) else { return Ok(None) };
        match read(&value) {
            Some(read) => Ok(Some(read)),
            None => Err(ApiError::invalid(name, format!("'{name}' must be {wanted}, not {}", brief(&value)))),
        }
    }

    fn flag(&mut self, name: &str) -> Result<bool, ApiError> {
        Ok(self.read(name, "true or false", Value::as_bool)?.unwrap_or(false))
    }

    fn text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        self.read(name, "a text", |value| value.as_str().map(str::to_string))
    }

    fn number(&mut self, name: &str) -> Result<Option<f32>, ApiError> {
        self.read(name, "a number", |value| value.as_f64().map(nearest))
    }

    fn integer(&mut self, name: &str, min: i64, max: i64) -> Result<Option<i64>, ApiError> {
        let wanted = format!("a whole number from {min} to {max}");
        self.read(name, &wanted, |value| value.as_i64().filter(|number| (min..=max).contains(number)))
    }

    /// Refuses what is left, by name.
    fn refuse_others(&self) -> Result<(), ApiError> {
        for (name, value) in self.0.iter().filter(|(_, value)| !value.is_null()) {
            match UNSUPPORTED.iter().find(|(known, _)| known == name) {
                Some((_, neutral)) if neutral.is(value) => {}
                Some(_) => {
                    let message = format!("'{name}' is not supported yet with the value {}", brief(value));
                    return Err(ApiError::unsupported(name, message));
                }
                None => {
                    return Err(ApiError::unsupported(name, format!("there is no parameter '{name}'")));
                }
            }
        }
        Ok(())
    }
}

impl Neutral {
    fn is(&self, value: &Value) -> bool {
        match self {
            Neutral::Number(number) => value.as_f64() == Some(*number),
            Neutral::Bool(flag) => value.as_bool() == Some(*flag),
            Neutral::Text(text) => value.as_str() == Some(text),
            Neutral::Empty => match value {
                Value::String(text) => text.is_empty(),
                Value::Array(list) => list.is_empty(),
                Value::Object(map) => map.is_empty(),
                _ => false,
            },
            Neutral::Nothing => false,
        }
    }
}

/// The nearest finite number of single precision that is zero only for zero.
fn nearest(number: f64) -> f32 {
    let rounded = number as f32;
    let limits = f32::MIN_POSITIVE..=f32::MAX;
    if number == 0.0 || limits.contains(&rounded.abs()) {
        return rounded;
    }
    rounded.abs().clamp(*limits.start(), *limits.end()).copysign(rounded)
}

fn sampling(fields: &mut Fields) -> Result<Sampling, ApiError> {
    let top_k = fields.integer("top_k", -1, u32::MAX.into())?.unwrap_or(0);
    let seed = fields.read("seed", "a whole number of 64 bits", |value| {
        value.as_u64().or_else(|| value.as_i64().map(|seed| seed as u64))
    })?;
    Ok(Sampling {
        temperature: fields.number("temperature")?.unwrap_or(1.0),
        // -1 is another way to say all.
        top_k: top_k.max(0) as u32,
        top_p: fields.number("top_p")?.unwrap_or(1.0),
        min_p: fields.number("min_p")?.unwrap_or(0.0),
        seed: seed.unwrap_or_else(random),
    })
}

fn delivery(fields: &mut Fields) -> Result<Delivery, ApiError> {
    let stream = fields.flag("stream")?;
    let options = fields.read("stream_options", "an object", |value| value.as_object().cloned())?;
    let Some(options) = options else {
        return Ok(if stream { Delivery::Stream { usage: false } } else { Delivery::Whole });
    };
    if !stream {
        return Err(ApiError::invalid("stream_options", "'stream_options' needs 'stream' to be true"));
    }
    let mut usage = false;
    for (name, value) in &options {
        match (name.as_str(), value) {
            ("include_usage", Value::Bool(wanted)) => usage = *wanted,
            ("continuous_usage_stats" | "include_obfuscation", Value::Bool(false)) | (_, Value::Null) => {}
            _ => {
                let param = format!("stream_options.{name}");
                let message = format!("'{param}' cannot be {}", brief(value));
                return Err(ApiError::unsupported(param, message));
            }
        }
    }
    Ok(Delivery::Stream { usage })
}

/// A text, a list of ids, or a list with one of either.
fn prompt(value: Value, vocab: usize) -> Result<Prompt, ApiError> {
    match value {
        Value::Null => Err(bad_prompt("'prompt' is missing")),
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(list) => match list.first() {
            Some(Value::String(_) | Value::Array(_)) if list.len() > 1 => Err(bad_prompt(format!(
                "several prompts in one request are not supported yet: 'prompt' has {}",
                list.len()
            ))),
            Some(Value::String(text)) => Ok(Prompt::Text(text.clone())),
            Some(Value::Array(inner)) => ids(inner, vocab),
            _ => ids(&list, vocab),
        },
        other => {
            Err(bad_prompt(format!("'prompt' must be a text or a list of token ids, not {}", brief(&other))))
        }
    }
}

fn ids(list: &[Value], vocab: usize) -> Result<Prompt, ApiError> {
    let id = |value: &Value| match value.as_u64() {
        Some(id) if id < vocab as u64 => Ok(id as u32),
        Some(id) => Err(bad_prompt(format!("token id {id} is not in the vocabulary of {vocab}"))),
        None => Err(bad_prompt(format!("'prompt' has {} where a token id should be", brief(value)))),
    };
    list.iter().map(id).collect::<Result<_, _>>().map(Prompt::Ids)
}

fn bad_prompt(message: impl Into<String>) -> ApiError {
    ApiError::invalid("prompt", message)
}

/// A value as it may stand in a message.
fn brief(value: &Value) -> String {
    const CHARS_MAX: usize = 40;
    match value {
        Value::Array(_) => "a list".to_string(),
        Value::Object(_) => "an object".to_string(),
        Value::String(text) if text.chars().count() > CHARS_MAX => "a long text".to_string(),
        value => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::nearest;

    #[test]
    fn numbers_beyond_single_precision_stay_what_they_are_to_the_checks() {
        assert_eq!((nearest(0.0), nearest(0.9), nearest(-2.5)), (0.0, 0.9, -2.5));
        assert_eq!((nearest(1e-50), nearest(-1e-50)), (f32::MIN_POSITIVE, -f32::MIN_POSITIVE));
        assert_eq!((nearest(1e39), nearest(-1e300)), (f32::MAX, -f32::MAX));
    }
}
