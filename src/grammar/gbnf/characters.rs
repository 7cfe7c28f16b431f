//! Sets of characters.

/// A set of characters, as sorted ranges that neither overlap nor touch; surrogates are never in it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Characters {
    ranges: Vec<(u32, u32)>,
}

/// Largest code point.
const LAST: u32 = char::MAX as u32;

impl Characters {
    /// Creates the set of inclusive ranges in any order.
    pub fn new(mut ranges: Vec<(u32, u32)>) -> Characters {
        ranges.sort_unstable();
        let mut merged: Vec<(u32, u32)> = Vec::new();
        for (first, last) in ranges {
            match merged.last_mut() {
                Some(previous) if first <= previous.1.saturating_add(1) => previous.1 = previous.1.max(last),
                _ => merged.push((first, last)),
            }
        }
        Characters { ranges: merged }
    }

    /// Creates the set of one character.
    pub fn one(character: char) -> Characters {
        Characters { ranges: vec![(character.into(), character.into())] }
    }

    /// Returns about how many steps a comparison with the set takes.
    pub fn size(&self) -> usize {
        self.ranges.len() + 1
    }

    /// Returns the set of all other characters.
    pub fn negated(&self) -> Characters {
        let mut from = 0;
        let mut ranges = Vec::new();
        for (first, last) in &self.ranges {
            if *first > from {
                ranges.push((from, first - 1));
            }
            from = last + 1;
        }
        if from <= LAST {
            ranges.push((from, LAST));
        }
        Characters { ranges }
    }

    /// Adds all characters of another set.
    pub fn add(&mut self, other: &Characters) {
        let within = |(first, last): &(u32, u32)| {
            let at = self.ranges.partition_point(|range| range.1 < *first);
            self.ranges.get(at).is_some_and(|range| range.0 <= *first && *last <= range.1)
        };
        if !other.ranges.iter().all(within) {
            *self = Characters::new([&self.ranges[..], &other.ranges].concat());
        }
    }

    /// Returns whether the sets have a character in common.
    pub fn meets(&self, other: &Characters) -> bool {
        let (mut a, mut b) = (self.ranges.iter().peekable(), other.ranges.iter().peekable());
        while let (Some(x), Some(y)) = (a.peek(), b.peek()) {
            if x.0 <= y.1 && y.0 <= x.1 {
                return true;
            }
            if x.1 < y.1 {
                a.next()
            } else {
                b.next()
            };
        }
        false
    }

    /// Returns the set as a regular expression in Lark's syntax, without the surrogates.
    pub fn regex(&self) -> String {
        const SURROGATES: (u32, u32) = (0xd800, 0xdfff);
        let below = self.ranges.iter().map(|(first, last)| (*first, (*last).min(SURROGATES.0 - 1)));
        let above = self.ranges.iter().map(|(first, last)| ((*first).max(SURROGATES.1 + 1), *last));
        let members = below.chain(above).filter(|(first, last)| first <= last);
        let text: String = members.map(|(first, last)| format!(r"\x{{{first:x}}}-\x{{{last:x}}}")).collect();
        // An empty class is written as one that nothing matches.
        if text.is_empty() { r"/[^\x{0}-\x{10ffff}]/".to_owned() } else { format!("/[{text}]/") }
    }
}
