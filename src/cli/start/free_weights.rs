//! The weights of layers whose tiers follow from configured fractions, and those that an override fixes.
//!
//! Invariant: sizes are those that the engine's devices will allocate, counted by the same code.

use super::forecast;
use crate::actors::EngineSetup;
use crate::config::Config;
use crate::model::ModelSource;
use crate::model::executor::ExecutorReport;
use crate::model::offload::Residency;
use anyhow::Result;

/// Sets the fraction of the weights that stays on the devices.
pub fn set_residency(source: &mut ModelSource, resident: Residency) {
    source.offload.iter_mut().for_each(|offload| offload.resident = resident);
}

/// The weights whose tiers follow from fractions, by what devices with none and with all of them would
/// report.
pub struct FreeWeights {
    pub least: Vec<ExecutorReport>,
    pub most: Vec<ExecutorReport>,
}

impl FreeWeights {
    /// Counts the devices of an engine, given a source of which no such weights are on devices.
    pub fn count(config: &Config, source: &mut ModelSource, setup: &EngineSetup) -> Result<FreeWeights> {
        let count = |source: &ModelSource| forecast(&config.device, source, setup);
        let least = count(source)?.into_iter().flatten().collect();
        set_residency(source, Residency(1.0));
        let most = count(source)?.into_iter().flatten().collect();
        set_residency(source, Residency(0.0));
        Ok(FreeWeights { least, most })
    }

    /// Returns the bytes of these weights, device by device.
    pub fn of_devices(&self) -> impl Iterator<Item = usize> {
        let [least, most] = [&self.least, &self.most].map(|reports| reports.iter().map(on_device));
        least.zip(most).map(|(least, most)| most - least)
    }

    /// Returns the fraction that `bytes` are of them, from 0 to 1, less `fixed` bytes of other weights.
    pub fn fraction(&self, bytes: f64, fixed: usize) -> f64 {
        ((bytes - fixed as f64) / self.of_devices().sum::<usize>().max(1) as f64).clamp(0.0, 1.0)
    }

    /// Returns the bytes of the other weights of layers that are on devices.
    pub fn fixed_on_devices(&self) -> usize {
        self.least.iter().map(on_device).sum()
    }

    /// Returns whether any of the weights is not on a device even if the fractions allow it.
    pub fn has_fixed_below(&self) -> bool {
        let below = |report: &ExecutorReport| {
            report.offload.as_ref().is_some_and(|it| it.streamed_bytes + it.host_bytes > 0)
        };
        self.most.iter().any(below)
    }
}

/// Returns the bytes of the weights of layers that stay on a device.
fn on_device(report: &ExecutorReport) -> usize {
    report.offload.as_ref().map_or(0, |offload| offload.resident_bytes)
}
