//! Harmony messages, of GPT-OSS: `<|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>...`.
//! The channel `analysis` is reasoning, a message to `functions.name` is a call, and all others are content.
//!
//! Invariant: headers are dropped only if they are in the format; the text of messages is never dropped.

use super::events::EventSink;
use super::json::{JsonScanner, push_character};
use crate::text::tools::is_function_name;

pub(super) const START: &str = "<|start|>";
pub(super) const CHANNEL: &str = "<|channel|>";
pub(super) const MESSAGE: &str = "<|message|>";
const CONSTRAIN: &str = "<|constrain|>";
pub(super) const END: &str = "<|end|>";
const CALL: &str = "<|call|>";
const RETURN: &str = "<|return|>";

/// The role of the model's messages, which begins their headers.
pub(super) const ROLE: &str = "assistant";

/// The channel of reasoning.
pub(super) const ANALYSIS: &str = "analysis";

/// All markers.
pub(super) const MARKERS: &[&str] = &[START, CHANNEL, MESSAGE, CONSTRAIN, END, CALL, RETURN];

/// Maximum length of a header in bytes; longer ones are text without a header.
const HEADER_BYTES_MAX: usize = 512;

/// Reader of the messages of an output.
#[derive(Debug)]
pub(super) struct HarmonyReader {
    /// Whether the request has tools; without them, calls are content.
    has_tools: bool,
    /// Whether markers within content are text.
    is_constrained: bool,
    stage: Stage,
    /// Characters that may be the beginning of a marker.
    held: String,
    /// Text of the current header and of what follows it, of which nothing has been returned.
    raw: String,
}

#[derive(Debug)]
enum Stage {
    /// The text between two messages, up to `<|message|>`.
    Header,
    Reasoning,
    Content,
    Call {
        name: String,
        scanner: JsonScanner,
        is_started: bool,
    },
    /// After the arguments of a call.
    AfterCall,
}

/// The place in a Harmony message at which a rendered prompt ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PromptEnd {
    /// Before the role of a message.
    Outside,
    /// After the role.
    Role,
    /// Within a header, of which the prompt has this text after the role.
    Header(String),
    Reasoning,
    /// Within any other message.
    Content,
}

impl PromptEnd {
    /// Returns where a prompt ends.
    pub(super) fn of(prompt: &str) -> PromptEnd {
        let (_, last) = prompt.rsplit_once(START).unwrap_or_default();
        if last.contains(END) || last.is_empty() {
            return PromptEnd::Outside;
        }
        let last = last.strip_prefix(ROLE).unwrap_or(last);
        match last.split_once(MESSAGE) {
            None if last.trim().is_empty() => PromptEnd::Role,
            None => PromptEnd::Header(last.to_owned()),
            Some((header, _)) if matches!(message_kind(header, true), MessageKind::Reasoning) => {
                PromptEnd::Reasoning
            }
            Some(_) => PromptEnd::Content,
        }
    }
}

/// Kind of the message that a header begins.
enum MessageKind {
    Reasoning,
    Content,
    Call(String),
}

impl HarmonyReader {
    /// Creates a reader of the output after a rendered prompt, which may end within a message. If the output
    /// `is_constrained`, the text of a message that is neither reasoning nor a call has no end but that of
    /// the output.
    pub(super) fn new(
        prompt: &str,
        has_tools: bool,
        is_constrained: bool,
        scratch: &mut EventSink,
    ) -> HarmonyReader {
        let mut reader = HarmonyReader {
            has_tools,
            is_constrained,
            stage: Stage::Header,
            held: String::new(),
            raw: String::new(),
        };
        let begun = prompt.rfind(START).map_or("", |start| &prompt[start + START.len()..]);
        // A message that has ended begins nothing.
        if !begun.contains(END) {
            begun.chars().for_each(|c| reader.push(c, scratch));
        }
        // What the prompt has of a header counts; other text of the prompt is not part of the output.
        reader.raw = match reader.stage {
            Stage::Header => reader.raw.strip_prefix(ROLE).unwrap_or(&reader.raw).to_owned(),
            _ => String::new(),
        };
        // A call that the prompt begins has no start in the output: the rest of its text is content.
        if matches!(reader.stage, Stage::Call { .. } | Stage::AfterCall) {
            reader.stage = Stage::Content;
        }
        reader
    }

    /// Reads the next character.
    pub(super) fn push(&mut self, c: char, sink: &mut EventSink) {
        self.held.push(c);
        while let Some(first) = self.held.chars().next() {
            if self.is_within_text() {
                let held = std::mem::take(&mut self.held);
                return held.chars().for_each(|c| self.character(c, sink));
            }
            if let Some(marker) = MARKERS.iter().find(|marker| **marker == self.held) {
                self.held.clear();
                return self.marker(marker, sink);
            }
            if MARKERS.iter().any(|marker| marker.starts_with(&self.held)) {
                return;
            }
            self.held.remove(0);
            self.character(first, sink);
        }
    }

    /// Returns whether a marker that comes next is text: one within a string of a call's arguments, or within
    /// an answer that a grammar describes.
    fn is_within_text(&self) -> bool {
        match &self.stage {
            Stage::Call { scanner, .. } => scanner.is_within_string(),
            Stage::Content => self.is_constrained,
            Stage::Header | Stage::Reasoning | Stage::AfterCall => false,
        }
    }

    /// Returns what is held back at the end of the output.
    pub(super) fn finish(&mut self, sink: &mut EventSink) {
        for c in std::mem::take(&mut self.held).chars() {
            self.character(c, sink);
        }
        self.end_message(sink);
    }

    fn marker(&mut self, marker: &'static str, sink: &mut EventSink) {
        match (&self.stage, marker) {
            (Stage::Header, MESSAGE) if is_header(&self.raw) => {
                let kind = message_kind(&self.raw, self.has_tools);
                self.raw.push_str(marker);
                self.begin_message(kind);
            }
            (Stage::Header, CHANNEL | CONSTRAIN) if is_header(&self.raw) => self.raw.push_str(marker),
            (_, MESSAGE | CONSTRAIN) => marker.chars().for_each(|c| self.character(c, sink)),
            (_, CHANNEL) => {
                self.end_message(sink);
                self.raw.push_str(marker);
            }
            _ => self.end_message(sink),
        }
    }

    fn begin_message(&mut self, kind: MessageKind) {
        self.stage = match kind {
            MessageKind::Reasoning => Stage::Reasoning,
            MessageKind::Content => Stage::Content,
            MessageKind::Call(name) => {
                self.stage = Stage::Call { name, scanner: JsonScanner::new(), is_started: false };
                return;
            }
        };
        self.raw.clear();
    }

    /// Ends the current message. A header without a message, and a call that is not complete, are content.
    fn end_message(&mut self, sink: &mut EventSink) {
        let stage = std::mem::replace(&mut self.stage, Stage::Header);
        let raw = std::mem::take(&mut self.raw);
        match stage {
            // The role is not text.
            Stage::Header if raw == ROLE => {}
            Stage::Header | Stage::Call { .. } => {
                sink.abandon();
                sink.content(&raw);
            }
            Stage::Reasoning | Stage::Content | Stage::AfterCall => {}
        }
        sink.take_delivered();
    }

    /// Reads a character that is not part of a marker.
    fn character(&mut self, c: char, sink: &mut EventSink) {
        let mut buffer = [0; 4];
        let text = c.encode_utf8(&mut buffer);
        match &mut self.stage {
            Stage::Header => {
                self.raw.push(c);
                if self.raw.len() > HEADER_BYTES_MAX {
                    self.end_message(sink);
                    self.stage = Stage::Content;
                }
            }
            Stage::Reasoning => sink.reasoning(text),
            Stage::Content => sink.content(text),
            Stage::AfterCall if c.is_whitespace() => {}
            Stage::AfterCall => {
                self.stage = Stage::Content;
                sink.content(text);
            }
            Stage::Call { .. } => self.call_character(c, sink),
        }
    }

    fn call_character(&mut self, c: char, sink: &mut EventSink) {
        let Stage::Call { name, scanner, is_started } = &mut self.stage else { return };
        let place = match (*is_started, c) {
            (false, '{') | (true, _) => scanner.push(c).ok(),
            (false, _) if c.is_whitespace() => return self.raw.push(c),
            (false, _) => None,
        };
        let Some(place) = place else {
            self.end_message(sink);
            self.stage = Stage::Content;
            return self.character(c, sink);
        };
        if !*is_started {
            *is_started = true;
            sink.start(name, None);
        }
        self.raw.push(c);
        let mut text = String::new();
        push_character(&mut text, c, place.part);
        sink.arguments(&text);
        let is_complete = scanner.is_complete();
        if is_complete {
            sink.end();
            self.stage = Stage::AfterCall;
        }
        if sink.take_delivered() {
            self.raw.clear();
        }
    }
}

/// Returns whether a text is the beginning of a header: the role, which the prompt may contain, and then a
/// recipient or a marker.
fn is_header(text: &str) -> bool {
    let rest = text.strip_prefix(ROLE).unwrap_or(text).trim_start();
    rest.is_empty() || rest.starts_with("to=") || rest.starts_with("<|")
}

/// Returns the kind of the message after a header, such as `<|channel|>commentary to=functions.name json`.
fn message_kind(header: &str, has_tools: bool) -> MessageKind {
    let word = |start: usize| {
        let rest = &header[start..];
        rest.split(|c: char| c.is_whitespace() || c == '<').next().unwrap_or_default()
    };
    let recipient = header.find("to=").map(|at| word(at + "to=".len()));
    let channel = header.find(CHANNEL).map(|at| word(at + CHANNEL.len()));
    let function = recipient.and_then(|recipient| recipient.strip_prefix("functions."));
    match (function.filter(|name| has_tools && is_function_name(name)), recipient, channel) {
        (Some(name), _, _) => MessageKind::Call(name.to_owned()),
        (None, None, Some(ANALYSIS)) => MessageKind::Reasoning,
        _ => MessageKind::Content,
    }
}
