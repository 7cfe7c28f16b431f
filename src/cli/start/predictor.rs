//! Predictions for an engine that runs with a policy.
//!
//! Invariant: nothing is measured; without the machine's rates there is no prediction.

use super::forecast;
use super::machine::{KnownRates, RateNeeds};
use crate::actors::EngineSetup;
use crate::config::Config;
use crate::model::ModelSource;
use crate::model::offload::OffloadReport;
use crate::planner::placement::{
    Choice, MachineRates, ModelCost, Prediction, Predictor, StepPolicy, Workload,
};
use anyhow::Result;

/// Predicts the speed of an engine with a policy.
pub struct EnginePredictor {
    cost: ModelCost,
    rates: MachineRates,
    policy: StepPolicy,
    choice: Choice,
}

impl EnginePredictor {
    /// Creates the predictor of an engine whose configuration has a policy. `None` without a policy, and if
    /// the rates that are needed have not been measured.
    pub fn new(
        config: &Config,
        source: &ModelSource,
        setup: &EngineSetup,
    ) -> Result<Option<EnginePredictor>> {
        if config.tiers.policy.is_none() {
            return Ok(None);
        }
        let cost = ModelCost::from_spec(&source.spec, &|piece| source.load_type(piece));
        let mut layers = OffloadReport::default();
        let reports = forecast(&config.device, source, setup)?.into_iter().flatten();
        reports.filter_map(|report| report.offload).for_each(|report| layers.add(report));
        let kv = config.kv.ty;
        let needs = RateNeeds {
            formats: cost.formats(),
            attention: cost.attention_shapes(kv),
            disk: layers.max_read_bytes() > 0,
        };
        // A policy also works where none can be planned.
        let known = KnownRates::open(config).ok().filter(|known| known.have(&needs));
        let Some(KnownRates { rates, .. }) = known else { return Ok(None) };
        let read = rates.disk.map_or(f64::INFINITY, |disk| disk.read);
        let policy = StepPolicy { kv, read_seconds: layers.max_read_bytes() as f64 / read };
        let (slots, token_budget) = (config.scheduler.slots, config.scheduler.token_budget);
        let choice = Choice { variant: 0, kv, slots, token_budget };
        Ok(Some(EnginePredictor { cost, rates, policy, choice }))
    }

    /// Predicts the speed of a job.
    pub fn predict(&self, workload: &Workload) -> Prediction {
        let EnginePredictor { cost, rates, policy, choice } = self;
        Predictor { cost, rates, policy: *policy, slowest: 1 }.predict(choice, workload)
    }
}
