//! The bytes of all tokens of a vocabulary, in one allocation.
//!
//! Invariant: an id outside the vocabulary has no bytes.

/// Bytes of tokens, by token id.
#[derive(Clone, Debug, Default)]
pub struct TokenBytes {
    bytes: Vec<u8>,
    /// End of each token's bytes; they begin at the end of the previous token's.
    ends: Vec<usize>,
}

impl TokenBytes {
    /// Adds the token with the next id.
    pub fn push(&mut self, piece: &[u8]) {
        self.bytes.extend_from_slice(piece);
        self.ends.push(self.bytes.len());
    }

    /// Returns the bytes of a token.
    pub fn get(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let Some(end) = self.ends.get(id) else { return &[] };
        let begin = id.checked_sub(1).map_or(0, |previous| self.ends[previous]);
        &self.bytes[begin..*end]
    }

    /// Returns the tokens whose bytes contain `part`, in order. `part` must not be empty.
    pub fn containing(&self, part: &[u8]) -> Vec<u32> {
        let mut ids = Vec::new();
        let mut id = 0;
        // One search of all bytes is faster than one per token. The id follows its position.
        let finder = memchr::memmem::Finder::new(part);
        let mut at = 0;
        while let Some(found) = finder.find(&self.bytes[at..]).map(|offset| at + offset) {
            id += self.ends[id..].iter().take_while(|end| **end <= found).count();
            at = match self.ends.get(id) {
                Some(&end) if found + part.len() <= end => {
                    ids.push(id as u32);
                    end
                }
                // The match extends over several tokens.
                _ => found + 1,
            };
        }
        ids
    }

    /// Returns the largest id plus one.
    pub fn len(&self) -> usize {
        self.ends.len()
    }
}

impl FromIterator<Vec<u8>> for TokenBytes {
    fn from_iter<T: IntoIterator<Item = Vec<u8>>>(all: T) -> TokenBytes {
        let mut pieces = TokenBytes::default();
        all.into_iter().for_each(|piece| pieces.push(&piece));
        pieces
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_come_back_by_id_and_unknown_ids_are_empty() {
        let mut pieces = TokenBytes::default();
        let all = [&b"<s>"[..], b"", b"\xff", b" a"];
        all.iter().for_each(|piece| pieces.push(piece));
        assert!((0u32..).zip(all).all(|(id, piece)| pieces.get(id) == piece));
        assert!(pieces.get(4).is_empty() && pieces.get(u32::MAX).is_empty());
        assert_eq!(pieces.len(), 4);
    }

    #[test]
    fn tokens_that_contain_a_text_are_found_but_not_across_tokens() {
        let pieces: TokenBytes = ["ab", "", "a", "b", "cabc", "abab", "ba", "x"]
            .map(|piece| piece.as_bytes().to_vec())
            .into_iter()
            .collect();
        assert_eq!(pieces.containing(b"ab"), [0, 4, 5]);
        assert_eq!(pieces.containing(b"ba"), [5, 6]);
        assert_eq!(pieces.containing(b"x"), [7]);
        assert!(pieces.containing(b"cc").is_empty() && pieces.containing(b"aba").len() == 1);
    }

    /// One search of all bytes equals a search in each token, whatever the distance and the part's length.
    #[test]
    fn a_search_of_all_bytes_finds_what_a_search_of_each_token_finds() {
        let pieces: TokenBytes = (0u32..3000).map(|n| format!("{:b}", n * n).into_bytes()).collect();
        for part in ["0", "1", "11", "0000000", "101010101010", "11111111111"] {
            let part = part.as_bytes();
            let contains = |id: &u32| pieces.get(*id).windows(part.len()).any(|window| window == part);
            assert_eq!(pieces.containing(part), (0..3000).filter(contains).collect::<Vec<_>>(), "{part:?}");
        }
    }
}
