//! What a sentencepiece model does to a text before it cuts it: characters are rewritten, spaces merged and
//! spelled as U+2581, and one put before the text.
//!
//! Invariant: a text that was not empty becomes empty only if spaces are removed, and it was all spaces.

use super::charsmap::Charsmap;
use crate::text::tokenizer::prefixes::Prefixes;

/// How vocabularies spell a space.
pub const SPACE: char = '\u{2581}';

/// How texts become what the model cuts.
#[derive(Debug, Default)]
pub struct Normalizer {
    pub charsmap: Option<Charsmap>,
    /// Pieces that no rule changes.
    pub whole: Prefixes,
    pub prefix: Prefix,
    pub spaces: Spaces,
    pub spelling: SpaceSpelling,
}

/// Where a space is put before the text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prefix {
    #[default]
    Never,
    /// Before the whole text, if it does not open with a special token.
    First,
    /// There, and after every special token.
    Always,
}

/// What becomes of spaces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Spaces {
    #[default]
    Kept,
    /// Those at the ends go, and of several side by side all but one.
    Merged,
}

/// How a space is spelled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SpaceSpelling {
    /// As U+2581.
    #[default]
    Symbol,
    /// As itself.
    Plain,
}

/// Where a part of a text stands between special tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// It opens the text.
    First,
    /// It comes after a special token.
    Later,
}

impl Normalizer {
    /// The normalized form of a text, or of a part between special tokens.
    pub fn normalize(&self, text: &str, place: Place) -> String {
        let rest = self.without_leading_spaces(text);
        if rest.is_empty() {
            return String::new();
        }
        let mut out = String::with_capacity(rest.len() + 3);
        if self.is_prefixed(place) {
            out.push(self.spelling.character());
        }
        self.push_all(rest, &mut out);
        if self.spaces == Spaces::Merged {
            out.truncate(out.trim_end_matches(self.spelling.character()).len());
        }
        out
    }

    fn without_leading_spaces<'a>(&self, text: &'a str) -> &'a str {
        let mut rest = text;
        while self.spaces == Spaces::Merged && !rest.is_empty() {
            let (taken, becomes) = self.first(rest);
            if becomes != " " {
                break;
            }
            rest = &rest[taken..];
        }
        rest
    }

    fn is_prefixed(&self, place: Place) -> bool {
        match self.prefix {
            Prefix::Never => false,
            Prefix::First => place == Place::First,
            Prefix::Always => true,
        }
    }

    fn push_all(&self, text: &str, out: &mut String) {
        let mut rest = text;
        let mut follows_space = true;
        while !rest.is_empty() {
            let (taken, becomes) = self.first(rest);
            let becomes = match self.spaces {
                Spaces::Merged if follows_space => becomes.trim_start_matches(' '),
                _ => becomes,
            };
            if !becomes.is_empty() {
                follows_space = becomes.ends_with(' ');
                let spell = |character| if character == ' ' { self.spelling.character() } else { character };
                out.extend(becomes.chars().map(spell));
            }
            rest = &rest[taken..];
        }
    }

    /// How many bytes of the text come next, and what they become.
    fn first<'a>(&'a self, text: &'a str) -> (usize, &'a str) {
        if let Some(whole) = self.whole.longest(text.as_bytes()) {
            return (whole, &text[..whole]);
        }
        if let Some(rule) = self.charsmap.as_ref().and_then(|map| map.longest(text)) {
            return rule;
        }
        let len = text.chars().next().map_or(0, char::len_utf8);
        (len, &text[..len])
    }
}

impl SpaceSpelling {
    fn character(self) -> char {
        match self {
            SpaceSpelling::Symbol => SPACE,
            SpaceSpelling::Plain => ' ',
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_space_is_put_before_the_text_where_the_model_wants_it() {
        let with = |prefix| Normalizer { prefix, ..Default::default() };
        let cases = [
            (Prefix::Never, Place::First, "a b"),
            (Prefix::First, Place::First, "\u{2581}a b"),
            (Prefix::First, Place::Later, "a b"),
            (Prefix::Always, Place::Later, "\u{2581}a b"),
        ];
        for (prefix, place, expected) in cases {
            let expected = expected.replace(' ', "\u{2581}");
            assert_eq!(with(prefix).normalize("a b", place), expected, "{prefix:?} {place:?}");
            assert_eq!(with(prefix).normalize("", place), "");
        }
    }

    #[test]
    fn spaces_are_merged_except_within_whole_pieces() {
        let normalizer = Normalizer {
            whole: Prefixes::new([(&b"<  >"[..], 0)]),
            prefix: Prefix::Always,
            spaces: Spaces::Merged,
            spelling: SpaceSpelling::Plain,
            ..Default::default()
        };
        let cases = [("  a   b <  >  ", " a b <  >"), ("   ", ""), ("\t a", " \t a"), ("< >", " < >")];
        for (text, expected) in cases {
            assert_eq!(normalizer.normalize(text, Place::First), expected, "{text:?}");
        }
        let kept = Normalizer { prefix: Prefix::Always, ..Default::default() };
        assert_eq!(kept.normalize("  ", Place::First), "\u{2581}\u{2581}\u{2581}");
    }
}
