//! Search for stop strings in text that arrives in pieces.
//!
//! Invariant: the output does not depend on where the pieces are split, and text that may be the beginning of
//! a stop string is held back until it is known not to be one.

use std::sync::Arc;

/// Searches a stream of text for the first of several stop strings.
#[derive(Debug)]
pub struct StopMatcher {
    stops: Arc<[String]>,
    /// Include the stop string in the output.
    include_stop: bool,
    /// End of the text so far that may be the beginning of a stop string.
    held: String,
}

/// Result of searching one piece of text.
#[derive(Debug, PartialEq, Eq)]
pub struct StopSearch {
    /// Text that can be output now.
    pub text: String,
    /// Index of the stop string that was found. The text ends before it, or with it if stop strings are
    /// included.
    pub hit: Option<usize>,
}

impl StopMatcher {
    /// Creates a matcher at the beginning of a text. Panics if a stop string is empty.
    pub fn new(stops: Arc<[String]>, keeps_stop: bool) -> StopMatcher {
        assert!(stops.iter().all(|stop| !stop.is_empty()), "a stop string is never empty; this is a bug");
        StopMatcher { stops, include_stop: keeps_stop, held: String::new() }
    }

    /// Returns whether there are no stop strings.
    pub fn is_idle(&self) -> bool {
        self.stops.is_empty()
    }

    /// Searches the next piece of text. Finds the stop string that is completed first; of several completed
    /// by the same character, the longest. Must not be called again after a hit.
    pub fn push(&mut self, piece: String) -> StopSearch {
        if self.is_idle() {
            return StopSearch { text: piece, hit: None };
        }
        let searched = self.held.len();
        self.held += &piece;
        for (start, character) in piece.char_indices() {
            let end = searched + start + character.len_utf8();
            if let Some((index, stop)) = self.match_ending_at(end) {
                let kept = if self.include_stop { end } else { end - stop };
                let mut text = std::mem::take(&mut self.held);
                text.truncate(kept);
                return StopSearch { text, hit: Some(index) };
            }
        }
        let rest = self.held.split_off(self.held.len() - self.partial_match_len());
        StopSearch { text: std::mem::replace(&mut self.held, rest), hit: None }
    }

    /// Returns the text that is still held back, at the end of the text.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Returns the index and the length of the longest stop string that ends at byte `end` of the held text.
    fn match_ending_at(&self, end: usize) -> Option<(usize, usize)> {
        let text = &self.held.as_bytes()[..end];
        let complete = self.stops.iter().enumerate().filter(|(_, stop)| text.ends_with(stop.as_bytes()));
        complete.map(|(index, stop)| (index, stop.len())).max_by_key(|(_, len)| *len)
    }

    /// Returns the length in bytes of the longest suffix of the held text that is a prefix of a stop string.
    fn partial_match_len(&self) -> usize {
        let text = self.held.as_bytes();
        let begins = |stop: &String| {
            let longest = (stop.len() - 1).min(text.len());
            (1..=longest).rev().find(|len| text.ends_with(&stop.as_bytes()[..*len])).unwrap_or(0)
        };
        // A prefix of a stop string starts at a character boundary.
        self.stops.iter().map(begins).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::vocabularies::Dice;

    fn matcher(stops: &[&str], keeps_stop: bool) -> StopMatcher {
        StopMatcher::new(stops.iter().map(|stop| stop.to_string()).collect(), keeps_stop)
    }

    /// Searches a text in pieces. Returns the output and the stop string that was found.
    fn search(matcher: &mut StopMatcher, pieces: &[&str]) -> (String, Option<usize>) {
        let mut left = String::new();
        for piece in pieces {
            let StopSearch { text, hit } = matcher.push(piece.to_string());
            left += &text;
            if hit.is_some() {
                return (left, hit);
            }
        }
        (left + &matcher.finish(), None)
    }

    #[test]
    fn a_stop_string_ends_the_text_before_it_or_with_it() {
        for (keeps, text) in [(false, "one "), (true, "one END")] {
            assert_eq!(search(&mut matcher(&["END"], keeps), &["one END two END"]), (text.into(), Some(0)));
            assert_eq!(
                search(&mut matcher(&["END"], keeps), &["one E", "N", "D two"]),
                (text.into(), Some(0))
            );
        }
        assert_eq!(search(&mut matcher(&["END"], false), &["one EN"]), ("one EN".into(), None));
        assert_eq!(search(&mut matcher(&[], false), &["one", " two"]), ("one two".into(), None));
    }

    #[test]
    fn only_a_possible_beginning_is_held() {
        let mut matcher = matcher(&["\n\n", "aab"], false);
        let steps = [("x\n", "x"), ("y", "\ny"), ("a", ""), ("a", ""), ("a", "a"), ("c", "aac"), ("é", "é")];
        for (piece, leaves) in steps {
            assert_eq!(
                matcher.push(piece.into()),
                StopSearch { text: leaves.into(), hit: None },
                "{piece:?}"
            );
        }
        assert_eq!(matcher.push("aaab".into()), StopSearch { text: "a".into(), hit: Some(1) });
    }

    #[test]
    fn the_first_complete_string_is_found_and_of_several_the_longest() {
        assert_eq!(search(&mut matcher(&["cde", "bc"], false), &["abcde"]), ("a".into(), Some(1)));
        assert_eq!(search(&mut matcher(&["c", "abc", "bc"], false), &["xabc"]), ("x".into(), Some(1)));
    }

    /// Over a small alphabet, in which stop strings overlap themselves and each other, any split of a text
    /// gives the result of a plain search of the whole text.
    #[test]
    fn the_edges_of_pieces_do_not_matter() {
        let mut dice = Dice::new(5);
        let alphabet = ["a", "b", "é", "日"];
        let word =
            |dice: &mut Dice, len: usize| -> String { (0..len).map(|_| *dice.pick(&alphabet)).collect() };
        for _ in 0..2000 {
            let stops: Vec<String> = (0..1 + dice.below(3))
                .map(|_| {
                    let len = 1 + dice.below(4);
                    word(&mut dice, len)
                })
                .collect();
            let text = word(&mut dice, 20);
            let ends = text.char_indices().map(|(at, c)| at + c.len_utf8());
            let first = ends.into_iter().find_map(|end| {
                let complete = stops.iter().filter(|stop| text[..end].ends_with(stop.as_str()));
                complete.map(String::len).max().map(|len| text[..end - len].to_owned())
            });
            let mut pieces = Vec::new();
            let mut rest = text.as_str();
            while !rest.is_empty() {
                let chars = 1 + dice.below(5);
                let cut = rest.char_indices().nth(chars).map_or(rest.len(), |(at, _)| at);
                pieces.push(&rest[..cut]);
                rest = &rest[cut..];
            }
            let (left, hit) = search(&mut StopMatcher::new(stops.clone().into(), false), &pieces);
            assert_eq!(
                (left, hit.is_some()),
                (first.clone().unwrap_or(text.clone()), first.is_some()),
                "{stops:?} {pieces:?}"
            );
        }
    }
}
