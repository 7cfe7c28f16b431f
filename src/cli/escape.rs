//! Escaping of text from a model, a file or a server for output to a terminal.
//!
//! Invariant: [`visible`] lets no control character through but line feed and tab, and [`one_line`] none.

use std::borrow::Cow;

/// Escapes all control characters but line feed and tab, so that a terminal shows escape sequences instead of
/// interpreting them.
pub fn visible(text: &str) -> Cow<'_, str> {
    escape_where(text, |c| c.is_control() && c != '\n' && c != '\t')
}

/// Escapes all control characters, including line feed and tab, so that the text stays on one line.
pub fn one_line(text: &str) -> Cow<'_, str> {
    escape_where(text, char::is_control)
}

fn escape_where(text: &str, is_control: fn(char) -> bool) -> Cow<'_, str> {
    if !text.contains(is_control) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match c {
            c if !is_control(c) => shown.push(c),
            c if c.is_ascii() => shown += &format!("\\x{:02x}", u32::from(c)),
            c => shown += &format!("\\u{{{:x}}}", u32::from(c)),
        }
    }
    Cow::Owned(shown)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped() {
        assert_eq!(visible("\x1b[2Jgone\x07\r\x7f\u{9b}31m"), "\\x1b[2Jgone\\x07\\x0d\\x7f\\u{9b}31m");
        for c in (0..0xa0).filter_map(char::from_u32).filter(|c| !matches!(c, '\n' | '\t')) {
            assert!(!visible(&c.to_string()).contains(char::is_control), "{c:?}");
        }
    }

    #[test]
    fn a_line_stays_one() {
        assert_eq!(one_line("a\nb\tc\x1b"), "a\\x0ab\\x09c\\x1b");
    }

    #[test]
    fn plain_text_stays_as_it_is() {
        let text = "Grüße,\n\t\"🌊\" \\x1b\n";
        assert!(matches!(visible(text), Cow::Borrowed(same) if same == text));
    }
}
