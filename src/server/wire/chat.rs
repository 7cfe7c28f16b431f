//! Choices of chat completions: a message, or a chunk's delta to it, and log-probabilities per token.
//!
//! Invariant: the concatenated deltas of a stream are the message, except for a malformed tool call, whose
//! beginning may have been sent.

use super::{ChoiceOutput, Finish, TokenIds, TokenNames, finite_logprob};
use crate::text::output::OutputEvent;
use serde::Serialize;
use utoipa::ToSchema;

const ASSISTANT: &str = "assistant";

/// A choice of a JSON response.
#[derive(Debug, Serialize, ToSchema)]
pub struct ChatChoice {
    pub index: usize,
    pub message: ResponseMessage,
    pub logprobs: Option<ChatLogprobs>,
    #[serde(flatten)]
    pub finish: Finish,
    #[serde(flatten)]
    pub ids: TokenIds,
}

/// A choice of a stream's chunk.
#[derive(Debug, Serialize)]
pub struct ChatChunkChoice {
    pub index: usize,
    pub delta: ChatDelta,
    pub logprobs: Option<ChatLogprobs>,
    #[serde(flatten)]
    pub finish: Finish,
    #[serde(flatten)]
    pub ids: TokenIds,
}

/// The generated message.
#[derive(Debug, Serialize, ToSchema)]
pub struct ResponseMessage {
    role: &'static str,
    /// Null if the message has tool calls and no text.
    content: Option<String>,
    refusal: Option<String>,
    #[serde(skip_serializing_if = "String::is_empty")]
    reasoning_content: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall>,
}

/// A tool call, or in a stream a part of one.
#[derive(Debug, Serialize, ToSchema)]
struct ToolCall {
    /// Number of the call in its message; only in a stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    index: Option<usize>,
    /// Only in the first part of a call, as `type` and the name are.
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<String>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    kind: Option<&'static str>,
    function: CalledFunction,
}

/// The function of a tool call.
#[derive(Debug, Serialize, ToSchema)]
struct CalledFunction {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<String>,
    /// JSON text, or a part of it.
    arguments: String,
}

/// The part of the message that a chunk appends.
#[derive(Debug, Default, Serialize)]
pub struct ChatDelta {
    /// Set only in a choice's first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<String>,
    #[serde(skip_serializing_if = "String::is_empty")]
    reasoning_content: String,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    tool_calls: Vec<ToolCall>,
}

/// Log-probabilities of the generated tokens.
#[derive(Debug, Serialize, ToSchema)]
pub struct ChatLogprobs {
    content: Vec<ScoredToken>,
    refusal: Option<String>,
}

/// A generated token with the most likely tokens at its position.
#[derive(Debug, Serialize, ToSchema)]
struct ScoredToken {
    #[serde(flatten)]
    token: TokenLogprob,
    top_logprobs: Vec<TokenLogprob>,
}

/// A token with its log-probability.
#[derive(Debug, Serialize, ToSchema)]
struct TokenLogprob {
    /// Name of the token.
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

/// Parts of an output, sorted by the fields that they belong to.
#[derive(Default)]
struct SortedOutput {
    content: String,
    reasoning: String,
    /// Numbered calls, each once.
    calls: Vec<ToolCall>,
}

impl SortedOutput {
    fn new(events: Vec<OutputEvent>) -> SortedOutput {
        let mut sorted = SortedOutput::default();
        for event in events {
            match event {
                OutputEvent::Content(text) => sorted.content += &text,
                OutputEvent::Reasoning(text) => sorted.reasoning += &text,
                OutputEvent::ToolCallStart { index, id, name } => {
                    let call = sorted.call(index);
                    (call.id, call.kind, call.function.name) = (Some(id), Some("function"), Some(name));
                }
                OutputEvent::ToolCallArguments { index, delta } => {
                    sorted.call(index).function.arguments += &delta;
                }
            }
        }
        sorted
    }

    fn call(&mut self, index: usize) -> &mut ToolCall {
        let at = self.calls.iter().rposition(|call| call.index == Some(index)).unwrap_or_else(|| {
            let function = CalledFunction { name: None, arguments: String::new() };
            self.calls.push(ToolCall { index: Some(index), id: None, kind: None, function });
            self.calls.len() - 1
        });
        &mut self.calls[at]
    }
}

impl ResponseMessage {
    /// Creates a message of the assistant from the parts of the whole output.
    pub fn from_events(events: Vec<OutputEvent>) -> ResponseMessage {
        let SortedOutput { content, reasoning, calls } = SortedOutput::new(events);
        let content = (calls.is_empty() || !content.is_empty()).then_some(content);
        let tool_calls = calls.into_iter().map(|call| ToolCall { index: None, ..call }).collect();
        ResponseMessage { role: ASSISTANT, content, refusal: None, reasoning_content: reasoning, tool_calls }
    }
}

impl ChatDelta {
    /// Returns the first delta of a choice: the role, and empty text.
    pub fn with_role() -> ChatDelta {
        ChatDelta { role: Some(ASSISTANT), content: Some(String::new()), ..ChatDelta::default() }
    }

    /// Returns a delta with the next parts of the output; without content if there is none.
    pub fn from_events(events: Vec<OutputEvent>) -> ChatDelta {
        let SortedOutput { content, reasoning, calls } = SortedOutput::new(events);
        let content = (!content.is_empty()).then_some(content);
        ChatDelta { role: None, content, reasoning_content: reasoning, tool_calls: calls }
    }
}

impl ChatLogprobs {
    /// Builds the log-probabilities of the tokens of `part`.
    pub fn from_output(part: &ChoiceOutput, names: &TokenNames<'_>) -> ChatLogprobs {
        let one = |id: u32, logprob: f32| TokenLogprob {
            token: names.name(id),
            logprob: finite_logprob(logprob),
            bytes: names.tokenizer.token_bytes(id).to_vec(),
        };
        let scored = part.tokens.iter().map(|placed| ScoredToken {
            token: one(placed.token.id, placed.token.logprob.unwrap_or(f32::NEG_INFINITY)),
            top_logprobs: placed.token.top.iter().map(|(id, logprob)| one(*id, *logprob)).collect(),
        });
        ChatLogprobs { content: scored.collect(), refusal: None }
    }
}
