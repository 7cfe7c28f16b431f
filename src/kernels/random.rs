//! The counter-based random number generator of sampling: pure functions of a seed, a position, and a stream
//! or a token id.
//!
//! Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
//! Invariant: stateless. The same seed and position give the same number on every device and in every batch.

const ROUNDS: usize = 10;
const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

/// Philox4x32-10: returns four random words for a 128-bit counter and a 64-bit key.
pub fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let a = u64::from(MULTIPLIERS[0]) * u64::from(counter[0]);
        let b = u64::from(MULTIPLIERS[1]) * u64::from(counter[2]);
        counter = [
            (b >> 32) as u32 ^ counter[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ counter[3] ^ key[1],
            a as u32,
        ];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

/// Returns a uniform random number in [0, 1) with 24 random bits, for the `seed` of a sequence and the
/// `position` of a token. Numbers of different streams are independent, so that strategies may need several.
pub fn uniform(seed: u64, position: u64, stream: u32) -> f32 {
    let words = philox([position as u32, (position >> 32) as u32, stream, 0], key(seed));
    (words[0] >> 8) as f32 * (1.0 / (1 << 24) as f32)
}

/// Returns the random words of the tokens `4 * group` to `4 * group + 3` for a seed and a position. They are
/// independent of every stream of [`uniform`].
pub fn token_words(seed: u64, position: u64, group: u32) -> [u32; 4] {
    philox([position as u32, (position >> 32) as u32, group, 1], key(seed))
}

/// Returns the random words of the tokens `64 * block` to `64 * block + 63`, as [`token_words`] does.
#[inline(always)]
pub fn block_words(seed: u64, position: u64, block: u32) -> [u32; 64] {
    const LANES: usize = 16;
    let [mut a, mut b] = [[position as u32; LANES], [(position >> 32) as u32; LANES]];
    let [mut c, mut d] = [[0; LANES], [1; LANES]];
    for (lane, group) in c.iter_mut().enumerate() {
        *group = LANES as u32 * block + lane as u32;
    }
    let mut key = key(seed);
    for _ in 0..ROUNDS {
        for lane in 0..LANES {
            let first = u64::from(MULTIPLIERS[0]) * u64::from(a[lane]);
            let second = u64::from(MULTIPLIERS[1]) * u64::from(c[lane]);
            a[lane] = (second >> 32) as u32 ^ b[lane] ^ key[0];
            b[lane] = second as u32;
            c[lane] = (first >> 32) as u32 ^ d[lane] ^ key[1];
            d[lane] = first as u32;
        }
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    let mut words = [0; 4 * LANES];
    for lane in 0..LANES {
        (words[4 * lane], words[4 * lane + 1]) = (a[lane], b[lane]);
        (words[4 * lane + 2], words[4 * lane + 3]) = (c[lane], d[lane]);
    }
    words
}

/// Returns the key of a seed.
fn key(seed: u64) -> [u32; 2] {
    [seed as u32, (seed >> 32) as u32]
}

/// Generates `n` pseudo-random numbers in [-1, 1] with full mantissas; equal tags give equal numbers. For
/// tests and measurements.
pub fn noise(tag: u32, n: usize) -> Vec<f32> {
    let words = (0..n.div_ceil(4) as u32).flat_map(|i| philox([i, tag, 0, 0], [1, 2]));
    words.take(n).map(|word| word as i32 as f32 / (1u32 << 31) as f32).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known-answer vectors that the generator's authors publish (Random123, kat_vectors).
    #[test]
    fn philox_gives_its_published_answers() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn uniform_stays_below_one_and_depends_on_all_arguments() {
        let numbers = (0..4096).map(|p| uniform(7, p, 0)).inspect(|u| assert!((0.0..1.0).contains(u)));
        let mean = numbers.sum::<f32>() / 4096.0;
        assert!((mean - 0.5).abs() < 0.03, "{mean}");
        assert_ne!(uniform(1, 2, 0), uniform(2, 1, 0));
        assert_ne!(uniform(1 << 40, 0, 0), uniform(0, 0, 0));
        assert_ne!(uniform(1, 2, 1), uniform(1, 2, 2));
    }

    #[test]
    fn token_words_differ_from_streams_and_from_each_other() {
        assert_ne!(token_words(7, 9, 0), philox([9, 0, 0, 0], [7, 0]));
        assert_ne!(token_words(7, 9, 0), token_words(7, 9, 1));
        assert_ne!(token_words(7, 9, 0), token_words(7, 10, 0));
        let groups = (3 * 16..4 * 16).map(|group| token_words(7 << 33, 9 << 32 | 1, group));
        assert_eq!(block_words(7 << 33, 9 << 32 | 1, 3)[..], groups.collect::<Vec<_>>().concat());
    }
}
