//! Tokens of PTX text (PTX ISA, section 4 "Syntax").

use super::PtxError;

/// One token.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Token<'a> {
    /// A word with all its dotted parts: `ld.global.v4.u32`, `%tid.x`, `.reg`, `$L__BB0_1`.
    Word(&'a str),
    /// An integer literal, as 64 bits.
    Int(u64),
    /// The bits of a literal `0f...`.
    Single(u32),
    /// The bits of a literal `0d...`.
    Double(u64),
    /// Text in quotes.
    Text(&'a str),
    /// A character of punctuation.
    Mark(u8),
}

/// Splits `text` into tokens, each with its line; comments are left out.
pub(crate) fn tokens(text: &str) -> Result<Vec<(Token<'_>, u32)>, PtxError> {
    let mut lexer = Lexer { text, bytes: text.as_bytes(), at: 0, line: 1 };
    let mut found = Vec::new();
    while let Some(token) = lexer.next()? {
        found.push((token, lexer.line));
    }
    Ok(found)
}

struct Lexer<'a> {
    text: &'a str,
    bytes: &'a [u8],
    at: usize,
    line: u32,
}

impl<'a> Lexer<'a> {
    fn peek(&self, ahead: usize) -> u8 {
        self.bytes.get(self.at + ahead).copied().unwrap_or(0)
    }

    fn skip_space(&mut self) {
        loop {
            match (self.peek(0), self.peek(1)) {
                (b'\n', _) => {
                    self.line += 1;
                    self.at += 1;
                }
                (b' ' | b'\t' | b'\r', _) => self.at += 1,
                (b'/', b'/') => {
                    while self.at < self.bytes.len() && self.peek(0) != b'\n' {
                        self.at += 1;
                    }
                }
                (b'/', b'*') => {
                    while self.at < self.bytes.len() && (self.peek(0), self.peek(1)) != (b'*', b'/') {
                        self.line += u32::from(self.peek(0) == b'\n');
                        self.at += 1;
                    }
                    self.at = (self.at + 2).min(self.bytes.len());
                }
                _ => return,
            }
        }
    }

    fn next(&mut self) -> Result<Option<Token<'a>>, PtxError> {
        self.skip_space();
        let first = self.peek(0);
        let start = self.at;
        match first {
            0 if self.at >= self.bytes.len() => Ok(None),
            b'"' => {
                self.at += 1;
                while self.at < self.bytes.len() && self.peek(0) != b'"' {
                    self.at += 1;
                }
                let text = self.text.get(start + 1..self.at).unwrap_or("");
                self.at += 1;
                Ok(Some(Token::Text(text)))
            }
            b'0'..=b'9' => self.number().map(Some),
            _ if is_word(first) || (first == b'.' && is_word(self.peek(1))) => {
                self.word();
                Ok(Some(Token::Word(&self.text[start..self.at])))
            }
            _ if first.is_ascii_punctuation() => {
                self.at += 1;
                Ok(Some(Token::Mark(first)))
            }
            _ => Err(PtxError::new(self.line, format!("unexpected byte {first:#04x}"))),
        }
    }

    /// Passes over letters, digits, dots and double colons.
    fn word(&mut self) {
        loop {
            let (here, next) = (self.peek(0), self.peek(1));
            if is_word(here)
                || here.is_ascii_digit()
                || (here == b'.' && (is_word(next) || next.is_ascii_digit()))
            {
                self.at += 1;
            } else if here == b':' && next == b':' {
                self.at += 2;
            } else {
                return;
            }
        }
    }

    fn number(&mut self) -> Result<Token<'a>, PtxError> {
        let start = self.at;
        while self.peek(0).is_ascii_alphanumeric() {
            self.at += 1;
        }
        let text = &self.text[start..self.at];
        let wrong = || PtxError::new(self.line, format!("'{text}' is not a number"));
        let (kind, rest) = text.split_at(text.len().min(2));
        let integer = |digits: &str, radix| {
            u64::from_str_radix(digits.trim_end_matches('U'), radix).map(Token::Int).map_err(|_| wrong())
        };
        match kind {
            "0f" | "0F" => u32::from_str_radix(rest, 16).map(Token::Single).map_err(|_| wrong()),
            "0d" | "0D" => u64::from_str_radix(rest, 16).map(Token::Double).map_err(|_| wrong()),
            "0x" | "0X" => integer(rest, 16),
            "0b" | "0B" => integer(rest, 2),
            _ if text.len() > 1 && text.starts_with('0') && text != "0U" => integer(&text[1..], 8),
            _ => integer(text, 10),
        }
    }
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphabetic() || matches!(byte, b'_' | b'$' | b'%')
}
