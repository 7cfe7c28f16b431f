//! Prefetching the weights that are multiplied next, while others are multiplied.
//!
//! Invariant: prefetching changes no result; the addresses need not even be valid.

use crate::cpu::simd::prefetch_l2;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Prefetches quants and scales, a few cache lines per step.
#[derive(Clone, Copy)]
pub struct Prefetcher {
    quants: CacheLines,
    scales: CacheLines,
}

/// A range of consecutive cache lines.
#[derive(Clone, Copy)]
struct CacheLines {
    at: *const u8,
    left: usize,
    lines_per_step: usize,
}

impl Prefetcher {
    /// Prefetches nothing.
    pub const NONE: Prefetcher = Prefetcher { quants: CacheLines::NONE, scales: CacheLines::NONE };

    /// Creates a prefetcher for part `part` of `parts` of the given quants and scales (address, bytes each),
    /// divided among `times` calls of [`Prefetcher::step`].
    pub fn new(
        (quants, scales): ((*const u8, usize), (*const u8, usize)),
        (part, parts): (usize, usize),
        times: usize,
    ) -> Prefetcher {
        let lines = |bytes| CacheLines::new(bytes, (part, parts), times);
        Prefetcher { quants: lines(quants), scales: lines(scales) }
    }

    /// Prefetches the lines of one step.
    #[inline(always)]
    pub fn step(&mut self) {
        self.quants.step();
        self.scales.step();
    }
}

impl CacheLines {
    const NONE: CacheLines = CacheLines { at: std::ptr::null(), left: 0, lines_per_step: 0 };

    fn new((at, bytes): (*const u8, usize), (part, parts): (usize, usize), times: usize) -> CacheLines {
        let lines = bytes.div_ceil(LINE);
        let (start, end) = (part * lines / parts, (part + 1) * lines / parts);
        let left = end - start;
        CacheLines { at: at.wrapping_add(start * LINE), left, lines_per_step: left.div_ceil(times.max(1)) }
    }

    #[inline(always)]
    fn step(&mut self) {
        self.next_lines().for_each(prefetch_l2);
    }

    /// Returns the lines of one step.
    #[inline(always)]
    fn next_lines(&mut self) -> impl Iterator<Item = *const u8> + use<> {
        let (at, lines) = (self.at, self.lines_per_step.min(self.left));
        self.at = at.wrapping_add(lines * LINE);
        self.left -= lines;
        (0..lines).map(move |line| at.wrapping_add(line * LINE))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_parts_together_prefetch_each_line_once() {
        for (bytes, parts, times) in
            [(8192, 2, 8), (4096, 32, 8), (576, 3, 16), (64, 5, 1), (0, 2, 8), (100, 1, 3)]
        {
            let base = std::ptr::without_provenance::<u8>(1 << 20);
            let mut fetched = Vec::new();
            for part in 0..parts {
                let mut lines = CacheLines::new((base, bytes), (part, parts), times);
                for _ in 0..times {
                    fetched.extend(lines.next_lines().map(|line| line as usize));
                }
                assert_eq!(lines.next_lines().count(), 0, "{bytes} bytes in {parts} parts, {times} times");
            }
            let all: Vec<usize> = (0..bytes.div_ceil(LINE)).map(|line| base as usize + line * LINE).collect();
            assert_eq!(fetched, all, "{bytes} bytes in {parts} parts, {times} times");
        }
    }
}
