//! Output items of a response: reasoning, messages and calls of functions, and the events of a stream that
//! build them.
//!
//! Invariant: one item at most is open, and events are numbered from 0 without gaps.

use crate::server::dialects::frames::Frames;
use crate::server::dialects::responses::items::{Item, Messages};
use serde_json::{Map, Value, json};

/// The output of a response, as far as it is known.
pub struct Output {
    /// The part of the items' ids that they share.
    name: String,
    /// Items that are complete.
    items: Vec<Value>,
    /// Chat messages that are made of the same items.
    answer: Messages,
    open: Option<Open>,
    /// Number of the next event.
    sequence: u64,
}

/// The item that is being written.
struct Open {
    kind: Kind,
    id: String,
    /// Text, or the arguments of a call.
    text: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    Reasoning,
    Message,
    Call { number: u64, call_id: String, name: String },
}

impl Output {
    /// Creates the output of a response whose id has this name.
    pub fn new(name: &str) -> Output {
        let (items, answer) = (Vec::new(), Messages::default());
        Output { name: name.to_owned(), items, answer, open: None, sequence: 0 }
    }

    /// Returns the items that are complete.
    pub fn items(&self) -> &[Value] {
        &self.items
    }

    /// Takes the complete items out as chat messages: several if calls and texts alternate.
    pub fn messages(&mut self) -> Vec<Value> {
        std::mem::take(&mut self.answer).finish()
    }

    /// Adds a delta of the native stream, or the whole message, and appends the events.
    pub fn push(&mut self, delta: &Value, out: &mut Frames) {
        if let Some(text) = text(&delta["reasoning_content"]) {
            self.open(Kind::Reasoning, out);
            self.extend(text, out);
        }
        if let Some(text) = text(&delta["content"]) {
            self.open(Kind::Message, out);
            self.extend(text, out);
        }
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let number = call["index"].as_u64().unwrap_or(0);
            if let (Some(call_id), Some(name)) = (call["id"].as_str(), call["function"]["name"].as_str()) {
                self.open(Kind::Call { number, call_id: call_id.to_owned(), name: name.to_owned() }, out);
            }
            if let Some(part) = text(&call["function"]["arguments"]) {
                self.extend(part, out);
            }
        }
    }

    /// Appends an event.
    pub fn event(&mut self, name: &str, fields: Value, out: &mut Frames) {
        let mut event = Map::from_iter([
            ("type".to_owned(), name.into()),
            ("sequence_number".to_owned(), self.sequence.into()),
        ]);
        self.sequence += 1;
        if let Value::Object(fields) = fields {
            event.extend(fields);
        }
        out.push(name, &event);
    }

    /// Completes the open item, if there is one, with a status.
    pub fn close(&mut self, status: &str, out: &mut Frames) {
        let Some(Open { kind, id, text }) = self.open.take() else { return };
        let (index, item) = (self.items.len(), kind.item(&id, &text, status));
        let place = json!({"item_id": id, "output_index": index});
        match kind {
            Kind::Reasoning | Kind::Message => {
                let mut done = with(&place, json!({"content_index": 0, "text": text}));
                if kind == Kind::Message {
                    done["logprobs"] = json!([]);
                }
                self.event(kind.event("done"), done, out);
                let part = json!({"content_index": 0, "part": kind.part(&text)});
                self.event("response.content_part.done", with(&place, part), out);
            }
            Kind::Call { ref name, .. } => {
                let done = with(&place, json!({"name": name, "arguments": text}));
                self.event(kind.event("done"), done, out);
            }
        }
        self.event("response.output_item.done", json!({"output_index": index, "item": item}), out);
        self.items.push(item);
        self.answer.push(kind.into_item(text));
    }

    /// Opens an item of a kind, unless it is open.
    fn open(&mut self, kind: Kind, out: &mut Frames) {
        if self.open.as_ref().is_some_and(|open| open.kind == kind) {
            return;
        }
        self.close("completed", out);
        let index = self.items.len();
        let id = format!("{}_{}_{index}", kind.prefix(), self.name);
        let item = kind.begun(&id);
        self.event("response.output_item.added", json!({"output_index": index, "item": item}), out);
        if !matches!(kind, Kind::Call { .. }) {
            let part =
                json!({"item_id": id, "output_index": index, "content_index": 0, "part": kind.part("")});
            self.event("response.content_part.added", part, out);
        }
        self.open = Some(Open { kind, id, text: String::new() });
    }

    /// Extends the open item.
    fn extend(&mut self, part: &str, out: &mut Frames) {
        let index = self.items.len();
        let Some(open) = &mut self.open else { return };
        open.text += part;
        let mut event = json!({"item_id": open.id, "output_index": index, "delta": part});
        if !matches!(open.kind, Kind::Call { .. }) {
            event["content_index"] = 0.into();
        }
        if open.kind == Kind::Message {
            event["logprobs"] = json!([]);
        }
        let name = open.kind.event("delta");
        self.event(name, event, out);
    }
}

impl Kind {
    /// Prefix of the ids of items.
    fn prefix(&self) -> &'static str {
        match self {
            Kind::Reasoning => "rs",
            Kind::Message => "msg",
            Kind::Call { .. } => "fc",
        }
    }

    /// Returns the name of an event that extends (`delta`) or completes (`done`) an item.
    fn event(&self, step: &str) -> &'static str {
        match (self, step == "done") {
            (Kind::Reasoning, false) => "response.reasoning_text.delta",
            (Kind::Reasoning, true) => "response.reasoning_text.done",
            (Kind::Message, false) => "response.output_text.delta",
            (Kind::Message, true) => "response.output_text.done",
            (Kind::Call { .. }, false) => "response.function_call_arguments.delta",
            (Kind::Call { .. }, true) => "response.function_call_arguments.done",
        }
    }

    /// Returns the content part with a text.
    fn part(&self, text: &str) -> Value {
        match self {
            Kind::Reasoning => json!({"type": "reasoning_text", "text": text}),
            _ => json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []}),
        }
    }

    /// Returns an item without content yet.
    fn begun(&self, id: &str) -> Value {
        let mut item = self.item(id, "", "in_progress");
        if let Some(content) = item.get_mut("content") {
            *content = json!([]);
        }
        item
    }

    fn item(&self, id: &str, text: &str, status: &str) -> Value {
        match self {
            Kind::Reasoning => json!({
                "id": id, "type": "reasoning", "status": status, "summary": [], "content": [self.part(text)],
            }),
            Kind::Message => json!({
                "id": id, "type": "message", "status": status, "role": "assistant",
                "content": [self.part(text)],
            }),
            Kind::Call { call_id, name, .. } => json!({
                "id": id, "type": "function_call", "status": status, "call_id": call_id, "name": name,
                "arguments": text,
            }),
        }
    }

    fn into_item(self, text: String) -> Item {
        match self {
            Kind::Reasoning => Item::Reasoning(text),
            Kind::Message => Item::Message { role: "assistant", content: text.into() },
            Kind::Call { call_id, name, .. } => Item::Call { id: call_id, name, arguments: text },
        }
    }
}

/// Returns the fields of both objects.
fn with(first: &Value, second: Value) -> Value {
    let (mut fields, second) = (first.clone(), second);
    if let (Value::Object(fields), Value::Object(second)) = (&mut fields, second) {
        fields.extend(second);
    }
    fields
}

/// Returns a text that is not empty.
fn text(value: &Value) -> Option<&str> {
    value.as_str().filter(|text| !text.is_empty())
}
