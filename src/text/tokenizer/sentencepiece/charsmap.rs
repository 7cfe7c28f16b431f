//! Character map of a sentencepiece model, which rewrites characters during normalization: a double-array
//! trie of prefixes, and their replacements.
//!
//! Layout: the length of the double array in bytes (u32), its units (u32 each, all little-endian), and then
//! the replacements, each terminated by a zero byte. A unit has, from the lowest bit: its label (8 bits),
//! whether a prefix ends here (1), whether its offset is in units of 256 (1), and its offset (21). The value
//! of a prefix is the low 31 bits of the unit that its end leads to; it is the position of the replacement.
//!
//! Invariant: for any units and replacements, a lookup stays within them, reads at most `RULE_MAX` bytes and
//! returns at most as many.

use anyhow::{Context, Result, ensure};

/// Maximum length of a prefix and of a replacement, in bytes; real ones are a character with its combining
/// marks. The limit is needed since units can form cycles, and a replacement could be as long as the file.
const RULE_MAX: usize = 256;

/// Character map: prefixes of a text and their replacements.
#[derive(Debug)]
pub struct Charsmap {
    units: Vec<u32>,
    replacements: String,
}

impl Charsmap {
    /// Parses a character map; `None` if `blob` is empty.
    pub fn read(blob: &[u8]) -> Result<Option<Charsmap>> {
        if blob.is_empty() {
            return Ok(None);
        }
        let (len, rest) = blob.split_first_chunk::<4>().context("the character map is truncated")?;
        let len = u32::from_le_bytes(*len) as usize;
        ensure!(
            len <= rest.len() && len.is_multiple_of(4),
            "the character map claims an index of {len} bytes, but has {}",
            rest.len()
        );
        let (units, replacements) = rest.split_at(len);
        let (units, _) = units.as_chunks::<4>();
        let replacements = std::str::from_utf8(replacements).context("the character map")?;
        let longest = replacements.split('\0').map(str::len).max().unwrap_or_default();
        ensure!(longest <= RULE_MAX, "the character map has a replacement of {longest} bytes");
        Ok(Some(Charsmap {
            units: units.iter().map(|unit| u32::from_le_bytes(*unit)).collect(),
            replacements: replacements.to_owned(),
        }))
    }

    /// Finds the longest prefix of `text` in the map. Returns its length in bytes and its replacement.
    pub fn longest(&self, text: &str) -> Option<(usize, &str)> {
        let mut node = self.offset(0)?;
        let mut found = None;
        for (at, byte) in text.bytes().enumerate().take(RULE_MAX).take_while(|(_, byte)| *byte != 0) {
            node ^= usize::from(byte);
            let Some(unit) = self.units.get(node).filter(|unit| *unit & LABEL == u32::from(byte)) else {
                break;
            };
            let Some(offset) = self.offset(node) else { break };
            node ^= offset;
            if unit & HAS_END != 0 {
                found = self.units.get(node).map(|end| (at + 1, *end & VALUE));
            }
        }
        let (len, value) = found.filter(|(len, _)| text.is_char_boundary(*len))?;
        let replacement = self.replacements.get(value as usize..)?;
        Some((len, replacement.split('\0').next()?))
    }

    /// Returns the offset of a unit.
    fn offset(&self, node: usize) -> Option<usize> {
        let unit = *self.units.get(node)?;
        Some(((unit >> 10) << ((unit & IN_BLOCKS) >> 6)) as usize)
    }
}

/// Mask of a unit's label. It includes the top bit, which is set in value units, so that those match no byte.
const LABEL: u32 = 1 << 31 | 0xff;
const HAS_END: u32 = 1 << 8;
const IN_BLOCKS: u32 = 1 << 9;
const VALUE: u32 = !(1 << 31);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::vocabularies::Dice;

    /// Returns a map of three prefixes: "a" to "x", "ab" to nothing, "é" to "e".
    fn rules() -> Vec<u8> {
        let mut units = vec![0u32; 1024];
        let unit =
            |offset: u32, label: u8, ends: bool| offset << 10 | u32::from(ends) << 8 | u32::from(label);
        let [a, b] = [usize::from(b'a'), usize::from(b'b')];
        units[0] = unit(256, 0, false);
        let at_a = 256 ^ a;
        units[at_a] = unit((at_a ^ 512) as u32, b'a', true);
        units[512] = 1 << 31;
        let at_b = 512 ^ b;
        units[at_b] = unit((at_b ^ 700) as u32, b'b', true);
        units[700] = 1 << 31 | 2;
        let at_c3 = 256 ^ 0xc3;
        units[at_c3] = unit((at_c3 ^ 768) as u32, 0xc3, false);
        let at_a9 = 768 ^ 0xa9;
        units[at_a9] = unit((at_a9 ^ 701) as u32, 0xa9, true);
        units[701] = 1 << 31 | 3;
        let index: Vec<u8> = units.iter().flat_map(|unit| unit.to_le_bytes()).collect();
        [&(index.len() as u32).to_le_bytes()[..], &index, b"x\0\0e\0"].concat()
    }

    #[test]
    fn the_longest_rule_is_taken() {
        let map = Charsmap::read(&rules()).unwrap().unwrap();
        let cases =
            [("ab", Some((2, ""))), ("ac", Some((1, "x"))), ("é", Some((2, "e"))), ("b", None), ("è", None)];
        for (text, expected) in cases {
            assert_eq!(map.longest(text), expected, "{text}");
        }
        assert_eq!((map.longest(""), map.longest("\0")), (None, None));
        assert!(Charsmap::read(b"").unwrap().is_none());
    }

    #[test]
    fn units_that_lead_in_circles_and_endless_replacements_are_harmless() {
        // "a" leads back to the same node.
        let mut units = [0u32; 512];
        units[0] = 256 << 10;
        units[256] = 1 << 31;
        units[256 ^ 0x61] = 0x61 << 10 | HAS_END | 0x61;
        let index: Vec<u8> = units.iter().flat_map(|unit| unit.to_le_bytes()).collect();
        let blob = |replacement: &str| {
            [&(index.len() as u32).to_le_bytes()[..], &index, replacement.as_bytes()].concat()
        };
        let map = Charsmap::read(&blob("x\0")).unwrap().unwrap();
        assert_eq!(map.longest("aab"), Some((2, "x")));
        assert_eq!(map.longest(&"a".repeat(10 * RULE_MAX)), Some((RULE_MAX, "x")));
        let error = Charsmap::read(&blob(&"x".repeat(RULE_MAX + 1))).unwrap_err().to_string();
        assert!(error.contains("a replacement of 257 bytes"), "{error}");
    }

    #[test]
    fn damage_is_refused_or_harmless() {
        let whole = rules();
        for end in 1..4 {
            assert!(Charsmap::read(&whole[..end]).unwrap_err().to_string().contains("truncated"));
        }
        let error = Charsmap::read(&whole[..40]).unwrap_err().to_string();
        assert!(error.contains("4096 bytes, but has 36"), "{error}");
        let mut dice = Dice::new(44);
        for _ in 0..3000 {
            let mut damaged = whole.clone();
            for _ in 0..20 {
                // Indices of the units that a lookup visits.
                let at = *dice.pick(&[0, 256 ^ 0x61, 512, 512 ^ 0x62, 256 ^ 0xc3, 768 ^ 0xa9, 700, 701]);
                damaged[4 + 4 * at + dice.below(4)] = dice.below(256) as u8;
            }
            let map = Charsmap::read(&damaged).unwrap().unwrap();
            for text in ["ab", "aab", "é", "日本"] {
                assert!(map.longest(text).is_none_or(|(len, _)| len <= text.len()));
            }
        }
    }
}
