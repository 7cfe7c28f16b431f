//! The weights and KV caches of devices with memory of their own: how much of them stays there, and how much
//! of the rest is in the memory of the host.
//!
//! Invariant: what is chosen automatically fits into the memory of every device, as counted by the code that
//! allocates it.

use super::free_weights::{FreeWeights, set_residency};
use super::memory::{EngineMemory, reserved_beside};
use super::{engine_setup, forecast};
use crate::actors::EngineSetup;
use crate::config::{Config, HostTier, KvSize};
use crate::model::ModelSource;
use crate::model::executor::ExecutorReport;
use crate::model::offload::Residency;
use anyhow::{Context, Result, ensure};

/// Fraction of the memory beside the other weights that weights take if the size of the KV cache is chosen,
/// too.
const BEFORE_CACHE: f64 = 0.65;

/// Fraction of the host's available memory that copies of weights take if their number is chosen.
const HOST_COPIES: f64 = 0.8;

/// Least step by which the fraction on the devices is reduced until it fits.
const STEP: f64 = 1.0 / 128.0;

/// Sets the fractions of the weights on devices with `own` bytes each and in the memory of the host, of which
/// `memory` bytes are available, given a source of which none are; with all on the devices, nothing is left
/// to set. Fails if the model does not fit even without weights of layers on the devices.
pub(super) fn place_weights(
    config: &Config,
    source: &mut ModelSource,
    (own, memory): (u64, usize),
) -> Result<()> {
    let setup = engine_setup(config, source).context("device.memory, without weights of layers in it")?;
    let weights = FreeWeights::count(config, source, &setup)?;
    let needed = weights.least.iter().map(ExecutorReport::total_bytes).max().unwrap_or(0);
    ensure!(
        needed as u64 <= own,
        "device.memory must be at least {needed} bytes: so much is needed without weights of layers in it"
    );
    let device = match config.tiers.device {
        HostTier::All => 1.0,
        HostTier::Fraction(fraction) => fraction,
        HostTier::Bytes(bytes) => weights.fraction(bytes as f64, weights.fixed_on_devices()),
        HostTier::Auto => largest_fraction((config, &setup), source, &weights, own)?,
    };
    let is_asked = matches!(config.tiers.device, HostTier::Fraction(_) | HostTier::Bytes(_));
    if device >= 1.0 && !is_asked && !weights.has_fixed_below() {
        source.offload = None;
        return Ok(());
    }
    set_residency(source, Residency(device));
    place_on_host(config, source, (&setup, &weights, device), memory)
}

/// Sets the fraction of the weights in the memory of the host, of which `memory` bytes are available, given a
/// source with the fraction `device` on the devices and none there.
fn place_on_host(
    config: &Config,
    source: &mut ModelSource,
    (setup, weights, device): (&EngineSetup, &FreeWeights, f64),
    memory: usize,
) -> Result<()> {
    let reports: Vec<_> = forecast(&config.device, source, setup)?.into_iter().flatten().collect();
    let fixed: usize = reports.iter().map(|report| report.host_bytes()[0]).sum();
    let rest: usize = reports.iter().filter_map(|report| Some(report.offload.as_ref()?.streamed_bytes)).sum();
    let most = match config.tiers.host {
        HostTier::All => {
            set_host(source, 1.0);
            return Ok(());
        }
        HostTier::Fraction(fraction) => {
            set_host(source, fraction);
            return Ok(());
        }
        HostTier::Bytes(bytes) => bytes as f64 - fixed as f64,
        HostTier::Auto => {
            let engine = EngineMemory::from_reports(reports, setup).total();
            let taken = engine.saturating_add(reserved_beside(config, setup).1);
            memory.saturating_sub(taken) as f64 * HOST_COPIES
        }
    };
    let mut host = host_fraction(weights.fraction(most, 0), most >= rest as f64, device);
    // FlexGen's rule may place more than the fraction.
    while host > 0.0 {
        set_host(source, host);
        let reports = forecast(&config.device, source, setup)?.into_iter().flatten();
        let placed: usize = reports.map(|report| report.host_bytes()[0]).sum();
        if (placed - fixed) as f64 <= most.max(0.0) {
            return Ok(());
        }
        host = (host - STEP).max(0.0);
    }
    set_host(source, 0.0);
    Ok(())
}

/// Sets the fraction of the weights in the memory of the host.
fn set_host(source: &mut ModelSource, fraction: f64) {
    source.offload.iter_mut().for_each(|offload| offload.tiers.host = fraction);
}

/// Returns the fraction in the memory of the host that takes no more than `fraction`, given that `device` is
/// on the devices: fractions that sum to 1 would take all that is left, which may be more.
pub(super) fn host_fraction(fraction: f64, has_room_for_rest: bool, device: f64) -> f64 {
    if has_room_for_rest { 1.0 } else { fraction.min(1.0 - device - 1e-6).max(0.0) }
}

/// Returns the largest fraction of the weights that fits into the memory of each device.
fn largest_fraction(
    (config, setup): (&Config, &EngineSetup),
    source: &mut ModelSource,
    weights: &FreeWeights,
    memory: u64,
) -> Result<f64> {
    let is_cache_auto = config.kv.size == KvSize::Auto;
    let taken = |report: &ExecutorReport| {
        (report.total_bytes() - if is_cache_auto { report.kv_bytes } else { 0 }) as f64
    };
    let room = |least: &ExecutorReport| {
        let spare = (memory as f64 - taken(least)).max(0.0);
        taken(least) + spare * if is_cache_auto { BEFORE_CACHE } else { 1.0 }
    };
    // The fraction of all weights by which those of a device exceed its memory.
    let excess = |reports: &[ExecutorReport]| {
        let devices = weights.least.iter().zip(reports).zip(weights.of_devices());
        let of_device = |((least, report), bytes): ((_, &ExecutorReport), usize)| {
            (taken(report) - room(least)) / bytes.max(1) as f64
        };
        devices.map(of_device).fold(f64::NEG_INFINITY, f64::max)
    };
    if excess(&weights.most) <= 0.0 {
        return Ok(1.0);
    }
    let mut fraction = (-excess(&weights.least)).clamp(0.0, 1.0);
    while fraction > 0.0 {
        set_residency(source, Residency(fraction));
        let reports: Vec<_> = forecast(&config.device, source, setup)?.into_iter().flatten().collect();
        let over = excess(&reports);
        if over <= 0.0 {
            break;
        }
        fraction = (fraction - over.max(STEP)).max(0.0);
    }
    Ok(fraction)
}

/// Returns the largest fraction of the KV caches that fits into devices with `memory` bytes, by their reports
/// with none of them there.
pub(super) fn cache_fraction(reports: &[ExecutorReport], memory: u64) -> f64 {
    let of_device = |report: &ExecutorReport| {
        let Some(caches) = report.cache_offload else { return 1.0 };
        let all = caches.file_bytes + caches.host_bytes;
        let spare = memory as f64 - report.total_bytes() as f64;
        // With all caches there, no buffers are needed.
        let fits = all as f64 <= spare + caches.buffer_bytes as f64;
        if fits { 1.0 } else { (spare / all as f64).clamp(0.0, 1.0) }
    };
    reports.iter().map(of_device).fold(1.0, f64::min)
}
