//! Calls whose arguments are JSON: objects with a name and arguments, arrays of them, or a header with the
//! name before the arguments.
//!
//! Invariant: a call begins when its name and the beginning of its arguments are known; from then on, its
//! arguments are returned as they arrive.

use super::events::{EventSink, Progress};
use super::formats::HeaderParser;
use super::json::{JsonScanner, Part, Place, push_character};
use crate::text::tools::{Tool, is_function_name};
use serde_json::{Map, Value as Json};
use std::sync::Arc;

/// Keys of a call's name.
const NAME_KEYS: [&str; 2] = ["name", "tool_name"];

/// Keys of a call's arguments.
const ARGUMENTS_KEYS: [&str; 2] = ["arguments", "parameters"];

/// Other keys of a call, which are ignored. A call without a marker has no further ones.
const IGNORED_KEYS: [&str; 4] = ["type", "id", "tool_call_id", "index"];

/// Maximum length of a header, and of a name with its escapes, in bytes.
const NAME_TEXT_MAX: usize = 512;

/// Reader of JSON calls after an opening marker, or from their first character.
#[derive(Debug)]
pub(super) struct JsonCalls {
    /// Whether a marker precedes the calls. Without one, only the tools' names are names of calls.
    is_marked: bool,
    tools: Arc<[Tool]>,
    header_parser: Option<HeaderParser>,
    stage: Stage,
    scanner: JsonScanner,
    /// Nesting of the keys of a call: 1 in an object, 2 in an array of objects.
    call_level: usize,
    call: Call,
    has_calls: bool,
}

#[derive(Debug, PartialEq, Eq)]
enum Stage {
    /// Before the first character other than white space.
    Open,
    Header(String),
    /// The arguments after a header.
    Arguments,
    /// An object, or an array of objects.
    Calls,
}

/// The call that is being read.
#[derive(Debug, Default)]
struct Call {
    name: Option<String>,
    arguments: Arguments,
    /// The current key, with quotes and escapes.
    key: String,
    /// Role of the current value.
    target: Target,
    /// The current name, with quotes and escapes.
    text: String,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum Arguments {
    #[default]
    Missing,
    /// Text of the arguments, of which nothing has been returned: the name is not known, or they are not an
    /// object.
    Held(String),
    Streaming,
    Complete,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Target {
    #[default]
    Nothing,
    Name,
    Arguments,
    Ignored,
}

/// Error for text that is not a call.
struct NoCall;

impl JsonCalls {
    pub(super) fn new(is_marked: bool, tools: Arc<[Tool]>, header_parser: Option<HeaderParser>) -> JsonCalls {
        JsonCalls {
            is_marked,
            tools,
            header_parser: header_parser.filter(|_| is_marked),
            stage: Stage::Open,
            scanner: JsonScanner::new(),
            call_level: 1,
            call: Call::default(),
            has_calls: false,
        }
    }

    /// Reads the next character.
    pub(super) fn push(&mut self, c: char, sink: &mut EventSink) -> Progress {
        match self.step(c, sink) {
            Ok(progress) => progress,
            Err(NoCall) => Progress::Invalid,
        }
    }

    /// Ends the open call if its arguments are complete, though the text around them is not. Returns whether
    /// it did.
    pub(super) fn end_early(&mut self, sink: &mut EventSink) -> bool {
        let is_complete = self.stage == Stage::Calls && self.call.arguments == Arguments::Complete;
        if is_complete {
            self.call = Call::default();
            sink.end();
        }
        is_complete
    }

    fn step(&mut self, c: char, sink: &mut EventSink) -> Result<Progress, NoCall> {
        match &mut self.stage {
            Stage::Open => match c {
                _ if c.is_whitespace() => Ok(Progress::More),
                '{' | '[' => {
                    self.stage = Stage::Calls;
                    self.call_level = if c == '{' { 1 } else { 2 };
                    self.calls_character(c, sink)
                }
                _ if self.header_parser.is_some() => {
                    self.stage = Stage::Header(c.to_string());
                    Ok(Progress::More)
                }
                _ => Err(NoCall),
            },
            Stage::Header(text) if c == '{' => {
                let header = self.header_parser.and_then(|parse| parse(text)).ok_or(NoCall)?;
                if !is_function_name(&header.name) {
                    return Err(NoCall);
                }
                sink.start(&header.name, header.id);
                self.stage = Stage::Arguments;
                self.arguments_character(c, sink)
            }
            Stage::Header(text) if text.len() < NAME_TEXT_MAX => {
                text.push(c);
                Ok(Progress::More)
            }
            Stage::Header(_) => Err(NoCall),
            Stage::Arguments => self.arguments_character(c, sink),
            Stage::Calls => self.calls_character(c, sink),
        }
    }

    /// Reads a character of the arguments after a header.
    fn arguments_character(&mut self, c: char, sink: &mut EventSink) -> Result<Progress, NoCall> {
        let place = self.scanner.push(c).map_err(|_| NoCall)?;
        let mut text = String::new();
        push_character(&mut text, c, place.part);
        sink.arguments(&text);
        if !self.scanner.is_complete() {
            return Ok(Progress::More);
        }
        sink.end();
        Ok(Progress::Done)
    }

    /// Reads a character of an object or of an array of objects.
    fn calls_character(&mut self, c: char, sink: &mut EventSink) -> Result<Progress, NoCall> {
        let place = self.scanner.push(c).map_err(|_| NoCall)?;
        let is_value = matches!(place.part, Part::Value | Part::Control);
        if place.level > self.call_level || (place.level == self.call_level && is_value) {
            self.value_character(c, place, sink)?;
        } else if place.level == self.call_level {
            match (place.part, c) {
                (Part::Key, _) => self.call.key.push(c),
                (Part::Separator, ':') => self.end_key()?,
                (Part::Separator, _) => self.end_value(sink)?,
                _ => {}
            }
        } else if place.level + 1 == self.call_level && is_value {
            match c {
                '{' => self.call = Call::default(),
                '}' => self.end_call(sink)?,
                _ => return Err(NoCall),
            }
        } else if c == ']' && !self.has_calls {
            return Err(NoCall);
        }
        Ok(if self.scanner.is_complete() { Progress::Done } else { Progress::More })
    }

    fn end_key(&mut self) -> Result<(), NoCall> {
        let call = &mut self.call;
        let key: String = serde_json::from_str(&std::mem::take(&mut call.key)).map_err(|_| NoCall)?;
        call.target = match key.as_str() {
            key if NAME_KEYS.contains(&key) && call.name.is_none() => Target::Name,
            key if ARGUMENTS_KEYS.contains(&key) && call.arguments == Arguments::Missing => Target::Arguments,
            key if self.is_marked || IGNORED_KEYS.contains(&key) => Target::Ignored,
            _ => return Err(NoCall),
        };
        Ok(())
    }

    fn value_character(&mut self, c: char, place: Place, sink: &mut EventSink) -> Result<(), NoCall> {
        let call = &mut self.call;
        match (call.target, &mut call.arguments) {
            (Target::Name, _) if call.text.len() < NAME_TEXT_MAX => call.text.push(c),
            (Target::Name, _) => return Err(NoCall),
            (Target::Arguments, Arguments::Missing) => {
                match (c, &call.name) {
                    ('{', Some(name)) => {
                        sink.start(name, None);
                        sink.arguments("{");
                        call.arguments = Arguments::Streaming;
                    }
                    ('{' | '"' | 'n', _) => call.arguments = Arguments::Held(c.to_string()),
                    _ => return Err(NoCall),
                };
            }
            (Target::Arguments, Arguments::Held(text)) => push_character(text, c, place.part),
            (Target::Arguments, Arguments::Streaming) => {
                let mut text = String::new();
                push_character(&mut text, c, place.part);
                sink.arguments(&text);
                if c == '}' && place.level == self.call_level {
                    call.arguments = Arguments::Complete;
                }
            }
            (Target::Arguments, Arguments::Complete) | (Target::Nothing | Target::Ignored, _) => {}
        }
        Ok(())
    }

    /// Ends the current value.
    fn end_value(&mut self, sink: &mut EventSink) -> Result<(), NoCall> {
        if std::mem::take(&mut self.call.target) == Target::Name {
            let name: String = serde_json::from_str(&self.call.text).map_err(|_| NoCall)?;
            let is_known = self.is_marked || self.tools.iter().any(|tool| tool.name == name);
            if !is_known || !is_function_name(&name) {
                return Err(NoCall);
            }
            self.call.name = Some(name);
        }
        if let (Some(name), Arguments::Held(text)) = (&self.call.name, &self.call.arguments) {
            let arguments = held_arguments(text)?;
            sink.start(name, None);
            sink.arguments(&arguments);
            self.call.arguments = Arguments::Complete;
        }
        Ok(())
    }

    /// Ends the current call. A call may have no arguments.
    fn end_call(&mut self, sink: &mut EventSink) -> Result<(), NoCall> {
        self.end_value(sink)?;
        let Some(name) = &self.call.name else { return Err(NoCall) };
        if self.call.arguments == Arguments::Missing {
            sink.start(name, None);
            sink.arguments("{}");
        }
        sink.end();
        self.call = Call::default();
        self.has_calls = true;
        Ok(())
    }
}

/// Returns arguments that were held back: an object, null, or an object written as a string.
fn held_arguments(text: &str) -> Result<String, NoCall> {
    match text.chars().next() {
        Some('{') => Ok(text.to_owned()),
        Some('n') => Ok("{}".to_owned()),
        _ => {
            let inner: String = serde_json::from_str(text).map_err(|_| NoCall)?;
            match inner.trim() {
                "" => Ok("{}".to_owned()),
                inner if serde_json::from_str::<Map<String, Json>>(inner).is_ok() => Ok(inner.to_owned()),
                _ => Err(NoCall),
            }
        }
    }
}
