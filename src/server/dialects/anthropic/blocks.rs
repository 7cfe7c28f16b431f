//! Content blocks of an answer: text, thinking and calls of tools, whole or as the events of a stream.
//!
//! Invariant: one block at most is open, and the blocks of a stream are numbered from 0 without gaps.

use crate::server::dialects::frames::Frames;
use serde_json::{Map, Value, json};

/// The blocks of a stream.
#[derive(Default)]
pub struct Blocks {
    /// Number of blocks so far.
    count: usize,
    /// The open block, which is the last one.
    open: Option<Kind>,
    has_calls: bool,
}

/// The kind of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Text,
    Thinking,
    /// The call with this number.
    Call(u64),
}

impl Blocks {
    /// Appends the events of a delta of the native stream.
    pub fn push(&mut self, delta: &Value, out: &mut Frames) {
        if let Some(text) = text(&delta["reasoning_content"]) {
            self.open(Kind::Thinking, || json!({"type": "thinking", "thinking": "", "signature": ""}), out);
            self.delta(json!({"type": "thinking_delta", "thinking": text}), out);
        }
        if let Some(text) = text(&delta["content"]) {
            self.open(Kind::Text, || json!({"type": "text", "text": ""}), out);
            self.delta(json!({"type": "text_delta", "text": text}), out);
        }
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let kind = Kind::Call(call["index"].as_u64().unwrap_or(0));
            let function = &call["function"];
            let (id, name) = (&call["id"], &function["name"]);
            self.open(kind, || json!({"type": "tool_use", "id": id, "name": name, "input": {}}), out);
            self.has_calls = true;
            if let Some(part) = text(&function["arguments"]) {
                self.delta(json!({"type": "input_json_delta", "partial_json": part}), out);
            }
        }
    }

    /// Whether there is a call of a tool.
    pub fn has_calls(&self) -> bool {
        self.has_calls
    }

    /// Closes the open block, if there is one.
    pub fn close(&mut self, out: &mut Frames) {
        if self.open.take().is_some() {
            let index = self.count - 1;
            out.push("content_block_stop", &json!({"type": "content_block_stop", "index": index}));
        }
    }

    /// Opens a block unless it is open.
    fn open(&mut self, kind: Kind, block: impl FnOnce() -> Value, out: &mut Frames) {
        if self.open == Some(kind) {
            return;
        }
        self.close(out);
        let (index, block) = (self.count, block());
        self.count += 1;
        self.open = Some(kind);
        let start = json!({"type": "content_block_start", "index": index, "content_block": block});
        out.push("content_block_start", &start);
    }

    fn delta(&self, delta: Value, out: &mut Frames) {
        let index = self.count - 1;
        let event = json!({"type": "content_block_delta", "index": index, "delta": delta});
        out.push("content_block_delta", &event);
    }
}

/// Returns the blocks of a whole message.
pub fn whole(message: &Value) -> Vec<Value> {
    let mut blocks = Vec::new();
    if let Some(text) = text(&message["reasoning_content"]) {
        blocks.push(json!({"type": "thinking", "thinking": text, "signature": ""}));
    }
    if let Some(text) = text(&message["content"]) {
        blocks.push(json!({"type": "text", "text": text}));
    }
    for call in message["tool_calls"].as_array().into_iter().flatten() {
        let function = &call["function"];
        let arguments = function["arguments"].as_str().unwrap_or_default();
        let input = serde_json::from_str::<Map<String, Value>>(arguments).unwrap_or_default();
        blocks.push(json!({"type": "tool_use", "id": call["id"], "name": function["name"], "input": input}));
    }
    blocks
}

/// Returns a text that is not empty.
fn text(value: &Value) -> Option<&str> {
    value.as_str().filter(|text| !text.is_empty())
}
