//! An inhomogeneous Poisson process whose rate follows a ramp. Let `I(t)` be the integral of the rate, the
//! expected number of requests until `t`. The `n`th request is due when `I(t)` equals the `n`th arrival of a
//! Poisson process of rate 1; both integrals can be inverted:
//!
//! ```text
//! linear       rate = from + slope t           I = from t + slope t^2 / 2       slope = (to - from) / over
//! exponential  rate = from exp(growth t)       I = from (exp(growth t) - 1) / growth
//!              growth = ln(to / from) / over
//! ```
//!
//! Invariant: due times ascend with the integrated rate, and after the ramp the rate is `to`.

use std::time::Duration;

use super::RampKind;

/// A rate ramp. Rates are per second. `to` is above 0; `from` is above 0 unless the ramp is linear.
pub(super) struct Ramp {
    pub from: f64,
    pub to: f64,
    pub over_s: f64,
    pub kind: RampKind,
}

impl Ramp {
    /// Returns the time at which the integrated rate equals `sum`.
    pub fn time_at(&self, sum: f64) -> Duration {
        let beyond = sum - self.total();
        let seconds = match self.kind {
            _ if beyond > 0.0 => self.over_s + beyond / self.to,
            RampKind::Linear => self.linear(sum),
            RampKind::Exponential => self.exponential(sum),
        };
        Duration::from_nanos((seconds * 1e9).round() as u64)
    }

    /// Returns the expected number of requests during the ramp.
    fn total(&self) -> f64 {
        let Ramp { from, to, over_s, kind } = *self;
        match kind {
            RampKind::Linear => (from + to) / 2.0 * over_s,
            // The mean rate of an exponential ramp is the logarithmic mean of its ends.
            RampKind::Exponential if from == to => from * over_s,
            RampKind::Exponential => (to - from) / (to / from).ln() * over_s,
        }
    }

    /// Inverts the integral of a linear ramp. This form of the quadratic root is numerically stable for a
    /// flat ramp and for one that starts at 0.
    fn linear(&self, sum: f64) -> f64 {
        let slope = (self.to - self.from) / self.over_s;
        let rate = (self.from * self.from + 2.0 * slope * sum).max(0.0).sqrt();
        if sum > 0.0 { 2.0 * sum / (self.from + rate) } else { 0.0 }
    }

    fn exponential(&self, sum: f64) -> f64 {
        let growth = (self.to / self.from).ln() / self.over_s;
        if growth == 0.0 { sum / self.from } else { (growth * sum / self.from).ln_1p() / growth }
    }
}
