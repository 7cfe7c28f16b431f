//! Anthropic's Messages API: `POST /v1/messages` and `POST /v1/messages/count_tokens`.
//!
//! Invariant: thinking is in the answer only if the request enables it.

mod content;

mod request;

mod blocks;

use super::dialect::{Dialect, DialectContext, Inner};
use super::frames::{Frames, Framing};
use crate::server::error::{ApiError, ErrorParts};
use crate::server::fields::Fields;
use blocks::Blocks;
use request::{parse_count, parse_messages};
use serde_json::{Value, json};

/// A request of the Messages API.
pub struct Messages {
    id: String,
    model: String,
    blocks: Blocks,
    /// Whether the stream has begun.
    has_begun: bool,
    usage: Value,
    finish: Value,
}

impl Dialect for Messages {
    const FRAMING: Framing = Framing::Sse { named: true };

    fn open(fields: Fields, context: &DialectContext<'_>) -> Result<(Messages, Inner), ApiError> {
        let body = parse_messages(fields)?;
        let messages = Messages {
            id: format!("msg_{}", context.id),
            model: context.parts.model.name.clone(),
            blocks: Blocks::default(),
            has_begun: false,
            usage: Value::Null,
            finish: Value::Null,
        };
        Ok((messages, Inner { path: "/v1/chat/completions", body }))
    }

    fn response(&mut self, inner: Value) -> Value {
        let choice = &inner["choices"][0];
        let content = blocks::whole(&choice["message"]);
        let has_calls = content.iter().any(|block| block["type"] == "tool_use");
        let (reason, sequence) = stop_reason(choice, has_calls);
        json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": content,
            "stop_reason": reason, "stop_sequence": sequence, "usage": usage(&inner["usage"]),
        })
    }

    fn chunk(&mut self, mut inner: Value, out: &mut Frames) {
        if let Some(usage) = inner.get_mut("usage").filter(|usage| !usage.is_null()) {
            self.usage = usage.take();
        }
        self.begin(out);
        let Some(choice) = inner["choices"].get_mut(0) else { return };
        self.blocks.push(&choice["delta"], out);
        if !choice["finish_reason"].is_null() {
            self.finish = choice.take();
        }
    }

    fn end(&mut self, out: &mut Frames) {
        self.begin(out);
        self.blocks.close(out);
        let (reason, sequence) = stop_reason(&self.finish, self.blocks.has_calls());
        let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
        let usage = usage(&self.usage);
        out.push("message_delta", &json!({"type": "message_delta", "delta": delta, "usage": usage}));
        out.push("message_stop", &json!({"type": "message_stop"}));
    }

    fn heartbeat(&mut self, out: &mut Frames) {
        out.push("ping", &json!({"type": "ping"}));
    }

    fn error(error: ErrorParts<'_>) -> Value {
        let kind = match (error.code, error.kind) {
            ("body_too_large", _) => "request_too_large",
            ("request_timeout", _) => "timeout_error",
            (_, "service_unavailable_error") => "overloaded_error",
            (_, "server_error") => "api_error",
            (_, kind) => kind,
        };
        json!({"type": "error", "error": {"type": kind, "message": error.message}})
    }

    fn rename(error: ApiError) -> ApiError {
        let names = [
            ("].function.parameters", "].input_schema"),
            ("].function.", "]."),
            ("'stop'", "'stop_sequences'"),
            ("'stop[", "'stop_sequences["),
        ];
        let renamed = names.into_iter().fold(error, |error, (from, to)| error.replace_in_names(from, to));
        renamed.rename_param("stop", "stop_sequences")
    }
}

impl Messages {
    /// Appends the event with the message, if it is the first one.
    fn begin(&mut self, out: &mut Frames) {
        if self.has_begun {
            return;
        }
        self.has_begun = true;
        let usage = usage(&self.usage);
        let message = json!({
            "id": self.id, "type": "message", "role": "assistant", "model": self.model, "content": [],
            "stop_reason": null, "stop_sequence": null, "usage": usage,
        });
        out.push("message_start", &json!({"type": "message_start", "message": message}));
    }
}

/// Returns the reason for which an answer ended, and the stop sequence that ended it.
fn stop_reason(choice: &Value, has_calls: bool) -> (&'static str, Option<&str>) {
    let sequence = choice["stop_reason"].as_str();
    match (choice["finish_reason"].as_str(), sequence) {
        (Some("length"), _) => ("max_tokens", None),
        (_, Some(sequence)) => ("stop_sequence", Some(sequence)),
        _ if has_calls => ("tool_use", None),
        _ => ("end_turn", None),
    }
}

/// Returns the token counts of an answer. What was in the prefix cache is not part of the input.
fn usage(usage: &Value) -> Value {
    let count = |value: &Value| value.as_u64().unwrap_or(0);
    let cached = count(&usage["prompt_tokens_details"]["cached_tokens"]);
    json!({
        "input_tokens": count(&usage["prompt_tokens"]).saturating_sub(cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": count(&usage["completion_tokens"]),
    })
}

/// A request to count the tokens of a prompt.
pub struct CountTokens;

impl Dialect for CountTokens {
    const FRAMING: Framing = Framing::Sse { named: true };

    fn open(fields: Fields, _: &DialectContext<'_>) -> Result<(CountTokens, Inner), ApiError> {
        Ok((CountTokens, Inner { path: "/v1/tokenize", body: parse_count(fields)? }))
    }

    fn response(&mut self, inner: Value) -> Value {
        json!({"input_tokens": inner["count"]})
    }

    fn chunk(&mut self, _: Value, _: &mut Frames) {}

    fn end(&mut self, _: &mut Frames) {}

    fn error(error: ErrorParts<'_>) -> Value {
        Messages::error(error)
    }

    fn rename(error: ApiError) -> ApiError {
        Messages::rename(error)
    }
}
