//! The output of a model, with reasoning and tool calls. The first bytes choose the formats and where the
//! text is split.

#![no_main]

use mainstem::text::output::{CallFormat, OutputEvent, OutputParser, OutputSettings, ReasoningFormat};
use mainstem::text::tools::{Tool, ToolSettings};
use serde_json::json;
use std::sync::{Arc, LazyLock};

mainstem_fuzz::target!(parse);

/// Bytes before the text: the formats, the flags, and the lengths of pieces.
const HEAD: usize = 6;

static TOOLS: LazyLock<Arc<[Tool]>> = LazyLock::new(|| {
    let parameters = json!({"type": "object", "properties": {"a": {"type": "integer"}}});
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": parameters}}]);
    ToolSettings::parse(Some(&tools), None, None).expect("the tools must be valid").tools.into()
});

fn parse(bytes: &[u8]) {
    let Some((head, text)) = bytes.split_at_checked(HEAD) else { return };
    let text = String::from_utf8_lossy(text);
    let (calls, reasoning, flags) = (head[0], head[1], head[2]);
    let call_names: Vec<&str> = CallFormat::names().collect();
    let reasoning_names: Vec<&str> = ReasoningFormat::names().collect();
    // One past the last name is no format.
    let name = |names: &[&'static str], byte: u8| names.get(byte as usize % (names.len() + 1)).copied();
    let prompts = ["", "<think>\n", "<|start|>assistant", "<|start|>assistant<|channel|>final<|message|>a"];
    let is_set = |bit: u8| flags >> bit & 1 == 1;
    let settings = OutputSettings {
        calls: name(&call_names, calls).and_then(CallFormat::named),
        reasoning: name(&reasoning_names, reasoning).and_then(ReasoningFormat::named),
        tools: TOOLS.clone(),
        prompt: prompts[flags as usize % prompts.len()],
        is_continued: is_set(2),
        is_constrained: is_set(3),
        whole_calls: is_set(4),
        max_calls: if is_set(5) { 1 } else { usize::MAX },
        id_seed: 0,
    };
    let whole = read(settings.clone(), [&*text]);
    let lengths = head[3..].iter().cycle().map(|length| 1 + *length as usize % 16);
    let pieces = pieces(&text, lengths);
    assert_eq!(read(settings, pieces), whole, "the edges of pieces must not matter");
}

/// Splits a text into pieces of these numbers of characters.
fn pieces(text: &str, lengths: impl Iterator<Item = usize>) -> Vec<&str> {
    let mut rest = text;
    let mut pieces = Vec::new();
    for length in lengths {
        let end = rest.char_indices().nth(length).map_or(rest.len(), |(end, _)| end);
        let (piece, next) = rest.split_at(end);
        pieces.push(piece);
        rest = next;
        if rest.is_empty() {
            break;
        }
    }
    pieces
}

/// Parses an output, and joins adjacent text of its events.
fn read<'a>(settings: OutputSettings, pieces: impl IntoIterator<Item = &'a str>) -> Vec<OutputEvent> {
    let mut parser = OutputParser::new(settings);
    let mut events: Vec<OutputEvent> = pieces.into_iter().flat_map(|piece| parser.push(piece)).collect();
    events.extend(parser.finish());
    let mut joined: Vec<OutputEvent> = Vec::new();
    for event in events {
        match (joined.last_mut(), event) {
            (Some(OutputEvent::Content(last)), OutputEvent::Content(text))
            | (Some(OutputEvent::Reasoning(last)), OutputEvent::Reasoning(text))
            | (
                Some(OutputEvent::ToolCallArguments { delta: last, .. }),
                OutputEvent::ToolCallArguments { delta: text, .. },
            ) => last.push_str(&text),
            (_, event) => joined.push(event),
        }
    }
    joined
}
