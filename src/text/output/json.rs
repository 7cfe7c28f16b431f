//! A scanner of JSON that arrives character by character.
//!
//! Invariant: text that the scanner accepts up to the end of its value is valid JSON, except that strings may
//! contain control characters, which models write.

/// Scanner of one JSON value.
#[derive(Debug)]
pub(super) struct JsonScanner {
    /// Open arrays and objects, the outermost first.
    stack: Vec<Container>,
    expected: Expected,
    lexeme: Lexeme,
}

/// The place of a character in the value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    /// Number of arrays and objects around the character. A bracket is outside of what it opens or closes.
    pub(super) level: usize,
    pub(super) part: Part,
}

/// Part of a JSON text that a character belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// White space between other parts.
    Space,
    /// A comma or colon.
    Separator,
    /// A key, including its quotes.
    Key,
    /// A scalar value, or a bracket.
    Value,
    /// A value's character, as `Value`, that must be escaped because it is a control character.
    Control,
}

/// Error for a character that is not valid at its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct InvalidCharacter;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Container {
    Array,
    Object,
}

/// The next part outside of strings, numbers and literals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Expected {
    Value,
    /// A value or the end of an array that is still empty.
    ValueOrEnd,
    Key,
    /// A key or the end of an object that is still empty.
    KeyOrEnd,
    Colon,
    /// A comma or the end of the array or object.
    CommaOrEnd,
    /// Nothing: the value is complete.
    Nothing,
}

/// The string, number or literal that is being read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lexeme {
    None,
    String { is_key: bool, escape: Escape },
    Number(Number),
    Literal { rest: &'static str },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Escape {
    None,
    Backslash,
    /// Number of hexadecimal digits that follow.
    Digits(u8),
}

/// Position in a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Number {
    Minus,
    Zero,
    Integer,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
}

impl JsonScanner {
    pub(super) fn new() -> JsonScanner {
        JsonScanner { stack: Vec::new(), expected: Expected::Value, lexeme: Lexeme::None }
    }

    /// Returns whether an array or object is complete. Numbers at the outermost level never are.
    pub(super) fn is_complete(&self) -> bool {
        self.expected == Expected::Nothing && self.lexeme == Lexeme::None
    }

    /// Returns whether the next character is within a string.
    pub(super) fn is_within_string(&self) -> bool {
        matches!(self.lexeme, Lexeme::String { .. })
    }

    /// Reads the next character and returns its place.
    pub(super) fn push(&mut self, c: char) -> Result<Place, InvalidCharacter> {
        let level = self.stack.len();
        let place = |part| Ok(Place { level, part });
        match self.lexeme {
            Lexeme::String { is_key, escape } => {
                self.string_character(c, is_key, escape)?;
                return place(match is_key {
                    true => Part::Key,
                    false if c < ' ' => Part::Control,
                    false => Part::Value,
                });
            }
            Lexeme::Literal { rest } => {
                let rest = rest.strip_prefix(c).ok_or(InvalidCharacter)?;
                self.lexeme = if rest.is_empty() { Lexeme::None } else { Lexeme::Literal { rest } };
                return place(Part::Value);
            }
            Lexeme::Number(number) => {
                if let Some(next) = number.next(c) {
                    self.lexeme = Lexeme::Number(next);
                    return place(Part::Value);
                }
                if !number.is_complete() {
                    return Err(InvalidCharacter);
                }
                self.lexeme = Lexeme::None;
            }
            Lexeme::None => {}
        }
        self.structure(c)
    }

    /// Reads a character outside of strings, numbers and literals.
    fn structure(&mut self, c: char) -> Result<Place, InvalidCharacter> {
        use Expected::{Colon, CommaOrEnd, Key, KeyOrEnd, Nothing, Value, ValueOrEnd};
        let level = self.stack.len();
        let place = |part| Ok(Place { level, part });
        match (self.expected, c) {
            (_, ' ' | '\t' | '\n' | '\r') => place(Part::Space),
            (Key | KeyOrEnd, '"') => {
                self.lexeme = Lexeme::String { is_key: true, escape: Escape::None };
                self.expected = Colon;
                place(Part::Key)
            }
            (Colon, ':') => {
                self.expected = Value;
                place(Part::Separator)
            }
            (CommaOrEnd, ',') => {
                self.expected = if self.stack.last() == Some(&Container::Object) { Key } else { Value };
                place(Part::Separator)
            }
            (KeyOrEnd, '}') => self.close(Container::Object),
            (ValueOrEnd, ']') => self.close(Container::Array),
            (CommaOrEnd, '}') => self.close(Container::Object),
            (CommaOrEnd, ']') => self.close(Container::Array),
            (Value | ValueOrEnd, _) => {
                self.begin_value(c)?;
                place(Part::Value)
            }
            (Key | KeyOrEnd | Colon | CommaOrEnd | Nothing, _) => Err(InvalidCharacter),
        }
    }

    fn begin_value(&mut self, c: char) -> Result<(), InvalidCharacter> {
        self.expected = if self.stack.is_empty() { Expected::Nothing } else { Expected::CommaOrEnd };
        match c {
            '{' => {
                self.stack.push(Container::Object);
                self.expected = Expected::KeyOrEnd;
            }
            '[' => {
                self.stack.push(Container::Array);
                self.expected = Expected::ValueOrEnd;
            }
            '"' => self.lexeme = Lexeme::String { is_key: false, escape: Escape::None },
            't' => self.lexeme = Lexeme::Literal { rest: "rue" },
            'f' => self.lexeme = Lexeme::Literal { rest: "alse" },
            'n' => self.lexeme = Lexeme::Literal { rest: "ull" },
            '-' => self.lexeme = Lexeme::Number(Number::Minus),
            '0' => self.lexeme = Lexeme::Number(Number::Zero),
            '1'..='9' => self.lexeme = Lexeme::Number(Number::Integer),
            _ => return Err(InvalidCharacter),
        }
        Ok(())
    }

    fn close(&mut self, container: Container) -> Result<Place, InvalidCharacter> {
        if self.stack.pop() != Some(container) {
            return Err(InvalidCharacter);
        }
        self.expected = if self.stack.is_empty() { Expected::Nothing } else { Expected::CommaOrEnd };
        Ok(Place { level: self.stack.len(), part: Part::Value })
    }

    fn string_character(&mut self, c: char, is_key: bool, escape: Escape) -> Result<(), InvalidCharacter> {
        let next = match (escape, c) {
            (Escape::None, '"') => {
                self.lexeme = Lexeme::None;
                return Ok(());
            }
            (Escape::None, '\\') => Escape::Backslash,
            (Escape::None, _) => Escape::None,
            (Escape::Backslash, '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't') => Escape::None,
            (Escape::Backslash, 'u') => Escape::Digits(4),
            (Escape::Digits(1), _) if c.is_ascii_hexdigit() => Escape::None,
            (Escape::Digits(count), _) if c.is_ascii_hexdigit() => Escape::Digits(count - 1),
            (Escape::Backslash | Escape::Digits(_), _) => return Err(InvalidCharacter),
        };
        self.lexeme = Lexeme::String { is_key, escape: next };
        Ok(())
    }
}

impl Number {
    /// Returns the position after `c`, or `None` if the number ends before it.
    fn next(self, c: char) -> Option<Number> {
        use Number::{Exponent, ExponentDigits, ExponentSign, Fraction, Integer, Minus, Point, Zero};
        match (self, c) {
            (Minus, '0') => Some(Zero),
            (Minus, '1'..='9') | (Integer, '0'..='9') => Some(Integer),
            (Zero | Integer, '.') => Some(Point),
            (Point | Fraction, '0'..='9') => Some(Fraction),
            (Zero | Integer | Fraction, 'e' | 'E') => Some(Exponent),
            (Exponent, '+' | '-') => Some(ExponentSign),
            (Exponent | ExponentSign | ExponentDigits, '0'..='9') => Some(ExponentDigits),
            _ => None,
        }
    }

    fn is_complete(self) -> bool {
        matches!(self, Number::Zero | Number::Integer | Number::Fraction | Number::ExponentDigits)
    }
}

/// Appends a character of a JSON text, escaped if it is a control character within a string.
pub(super) fn push_character(text: &mut String, c: char, part: Part) {
    match (part, c) {
        (Part::Control, '\n') => text.push_str("\\n"),
        (Part::Control, '\t') => text.push_str("\\t"),
        (Part::Control, '\r') => text.push_str("\\r"),
        (Part::Control, c) => text.push_str(&format!("\\u{:04x}", u32::from(c))),
        (_, c) => text.push(c),
    }
}

/// Returns a text as a JSON string, with its quotes.
pub(super) fn to_json_string(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::vocabularies::Dice;
    use serde_json::Value;

    /// Reads a text up to the end of its value. Returns whether the text is one array or object.
    fn is_valid(text: &str) -> bool {
        let mut scanner = JsonScanner::new();
        text.chars().all(|c| scanner.push(c).is_ok()) && scanner.is_complete()
    }

    #[test]
    fn what_is_accepted_is_what_serde_accepts() {
        let pieces = [
            "{", "}", "[", "]", ",", ":", "\"", "\"a\"", "\"\\", "n\"", "\\u00e9", "0", "-", "1", ".", "e",
            "+", "12.5e-3", "0.5", "-0E+1", "01", "true", "null", "false", " ", "{\"k\":", "[1,", "é",
        ];
        let mut dice = Dice::new(1801);
        let mut valid = 0;
        for _ in 0..60_000 {
            let inner: String = (0..dice.below(9)).map(|_| *dice.pick(&pieces)).collect();
            let text = format!("[{inner}]");
            let expected = serde_json::from_str::<Value>(&text).is_ok();
            assert_eq!(is_valid(&text), expected, "{text:?}");
            valid += usize::from(expected);
        }
        assert!(valid > 1000, "{valid}");
    }

    #[test]
    fn places_name_levels_and_parts() {
        let mut scanner = JsonScanner::new();
        let text = "{\"k\": [1, \"\n\"]}";
        let places: Vec<(usize, Part)> =
            text.chars().map(|c| scanner.push(c).unwrap()).map(|place| (place.level, place.part)).collect();
        use Part::{Control, Key, Separator, Space, Value};
        let expected = [
            (0, Value),
            (1, Key),
            (1, Key),
            (1, Key),
            (1, Separator),
            (1, Space),
            (1, Value),
            (2, Value),
            (2, Separator),
            (2, Space),
            (2, Value),
            (2, Control),
            (2, Value),
            (1, Value),
            (0, Value),
        ];
        assert_eq!(places, expected);
        assert!(scanner.is_complete());
    }

    #[test]
    fn nesting_is_not_bounded() {
        assert!(is_valid(&format!("{}{}", "[".repeat(10_000), "]".repeat(10_000))));
    }
}
