//! Statistics of the drafts of a sequence: the rate at which they are accepted.

/// Largest number of drafts of a sequence in one step.
pub const MAX_DEPTH: usize = 16;

/// Weight of a step after the next one.
const DECAY: f32 = 0.95;

/// Number of observations that an estimate counts as from the start.
const PRIOR_WEIGHT: f32 = 3.0;

/// Counts of drafts by their position in a step, of which older ones weigh less.
///
/// A draft is tried if those before it were accepted. With n_i tried and a_i accepted drafts of position i
/// (from 1 on), r = (Σ a_i + w r_0) / (Σ n_i + w) is the rate of all, and c_i = (a_i + w r) / (n_i + w) that
/// of a position; w = 3, and r_0 is the rate to begin with.
#[derive(Clone, Debug, PartialEq)]
pub struct SpeculationStats {
    tried: [f32; MAX_DEPTH],
    accepted: [f32; MAX_DEPTH],
    prior: f32,
}

impl SpeculationStats {
    /// Creates statistics without observations. `prior` is the rate to begin with, for example that of other
    /// sequences ([`Self::rate`]).
    pub fn new(prior: f64) -> SpeculationStats {
        let prior = (prior as f32).clamp(0.0, 1.0);
        SpeculationStats { tried: [0.0; MAX_DEPTH], accepted: [0.0; MAX_DEPTH], prior }
    }

    /// Adds the result of a step: the first `accepted` of `drafted` drafts were accepted.
    pub fn observe(&mut self, drafted: usize, accepted: usize) {
        self.tried.iter_mut().chain(&mut self.accepted).for_each(|count| *count *= DECAY);
        for i in 0..drafted.min(accepted + 1).min(MAX_DEPTH) {
            self.tried[i] += 1.0;
            self.accepted[i] += if i < accepted { 1.0 } else { 0.0 };
        }
    }

    /// Returns the rate at which drafts are accepted whose predecessors were.
    pub fn rate(&self) -> f64 {
        let sum = |counts: &[f32]| counts.iter().sum::<f32>();
        let rate = (sum(&self.accepted) + PRIOR_WEIGHT * self.prior) / (sum(&self.tried) + PRIOR_WEIGHT);
        rate.into()
    }

    /// Returns, for each position, the probability that its draft is emitted: that it and all before it are
    /// accepted. It falls from position to position.
    pub fn survival(&self) -> [f64; MAX_DEPTH] {
        let (rate, weight) = (self.rate(), f64::from(PRIOR_WEIGHT));
        let mut survival = [0.0; MAX_DEPTH];
        let mut before = 1.0;
        for (i, survival) in survival.iter_mut().enumerate() {
            let (tried, accepted) = (f64::from(self.tried[i]), f64::from(self.accepted[i]));
            before *= ((accepted + weight * rate) / (tried + weight)).min(0.999);
            *survival = before;
        }
        survival
    }
}
