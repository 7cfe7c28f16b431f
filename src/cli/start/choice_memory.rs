//! The memory of choices of a plan, and the ways in which they fit into it.
//!
//! Invariant: bytes are counted by the functions that the start of the engine uses, with the settings that
//! the policy of a choice has.

use super::cache_sizes::CacheSizes;
use super::device_memory::host_fraction;
use super::memory::{EngineMemory, reserved_beside};
use super::tiers::{PARTS, part_of, residency_of, stores_folder};
use super::{engine_setup, forecast};
use crate::config::{Config, KvSize};
use crate::model::ModelSource;
use crate::model::executor::ExecutorReport;
use crate::model::offload::{CacheOffload, Offload, OffloadReport, Residency, StorePlace, TierRules};
use crate::planner::placement::{
    ByTier, Choice, MemoryFit, PlacementProblem, StageData, TierLimits, Variant,
};
use crate::quantize::WeightRules;
use anyhow::Result;
use mainstem_kernels::QuantType;
use std::collections::HashMap;

/// Rows that are computed at once, if none are configured: GEMMs run at nearly their full rate with these.
const BATCH_ROWS: usize = 512;

/// Maximum number of equal parts of the KV caches of which some may be in each tier, with two and with three
/// tiers.
const CACHE_PARTS: [usize; 2] = [32, 16];

/// Returns the configuration with a choice, apart from what stays in memory.
pub(super) fn candidate(
    config: &Config,
    choice: &Choice,
    variants: &[Variant],
    rules: &WeightRules,
    cache: &CacheSizes,
) -> Config {
    let mut config = config.clone();
    config.scheduler.slots = choice.slots;
    config.scheduler.token_budget = choice.token_budget;
    config.scheduler.is_budget_auto = false;
    config.scheduler.batch_rows = Some(batch_rows(&config));
    config.kv.ty = choice.kv;
    if let Some(tokens) = cache.tokens(choice.slots) {
        config.kv.size = KvSize::Tokens(tokens);
    }
    // The built-in rules are valid.
    let rule = variants[choice.variant].weights.and_then(|rule| WeightRules::parse(rule).ok());
    config.model.weights = rule.unwrap_or_else(|| rules.clone());
    config
}

/// Returns the rows that are computed at once: the same whether weights are read or not, so that memory does
/// not depend on that.
pub(super) fn batch_rows(config: &Config) -> usize {
    config.scheduler.batch_rows.unwrap_or(BATCH_ROWS)
}

/// The memories of a plan.
#[derive(Clone, Copy, Debug)]
pub(super) struct Memories {
    /// Bytes that the program may take, those of devices included.
    pub usable: f64,
    /// Bytes of each device, if devices have memory of their own.
    pub device: Option<f64>,
    /// Whether weights and caches may be on disk.
    pub has_disk: bool,
}

/// Numbers of equal parts of the caches on devices and in host memory, and of all.
type CacheLevel = [usize; 3];

/// Counts the memory of choices.
pub(super) struct MemoryCounter<'a> {
    config: &'a Config,
    source: &'a mut ModelSource,
    variants: &'a [Variant],
    /// The configured rules of the formats of weights.
    rules: &'a WeightRules,
    pub(super) cache: CacheSizes,
    /// The matrices that each device holds, by variant, part of the layers' bytes, and whether others may be
    /// in host memory, as far as they have been counted. Nothing else of a choice affects them.
    weights: HashMap<(usize, usize, bool), Vec<HeldWeights>>,
    /// The parts of each device's caches by place. They do not depend on the number of pages.
    caches: HashMap<(usize, QuantType, CacheLevel), Vec<CacheParts>>,
    /// The reason of the last choice that is impossible.
    pub(super) reason: Option<anyhow::Error>,
}

/// The bytes of a device with no matrices and caches of layers on it.
#[derive(Clone, Copy, Default)]
struct LeastDevice {
    /// Everything but the matrices and caches of layers and the buffers to read these.
    fixed: f64,
    /// Buffers for matrices, and the least pools of experts.
    buffers: f64,
    /// Matrices of layers.
    weights: f64,
    /// KV caches that may be elsewhere, and buffers for them.
    caches: f64,
    cache_buffers: f64,
}

/// The bytes of a choice with no matrices and caches of layers on devices.
pub(super) struct LeastMemory {
    devices: Vec<LeastDevice>,
    /// Bytes of the host beside devices.
    host: f64,
    /// Positions that the caches have room for.
    positions: f64,
}

impl LeastMemory {
    fn sum(&self, part: impl Fn(&LeastDevice) -> f64) -> f64 {
        self.devices.iter().map(part).sum()
    }

    /// Returns the bytes with all caches, and so many times the matrices of layers, in memory.
    pub(super) fn with_layers(&self, times: f64) -> f64 {
        self.host + self.sum(|device| device.fixed + device.caches + times * device.weights)
    }

    /// Returns the bytes of all memory that the choice needs at least.
    pub(super) fn total(&self) -> f64 {
        self.host + self.sum(LeastDevice::total)
    }

    /// Returns the bytes that the choice needs at least on the device that needs most, if that has memory of
    /// its own: the start counts it without matrices first.
    pub(super) fn of_device(&self) -> f64 {
        let total =
            |device: &LeastDevice| device.fixed + device.buffers + device.caches.min(device.cache_buffers);
        self.devices.iter().map(total).fold(0.0, f64::max)
    }

    /// Returns the bytes of devices by the memories that they are in, each with its limit: of each device, or
    /// of all together.
    fn in_memories(&self, memories: &Memories, of: &[f64]) -> Vec<(f64, f64)> {
        match memories.device {
            Some(limit) => of.iter().map(|bytes| (*bytes, limit)).collect(),
            None => vec![(of.iter().sum(), memories.usable - self.host)],
        }
    }

    /// Returns the bytes of host memory beside devices with memory of their own; 0 for others. Negative if
    /// there is too little.
    pub(super) fn host_room(&self, memories: &Memories) -> f64 {
        let devices = self.devices.len() as f64;
        memories.device.map_or(0.0, |device| memories.usable - devices * device - self.host)
    }
}

impl LeastMemory {
    /// Returns the places of each device's data, of which `below` bytes of matrices are not on devices, and
    /// `disk` of these on disk.
    fn stages(&self, caches: &[CacheParts], below: f64, disk: f64) -> Vec<StageData> {
        let all = self.sum(|device| device.weights);
        let stage = |(device, parts): (&LeastDevice, &CacheParts)| {
            let share = device.weights / all.max(1.0);
            let [below, disk] = [below, disk].map(|bytes| bytes * share);
            let of_caches = |part: f64| part * device.caches;
            let CacheParts { places, .. } = parts;
            StageData {
                weights: ByTier { device: device.weights - below, host: below - disk, disk },
                caches: ByTier {
                    device: of_caches(places.device),
                    host: of_caches(places.host),
                    disk: of_caches(places.disk),
                },
                positions: self.positions,
                whole_experts: below - disk > 0.0,
            }
        };
        self.devices.iter().zip(caches).map(stage).collect()
    }
}

impl LeastDevice {
    fn total(&self) -> f64 {
        self.fixed + self.weights.min(self.buffers) + self.caches.min(self.cache_buffers)
    }
}

/// The parts of a device's caches by place, and the buffers for them, as a part of all.
#[derive(Clone, Copy)]
struct CacheParts {
    places: ByTier,
    buffers: f64,
}

/// The bytes of a device's matrices that are on it, and these with buffers and pools for the others.
#[derive(Clone, Copy)]
struct HeldWeights {
    resident: f64,
    used: f64,
}

/// The bytes of a choice, and the positions of its caches.
struct Counted {
    devices: Vec<ExecutorReport>,
    host: usize,
    positions: usize,
}

impl<'a> MemoryCounter<'a> {
    pub(super) fn new(
        config: &'a Config,
        source: &'a mut ModelSource,
        variants: &'a [Variant],
        rules: &'a WeightRules,
        cache: CacheSizes,
    ) -> MemoryCounter<'a> {
        let (weights, caches) = (HashMap::new(), HashMap::new());
        MemoryCounter { config, source, variants, rules, cache, weights, caches, reason: None }
    }

    /// Halves the longest sequence that the cache has room for, down to the mean, until the smallest choices
    /// fit.
    pub(super) fn shorten_to(&mut self, memories: &Memories, problem: &PlacementProblem) {
        let size = |choice: &Choice| (choice.slots, choice.token_budget);
        let least = problem.choices.iter().map(size).min();
        let smallest: Vec<_> = problem.choices.iter().filter(|choice| Some(size(choice)) == least).collect();
        let fits =
            |counter: &mut Self| smallest.iter().any(|choice| !counter.fits(choice, memories).is_empty());
        while self.cache.longest > self.cache.mean && !fits(self) {
            self.cache.longest = (self.cache.longest / 2).max(self.cache.mean);
        }
    }

    /// Returns the ways in which a choice fits into the memories, with as many matrices in the faster ones as
    /// fit beside some part of the caches: none if it does not fit, or if an engine with these sizes is
    /// impossible here. Those with caches in slower memories from which no matrix gains are left out.
    pub(super) fn fits(&mut self, choice: &Choice, memories: &Memories) -> Vec<MemoryFit> {
        let Some(least) = self.least(choice) else { return Vec::new() };
        let has_host = memories.device.is_some();
        let has_caches = least.sum(|device| device.caches) > 0.0;
        let most = if has_caches { CACHE_PARTS[usize::from(has_host)] } else { 1 };
        let parts = self.source.spec.cached_layers().len().clamp(1, most);
        let mut fits = Vec::new();
        for on_device in (0..=parts).rev().take(if has_caches { parts + 1 } else { 1 }) {
            let below = parts - on_device;
            let in_host = match (has_host, memories.has_disk) {
                (true, true) => 0..=below,
                (true, false) => below..=below,
                (false, true) => 0..=0,
                (false, false) if below == 0 => 0..=0,
                (false, false) => break,
            };
            for in_host in in_host.rev() {
                let Some(fit) = self.fit(choice, &least, memories, [on_device, in_host, parts]) else {
                    continue;
                };
                let weights = fit.weight_bytes();
                fits.push(fit);
                if weights.below() == 0.0 {
                    return fits;
                }
                if weights.disk == 0.0 {
                    break;
                }
            }
        }
        fits
    }

    /// Returns how a choice fits with these parts of the caches in the tiers.
    fn fit(
        &mut self,
        choice: &Choice,
        least: &LeastMemory,
        memories: &Memories,
        level: CacheLevel,
    ) -> Option<MemoryFit> {
        let caches = self.cache_parts(choice, level, least)?;
        let of_caches = |part: &dyn Fn(&CacheParts) -> f64| -> f64 {
            least.devices.iter().zip(&caches).map(|(device, parts)| device.caches * part(parts)).sum()
        };
        let caches_in_host = of_caches(&|parts| parts.places.host);
        let host = least.host_room(memories) - caches_in_host;
        if host < 0.0 {
            return None;
        }
        let all = least.sum(|device| device.weights);
        let in_host = (host / all.max(1.0) * PARTS as f64).min(PARTS as f64) as usize;
        let own = |(device, parts): (&LeastDevice, &CacheParts)| {
            device.fixed + device.caches * (parts.places.device + parts.buffers)
        };
        let own: Vec<f64> = least.devices.iter().zip(&caches).map(own).collect();
        let (part, held) = self.most_weights(choice, least, memories, &own, in_host > 0)?;
        let below = if part == PARTS { 0.0 } else { all - part_of(all as usize, part) as f64 };
        // Matrices are not divided as finely.
        let exactly_below = all - held.iter().map(|held| held.resident).sum::<f64>();
        let (host_bytes, in_host_memory) = match in_host > 0 && exactly_below <= host {
            true => (below, exactly_below),
            false => [part_of(all as usize, in_host) as f64; 2].into(),
        };
        let disk = below - host_bytes.min(below);
        if disk > 0.5 && !memories.has_disk {
            return None;
        }
        let of_devices: f64 = own.iter().zip(&held).map(|(own, held)| own + held.used).sum();
        let (memory, host_memory) = match memories.device {
            Some(_) => (of_devices, least.host + caches_in_host + in_host_memory),
            None => (of_devices + least.host, 0.0),
        };
        let [device, in_host] = cache_limits(level, least.sum(|device| device.caches) as usize);
        Some(MemoryFit {
            weights: TierLimits {
                device: (part < PARTS).then(|| part_of(all as usize, part) as u64),
                host: (disk > 0.0).then_some(host_bytes as u64),
            },
            caches: TierLimits { device, host: in_host },
            memory,
            host_memory,
            stages: least.stages(&caches, below, disk),
        })
    }

    /// Returns the largest part of the matrices that fits on devices which take `own` bytes beside, and what
    /// each device then holds for matrices.
    fn most_weights(
        &mut self,
        choice: &Choice,
        least: &LeastMemory,
        memories: &Memories,
        own: &[f64],
        uses_host: bool,
    ) -> Option<(usize, Vec<HeldWeights>)> {
        let weights: Vec<f64> = least.devices.iter().map(|device| device.weights).collect();
        let sum = weights.iter().sum::<f64>() as usize;
        let fits = |held: &[HeldWeights]| {
            let used: Vec<f64> = own.iter().zip(held).map(|(own, held)| own + held.used).collect();
            least.in_memories(memories, &used).iter().all(|(used, limit)| used <= limit)
        };
        // The start counts devices with memory of their own without matrices first.
        if memories.device.is_some() && !fits(&self.weights(choice, sum, 0, uses_host)?) {
            return None;
        }
        let whole: Vec<_> =
            weights.iter().map(|bytes| HeldWeights { resident: *bytes, used: *bytes }).collect();
        if fits(&whole) {
            return Some((PARTS, whole));
        }
        let own = least.in_memories(memories, own);
        if own.iter().any(|(own, limit)| own > limit) {
            return None;
        }
        // Buffers may take more with more in memory, or less, so nothing but trying finds the most. With more
        // than what is free, only matrices that are smaller than blocks of the disk fit.
        let all = least.in_memories(memories, &weights);
        let part = |((own, limit), (all, _)): (&(f64, f64), &(f64, f64))| (limit - own) / all.max(1.0);
        let most = own.iter().zip(&all).map(part).fold(f64::INFINITY, f64::min) * PARTS as f64;
        let most = most.min(PARTS as f64 - 1.0) as usize;
        let mut found = (0..=most)
            .rev()
            .chain(most + 1..PARTS)
            .map_while(|part| Some((part, self.weights(choice, sum, part, uses_host)?)));
        found.find(|(_, held)| fits(held))
    }

    /// Returns the memory of a choice without matrices and caches of layers on devices; `None` if an engine
    /// with these sizes is impossible here.
    pub(super) fn least(&mut self, choice: &Choice) -> Option<LeastMemory> {
        let uses_host = self.config.device.memory.is_some();
        let counted = self.count(choice, Residency(0.0), uses_host, Some((Residency(0.0), 0.0)));
        let Counted { devices, host, positions } = self.noted(counted)?;
        let device = |report: ExecutorReport| {
            let (weights, caches) =
                (report.offload.clone().unwrap_or_default(), report.cache_offload.unwrap_or_default());
            let buffers = (weights.buffer_bytes + weights.pool_bytes) as f64;
            let taken = buffers + (weights.resident_bytes + caches.buffer_bytes) as f64;
            LeastDevice {
                fixed: report.total_bytes() as f64 - taken,
                buffers,
                weights: (weights.offloaded_bytes() + weights.resident_bytes) as f64,
                caches: (caches.file_bytes + caches.host_bytes) as f64,
                cache_buffers: caches.buffer_bytes as f64,
            }
        };
        Some(LeastMemory {
            devices: devices.into_iter().map(device).collect(),
            host: host as f64,
            positions: positions as f64,
        })
    }

    /// Returns what each device holds for matrices if `part` of [`PARTS`] parts of `all` bytes may stay;
    /// `None` if an engine with these sizes is impossible here.
    fn weights(
        &mut self,
        choice: &Choice,
        all: usize,
        part: usize,
        uses_host: bool,
    ) -> Option<Vec<HeldWeights>> {
        let key = (choice.variant, part, uses_host);
        if let Some(known) = self.weights.get(&key) {
            return Some(known.clone());
        }
        let resident = residency_of(part_of(all, part), all);
        // What does not fit with all caches on devices may fit without.
        let counted = self.count(choice, resident, uses_host, Some((Residency(0.0), 0.0)));
        let of_device = |report: &ExecutorReport| {
            let OffloadReport { resident_bytes, buffer_bytes, pool_bytes, .. } =
                report.offload.clone().unwrap_or_default();
            let used = (resident_bytes + buffer_bytes + pool_bytes) as f64;
            HeldWeights { resident: resident_bytes as f64, used }
        };
        let held: Vec<_> = self.noted(counted)?.devices.iter().map(of_device).collect();
        self.weights.insert(key, held.clone());
        Some(held)
    }

    /// Returns the parts of each device's caches by place.
    fn cache_parts(
        &mut self,
        choice: &Choice,
        level: CacheLevel,
        least: &LeastMemory,
    ) -> Option<Vec<CacheParts>> {
        let on_device = CacheParts { places: ByTier { device: 1.0, ..ByTier::default() }, buffers: 0.0 };
        let all = least.sum(|device| device.caches);
        if level[0] == level[2] || all == 0.0 {
            return Some(vec![on_device; least.devices.len()]);
        }
        let key = (choice.variant, choice.kv, level);
        if let Some(known) = self.caches.get(&key) {
            return Some(known.clone());
        }
        let [device, host] = cache_limits(level, all as usize);
        let of_all = |bytes: u64| bytes as f64 / all;
        let resident = device.map_or(1.0, of_all);
        let host = host.map_or(1.0, |bytes| host_fraction(of_all(bytes), false, resident));
        let host = if self.config.device.memory.is_some() { host } else { 0.0 };
        let counted = self.count(choice, Residency(0.0), false, Some((Residency(resident), host)));
        let of_device = |(report, device): (&ExecutorReport, &LeastDevice)| {
            let caches = report.cache_offload.unwrap_or_default();
            let part = |bytes: usize| bytes as f64 / device.caches.max(1.0);
            let (host, disk) = (part(caches.host_bytes), part(caches.file_bytes));
            CacheParts {
                places: ByTier { device: (1.0 - host - disk).max(0.0), host, disk },
                buffers: part(caches.buffer_bytes),
            }
        };
        let devices = self.noted(counted)?.devices;
        let parts: Vec<_> = devices.iter().zip(&least.devices).map(of_device).collect();
        self.caches.insert(key, parts.clone());
        Some(parts)
    }

    /// Keeps the reason for which a choice is impossible.
    fn noted<T>(&mut self, counted: Result<T>) -> Option<T> {
        counted.map_err(|reason| self.reason = Some(reason)).ok()
    }

    /// Counts the bytes of a choice by device, with a part of the matrices, and parts of the caches on
    /// devices and in host memory; `None` keeps all caches on devices.
    fn count(
        &mut self,
        choice: &Choice,
        resident: Residency,
        uses_host: bool,
        caches: Option<(Residency, f64)>,
    ) -> Result<Counted> {
        let mut config = candidate(self.config, choice, self.variants, self.rules, &self.cache);
        // What does not fit is counted, too.
        config.device.memory = config.device.memory.map(|_| u64::MAX);
        let (folder, overlaps) = (stores_folder(&config.tiers)?, config.tiers.overlap);
        self.source.weight_rules = config.model.weights.clone();
        let tiers = TierRules { uses_host, ..TierRules::default() };
        let place = StorePlace(folder.clone());
        self.source.offload = Some(Offload { resident, tiers, place, overlaps, max_slab: Offload::MAX_SLAB });
        let caches = caches.filter(|_| self.source.spec.decoder.is_some());
        self.source.cache_offload = caches.map(|(resident, host)| CacheOffload {
            resident,
            host,
            folder,
            overlaps,
            attends_on_host: false,
        });
        let setup = engine_setup(&config, self.source)?;
        let devices: Vec<_> = forecast(&config.device, self.source, &setup)?.into_iter().flatten().collect();
        // What is reserved apart from sequences does not depend on the choice.
        let (reserved, beside) = reserved_beside(&config, &setup);
        let of_devices: usize = devices.iter().map(ExecutorReport::total_bytes).sum();
        let in_host: usize = devices.iter().flat_map(ExecutorReport::host_bytes).sum();
        let engine = EngineMemory::from_reports(devices.clone(), &setup).total();
        let host = (engine - of_devices - in_host).saturating_add(beside - reserved);
        Ok(Counted { devices, host, positions: setup.kv.pages * config.kv.page_size })
    }
}

/// Returns the most bytes of the caches on devices, and in host memory, of `all` bytes at a level; `None` is
/// all that is left.
fn cache_limits([on_device, in_host, parts]: CacheLevel, all: usize) -> [Option<u64>; 2] {
    let bytes = |number: usize| (all as u128 * number as u128 / parts as u128) as u64;
    let is_all = on_device + in_host == parts;
    [(on_device < parts).then(|| bytes(on_device)), (!is_all).then(|| bytes(in_host))]
}

#[cfg(test)]
mod tests {
    use super::super::placement::variant;
    use super::super::planned_tiers::TierSettings;
    use super::super::tiers::place_tiers;
    use super::*;
    use crate::actors::engine::available_memory;
    use crate::config::Overrides;
    use crate::model::ModelRef;
    use crate::planner::placement::Workload;
    use mainstem_kernels::random::philox;
    use std::path::Path;

    fn config(settings: &[(&'static str, &str)]) -> Config {
        let mut flags = Overrides::default();
        for (key, value) in settings {
            match value.parse::<u32>() {
                Ok(number) => flags.set(key, Some(number)),
                Err(_) => flags.set(key, Some(*value)),
            }
        }
        flags.set("tiers.disk_path", Some("/nowhere"));
        Config::load(None, flags).unwrap()
    }

    fn fixture(name: &str) -> ModelSource {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
        ModelSource::open(&ModelRef::Path(folder.join(name)), None).unwrap()
    }

    fn synthetic(shape: &str) -> ModelSource {
        ModelSource::open(&ModelRef::parse(&format!("synthetic:{shape}")).unwrap(), None).unwrap()
    }

    const CACHE: CacheSizes = CacheSizes { page: 32, mean: 2, longest: 3, limit: 96 };

    /// Returns the bytes that the start of a policy counts: of each device, and of all memory.
    fn started(
        config: &Config,
        source: &mut ModelSource,
        (choice, fit): (&Choice, &MemoryFit),
        cache: &CacheSizes,
    ) -> (Vec<f64>, f64) {
        let variants = [variant(config, source, None).unwrap()];
        let mut config = candidate(config, choice, &variants, &WeightRules::default(), cache);
        TierSettings::new(&fit.weights, &fit.caches, config.device.memory.is_some()).apply(&mut config);
        (source.offload, source.cache_offload) = (None, None);
        place_tiers(&config, source).unwrap();
        let setup = engine_setup(&config, source).unwrap();
        let devices: Vec<_> =
            forecast(&config.device, source, &setup).unwrap().into_iter().flatten().collect();
        let of_devices = devices.iter().map(|device| device.total_bytes() as f64).collect();
        (of_devices, EngineMemory::from_reports(devices, &setup).total() as f64)
    }

    /// A number from 0 to 1.
    fn random(number: u32) -> f64 {
        f64::from(philox([number, 0, 0, 0], [9, 0])[0]) / 2f64.powi(32)
    }

    /// Regression: buffers were counted with nothing in memory only, so a policy took more than was counted,
    /// and was dropped without another in its place.
    #[test]
    fn whatever_fits_is_found_and_takes_at_the_start_what_was_counted() {
        let config = config(&[("device.threads", "1")]);
        let mut number = 0;
        let models: [(&dyn Fn() -> ModelSource, usize); 3] = [
            (&|| synthetic("1.1B"), 16),
            (&|| fixture("gqa"), PARTS),
            (&|| fixture("families/mixtral"), PARTS),
        ];
        for (open, pieces) in models {
            let (mut source, mut copy, rules) = (open(), open(), WeightRules::default());
            let variants = [variant(&config, &source, None).unwrap()];
            let mut counter = MemoryCounter::new(&config, &mut source, &variants, &rules, CACHE);
            let choice = Choice { variant: 0, kv: QuantType::F16, slots: 3, token_budget: 256 };
            let least = counter.least(&choice).unwrap();
            let layers = least.sum(|device| device.weights);
            let fixed = least.with_layers(0.0);
            let used = |counter: &mut MemoryCounter, piece: usize| {
                let part = piece * PARTS / pieces;
                fixed + counter.weights(&choice, layers as usize, part, false).unwrap()[0].used
            };
            let all: Vec<f64> = (0..pieces).map(|piece| used(&mut counter, piece)).collect();
            for _ in 0..12 {
                number += 1;
                let share = random(number);
                let memory = fixed + share * 1.1 * layers;
                let memories = Memories { usable: memory, device: None, has_disk: true };
                let fits = counter.fits(&choice, &memories);
                let least = all.iter().copied().fold(fixed + layers, f64::min);
                let fit = fits.first().filter(|fit| fit.caches.device.is_none());
                assert_eq!(fit.is_some(), least <= memory, "{share}: {least}, {memory}");
                for fit in fits.iter().step_by(3) {
                    let (_, total) = started(&config, &mut copy, (&choice, fit), &CACHE);
                    assert_eq!(total, fit.memory, "{share}: {fit:?}");
                    assert!(fit.memory <= memory, "{share}: {fit:?}, {memory}");
                }
                let Some(fit) = fit else { continue };
                let unused = (memory - fit.memory) / layers;
                // Layers of the fixture have few matrices.
                let is_close = fit.is_resident() || unused < 0.1 || pieces == PARTS;
                assert!(is_close, "{share}: {fit:?}, {memory}");
            }
        }
    }

    /// Regression: weights were counted beside all caches, so what fits with caches on disk only seemed to be
    /// impossible, after it had been counted again and again.
    #[test]
    fn weights_are_counted_where_caches_are_too_large_for_the_memory() {
        let (config, rules) = (config(&[("device.threads", "1")]), WeightRules::default());
        let mut source = synthetic("1.1B");
        let variants = [variant(&config, &source, None).unwrap()];
        // Sequences as long as the context.
        let mean = source.spec.context / 32;
        let cache = CacheSizes { page: 32, mean, longest: mean, limit: 32 * mean };
        let mut fits = |slots: usize| {
            let choice = Choice { variant: 0, kv: QuantType::F16, slots, token_budget: 2 * slots };
            let mut counter = MemoryCounter::new(&config, &mut source, &variants, &rules, cache);
            let least = counter.least(&choice).unwrap();
            let usable = least.total() + 0.25 * least.with_layers(1.0);
            let memories = Memories { usable, device: None, has_disk: true };
            (least.sum(|device| device.caches), counter.fits(&choice, &memories).len())
        };
        let wanted = 2.0 * available_memory() as f64;
        let (of_eight, _) = fits(8);
        let (caches, ways) = fits((8.0 * wanted / of_eight) as usize);
        assert!(caches > 0.75 * wanted && ways > 0, "{caches}: {ways}");
    }

    /// Each way in which a choice fits keeps to the memory of each device, and to that of the host; its
    /// caches and weights are where they were counted when it starts.
    #[test]
    fn devices_with_memory_of_their_own_take_what_was_counted() {
        let mut ways = 0;
        for (number, (open, groups)) in [
            (&(|| synthetic("110M")) as &dyn Fn() -> ModelSource, "cpu:0"),
            (&|| synthetic("110M"), "0;1"),
            (&|| fixture("families/mixtral"), "cpu:0"),
            (&|| fixture("families/mixtral"), "0;1"),
        ]
        .into_iter()
        .enumerate()
        {
            let bare = config(&[("device.threads", "1"), ("device.groups", groups)]);
            let (mut source, mut copy, rules) = (open(), open(), WeightRules::default());
            let variants = [variant(&bare, &source, None).unwrap()];
            let workload = Workload { requests: 9, prompt: 40, output: 9 };
            let cache = CacheSizes::new(&bare, &source, &workload, None);
            let choice = Choice { variant: 0, kv: QuantType::Q8_0, slots: 8, token_budget: 128 };
            for step in 0..5 {
                let mut config = bare.clone();
                config.device.memory = Some(u64::MAX);
                let mut counter = MemoryCounter::new(&config, &mut source, &variants, &rules, cache);
                let least = counter.least(&choice).unwrap();
                let share = |at: u32| random(100 * number as u32 + 10 * step + at);
                let largest =
                    |part: fn(&LeastDevice) -> f64| least.devices.iter().map(part).fold(0.0, f64::max);
                let own = least.of_device() + share(0) * largest(|device| device.weights + device.caches);
                let own = own.ceil();
                let room = share(1) * least.sum(|device| device.weights + device.caches);
                let memories = Memories {
                    usable: least.devices.len() as f64 * own + least.host + room,
                    device: Some(own),
                    has_disk: true,
                };
                let fits = counter.fits(&choice, &memories);
                assert!(!fits.is_empty(), "{memories:?}");
                config.device.memory = Some(own as u64);
                for fit in fits.iter().step_by(fits.len() / 6 + 1) {
                    let (devices, total) = started(&config, &mut copy, (&choice, fit), &cache);
                    let sum: f64 = devices.iter().sum();
                    assert!((sum - fit.memory).abs() < 1.0, "{groups}: {sum}, {fit:?}");
                    assert!(
                        devices.iter().all(|bytes| *bytes <= own),
                        "{groups}: {devices:?}, {own}, {fit:?}"
                    );
                    // Of the host, whole matrices take less than what was counted.
                    assert!(total - sum <= fit.host_memory + 1.0, "{groups}: {}, {fit:?}", total - sum);
                    assert!(total <= memories.usable, "{groups}: {total}, {fit:?}");
                    ways += 1;
                }
            }
        }
        assert!(ways > 40, "{ways}");
    }
}
