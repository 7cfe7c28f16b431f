//! Seeded random number streams for arrival gaps, lengths, prompts and hang-ups.
//!
//! Invariant: the numbers of one purpose depend only on the seed and the purpose, not on the use of other
//! streams.

use mainstem_kernels::random::philox;
use rand::RngCore;

/// The purpose of a random number stream; each purpose has its own stream. The number of a variant is a
/// request index, except for `Prefix`, where it is the group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    Arrivals,
    /// The content of a request's prompt.
    Request(u64),
    PromptLength(u64),
    OutputLength(u64),
    /// The prefix group of a request.
    Group(u64),
    /// The prefix shared by the prompts of a group.
    Prefix(u64),
    HangUp(u64),
    SlowReader(u64),
    Model(u64),
    Key(u64),
    /// The kind of a request of a soak test, and what its client does.
    Soak(u64),
}

/// Number of low bits of a stream number that hold the index; the remaining bits identify the purpose.
const INDEX_BITS: u32 = 56;

impl Purpose {
    fn stream(self) -> u64 {
        let (kind, index) = match self {
            Purpose::Arrivals => (0, 0),
            Purpose::Request(index) => (1, index),
            Purpose::PromptLength(index) => (2, index),
            Purpose::OutputLength(index) => (3, index),
            Purpose::Group(index) => (4, index),
            Purpose::Prefix(group) => (5, group),
            Purpose::HangUp(index) => (6, index),
            Purpose::SlowReader(index) => (7, index),
            Purpose::Model(index) => (8, index),
            Purpose::Key(index) => (9, index),
            Purpose::Soak(index) => (10, index),
        };
        assert!(index < 1 << INDEX_BITS, "the index {index} exceeds {INDEX_BITS} bits");
        kind << INDEX_BITS | index
    }
}

/// A stream of random numbers, determined by the seed and the purpose (Philox, counter-based).
#[derive(Clone, Debug)]
pub struct RandomStream {
    seed: u64,
    stream: u64,
    position: u64,
}

impl RandomStream {
    /// Creates the stream of a purpose, positioned at its first word.
    pub fn new(seed: u64, purpose: Purpose) -> Self {
        Self { seed, stream: purpose.stream(), position: 0 }
    }

    /// Returns the stream positioned at word `drawn`. Every method consumes one word, but `rand_distr`
    /// distributions may consume several.
    pub fn skip_to(self, drawn: u64) -> Self {
        Self { position: drawn, ..self }
    }

    fn next_word(&mut self) -> u64 {
        let [stream, drawn, key] =
            [self.stream, self.position, self.seed].map(|x| [x as u32, (x >> 32) as u32]);
        self.position += 1;
        let words = philox([drawn[0], drawn[1], stream[0], stream[1]], key);
        u64::from(words[0]) | u64::from(words[1]) << 32
    }

    /// Returns a uniform number in [0, 1) with 53 random bits.
    pub fn unit(&mut self) -> f64 {
        (self.next_word() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// Returns a uniform integer in `low..=high`.
    pub fn between(&mut self, low: u32, high: u32) -> u32 {
        assert!(low <= high, "empty range {low}..={high}");
        let count = u128::from(high - low) + 1;
        low + ((u128::from(self.next_word()) * count) >> 64) as u32
    }
}

/// Makes the stream usable with the distributions of `rand_distr`.
impl RngCore for RandomStream {
    fn next_u32(&mut self) -> u32 {
        self.next_word() as u32
    }

    fn next_u64(&mut self) -> u64 {
        self.next_word()
    }

    fn fill_bytes(&mut self, bytes: &mut [u8]) {
        rand::rand_core::impls::fill_bytes_via_next(self, bytes);
    }
}

#[cfg(test)]
mod tests {
    use statrs::distribution::{ContinuousCDF, Uniform};

    use super::*;
    use crate::plan::testing::{KS_CRITICAL, ks_distance};

    #[test]
    fn between_reaches_both_ends_evenly() {
        let mut draws = RandomStream::new(1, Purpose::Request(0));
        let mut counts = [0; 4];
        (0..4000).for_each(|_| counts[draws.between(5, 8) as usize - 5] += 1);
        assert!(counts.iter().all(|&n| (900..1100).contains(&n)), "{counts:?}");
        assert_eq!(draws.between(7, 7), 7);
        draws.between(0, u32::MAX);
    }

    #[test]
    fn units_are_uniform_along_a_stream_and_across_streams() {
        let uniform = Uniform::new(0.0, 1.0).unwrap();
        let mut draws = RandomStream::new(5, Purpose::Arrivals);
        let along: Vec<f64> = (0..20_000).map(|_| draws.unit()).collect();
        let across: Vec<f64> = (0..20_000).map(|i| RandomStream::new(5, Purpose::HangUp(i)).unit()).collect();
        for units in [along, across] {
            let distance = ks_distance(&units, |x| uniform.cdf(x));
            assert!(distance < KS_CRITICAL / 20_000f64.sqrt(), "{distance}");
        }
    }

    #[test]
    fn streams_are_apart_and_repeat() {
        let first = |seed, purpose| RandomStream::new(seed, purpose).next_word();
        assert_eq!(first(3, Purpose::Request(4)), first(3, Purpose::Request(4)));
        assert_ne!(first(3, Purpose::Request(4)), first(3, Purpose::Request(5)));
        assert_ne!(first(3, Purpose::Request(0)), first(3, Purpose::Arrivals));
        assert_ne!(first(3, Purpose::Arrivals), first(3 << 32, Purpose::Arrivals));
        let of_one: Vec<u64> = [
            Purpose::Request as fn(u64) -> Purpose,
            Purpose::PromptLength,
            Purpose::OutputLength,
            Purpose::Group,
            Purpose::Prefix,
            Purpose::HangUp,
            Purpose::SlowReader,
            Purpose::Model,
            Purpose::Key,
            Purpose::Soak,
        ]
        .map(|purpose| first(3, purpose(6)))
        .to_vec();
        let mut distinct = of_one.clone();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), of_one.len(), "two purposes share a stream");
    }

    #[test]
    fn skipping_leaves_out_that_many_words() {
        let mut draws = RandomStream::new(9, Purpose::Request(1));
        let thousandth = (0..=1000).map(|_| draws.next_word()).last();
        assert_eq!(Some(RandomStream::new(9, Purpose::Request(1)).skip_to(1000).next_word()), thousandth);
    }
}
