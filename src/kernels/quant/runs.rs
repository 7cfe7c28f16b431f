//! Runs of numbers that are coded alone: a key or a value of one position and one KV head.
//!
//! A run is cut into groups as long as the format's block. Where the last one is shorter, it is coded as the block of its
//! numbers and of as many copies of the last of them as are missing; what the block's bytes say of copies is left out.
//! Copies widen neither the range nor the largest magnitude, so that a shorter group has the scale (and the least number)
//! of its own numbers.
//!
//! Invariant: the bytes of a shorter group are the beginning of a block's, and a run's bytes follow from its numbers alone.

use super::QuantType;

/// The formats of keys and values, each with its name there: the one that is meant where several formats have so many bits.
const FORMATS: [(QuantType, &str); 5] = [
    (QuantType::F32, "f32"),
    (QuantType::F16, "f16"),
    (QuantType::BF16, "bf16"),
    (QuantType::Q8_0, "q8"),
    (QuantType::G4_B64, "q4"),
];

/// Numbers of a group, at most, and bytes of its block.
pub const GROUP_NUMBERS: usize = 64;
pub const GROUP_BYTES: usize = 36;

impl QuantType {
    /// Those that keys and values can be stored in. Their codes lie in the order of their numbers, behind all else.
    pub fn cached() -> impl Iterator<Item = QuantType> {
        FORMATS.into_iter().map(|(ty, _)| ty)
    }

    /// What keys and values can be said to be stored in: the short names, then those full ones that differ.
    pub fn cache_names() -> impl Iterator<Item = (&'static str, QuantType)> {
        let full = QuantType::cached().map(|ty| (ty.name(), ty));
        let short = FORMATS.into_iter().map(|(ty, name)| (name, ty));
        short.chain(full.filter(|(name, _)| FORMATS.iter().all(|(_, short)| short != name)))
    }

    /// Bytes of a run of `numbers`; `None` where they overflow.
    pub fn run_bytes(self, numbers: usize) -> Option<usize> {
        let block = self.row().block_elements;
        let whole = (numbers / block).checked_mul(self.row().block_bytes)?;
        whole.checked_add(self.short_bytes(numbers % block))
    }

    /// Bytes of a group that is shorter than a block.
    fn short_bytes(self, numbers: usize) -> usize {
        let (row, head) = (self.row(), self.parts().map_or(0, |parts| parts.head));
        match numbers {
            0 => 0,
            _ => head + ((row.block_bytes - head) * numbers).div_ceil(row.block_elements),
        }
    }

    /// Writes a run: values (n) to out (run_bytes of n). The type is one of [`QuantType::cached`].
    pub fn quantize_run(self, values: &[f32], out: &mut [u8]) {
        let row = self.row();
        let (whole, short) = values.split_at(values.len() - values.len() % row.block_elements);
        let (blocks, rest) = out.split_at_mut(whole.len() / row.block_elements * row.block_bytes);
        self.quantize(whole, blocks);
        if !short.is_empty() {
            let block = self.quantize_group(short);
            rest.copy_from_slice(&block[..self.short_bytes(short.len())]);
        }
    }

    /// The block of a group that has numbers, as many as a block or fewer. What is behind it is zero.
    pub fn quantize_group(self, values: &[f32]) -> [u8; GROUP_BYTES] {
        let row = self.row();
        let (mut block, mut padded) = ([0; GROUP_BYTES], [values[values.len() - 1]; GROUP_NUMBERS]);
        padded[..values.len()].copy_from_slice(values);
        self.quantize(&padded[..row.block_elements], &mut block[..row.block_bytes]);
        block
    }

    /// Reads a run: bytes (run_bytes of n) to out (n).
    pub fn dequantize_run(self, bytes: &[u8], out: &mut [f32]) {
        let row = self.row();
        let whole = out.len() - out.len() % row.block_elements;
        let (blocks, rest) = bytes.split_at(whole / row.block_elements * row.block_bytes);
        let (whole, short) = out.split_at_mut(whole);
        self.dequantize(blocks, whole);
        if !short.is_empty() {
            let (mut block, mut values) = ([0; GROUP_BYTES], [0.0; GROUP_NUMBERS]);
            block[..rest.len()].copy_from_slice(rest);
            self.dequantize(&block[..row.block_bytes], &mut values[..row.block_elements]);
            short.copy_from_slice(&values[..short.len()]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::random::philox;

    const QUANTISED: [QuantType; 2] = [QuantType::Q8_0, QuantType::G4_B64];

    fn numbers(tag: u32, n: usize) -> Vec<f32> {
        let word = |i: usize| philox([i as u32, tag, 0, 0], [6, 1])[0];
        (0..n).map(|i| word(i) as i32 as f32 / 1e9 + 0.3).collect()
    }

    fn there_and_back(ty: QuantType, values: &[f32]) -> Vec<f32> {
        let (mut bytes, mut back) = (vec![0; ty.run_bytes(values.len()).unwrap()], vec![9.0; values.len()]);
        ty.quantize_run(values, &mut bytes);
        ty.dequantize_run(&bytes, &mut back);
        back
    }

    #[test]
    fn bytes_are_those_of_scales_and_codes() {
        let bytes = |ty: QuantType| [1, 8, 20, 32, 33, 64, 80, 128].map(|n| ty.run_bytes(n).unwrap());
        assert_eq!(bytes(QuantType::F32), [4, 32, 80, 128, 132, 256, 320, 512]);
        assert_eq!(bytes(QuantType::F16), [2, 16, 40, 64, 66, 128, 160, 256]);
        assert_eq!(bytes(QuantType::Q8_0), [3, 10, 22, 34, 37, 68, 86, 136]);
        assert_eq!(bytes(QuantType::G4_B64), [5, 8, 14, 20, 21, 36, 48, 72]);
        for ty in QuantType::cached() {
            assert_eq!(ty.run_bytes(0), Some(0));
            assert_eq!(ty.run_bytes(usize::MAX).is_none(), ty != QuantType::G4_B64, "{ty}");
        }
    }

    /// An odd half-byte, groups of one number, and runs that end with a shorter group: each number within half a step of
    /// the scale that its own group's numbers give, and an F16's rounding of that.
    #[test]
    fn a_shorter_group_has_the_scale_of_its_own_numbers() {
        for ty in QUANTISED {
            let group = ty.row().block_elements;
            for n in [1, 2, 7, 8, 20, 31, 33, 64, 65, 80, 127, 128, 576] {
                let values = numbers(n as u32, n);
                let back = there_and_back(ty, &values);
                for (values, back) in values.chunks(group).zip(back.chunks(group)) {
                    let least = values.iter().copied().fold(f32::INFINITY, f32::min);
                    let most = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    let largest = most.max(-least);
                    let step = if ty == QuantType::Q8_0 { largest / 127.0 } else { (most - least) / 15.0 };
                    for (x, back) in values.iter().zip(back) {
                        let allowed = step / 2.0 + (largest + (most - least)) / 2048.0;
                        assert!((x - back).abs() <= allowed, "{ty}, {n}: {x} became {back}");
                    }
                }
            }
        }
    }

    /// What one run's neighbours are, and what its earlier groups, is nothing to a group.
    #[test]
    fn a_groups_bytes_follow_from_its_numbers() {
        for ty in QUANTISED {
            let (group, values) = (ty.row().block_elements, numbers(1, 80));
            let mut whole = vec![0; ty.run_bytes(80).unwrap()];
            ty.quantize_run(&values, &mut whole);
            let last = &values[80 - 80 % group..];
            let mut alone = vec![0; ty.run_bytes(last.len()).unwrap()];
            ty.quantize_run(last, &mut alone);
            assert!(whole.ends_with(&alone), "{ty}");
        }
    }

    /// Numbers that are none, or that the scale cannot hold, cost those of their own group, and those only.
    #[test]
    fn what_cannot_be_held_stays_in_its_group() {
        for ty in QUANTISED {
            let (group, largest) =
                (ty.row().block_elements, if ty == QuantType::Q8_0 { 127.0 * 65504.0 } else { 65504.0 });
            let cases = [
                (f32::NAN, 0.0),
                (f32::INFINITY, largest),
                (f32::NEG_INFINITY, -largest),
                (3e38, largest),
                (1e-40, 0.0),
            ];
            for (odd, kept) in cases {
                let mut values = numbers(2, group + 20);
                let usual = there_and_back(ty, &values);
                values[group + 19] = odd;
                let back = there_and_back(ty, &values);
                assert_eq!(back[..group], usual[..group], "{ty}: {odd} in the next group");
                // One step of the group's scale, where it is within the range.
                let allowed = if kept == 0.0 { 0.5 } else { largest / 100.0 };
                assert!(
                    (back[group + 19] - kept).abs() <= allowed,
                    "{ty}: {odd} became {}",
                    back[group + 19]
                );
                assert!(back.iter().all(|x| x.is_finite()), "{ty}: {back:?}");
            }
            // As exactly as an F16 holds the scale.
            for x in there_and_back(ty, &[0.375; 20]) {
                assert!((x - 0.375).abs() < 0.375 / 2048.0, "{ty}: a constant became {x}");
            }
            assert_eq!(there_and_back(ty, &[1e-42; 20]), [0.0; 20], "{ty}: denormals below every scale");
            assert_eq!(there_and_back(ty, &[f32::NAN; 5]), [0.0; 5], "{ty}: nothing but NaN");
        }
    }

    #[test]
    fn names_are_short_and_whole() {
        let names: Vec<&str> = QuantType::cache_names().map(|(name, _)| name).collect();
        assert_eq!(names, ["f32", "f16", "bf16", "q8", "q4", "q8_0", "g4_b64"]);
        for (name, ty) in QuantType::cache_names() {
            assert!(name == ty.name() || name.len() < ty.name().len(), "{name} is {ty}");
        }
    }
}
