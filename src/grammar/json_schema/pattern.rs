//! Patterns of JSON schemas: ECMAScript's regular expressions in the syntax of the crate `regex`.
//!
//! Invariant: the translation matches no text that the original does not match.

/// ECMAScript's white space, as members of a class.
const SPACE: &str = r"\t-\r \u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}\u{feff}";

/// Characters that `.` does not match.
const LINE_ENDS: &str = r"\n\r\u{2028}\u{2029}";

/// Translates a pattern: `.`, `\s` and escapes that differ, and literal characters within classes. Errors are
/// reasons for the user. Constructs without a counterpart, such as look-around, are left to the parser of
/// regular expressions, which refuses them.
pub fn translate(pattern: &str) -> Result<String, String> {
    let mut out = String::with_capacity(pattern.len() + 16);
    let mut characters = pattern.chars().peekable();
    let mut in_class = false;
    while let Some(character) = characters.next() {
        match character {
            '\\' => {
                let escaped = characters.next().ok_or("ends with a backslash")?;
                translate_escape(escaped, in_class, &mut out)?;
            }
            '.' if !in_class => out.push_str(&format!("[^{LINE_ENDS}]")),
            '[' if !in_class => {
                in_class = true;
                out.push('[');
                if characters.next_if_eq(&'^').is_some() {
                    out.push('^');
                }
                if characters.peek() == Some(&']') {
                    return Err("an empty class '[]' is not supported".to_owned());
                }
            }
            ']' if in_class => {
                in_class = false;
                out.push(']');
            }
            '[' | '&' | '~' if in_class => out.extend(['\\', character]),
            '-' if in_class && characters.peek() == Some(&'-') => {
                return Err("'--' within a class is not supported".to_owned());
            }
            '{' if !in_class && characters.peek() == Some(&',') => {
                return Err("'{,' would be literal: write '{0,' for a repetition".to_owned());
            }
            '(' if characters.peek() == Some(&'?') => {
                out.push('(');
                check_group(characters.clone().skip(1))?;
            }
            _ => out.push(character),
        }
    }
    Ok(out)
}

/// Checks what follows `(?`: flags would change the meaning of what was translated.
fn check_group(mut after: impl Iterator<Item = char>) -> Result<(), String> {
    match after.next() {
        Some(':' | '<' | '=' | '!') => Ok(()),
        _ => Err("flags within a pattern are not supported".to_owned()),
    }
}

fn translate_escape(escaped: char, in_class: bool, out: &mut String) -> Result<(), String> {
    match escaped {
        's' if in_class => out.push_str(SPACE),
        's' => out.push_str(&format!("[{SPACE}]")),
        'S' => out.push_str(&format!("[^{SPACE}]")),
        'b' if in_class => out.push_str(r"\x08"),
        '0' => out.push_str(r"\x00"),
        'c' | 'k' | 'B' | 'b' => return Err(format!(r"'\{escaped}' is not supported")),
        'A' | 'z' | 'Z' | 'G' | 'a' | 'U' => {
            return Err(format!(r"'\{escaped}' is not part of JSON Schema's patterns"));
        }
        _ => out.extend(['\\', escaped]),
    }
    Ok(())
}
