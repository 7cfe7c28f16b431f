//! Numbers stored as signed bytes in groups, each of which has a scale in F32: all bytes of a tensor first, then
//! the scales of its groups. A group need not end where a row does.
//!
//! Invariant: a number is its byte times its group's scale, rounded once, to an F32; so none of what the file
//! says is lost. A scale in F16, as blocks of ours have it, would change the numbers.

const SCALE_BYTES: usize = size_of::<f32>();

/// How a tensor's numbers are grouped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Groups {
    /// Numbers of a group; not 0.
    pub(super) size: usize,
}

impl Groups {
    /// Bytes of `count` numbers as they are stored; `None` when they are no whole number of groups or overflow.
    pub(super) fn stored_bytes(self, count: usize) -> Option<usize> {
        if !count.is_multiple_of(self.size) {
            return None;
        }
        (count / self.size).checked_mul(SCALE_BYTES)?.checked_add(count)
    }

    /// Bytes of the numbers as they are wanted that are stored in so many.
    pub(super) fn wanted_bytes(self, stored: usize) -> usize {
        self.codes(stored) * size_of::<f32>()
    }

    /// The numbers that are stored in these bytes, in F32.
    pub(super) fn numbers(self, stored: &[u8]) -> Vec<u8> {
        let (codes, scales) = stored.split_at(self.codes(stored.len()));
        let mut numbers = Vec::with_capacity(self.wanted_bytes(stored.len()));
        for (codes, scale) in codes.chunks_exact(self.size).zip(scales.as_chunks().0) {
            let scale = f32::from_le_bytes(*scale);
            numbers.extend(codes.iter().flat_map(|code| (f32::from(*code as i8) * scale).to_le_bytes()));
        }
        numbers
    }

    /// The numbers that are stored in so many bytes.
    fn codes(self, stored: usize) -> usize {
        stored / (self.size + SCALE_BYTES) * self.size
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_codes_times_the_scale_of_their_group() {
        let scales = [0.1f32, -2.5, 1e-30];
        let codes = [1i8, -128, 127, 0, -1, 2, 3, 100, -100];
        let stored: Vec<u8> = codes
            .iter()
            .map(|code| *code as u8)
            .chain(scales.into_iter().flat_map(f32::to_le_bytes))
            .collect();
        let groups = Groups { size: 3 };
        let numbers = [
            0.1, -12.8, 12.7, // a tenth, which no F16 is
            0.0, 2.5, -5.0, //
            3e-30, 1e-28, -1e-28,
        ];
        let found = groups.numbers(&stored);
        for (found, expected) in found.as_chunks().0.iter().zip(numbers) {
            let (found, expected): (f32, f32) = (f32::from_le_bytes(*found), expected);
            assert!((found - expected).abs() <= expected.abs() * f32::EPSILON, "{found}, not {expected}");
        }
        assert_eq!((found.len(), groups.wanted_bytes(stored.len())), (36, 36));
        assert_eq!(groups.stored_bytes(9), Some(stored.len()));
    }

    #[test]
    fn what_is_no_whole_number_of_groups_or_too_many_has_no_bytes() {
        assert_eq!(Groups { size: 4 }.stored_bytes(9), None);
        assert_eq!(Groups { size: 1 }.stored_bytes(usize::MAX / 4), None);
        assert_eq!(Groups { size: 64 }.stored_bytes(0), Some(0));
    }
}
