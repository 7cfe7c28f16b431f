//! Calls of tools in answers, and their results in a conversation.
//!
//! Invariant: a call is sent back as the model made it, with a result for each call of an answer.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// A call of a tool, in the API's format.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolCall {
    pub id: String,
    #[serde(rename = "type", default)]
    kind: CallKind,
    pub function: CalledFunction,
}

/// The kinds of calls: only functions are called.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum CallKind {
    #[default]
    Function,
}

/// The function of a call, with its arguments as JSON text.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CalledFunction {
    pub name: String,
    pub arguments: String,
}

/// Calls that an answer ended with, and what the user gave as their results.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ToolRound {
    /// Text before the calls.
    pub content: String,
    pub calls: Vec<ToolCall>,
    /// A result for each call.
    pub results: Vec<String>,
}

impl ToolCall {
    /// Adds the parts of calls in a message or a delta to `calls`.
    pub fn collect(message: &Value, calls: &mut Vec<ToolCall>) {
        for (place, part) in message["tool_calls"].as_array().into_iter().flatten().enumerate() {
            // Calls come one after the other. Some servers number none, and give each whole.
            let is_known = |id: &str| calls.iter().any(|call| call.id == id);
            let index = match (part["index"].as_u64(), part["id"].as_str()) {
                (Some(index), _) => (index as usize).min(calls.len()),
                (None, Some(id)) if !is_known(id) => calls.len(),
                (None, _) => place.max(calls.len().saturating_sub(1)),
            };
            if index >= calls.len() {
                calls.push(ToolCall::default());
            }
            let call = &mut calls[index];
            // Some servers repeat what only the first part should have.
            for (field, value) in
                [(&mut call.id, &part["id"]), (&mut call.function.name, &part["function"]["name"])]
            {
                if let Some(value) = value.as_str().filter(|value| !value.is_empty()) {
                    value.clone_into(field);
                }
            }
            call.function.arguments += part["function"]["arguments"].as_str().unwrap_or_default();
        }
    }

    /// Formats the call for the user.
    pub fn describe(&self) -> String {
        format!("tool call: {}({})", self.function.name, self.function.arguments)
    }
}

impl ToolRound {
    /// Returns the messages of the round, in the API's format: the calls, and a result for each.
    pub fn messages(&self) -> impl Iterator<Item = Value> + '_ {
        let content = Some(&self.content).filter(|content| !content.is_empty());
        let calls = json!({"role": "assistant", "content": content, "tool_calls": self.calls});
        let results = self.calls.iter().zip(&self.results);
        let results =
            results.map(|(call, result)| json!({"role": "tool", "tool_call_id": call.id, "content": result}));
        std::iter::once(calls).chain(results)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_calls_become_calls() {
        let mut calls = Vec::new();
        for delta in [
            json!({"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": ""}}]}),
            json!({"tool_calls": [{"index": 0, "function": {"arguments": "{\"x\":"}}]}),
            json!({"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": "1}"}}]}),
            json!({"content": "no call"}),
            json!({"tool_calls": [{"index": 1, "id": "b", "function": {"name": "g", "arguments": "{}"}}]}),
        ] {
            ToolCall::collect(&delta, &mut calls);
        }
        let described: Vec<String> = calls.iter().map(ToolCall::describe).collect();
        assert_eq!(calls[0].id, "a");
        assert_eq!(described, ["tool call: f({\"x\":1})", "tool call: g({})"]);

        let mut whole = Vec::new();
        ToolCall::collect(&json!({"tool_calls": json!(calls)}), &mut whole);
        assert_eq!(whole, calls);
        let mut apart = Vec::new();
        for call in &calls {
            ToolCall::collect(&json!({"tool_calls": [call]}), &mut apart);
        }
        assert_eq!(apart, calls);
        // A server that counts wrong gets no large list.
        ToolCall::collect(&json!({"tool_calls": [{"index": 1_000_000_000_u64, "id": "c"}]}), &mut whole);
        assert_eq!(whole.len(), 3);
    }
}
