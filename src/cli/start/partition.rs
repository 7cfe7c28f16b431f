//! The division of a model among the configured devices.
//!
//! Invariant: with devices of one kind, or configured layers, nothing is measured.

use super::{gpus, measure};
use crate::config::{DeviceConfig, DeviceName};
use crate::model::Partition;
use crate::model::source::ModelSource;
use crate::planner::{DeviceCapacity, model_source};
use anyhow::Result;
use std::collections::BTreeMap;

/// Fraction of a GPU's free memory that weights take if the layers of stages are chosen; the rest is for
/// KV caches and steps.
const GPU_WEIGHTS: f64 = 0.8;

/// Divides the model among the configured devices. If the kinds of devices differ and no layers are
/// configured, the speed of each kind is measured first, which takes a fraction of a second. If stages have
/// GPUs, their free memory limits the layers that they get.
pub fn partition(config: &DeviceConfig, source: &ModelSource) -> Result<Partition> {
    let (mut speeds, mut memories) = (BTreeMap::new(), BTreeMap::new());
    let differ = config.devices().any(|device| device.kind != config.groups[0][0].kind);
    if differ && config.layers.is_empty() {
        for device in config.devices() {
            if !speeds.contains_key(device.kind.name()) {
                speeds.insert(device.kind.name(), measure::bandwidth(config, *device)?);
            }
        }
    }
    if config.groups.len() > 1 && config.layers.is_empty() {
        for device in config.devices() {
            if let Some(bytes) = gpus::own_memory(*device)? {
                memories.insert(device.to_string(), bytes as f64 * GPU_WEIGHTS);
            }
        }
    }
    // Other devices share the machine's memory, so the split does not affect whether the model fits.
    let place = |device: &DeviceName| DeviceCapacity {
        speed: speeds.get(device.kind.name()).copied().unwrap_or(1.0),
        memory: memories.get(&device.to_string()).copied().unwrap_or(f64::INFINITY),
    };
    Ok(model_source::partition(source, config, place)?)
}
