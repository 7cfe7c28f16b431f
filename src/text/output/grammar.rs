//! Form of calls that must be written: for the choices `required` and a named tool.
//!
//! Invariant: the parser of the grammar's format reads every text of the grammar as calls of its tools.

use super::formats::{CallFormat, Literal, LiteralPart};
use crate::text::tools::{ToolChoice, ToolSettings};
use serde_json::Value as Json;

/// Maximum number of calls of a constrained answer. Without a bound, a small model calls until the answer is
/// cut.
const CALLS_MAX: usize = 16;

/// Grammar of an answer that consists of calls: `open`, then 1 to `max_calls` calls, each of one of the
/// `calls`, with `separator` between them, then `close`, and then the end of the answer. It says nothing of
/// reasoning: where the model reasons first, the grammar applies to what follows.
#[derive(Debug)]
pub struct CallGrammar {
    /// The format in which the answer is parsed.
    pub format: &'static CallFormat,
    pub open: Vec<GrammarText>,
    /// One for each tool that may be called; never empty.
    pub calls: Vec<CallForm>,
    pub separator: Vec<GrammarText>,
    pub close: Vec<GrammarText>,
    pub max_calls: usize,
}

/// Form of a call of one tool: `prefix`, then JSON that satisfies `schema`, then `suffix`.
#[derive(Debug, PartialEq)]
pub struct CallForm {
    /// The tool's name, which is part of the prefix.
    pub name: String,
    pub prefix: Vec<GrammarText>,
    /// Schema of the arguments, as the tool defines it; of type `object`.
    pub schema: Json,
    pub suffix: Vec<GrammarText>,
}

/// A fixed text of a grammar.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum GrammarText {
    /// Text, in any tokens.
    Text(String),
    /// A marker: the special token with this text if the vocabulary has one, and else the text.
    Marker(&'static str),
}

impl CallFormat {
    /// Returns the grammar of an answer if `settings` require a call, else `None`. Formats whose arguments
    /// are not JSON are replaced by the generic one, in which the answer must then be parsed.
    pub fn grammar(&'static self, settings: &ToolSettings) -> Option<CallGrammar> {
        let is_allowed = |name: &str| match &settings.choice {
            ToolChoice::Required => true,
            ToolChoice::Named(only) => name == only,
            ToolChoice::None | ToolChoice::Auto => false,
        };
        let (format, writing) = match &self.writing {
            Some(writing) => (self, writing),
            None => {
                let generic = CallFormat::generic();
                (generic, generic.writing.as_ref()?)
            }
        };
        let form = |name: &str, schema: &Json| CallForm {
            name: name.to_owned(),
            prefix: [texts(writing.before), vec![GrammarText::Text(name.to_owned())], texts(writing.middle)]
                .concat(),
            schema: schema.clone(),
            suffix: texts(writing.after),
        };
        let tools = settings.tools.iter().filter(|tool| is_allowed(&tool.name));
        let calls: Vec<CallForm> = tools.map(|tool| form(&tool.name, &tool.parameters)).collect();
        let max_calls = if writing.is_parallel { settings.max_calls().min(CALLS_MAX) } else { 1 };
        (!calls.is_empty()).then(|| CallGrammar {
            format,
            open: texts(writing.open),
            calls,
            separator: texts(writing.separator),
            close: texts(writing.close),
            max_calls,
        })
    }
}

fn texts(literal: Literal) -> Vec<GrammarText> {
    let text = |part: &LiteralPart| match part {
        LiteralPart::Text(text) => GrammarText::Text((*text).to_owned()),
        LiteralPart::Marker(marker) => GrammarText::Marker(marker),
    };
    literal.iter().map(text).collect()
}
