//! Encodings of bytes in token names.
//!
//! Invariant: a name that does not encode bytes stands for itself.

use super::LeadingSpaces;
use serde_json::{Value, json};

/// Encoding of bytes in a vocabulary's token names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ByteSpelling {
    /// Each byte is a printable character.
    ByteLevel,
    /// A space is U+2581, and a single byte of a character is `<0xNN>`.
    ByteFallback,
}

impl ByteSpelling {
    /// Returns the encoding that a decoder, in the format of `tokenizer.json`, reverses, and its handling of
    /// leading spaces. `None` if the decoder does more than concatenate bytes.
    pub fn from_decoder(decoder: &Value) -> Option<(ByteSpelling, LeadingSpaces)> {
        if decoder["type"] == "ByteLevel" {
            return Some((ByteSpelling::ByteLevel, LeadingSpaces::Keep));
        }
        let fallback = [
            json!({"type": "Replace", "pattern": {"String": "\u{2581}"}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        let drop_first = json!({"type": "Strip", "content": " ", "start": 1, "stop": 0});
        match decoder["decoders"].as_array()?.strip_prefix(&fallback)? {
            [] => Some((ByteSpelling::ByteFallback, LeadingSpaces::Keep)),
            [last] if *last == drop_first => Some((ByteSpelling::ByteFallback, LeadingSpaces::DropFirst)),
            _ => None,
        }
    }

    /// Returns the bytes that a token's name encodes.
    pub fn bytes(self, token: &str) -> Vec<u8> {
        match self {
            // Only added tokens have other characters; they stand for themselves.
            ByteSpelling::ByteLevel => {
                token.chars().map(byte_of_character).collect::<Option<_>>().unwrap_or(token.into())
            }
            ByteSpelling::ByteFallback => match byte_of_name(token) {
                Some(byte) => vec![byte],
                None => token.replace('\u{2581}', " ").into_bytes(),
            },
        }
    }
}

/// Returns the byte of a character in GPT-2's alphabet: printable Latin-1 characters stand for themselves,
/// and the other 68 bytes are, in order, the characters from U+0100 on.
pub fn byte_of_character(character: char) -> Option<u8> {
    let byte = match u32::from(character) {
        code @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => code,
        code @ 0x100..=0x120 => code - 0x100,
        code @ 0x121..=0x142 => code - 0x121 + 0x7f,
        0x143 => 0xad,
        _ => return None,
    };
    Some(byte as u8)
}

/// Returns the byte of a name like `<0x0A>`.
pub fn byte_of_name(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    let is_hex = digits.len() == 2 && digits.bytes().all(|digit| digit.is_ascii_hexdigit());
    u8::from_str_radix(digits, 16).ok().filter(|_| is_hex)
}
