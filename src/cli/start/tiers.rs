//! The places of a model's weights and KV caches: which stay in memory, and the folder of those on disk.
//!
//! Invariant: sizes are those that the engine's devices will allocate, counted by the same code.

use super::cache_folder::cache_folder;
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
use crate::model::offload::{CacheOffload, CacheReport, Offload, Residency, StorePlace, TierRules};
use anyhow::{Context, Result, bail, ensure};
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
    place_tiers_in(config, source, available_memory())?;
    let below = source.offload.is_some() || source.cache_offload.is_some();
    let gpu = config.device.devices().find(|device| device.kind.has_own_memory()).filter(|_| below);
    match gpu {
        Some(gpu) => bail!(
            "device.groups: {gpu} must hold all weights and KV caches of its layers; tiers.host and tiers.kv \
             are not supported with GPUs"
        ),
        None => Ok(()),
    }
}

/// Decides as [`place_tiers`] does, with so many bytes of available memory.
fn place_tiers_in(config: &Config, source: &mut ModelSource, memory: usize) -> Result<()> {
    check_policy(config, source)?;
    source.link_rate = config.device.link;
    if !is_cache_on_disk(config)? || source.spec.decoder.is_none() {
        return place_weights(config, source, memory);
    }
    let TierConfig { overlap: overlaps, attends_on_host, host_kv, .. } = config.tiers;
    let folder = stores_folder(&config.tiers)?;
    // Without any in the file, no buffers need memory.
    let host = if attends_on_host && host_kv == HostTier::All { 1.0 } else { 0.0 };
    let caches = CacheOffload { resident: Residency(0.0), host, folder, overlaps, attends_on_host };
    source.cache_offload = Some(caches.clone());
    // Nothing is left in a device's own memory beside weights that take as much as they can, so caches of a
    // configured size come first.
    let are_caches_first = config.device.memory.is_some() && config.tiers.kv != HostTier::Auto;
    match are_caches_first {
        true => source.offload = lowest_weights(config, source)?,
        false => place_weights(config, source, memory)?,
    }
    let (resident, bytes) = cache_fraction(config, source, memory)?;
    source.cache_offload =
        (resident < 1.0).then_some(CacheOffload { resident: Residency(resident), ..caches });
    // In the host's memory, weights come first: what caches may take there is known after them.
    let is_host_auto = host_kv == HostTier::Auto;
    if are_caches_first && is_host_auto {
        place_weights(config, source, memory)?;
    }
    if source.cache_offload.is_some() {
        let host = host_cache_fraction(config, source, (resident, bytes), memory)?;
        source.cache_offload.iter_mut().for_each(|caches| caches.host = host);
    }
    if are_caches_first && !is_host_auto { place_weights(config, source, memory) } else { Ok(()) }
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

/// Returns the fraction of the layers' KV caches that stays on the devices, and the bytes of all of them,
/// given a source of which none do.
fn cache_fraction(config: &Config, source: &ModelSource, memory: usize) -> Result<(f64, usize)> {
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
            let spare = free_memory(config, &setup, EngineMemory::from_reports(reports, &setup), memory);
            // Without a file, there are no buffers either.
            let more = caches.file_bytes.saturating_sub(caches.buffer_bytes);
            let of_machine = if more as f64 <= spare { 1.0 } else { fraction_of(spare) };
            own.map_or(of_machine, |own| own.min(of_machine))
        }
    };
    Ok((fraction, all))
}

/// Returns the fraction of the layers' KV caches, of so many bytes, that is in the memory of the host, given
/// a source of which a fraction is on the devices and none in the memory of the host.
fn host_cache_fraction(
    config: &Config,
    source: &ModelSource,
    (resident, bytes): (f64, usize),
    memory: usize,
) -> Result<f64> {
    // Fewer layers than the fraction may be on the devices: by less than one of each device.
    let rest =
        1.0 - resident + config.device.devices().count() as f64 / source.spec.cached_layers().len() as f64;
    let at_most = |taken: f64| {
        let host = taken / bytes.max(1) as f64;
        device_memory::host_fraction(host, host >= rest.min(1.0), resident)
    };
    Ok(match config.tiers.host_kv {
        _ if config.device.memory.is_none() => 0.0,
        HostTier::All => 1.0,
        HostTier::Fraction(fraction) => fraction,
        HostTier::Bytes(bytes) => at_most(bytes as f64),
        HostTier::Auto => {
            let setup =
                engine_setup(config, source).context("tiers.host_kv, with no caches in host memory")?;
            let engine = EngineMemory::predict(&config.device, source, &setup)?;
            at_most(free_memory(config, &setup, engine, memory))
        }
    })
}

/// Returns the part of so much memory beside an engine, and what is reserved beside it, that caches may take.
fn free_memory(config: &Config, setup: &EngineSetup, engine: EngineMemory, memory: usize) -> f64 {
    let taken = engine.total().saturating_add(reserved_beside(config, setup).1);
    memory.saturating_sub(taken) as f64 * CACHES
}

/// Returns the settings with which no weights are in a memory but for overrides; `None` if all are in memory
/// without an offload.
fn lowest_weights(config: &Config, source: &ModelSource) -> Result<Option<Offload>> {
    let tiers = tier_rules::rules(config, source)?;
    if config.device.memory.is_none() && config.tiers.host == HostTier::All && tiers.overrides.is_empty() {
        return Ok(None);
    }
    Ok(Some(offload(config, tiers)?))
}

/// Returns the settings of a model of which no weights are in a memory but for the overrides of `tiers`.
fn offload(config: &Config, tiers: TierRules) -> Result<Offload> {
    let (place, overlaps) = (StorePlace(stores_folder(&config.tiers)?), config.tiers.overlap);
    Ok(Offload { resident: Residency(0.0), tiers, place, overlaps, max_slab: Offload::MAX_SLAB })
}

/// Returns the settings of a model whose store is written, whatever is in memory later.
pub(super) fn store_settings(config: &Config, source: &ModelSource) -> Result<Offload> {
    offload(config, tier_rules::rules(config, source)?)
}

/// Decides which weights of a model stay on the devices, and which are in the memory of the host, of which so
/// many bytes are available.
fn place_weights(config: &Config, source: &mut ModelSource, memory: usize) -> Result<()> {
    source.offload = lowest_weights(config, source)?;
    let Some(own) = config.device.memory else {
        return if source.offload.is_some() { place_in_memory(config, source, memory) } else { Ok(()) };
    };
    device_memory::place_weights(config, source, (own, memory))
}

/// Decides which weights stay in memory, of devices without memory of their own.
fn place_in_memory(config: &Config, source: &mut ModelSource, memory: usize) -> Result<()> {
    match residency(config, source, memory)? {
        Some(resident) => set_residency(source, resident),
        None => place_all_in_memory(config, source, memory),
    }
    match config.tiers.host {
        HostTier::Auto => reduce_until(source, |source| fits(config, source, memory)),
        HostTier::Bytes(bytes) => reduce_until(source, |source| stays_within(config, source, bytes)),
        HostTier::All | HostTier::Fraction(_) => {}
    }
    Ok(())
}

/// Keeps all weights in memory: without a store, unless steps in row batches, which a store has, are needed
/// to fit.
fn place_all_in_memory(config: &Config, source: &mut ModelSource, memory: usize) {
    let offload = source.offload.take();
    if config.tiers.host == HostTier::Auto && !fits(config, source, memory) {
        source.offload = offload;
        set_residency(source, Residency(1.0));
    }
}

/// Reduces the fraction of the weights that stays until it is right: buffers may take more memory with more
/// weights in memory, and FlexGen's rule may place more than the fraction.
fn reduce_until(source: &mut ModelSource, is_right: impl Fn(&ModelSource) -> bool) {
    let Some(Residency(most)) = source.offload.as_ref().map(|offload| offload.resident) else { return };
    let mut part = (most * PARTS as f64) as usize;
    while part > 0 && !is_right(source) {
        part -= 1;
        set_residency(source, Residency(part as f64 / PARTS as f64));
    }
}

/// Returns whether the weights of layers that stay take at most so many bytes.
fn stays_within(config: &Config, source: &ModelSource, bytes: u64) -> bool {
    let stays = || {
        let setup = engine_setup(config, source)?;
        let reports = forecast(&config.device, source, &setup)?.into_iter().flatten();
        let stays = reports.filter_map(|report| Some(report.offload?.resident_bytes));
        anyhow::Ok(stays.sum::<usize>() as u64 <= bytes)
    };
    // What fails here fails the start, with its reason.
    stays().unwrap_or(true)
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
fn residency(config: &Config, source: &mut ModelSource, memory: usize) -> Result<Option<Residency>> {
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
            weights.fraction(weights_in(memory, &least, beside, config.kv.size) as f64, 0)
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

#[cfg(test)]
mod tests {
    use super::super::devices::merge_reports;
    use super::*;
    use crate::config::Overrides;
    use crate::model::ModelRef;
    use crate::model::executor::ExecutorReport;

    fn config(settings: &[(&'static str, &str)]) -> Config {
        let mut flags = Overrides::default();
        let size = [("kv.size", "8192 tokens"), ("tiers.disk_path", "/nowhere")];
        for (key, value) in size.iter().chain(settings) {
            flags.set(key, Some(*value));
        }
        Config::load(None, flags).unwrap()
    }

    /// Returns the memory of a synthetic model that is placed in so many bytes, and the sum of the reports of
    /// its devices.
    fn placed(settings: &[(&'static str, &str)], memory: usize) -> (EngineMemory, ExecutorReport) {
        let (config, model) = (config(settings), ModelRef::parse("synthetic:110M").unwrap());
        let mut source = ModelSource::open(&model, None).unwrap();
        place_tiers_in(&config, &mut source, memory).unwrap();
        let setup = engine_setup(&config, &source).unwrap();
        let reports: Vec<_> =
            forecast(&config.device, &source, &setup).unwrap().into_iter().flatten().collect();
        (EngineMemory::from_reports(reports.clone(), &setup), merge_reports(reports))
    }

    /// Regression: caches took what was left without weights in host memory, and weights all of it.
    #[test]
    fn weights_and_caches_in_host_memory_fit_into_it_together() {
        let own = [("device.memory", "400MiB"), ("tiers.device", "20%")];
        for (kv, host, rule) in [
            ("0%", "all", "even"),
            ("30%", "all", "even"),
            ("0%", "50%", "even"),
            ("0%", "auto", "even"),
            ("0%", "40MiB", "midpoint"),
            ("30%", "auto", "midpoint"),
            ("auto", "all", "even"),
        ] {
            let settings =
                [&own[..], &[("tiers.kv", kv), ("tiers.host", host), ("tiers.rule", rule)]].concat();
            let with =
                |host_kv, memory| placed(&[&settings[..], &[("tiers.host_kv", host_kv)]].concat(), memory);
            let none = with("0%", 4 << 30).0;
            let all = with("all", 4 << 30).0.copies[1];
            assert!(none.copies[0] > 0 && none.copies[1] == 0 && all > 0, "{settings:?}: {none:?}, {all}");
            let memory = none.total() + all / 2;
            let (found, _) = with("auto", memory);
            assert!(found.total() <= memory, "{settings:?}: {found:?} in {memory}");
            assert!(found.copies[1] > 0, "{settings:?}: {found:?} in {memory}");
        }
    }

    /// Regression: whole matrices were more than the fraction that the rule was given.
    #[test]
    fn flexgens_rule_takes_no_more_memory_than_there_is() {
        let rule = ("tiers.rule", "midpoint");
        let (all, report) = placed(&[rule, ("tiers.host", "100%")], 4 << 30);
        let layers = report.offload.unwrap().resident_bytes;
        for part in 1..8 {
            let (bytes, memory) = (layers * part / 8, all.total() - layers * part / 8);
            let size = bytes.to_string();
            let (_, report) = placed(&[rule, ("tiers.host", &size)], 4 << 30);
            let stays = report.offload.unwrap().resident_bytes;
            assert!(stays <= bytes, "{stays} of {bytes}");
            let own = [rule, ("device.memory", "1GiB"), ("tiers.device", "0"), ("tiers.host", &size)];
            let (found, _) = placed(&own, 4 << 30);
            assert!(found.copies[0] <= bytes && (part < 4 || found.copies[0] > 0), "{found:?} of {bytes}");
            for host in [&[][..], &[own[1], own[2]]] {
                let with = |tier, memory| {
                    let settings = [&[rule][..], host, &[("tiers.host", tier)]].concat();
                    placed(&settings, memory).0
                };
                let memory = memory.max(with("0", 4 << 30).total());
                let found = with("auto", memory);
                assert!(found.total() <= memory, "{host:?}: {found:?} in {memory}");
            }
        }
    }

    /// Regression: weights and cache took what a server needs for requests and responses.
    #[test]
    fn weights_and_cache_leave_what_a_server_takes() {
        let least = EngineMemory { weights: 50, kv: 100, steps: 30, copies: [0; 2] };
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
