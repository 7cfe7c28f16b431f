//! Inferflow's API: `POST /` with a text, whose answer is JSON, or a stream of JSON objects that empty lines
//! end.
//!
//! Invariant: the texts of a stream together are the text of the whole answer, and its last object, also
//! after an error, is the only one with `is_end`.

use super::dialect::{Dialect, DialectContext, Inner};
use super::frames::{Frames, Framing};
use super::native_body::NativeBody;
use crate::server::error::{ApiError, ErrorParts};
use crate::server::fields::{Fields, NoOpValue, UnsupportedParams};
use serde_json::{Value, json};
use std::time::Instant;

/// Maximum length of an answer, in tokens, where a request has none and the context has room for it.
const OUTPUT_LEN: usize = 1024;

/// Room in the context for what a chat template adds to a prompt, in tokens.
const TEMPLATE_TOKENS: usize = 256;

/// Parameters that are known and not supported.
const UNSUPPORTED: UnsupportedParams =
    &[("encoder_input_template", NoOpValue::Empty), ("decoder_input_template", NoOpValue::Empty)];

/// A request of the API.
pub struct Query {
    began: Instant,
    /// Time of the last object of a stream.
    last: Instant,
}

impl Dialect for Query {
    const FRAMING: Framing = Framing::Blocks;

    fn open(mut fields: Fields, context: &DialectContext<'_>) -> Result<(Query, Inner), ApiError> {
        check_function(&mut fields)?;
        let mut body = NativeBody::default();
        let (path, stream) = match fields.get("messages").is_some() {
            true => {
                body.take_same(&mut fields, ["messages", "max_tokens", "temperature", "seed"]);
                ("/v1/chat/completions", fields.take_bool("stream", false)?)
            }
            false => (parse_text(&mut fields, &mut body, context)?, parse_streaming(&mut fields)?),
        };
        fields.finish(&[UNSUPPORTED])?;
        if stream {
            body.set("stream", true);
        }
        let began = Instant::now();
        Ok((Query { began, last: began }, Inner { path, body: body.into_value() }))
    }

    fn response(&mut self, inner: Value) -> Value {
        let choice = &inner["choices"][0];
        json!({"text": text_of(choice, "message"), "ret_code": "succ", "time_cost": seconds(self.began)})
    }

    fn chunk(&mut self, inner: Value, out: &mut Frames) {
        let text = inner["choices"].get(0).map_or("", |choice| text_of(choice, "delta"));
        if !text.is_empty() {
            out.push("", &json!({"text": text, "time_cost": seconds(self.last)}));
            self.last = Instant::now();
        }
    }

    fn end(&mut self, out: &mut Frames) {
        let time = seconds(self.last);
        out.push("", &json!({"text": "", "ret_code": "succ", "time_cost": time, "is_end": 1}));
    }

    fn error(error: ErrorParts<'_>) -> Value {
        json!({
            "text": "", "ret_code": ret_code(error), "error_text": error.message, "time_cost": 0.0,
            "is_end": 1,
        })
    }

    fn rename(error: ApiError) -> ApiError {
        error.replace_in_names("n_predict", "max_output_len").rename_param("seed", "random_seed")
    }
}

/// Returns the code of an error in Inferflow's API.
fn ret_code(error: ErrorParts<'_>) -> &'static str {
    match (error.kind, error.code) {
        (_, "empty_value") => "error.empty_request",
        (_, "context_length_exceeded" | "kv_cache_exceeded" | "body_too_large") => "error.too_long_request",
        ("rate_limit_error" | "service_unavailable_error", _) => "error.busy",
        ("server_error", _) => "error.processing",
        _ => "error.invalid_request_format",
    }
}

/// Checks that a request asks for an answer, as all do that have no other function in their header.
fn check_function(fields: &mut Fields) -> Result<(), ApiError> {
    let Some(members) = fields.take_object("header")? else { return Ok(()) };
    let mut header = fields.nested("header", members);
    let function = header.take_string("fn")?.unwrap_or_default();
    header.finish(&[])?;
    match function.as_str() {
        "" | "process_query" => Ok(()),
        _ => Err(ApiError::unsupported("header.fn", "'header.fn' can only be \"process_query\"")),
    }
}

/// Parses a request with a text. Returns the path of the native request.
fn parse_text(
    fields: &mut Fields,
    body: &mut NativeBody,
    context: &DialectContext<'_>,
) -> Result<&'static str, ApiError> {
    let mut text = |name: &str| fields.take_string(name).map(Option::unwrap_or_default);
    let (system, query, prefix) = (text("system_prompt")?, text("text")?, text("res_prefix")?);
    if query.is_empty() {
        return Err(ApiError::empty("text", "'text' is missing or empty"));
    }
    let bytes = system.len() + query.len() + prefix.len();
    let fits = bytes + TEMPLATE_TOKENS + OUTPUT_LEN <= context.parts.model.max_sequence_tokens;
    let is_given = body.take_as(fields, "max_output_len", "n_predict");
    // The other name is an alias, which comes last in Inferflow.
    if !body.take_as(fields, "max_new_tokens", "n_predict") && !is_given {
        body.set("n_predict", if fits { json!(OUTPUT_LEN) } else { json!(-1) });
    }
    body.take_as(fields, "random_seed", "seed");
    body.remove_if("seed", &json!(0));
    if !body.take_as(fields, "temperature", "temperature") {
        body.set("temperature", 1);
    }
    parse_algorithm(fields, body)?;
    if context.parts.model.chat_template.is_none() {
        if !system.is_empty() {
            let message = "'system_prompt' needs a model with a chat template";
            return Err(ApiError::unsupported("system_prompt", message));
        }
        body.set("prompt", query + &prefix);
        return Ok("/v1/completions");
    }
    let roles = [("system", system), ("user", query), ("assistant", prefix)];
    let is_continued = !roles[2].1.is_empty();
    let messages = roles.into_iter().filter(|(_, text)| !text.is_empty());
    body.set(
        "messages",
        messages.map(|(role, text)| json!({"role": role, "content": text})).collect::<Value>(),
    );
    if is_continued {
        body.set("continue_final_message", true);
        body.set("add_generation_prompt", false);
    }
    Ok("/v1/chat/completions")
}

/// Parses the decoding strategy: its name, or an object with the name and its parameters, which may be
/// written as a text.
fn parse_algorithm(fields: &mut Fields, body: &mut NativeBody) -> Result<(), ApiError> {
    const NAME: &str = "decoding_alg";
    let object = match fields.take(NAME) {
        None => return Ok(()),
        Some(Value::String(text)) if text.is_empty() || text == "auto" => return Ok(()),
        Some(Value::String(text)) => match serde_json::from_str(&text) {
            Ok(Value::Object(object)) => object,
            _ => {
                body.set("strategy", text);
                return Ok(());
            }
        },
        Some(Value::Object(object)) => object,
        Some(_) => {
            let message = "'decoding_alg' must be the name of a strategy, or an object with it as 'name'";
            return Err(ApiError::invalid(NAME, message));
        }
    };
    let mut params = object;
    let name = params.shift_remove("name").filter(Value::is_string);
    body.set("strategy", name.ok_or_else(|| ApiError::invalid(NAME, "'decoding_alg' has no 'name'"))?);
    if !params.is_empty() {
        body.set("strategy_params", params);
    }
    Ok(())
}

/// Parses whether the answer is a stream: a number or a boolean, by default true.
fn parse_streaming(fields: &mut Fields) -> Result<bool, ApiError> {
    let read = |value: &Value| value.as_bool().or_else(|| value.as_f64().map(|number| number != 0.0));
    Ok(fields.take_with("is_streaming_mode", "true, false or a number", read)?.unwrap_or(true))
}

/// Returns the text of a choice of either native API.
fn text_of<'a>(choice: &'a Value, message: &str) -> &'a str {
    choice["text"].as_str().or_else(|| choice[message]["content"].as_str()).unwrap_or_default()
}

fn seconds(since: Instant) -> f64 {
    since.elapsed().as_millis() as f64 / 1000.0
}
