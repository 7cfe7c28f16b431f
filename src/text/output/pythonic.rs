//! Calls in Python's syntax: `[get_weather(city="Paris", days=2), stop()]`.
//!
//! Invariant: values are literals; each is returned as JSON once it is complete.

use super::events::{EventSink, Progress};
use super::json::to_json_string;
use crate::text::tools::{Tool, is_function_name};
use std::iter::Peekable;
use std::str::Chars;
use std::sync::Arc;

/// Maximum nesting of lists and dictionaries in a value.
const DEPTH_MAX: usize = 64;

/// Maximum length of a parameter's name in bytes.
const KEY_BYTES_MAX: usize = 256;

/// Reader of a list of calls, from its opening bracket.
#[derive(Debug)]
pub(super) struct PythonicCalls {
    /// Whether a marker precedes the list. Without one, only the tools' names are names of calls.
    is_marked: bool,
    tools: Arc<[Tool]>,
    stage: Stage,
    name: String,
    key: String,
    value: LiteralText,
    /// Whether the call has arguments before the current one.
    has_arguments: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Before the bracket.
    Open,
    /// Before a name.
    Next,
    Name,
    /// Before a parameter's name, or the end of the call.
    NextKey,
    Key,
    /// After a parameter's name.
    Equals,
    Value,
    /// After a call.
    AfterCall,
}

/// Text of a literal, with what is needed to find its end.
#[derive(Debug, Default)]
struct LiteralText {
    text: String,
    quote: Option<char>,
    is_escaped: bool,
    depth: usize,
}

impl PythonicCalls {
    pub(super) fn new(is_marked: bool, tools: Arc<[Tool]>) -> PythonicCalls {
        PythonicCalls {
            is_marked,
            tools,
            stage: Stage::Open,
            name: String::new(),
            key: String::new(),
            value: LiteralText::default(),
            has_arguments: false,
        }
    }

    /// Reads the next character.
    pub(super) fn push(&mut self, c: char, sink: &mut EventSink) -> Progress {
        use Stage::{AfterCall, Equals, Key, Name, Next, NextKey, Open, Value};
        let is_word = c.is_ascii_alphanumeric() || c == '_' || c == '-';
        match (self.stage, c) {
            (Open | Next | NextKey | Equals | AfterCall, _) if c.is_whitespace() => {}
            (Open, '[') => self.stage = Next,
            (Next, _) if is_word => {
                self.name = c.to_string();
                self.stage = Name;
            }
            (Name, _) if is_word => self.name.push(c),
            (Name, '(') if self.is_call_name() => {
                self.has_arguments = false;
                self.stage = NextKey;
            }
            (NextKey, ')') => {
                if !self.has_arguments {
                    sink.start(&self.name, None);
                    sink.arguments("{");
                }
                self.end_call(sink);
            }
            (NextKey, _) if is_word => {
                self.key = c.to_string();
                self.stage = Key;
            }
            (Key, _) if is_word && self.key.len() < KEY_BYTES_MAX => self.key.push(c),
            (Key | Equals, '=') => {
                self.value = LiteralText::default();
                self.stage = Value;
            }
            (Key, ' ') => self.stage = Equals,
            (Value, ',' | ')') if self.value.is_outside() => {
                let Some(value) = literal_to_json(&self.value.text) else { return Progress::Invalid };
                self.argument(&value, sink);
                self.stage = NextKey;
                if c == ')' {
                    self.end_call(sink);
                }
            }
            (Value, _) => self.value.push(c),
            (AfterCall, ',') => self.stage = Next,
            (AfterCall, ']') => return Progress::Done,
            _ => return Progress::Invalid,
        }
        Progress::More
    }

    fn is_call_name(&self) -> bool {
        is_function_name(&self.name)
            && (self.is_marked || self.tools.iter().any(|tool| tool.name == self.name))
    }

    /// Returns an argument, and the beginning of the call with the first one.
    fn argument(&mut self, value: &str, sink: &mut EventSink) {
        if !self.has_arguments {
            sink.start(&self.name, None);
        }
        let before = if self.has_arguments { ", " } else { "{" };
        sink.arguments(&format!("{before}{}: {value}", to_json_string(&self.key)));
        self.has_arguments = true;
    }

    fn end_call(&mut self, sink: &mut EventSink) {
        sink.arguments("}");
        sink.end();
        self.stage = Stage::AfterCall;
    }
}

impl LiteralText {
    fn push(&mut self, c: char) {
        self.text.push(c);
        match self.quote {
            Some(_) if self.is_escaped => self.is_escaped = false,
            Some(_) if c == '\\' => self.is_escaped = true,
            Some(quote) if c == quote => self.quote = None,
            Some(_) => {}
            None => match c {
                '"' | '\'' => self.quote = Some(c),
                '(' | '[' | '{' => self.depth += 1,
                ')' | ']' | '}' => self.depth = self.depth.saturating_sub(1),
                _ => {}
            },
        }
    }

    /// Returns whether the next character is outside of strings and brackets.
    fn is_outside(&self) -> bool {
        self.quote.is_none() && self.depth == 0
    }
}

/// Converts a Python literal to JSON. `None` if it is not a literal, or has no JSON form.
fn literal_to_json(text: &str) -> Option<String> {
    let mut reader = LiteralReader { rest: text.chars().peekable(), json: String::with_capacity(text.len()) };
    reader.value(0)?;
    reader.skip_space();
    reader.rest.next().is_none().then_some(reader.json)
}

struct LiteralReader<'a> {
    rest: Peekable<Chars<'a>>,
    json: String,
}

impl LiteralReader<'_> {
    fn skip_space(&mut self) {
        while self.rest.next_if(|c| c.is_whitespace()).is_some() {}
    }

    fn value(&mut self, depth: usize) -> Option<()> {
        self.skip_space();
        match *self.rest.peek()? {
            '"' | '\'' => {
                let text = self.string()?;
                self.json.push_str(&to_json_string(&text));
                Some(())
            }
            '[' | '(' | '{' if depth == DEPTH_MAX => None,
            '[' => self.list(']', depth),
            '(' => self.list(')', depth),
            '{' => self.dictionary(depth),
            _ => self.word(),
        }
    }

    fn list(&mut self, close: char, depth: usize) -> Option<()> {
        self.rest.next();
        self.json.push('[');
        self.skip_space();
        let mut is_first = true;
        while self.rest.next_if_eq(&close).is_none() {
            if !is_first {
                self.json.push_str(", ");
            }
            is_first = false;
            self.value(depth + 1)?;
            self.end_item(close)?;
        }
        self.json.push(']');
        Some(())
    }

    fn dictionary(&mut self, depth: usize) -> Option<()> {
        self.rest.next();
        self.json.push('{');
        self.skip_space();
        let mut is_first = true;
        while self.rest.next_if_eq(&'}').is_none() {
            if !is_first {
                self.json.push_str(", ");
            }
            is_first = false;
            let key = self.string()?;
            self.json.push_str(&to_json_string(&key));
            self.skip_space();
            self.rest.next_if_eq(&':')?;
            self.json.push_str(": ");
            self.value(depth + 1)?;
            self.end_item('}')?;
        }
        self.json.push('}');
        Some(())
    }

    /// Reads the comma after an item, unless the closing bracket follows.
    fn end_item(&mut self, close: char) -> Option<()> {
        self.skip_space();
        if self.rest.peek() != Some(&close) {
            self.rest.next_if_eq(&',')?;
            self.skip_space();
        }
        Some(())
    }

    fn string(&mut self) -> Option<String> {
        let quote = self.rest.next_if(|c| matches!(c, '"' | '\''))?;
        let mut text = String::new();
        loop {
            match self.rest.next()? {
                c if c == quote => return Some(text),
                '\\' => self.escape(&mut text)?,
                c => text.push(c),
            }
        }
    }

    fn escape(&mut self, text: &mut String) -> Option<()> {
        match self.rest.next()? {
            'n' => text.push('\n'),
            't' => text.push('\t'),
            'r' => text.push('\r'),
            '\n' => {}
            c @ ('\\' | '\'' | '"') => text.push(c),
            c @ ('x' | 'u' | 'U') => {
                let digits = match c {
                    'x' => 2,
                    'u' => 4,
                    _ => 8,
                };
                let mut code = 0u32;
                for _ in 0..digits {
                    code = code.checked_mul(16)? + self.rest.next()?.to_digit(16)?;
                }
                text.push(char::from_u32(code).unwrap_or(char::REPLACEMENT_CHARACTER));
            }
            // Python keeps the backslash of escapes that it does not know.
            c => text.extend(['\\', c]),
        }
        Some(())
    }

    /// Reads a number, a boolean or None.
    fn word(&mut self) -> Option<()> {
        let mut word = String::new();
        while let Some(c) =
            self.rest.next_if(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '+' | '-' | '_'))
        {
            word.push(c);
        }
        let json = match word.as_str() {
            "True" | "true" => "true".to_owned(),
            "False" | "false" => "false".to_owned(),
            "None" | "null" => "null".to_owned(),
            _ if serde_json::from_str::<serde_json::Number>(&word).is_ok() => word,
            // Python also writes `1_000`, `.5`, `5.` and `+1`.
            _ if word.starts_with(|c: char| c.is_ascii_digit() || matches!(c, '.' | '+' | '-')) => {
                let number = word.replace('_', "").parse::<f64>().ok()?;
                serde_json::Number::from_f64(number)?.to_string()
            }
            _ => return None,
        };
        self.json.push_str(&json);
        Some(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_become_json() {
        for (literal, json) in [
            ("'a \"b\"'", r#""a \"b\"""#),
            (r#""it's\n\x41\u00e9\q""#, r#""it's\nAé\\q""#),
            ("-1.50e3", "-1.50e3"),
            ("1_000", "1000.0"),
            (".5", "0.5"),
            (" None ", "null"),
            ("[1, 'x', [True, False,],]", r#"[1, "x", [true, false]]"#),
            ("(1, 2)", "[1, 2]"),
            ("{'a': {'b': []}, \"c\": ()}", r#"{"a": {"b": []}, "c": []}"#),
            ("{}", "{}"),
        ] {
            assert_eq!(literal_to_json(literal).as_deref(), Some(json), "{literal}");
        }
        let deep = "[".repeat(DEPTH_MAX + 2) + &"]".repeat(DEPTH_MAX + 2);
        for literal in [
            "",
            "x",
            "open('f')",
            "1 + 1",
            "[1 2]",
            "{1: 2}",
            "{'a'}",
            "'a",
            "nan",
            "-inf",
            "[,]",
            "1e999",
            &deep,
        ] {
            assert_eq!(literal_to_json(literal), None, "{literal}");
        }
    }
}
