//! Parsing of a model's output: content, reasoning and tool calls, from text that arrives in pieces.
//!
//! Invariant: the parts of an answer do not depend on where the pieces are split, because the parser reads
//! character by character. No text is lost: what is not in the format is content.

mod calls;

mod events;

mod formats;

mod grammar;

mod harmony;

mod headers;

mod json;

mod json_calls;

mod pythonic;

mod reasoning;

#[cfg(test)]
mod tests;

mod xml_calls;

pub use events::OutputEvent;
pub use formats::CallFormat;
pub use grammar::{ConstraintContext, OutputGrammar};
pub use reasoning::ReasoningFormat;

use super::ChatTemplate;
use super::tools::Tool;
use calls::CallReader;
use events::{CallIds, EventSink};
use formats::Syntax;
use harmony::HarmonyReader;
use reasoning::{Piece, ReasoningReader, ReasoningSyntax};
use std::sync::Arc;

/// Formats of a model's output.
#[derive(Clone, Copy, Debug, Default)]
pub struct OutputFormats {
    /// Format of tool calls; `None` if the model cannot be shown tools.
    pub calls: Option<&'static CallFormat>,
    pub reasoning: Option<&'static ReasoningFormat>,
}

impl OutputFormats {
    /// Selects formats by their names. For "auto", it is that of the chat template; for "none", there is
    /// none, and there is none of calls if the template does not show tools. The error is a message that
    /// lists the names.
    pub fn select(
        (calls, reasoning): (&str, &str),
        template: Option<&ChatTemplate>,
    ) -> Result<OutputFormats, String> {
        Ok(OutputFormats {
            calls: match calls {
                "auto" => template.and_then(ChatTemplate::call_format),
                "none" => None,
                name => {
                    let format = CallFormat::named(name).ok_or_else(|| unknown(name, CallFormat::names()))?;
                    // A template that does not show tools drops them, whatever the format is.
                    Some(format).filter(|_| template.is_none_or(|template| template.call_format().is_some()))
                }
            },
            reasoning: match reasoning {
                "auto" => template.and_then(ChatTemplate::reasoning_format),
                "none" => None,
                name => {
                    let format = ReasoningFormat::named(name);
                    Some(format.ok_or_else(|| unknown(name, ReasoningFormat::names()))?)
                }
            },
        })
    }

    /// Returns whether the output is Harmony messages.
    fn is_harmony(&self) -> bool {
        match self.calls {
            Some(format) => matches!(format.syntax, Syntax::Harmony),
            None => self.reasoning.is_some_and(|format| matches!(format.syntax, ReasoningSyntax::Harmony)),
        }
    }

    /// Returns the markers that the parser must see.
    pub fn markers(&self) -> impl Iterator<Item = &'static str> {
        let calls = self.calls.into_iter().flat_map(CallFormat::markers);
        calls.chain(self.reasoning.into_iter().flat_map(ReasoningFormat::markers))
    }
}

fn unknown(name: &str, names: impl Iterator<Item = &'static str>) -> String {
    let names = names.map(|name| format!("\"{name}\"")).collect::<Vec<_>>().join(", ");
    format!("\"{name}\" is not one of \"auto\", \"none\", {names}")
}

/// Settings of the parser of one choice.
#[derive(Clone, Debug)]
pub struct OutputSettings<'a> {
    /// Format of calls; `None` returns them as content, which is right for the choice `none`.
    pub calls: Option<&'static CallFormat>,
    /// Format of reasoning; `None` returns it as content.
    pub reasoning: Option<&'static ReasoningFormat>,
    /// The tools of the request.
    pub tools: Arc<[Tool]>,
    /// The rendered prompt: the output may begin within reasoning or within a message.
    pub prompt: &'a str,
    /// Whether the model continues the last message of the prompt.
    pub is_continued: bool,
    /// Whether a grammar other than one of calls describes the answer: text in it that looks like a marker is
    /// text.
    pub is_constrained: bool,
    /// Return a call only when it is complete, and calls that are cut or malformed as content. This suits
    /// answers that are not streamed. Otherwise, the arguments are returned as they arrive, and those of such
    /// a call just end.
    pub whole_calls: bool,
    /// Maximum number of calls; further ones are dropped. See
    /// [`ToolSettings::max_calls`](super::tools::ToolSettings::max_calls).
    pub max_calls: usize,
    /// Seed of the ids of calls, which must differ between choices.
    pub id_seed: u64,
}

/// Parser of the output of one choice.
#[derive(Debug)]
pub struct OutputParser {
    reader: Reader,
    sink: EventSink,
}

#[derive(Debug)]
enum Reader {
    Marked { reasoning: Option<ReasoningReader>, calls: Option<Box<CallReader>> },
    Harmony(HarmonyReader),
}

impl OutputParser {
    /// Creates a parser at the beginning of an output.
    pub fn new(settings: OutputSettings) -> OutputParser {
        let OutputSettings { calls, reasoning, tools, prompt, is_continued, is_constrained, .. } = settings;
        let is_short = calls.is_some_and(|format| format.name.starts_with("mistral"));
        let new_sink = || {
            let ids = CallIds { seed: settings.id_seed, is_short };
            EventSink::new(ids, settings.whole_calls, settings.max_calls)
        };
        let is_inside = reasoning.is_some_and(|format| format.starts_inside(prompt, is_continued));
        let marked_reasoning = match reasoning.map(|format| &format.syntax) {
            Some(ReasoningSyntax::Marked { open, close }) => {
                Some(ReasoningReader::new(open, close, is_inside))
            }
            Some(ReasoningSyntax::Harmony) | None => None,
        };
        let reader = match calls.map(|format| &format.syntax) {
            _ if (OutputFormats { calls, reasoning }).is_harmony() => {
                let scratch = &mut new_sink();
                Reader::Harmony(HarmonyReader::new(prompt, calls.is_some(), is_constrained, scratch))
            }
            Some(Syntax::Marked(markers)) => Reader::Marked {
                reasoning: marked_reasoning,
                calls: Some(Box::new(CallReader::new(markers, tools))),
            },
            Some(Syntax::Harmony) | None => Reader::Marked { reasoning: marked_reasoning, calls: None },
        };
        OutputParser { reader, sink: new_sink() }
    }

    /// Reads the next piece of the output. Returns the parts that are final now.
    pub fn push(&mut self, text: &str) -> Vec<OutputEvent> {
        text.chars().for_each(|c| self.character(c));
        self.sink.take()
    }

    /// Returns the rest at the end of the output. The parser must not be used again.
    pub fn finish(&mut self) -> Vec<OutputEvent> {
        match &mut self.reader {
            Reader::Marked { reasoning, calls } => {
                if let Some(reasoning) = reasoning {
                    reasoning.finish(&mut |piece| read_piece(piece, calls, &mut self.sink));
                }
                if let Some(calls) = calls {
                    calls.finish(&mut self.sink);
                }
            }
            Reader::Harmony(reader) => reader.finish(&mut self.sink),
        }
        self.sink.take()
    }

    /// Returns whether the output has complete calls so far. If the model ends such an output, the finish
    /// reason is `tool_calls`.
    pub fn has_calls(&self) -> bool {
        self.sink.has_complete_call()
    }

    fn character(&mut self, c: char) {
        match &mut self.reader {
            Reader::Marked { reasoning: Some(reasoning), calls } => {
                reasoning.push(c, &mut |piece| read_piece(piece, calls, &mut self.sink));
            }
            Reader::Marked { reasoning: None, calls } => read_piece(Piece::Rest(c), calls, &mut self.sink),
            Reader::Harmony(reader) => reader.push(c, &mut self.sink),
        }
    }
}

fn read_piece(piece: Piece, calls: &mut Option<Box<CallReader>>, sink: &mut EventSink) {
    match (piece, calls) {
        (Piece::Reasoning(c), _) => sink.reasoning(c.encode_utf8(&mut [0; 4])),
        (Piece::Rest(c), Some(calls)) => calls.push(c, sink),
        (Piece::Rest(c), None) => sink.content(c.encode_utf8(&mut [0; 4])),
    }
}
