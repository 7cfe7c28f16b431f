//! The tokens of llguidance's dialect of Lark.
//!
//! Invariant: a text is cut exactly as llguidance cuts it, so that nothing it reads is hidden from the check.
//! A text that it cannot cut has no tokens here either. Numbers are cut smaller, which hides nothing.

/// Kinds of tokens, as far as the check needs to know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    /// Blanks or a comment.
    Blank,
    /// The name of a rule or terminal.
    Name,
    /// The colon of a definition; few other things have one.
    Colon,
    Regex,
    /// `%json`, which a JSON schema follows.
    Json,
    /// `%regex`, which a JSON object follows.
    Substring,
    /// `%llguidance`, which a JSON object with options follows.
    Options,
    Other,
}

/// Directives without JSON behind them.
const DIRECTIVES: [&str; 6] = ["%ignore", "%import", "%override", "%declare", "%lark", "%if"];

/// Returns the token at the beginning of a text that is not empty, and its length; `None` if there is none.
pub fn first(text: &str) -> Option<(Token, usize)> {
    let bytes = text.as_bytes();
    let run = |from: usize, member: fn(&u8) -> bool| {
        from + bytes[from..].iter().take_while(|byte| member(byte)).count()
    };
    match bytes[0] {
        b' ' | b'\t' => Some((Token::Blank, run(0, |byte| b" \t".contains(byte)))),
        b'#' => Some((Token::Blank, run(0, |byte| *byte != b'\n'))),
        b'/' if bytes.get(1) == Some(&b'/') => Some((Token::Blank, run(0, |byte| *byte != b'\n'))),
        b'/' => Some((Token::Regex, run(regex(bytes)?, |byte| b"imslux".contains(byte)))),
        b'"' => string(bytes).map(|len| (Token::Other, len)),
        b'<' => special(text).map(|len| (Token::Other, len)),
        b'%' => directive(text),
        b'@' => match run(1, |byte| byte.is_ascii_alphanumeric() || b"_-".contains(byte)) {
            1 => None,
            len => Some((Token::Other, len)),
        },
        b'\r' => bytes.get(1).is_none_or(|next| *next == b'\n').then_some((Token::Other, 1)),
        b':' if bytes.get(1) == Some(&b':') => Some((Token::Other, 2)),
        b':' => Some((Token::Colon, 1)),
        b'!' | b'?' | b'_' | b'a'..=b'z' | b'A'..=b'Z' => match name(bytes) {
            Some(len) => Some((Token::Name, len)),
            None => (bytes[0] != b'!').then_some((Token::Other, 1)),
        },
        b'\n'
        | b'0'..=b'9'
        | b','
        | b'.'
        | b'('
        | b')'
        | b'{'
        | b'}'
        | b'['
        | b']'
        | b'~'
        | b'|'
        | b'&'
        | b'='
        | b'+'
        | b'-'
        | b'*' => Some((Token::Other, 1)),
        _ => None,
    }
}

/// Returns the length of a rule's or terminal's name.
fn name(bytes: &[u8]) -> Option<usize> {
    let has = |at: usize, any: &[u8]| bytes.get(at).is_some_and(|byte| any.contains(byte));
    let bang = usize::from(has(0, b"!"));
    let rule = bang + usize::from(has(bang, b"_?"));
    let terminal = usize::from(has(0, b"_"));
    let rest = |from: usize, member: fn(&u8) -> bool| {
        let len = bytes[from..].iter().take_while(|byte| member(byte) || b"_-".contains(byte)).count();
        from + len
    };
    if bytes.get(rule).is_some_and(u8::is_ascii_lowercase) {
        Some(rest(rule, |byte| byte.is_ascii_lowercase() || byte.is_ascii_digit()))
    } else if bytes.get(terminal).is_some_and(u8::is_ascii_uppercase) {
        Some(rest(terminal, |byte| byte.is_ascii_uppercase() || byte.is_ascii_digit()))
    } else {
        None
    }
}

/// Returns the length of a regular expression without its flags. It may have line ends, but not behind a
/// backslash.
fn regex(bytes: &[u8]) -> Option<usize> {
    let mut at = 1;
    loop {
        match bytes.get(at)? {
            b'/' => return (at > 1).then_some(at + 1),
            b'\\' if bytes.get(at + 1).is_none_or(|next| *next == b'\n') => return None,
            b'\\' => at += 2,
            _ => at += 1,
        }
    }
}

/// Returns the length of a string with its flag.
fn string(bytes: &[u8]) -> Option<usize> {
    let digits = |from: usize, count: usize| {
        bytes.get(from..from + count).filter(|all| all.iter().all(u8::is_ascii_hexdigit)).map(|_| count)
    };
    let mut at = 1;
    loop {
        match bytes.get(at)? {
            b'"' => return Some(at + 1 + usize::from(bytes.get(at + 1) == Some(&b'i'))),
            b'\\' => {
                at += 2 + match bytes.get(at + 1)? {
                    b'u' => digits(at + 2, 4)?,
                    b'x' => digits(at + 2, 2)?,
                    byte => b"\"\\/bfnrt".contains(byte).then_some(0)?,
                }
            }
            0..=0x1f | 0x7f => return None,
            _ => at += 1,
        }
    }
}

/// Returns the length of a special token's name in angle brackets, which may have quotes in it.
fn special(text: &str) -> Option<usize> {
    let end = text[1..].find(|c: char| matches!(c, '<' | '>') || c.is_whitespace())? + 1;
    (end > 1 && text[end..].starts_with('>')).then_some(end + 1)
}

fn directive(text: &str) -> Option<(Token, usize)> {
    let json = [("%json", Token::Json), ("%regex", Token::Substring), ("%llguidance", Token::Options)];
    let plain = DIRECTIVES.iter().map(|name| (*name, Token::Other));
    let found = json.into_iter().chain(plain).find(|(name, _)| text.starts_with(name));
    found.map(|(name, token)| (token, name.len()))
}
