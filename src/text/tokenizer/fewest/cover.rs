//! The fewest pieces of a vocabulary that a text can be cut into.
//!
//! Invariant: the number for a part of a text from its beginning is no more than that for the whole.

/// Maximum length in bytes of a character of a text, and of what one composes with.
const COMPOSED_BYTES: usize = 8;

/// A set of pieces, as an automaton that reads a text byte by byte. Its states are all beginnings of pieces;
/// after each byte, the state is the longest one that ends there.
#[derive(Debug)]
pub struct Cover {
    /// Index of each state's first child; a state's children are adjacent and sorted by byte.
    first_child: Vec<u32>,
    /// Byte that leads to each state.
    byte: Vec<u8>,
    /// The next longest state that ends where a state ends.
    shorter: Vec<u32>,
    length: Vec<u32>,
    longest: usize,
}

const ROOT: u32 = 0;

impl Cover {
    /// Creates the automaton of all `pieces`.
    pub fn new(mut pieces: Vec<Vec<u8>>) -> Cover {
        pieces.sort_unstable();
        pieces.dedup();
        let mut cover = Cover {
            first_child: Vec::new(),
            byte: vec![0],
            shorter: vec![ROOT],
            length: vec![0],
            longest: pieces.iter().map(Vec::len).max().unwrap_or(0),
        };
        // For each state, the pieces that begin with it.
        let mut ranges = Vec::with_capacity(pieces.len());
        ranges.push(0..pieces.len());
        let mut state = 0;
        while state < ranges.len() {
            let (range, length) = (ranges[state].clone(), cover.length[state] as usize);
            cover.first_child.push(ranges.len() as u32);
            let mut from =
                range.start + usize::from(pieces.get(range.start).is_some_and(|p| p.len() == length));
            while from < range.end {
                let byte = pieces[from][length];
                let len = pieces[from..range.end].partition_point(|piece| piece[length] == byte);
                ranges.push(from..from + len);
                cover.byte.push(byte);
                cover.length.push(length as u32 + 1);
                from += len;
            }
            state += 1;
        }
        cover.first_child.push(ranges.len() as u32);
        cover.link();
        cover
    }

    /// Sets the next longest state of each state, shorter ones first.
    fn link(&mut self) {
        self.shorter.resize(self.byte.len(), ROOT);
        for state in 1..self.first_child.len() as u32 - 1 {
            for child in self.children(state) {
                let next = self.next(self.shorter[state as usize], self.byte[child as usize]);
                self.shorter[child as usize] = next;
            }
        }
    }

    fn children(&self, state: u32) -> std::ops::Range<u32> {
        self.first_child[state as usize]..self.first_child[state as usize + 1]
    }

    /// Returns the state after another byte.
    fn next(&self, mut state: u32, byte: u8) -> u32 {
        loop {
            let children = self.children(state);
            let bytes = &self.byte[children.start as usize..children.end as usize];
            match bytes.binary_search(&byte) {
                Ok(at) => return children.start + at as u32,
                Err(_) if state == ROOT => return ROOT,
                Err(_) => state = self.shorter[state as usize],
            }
        }
    }

    /// Begins to read a text.
    pub fn reader(&self) -> CoverReader<'_> {
        CoverReader {
            cover: self,
            fewest: vec![0; self.longest.max(COMPOSED_BYTES) + 1],
            at: 0,
            state: ROOT,
            free_until: 0,
        }
    }
}

/// Reads a text. The number of pieces up to each byte is that up to the longest beginning of a piece that
/// ends there, plus one: since a piece may be cut at its end, a longer last piece is never worse.
pub struct CoverReader<'c> {
    cover: &'c Cover,
    /// Fewest pieces up to the last bytes, in a ring.
    fewest: Vec<u32>,
    /// Number of bytes that were read.
    at: usize,
    state: u32,
    /// Bytes up to here may belong to a piece with text that is not known.
    free_until: usize,
}

impl CoverReader<'_> {
    /// Reads a byte, and returns the fewest pieces for the text so far.
    pub fn read(&mut self, byte: u8) -> u32 {
        let ring = self.fewest.len();
        self.state = self.cover.next(self.state, byte);
        let before = self.fewest[self.at % ring];
        self.at += 1;
        let length = self.cover.length[self.state as usize] as usize;
        let fewest = match length {
            // No piece has this byte.
            0 => before,
            _ if self.at <= self.free_until => before,
            _ => self.fewest[(self.at - length) % ring] + 1,
        };
        self.fewest[self.at % ring] = fewest;
        fewest
    }

    /// Reads a character that may become any text, together with text beside it. Pieces that reach into it,
    /// from before or to behind, count nothing.
    pub fn skip(&mut self, bytes: usize) {
        let ring = self.fewest.len();
        let fewest = self.fewest[self.at.saturating_sub(ring - 1) % ring];
        self.state = ROOT;
        for _ in 0..bytes {
            self.at += 1;
            self.fewest[self.at % ring] = fewest;
        }
        // The positions before are not read again: the state begins here.
        self.free_until = self.at + self.cover.longest;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::vocabularies::Dice;

    /// Returns the fewest pieces that cover a text, the last of which may be cut.
    fn oracle(pieces: &[Vec<u8>], text: &[u8]) -> u32 {
        let mut fewest = vec![u32::MAX; text.len() + 1];
        fewest[0] = 0;
        for end in 1..=text.len() {
            let begins = |piece: &Vec<u8>| {
                (1..=piece.len().min(end)).filter(|len| text[end - len..end] == piece[..*len]).max()
            };
            for length in pieces.iter().filter_map(begins) {
                for len in 1..=length {
                    if pieces.iter().any(|piece| piece.starts_with(&text[end - len..end])) {
                        fewest[end] = fewest[end].min(fewest[end - len].saturating_add(1));
                    }
                }
            }
        }
        fewest[text.len()]
    }

    #[test]
    fn no_other_way_to_cut_needs_fewer_pieces() {
        let mut dice = Dice::new(81);
        let mut word =
            |most: usize| -> Vec<u8> { (0..=dice.below(most)).map(|_| b"ab "[dice.below(3)]).collect() };
        for _ in 0..100 {
            let mut pieces: Vec<Vec<u8>> = (0..8).map(|_| word(5)).collect();
            pieces.extend([b"a", b"b", b" "].map(|byte| byte.to_vec()));
            let cover = Cover::new(pieces.clone());
            for _ in 0..10 {
                let text = word(30);
                let mut reader = cover.reader();
                for (at, byte) in text.iter().enumerate() {
                    assert_eq!(reader.read(*byte), oracle(&pieces, &text[..=at]), "{text:?} {pieces:?}");
                }
            }
        }
    }

    #[test]
    fn text_around_an_unknown_character_counts_only_beyond_the_longest_piece() {
        let cover = Cover::new([&b"a"[..], b"aaaa"].map(<[u8]>::to_vec).to_vec());
        let mut reader = cover.reader();
        for at in 1..=40 {
            assert_eq!(reader.read(b'a'), (at as u32).div_ceil(4));
        }
        reader.skip(2);
        // Of the 40 bytes before, 8 may belong to the unknown character.
        for _ in 0..4 {
            assert_eq!(reader.read(b'a'), 8);
        }
        assert_eq!(reader.read(b'a'), 9);
        assert_eq!(reader.read(b'x'), 9);
    }

    /// A search for each position would take minutes: every one of a run nearly reaches the longest piece.
    #[test]
    fn runs_that_end_just_before_a_piece_take_linear_time() {
        let fewest = crate::testing::vocabularies::run_with_timeout(|| {
            let pieces = (1..=1024).map(|len| vec![b' '; len]).chain([b"x".to_vec()]);
            let cover = Cover::new(pieces.collect());
            let text = [&[b' '; 1023][..], b"x"].concat().repeat(2000);
            let mut reader = cover.reader();
            text.iter().map(|byte| reader.read(*byte)).last()
        });
        assert_eq!(fewest, Some(4000));
    }
}
