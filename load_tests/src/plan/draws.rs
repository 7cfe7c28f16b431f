//! The load's random numbers: arrival gaps, lengths, prompts, who hangs up.
//!
//! Invariant: what one purpose draws depends on the seed and the purpose, not on what any other drew.

use mainstem_kernels::random::philox;

/// What the numbers are for; each has a stream of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    Arrivals,
    /// Everything about the request of this index.
    Request(u64),
}

/// A stream of random numbers, the same for the same seed and purpose.
#[derive(Clone, Debug)]
pub struct Draws {
    seed: u64,
    stream: u64,
    drawn: u64,
}

impl Draws {
    pub fn new(seed: u64, purpose: Purpose) -> Self {
        let stream = match purpose {
            Purpose::Arrivals => 0,
            Purpose::Request(index) => index + 1,
        };
        Self { seed, stream, drawn: 0 }
    }

    fn word(&mut self) -> u64 {
        let [stream, drawn, key] = [self.stream, self.drawn, self.seed].map(|x| [x as u32, (x >> 32) as u32]);
        self.drawn += 1;
        let words = philox([drawn[0], drawn[1], stream[0], stream[1]], key);
        u64::from(words[0]) | u64::from(words[1]) << 32
    }

    /// Uniform in [0, 1), with 53 random bits.
    pub fn unit(&mut self) -> f64 {
        (self.word() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// Uniform among `low..=high`.
    pub fn between(&mut self, low: u32, high: u32) -> u32 {
        assert!(low <= high, "{low} is above {high}; this is a bug");
        let count = u128::from(high - low) + 1;
        low + ((u128::from(self.word()) * count) >> 64) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn between_reaches_both_ends_evenly() {
        let mut draws = Draws::new(1, Purpose::Request(0));
        let mut counts = [0; 4];
        (0..4000).for_each(|_| counts[draws.between(5, 8) as usize - 5] += 1);
        assert!(counts.iter().all(|&n| (900..1100).contains(&n)), "{counts:?}");
        assert_eq!(draws.between(7, 7), 7);
        draws.between(0, u32::MAX);
    }

    #[test]
    fn streams_are_apart_and_repeat() {
        let first = |seed, purpose| Draws::new(seed, purpose).word();
        assert_eq!(first(3, Purpose::Request(4)), first(3, Purpose::Request(4)));
        assert_ne!(first(3, Purpose::Request(4)), first(3, Purpose::Request(5)));
        assert_ne!(first(3, Purpose::Request(0)), first(3, Purpose::Arrivals));
        assert_ne!(first(3, Purpose::Arrivals), first(3 << 32, Purpose::Arrivals));
    }
}
