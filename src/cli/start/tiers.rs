//! The places of a model's weights and KV caches: which stay in memory, and the folder of those on disk.
//!
//! Invariant: sizes are those that the engine's devices will allocate, counted by the same code.

use super::device_memory;
use super::free_weights::{FreeWeights, set_residency};
use super::memory::{EngineMemory, reserved_beside};
use super::tier_rules;
use super::{engine_setup, forecast};
use crate::actors::EngineSetup;
use crate::actors::engine::available_memory;
use crate::config::{Config, HostTier, KvSize, TierConfig};
use crate::model::ModelSource;
use crate::model::load;
use crate::model::offload::{CacheOffload, CacheReport, Offload, Residency, StorePlace};
use anyhow::{Context, Result, ensure};
use std::path::PathBuf;

/// Fraction of the memory beside buffers and steps that weights take if their number is chosen: with a
/// configured KV cache, and with one that takes half of the rest. What is left is for other processes.
const WEIGHTS_BESIDE_CACHE: f64 = 0.8;
const WEIGHTS_BEFORE_CACHE: f64 = 0.65;

/// Fraction of the memory beside everything else that caches take if their number is chosen.
const CACHES: f64 = 0.8;

/// Number of equal parts of the layers' weights of which some may stay, where a number is searched.
pub(super) const PARTS: usize = 256;

/// Returns the bytes of some of [`PARTS`] parts of `all` bytes.
pub(super) fn part_of(all: usize, parts: usize) -> usize {
    (all as u128 * parts as u128 / PARTS as u128) as usize
}

/// Returns the fraction of the layers' weights that stays if so many of `all` bytes may.
pub(super) fn residency_of(bytes: usize, all: usize) -> Residency {
    Residency((bytes as f64 / all.max(1) as f64).min(1.0))
}

/// Decides which weights and KV caches of a model stay on the devices, and which of the others are in the
/// memory of the host, as the configuration says: first weights, then caches in the memory that is left.
/// Fails if the model does not fit even with none on the devices, or if a policy is for another model.
pub fn place_tiers(config: &Config, source: &mut ModelSource) -> Result<()> {
    check_policy(config, source)?;
    source.link_rate = config.device.link;
    if is_cache_on_disk(config)? && source.spec.decoder.is_some() {
        let TierConfig { overlap: overlaps, attends_on_host, host_kv, .. } = config.tiers;
        let folder = stores_folder(&config.tiers)?;
        // Without any in the file, no buffers need memory.
        let host = if attends_on_host && host_kv == HostTier::All { 1.0 } else { 0.0 };
        let caches = CacheOffload { resident: Residency(0.0), host, folder, overlaps, attends_on_host };
        source.cache_offload = Some(caches.clone());
        // Nothing is left in a device's own memory beside weights that take as much as they can, so caches of
        // a configured size come first.
        let are_caches_first = config.device.memory.is_some() && config.tiers.kv != HostTier::Auto;
        match are_caches_first {
            true => source.offload = lowest_weights(config, source)?,
            false => place_weights(config, source)?,
        }
        let fractions = cache_fractions(config, source)?;
        source.cache_offload = fractions.map(|(resident, host)| CacheOffload { resident, host, ..caches });
        return if are_caches_first { place_weights(config, source) } else { Ok(()) };
    }
    place_weights(config, source)
}

/// Returns whether KV caches may be on disk. Fails for a size in bytes without a size of the whole cache.
fn is_cache_on_disk(config: &Config) -> Result<bool> {
    let in_tokens = matches!(config.kv.size, KvSize::Tokens(_));
    for (key, tier) in [("tiers.kv", config.tiers.kv), ("tiers.host_kv", config.tiers.host_kv)] {
        let is_size = matches!(tier, HostTier::Bytes(_));
        ensure!(in_tokens || !is_size, "{key}: a size needs kv.size as a number of tokens");
    }
    Ok(match config.tiers.kv {
        HostTier::All => false,
        HostTier::Fraction(fraction) => fraction < 1.0,
        HostTier::Auto => in_tokens,
        HostTier::Bytes(_) => true,
    })
}

/// Returns the fractions of the layers' KV caches that stay on the devices and that are in the memory of the
/// host, given a source of which none stay; `None` if all stay.
fn cache_fractions(config: &Config, source: &ModelSource) -> Result<Option<(Residency, f64)>> {
    let setup = engine_setup(config, source).context("tiers.kv, with the caches of no layer on a device")?;
    let reports: Vec<_> = forecast(&config.device, source, &setup)?.into_iter().flatten().collect();
    let mut caches = CacheReport::default();
    reports.iter().filter_map(|report| report.cache_offload).for_each(|report| caches.add(report));
    let all = caches.file_bytes + caches.host_bytes;
    let fraction_of = |bytes: f64| bytes / all.max(1) as f64;
    let fraction = match config.tiers.kv {
        HostTier::Fraction(fraction) => fraction,
        HostTier::Bytes(bytes) => fraction_of(bytes as f64),
        HostTier::All | HostTier::Auto => {
            let own = config.device.memory.map(|memory| device_memory::cache_fraction(&reports, memory));
            let spare = free_memory(config, &setup, EngineMemory::from_reports(reports, &setup));
            // Without a file, there are no buffers either.
            let more = caches.file_bytes.saturating_sub(caches.buffer_bytes);
            let of_machine = if more as f64 <= spare { 1.0 } else { fraction_of(spare) };
            own.map_or(of_machine, |own| own.min(of_machine))
        }
    };
    // Fewer layers than the fraction may be on the devices: by less than one of each device.
    let rest =
        1.0 - fraction + config.device.devices().count() as f64 / source.spec.cached_layers().len() as f64;
    let at_most = |bytes: f64| {
        let host = fraction_of(bytes);
        device_memory::host_fraction(host, host >= rest.min(1.0), fraction)
    };
    let host = match config.tiers.host_kv {
        _ if config.device.memory.is_none() => 0.0,
        HostTier::All => 1.0,
        HostTier::Fraction(fraction) => fraction,
        HostTier::Bytes(bytes) => at_most(bytes as f64),
        HostTier::Auto => {
            let engine = EngineMemory::predict(&config.device, source, &setup)?;
            at_most(free_memory(config, &setup, engine) - fraction * all as f64)
        }
    };
    Ok((fraction < 1.0).then_some((Residency(fraction), host)))
}

/// Returns the part of the machine's memory beside an engine, and what is reserved beside it, that caches may
/// take.
fn free_memory(config: &Config, setup: &EngineSetup, engine: EngineMemory) -> f64 {
    let taken = engine.total().saturating_add(reserved_beside(config, setup).1);
    available_memory().saturating_sub(taken) as f64 * CACHES
}

/// Returns the settings with which no weights are in a memory but for overrides; `None` if all are in memory
/// without an offload.
fn lowest_weights(config: &Config, source: &ModelSource) -> Result<Option<Offload>> {
    let tiers = tier_rules::rules(config, source)?;
    if config.device.memory.is_none() && config.tiers.host == HostTier::All && tiers.overrides.is_empty() {
        return Ok(None);
    }
    let (place, overlaps) = (StorePlace(stores_folder(&config.tiers)?), config.tiers.overlap);
    Ok(Some(Offload { resident: Residency(0.0), tiers, place, overlaps, max_slab: Offload::MAX_SLAB }))
}

/// Decides which weights of a model stay on the devices, and which are in the memory of the host.
fn place_weights(config: &Config, source: &mut ModelSource) -> Result<()> {
    source.offload = lowest_weights(config, source)?;
    match config.device.memory {
        Some(memory) => device_memory::place_weights(config, source, memory),
        None if source.offload.is_none() => Ok(()),
        None => {
            match residency(config, source)? {
                Some(resident) => set_residency(source, resident),
                None => place_all_in_memory(config, source),
            }
            if config.tiers.host == HostTier::Auto {
                reduce_until_fits(config, source);
            }
            Ok(())
        }
    }
}

/// Keeps all weights in memory: without a store, unless steps in row batches, which a store has, are needed
/// to fit.
fn place_all_in_memory(config: &Config, source: &mut ModelSource) {
    let offload = source.offload.take();
    if config.tiers.host == HostTier::Auto && !fits(config, source, available_memory()) {
        source.offload = offload;
        set_residency(source, Residency(1.0));
    }
}

/// Reduces the fraction of the weights that stays until the engine fits: buffers may take more memory with
/// more weights in memory.
fn reduce_until_fits(config: &Config, source: &mut ModelSource) {
    let Some(Residency(most)) = source.offload.as_ref().map(|offload| offload.resident) else { return };
    let (memory, mut part) = (available_memory(), (most * PARTS as f64) as usize);
    while part > 0 && !fits(config, source, memory) {
        part -= 1;
        set_residency(source, Residency(part as f64 / PARTS as f64));
    }
}

/// Returns whether an engine with the weights that stay fits into `memory` bytes, beside what is reserved.
fn fits(config: &Config, source: &ModelSource, memory: usize) -> bool {
    let total = || {
        let setup = engine_setup(config, source)?;
        let engine = EngineMemory::predict(&config.device, source, &setup)?.total();
        anyhow::Ok(engine.saturating_add(reserved_beside(config, &setup).1))
    };
    total().is_ok_and(|total| total <= memory)
}

/// Fails if a policy is configured that is for another model.
fn check_policy(config: &Config, source: &ModelSource) -> Result<()> {
    let Some(policy) = &config.tiers.policy else { return Ok(()) };
    let (name, parameters) = (source.name(), parameter_count(source));
    ensure!(
        policy.model == name && policy.parameters == parameters,
        "tiers.policy_file: the policy is for the model {} with {} parameters, not for {name} with \
         {parameters}",
        policy.model,
        policy.parameters
    );
    Ok(())
}

/// Returns the number of a model's parameters.
pub(super) fn parameter_count(source: &ModelSource) -> u64 {
    let records = load::records(source, &source.spec);
    records.iter().map(|record| record.shape.iter().product::<usize>() as u64).sum()
}

/// Returns the fraction of the layers' weights that stays in memory, given a source of which none does;
/// `None` if the devices have them all in memory anyway.
fn residency(config: &Config, source: &mut ModelSource) -> Result<Option<Residency>> {
    let nothing = || "tiers.host, with all weights of layers on disk";
    let setup = engine_setup(config, source).with_context(nothing)?;
    let weights = FreeWeights::count(config, source, &setup)?;
    let fraction = match config.tiers.host {
        HostTier::All => 1.0,
        HostTier::Fraction(fraction) => fraction,
        HostTier::Bytes(bytes) => weights.fraction(bytes as f64, weights.fixed_on_devices()),
        HostTier::Auto => {
            let least = EngineMemory::from_reports(weights.least.clone(), &setup);
            let beside = reserved_beside(config, &setup).1;
            weights.fraction(weights_in(available_memory(), &least, beside, config.kv.size) as f64, 0)
        }
    };
    // With everything in memory, no store is needed, unless one is asked for by number.
    let is_asked = matches!(config.tiers.host, HostTier::Fraction(_) | HostTier::Bytes(_));
    let has_layers = weights.least.iter().any(|report| report.offload.is_some());
    let is_below = fraction < 1.0 || weights.has_fixed_below();
    Ok((has_layers && (is_asked || is_below)).then_some(Residency(fraction)))
}

/// Returns the bytes of the layers' weights that stay in so much memory, of an engine that needs at least
/// `least` without them, if others take `beside` bytes.
fn weights_in(memory: usize, least: &EngineMemory, beside: usize, size: KvSize) -> usize {
    let (cache, share) = match size {
        KvSize::Auto => (0, WEIGHTS_BEFORE_CACHE),
        KvSize::Tokens(_) | KvSize::Bytes(_) => (least.kv, WEIGHTS_BESIDE_CACHE),
    };
    let taken = (least.weights + least.steps + cache).saturating_add(beside);
    (memory.saturating_sub(taken) as f64 * share) as usize
}

/// Returns the folder of what is on disk. Fails if none is configured and the user has no cache folder.
pub(super) fn stores_folder(tiers: &TierConfig) -> Result<PathBuf> {
    match &tiers.disk_path {
        Some(folder) => Ok(folder.clone()),
        None => Ok(cache_folder().context("tiers.disk_path must be set")?.join("weights")),
    }
}

/// Returns this program's folder for what can be made again. Fails if the user has no cache folder.
pub(super) fn cache_folder() -> Result<PathBuf> {
    let variable = std::env::var_os("XDG_CACHE_HOME").filter(|path| !path.is_empty()).map(PathBuf::from);
    let usual = variable.or_else(|| Some(std::env::home_dir()?.join(".cache")));
    Ok(usual.context("there is no cache folder: XDG_CACHE_HOME and HOME are not set")?.join("mainstem"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: weights and cache took what a server needs for requests and responses.
    #[test]
    fn weights_and_cache_leave_what_a_server_takes() {
        let least = EngineMemory { weights: 50, kv: 100, steps: 30 };
        for (beside, size, expected) in [
            (0, KvSize::Auto, 598),
            (300, KvSize::Auto, 403),
            (300, KvSize::Tokens(9), 416),
            (300, KvSize::Bytes(100), 416),
            (900, KvSize::Auto, 13),
            (usize::MAX, KvSize::Auto, 0),
        ] {
            let weights = weights_in(1000, &least, beside, size);
            assert_eq!(weights, expected, "{beside}, {size:?}");
            let cache = if size == KvSize::Auto { 0 } else { least.kv };
            assert!(beside > 1000 || weights + 80 + cache + beside <= 1000, "{beside}, {size:?}");
        }
    }
}
