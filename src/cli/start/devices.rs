//! Construction of the configured devices. The only place that names a concrete backend.
//!
//! Invariant: devices are in the order of the partition: stage by stage, by rank.

use super::super::vocabulary;
use super::gpus;
use crate::actors::EngineSetup;
use crate::actors::device::ExecutorFactory;
use crate::actors::engine::available_memory;
use crate::config::{DeviceConfig, DeviceKind, DeviceName};
use crate::model::executor::{self, Executor, ExecutorReport, KvCacheConfig, ModelExecutor};
use crate::model::fake::{self, FakeExecutor, StepTime};
use crate::model::load;
use crate::model::offload::{Offload, PackedStore};
use crate::model::source::ModelSource;
use crate::model::{Partition, Shard};
use crate::quantize::{Observations, Observed};
use crate::text::Tokenizer;
use anyhow::{Result, bail, ensure};
use mainstem_kernels::cpu::{CpuBackend, CpuConfig, CpuSizes};
use mainstem_kernels::cuda::CudaSizes;
use mainstem_kernels::reference::{Reference, ReferenceSizes};
use mainstem_kernels::{ActivationType, Backend, Collective, DeviceSizes, StepLimits};
use std::sync::Arc;

/// Returns the type of the activations of the configured devices. Fails if they differ, because a stage hands
/// its activations to the next as they are.
pub fn activation_type(config: &DeviceConfig) -> Result<ActivationType> {
    common_type(config.devices().map(|device| match device.kind {
        DeviceKind::Cpu => CpuSizes::ACTIVATION_TYPE,
        DeviceKind::Reference => Reference::ACTIVATION_TYPE,
        DeviceKind::Cuda => CudaSizes::ACTIVATION_TYPE,
        DeviceKind::Fake { .. } => ActivationType::F32,
    }))
}

fn common_type(types: impl Iterator<Item = ActivationType>) -> Result<ActivationType> {
    let mut types: Vec<ActivationType> = types.collect();
    types.dedup();
    match types[..] {
        [ty] => Ok(ty),
        _ => bail!("device.groups: all devices must have activations of one type, not {types:?}"),
    }
}

/// Returns a factory per device, stage by stage, by rank. Each call of a factory builds an executor from the
/// model's files.
pub fn factories(
    config: &DeviceConfig,
    source: &Arc<ModelSource>,
    tokenizer: &Arc<Tokenizer>,
    setup: &EngineSetup,
) -> Vec<Vec<ExecutorFactory>> {
    factories_with(config, source, tokenizer, setup, None)
}

/// Returns factories as [`factories`] does, of devices that add the inputs of their GEMMs to `observations`.
pub fn observed_factories(
    config: &DeviceConfig,
    source: &Arc<ModelSource>,
    tokenizer: &Arc<Tokenizer>,
    setup: &EngineSetup,
    observations: &Arc<Observations>,
) -> Vec<Vec<ExecutorFactory>> {
    factories_with(config, source, tokenizer, setup, Some(observations))
}

fn factories_with(
    config: &DeviceConfig,
    source: &Arc<ModelSource>,
    tokenizer: &Arc<Tokenizer>,
    setup: &EngineSetup,
    observations: Option<&Arc<Observations>>,
) -> Vec<Vec<ExecutorFactory>> {
    let of_stage = |(devices, shards): (&Vec<DeviceName>, Vec<Shard>)| {
        let rank_factory = |(device, shard): (&DeviceName, Shard)| {
            let part = DevicePart {
                source: source.clone(),
                shard,
                kv: setup.kv,
                limits: setup.limits,
                observations: observations.cloned(),
            };
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
    /// Collects the inputs of GEMMs, if they are observed.
    observations: Option<Arc<Observations>>,
}

fn factory(
    device: DeviceName,
    config: DeviceConfig,
    part: DevicePart,
    tokenizer: Arc<Tokenizer>,
) -> ExecutorFactory {
    Box::new(move |stage| {
        check_held(&device, &config, &part)?;
        Ok(match device.kind {
            DeviceKind::Cpu => {
                let backend = cpu_backend(device.number, &config)?;
                let own = config.memory.map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
                build_executor(own.into_iter().fold(backend, CpuBackend::with_memory), stage, &part)?
            }
            DeviceKind::Reference => build_executor(Reference::new(), stage, &part)?,
            DeviceKind::Cuda => build_executor(gpus::backend(device, &config)?, stage, &part)?,
            DeviceKind::Fake { step, row } => {
                let words = vocabulary::word_tokens(&part.source, &tokenizer);
                let fake = FakeExecutor::new(words, part.limits).with_collective(stage);
                Box::new(fake.with_step_time(StepTime { step, row }))
            }
        })
    })
}

/// Fails if an earlier build of a device still has copies in host memory, because a thread of it hangs, and
/// what the next build needs there is not available beside them.
fn check_held(device: &DeviceName, config: &DeviceConfig, part: &DevicePart) -> Result<()> {
    let DevicePart { source, shard, kv, limits, .. } = part;
    let held = source.transfers.held_by(shard).copies();
    if held == 0 {
        return Ok(());
    }
    let report = estimate_device(device, shard, config, source, (*kv, *limits))?;
    check_beside(held, report.host_bytes().iter().sum::<usize>() + report.total_bytes(), available_memory())
}

/// Fails if `needed` bytes are not available, given what is held.
fn check_beside(held: usize, needed: usize, available: usize) -> Result<()> {
    ensure!(
        needed <= available,
        "tiers.host: a thread that hangs still holds {held} bytes of host memory, and the device needs \
         {needed} bytes, of which {available} are available; it is built once they are free"
    );
    Ok(())
}

/// Writes the stores of a model with these settings, one per configured device; see [`load::write_store`].
pub(super) fn write_stores(
    config: &DeviceConfig,
    source: &ModelSource,
    partition: &Partition,
    offload: &Offload,
) -> Result<Vec<PackedStore>> {
    let stages = config.groups.iter().zip(partition.shards());
    let parts = stages.flat_map(|(stage, shards)| stage.iter().zip(shards));
    let write = |(name, shard): (&DeviceName, Shard)| match name.kind {
        DeviceKind::Cpu => load::write_store(&mut cpu_backend(name.number, config)?, source, offload, &shard),
        DeviceKind::Reference => load::write_store(&mut Reference::new(), source, offload, &shard),
        DeviceKind::Cuda => bail!("device.groups: GPUs hold all weights, and no store of them"),
        DeviceKind::Fake { .. } => bail!("device.groups: a fake device has no weights, and no store of them"),
    };
    parts.map(write).collect()
}

/// Builds the executor of a rank of `stage` and loads its weights.
fn build_executor<B: Backend>(
    backend: B,
    stage: Box<dyn Collective>,
    part: &DevicePart,
) -> Result<Box<dyn Executor>> {
    match &part.observations {
        None => load_executor(backend, stage, part),
        Some(seen) => load_executor(Observed::new(backend, seen.clone()), stage, part),
    }
}

fn load_executor<B: Backend>(
    mut backend: B,
    stage: Box<dyn Collective>,
    part: &DevicePart,
) -> Result<Box<dyn Executor>> {
    backend.join_stage(stage);
    let DevicePart { source, shard, kv, limits, .. } = part;
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
        DeviceKind::Cuda => Box::new(gpus::sizes(*device, config)?),
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
        sum.driver_bytes += next.driver_bytes;
        match (&mut sum.offload, next.offload) {
            (Some(sum), Some(next)) => sum.add(next),
            (sum, next) => *sum = sum.take().or(next),
        }
        match (&mut sum.cache_offload, next.cache_offload) {
            (Some(sum), Some(next)) => sum.add(next),
            (sum, next) => *sum = sum.or(next),
        }
        sum
    });
    ExecutorReport { device: names, ..sum.unwrap_or_default() }
}

/// Creates CPU device `number` with the configured threads, instruction set and activation precision.
pub(super) fn cpu_backend(number: u32, config: &DeviceConfig) -> Result<CpuBackend> {
    Ok(CpuBackend::with_number(number, cpu_config(config))?)
}

/// Returns the sizes of a CPU device, without creating it.
pub(super) fn cpu_sizes(config: &DeviceConfig) -> Result<CpuSizes> {
    Ok(CpuSizes::new(cpu_config(config))?)
}

/// Returns the instruction set and number of threads of a CPU device.
pub fn describe_cpu(config: &DeviceConfig) -> Result<String> {
    Ok(cpu_sizes(config)?.describe())
}

fn cpu_config(config: &DeviceConfig) -> CpuConfig {
    let DeviceConfig { threads, isa, activation_precision, .. } = *config;
    CpuConfig { threads, isa, activation_precision }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_not_built_beside_the_memory_of_a_thread_that_hangs() {
        check_beside(7, 10, 10).unwrap();
        let error = check_beside(7, 11, 10).unwrap_err().to_string();
        assert!(error.contains("tiers.host: ") && error.contains("holds 7 bytes"), "{error}");
    }

    #[test]
    fn devices_of_one_model_have_activations_of_one_type() {
        use ActivationType::{BF16, F32};
        let common = |types: &[ActivationType]| common_type(types.iter().copied());
        assert_eq!(common(&[BF16, BF16]).ok(), Some(BF16));
        let error = common(&[F32, BF16, BF16]).unwrap_err().to_string();
        assert!(error.contains("device.groups") && error.contains("[F32, BF16]"), "{error}");
    }
}
