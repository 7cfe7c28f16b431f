//! Prefix search: finds all strings of a set that are prefixes of a text.
//!
//! Invariant: the strings are sorted and unique, so that those with a common prefix are adjacent.

/// A set of byte strings with values, searchable for prefixes of a text.
#[derive(Debug, Default)]
pub struct PrefixSet {
    entries: Vec<(Box<[u8]>, u32)>,
}

impl PrefixSet {
    /// Creates the set. Of equal strings the first is kept; empty ones are ignored.
    pub fn new<'a>(strings: impl IntoIterator<Item = (&'a [u8], u32)>) -> PrefixSet {
        let strings = strings.into_iter().filter(|(string, _)| !string.is_empty());
        let mut entries: Vec<(Box<[u8]>, u32)> =
            strings.map(|(string, value)| (string.into(), value)).collect();
        // The sort is stable: the first of equal strings stays first.
        entries.sort_by(|a, b| a.0.cmp(&b.0));
        entries.dedup_by(|later, earlier| later.0 == earlier.0);
        PrefixSet { entries }
    }

    /// Returns the lengths and values of all strings that are prefixes of `text`, the shortest first.
    pub fn matches<'a>(&'a self, text: &'a [u8]) -> impl Iterator<Item = (usize, u32)> + 'a {
        let mut left = &self.entries[..];
        // After each byte, the strings that start with the text so far remain.
        text.iter()
            .enumerate()
            .map_while(move |(at, byte)| {
                left = with_byte(left, at, *byte);
                let (first, value) = left.first()?;
                Some((first.len() == at + 1).then_some((at + 1, *value)))
            })
            .flatten()
    }

    /// Returns the length of the longest string that is a prefix of `text`.
    pub fn longest(&self, text: &[u8]) -> Option<usize> {
        self.matches(text).map(|(len, _)| len).last()
    }
}

/// Returns those of `strings`, which are equal before `at`, that have `byte` at `at`.
fn with_byte(strings: &[(Box<[u8]>, u32)], at: usize, byte: u8) -> &[(Box<[u8]>, u32)] {
    let begin = strings.partition_point(|(string, _)| string.get(at) < Some(&byte));
    let len = strings[begin..].partition_point(|(string, _)| string.get(at) == Some(&byte));
    &strings[begin..begin + len]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::vocabularies::Dice;

    #[test]
    fn all_prefixes_are_found_and_nothing_else() {
        let mut dice = Dice::new(41);
        let mut found = 0;
        for _ in 0..300 {
            let word =
                |dice: &mut Dice| (0..dice.below(6)).map(|_| *dice.pick(b"ab\xff")).collect::<Vec<u8>>();
            let words: Vec<Vec<u8>> = (0..dice.below(30)).map(|_| word(&mut dice)).collect();
            let prefixes = PrefixSet::new(words.iter().map(Vec::as_slice).zip(0u32..));
            let text = [word(&mut dice), word(&mut dice)].concat();
            let expected: Vec<(usize, u32)> = (1..=text.len())
                .filter_map(|len| {
                    let first = words.iter().position(|word| *word == text[..len])?;
                    Some((len, first as u32))
                })
                .collect();
            found += expected.len();
            assert_eq!(prefixes.matches(&text).collect::<Vec<_>>(), expected, "{words:?} {text:?}");
            assert_eq!(prefixes.longest(&text), expected.last().map(|(len, _)| *len));
        }
        assert!(found > 200, "{found}");
    }
}
