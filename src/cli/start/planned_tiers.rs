//! The tiers of a plan: their sizes and rates, and the settings that name the parts in each.
//!
//! Invariant: settings are those that the start reads.

use super::choice_memory::Memories;
use crate::config::{Config, HostTier};
use crate::planner::placement::{Links, MachineRates, TierLimits};

/// A memory or disk that holds weights and caches.
#[derive(Clone, Debug, PartialEq)]
pub struct TierSize {
    pub name: &'static str,
    /// Bytes that may be used, of all devices together; infinite if there is no limit.
    pub bytes: f64,
    /// Bytes per second that a device gets from it.
    pub read: f64,
}

/// The keys of tiers that a policy sets, each with bytes; `None` is all.
pub(super) struct TierSettings(pub(super) Vec<(&'static str, Option<u64>)>);

impl TierSettings {
    /// Returns the settings of weights and caches with these limits. If devices have the memory of the host,
    /// the keys of this are about the devices.
    pub(super) fn new(weights: &TierLimits, caches: &TierLimits, has_own_memory: bool) -> TierSettings {
        TierSettings(match has_own_memory {
            true => vec![
                ("tiers.device", weights.device),
                ("tiers.host", weights.host),
                ("tiers.kv", caches.device),
                ("tiers.host_kv", caches.host),
            ],
            false => vec![("tiers.host", weights.device), ("tiers.kv", caches.device)],
        })
    }

    /// Changes a configuration to the settings.
    pub(super) fn apply(&self, config: &mut Config) {
        let tiers = &mut config.tiers;
        for (key, bytes) in &self.0 {
            let tier = match *key {
                "tiers.device" => &mut tiers.device,
                "tiers.host" => &mut tiers.host,
                "tiers.kv" => &mut tiers.kv,
                _ => &mut tiers.host_kv,
            };
            *tier = bytes.map_or(HostTier::All, HostTier::Bytes);
        }
    }
}

/// Returns the rates of what the devices are connected to.
pub(super) fn links(config: &Config, rates: &MachineRates) -> Links {
    let device = match config.device.memory {
        Some(_) => config.device.link.unwrap_or(rates.memory),
        None => f64::INFINITY,
    };
    Links { device, disk: rates.disk }
}

/// Returns the tiers of a plan, the fastest first.
pub(super) fn tiers(
    config: &Config,
    rates: &MachineRates,
    memories: &Memories,
    links: &Links,
) -> Vec<TierSize> {
    let devices = config.device.devices().count() as f64;
    let memory = |name, bytes, read| TierSize { name, bytes, read };
    let mut tiers = match memories.device {
        Some(own) => vec![
            memory("device", devices * own, rates.memory),
            memory("host", (memories.usable - devices * own).max(0.0), links.device),
        ],
        None => vec![memory("memory", memories.usable, rates.memory)],
    };
    tiers.extend(links.disk.map(|disk| memory("disk", f64::INFINITY, disk.read.min(links.device))));
    tiers
}
