//! Chat templates: they render a list of messages as the prompt format that the model was trained on. The
//! language is Jinja as `transformers` runs it. A template comes with the model's files and is not trusted:
//! it has no access to files or the environment, and its number of instructions, its output and the texts
//! that it makes are limited ([`super::template_limits`]).
//!
//! Invariant: rendering is deterministic, except for templates that read the current time.

use super::jinja::{self, Clock, RaisedException};
use super::output::{CallFormat, ReasoningFormat};
use super::template_limits;
use anyhow::{Context, Result, anyhow};
use jiff::Zoned;
use minijinja::{Environment, Error, ErrorKind, Value};
use serde_json::{Map, Value as Json, json};
use std::collections::BTreeMap;
use std::error::Error as _;
use std::fmt;
use std::io;

/// Maximum size of a rendered prompt in bytes.
const TEXT_BYTES_MAX: usize = 64 << 20;

/// Maximum bytes of what one rendering makes: its output, and texts and lists on the way to it.
pub const RENDERING_BYTES_MAX: usize = TEXT_BYTES_MAX + template_limits::ALL_MAX;

/// Marker that is appended to the final message to find its end in the rendered text. Templates may trim its
/// trailing space.
const END_MARKER: &str = "<mainstem:the-final-message-goes-on> ";

/// User message that is rendered to detect which form of content a template reads.
const PROBE: &str = "mainstem:probe";

/// A compiled template.
pub struct ChatTemplate {
    env: Environment<'static>,
    /// Origin of the template's source; also the template's name.
    origin: String,
    source: String,
    /// The model's special tokens by name, such as `bos_token`.
    special: Vec<(String, Value)>,
    content_form: ContentForm,
    /// Whether the template reads the arguments of tool calls as text rather than as an object.
    reads_arguments_as_text: bool,
    /// Whether the template can render a message of the assistant with tool calls and no content.
    reads_absent_content: bool,
    call_format: Option<&'static CallFormat>,
    reasoning_format: Option<&'static ReasoningFormat>,
}

/// A conversation, and options for rendering it.
#[derive(Clone, Copy, Debug)]
pub struct Chat<'a> {
    pub messages: &'a [Message],
    /// Definitions of tools, as in the API; templates that do not show tools ignore them.
    pub tools: &'a [Json],
    /// Start the assistant's message at the end.
    pub add_generation_prompt: bool,
    /// Leave the final message open, so that the model continues it.
    pub continue_final_message: bool,
    /// Additional template variables; they override special tokens of the same name.
    pub kwargs: &'a Map<String, Json>,
}

/// A message of a conversation.
#[derive(Clone, Debug, PartialEq)]
pub struct Message {
    pub role: String,
    /// `None` if the message has tool calls only. A template that cannot render that gets an empty text.
    pub content: Option<Content>,
    /// Other fields, unchanged: `name`, `tool_call_id`, `reasoning_content`, and `tool_calls` as
    /// [`parse_message_calls`](super::tools::parse_message_calls) returns them.
    pub extra: Map<String, Json>,
}

/// Content of a message.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    Text(String),
    /// Parts of text. A template that does not support parts gets one text, with the parts as its lines.
    Parts(Vec<String>),
}

/// Error of rendering a template.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// The template rejected the conversation, or its variables are invalid: an error of the client.
    #[error("{0}")]
    Rejected(String),
    /// The template failed; the message contains its name and the line.
    #[error("the chat template failed: {0}")]
    Failed(String),
}

/// Form of message content that a template reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ContentForm {
    Text,
    Parts,
    Either,
}

impl ChatTemplate {
    /// Compiles the template `source`, with the special tokens by name. Errors name `origin` and the line.
    pub fn new(origin: &str, source: &str, special: BTreeMap<String, String>) -> Result<ChatTemplate> {
        ChatTemplate::with_clock(origin, source, special, Zoned::now)
    }

    fn with_clock(
        origin: &str,
        source: &str,
        special: BTreeMap<String, String>,
        clock: Clock,
    ) -> Result<ChatTemplate> {
        let mut env = jinja::environment(clock);
        jinja::convert(&mut env, source)
            .and_then(|source| env.add_template_owned(origin.to_string(), source))
            .map_err(|error| anyhow!(describe_error(origin, &error)))
            .context("the chat template cannot be compiled")?;
        let special = special.into_iter().map(|(name, token)| (name, Value::from(token))).collect();
        let mut template = ChatTemplate {
            env,
            origin: origin.to_string(),
            source: source.to_string(),
            special,
            content_form: ContentForm::Text,
            reads_arguments_as_text: false,
            reads_absent_content: false,
            call_format: CallFormat::detect(source),
            reasoning_format: ReasoningFormat::detect(source),
        };
        template.content_form = template.detect_content_form();
        template.reads_arguments_as_text = template.detect_arguments_as_text();
        template.reads_absent_content = template.detect_absent_content();
        Ok(template)
    }

    /// Returns the template as it was written.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Returns the format of tool calls that the template's source indicates. `None` if the template does not
    /// show tools.
    pub fn call_format(&self) -> Option<&'static CallFormat> {
        self.call_format
    }

    /// Returns the format of reasoning that the template's source indicates.
    pub fn reasoning_format(&self) -> Option<&'static ReasoningFormat> {
        self.reasoning_format
    }

    /// Renders the prompt for `chat`.
    pub fn render(&self, chat: &Chat) -> Result<String, TemplateError> {
        let reserved = ["messages", "add_generation_prompt"];
        if let Some(name) = reserved.into_iter().find(|name| chat.kwargs.contains_key(*name)) {
            return Err(TemplateError::Rejected(format!("chat_template_kwargs must not set '{name}'")));
        }
        if !chat.continue_final_message {
            return self.render_messages(chat, chat.messages);
        }
        let mut messages = chat.messages.to_vec();
        let last =
            messages.last_mut().and_then(|message| message.content.as_mut()).and_then(Content::last_mut);
        let Some(last) = last else {
            let message = "'continue_final_message' needs a final message with text".to_string();
            return Err(TemplateError::Rejected(message));
        };
        let content = last.trim().to_string();
        last.push_str(END_MARKER);
        let text = self.render_messages(chat, &messages)?;
        truncate_at_marker(text, &content)
    }

    fn render_messages(&self, chat: &Chat, messages: &[Message]) -> Result<String, TemplateError> {
        let messages: Value = messages.iter().map(|message| self.message_value(message)).collect();
        let nothing = ["tools", "documents"].map(|name| (name, Value::from(())));
        let special = self.special.iter().map(|(name, token)| (name.as_str(), token.clone()));
        let kwargs = chat.kwargs.iter().map(|(name, value)| (name.as_str(), to_template_value(value)));
        let usual = [("messages", messages), ("add_generation_prompt", chat.add_generation_prompt.into())];
        let tools = Some(chat.tools).filter(|tools| !tools.is_empty());
        let tools = tools.map(|tools| ("tools", tools.iter().map(to_template_value).collect::<Value>()));
        let variables = nothing.into_iter().chain(special).chain(kwargs).chain(usual).chain(tools);
        let mut text = LimitedWriter(Vec::new());
        let template = self.env.get_template(&self.origin).expect("the template was added; this is a bug");
        template
            .render_captured_to(Value::from_pairs(variables), &mut text)
            .map_err(|error| self.template_error(&error))?;
        Ok(String::from_utf8(text.0).expect("a template writes UTF-8; this is a bug"))
    }

    fn message_value(&self, message: &Message) -> Value {
        let empty = Content::Text(String::new());
        let content = message.content.as_ref().or((!self.reads_absent_content).then_some(&empty));
        let content = content.map(|content| match (content, self.content_form) {
            (Content::Text(text), ContentForm::Parts) => text_parts(std::slice::from_ref(text)),
            (Content::Text(text), _) => text.into(),
            (Content::Parts(texts), ContentForm::Text) => texts.join("\n").into(),
            (Content::Parts(texts), _) => text_parts(texts),
        });
        let fields = [("role", Value::from(&message.role)), ("content", content.into())];
        let extra = message.extra.iter().map(|(name, value)| {
            let value = match value.as_array() {
                Some(calls) if name == "tool_calls" && self.reads_arguments_as_text => {
                    calls.iter().map(call_with_text).collect()
                }
                _ => to_template_value(value),
            };
            (name.as_str(), value)
        });
        Value::from_pairs(fields.into_iter().chain(extra))
    }

    /// Detects which form of content the template reads: parts are supported if they render as the plain text
    /// does.
    fn detect_content_form(&mut self) -> ContentForm {
        let mut with = |takes| {
            self.content_form = takes;
            let text = self.render_probe(&[Message::new("user", PROBE)]);
            text.filter(|text| text.contains(PROBE))
        };
        // Quotes around the probe mean that the template printed the list itself.
        let read =
            |text: &String| !text.contains(&format!("'{PROBE}'")) && !text.contains(&format!("\"{PROBE}\""));
        match (with(ContentForm::Text), with(ContentForm::Parts)) {
            (None, Some(parts)) if read(&parts) => ContentForm::Parts,
            (Some(text), Some(parts)) if text == parts => ContentForm::Either,
            _ => ContentForm::Text,
        }
    }

    /// Detects whether the template can render the arguments of a tool call only as text.
    fn detect_arguments_as_text(&mut self) -> bool {
        let messages = [Message::new("user", PROBE), probe_call()];
        [false, true].map(|as_text| {
            self.reads_arguments_as_text = as_text;
            self.render_probe(&messages).is_some()
        }) == [false, true]
    }

    /// Detects whether the template renders absent content beside tool calls, and not as a word for it.
    fn detect_absent_content(&mut self) -> bool {
        let messages = [Message::new("user", PROBE), Message { content: None, ..probe_call() }];
        let [empty, absent] = [false, true].map(|is_read| {
            self.reads_absent_content = is_read;
            self.render_probe(&messages)
        });
        let words = |text: String| ["none", "None", "null"].map(|word| text.matches(word).count());
        match (empty.map(words), absent.map(words)) {
            (_, None) => false,
            (None, Some(_)) => true,
            (Some(empty), Some(absent)) => empty.iter().zip(absent).all(|(empty, absent)| absent <= *empty),
        }
    }

    /// Renders messages without options. `None` if that fails.
    fn render_probe(&self, messages: &[Message]) -> Option<String> {
        let kwargs = Map::new();
        let chat = Chat {
            messages,
            tools: &[],
            add_generation_prompt: false,
            continue_final_message: false,
            kwargs: &kwargs,
        };
        self.render(&chat).ok()
    }

    /// Converts an error of the template engine.
    fn template_error(&self, error: &Error) -> TemplateError {
        let mut cause: Option<&dyn std::error::Error> = Some(error);
        while let Some(at) = cause {
            if let Some(RaisedException(message)) = at.downcast_ref() {
                return TemplateError::Rejected(message.clone());
            }
            cause = at.source();
        }
        TemplateError::Failed(match error.kind() {
            ErrorKind::OutOfFuel => format!("{}: the template does not terminate", self.origin),
            ErrorKind::WriteFailure => format!("{}: the rendered text is too long", self.origin),
            _ => describe_error(&self.origin, error),
        })
    }
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ChatTemplate({})", self.origin)
    }
}

impl Message {
    /// Creates a message with one text.
    pub fn new(role: impl Into<String>, text: impl Into<String>) -> Message {
        Message { role: role.into(), content: Some(Content::Text(text.into())), extra: Map::new() }
    }
}

impl Content {
    /// Returns the last text.
    fn last_mut(&mut self) -> Option<&mut String> {
        match self {
            Content::Text(text) => Some(text),
            Content::Parts(texts) => texts.last_mut(),
        }
    }
}

/// Returns a message of the assistant with a tool call and empty content, to probe templates.
fn probe_call() -> Message {
    let function = json!({"name": "probe", "arguments": {"probe": 1}});
    let call = json!([{"id": "probe0000", "type": "function", "function": function}]);
    let extra = Map::from_iter([("tool_calls".to_owned(), call)]);
    Message { extra, ..Message::new("assistant", "") }
}

/// Truncates a rendered text at the end marker of the final message, whose trimmed text is `content`.
fn truncate_at_marker(mut text: String, content: &str) -> Result<String, TemplateError> {
    let Some(end) = text.rfind(END_MARKER.trim_end()).filter(|_| text.contains(content)) else {
        let message = "'continue_final_message': the chat template changes or omits the final message";
        return Err(TemplateError::Rejected(message.to_string()));
    };
    let is_whole = text[end..].starts_with(END_MARKER);
    text.truncate(end);
    // A template that trims the marker's space would have trimmed the message's own.
    if !is_whole {
        text.truncate(text.trim_end().len());
    }
    Ok(text)
}

/// Formats the innermost error with the template's name and line.
fn describe_error(origin: &str, error: &Error) -> String {
    let mut error = error;
    while let Some(inner) = error.source().and_then(|source| source.downcast_ref()) {
        error = inner;
    }
    let line = error.line().map(|line| format!(", line {line}")).unwrap_or_default();
    let detail = error.detail().map(|detail| format!(": {detail}")).unwrap_or_default();
    format!("{origin}{line}: {}{detail}", error.kind())
}

/// Converts texts to a list of parts of type "text".
fn text_parts(texts: &[String]) -> Value {
    texts.iter().map(|text| Value::from_pairs([("type", "text"), ("text", text)])).collect()
}

/// Converts a tool call to a template value, with its arguments as text.
fn call_with_text(call: &Json) -> Value {
    let mut call = call.clone();
    if let Some(arguments) = call.pointer_mut("/function/arguments")
        && !arguments.is_string()
    {
        *arguments = Json::String(jinja::to_json_text(&to_template_value(arguments)));
    }
    to_template_value(&call)
}

/// Converts a JSON value to a template value.
fn to_template_value(json: &Json) -> Value {
    match json {
        Json::Null => ().into(),
        Json::Bool(value) => (*value).into(),
        Json::String(text) => text.into(),
        Json::Array(items) => items.iter().map(to_template_value).collect(),
        Json::Object(fields) => {
            Value::from_pairs(fields.iter().map(|(name, value)| (name, to_template_value(value))))
        }
        Json::Number(number) => match (number.as_i64(), number.as_u64()) {
            (Some(number), _) => number.into(),
            (_, Some(number)) => number.into(),
            _ => number.as_f64().unwrap_or(f64::NAN).into(),
        },
    }
}

/// Writer for rendered text with a size limit.
struct LimitedWriter(Vec<u8>);

impl io::Write for LimitedWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > TEXT_BYTES_MAX {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::{Path, PathBuf};

    /// Expressions with other results than in Python; no known template needs them.
    const DIFFERENT: &[&str] = &[
        "'%s is %d years and %.2f' % ('Ann', 30, 1.5)",
        "'%s' % 'one'",
        "'%05d|%-4s|%x' % (42, 'ab', 255)",
        "'%r' % 'q'",
        "'%%' % ()",
        "'\\U0001F600'",
        "1e16",
        "0.00001",
        "1.0e-10",
        "[1e16, 0.00001]",
        "'x'.center(4, '*')",
        "'7'.zfill(3)",
        "'Ab'.swapcase()",
        "'a\\tb'.expandtabs(4)",
        "'banana'.find('an', 2)",
        "'one two three' | wordcount",
        "'one two three four' | truncate(9)",
        "1 is callable",
    ];

    fn fixtures() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/chat")
    }

    fn read_json(path: &Path) -> Json {
        serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
    }

    /// Returns the time at which the expected results were recorded.
    fn recording_time() -> Zoned {
        jiff::civil::date(2025, 3, 4).at(15, 6, 7, 0).to_zoned(jiff::tz::TimeZone::UTC).unwrap()
    }

    fn special(file: &Json) -> BTreeMap<String, String> {
        serde_json::from_value(file["special"].clone()).unwrap()
    }

    fn template(source: &str) -> ChatTemplate {
        ChatTemplate::with_clock("a.jinja", source, BTreeMap::new(), recording_time).unwrap()
    }

    fn message(json: &Json) -> Message {
        let mut extra = json.as_object().unwrap().clone();
        let role = extra.remove("role").unwrap().as_str().unwrap().to_string();
        let content = match extra.remove("content").unwrap() {
            Json::String(text) => Some(Content::Text(text)),
            Json::Array(parts) => {
                let text = |part: &Json| part["text"].as_str().unwrap().to_string();
                Some(Content::Parts(parts.iter().map(text).collect()))
            }
            _ => None,
        };
        Message { role, content, extra }
    }

    fn messages(json: &Json) -> Vec<Message> {
        json.as_array().unwrap().iter().map(message).collect()
    }

    /// Returns whether the result equals the recorded one: the text, the rejection, or a failure.
    fn agrees(outcome: &Result<String, TemplateError>, recorded: &Json) -> bool {
        match outcome {
            Ok(text) => recorded["text"] == text.as_str(),
            Err(TemplateError::Rejected(message)) if recorded.get("refused").is_some() => {
                recorded["refused"] == message.as_str()
            }
            Err(_) => recorded.get("failed").is_some(),
        }
    }

    fn render(template: &ChatTemplate, messages: &[Message]) -> Result<String, TemplateError> {
        let kwargs = Map::new();
        template.render(&Chat {
            messages,
            tools: &[],
            add_generation_prompt: true,
            continue_final_message: false,
            kwargs: &kwargs,
        })
    }

    #[test]
    fn templates_give_what_transformers_gives() {
        let entries = std::fs::read_dir(fixtures()).unwrap().map(|entry| entry.unwrap().path());
        let paths: Vec<_> = entries.filter(|path| path.extension().is_some_and(|e| e == "jinja")).collect();
        assert!(paths.len() >= 10);
        let mut wrong = Vec::new();
        for path in paths {
            let file = read_json(&path.with_extension("json"));
            let (name, source) = (path.display().to_string(), std::fs::read_to_string(&path).unwrap());
            let template = ChatTemplate::with_clock(&name, &source, special(&file), recording_time).unwrap();
            for case in file["cases"].as_array().unwrap() {
                let outcome = template.render(&Chat {
                    messages: &messages(&case["messages"]),
                    tools: &[],
                    add_generation_prompt: case["add_generation_prompt"] == true,
                    continue_final_message: case["continue_final_message"] == true,
                    kwargs: case["kwargs"].as_object().unwrap(),
                });
                if !agrees(&outcome, case) {
                    wrong.push(format!("{name}: {case}\n  here: {outcome:?}"));
                }
            }
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    }

    #[test]
    fn expressions_give_what_python_gives() {
        let file = read_json(&fixtures().join("expressions.json"));
        let messages = messages(&file["messages"]);
        let mut different = Vec::new();
        for case in file["expressions"].as_array().unwrap() {
            let expression = case["expression"].as_str().unwrap();
            let source = format!("{{{{ {expression} }}}}");
            let template = ChatTemplate::new("a.jinja", &source, special(&file));
            let outcome = match &template {
                Ok(template) => render(template, &messages),
                Err(error) => Err(TemplateError::Failed(format!("{error:#}"))),
            };
            if !agrees(&outcome, case) {
                eprintln!("{expression}: {case}\n  here: {outcome:?}");
                different.push(expression);
            }
        }
        assert_eq!(different, DIFFERENT);
    }

    #[test]
    fn the_form_of_content_is_detected() {
        for (name, takes) in [
            ("chatml", ContentForm::Text),
            ("folded", ContentForm::Text),
            ("tools", ContentForm::Text),
            ("thinking", ContentForm::Text),
            ("either", ContentForm::Either),
            ("typed", ContentForm::Parts),
        ] {
            let source = std::fs::read_to_string(fixtures().join(name).with_extension("jinja")).unwrap();
            assert_eq!(template(&source).content_form, takes, "{name}");
        }
        // A template that needs a variable which the probe does not set cannot be probed.
        assert_eq!(template("{{ needed.inner }}{{ messages[0].content }}").content_form, ContentForm::Text);
    }

    #[test]
    fn line_endings_are_normalized() {
        let written = template("{% if true %}\r\na\r\n{{ 'b\r\nc' }}\r{% endif %}\r\n");
        assert_eq!(render(&written, &[]).unwrap(), "a\nb\nc\n");
    }

    #[test]
    fn syntax_errors_name_the_line() {
        let error = ChatTemplate::new("some/chat.jinja", "a\n{% if %}", BTreeMap::new()).err().unwrap();
        assert!(format!("{error:#}").contains("some/chat.jinja, line 2: syntax error"), "{error:#}");
    }

    #[test]
    fn failures_name_the_line_and_rejections_keep_their_message() {
        let messages = [Message::new("user", "hi")];
        let failed = |source: &str| match render(&template(source), &messages) {
            Err(TemplateError::Failed(message)) => message,
            other => panic!("{source}: {other:?}"),
        };
        assert!(failed("\n{{ messages[0].no.thing }}").starts_with("a.jinja, line 2: undefined value"));
        assert!(failed("\n{% macro m() %}\n{{ none.x() }}{% endmacro %}{{ m() }}").contains("line 3"));
        assert!(failed("{{ strftime_now('%!') }}").contains("line 1"));
        for source in ["{% include 'Cargo.toml' %}", "{% import '/etc/hostname' as x %}", "{{ debug() }}"] {
            failed(source);
        }
        let refused = Err(TemplateError::Rejected("not so".into()));
        let source = "{% macro m() %}{{ raise_exception('not so') }}{% endmacro %}{{ m() }}";
        assert_eq!(render(&template(source), &messages), refused);
    }

    #[test]
    fn an_endless_template_ends() {
        let loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}";
        let long = "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}";
        for (source, part) in [
            (loops, "the template does not terminate"),
            (long, "the rendered text is too long"),
            ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion limit"),
        ] {
            let error = render(&template(source), &[]).unwrap_err();
            assert!(error.to_string().contains(part), "{source}: {error}");
        }
    }

    /// Each was 2 GB and more, or an abort.
    #[test]
    fn a_template_that_multiplies_texts_ends_with_an_error() {
        let sixty = |step: &str| {
            let steps = format!("{{% for i in range(60) %}}{step}{{% endfor %}}");
            format!("{{% set n = namespace(s='abcd' * 4096) %}}{steps}{{{{ n.s|length }}}}")
        };
        for (source, part) in [
            (sixty("{% set n.s = n.s ~ n.s %}"), "too long"),
            (sixty("{% set n.s = (n.s) ~ (n.s ~ '') %}"), "too long"),
            (sixty("{% set n.s = n.s + n.s %}"), "too long"),
            (sixty("{% set n.s = n.s * 2 %}"), "too long"),
            (sixty("{% set n.s = [n.s, n.s]|join %}"), "too long"),
            (sixty("{% set n.s = ''.join([n.s, n.s]) %}"), "too long"),
            (sixty("{% set n.s = n.s|replace('a', 'aa')|replace('b', n.s) %}"), "too long"),
            (sixty("{% set n.s = n.s.replace('a', n.s) %}"), "too long"),
            (sixty("{% set t %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = t %}"), "too long"),
            (sixty("{% set n.s = [n.s, n.s] %}") + "{{ n.s }}", "too long"),
            (sixty("{% set n.s = [n.s, n.s] %}") + "{{ (n.s ~ '')|length }}", "too long"),
            (sixty("{% set n.s = [n.s, n.s] %}") + "{{ n.s|string|length }}", "too long"),
            (sixty("{% set n.s = [n.s, n.s] %}") + "{{ n.s|tojson|length }}", "too long"),
            ("{{ ('a\\nb' * 9)|indent(9999999999) }}".to_owned(), "too long"),
            ("{{ 'a'|indent(width=9999999999, first=true) }}".to_owned(), "too long"),
            ("{{ '%999999999d'|format(7) }}".to_owned(), "too long"),
            ("{{ '{:>999999999}'.format(7) }}".to_owned(), "too long"),
            ("{{ ('%' ~ '9' * 9 ~ 'd')|format(7) }}".to_owned(), "too long"),
            ("{{ 'x' * 90000000 }}".to_owned(), "too long"),
            ("{{ ([1] * 90000000)|length }}".to_owned(), "too long"),
        ] {
            let error = render(&template(&source), &[]).unwrap_err();
            assert!(error.to_string().contains(part), "{source}: {error}");
        }
        let long = "{# #}".repeat(300_000);
        assert!(ChatTemplate::new("a.jinja", &long, BTreeMap::new()).is_err());
        assert!(ChatTemplate::new("a.jinja", "{% set __mainstem_made = 1 %}", BTreeMap::new()).is_err());
    }

    /// A block or a macro makes a text of its own: each would be gigabytes or more.
    #[test]
    fn a_template_that_repeats_its_own_text_ends_with_an_error() {
        let repeat = |body: &str| format!("{{% for i in range(99999) %}}{body}{{% endfor %}}");
        let text = "a text of the template itself ".repeat(2000);
        let assign = |body: &str| format!("{{% set x %}}{body}{{% endset %}}");
        let defined = format!("{{% macro m() %}}{text}{{% endmacro %}}{{% set n = namespace(l=[]) %}}");
        let caller = "{% macro m() %}{{ caller() }}{% endmacro %}";
        let called = repeat(&format!("{{% call m() %}}{text}{{% endcall %}}"));
        for source in [
            assign(&repeat(&text)),
            repeat(&assign(&text)),
            format!("{{% filter upper %}}{}{{% endfilter %}}", repeat(&text)),
            defined + &repeat("{% set n.l = n.l + [m()] %}"),
            caller.to_owned() + &assign(&called),
            format!("{{% block b %}}{text}{{% endblock %}}") + &assign(&repeat("{{ self.b() }}")),
        ] {
            let error = render(&template(&source), &[]).unwrap_err();
            assert!(error.to_string().contains("does not terminate"), "{}: {error}", &source[..100]);
        }
        // The same text is written to the result, where it is counted, and a short one is no danger.
        let error = render(&template(&repeat(&text)), &[]).unwrap_err();
        assert!(error.to_string().contains("the rendered text is too long"), "{error}");
        let short = assign("{% for i in range(9999) %}{% for i in range(9) %}ab {% endfor %}{% endfor %}");
        assert_eq!(render(&template(&(short + "{{ x|length }}")), &[]).unwrap(), "269973");
    }

    /// Copies of a text by operators, filters and methods, and texts of a list with 2^60 items.
    const COPIES: &str = "s|upper;s|lower;s|title;s|capitalize;s|trim;s|e;s|reverse;s|list;s|split;s|indent;\
        s|replace('c', 'd');s|string;s|tojson;s|pprint;n.d|join;n.d|map('upper')|list;\
        s.upper();s.strip();s.split(' ');s.rsplit(' ');s.splitlines();s.replace('c', 'd');\
        s.removeprefix('x');''.join(n.d);s ~ '';s + '';s * 1;'%s'|format(s);'{}'.format(s)";
    const WHOLE: &str = "n.d|upper;n.d|title;n.d|trim;n.d|e;n.d|indent;n.d|join;n.d|pprint;n.d|list|join;\
        n.d|tojson;n.d|replace('a', 'b');'%s'|format(n.d);'{}'.format(n.d);raise_exception(n.d);[n.d]|join;\
        [1]|batch(999999999, 0)|length;[1]|slice(999999999)|length";

    #[test]
    fn a_template_that_keeps_copies_ends_with_an_error() {
        // Nearly all that a template may make counts as made before.
        let before = "{% for i in range(16) %}{% set b = [1]|batch(500000) %}{% endfor %}\
                      {% set b = [1]|batch(350000) %}{% set s = 'ab ' * 100000 %}\
                      {% set n = namespace(l=[], d=[s]) %}";
        let kept = |copy: &str| {
            format!("{before}{{% for i in range(9999) %}}{{% set n.l = n.l + [{copy}] %}}{{% endfor %}}")
        };
        let nested = "{% set n = namespace(d=['x' * 1000000]) %}\
                      {% for i in range(60) %}{% set n.d = [n.d, n.d] %}{% endfor %}";
        let whole = |value: &str| format!("{nested}{{{{ {value} }}}}");
        for source in COPIES.split(';').map(kept).chain(WHOLE.split(';').map(whole)) {
            let error = render(&template(&source), &[]).map(|text| text.len()).unwrap_err();
            assert!(error.to_string().contains("too long"), "{source}: {error}");
        }
    }

    #[test]
    fn operators_give_what_they_give_without_limits() {
        for (source, expected) in [
            ("{{ 1 ~ 2 ~ [3] ~ none ~ 'a' * 3 }}", "12[3]Noneaaa"),
            ("{{ ('a' ~ 'b') ~ ('c' ~ ('d' ~ 'e')) }}", "abcde"),
            ("{{ 1~2~3 }} {{ 2*3*4 }} {{ 'a'~'b'*2*2~1 }}", "123 24 abbbb1"),
            ("{{ 'a'|upper ~ 'B'|lower ~ 'c' if 1 + 1 == 2 else 'x' }}", "Abc"),
            ("{{ 2 * 3 * 4 + 10 % 4 * 2 }}", "28"),
            ("{{ 2.5 * 2 }} {{ 7 // 2 * 2 }} {{ -2 * 3 }} {{ 2 ** 3 * 2 }}", "5.0 6 -6 16"),
            ("{{ '%s-%03d'|format('a', 7) }} {{ '{:.2f}'.format(1.5) }} {{ 10 % 3 }}", "a-007 1.50 1"),
            ("{{ ([1] + [2]) * 2 }} {{ 2 * 'ab' }}", "[1, 2, 1, 2] abab"),
            ("{% macro m(s) %}{{ s ~ '!' }}{% endmacro %}{{ m('a' ~ m('b')) * 2 }}", "ab!!ab!!"),
            ("{% set x = 'a' ~\n 'b' %}{{ x }}\n{{ 'c'\n ~ 'd' }}", "ab\ncd"),
            ("{{ {'a' ~ 'b': 1 * 2}['a' ~ 'b'] }}{{ [1, 2 * 2][0 + 1:] }}", "2[4]"),
            ("{{ 'a*b~c' ~ 'd*e~f' }}{{ 'ä' ~ 'ö' * 2 ~ 'ü' }}", "a*b~cd*e~fäööü"),
        ] {
            assert_eq!(render(&template(source), &[]).unwrap(), expected, "{source}");
        }
    }

    #[test]
    fn a_long_conversation_is_far_from_the_limits() {
        let source = std::fs::read_to_string(fixtures().join("dated.jinja")).unwrap();
        let messages: Vec<_> = (0..10_000).map(|i| Message::new("user", format!("{i}."))).collect();
        let text = render(&template(&source), &messages).unwrap();
        assert!(text.contains("9998.") && text.contains("9999."));
    }

    #[test]
    fn reserved_variables_cannot_be_set() {
        let kwargs = Map::from_iter([("messages".to_string(), Json::Null)]);
        let chat = Chat {
            messages: &[],
            tools: &[],
            add_generation_prompt: true,
            continue_final_message: false,
            kwargs: &kwargs,
        };
        let error = template("{{ messages }}").render(&chat).unwrap_err();
        let message = "chat_template_kwargs must not set 'messages'".to_string();
        assert_eq!(error, TemplateError::Rejected(message));
    }

    #[test]
    fn only_a_message_that_is_shown_can_be_continued() {
        let kwargs = Map::new();
        let render_open = |messages: &[Message], source: &str| {
            template(source).render(&Chat {
                messages,
                tools: &[],
                add_generation_prompt: false,
                continue_final_message: true,
                kwargs: &kwargs,
            })
        };
        let hi = [Message::new("assistant", "hi ")];
        assert_eq!(render_open(&hi, "<{{ messages[0].content }}>").unwrap(), "<hi ");
        assert_eq!(render_open(&hi, "<{{ messages[0].content | trim }}>").unwrap(), "<hi");
        let silent = [Message { content: None, ..hi[0].clone() }];
        for (messages, source) in [
            (&hi[..], "hidden"),
            (&hi, "{{ messages[0].content | upper }}"),
            (&[], "{{ messages }}"),
            (&silent, "{{ messages[0].content }}"),
        ] {
            assert!(matches!(render_open(messages, source), Err(TemplateError::Rejected(_))), "{source}");
        }
    }

    /// Renders a call and its result after a question, with the definition of a tool.
    fn render_call(template: &ChatTemplate) -> Result<String, TemplateError> {
        let call = json!([{"id": "abcdefghi", "type": "function",
                           "function": {"name": "add", "arguments": {"b": [1, "x"], "a": null}}}]);
        let calls = Map::from_iter([("tool_calls".to_string(), call)]);
        let result = Map::from_iter([("tool_call_id".to_string(), "abcdefghi".into())]);
        let messages = [
            Message::new("user", "1+1?"),
            Message { extra: calls, ..Message::new("assistant", "") },
            Message { extra: result, ..Message::new("tool", "2") },
        ];
        let tools = [json!({"type": "function", "function": {
            "name": "add", "description": "Adds", "parameters": {"properties": {"a": {}, "b": {}}}}})];
        let kwargs = Map::new();
        template.render(&Chat {
            messages: &messages,
            tools: &tools,
            add_generation_prompt: true,
            continue_final_message: false,
            kwargs: &kwargs,
        })
    }

    #[test]
    fn arguments_are_text_only_where_an_object_cannot_be_rendered() {
        let each =
            "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ WHAT }}{% endfor %}{% endfor %}";
        let of = |expression: &str| template(&each.replace("WHAT", expression));
        for (expression, text) in [
            ("c.function.arguments | tojson", r#"{"b": [1, "x"], "a": null}"#),
            ("c.function.arguments.keys() | join", "ba"),
            ("'<' + c.function.arguments + '>'", r#"<{"b": [1, "x"], "a": null}>"#),
            ("c.id", "abcdefghi"),
        ] {
            assert_eq!(render_call(&of(expression)).unwrap(), text, "{expression}");
        }
        assert!(of("'<' + c.function.arguments + '>'").reads_arguments_as_text);
        assert!(!of("c.function.arguments.items() + 1").reads_arguments_as_text);
    }

    #[test]
    fn absent_content_stays_absent_where_the_template_can_render_it() {
        let each = "{% for m in messages %}{% if m.role == 'assistant' %}<{{ WHAT }}>{% endif %}{% endfor %}";
        let calls = Message { content: None, ..probe_call() };
        for (expression, text) in [
            // As DeepSeek V3 does.
            ("'call' if m.content is none else 'text'", "<call>"),
            ("m.content or 'nothing'", "<nothing>"),
            ("m.content", "<>"),
            ("m.content | trim", "<>"),
            ("m.content | tojson", "<\"\">"),
            ("'[' + m.content + ']'", "<[]>"),
            ("m.content.strip()", "<>"),
        ] {
            let messages = [Message::new("user", "None"), calls.clone()];
            let rendered = render(&template(&each.replace("WHAT", expression)), &messages);
            assert_eq!(rendered.unwrap(), text, "{expression}");
        }
        let parts = "{% for m in messages %}{% for p in m.content %}{{ p.text }};{% endfor %}{% endfor %}";
        let rendered = render(&template(parts), &[Message::new("user", "a"), calls.clone()]);
        assert_eq!(rendered.unwrap(), "a;");
        for file in fs_templates() {
            let source = std::fs::read_to_string(&file).unwrap();
            let one = template(&source);
            let [empty, absent] = [probe_call(), calls.clone()]
                .map(|answer| render(&one, &[Message::new("user", PROBE), answer]));
            assert_eq!(absent, empty, "{}: nothing but the content differs", file.display());
        }
    }

    /// Returns the template files of the fixtures.
    fn fs_templates() -> Vec<PathBuf> {
        let files = std::fs::read_dir(fixtures()).unwrap().map(|entry| entry.unwrap().path());
        files.filter(|file| file.extension().is_some_and(|name| name == "jinja")).collect()
    }

    #[test]
    fn the_demo_model_is_shown_tools_calls_and_results() {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo/tokenizer_config.json");
        let source = read_json(&file)["chat_template"].as_str().unwrap().to_string();
        let demo = template(&source);
        assert_eq!(demo.call_format().unwrap().name, "json");
        assert!(demo.reasoning_format().is_none());
        let expected = r#"<|begin|><|system|>You can call these functions:
add(a, b): Adds
To call one, answer with {"name": its name, "arguments": {its arguments}}.<|end|><|user|>1+1?<|end|>
<|assistant|>{"name": "add", "arguments": {"b": [1, "x"], "a": null}}<|end|><|user|>2<|end|><|assistant|>"#;
        let expected = expected.replace("<|end|>\n", "<|end|>");
        assert_eq!(render_call(&demo).unwrap(), expected);
        assert_eq!(
            render(&demo, &[Message::new("user", " hi ")]).unwrap(),
            "<|begin|><|user|>hi<|end|><|assistant|>"
        );
        let bare = template(&source);
        let kwargs = Map::new();
        let tools = [json!({"type": "function", "function": {"name": "stop", "description": null}})];
        let text = bare.render(&Chat {
            messages: &[Message::new("system", "s")],
            tools: &tools,
            add_generation_prompt: false,
            continue_final_message: false,
            kwargs: &kwargs,
        });
        assert!(text.unwrap().contains("functions:\nstop()\nTo call"));
        assert!(matches!(render(&demo, &[Message::new("robot", "x")]), Err(TemplateError::Rejected(_))));
    }
}
