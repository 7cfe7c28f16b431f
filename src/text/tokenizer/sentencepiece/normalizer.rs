//! Normalization by a sentencepiece model: characters are rewritten, spaces are merged and replaced by
//! U+2581, and one is added before the text.
//!
//! Invariant: a non-empty text becomes empty only if spaces are merged and it consists of spaces.

use super::charsmap::Charsmap;
use crate::text::tokenizer::prefix_set::PrefixSet;

/// Character for a space in vocabularies.
pub const SPACE: char = '\u{2581}';

/// Normalizer of a sentencepiece model.
#[derive(Debug, Default)]
pub struct Normalizer {
    pub charsmap: Option<Charsmap>,
    /// User-defined pieces, which are not normalized.
    pub user_defined: PrefixSet,
    pub prefix: SpacePrefix,
    pub spaces: SpaceHandling,
    pub spelling: SpaceSpelling,
}

/// Place where a space is added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SpacePrefix {
    #[default]
    Never,
    /// Before the whole text, unless it starts with a special token.
    First,
    /// Before the whole text, and after every special token.
    Always,
}

/// Handling of spaces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SpaceHandling {
    #[default]
    Keep,
    /// Leading and trailing spaces are removed, and runs of spaces become one.
    Merge,
}

/// Representation of a space in the normalized text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SpaceSpelling {
    /// U+2581.
    #[default]
    Symbol,
    /// The space itself.
    Plain,
}

/// Position of a segment of text between special tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentPosition {
    /// At the beginning of the text.
    Start,
    /// After a special token.
    AfterSpecial,
}

impl Normalizer {
    /// Normalizes a text, or a segment of it between special tokens.
    pub fn normalize(&self, text: &str, position: SegmentPosition) -> String {
        let rest = self.without_leading_spaces(text);
        if rest.is_empty() {
            return String::new();
        }
        let mut out = String::with_capacity(rest.len() + 3);
        if self.is_prefixed(position) {
            out.push(self.spelling.character());
        }
        self.push_all(rest, &mut out);
        if self.spaces == SpaceHandling::Merge {
            out.truncate(out.trim_end_matches(self.spelling.character()).len());
        }
        out
    }

    /// Removes leading spaces if spaces are merged.
    fn without_leading_spaces<'a>(&self, text: &'a str) -> &'a str {
        let mut rest = text;
        while self.spaces == SpaceHandling::Merge && !rest.is_empty() {
            let (taken, becomes) = self.next_unit(rest);
            if becomes != " " {
                break;
            }
            rest = &rest[taken..];
        }
        rest
    }

    /// Returns whether a space is added before a segment.
    fn is_prefixed(&self, position: SegmentPosition) -> bool {
        match self.prefix {
            SpacePrefix::Never => false,
            SpacePrefix::First => position == SegmentPosition::Start,
            SpacePrefix::Always => true,
        }
    }

    /// Appends the normalized form of `text` to `out`.
    fn push_all(&self, text: &str, out: &mut String) {
        let mut rest = text;
        let mut follows_space = true;
        while !rest.is_empty() {
            let (taken, becomes) = self.next_unit(rest);
            let becomes = match self.spaces {
                SpaceHandling::Merge if follows_space => becomes.trim_start_matches(' '),
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

    /// Returns the length in bytes of the next unit of the text, and its replacement.
    fn next_unit<'a>(&'a self, text: &'a str) -> (usize, &'a str) {
        if let Some(whole) = self.user_defined.longest(text.as_bytes()) {
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
            (SpacePrefix::Never, SegmentPosition::Start, "a b"),
            (SpacePrefix::First, SegmentPosition::Start, "\u{2581}a b"),
            (SpacePrefix::First, SegmentPosition::AfterSpecial, "a b"),
            (SpacePrefix::Always, SegmentPosition::AfterSpecial, "\u{2581}a b"),
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
            user_defined: PrefixSet::new([(&b"<  >"[..], 0)]),
            prefix: SpacePrefix::Always,
            spaces: SpaceHandling::Merge,
            spelling: SpaceSpelling::Plain,
            ..Default::default()
        };
        let cases = [("  a   b <  >  ", " a b <  >"), ("   ", ""), ("\t a", " \t a"), ("< >", " < >")];
        for (text, expected) in cases {
            assert_eq!(normalizer.normalize(text, SegmentPosition::Start), expected, "{text:?}");
        }
        let kept = Normalizer { prefix: SpacePrefix::Always, ..Default::default() };
        assert_eq!(kept.normalize("  ", SegmentPosition::Start), "\u{2581}\u{2581}\u{2581}");
    }
}
