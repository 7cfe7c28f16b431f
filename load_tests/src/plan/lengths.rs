//! Numbers of tokens: fixed, uniform, lognormal.

use super::draws::Draws;

/// A number of tokens; at least 1. Text forms: `128`; `128-512`, uniform; `lognormal:MEDIAN:SIGMA` or
/// `lognormal:MEDIAN:SIGMA:MAX`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Length {
    Fixed(u32),
    /// Uniform among `low..=high`.
    Uniform {
        low: u32,
        high: u32,
    },
    /// exp(N(ln median, sigma²)), rounded, and held within `1..=max`.
    Lognormal {
        median: f64,
        sigma: f64,
        max: u32,
    },
}

impl Length {
    pub fn draw(self, _draws: &mut Draws) -> u32 {
        todo!()
    }

    /// The most it can be.
    pub fn max(self) -> u32 {
        todo!()
    }
}
