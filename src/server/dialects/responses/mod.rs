//! OpenAI's Responses API: `POST /v1/responses`, and the responses that are kept.
//!
//! Invariant: a response is kept before its client knows that it is complete, and only its owner can refer
//! to it.

mod items;

mod request;

mod output;

pub mod stored;

use super::dialect::{Caller, Dialect, DialectContext, Inner};
use super::frames::{Frames, Framing};
use super::handler::off_loop;
use crate::server::access::RequestId;
use crate::server::batches::responses::NewResponse;
use crate::server::body::{INLINE_BYTES, parsing_memory};
use crate::server::error::{ApiError, ErrorParts};
use crate::server::fields::Fields;
use output::Output;
use request::{Parsed, parse_response};
use serde_json::{Map, Value, json};

/// A request of the Responses API.
pub struct Responses {
    id: String,
    created: u64,
    model: String,
    /// Fields of the response that repeat the request.
    repeated: Map<String, Value>,
    instructions: Option<Value>,
    previous: Option<String>,
    /// The input, as it is kept; `None` if it is not.
    input: Option<Vec<Value>>,
    /// The messages of the conversation as a JSON list, if they are kept.
    messages: Option<String>,
    output: Output,
    usage: Value,
    finish: Value,
    /// Whether the stream has begun.
    has_begun: bool,
}

impl Dialect for Responses {
    const FRAMING: Framing = Framing::Sse { named: true };

    fn open(fields: Fields, context: &DialectContext<'_>) -> Result<(Responses, Inner), ApiError> {
        let Parsed { body, repeated, instructions, previous, input, is_kept } =
            parse_response(fields, context.keeps_responses)?;
        let name = RequestId::generate().0;
        let responses = Responses {
            id: format!("resp_{name}"),
            created: context.created,
            model: context.parts.model.name.clone(),
            repeated,
            instructions,
            previous,
            input: is_kept.then_some(input),
            messages: None,
            output: Output::new(&name),
            usage: Value::Null,
            finish: Value::Null,
            has_begun: false,
        };
        Ok((responses, Inner { path: "/v1/chat/completions", body }))
    }

    async fn prepare(&mut self, inner: &mut Inner, caller: &Caller) -> Result<(), ApiError> {
        caller.held.grow(caller.body_bytes.saturating_mul(REQUEST_COPIES))?;
        let prior = self.prior_conversation(caller).await?;
        let is_kept = self.input.is_some();
        let own = inner.body["messages"].take();
        let instructions = self.instructions.clone();
        let is_long = prior.len() + caller.body_bytes > INLINE_BYTES;
        let join = move || {
            let mut messages: Vec<Value> = serde_json::from_str(&prior).map_err(|error| {
                ApiError::internal(format!("a kept conversation is no list of messages: {error}"))
            })?;
            if let Value::Array(own) = own {
                messages.extend(own);
            }
            let kept = is_kept.then(|| list(&messages));
            let first = instructions.map(|text| json!({"role": "system", "content": text}));
            Ok::<_, ApiError>((kept, items::merge_system(first.into_iter().chain(messages))))
        };
        let (kept, messages) = off_loop(is_long, join).await??;
        // An answer that cannot be kept is not computed.
        kept.iter().try_for_each(|kept| caller.service.check_response_bytes(kept.len()))?;
        self.messages = kept;
        inner.body["messages"] = messages.into();
        Ok(())
    }

    fn response(&mut self, mut inner: Value) -> Value {
        self.usage = inner["usage"].take();
        let mut choice = inner["choices"][0].take();
        let calls = choice["message"]["tool_calls"].as_array_mut();
        for (index, call) in calls.into_iter().flatten().enumerate() {
            call["index"] = index.into();
        }
        let mut unseen = Frames::new(Self::FRAMING);
        self.output.push(&choice["message"], &mut unseen);
        self.finish = choice["finish_reason"].take();
        self.output.close(self.status(), &mut unseen);
        self.object(self.status())
    }

    fn chunk(&mut self, mut inner: Value, out: &mut Frames) {
        if let Some(usage) = inner.get_mut("usage").filter(|usage| !usage.is_null()) {
            self.usage = usage.take();
        }
        self.begin(out);
        let Some(choice) = inner["choices"].get_mut(0) else { return };
        self.output.push(&choice["delta"], out);
        if !choice["finish_reason"].is_null() {
            self.finish = choice["finish_reason"].take();
            self.output.close(self.status(), out);
        }
    }

    async fn keep(&mut self, caller: &Caller) -> Result<(), ApiError> {
        let (Some(input), Some(messages)) = (self.input.take(), self.messages.take()) else { return Ok(()) };
        let (id, object, answer) = (self.id.clone(), self.object(self.status()), self.output.messages());
        let is_long = messages.len() + caller.body_bytes > INLINE_BYTES;
        let write = move || NewResponse {
            id,
            object: object.to_string(),
            input: list(&input),
            messages: with_answer(messages, answer),
        };
        let response = off_loop(is_long, write).await?;
        caller.service.keep_response(&caller.owner, response).await
    }

    fn end(&mut self, out: &mut Frames) {
        self.begin(out);
        let status = self.status();
        let response = self.object(status);
        self.output.event(&format!("response.{status}"), json!({"response": response}), out);
    }

    fn error(error: ErrorParts<'_>) -> Value {
        let ErrorParts { kind, code, param, message } = error;
        json!({"error": {"message": message, "type": kind, "param": param, "code": code}})
    }

    fn fail(&mut self, error: ErrorParts<'_>, out: &mut Frames) {
        self.begin(out);
        let mut response = self.object("failed");
        response["error"] = json!({"code": error.code, "message": error.message});
        self.output.event("response.failed", json!({"response": response}), out);
    }

    fn rename(error: ApiError) -> ApiError {
        let names = [
            ("max_completion_tokens", "max_output_tokens"),
            ("].function.", "]."),
            ("tool_choice.function.", "tool_choice."),
            ("response_format", "text.format"),
            ("'messages'", "'input'"),
        ];
        let renamed = names.into_iter().fold(error, |error, (from, to)| error.replace_in_names(from, to));
        renamed.rename_param("messages", "input")
    }
}

/// Number of times that a request is in memory, beside what is counted for its body: the fields that events
/// repeat, as values and written twice, and the conversation as it is kept.
const REQUEST_COPIES: usize = 4;

impl Responses {
    /// Returns the conversation of the response that the request goes on from, as a JSON list. Fails before
    /// it is read if it is too long, or if there is no memory for it.
    async fn prior_conversation(&self, caller: &Caller) -> Result<String, ApiError> {
        let Some(id) = &self.previous else { return Ok("[]".to_owned()) };
        let bytes = caller.service.conversation_bytes(&caller.owner, id).await?;
        if bytes.saturating_add(caller.body_bytes) > caller.native_bytes_max {
            return Err(ApiError::conversation_too_long(bytes, caller.native_bytes_max));
        }
        // As it is read, and as it is kept again.
        caller.held.grow(bytes.saturating_mul(2))?;
        let prior = caller.service.conversation(&caller.owner, id).await?;
        caller.held.grow(parsing_memory(prior.as_bytes()))?;
        Ok(prior)
    }

    /// Appends the first events of a stream, if they have not been written.
    fn begin(&mut self, out: &mut Frames) {
        if !self.has_begun {
            self.has_begun = true;
            let response = self.object("in_progress");
            self.output.event("response.created", json!({"response": response}), out);
            self.output.event("response.in_progress", json!({"response": response}), out);
        }
    }

    /// Returns the status of a response that is complete.
    fn status(&self) -> &'static str {
        if self.finish == "length" { "incomplete" } else { "completed" }
    }

    /// Returns the response object with a status.
    fn object(&self, status: &str) -> Value {
        let incomplete = (status == "incomplete").then(|| json!({"reason": "max_output_tokens"}));
        let is_over = matches!(status, "completed" | "incomplete");
        let mut object = json!({
            "id": self.id, "object": "response", "created_at": self.created, "status": status,
            "background": false, "error": null, "incomplete_details": incomplete,
            "instructions": self.instructions, "model": self.model, "output": self.output.items(),
            "previous_response_id": self.previous, "usage": is_over.then(|| usage(&self.usage)),
        });
        let fields = object.as_object_mut();
        fields.into_iter().for_each(|fields| fields.extend(self.repeated.clone()));
        object
    }
}

/// Returns a JSON list of messages with the answer at its end.
fn with_answer(mut messages: String, answer: Vec<Value>) -> String {
    messages.truncate(messages.len().saturating_sub(1));
    for message in answer {
        let separator = if messages == "[" { "" } else { "," };
        messages = messages + separator + &message.to_string();
    }
    messages + "]"
}

/// Returns a JSON list.
fn list(values: &[Value]) -> String {
    let values: Vec<String> = values.iter().map(Value::to_string).collect();
    format!("[{}]", values.join(","))
}

/// Returns the token counts of an answer.
fn usage(usage: &Value) -> Value {
    let count = |value: &Value| value.as_u64().unwrap_or(0);
    json!({
        "input_tokens": count(&usage["prompt_tokens"]),
        "input_tokens_details": {"cached_tokens": count(&usage["prompt_tokens_details"]["cached_tokens"])},
        "output_tokens": count(&usage["completion_tokens"]),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": count(&usage["total_tokens"]),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: of calls and texts that alternate, only the last part was kept.
    #[test]
    fn all_parts_of_an_answer_are_kept() {
        let (mut output, mut out) = (Output::new("x"), Frames::new(Responses::FRAMING));
        let call = json!({"index": 0, "id": "c", "function": {"name": "f", "arguments": "{}"}});
        for delta in [json!({"content": "a"}), json!({"tool_calls": [call]}), json!({"content": "b"})] {
            output.push(&delta, &mut out);
        }
        output.close("completed", &mut out);
        let question = json!({"role": "user", "content": "q"});
        let kept = with_answer(json!([question]).to_string(), output.messages());
        let kept: Value = serde_json::from_str(&kept).unwrap();
        let text = kept.to_string();
        assert_eq!(kept[0], question);
        assert!(["\"a\"", "\"f\"", "\"b\""].iter().all(|part| text.contains(part)), "{text}");
        assert_eq!(with_answer("[]".into(), vec![question]), r#"[{"role":"user","content":"q"}]"#.to_owned());
    }
}
