//! Calls as XML elements, of Qwen3-Coder: `<function=name>`, `<parameter=key>` with its value, and the
//! closing tags. Values are plain text: the schema of the parameter says what they mean.
//!
//! Invariant: each argument is returned as JSON once its element is complete.

use super::events::{EventSink, Progress};
use super::json::to_json_string;
use crate::text::tools::{Tool, is_function_name};
use serde_json::Value as Json;
use std::sync::Arc;

/// Maximum length of a tag in bytes.
const TAG_BYTES_MAX: usize = 512;

const VALUE_END: &str = "</parameter>";

/// Reader of one call after its opening marker.
#[derive(Debug)]
pub(super) struct XmlCalls {
    tools: Arc<[Tool]>,
    stage: Stage,
    name: String,
    key: String,
    has_arguments: bool,
}

#[derive(Debug)]
enum Stage {
    /// Between elements: the current tag, which is empty before its first character.
    Tag(String),
    Value(String),
}

impl XmlCalls {
    pub(super) fn new(tools: Arc<[Tool]>) -> XmlCalls {
        XmlCalls {
            tools,
            stage: Stage::Tag(String::new()),
            name: String::new(),
            key: String::new(),
            has_arguments: false,
        }
    }

    /// Reads the next character.
    pub(super) fn push(&mut self, c: char, sink: &mut EventSink) -> Progress {
        match &mut self.stage {
            Stage::Tag(tag) if tag.is_empty() && c.is_whitespace() => Progress::More,
            Stage::Tag(tag) if tag.is_empty() && c != '<' => Progress::Invalid,
            Stage::Tag(tag) if tag.len() > TAG_BYTES_MAX => Progress::Invalid,
            Stage::Tag(tag) if c != '>' => {
                tag.push(c);
                Progress::More
            }
            Stage::Tag(tag) => {
                let tag = std::mem::take(tag);
                self.tag(&tag, sink)
            }
            Stage::Value(text) => {
                text.push(c);
                if text.ends_with(VALUE_END) {
                    text.truncate(text.len() - VALUE_END.len());
                    let text = std::mem::take(text);
                    self.argument(&text, sink);
                    self.stage = Stage::Tag(String::new());
                }
                Progress::More
            }
        }
    }

    /// Reads a tag, given without its closing bracket.
    fn tag(&mut self, tag: &str, sink: &mut EventSink) -> Progress {
        if self.name.is_empty() {
            let name = tag.strip_prefix("<function=").map(unquoted);
            let Some(name) = name.filter(|name| is_function_name(name)) else { return Progress::Invalid };
            self.name = name.to_owned();
            return Progress::More;
        }
        if let Some(key) = tag.strip_prefix("<parameter=") {
            self.key = unquoted(key).to_owned();
            self.stage = Stage::Value(String::new());
            return Progress::More;
        }
        if tag != "</function" {
            return Progress::Invalid;
        }
        if !self.has_arguments {
            sink.start(&self.name, None);
            sink.arguments("{");
        }
        sink.arguments("}");
        sink.end();
        Progress::Done
    }

    /// Returns an argument, and the beginning of the call with the first one.
    fn argument(&mut self, text: &str, sink: &mut EventSink) {
        // The model writes the value on lines of its own.
        let text = text.strip_prefix('\n').unwrap_or(text);
        let text = text.strip_suffix('\n').unwrap_or(text);
        if !self.has_arguments {
            sink.start(&self.name, None);
        }
        let before = if self.has_arguments { ", " } else { "{" };
        let value = self.value(text);
        sink.arguments(&format!("{before}{}: {value}", to_json_string(&self.key)));
        self.has_arguments = true;
    }

    /// Returns the value of the current parameter as JSON. Where the schema allows a string only, or says
    /// nothing, it is a string; elsewhere it is JSON, if that is what it is.
    fn value(&self, text: &str) -> String {
        let schema = self
            .tools
            .iter()
            .find(|tool| tool.name == self.name)
            .and_then(|tool| tool.parameters.get("properties")?.get(&self.key));
        let is_text = match schema {
            None => true,
            Some(schema) => match schema.get("type") {
                Some(Json::String(kind)) => kind == "string",
                Some(_) => false,
                None => {
                    schema.get("enum").is_none()
                        && !["anyOf", "oneOf", "$ref"].iter().any(|key| schema.get(*key).is_some())
                }
            },
        };
        let word = match text.trim() {
            "True" => "true",
            "False" => "false",
            "None" => "null",
            word => word,
        };
        match serde_json::from_str::<Json>(word) {
            Ok(value) if !is_text => value.to_string(),
            _ => to_json_string(text),
        }
    }
}

/// Removes quotes around a name.
fn unquoted(name: &str) -> &str {
    name.trim().trim_matches('"')
}
