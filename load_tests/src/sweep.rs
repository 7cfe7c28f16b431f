//! One load at rising rates or numbers of users until the server is saturated, and the knee.

use crate::{measure::Limits, report::RunReport, run::Progress, run::Settings};

/// What is raised from step to step.
#[derive(Clone, Debug, PartialEq)]
pub enum Ladder {
    /// Requests per second; the settings' arrival process at each, Poisson where it has no rate.
    Rates(Vec<f64>),
    /// Users of a closed loop.
    Users(Vec<usize>),
}

/// What a sweep came to.
#[derive(Clone, Debug)]
pub struct Sweep {
    /// By rising load.
    pub steps: Vec<Step>,
    /// Index of the last step before saturation; `None` when the first was saturated already.
    pub knee: Option<usize>,
}

#[derive(Clone, Debug)]
pub struct Step {
    /// Requests per second, or users.
    pub x: f64,
    pub run: RunReport,
    /// Why this step counts as saturated, in a few words; `None` when it does not.
    pub saturated: Option<String>,
}

/// Climbs until `beyond` steps were saturated, the ladder ends, or the run is stopped; `watch` sees each step.
pub fn sweep(
    _settings: &Settings,
    _ladder: &Ladder,
    _limits: &Limits,
    _beyond: usize,
    _progress: &Progress,
    _watch: &mut dyn FnMut(&Step),
) -> anyhow::Result<Sweep> {
    todo!()
}
