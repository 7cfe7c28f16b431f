//! Quantized runs for the KV cache. A run is the key or the value vector of one position and one KV head, and
//! is quantized independently of all others.
//!
//! A run is divided into groups of the block length of the format. A shorter last group is quantized as a
//! block that is padded with copies of its last element; the bytes of the padding are omitted. The padding
//! changes neither the range nor the largest magnitude, so that a shorter group has the scale (and the
//! minimum) of its own elements.
//!
//! Invariant: the bytes of a shorter group are a prefix of a block, and the bytes of a run depend on its
//! elements alone.

use super::QuantType;

/// The formats for keys and values, with their short names. A short name selects one of the formats with that
/// number of bits.
const KV_CACHE_FORMATS: [(QuantType, &str); 5] = [
    (QuantType::F32, "f32"),
    (QuantType::F16, "f16"),
    (QuantType::BF16, "bf16"),
    (QuantType::Q8_0, "q8"),
    (QuantType::G4_B64, "q4"),
];

/// Largest number of elements of a group.
pub const MAX_GROUP_LEN: usize = 64;
/// Largest number of bytes of a group.
pub const MAX_GROUP_BYTES: usize = 36;

impl QuantType {
    /// Returns the formats that the KV cache supports. In their blocks, the quants come last, in the order of
    /// the elements.
    pub fn kv_cache_types() -> impl Iterator<Item = QuantType> {
        KV_CACHE_FORMATS.into_iter().map(|(ty, _)| ty)
    }

    /// Returns the names of the KV cache formats: the short names, then those full names that differ.
    pub fn kv_cache_names() -> impl Iterator<Item = (&'static str, QuantType)> {
        let full = QuantType::kv_cache_types().map(|ty| (ty.name(), ty));
        let short = KV_CACHE_FORMATS.into_iter().map(|(ty, name)| (name, ty));
        short.chain(full.filter(|(name, _)| KV_CACHE_FORMATS.iter().all(|(_, short)| short != name)))
    }

    /// Returns the bytes of a run of `numbers` elements; `None` on overflow.
    pub fn run_bytes(self, numbers: usize) -> Option<usize> {
        let block = self.row().block_elements;
        let whole = (numbers / block).checked_mul(self.row().block_bytes)?;
        whole.checked_add(self.partial_group_bytes(numbers % block))
    }

    /// Returns the bytes of a group that is shorter than a block.
    fn partial_group_bytes(self, numbers: usize) -> usize {
        let (row, head) = (self.row(), self.block_split().map_or(0, |parts| parts.param_bytes));
        match numbers {
            0 => 0,
            _ => head + ((row.block_bytes - head) * numbers).div_ceil(row.block_elements),
        }
    }

    /// Quantizes a run: values (n) to out (run_bytes of n). The format is one of
    /// [`QuantType::kv_cache_types`].
    pub fn quantize_run(self, values: &[f32], out: &mut [u8]) {
        let row = self.row();
        let (whole, short) = values.split_at(values.len() - values.len() % row.block_elements);
        let (blocks, rest) = out.split_at_mut(whole.len() / row.block_elements * row.block_bytes);
        self.quantize(whole, blocks);
        if !short.is_empty() {
            let block = self.quantize_group(short);
            rest.copy_from_slice(&block[..self.partial_group_bytes(short.len())]);
        }
    }

    /// Returns the block of a group with 1 to block-length elements. Bytes after the block are zero.
    pub fn quantize_group(self, values: &[f32]) -> [u8; MAX_GROUP_BYTES] {
        let row = self.row();
        let (mut block, mut padded) = ([0; MAX_GROUP_BYTES], [values[values.len() - 1]; MAX_GROUP_LEN]);
        padded[..values.len()].copy_from_slice(values);
        self.quantize(&padded[..row.block_elements], &mut block[..row.block_bytes]);
        block
    }

    /// Dequantizes a run: bytes (run_bytes of n) to out (n).
    pub fn dequantize_run(self, bytes: &[u8], out: &mut [f32]) {
        let row = self.row();
        let whole = out.len() - out.len() % row.block_elements;
        let (blocks, rest) = bytes.split_at(whole / row.block_elements * row.block_bytes);
        let (whole, short) = out.split_at_mut(whole);
        self.dequantize(blocks, whole);
        if !short.is_empty() {
            let (mut block, mut values) = ([0; MAX_GROUP_BYTES], [0.0; MAX_GROUP_LEN]);
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
    fn bytes_are_those_of_scales_and_quants() {
        let bytes = |ty: QuantType| [1, 8, 20, 32, 33, 64, 80, 128].map(|n| ty.run_bytes(n).unwrap());
        assert_eq!(bytes(QuantType::F32), [4, 32, 80, 128, 132, 256, 320, 512]);
        assert_eq!(bytes(QuantType::F16), [2, 16, 40, 64, 66, 128, 160, 256]);
        assert_eq!(bytes(QuantType::Q8_0), [3, 10, 22, 34, 37, 68, 86, 136]);
        assert_eq!(bytes(QuantType::G4_B64), [5, 8, 14, 20, 21, 36, 48, 72]);
        for ty in QuantType::kv_cache_types() {
            assert_eq!(ty.run_bytes(0), Some(0));
            assert_eq!(ty.run_bytes(usize::MAX).is_none(), ty != QuantType::G4_B64, "{ty}");
        }
    }

    /// Lengths with an odd nibble, with groups of one element, and with a shorter last group: each element
    /// returns within half a step of the scale of its own group, plus the rounding of the scale to F16.
    #[test]
    fn a_shorter_group_has_the_scale_of_its_own_numbers() {
        for ty in QUANTISED {
            let group = ty.row().block_elements;
            for n in [1, 2, 7, 8, 20, 31, 33, 64, 65, 80, 127, 128, 576] {
                let values = numbers(n as u32, n);
                let back = there_and_back(ty, &values);
                for (values, back) in values.chunks(group).zip(back.chunks(group)) {
                    let low = values.iter().copied().fold(f32::INFINITY, f32::min);
                    let high = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    let largest = high.max(-low);
                    let step = if ty == QuantType::Q8_0 { largest / 127.0 } else { (high - low) / 15.0 };
                    for (x, back) in values.iter().zip(back) {
                        let allowed = step / 2.0 + (largest + (high - low)) / 2048.0;
                        assert!((x - back).abs() <= allowed, "{ty}, {n}: {x} became {back}");
                    }
                }
            }
        }
    }

    /// A group depends neither on neighboring runs nor on earlier groups.
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

    /// NaN, infinities and numbers outside of the range affect only their own group.
    #[test]
    fn unrepresentable_numbers_affect_only_their_group() {
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
                // One step of the scale, if the number is within the range.
                let allowed = if kept == 0.0 { 0.5 } else { largest / 100.0 };
                assert!(
                    (back[group + 19] - kept).abs() <= allowed,
                    "{ty}: {odd} became {}",
                    back[group + 19]
                );
                assert!(back.iter().all(|x| x.is_finite()), "{ty}: {back:?}");
            }
            // As exact as an F16 scale.
            for x in there_and_back(ty, &[0.375; 20]) {
                assert!((x - 0.375).abs() < 0.375 / 2048.0, "{ty}: a constant became {x}");
            }
            assert_eq!(
                there_and_back(ty, &[1e-42; 20]),
                [0.0; 20],
                "{ty}: subnormal numbers below every scale"
            );
            assert_eq!(there_and_back(ty, &[f32::NAN; 5]), [0.0; 5], "{ty}: nothing but NaN");
        }
    }

    #[test]
    fn names_are_short_and_full() {
        let names: Vec<&str> = QuantType::kv_cache_names().map(|(name, _)| name).collect();
        assert_eq!(names, ["f32", "f16", "bf16", "q8", "q4", "q8_0", "g4_b64"]);
        for (name, ty) in QuantType::kv_cache_names() {
            assert!(name == ty.name() || name.len() < ty.name().len(), "{name} is {ty}");
        }
    }
}
