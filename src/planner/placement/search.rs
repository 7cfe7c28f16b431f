//! The search for the best policy: sequences at once, rows of a step, formats, and what stays in memory.
//!
//! Whatever else is chosen, data on a device makes no step slower. So for given parts of the caches in each
//! tier, weights take what is left of the memories, from the fastest on: of the linear program that divides
//! weights and caches among the tiers, nothing is left to solve but the parts of the caches, which are tried.
//! A choice is at most as good as with everything on the device, so choices are tried in that order, until
//! none that is left can be among the best.
//!
//! Invariant: of the given choices and the ways in which each fits, the best ones are found.

use super::choices::Choice;
use super::job::Workload;
use super::predictor::{Prediction, Predictor, Variant};
use super::rates::MachineRates;
use super::traffic::{ByTier, Links, StageData, StepPolicy};
use std::cmp::Ordering;

/// Objectives of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Objective {
    /// Most tokens per second of the whole job.
    Throughput,
    /// Least time of a request.
    Latency,
}

/// The most bytes of weights or caches in each memory; `None` is all that is left.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierLimits {
    pub device: Option<u64>,
    pub host: Option<u64>,
}

/// A way in which a choice fits into the memories.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct MemoryFit {
    pub weights: TierLimits,
    pub caches: TierLimits,
    /// Bytes that are used of the memory of devices, and beside it of that of the host.
    pub memory: f64,
    pub host_memory: f64,
    /// The places of each stage's data.
    pub stages: Vec<StageData>,
}

impl MemoryFit {
    /// Returns the bytes of the matrices of layers in each tier.
    pub fn weight_bytes(&self) -> ByTier {
        sum(self.stages.iter().map(|stage| stage.weights))
    }

    /// Returns the bytes of the KV caches of layers in each tier.
    pub fn cache_bytes(&self) -> ByTier {
        sum(self.stages.iter().map(|stage| stage.caches))
    }

    /// Returns whether nothing is below the devices.
    pub fn is_resident(&self) -> bool {
        self.weight_bytes().below() + self.cache_bytes().below() == 0.0
    }
}

fn sum(stages: impl Iterator<Item = ByTier>) -> ByTier {
    stages.fold(ByTier::default(), |mut sum, stage| {
        sum.add(stage);
        sum
    })
}

/// The problem of a plan.
pub struct PlacementProblem<'a> {
    pub variants: &'a [Variant],
    pub choices: Vec<Choice>,
    pub workload: Workload,
    pub objective: Objective,
    /// Maximum seconds of a step of decoding.
    pub max_token_seconds: Option<f64>,
    pub rates: &'a MachineRates,
    pub links: Links,
    /// Positions of a page of the KV cache.
    pub page: usize,
}

/// A policy with its predictions.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedPolicy {
    pub choice: Choice,
    pub fit: MemoryFit,
    pub prediction: Prediction,
}

impl PlacementProblem<'_> {
    /// Returns the `keep` best policies, of different choices, the best first. `fits` returns the ways in
    /// which a choice fits into the memories; none if it does not fit or is impossible. If a choice fits in
    /// no way, no larger one does.
    pub fn search(&self, keep: usize, mut fits: impl FnMut(&Choice) -> Vec<MemoryFit>) -> Vec<PlannedPolicy> {
        let with_bound = |choice: &Choice| (*choice, self.predict(choice, &self.all_on_devices(choice)));
        let mut choices: Vec<(Choice, Prediction)> = self.choices.iter().map(with_bound).collect();
        choices.sort_by(|a, b| self.compare((&a.0, &a.1), (&b.0, &b.1)));
        let mut best: Vec<PlannedPolicy> = Vec::new();
        let mut too_large: Vec<Choice> = Vec::new();
        for (choice, bound) in choices {
            let last = best.get(keep.max(1) - 1);
            if last.is_some_and(|last| self.is_better(last, (&choice, &bound))) {
                break;
            }
            // What has more sequences and rows than something that does not fit does not fit either.
            if too_large.iter().any(|other| choice.is_at_least(other)) {
                continue;
            }
            let fits = fits(&choice);
            if fits.is_empty() {
                too_large.push(choice);
            }
            let Some(found) = self.best_of(&choice, fits, last) else { continue };
            let place = best.partition_point(|other| {
                let found = (&found.choice, &found.prediction);
                self.compare((&other.choice, &other.prediction), found).is_le()
            });
            best.insert(place, found);
            best.truncate(keep);
        }
        best
    }

    /// Returns the best way in which a choice fits, if it is better than `last`.
    fn best_of(
        &self,
        choice: &Choice,
        fits: Vec<MemoryFit>,
        last: Option<&PlannedPolicy>,
    ) -> Option<PlannedPolicy> {
        let predictor = self.predictor(choice);
        let with_bound = |fit: MemoryFit| (predictor.bound(&self.policies(choice, &fit.stages)), fit);
        let mut fits: Vec<_> = fits.into_iter().map(with_bound).collect();
        fits.sort_by(|a, b| self.compare((choice, &a.0), (choice, &b.0)));
        let mut best: Option<PlannedPolicy> = None;
        for (bound, fit) in fits {
            if best.as_ref().or(last).is_some_and(|best| self.is_better(best, (choice, &bound))) {
                break;
            }
            let prediction = predictor.predict(&self.policies(choice, &fit.stages));
            let is_beaten = best.as_ref().is_some_and(|best| !self.is_worse(best, (choice, &prediction)));
            if !self.is_too_slow(&prediction) && !is_beaten {
                best = Some(PlannedPolicy { choice: *choice, fit, prediction });
            }
        }
        best
    }

    fn is_better(&self, policy: &PlannedPolicy, other: (&Choice, &Prediction)) -> bool {
        self.compare((&policy.choice, &policy.prediction), other).is_lt()
    }

    fn is_worse(&self, policy: &PlannedPolicy, other: (&Choice, &Prediction)) -> bool {
        self.compare((&policy.choice, &policy.prediction), other).is_gt()
    }

    fn is_too_slow(&self, prediction: &Prediction) -> bool {
        self.max_token_seconds.is_some_and(|most| prediction.decode.seconds > most)
    }

    /// Orders choices: the better one first; of equal ones the one without compression, and the smaller one.
    fn compare(&self, a: (&Choice, &Prediction), b: (&Choice, &Prediction)) -> Ordering {
        let (first, second) = match self.objective {
            Objective::Throughput => (a.1.job_seconds, b.1.job_seconds),
            Objective::Latency => (a.1.request_seconds, b.1.request_seconds),
        };
        let bits = |choice: &Choice| (choice.kv.bits_per_element() * -1e3) as i64;
        let size = |choice: &Choice| (choice.variant, bits(choice), choice.slots, choice.token_budget);
        let by_job = a.1.job_seconds.total_cmp(&b.1.job_seconds);
        first.total_cmp(&second).then(by_job).then_with(|| size(a.0).cmp(&size(b.0)))
    }

    /// Returns stages with nothing below the devices.
    fn all_on_devices(&self, choice: &Choice) -> Vec<StageData> {
        vec![StageData::default(); self.variants[choice.variant].stages.len()]
    }

    fn predictor(&self, choice: &Choice) -> Predictor {
        Predictor::new(&self.variants[choice.variant], self.rates, choice, &self.workload)
    }

    fn policies(&self, choice: &Choice, stages: &[StageData]) -> Vec<StepPolicy> {
        stages.iter().map(|stage| StepPolicy::new(stage, &self.links, choice.kv, self.page)).collect()
    }

    /// Predicts the speed of a choice with the data of its stages in these places.
    pub fn predict(&self, choice: &Choice, stages: &[StageData]) -> Prediction {
        self.predictor(choice).predict(&self.policies(choice, stages))
    }
}
