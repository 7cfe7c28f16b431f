//! Grammars of answers, and where in an output they begin to apply.
//!
//! Invariant: the parser reads every text of a grammar of calls, in the grammar's format, as calls of its
//! tools.

use super::OutputFormats;
use super::formats::LiteralPart::{Marker, Text};
use super::formats::{CallFormat, Literal, LiteralPart, Writing};
use super::harmony::{self, PromptEnd};
use super::reasoning::ReasoningSyntax;
use crate::text::tokenizer::Tokenizer;
use crate::text::tools::{Tool, ToolChoice, ToolSettings};
use mainstem_grammar::{Call, Calls, ConstraintStart, Form, Piece, Spec};
use std::sync::Arc;

/// Maximum number of calls of a constrained answer. Without a bound, a small model calls until the answer is
/// cut.
const CALLS_MAX: usize = 16;

/// Headers of Harmony messages, and what is between messages.
const ANALYSIS_HEADER: Literal =
    &[Marker(harmony::CHANNEL), Text(harmony::ANALYSIS), Marker(harmony::MESSAGE)];
const FINAL_HEADER: Literal = &[Marker(harmony::CHANNEL), Text("final"), Marker(harmony::MESSAGE)];
const NEXT_MESSAGE: Literal = &[Marker(harmony::START), Text(harmony::ROLE)];
const END_AND_NEXT_MESSAGE: Literal = &[Marker(harmony::END), Marker(harmony::START), Text(harmony::ROLE)];

/// A grammar, and where in the output it applies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputGrammar {
    pub spec: Spec,
    pub start: ConstraintStart,
}

/// Model and prompt that the grammars of a request's output depend on.
#[derive(Clone, Copy, Debug)]
pub struct ConstraintContext<'a> {
    pub tokenizer: &'a Tokenizer,
    /// The formats of the parser of the output.
    pub formats: OutputFormats,
    /// The rendered prompt.
    pub prompt: &'a str,
    /// Whether the model continues the last message of the prompt.
    pub is_continued: bool,
}

impl ConstraintContext<'_> {
    /// Returns the constraint for a choice of tools that requires calls, and the format in which the output
    /// must be parsed: the generic one in place of formats whose arguments are not JSON. Of errors of the
    /// grammar, the part is a path of the request. `None` if no call is required, or if there is no format.
    pub fn calls(&self, tools: &ToolSettings) -> Option<(OutputGrammar, &'static CallFormat)> {
        let (format, writing) = self.formats.calls?.written()?;
        let is_allowed = |tool: &Tool| match &tools.choice {
            ToolChoice::Required => true,
            ToolChoice::Named(only) => tool.name == *only,
            ToolChoice::None | ToolChoice::Auto => false,
        };
        let allowed = tools.tools.iter().enumerate().filter(|(_, tool)| is_allowed(tool));
        let calls: Vec<Call> = allowed.map(|(index, tool)| self.call(writing, index, tool)).collect();
        if calls.is_empty() {
            return None;
        }
        let max = if writing.is_parallel { tools.max_calls().min(CALLS_MAX) } else { 1 };
        let calls = Calls {
            begin: self.pieces(writing.open),
            calls,
            separator: self.pieces(writing.separator),
            end: self.pieces(writing.close),
            min: 1,
            max: Some(max as u32),
        };
        let (spec, start) = match self.formats.is_harmony() {
            true => self.message(calls),
            false => (calls, self.start()),
        };
        Some((OutputGrammar { spec: Spec::new(Form::Calls(spec.into())), start }, format))
    }

    /// Returns the constraint for an answer that is either one call of any tool or what `spec` describes, and
    /// the format in which calls must be parsed. `None` if there is no format, or if the beginning of an
    /// answer does not tell which of both it is.
    pub fn call_or_answer(
        &self,
        tools: &ToolSettings,
        spec: &Spec,
    ) -> Option<(OutputGrammar, &'static CallFormat)> {
        let (format, writing) = self.formats.calls?.written()?;
        let (is_harmony, end) = (self.formats.is_harmony(), PromptEnd::of(self.prompt));
        let header = match end {
            _ if !is_harmony => &[],
            PromptEnd::Role | PromptEnd::Outside => FINAL_HEADER,
            PromptEnd::Header(_) | PromptEnd::Reasoning | PromptEnd::Content => return None,
        };
        let whole = |(index, tool): (usize, &Tool)| {
            let mut call = self.call(writing, index, tool);
            call.prefix.splice(0..0, self.pieces(writing.open));
            call.suffix.extend(self.pieces(writing.close));
            call
        };
        let mut calls: Vec<Call> = tools.tools.iter().enumerate().map(whole).collect();
        let is_json = matches!(spec.form(), Form::JsonObject | Form::JsonSchema(_));
        // The lexer reads the longest text, so neither may begin with the beginning of the other.
        match calls.first()?.prefix.first()? {
            Piece::Token(_) => {}
            Piece::Text(text) if is_json && text.starts_with('<') => {}
            _ => return None,
        }
        let (place, prefix, suffix) = ("$".to_owned(), self.pieces(header), Vec::new());
        calls.push(Call { place, prefix, body: spec.form().clone(), suffix });
        let (begin, separator, end) = (Vec::new(), Vec::new(), Vec::new());
        let either = Calls { begin, calls, separator, end, min: 1, max: Some(1) };
        let (either, start) = if is_harmony { self.message(either) } else { (either, self.start()) };
        Some((OutputGrammar { spec: spec.with_form(Form::Calls(either.into())), start }, format))
    }

    /// Returns a call of the tool with this index.
    fn call(&self, writing: &Writing, index: usize, tool: &Tool) -> Call {
        let name = vec![Piece::Text(tool.name.clone())];
        Call {
            place: format!("tools[{index}].function.parameters"),
            prefix: [self.pieces(writing.before), name, self.pieces(writing.middle)].concat(),
            body: Form::JsonSchema(tool.parameters.to_string().into()),
            suffix: self.pieces(writing.after),
        }
    }

    /// Returns the constraint for an answer that `spec` describes. The parser of such an output needs
    /// [`OutputSettings::is_constrained`](super::OutputSettings::is_constrained), and no format of calls.
    pub fn answer(&self, spec: Spec) -> OutputGrammar {
        let end = PromptEnd::of(self.prompt);
        if !self.formats.is_harmony() || end == PromptEnd::Content {
            return OutputGrammar { spec, start: self.start() };
        }
        let header = match &end {
            PromptEnd::Header(begun) => without_beginning(FINAL_HEADER, begun),
            _ => None,
        };
        let call = |header| {
            let (begin, separator, end) = (Vec::new(), Vec::new(), Vec::new());
            let (place, prefix, suffix) = ("$".to_owned(), self.pieces(header), Vec::new());
            let calls = vec![Call { place, prefix, body: spec.form().clone(), suffix }];
            Calls { begin, calls, separator, end, min: 1, max: Some(1) }
        };
        let (message, start) = match header {
            Some(rest) => (call(rest), ConstraintStart::Immediately),
            None => self.message(call(FINAL_HEADER)),
        };
        OutputGrammar { spec: spec.with_form(Form::Calls(message.into())), start }
    }

    /// Returns where an answer begins whose grammar has no header.
    fn start(&self) -> ConstraintStart {
        use ConstraintStart::{After, Immediately, UnlessOpened};
        let Some(reasoning) = self.formats.reasoning.filter(|_| !self.formats.is_harmony()) else {
            return Immediately;
        };
        let ReasoningSyntax::Marked { open, close } = reasoning.syntax else { return Immediately };
        let text = || Arc::from(close.first().copied().unwrap_or_default());
        if reasoning.starts_inside(self.prompt, self.is_continued) {
            return After { marker: text() };
        }
        // A message that is continued, or whose reasoning the prompt ends, does not begin with reasoning.
        let is_closed = close.iter().any(|marker| self.prompt.trim_end().ends_with(marker));
        let open = open.iter().find_map(|marker| self.tokenizer.token_id(marker));
        match open.filter(|_| !is_closed && !self.is_continued) {
            Some(open) => UnlessOpened { open, close: text() },
            None => Immediately,
        }
    }

    /// Adds to the grammar of a Harmony message what the model may or must write before its header. Returns
    /// where the whole begins.
    fn message(&self, mut calls: Calls) -> (Calls, ConstraintStart) {
        let end = PromptEnd::of(self.prompt);
        let before = match end {
            PromptEnd::Role => vec![self.analysis()],
            PromptEnd::Outside => [self.pieces(NEXT_MESSAGE), vec![self.analysis()]].concat(),
            PromptEnd::Content => self.pieces(END_AND_NEXT_MESSAGE),
            PromptEnd::Header(_) | PromptEnd::Reasoning => self.pieces(NEXT_MESSAGE),
        };
        calls.begin.splice(0..0, before);
        let is_within = matches!(end, PromptEnd::Header(_) | PromptEnd::Reasoning);
        let after = || ConstraintStart::After { marker: harmony::END.into() };
        (calls, if is_within { after() } else { ConstraintStart::Immediately })
    }

    /// Returns the pieces of a message of reasoning, which may be left out.
    fn analysis(&self) -> Piece {
        let end = self.pieces(END_AND_NEXT_MESSAGE);
        match end.first() {
            Some(Piece::Token(_)) => {
                Piece::Optional([self.pieces(ANALYSIS_HEADER), vec![Piece::AnyText], end].concat())
            }
            // Without a token for it, the end of the text would be text.
            _ => Piece::Optional(Vec::new()),
        }
    }

    /// Returns the pieces of a text. A marker is the special token of that name, if there is one.
    fn pieces(&self, literal: Literal) -> Vec<Piece> {
        let special = |name: &str| self.tokenizer.token_id(name).filter(|id| self.tokenizer.is_special(*id));
        let piece = |part: &LiteralPart| match part {
            LiteralPart::Text(text) => Piece::Text((*text).to_owned()),
            LiteralPart::Marker(marker) => {
                special(marker).map_or_else(|| Piece::Text((*marker).to_owned()), Piece::Token)
            }
        };
        literal.iter().map(piece).collect()
    }
}

/// Returns what follows in a literal after whole parts that are `begun`; `None` if it begins otherwise.
fn without_beginning(literal: Literal, begun: &str) -> Option<Literal> {
    match (begun, literal) {
        ("", _) => Some(literal),
        (_, [LiteralPart::Text(text) | LiteralPart::Marker(text), rest @ ..]) => {
            without_beginning(rest, begun.strip_prefix(text)?)
        }
        (_, []) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::vocabularies::Dice;
    use crate::text::output::{OutputEvent, OutputParser, OutputSettings, ReasoningFormat};
    use crate::text::tokenizer::tests::fixtures::write_folder;
    use crate::text::{Detokenizer, grammar_vocabulary};
    use mainstem_grammar::{Grammar, Limits, Vocabulary};
    use serde_json::{Value as Json, json};

    /// Longest answer in tokens.
    const TOKENS_MAX: usize = 500;

    /// A model's tokenizer, with markers of formats as special tokens.
    struct Model {
        tokenizer: Arc<Tokenizer>,
        vocabulary: Arc<Vocabulary>,
        eos: u32,
        /// Tokens that end strings, brackets or the answer.
        ending: Vec<u32>,
    }

    impl Model {
        fn new(markers: &[&str]) -> Model {
            let mut file: Json =
                serde_json::from_str(include_str!("../../../assets/demo/tokenizer.json")).unwrap();
            let mut next = file["model"]["vocab"].as_object().unwrap().len() as u32;
            let added = file["added_tokens"].as_array_mut().unwrap();
            for marker in markers.iter().chain(&["<|eos|>"]) {
                if added.iter().all(|token| token["content"] != *marker) {
                    let mut token = added[0].clone();
                    (token["id"], token["content"]) = (next.into(), (*marker).into());
                    added.push(token);
                    next += 1;
                }
            }
            let folder = write_folder(&json!({ "tokenizer.json": file }));
            let tokenizer = Arc::new(Tokenizer::from_folder(&folder.folder()).unwrap());
            let eos = tokenizer.token_id("<|eos|>").unwrap();
            let vocabulary = grammar_vocabulary(&tokenizer, tokenizer.vocab_size(), &[eos]).unwrap();
            let ends = |id: &u32| *id == eos || matches!(tokenizer.token_bytes(*id), b"\"" | b"}" | b"]");
            let ending = (0..tokenizer.vocab_size() as u32).filter(ends).collect();
            Model { tokenizer, vocabulary: vocabulary.into(), eos, ending }
        }

        fn context<'a>(&'a self, formats: OutputFormats, prompt: &'a str) -> ConstraintContext<'a> {
            ConstraintContext { tokenizer: &self.tokenizer, formats, prompt, is_continued: false }
        }

        /// Draws the tokens of an answer, preferring those that end strings and brackets. `None` if it is too
        /// long.
        fn answer(&self, grammar: &Grammar, dice: &mut Dice) -> Option<Vec<u32>> {
            let mut matcher = grammar.matcher();
            let mut mask = vec![0; self.vocabulary.mask_words()];
            let mut ids = Vec::new();
            while ids.len() < TOKENS_MAX {
                matcher.mask(&mut mask).unwrap();
                let is_allowed = |id: &u32| mask[*id as usize / 32] >> (id % 32) & 1 == 1;
                let ending: Vec<u32> = self.ending.iter().copied().filter(is_allowed).collect();
                let allowed: Vec<u32> = (0..self.vocabulary.size() as u32).filter(is_allowed).collect();
                let id = match dice.below(3) {
                    0 if !ending.is_empty() => *dice.pick(&ending),
                    _ => *dice.pick(&allowed),
                };
                if id == self.eos {
                    return Some(ids);
                }
                matcher.accept(id).unwrap();
                ids.push(id);
            }
            None
        }

        /// Returns the text of tokens in pieces, as the parser gets it.
        fn pieces(&self, formats: &OutputFormats, ids: &[u32]) -> Vec<String> {
            let kept = formats.markers().filter_map(|name| self.tokenizer.token_id(name)).collect();
            let mut detokenizer = Detokenizer::new(self.tokenizer.clone(), true).with_kept(kept);
            let mut pieces: Vec<String> = ids.iter().map(|id| detokenizer.push(*id)).collect();
            pieces.push(detokenizer.finish());
            pieces
        }
    }

    fn formats(calls: &str, reasoning: &str) -> OutputFormats {
        OutputFormats { calls: CallFormat::named(calls), reasoning: ReasoningFormat::named(reasoning) }
    }

    /// Returns the markers of all formats.
    fn all_markers() -> Vec<&'static str> {
        let calls = CallFormat::names().filter_map(CallFormat::named).flat_map(CallFormat::markers);
        let reasoning =
            ReasoningFormat::names().filter_map(ReasoningFormat::named).flat_map(ReasoningFormat::markers);
        let mut markers: Vec<&str> = calls.chain(reasoning).filter(|marker| marker.len() > 1).collect();
        markers.sort_unstable();
        markers.dedup();
        markers
    }

    /// Strings that look like the syntax around them.
    fn hostile_strings() -> Vec<String> {
        let others =
            ["\"", "\\", "\"}}\n</tool_call>", "\\\"", "\n", "Zürich 世界 😀", "}{][", "</parameter>"];
        let markers = all_markers().into_iter().map(str::to_owned);
        markers.chain(others.map(str::to_owned)).collect()
    }

    fn tools(choice: ToolChoice, parallel: bool) -> ToolSettings {
        let city = json!({ "type": "string", "maxLength": 10 });
        let days = json!({ "type": "array", "items": { "type": "integer", "minimum": -9, "maximum": 99 } });
        let weather = json!({ "type": "object", "properties": { "city": city, "days": days },
            "required": ["city"], "additionalProperties": false });
        let search = json!({ "type": "object", "required": ["q"], "additionalProperties": false,
            "properties": { "q": { "enum": hostile_strings() }, "free": { "type": ["string", "null"] } } });
        let tool = |name: &str, parameters: Json| {
            let function = json!({ "name": name, "parameters": parameters });
            json!({ "type": "function", "function": function })
        };
        let any = json!({ "type": "object" });
        let all = json!([
            tool("get_weather", weather),
            tool("get", any),
            tool("search-web", search),
            tool("stop", Json::Null),
        ]);
        ToolSettings { choice, parallel, ..ToolSettings::parse(Some(&all), None, None).unwrap() }
    }

    /// Parses an output, given in pieces. Returns content, reasoning, calls, and whether there are calls.
    fn read(settings: OutputSettings, pieces: &[String]) -> (String, String, Vec<(String, String)>, bool) {
        let mut parser = OutputParser::new(settings);
        let mut events: Vec<OutputEvent> = pieces.iter().flat_map(|piece| parser.push(piece)).collect();
        events.extend(parser.finish());
        let (mut content, mut reasoning, mut calls) = (String::new(), String::new(), Vec::new());
        for event in events {
            match event {
                OutputEvent::Content(text) => content += &text,
                OutputEvent::Reasoning(text) => reasoning += &text,
                OutputEvent::ToolCallStart { name, .. } => calls.push((name, String::new())),
                OutputEvent::ToolCallArguments { index, delta } => calls[index].1 += &delta,
            }
        }
        (content, reasoning, calls, parser.has_calls())
    }

    fn settings<'a>(formats: OutputFormats, tools: &ToolSettings, prompt: &'a str) -> OutputSettings<'a> {
        OutputSettings {
            calls: formats.calls,
            reasoning: formats.reasoning,
            tools: tools.tools.clone().into(),
            prompt,
            is_continued: false,
            is_constrained: false,
            whole_calls: false,
            max_calls: tools.max_calls(),
            id_seed: 0,
        }
    }

    /// Draws `count` answers with required calls, and checks that the parser reads valid calls of the tools.
    /// Returns the number of calls.
    fn check_calls(model: &Model, formats: OutputFormats, tools: &ToolSettings, count: usize) -> usize {
        let prompt = "<|start|>assistant";
        let (constraint, format) = model.context(formats, prompt).calls(tools).unwrap();
        let formats = OutputFormats { calls: Some(format), ..formats };
        let grammar = Grammar::compile(&constraint.spec, &model.vocabulary, &Limits::default()).unwrap();
        let mut dice = Dice::new(count as u32);
        let (mut done, mut calls_read) = (0, 0);
        for _ in 0..5 * count {
            let Some(ids) = model.answer(&grammar, &mut dice) else { continue };
            let pieces = model.pieces(&formats, &ids);
            let streamed = read(settings(formats, tools, prompt), &pieces);
            let whole = OutputSettings { whole_calls: true, ..settings(formats, tools, prompt) };
            assert_eq!(read(whole, &[pieces.concat()]), streamed);
            let (content, reasoning, calls, has_calls) = streamed;
            assert_eq!((content.as_str(), has_calls), ("", true), "{}", pieces.concat());
            assert!(reasoning.is_empty() || formats.is_harmony(), "{reasoning}");
            assert!((1..=tools.max_calls().min(CALLS_MAX)).contains(&calls.len()));
            for (name, arguments) in &calls {
                assert!(
                    tools.choice == ToolChoice::Required || tools.choice == ToolChoice::Named(name.clone())
                );
                let tool = tools.tools.iter().find(|tool| tool.name == *name).unwrap();
                let arguments: Json = serde_json::from_str(arguments).unwrap();
                assert!(jsonschema::is_valid(&tool.parameters, &arguments), "{name} {arguments}");
            }
            calls_read += calls.len();
            done += 1;
            if done == count {
                return calls_read;
            }
        }
        panic!("{}: {done} of {count} answers end", format.name);
    }

    #[test]
    fn every_answer_of_required_calls_is_read_as_valid_calls() {
        let [special, plain] = [Model::new(&all_markers()), Model::new(&[])];
        for name in CallFormat::names() {
            let formats = formats(name, if name == "openai" { "harmony" } else { "think" });
            for (model, count) in [(&special, 10), (&plain, 2)] {
                let many = check_calls(model, formats, &tools(ToolChoice::Required, true), count);
                let writes_many = formats.calls.unwrap().written().unwrap().1.is_parallel;
                assert!(writes_many || many == count, "{name}: {many} calls");
                assert!(!writes_many || many > count || count < 10, "{name}: {many} calls");
                let one = check_calls(model, formats, &tools(ToolChoice::Required, false), count);
                assert_eq!(one, count, "{name}");
                let named = ToolChoice::Named("search-web".into());
                assert_eq!(check_calls(model, formats, &tools(named, true), count), count, "{name}");
            }
        }
    }

    /// Beside tools that the model may call, each answer is read as one valid call or as valid content.
    #[test]
    fn every_answer_is_a_call_or_of_the_form() {
        let [special, plain] = [Model::new(&all_markers()), Model::new(&[])];
        let tools = tools(ToolChoice::Auto, true);
        let schema = json!({ "enum": hostile_strings() });
        let spec = Spec::new(Form::JsonSchema(schema.to_string().into()));
        let prompt = "<|start|>assistant";
        for (name, model) in CallFormat::names().flat_map(|name| [(name, &special), (name, &plain)]) {
            let formats = formats(name, if name == "openai" { "harmony" } else { "think" });
            let Some((constraint, format)) = model.context(formats, prompt).call_or_answer(&tools, &spec)
            else {
                let is_marked = format_begins_with_marker(formats);
                assert!(!is_marked || std::ptr::eq(model, &plain), "{name}");
                continue;
            };
            let formats = OutputFormats { calls: Some(format), ..formats };
            let grammar = Grammar::compile(&constraint.spec, &model.vocabulary, &Limits::default()).unwrap();
            let (mut dice, mut read_as) = (Dice::new(31), [0, 0]);
            for _ in 0..20 {
                let Some(ids) = model.answer(&grammar, &mut dice) else { continue };
                let pieces = model.pieces(&formats, &ids);
                let settings = OutputSettings { is_constrained: true, ..settings(formats, &tools, prompt) };
                let (content, _, calls, has_calls) = read(settings, &pieces);
                match &calls[..] {
                    [] => {
                        let value = serde_json::from_str(&content).unwrap_or(Json::Null);
                        assert!(jsonschema::is_valid(&schema, &value), "{name} {}", pieces.concat());
                        read_as[0] += 1;
                    }
                    [(called, arguments)] => {
                        assert!(content.is_empty() && has_calls, "{name} {content}");
                        let tool = tools.tools.iter().find(|tool| tool.name == *called).unwrap();
                        let arguments: Json = serde_json::from_str(arguments).unwrap();
                        assert!(jsonschema::is_valid(&tool.parameters, &arguments), "{called} {arguments}");
                        read_as[1] += 1;
                    }
                    _ => panic!("{name} {calls:?}"),
                }
            }
            assert!(read_as.iter().all(|count| *count > 0), "{name} {read_as:?}");
        }
    }

    /// Returns whether calls begin with a marker, which the model's vocabulary may have as a token.
    fn format_begins_with_marker(formats: OutputFormats) -> bool {
        let writing = formats.calls.unwrap().written().unwrap().1;
        matches!(writing.open.first().or(writing.before.first()), Some(LiteralPart::Marker(_)))
    }

    #[test]
    fn the_documentation_lists_the_formats_of_single_calls() {
        let docs = include_str!("../../../docs/tools.md");
        let row = docs.lines().find(|line| line.starts_with("| `required` |")).unwrap();
        for name in CallFormat::names() {
            let is_parallel = CallFormat::named(name).unwrap().written().unwrap().1.is_parallel;
            assert_eq!(row.contains(&format!("`{name}`")), !is_parallel, "{name}");
        }
    }

    #[test]
    fn no_constraint_without_required_calls() {
        let model = Model::new(&[]);
        for choice in [ToolChoice::Auto, ToolChoice::None] {
            assert!(model.context(formats("hermes", "none"), "").calls(&tools(choice, true)).is_none());
        }
        let required = tools(ToolChoice::Required, true);
        assert!(model.context(formats("none", "none"), "").calls(&required).is_none());
    }

    #[test]
    fn errors_name_the_tool() {
        let model = Model::new(&[]);
        let mut tools = tools(ToolChoice::Named("stop".into()), true);
        tools.tools[3].parameters = json!({ "type": "object", "properties": { "a": { "pattern": "(" } } });
        let (constraint, _) = model.context(formats("hermes", "none"), "").calls(&tools).unwrap();
        let error = Grammar::compile(&constraint.spec, &model.vocabulary, &Limits::default()).unwrap_err();
        assert!(
            error.to_string().starts_with("tools[3].function.parameters.properties.a.pattern: "),
            "{error}"
        );
    }

    #[test]
    fn answers_begin_after_reasoning() {
        use ConstraintStart::{After, Immediately, UnlessOpened};
        let [special, plain] = [Model::new(&all_markers()), Model::new(&[])];
        let open = special.tokenizer.token_id("<think>").unwrap();
        let [think, tag] = ["</think>", "[/THINK]"].map(Arc::<str>::from);
        let marker = || think.clone();
        let unless = || UnlessOpened { open, close: think.clone() };
        for (model, reasoning, prompt, is_continued, expected) in [
            (&special, "none", "<think>", false, Immediately),
            (&special, "think", "<|assistant|>", false, unless()),
            (&special, "think", "<|assistant|><think>\n", false, After { marker: marker() }),
            (&special, "think", "<|assistant|><think>\n\n</think>\n\n", false, Immediately),
            (&special, "think", "<think>\n\n</think>\n\n<|user|>So?<|assistant|>", false, unless()),
            (&special, "think", "<|assistant|><think>Half of a", true, After { marker: marker() }),
            (&special, "think", "<|assistant|><think>Hm</think>Yes", true, Immediately),
            (&special, "think", "<|assistant|>Yes", true, Immediately),
            (&special, "mistral", "[/INST][THINK]", false, After { marker: tag }),
            (&plain, "think", "<|assistant|>", false, Immediately),
            (&plain, "think", "<|assistant|><think>", false, After { marker: marker() }),
            (&plain, "granite", "<|assistant|>", false, Immediately),
        ] {
            let context = model.context(formats("none", reasoning), prompt);
            let context = ConstraintContext { is_continued, ..context };
            let spec = Spec::new(Form::JsonObject);
            assert_eq!(
                context.answer(spec.clone()),
                OutputGrammar { spec, start: expected.clone() },
                "{prompt}"
            );
            let formats = formats("hermes", reasoning);
            let (calls, _) =
                ConstraintContext { formats, ..context }.calls(&tools(ToolChoice::Required, true)).unwrap();
            assert_eq!(calls.start, expected, "{reasoning} {prompt}");
        }
    }

    #[test]
    fn harmony_answers_are_messages() {
        let model = Model::new(&all_markers());
        let schema = json!({ "enum": hostile_strings() });
        let spec = Spec::new(Form::JsonSchema(schema.to_string().into()));
        let start = "<|start|>assistant";
        let formats = formats("none", "harmony");
        let mut dice = Dice::new(1803);
        for (prompt, thought, is_final) in [
            (start.to_owned(), "", true),
            ("<|start|>user<|message|>Hi<|end|>".to_owned(), "", true),
            (format!("{start}<|channel|>"), "", true),
            (format!("{start}<|channel|>final"), "", true),
            (format!("{start}<|channel|>analysis"), "<|message|>Hm<|end|>", false),
            (format!("{start}<|channel|>analysis<|message|>"), "Hm<|end|>", false),
            (format!("{start}<|channel|>final<|message|>"), "", true),
        ] {
            let constraint = model.context(formats, &prompt).answer(spec.clone());
            let after = ConstraintStart::After { marker: "<|end|>".into() };
            let expected = if is_final { ConstraintStart::Immediately } else { after };
            assert_eq!(constraint.start, expected, "{prompt}");
            let grammar = Grammar::compile(&constraint.spec, &model.vocabulary, &Limits::default()).unwrap();
            let mut reasoned = 0;
            for _ in 0..25 {
                let Some(ids) = model.answer(&grammar, &mut dice) else { continue };
                let output = thought.to_owned() + &model.pieces(&formats, &ids).concat();
                let none = tools(ToolChoice::None, true);
                let settings = OutputSettings { is_constrained: true, ..settings(formats, &none, &prompt) };
                let (content, reasoning, calls, _) = read(settings, std::slice::from_ref(&output));
                let value = serde_json::from_str(&content).unwrap_or(Json::Null);
                assert!(jsonschema::is_valid(&schema, &value), "{prompt} {output}");
                assert_eq!(calls, []);
                reasoned += usize::from(!reasoning.is_empty());
            }
            let may_reason = prompt == start || prompt.ends_with("<|end|>") || !thought.is_empty();
            assert_eq!(reasoned > 0, may_reason, "{prompt}");
        }
    }

    #[test]
    fn harmony_calls_follow_a_message_that_is_continued() {
        let model = Model::new(&all_markers());
        let prompt = "<|start|>assistant<|channel|>final<|message|>Let me see. ";
        let (formats, tools) = (formats("openai", "harmony"), tools(ToolChoice::Required, true));
        let context = ConstraintContext { is_continued: true, ..model.context(formats, prompt) };
        let (constraint, _) = context.calls(&tools).unwrap();
        assert_eq!(constraint.start, ConstraintStart::Immediately);
        let grammar = Grammar::compile(&constraint.spec, &model.vocabulary, &Limits::default()).unwrap();
        let mut dice = Dice::new(7);
        let ids = (0..9).find_map(|_| model.answer(&grammar, &mut dice)).unwrap();
        let settings = OutputSettings { is_continued: true, ..settings(formats, &tools, prompt) };
        let (content, _, calls, has_calls) = read(settings, &model.pieces(&formats, &ids));
        assert_eq!((content.as_str(), calls.len(), has_calls), ("", 1, true));
    }
}
