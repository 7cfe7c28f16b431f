//! Errors of grammars: refused specifications, and answers that a grammar does not allow.

/// Longest reason in characters; llguidance may quote a whole schema.
const REASON: usize = 300;

/// Reason why a grammar is not served, or why a sequence cannot go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum GrammarError {
    /// The specification is invalid, too large, or needs something that is not supported. `part` is the
    /// place, such as `$.properties.a.pattern` or `line 3, column 7`.
    #[error("{part}: {reason}")]
    Refused { part: String, reason: String },
    /// The grammar does not allow this token here. The matcher's state is unchanged.
    #[error("the grammar does not allow token {0} here")]
    Token(u32),
    /// The sequence cannot go on: a limit was exceeded, or no token continues the text.
    #[error("the answer cannot be continued under its grammar: {0}")]
    Stuck(String),
}

impl GrammarError {
    /// Creates the error of a part of a specification.
    pub(crate) fn refused(part: impl Into<String>, reason: impl Into<String>) -> GrammarError {
        GrammarError::Refused { part: part.into(), reason: shortened(&reason.into()) }
    }

    /// Puts the path of a schema before the place of an error within it, which begins with `$`.
    pub(crate) fn within(self, path: &str) -> GrammarError {
        match self {
            GrammarError::Refused { part, reason } => match part.strip_prefix('$') {
                Some(rest) => GrammarError::refused(format!("{path}{rest}"), reason),
                None => GrammarError::Refused { part, reason },
            },
            other => other,
        }
    }

    /// Creates the error of a sequence from one of llguidance.
    pub(crate) fn stuck(error: &dyn std::fmt::Display) -> GrammarError {
        let message = error.to_string();
        if is_limit(&message) {
            return GrammarError::Stuck("the grammar is too complex at this place".to_owned());
        }
        GrammarError::Stuck(summary(&message))
    }
}

/// Returns whether an error of llguidance says that a limit was exceeded.
pub(crate) fn is_limit(message: &str) -> bool {
    ["too big", "too large", "fuel", "Too many", "too many", "; max is "]
        .iter()
        .any(|mark| message.contains(mark))
}

/// Returns the first line of an error of llguidance, without backtraces, its state and source excerpts. Of a
/// regular expression's error, returns what is wrong, without the expression.
pub(crate) fn summary(message: &str) -> String {
    const REGEX: &str = "\nerror: ";
    let message = message.rfind(REGEX).map_or(message, |at| &message[at + REGEX.len()..]);
    let end =
        ["\n<", "<non-verbose", "\n  while processing"].iter().filter_map(|mark| message.find(mark)).min();
    let first = message[..end.unwrap_or(message.len())].trim();
    let mut lines = first.lines().map(str::trim).filter(|line| !line.is_empty());
    let line = lines.next().unwrap_or("unknown error");
    shortened(line)
}

/// Returns a reason that is not too long: it may quote names of a specification.
fn shortened(reason: &str) -> String {
    match reason.char_indices().nth(REASON) {
        Some((cut, _)) => format!("{}...", &reason[..cut]),
        None => reason.to_owned(),
    }
}
