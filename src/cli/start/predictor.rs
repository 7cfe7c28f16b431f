//! Predictions for an engine that runs with a policy.
//!
//! Invariant: nothing is measured; without the machine's rates there is no prediction.

use super::forecast;
use super::machine::{KnownRates, RateNeeds};
use super::placement::variant;
use super::planned_tiers::links;
use crate::actors::EngineSetup;
use crate::config::Config;
use crate::model::ModelSource;
use crate::model::executor::ExecutorReport;
use crate::planner::placement::{
    ByTier, Choice, MachineRates, ModelCost, Prediction, Predictor, StageData, StepPolicy, Variant, Workload,
};
use anyhow::Result;

/// Predicts the speed of an engine with a policy.
pub struct EnginePredictor {
    variant: Variant,
    rates: MachineRates,
    policies: Vec<StepPolicy>,
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
        let variant = variant(config, source, None)?;
        let reports = forecast(&config.device, source, setup)?.into_iter().flatten();
        let positions = (setup.kv.pages * config.kv.page_size) as f64;
        let stages: Vec<StageData> = reports.map(|report| stage_data(&report, positions)).collect();
        let kv = config.kv.ty;
        let needs = RateNeeds {
            formats: variant.stages.iter().flat_map(ModelCost::formats).collect(),
            attention: variant.stages.iter().flat_map(|stage| stage.attention_shapes(kv)).collect(),
            disk: stages.iter().any(|stage| stage.weights.disk + stage.caches.disk > 0.0),
        };
        // A policy also works where none can be planned.
        let known = KnownRates::open(config).ok().filter(|known| known.have(&needs));
        let Some(KnownRates { rates, .. }) = known else { return Ok(None) };
        let (links, page) = (links(config, &rates), config.kv.page_size);
        let policies = stages.iter().map(|stage| StepPolicy::new(stage, &links, kv, page)).collect();
        let (slots, token_budget) = (config.scheduler.slots, config.scheduler.token_budget);
        let choice = Choice { variant: 0, kv, slots, token_budget };
        Ok(Some(EnginePredictor { variant, rates, policies, choice }))
    }

    /// Predicts the speed of a job.
    pub fn predict(&self, workload: &Workload) -> Prediction {
        let EnginePredictor { variant, rates, policies, choice } = self;
        Predictor::new(variant, rates, choice, workload).predict(policies)
    }
}

/// Returns the places of a device's data. Of what is on the device, nothing depends.
fn stage_data(report: &ExecutorReport, positions: f64) -> StageData {
    let weights = report.offload.clone().unwrap_or_default();
    let caches = report.cache_offload.unwrap_or_default();
    let below = |host: usize, disk: usize| ByTier { device: 0.0, host: host as f64, disk: disk as f64 };
    StageData {
        weights: below(weights.host_bytes, weights.max_read_bytes()),
        caches: below(caches.host_bytes, caches.file_bytes),
        positions,
        whole_experts: weights.host_bytes > 0,
    }
}
