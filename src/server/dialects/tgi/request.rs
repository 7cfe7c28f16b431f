//! Bodies of TGI's requests, translated to those of the completions API.

use crate::actors::engine::TOP_LOGPROBS;
use crate::server::access::random;
use crate::server::dialects::native_body::{NativeBody, missing};
use crate::server::error::ApiError;
use crate::server::fields::{Fields, NoOpValue, UnsupportedParams};
use serde_json::Value;

/// Default of `max_new_tokens`.
const MAX_NEW_TOKENS: i64 = 100;

/// Maximum of `best_of`.
pub const BEST_OF_MAX: i64 = 128;

/// Parameters that are known and not supported.
const UNSUPPORTED: UnsupportedParams =
    &[("watermark", NoOpValue::Bool(false)), ("adapter_id", NoOpValue::OnlyNull)];

/// Parameters that need a draw, with the values that do not.
const NEUTRAL: [(&str, f64); 4] = [("temperature", 1.0), ("top_k", 0.0), ("top_p", 1.0), ("typical_p", 1.0)];

/// Settings of a request that the response depends on.
pub struct Settings {
    pub details: bool,
    pub prefill: bool,
    /// The prompt, if the generated text is to begin with it.
    pub prefix: String,
    pub limit: u64,
    /// Number of most likely tokens to list for each token.
    pub top_n: usize,
    /// Seed of the first sequence, if its tokens are sampled.
    pub seed: Option<u64>,
}

/// Parses a request, whose answer is a stream if `stream` is set. Returns the native body with the settings.
pub fn parse(mut fields: Fields, stream: bool) -> Result<(Settings, Value), ApiError> {
    let inputs = fields.take_string("inputs")?.ok_or_else(|| missing("inputs"))?;
    let members = fields.take_object("parameters")?.unwrap_or_default();
    let mut body = NativeBody::default();
    body.take_same(&mut fields, ["add_special_tokens"]);
    let mut params = fields.nested("parameters", members);
    fields.finish(&[])?;
    let best_of = parse_best_of(&mut params, stream)?;
    let limit = params.take_integer("max_new_tokens", 1, u32::MAX.into())?.unwrap_or(MAX_NEW_TOKENS);
    let top_n = params.take_integer("top_n_tokens", 0, TOP_LOGPROBS as i64)?.unwrap_or(0) as usize;
    let prefill = params.take_bool("decoder_input_details", false)?;
    if prefill && stream {
        let (name, message) =
            ("decoder_input_details", "'decoder_input_details' is not available in a stream");
        return Err(ApiError::invalid(name, message));
    }
    let details = params.take_bool("details", false)? || prefill;
    let keeps_prompt = params.take_bool("return_full_text", false)?;
    let seed = parse_sampling(&mut params, &mut body, best_of)?;
    parse_grammar(&mut params, &mut body)?;
    body.take_same(&mut params, ["stop", "repetition_penalty", "frequency_penalty"]);
    body.take_as(&mut params, "truncate", "truncate_prompt_tokens");
    params.finish(&[UNSUPPORTED])?;
    let prefix = if keeps_prompt { inputs.clone() } else { String::new() };
    body.set("prompt", inputs);
    body.set("max_new_tokens", limit);
    body.set("n", best_of);
    // TGI's text ends with the stop string.
    body.set("include_stop_str_in_output", true);
    if details || stream || best_of > 1 {
        body.set("logprobs", top_n);
        body.set("return_tokens_as_token_ids", true);
    }
    if prefill {
        body.set("prompt_logprobs", 0);
        body.set("return_token_ids", true);
    }
    if stream {
        body.stream();
    }
    let settings = Settings { details, prefill, prefix, limit: limit as u64, top_n, seed };
    Ok((settings, body.into_value()))
}

/// Parses `best_of`, the number of sequences of which the most likely one is the answer.
fn parse_best_of(params: &mut Fields, stream: bool) -> Result<i64, ApiError> {
    let best_of = params.take_integer("best_of", 1, BEST_OF_MAX)?.unwrap_or(1);
    if best_of > 1 && stream {
        return Err(ApiError::invalid("best_of", "'best_of' must be 1 in a stream"));
    }
    Ok(best_of)
}

/// Parses how tokens are chosen: by default, and without a parameter that needs a draw, the most likely ones.
/// Returns the seed of a draw.
fn parse_sampling(params: &mut Fields, body: &mut NativeBody, best_of: i64) -> Result<Option<u64>, ApiError> {
    let do_sample = params.take_bool("do_sample", false)?;
    let seed = params.take_with("seed", "an integer of at least 0", Value::as_u64)?;
    let is_drawn = do_sample
        || NEUTRAL.iter().any(|(name, neutral)| {
            params.get(name).is_some_and(|value| !value.is_null() && value.as_f64() != Some(*neutral))
        });
    if best_of > 1 && (!is_drawn || seed.is_some()) {
        let message = "'best_of' above 1 needs sampling ('do_sample') without 'seed'";
        return Err(ApiError::invalid("best_of", message));
    }
    body.take_same(params, NEUTRAL.map(|(name, _)| name));
    if !is_drawn {
        body.set("temperature", 0);
        return Ok(None);
    }
    let seed = seed.unwrap_or_else(random);
    body.set("seed", seed);
    Ok(Some(seed))
}

/// Parses `grammar`, the form of the answer: an object with a type and a value.
fn parse_grammar(params: &mut Fields, body: &mut NativeBody) -> Result<(), ApiError> {
    let Some(members) = params.take_object("grammar")? else { return Ok(()) };
    let mut grammar = params.nested("parameters.grammar", members);
    let kind = grammar.take_string("type")?;
    let value = grammar.take("value");
    grammar.finish(&[])?;
    let value = value.ok_or_else(|| missing("grammar.value"))?;
    match kind.as_deref() {
        Some("json" | "json_object") => body.set("guided_json", value),
        Some("regex") => body.set("guided_regex", value),
        Some("json_schema") => {
            let schema = value.get("schema").ok_or_else(|| missing("grammar.value.schema"))?;
            body.set("guided_json", schema.clone());
        }
        _ => {
            let message = "'grammar.type' must be \"json\", \"regex\" or \"json_schema\"";
            return Err(ApiError::invalid("grammar.type", message));
        }
    }
    Ok(())
}
