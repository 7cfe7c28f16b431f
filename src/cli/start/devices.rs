//! Construction of the configured devices. The only place that names a concrete backend.
//!
//! Invariant: devices are in the order of the partition: stage by stage, by rank.

use super::super::vocabulary;
use crate::actors::EngineSetup;
use crate::actors::device::ExecutorFactory;
use crate::config::{DeviceConfig, DeviceKind, DeviceName};
use crate::model::executor::{self, Executor, ExecutorReport, KvCacheConfig, ModelExecutor};
use crate::model::fake::{self, FakeExecutor, StepTime};
use crate::model::source::ModelSource;
use crate::model::{Partition, Shard};
use crate::planner::{DeviceCapacity, model_source};
use crate::text::Tokenizer;
use anyhow::Result;
use mainstem_kernels::cpu::{CpuBackend, CpuConfig, CpuSizes};
use mainstem_kernels::reference::{Reference, ReferenceSizes};
use mainstem_kernels::{Backend, Collective, DeviceSizes, StepLimits};
use std::collections::BTreeMap;
use std::sync::Arc;

/// Divides the model among the configured devices. If the kinds of devices differ and no layers are
/// configured, the speed of each kind is measured first, which takes a fraction of a second.
pub fn partition(config: &DeviceConfig, source: &ModelSource) -> Result<Partition> {
    let mut speeds = BTreeMap::new();
    let kinds = || config.devices().map(|device| device.kind);
    let differ = kinds().any(|kind| kind != config.groups[0][0].kind);
    if differ && config.layers.is_empty() {
        for kind in kinds() {
            if !speeds.contains_key(kind.name()) {
                speeds.insert(kind.name(), super::measure::bandwidth(config, kind)?);
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

/// Returns a factory per device, stage by stage, by rank. Each call of a factory builds an executor from the
/// model's files.
pub fn factories(
    config: &DeviceConfig,
    source: &Arc<ModelSource>,
    tokenizer: &Arc<Tokenizer>,
    setup: &EngineSetup,
) -> Vec<Vec<ExecutorFactory>> {
    let of_stage = |(devices, shards): (&Vec<DeviceName>, Vec<Shard>)| {
        let rank_factory = |(device, shard): (&DeviceName, Shard)| {
            let part = DevicePart { source: source.clone(), shard, kv: setup.kv, limits: setup.limits };
            factory(*device, config.clone(), part, tokenizer.clone())
        };
        devices.iter().zip(shards).map(rank_factory).collect()
    };
    config.groups.iter().zip(setup.partition.shards()).map(of_stage).collect()
}

/// The part of a model that one device holds, with its sizes.
struct DevicePart {
    source: Arc<ModelSource>,
    shard: Shard,
    kv: KvCacheConfig,
    limits: StepLimits,
}

fn factory(
    device: DeviceName,
    config: DeviceConfig,
    part: DevicePart,
    tokenizer: Arc<Tokenizer>,
) -> ExecutorFactory {
    Box::new(move |stage| {
        Ok(match device.kind {
            DeviceKind::Cpu => build_executor(cpu_backend(device.number, &config)?, stage, &part)?,
            DeviceKind::Reference => build_executor(Reference::new(), stage, &part)?,
            DeviceKind::Fake { step, row } => {
                let words = vocabulary::word_tokens(&part.source, &tokenizer);
                let fake = FakeExecutor::new(words, part.limits).with_collective(stage);
                Box::new(fake.with_step_time(StepTime { step, row }))
            }
        })
    })
}

/// Builds the executor of a rank of `stage` and loads its weights.
fn build_executor<B: Backend>(
    mut backend: B,
    stage: Box<dyn Collective>,
    part: &DevicePart,
) -> Result<Box<dyn Executor>> {
    backend.join_stage(stage);
    let DevicePart { source, shard, kv, limits } = part;
    Ok(Box::new(ModelExecutor::new(backend, source, shard, *kv, *limits)?))
}

/// Predicts the allocations of the configured devices, stage by stage, by rank; see
/// [`executor::estimate_report`].
pub fn forecast(
    config: &DeviceConfig,
    source: &ModelSource,
    setup: &EngineSetup,
) -> Result<Vec<Vec<ExecutorReport>>> {
    let sizes = (setup.kv, setup.limits);
    let of_stage = |(devices, shards): (&Vec<DeviceName>, Vec<Shard>)| {
        let members = devices.iter().zip(shards);
        members.map(|(device, shard)| estimate_device(device, &shard, config, source, sizes)).collect()
    };
    config.groups.iter().zip(setup.partition.shards()).map(of_stage).collect()
}

/// Predicts the allocations of a device with a part of the model, without creating the device; see
/// [`executor::estimate_report`].
pub(super) fn estimate_device(
    device: &DeviceName,
    shard: &Shard,
    config: &DeviceConfig,
    source: &ModelSource,
    (kv, limits): (KvCacheConfig, StepLimits),
) -> Result<ExecutorReport> {
    let sizes: Box<dyn DeviceSizes> = match device.kind {
        DeviceKind::Cpu => Box::new(CpuSizes::new(cpu_config(config))?),
        DeviceKind::Reference => Box::new(ReferenceSizes),
        DeviceKind::Fake { step, row } => return Ok(fake::estimate_report(StepTime { step, row })),
    };
    executor::estimate_report(&*sizes, source, shard, kv, limits)
}

/// Merges the reports of several devices into one: tensors and sizes are added up.
pub fn merge_reports(built: Vec<ExecutorReport>) -> ExecutorReport {
    let mut names: Vec<String> = built.iter().map(|report| report.device.clone()).collect();
    names.dedup();
    let names = match &names[..] {
        [alike] if built.len() > 1 => format!("{} x {alike}", built.len()),
        _ => names.join(", "),
    };
    let sum = built.into_iter().reduce(|mut sum, next| {
        sum.tensors.extend(next.tensors);
        sum.weight_bytes += next.weight_bytes;
        sum.kv_bytes += next.kv_bytes;
        sum.activation_bytes += next.activation_bytes;
        sum.step_bytes += next.step_bytes;
        sum
    });
    ExecutorReport { device: names, ..sum.unwrap_or_default() }
}

/// Creates CPU device `number` with the configured threads, instruction set and activation precision.
pub(super) fn cpu_backend(number: u32, config: &DeviceConfig) -> Result<CpuBackend> {
    Ok(CpuBackend::with_number(number, cpu_config(config))?)
}

fn cpu_config(config: &DeviceConfig) -> CpuConfig {
    let DeviceConfig { threads, isa, activation_precision, .. } = *config;
    CpuConfig { threads, isa, activation_precision }
}
