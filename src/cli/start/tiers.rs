//! The places of a model's weights and KV caches: which stay in memory, and the folder of those on disk.
//!
//! Invariant: sizes are those that the engine's devices will allocate, counted by the same code.

use super::memory::{EngineMemory, reserved_beside};
use super::{engine_setup, forecast};
use crate::actors::engine::available_memory;
use crate::config::{Config, HostTier, KvSize, TierConfig};
use crate::model::ModelSource;
use crate::model::load;
use crate::model::offload::{CacheOffload, CacheReport, Offload, OffloadReport, Residency, StorePlace};
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

/// Decides which weights and KV caches of a model stay in memory, as the configuration says: first weights,
/// then caches in the memory that is left. Fails if the model does not fit even if those of all layers are on
/// disk, or if a policy is for another model.
pub fn place_tiers(config: &Config, source: &mut ModelSource) -> Result<()> {
    check_policy(config, source)?;
    if is_cache_on_disk(config)? && source.spec.decoder.is_some() {
        let (folder, overlaps) = (stores_folder(&config.tiers)?, config.tiers.overlap);
        source.cache_offload =
            Some(CacheOffload { resident: Residency(0.0), folder: folder.clone(), overlaps });
        place_weights(config, source)?;
        let resident = cache_residency(config, source)?;
        source.cache_offload = resident.map(|resident| CacheOffload { resident, folder, overlaps });
        return Ok(());
    }
    place_weights(config, source)
}

/// Returns whether KV caches may be on disk. Fails for a size in bytes without a size of the whole cache.
fn is_cache_on_disk(config: &Config) -> Result<bool> {
    let in_tokens = matches!(config.kv.size, KvSize::Tokens(_));
    Ok(match config.tiers.kv {
        HostTier::All => false,
        HostTier::Fraction(fraction) => fraction < 1.0,
        HostTier::Auto => in_tokens,
        HostTier::Bytes(_) => {
            ensure!(in_tokens, "tiers.kv: a size needs kv.size as a number of tokens");
            true
        }
    })
}

/// Returns the fraction of the layers' KV caches that stays in memory, given a source of which none does;
/// `None` if all stay.
fn cache_residency(config: &Config, source: &ModelSource) -> Result<Option<Residency>> {
    let setup = engine_setup(config, source).context("tiers.kv, with the caches of all layers on disk")?;
    let reports = forecast(&config.device, source, &setup)?.into_iter().flatten();
    let mut caches = CacheReport::default();
    reports.filter_map(|report| report.cache_offload).for_each(|report| caches.add(report));
    let fraction_of = |bytes: f64| bytes / caches.file_bytes.max(1) as f64;
    let fraction = match config.tiers.kv {
        HostTier::Fraction(fraction) => fraction,
        HostTier::Bytes(bytes) => fraction_of(bytes as f64),
        HostTier::All | HostTier::Auto => {
            let EngineMemory { weights, kv, steps } = EngineMemory::predict(&config.device, source, &setup)?;
            let taken = (weights + kv + steps).saturating_add(reserved_beside(config, &setup).1);
            let spare = available_memory().saturating_sub(taken) as f64 * CACHES;
            // Without a file, there are no buffers either.
            let more = caches.file_bytes.saturating_sub(caches.buffer_bytes);
            if more as f64 <= spare { 1.0 } else { fraction_of(spare) }
        }
    };
    Ok((fraction < 1.0).then_some(Residency(fraction)))
}

/// Decides which weights of a model stay in memory.
fn place_weights(config: &Config, source: &mut ModelSource) -> Result<()> {
    if config.tiers.host == HostTier::All {
        return Ok(());
    }
    let (place, overlaps) = (StorePlace(stores_folder(&config.tiers)?), config.tiers.overlap);
    let mut offload = Offload { resident: Residency(0.0), place, overlaps };
    source.offload = Some(offload.clone());
    let Some(Residency(most)) = residency(config, source)? else {
        source.offload = None;
        return Ok(());
    };
    offload.resident = Residency(most);
    source.offload = Some(offload.clone());
    if config.tiers.host == HostTier::Auto {
        let memory = available_memory();
        let mut part = (most * PARTS as f64) as usize;
        // Buffers may take more memory with more in memory.
        while part > 0 && !fits(config, source, memory) {
            part -= 1;
            offload.resident = Residency(part as f64 / PARTS as f64);
            source.offload = Some(offload.clone());
        }
    }
    Ok(())
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
fn residency(config: &Config, source: &ModelSource) -> Result<Option<Residency>> {
    let nothing = || "tiers.host, with all weights of layers on disk";
    let setup = engine_setup(config, source).with_context(nothing)?;
    let reports = forecast(&config.device, source, &setup)?.into_iter().flatten();
    let mut layers = OffloadReport::default();
    reports.filter_map(|report| report.offload).for_each(|report| layers.add(report));
    let fraction_of = |bytes: usize| residency_of(bytes, layers.offloaded_bytes()).0;
    let fraction = match config.tiers.host {
        HostTier::Fraction(fraction) => fraction,
        HostTier::Bytes(bytes) => fraction_of(usize::try_from(bytes).unwrap_or(usize::MAX)),
        HostTier::All | HostTier::Auto => {
            let least = EngineMemory::predict(&config.device, source, &setup)?;
            let beside = reserved_beside(config, &setup).1;
            fraction_of(weights_in(available_memory(), &least, beside, config.kv.size))
        }
    };
    // With everything in memory, no store is needed, unless one is asked for by number.
    let is_all = config.tiers.host == HostTier::Auto && fraction >= 1.0;
    Ok((layers.offloaded_bytes() > 0 && !is_all).then_some(Residency(fraction)))
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
