//! Group quantization of llama2.c version 2: all elements as signed bytes, followed by one F32 scale for each
//! group of elements. Groups may cross row boundaries.
//!
//! Invariant: an element is its byte times the scale of its group, rounded once to F32, so no precision of
//! the file is lost. Converting to a block format with F16 scales would change the values.

const SCALE_BYTES: usize = size_of::<f32>();

/// Group size of a group-quantized tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct QuantGroups {
    /// Elements per group; not 0.
    pub(super) size: usize,
}

impl QuantGroups {
    /// Bytes that `count` elements take in the file. `None` if `count` is not a multiple of the group size,
    /// or on overflow.
    pub(super) fn stored_bytes(self, count: usize) -> Option<usize> {
        if !count.is_multiple_of(self.size) {
            return None;
        }
        (count / self.size).checked_mul(SCALE_BYTES)?.checked_add(count)
    }

    /// Bytes of the F32 elements that are stored in `stored` bytes.
    pub(super) fn output_bytes(self, stored: usize) -> usize {
        self.element_count(stored) * size_of::<f32>()
    }

    /// Returns the elements stored in these bytes, as F32.
    pub(super) fn dequantize(self, stored: &[u8]) -> Vec<u8> {
        let (quants, scales) = stored.split_at(self.element_count(stored.len()));
        let mut numbers = Vec::with_capacity(self.output_bytes(stored.len()));
        for (quants, scale) in quants.chunks_exact(self.size).zip(scales.as_chunks().0) {
            let scale = f32::from_le_bytes(*scale);
            numbers.extend(quants.iter().flat_map(|code| (f32::from(*code as i8) * scale).to_le_bytes()));
        }
        numbers
    }

    /// Number of elements stored in `stored` bytes.
    fn element_count(self, stored: usize) -> usize {
        stored / (self.size + SCALE_BYTES) * self.size
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_quants_times_the_scale_of_their_group() {
        let scales = [0.1f32, -2.5, 1e-30];
        let quants = [1i8, -128, 127, 0, -1, 2, 3, 100, -100];
        let stored: Vec<u8> = quants
            .iter()
            .map(|code| *code as u8)
            .chain(scales.into_iter().flat_map(f32::to_le_bytes))
            .collect();
        let groups = QuantGroups { size: 3 };
        let numbers = [
            0.1, -12.8, 12.7, // a tenth, which no F16 is
            0.0, 2.5, -5.0, //
            3e-30, 1e-28, -1e-28,
        ];
        let found = groups.dequantize(&stored);
        for (found, expected) in found.as_chunks().0.iter().zip(numbers) {
            let (found, expected): (f32, f32) = (f32::from_le_bytes(*found), expected);
            assert!((found - expected).abs() <= expected.abs() * f32::EPSILON, "{found}, not {expected}");
        }
        assert_eq!((found.len(), groups.output_bytes(stored.len())), (36, 36));
        assert_eq!(groups.stored_bytes(9), Some(stored.len()));
    }

    #[test]
    fn what_is_no_whole_number_of_groups_or_too_many_has_no_bytes() {
        assert_eq!(QuantGroups { size: 4 }.stored_bytes(9), None);
        assert_eq!(QuantGroups { size: 1 }.stored_bytes(usize::MAX / 4), None);
        assert_eq!(QuantGroups { size: 64 }.stored_bytes(0), Some(0));
    }
}
