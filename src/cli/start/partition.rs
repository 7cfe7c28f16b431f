//! The division of a model among the configured devices.
//!
//! Invariant: with devices of one kind, or configured layers, nothing is measured.

use super::measure;
use crate::config::{DeviceConfig, DeviceName};
use crate::model::Partition;
use crate::model::source::ModelSource;
use crate::planner::{DeviceCapacity, model_source};
use anyhow::Result;
use std::collections::BTreeMap;

/// Divides the model among the configured devices. If the kinds of devices differ and no layers are
/// configured, the speed of each kind is measured first, which takes a fraction of a second.
pub fn partition(config: &DeviceConfig, source: &ModelSource) -> Result<Partition> {
    let mut speeds = BTreeMap::new();
    let kinds = || config.devices().map(|device| device.kind);
    let differ = kinds().any(|kind| kind != config.groups[0][0].kind);
    if differ && config.layers.is_empty() {
        for kind in kinds() {
            if !speeds.contains_key(kind.name()) {
                speeds.insert(kind.name(), measure::bandwidth(config, kind)?);
            }
        }
    }
    // The devices share the machine's memory, so the split does not affect whether the model fits.
    let place = |device: &DeviceName| DeviceCapacity {
        speed: speeds.get(device.kind.name()).copied().unwrap_or(1.0),
        memory: f64::INFINITY,
    };
    Ok(model_source::partition(source, config, place)?)
}
