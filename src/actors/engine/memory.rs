//! Sizes the KV cache: the number of pages, by the free memory of the devices.
//!
//! Devices of one machine share its memory, so their needs are summed up.
//! Layers that see a window of a sequence have pages of their own, unless a sequence would need as many as in
//! other layers: a running sequence holds no more of them than a step sees. Where memory is short, it is
//! divided so that long sequences gain more than short ones lose; see [`SlotDemand::own_bytes`].
//! Invariant: a sequence's pages have the same numbers on every device.

use crate::actors::group::link::Capacity;
use crate::actors::group::stage_buffer_bytes;
use crate::actors::queue::PREEMPTED_FACTOR;
use crate::actors::step::Step;
use crate::config::{Config, DeviceKind, DeviceName, HostTier, KvSize};
use crate::model::executor::{
    ExecutorReport, KvCacheConfig, PageBytes, shard_host_page_bytes, shard_page_bytes,
};
use crate::model::spec::ModelSpec;
use crate::model::{ModelSource, Partition, Shard};
use anyhow::{Context, Result, anyhow, ensure};
use mainstem_kernels::{ActivationType, StepLimits};

/// Predicts the allocations of a configured device with a part of the model.
pub type DeviceEstimate<'a> =
    dyn Fn(&DeviceName, &Shard, KvCacheConfig, StepLimits) -> Result<ExecutorReport> + 'a;

/// Properties of the configured devices. Only the program knows the kinds of devices.
#[derive(Clone, Copy)]
pub struct DeviceProperties<'a> {
    /// Type of the activations of all devices.
    pub activation_type: ActivationType,
    pub estimate: &'a DeviceEstimate<'a>,
    /// Returns the bytes that a device can allocate, if it has memory that is no part of the machine's.
    pub own_memory: &'a dyn Fn(DeviceName) -> Result<Option<usize>>,
}

/// The size of the KV cache.
pub(super) struct KvPlan {
    pub(super) cache: KvCacheConfig,
    /// Bytes of one page on all devices together, and in the memory of the host if it stays there.
    pub(super) page: PageBytes,
}

/// Returns the largest window of the layers that get pages of their own, because a sequence needs fewer of
/// these; `None` without such layers.
pub(super) fn windowed_layers(spec: &ModelSpec, limits: &StepLimits) -> Option<usize> {
    // Encoder positions are in the pages of all layers.
    let layers = spec.cached_layers().iter().filter(|_| spec.encoder.is_none());
    let windows = layers.filter_map(|layer| layer.attention.mask.causal_window());
    windows.filter(|window| limits.pages_of_window(*window) < limits.table_len()).max()
}

/// Returns the size of the KV cache, given the memory that `lanes` lanes need otherwise. An encoder-only
/// model caches nothing: it has only the null page.
pub(super) fn kv_plan(
    config: &Config,
    limits: &StepLimits,
    lanes: usize,
    source: &ModelSource,
    (partition, devices): (&Partition, DeviceProperties),
) -> Result<KvPlan> {
    let kv = &config.kv;
    if source.spec.decoder.is_none() {
        let cache = KvCacheConfig { ty: kv.ty, pages: 1, window_pages: 0 };
        return Ok(KvPlan { cache, page: PageBytes::default() });
    }
    let (pools, page) = memory_pools(config, limits, lanes, source, (partition, devices))?;
    let demand = SlotDemand::new(limits);
    let page_bytes = page.of(1, 1).max(1);
    let minimum = 1 + min_encoder_pages(limits);
    let pages = match kv.size {
        KvSize::Tokens(tokens) => demand.of_each(tokens.div_ceil(kv.page_size), page),
        KvSize::Bytes(bytes) => demand.divide(usize::try_from(bytes).unwrap_or(usize::MAX), page),
        KvSize::Auto => {
            let all = demand.of_each(usize::MAX, page);
            // A server has what it takes beside its pages. Both kinds have a null page.
            let others = config.tiers.reserved.map(|reserved| {
                let steps = queued_step_bytes(limits, lanes, partition.device_names().concat().len());
                let beside = [steps, running_bytes(limits, 2), page.of(1, 1)];
                (beside.into_iter().fold(reserved, usize::saturating_add), page_record_bytes(limits))
            });
            let spare = |pool: &MemoryPool| pool.spare_pages(&demand, others);
            let spare = pools.iter().map(spare).fold(all, PageCounts::min);
            PageCounts { own: spare.own.max(minimum), window: spare.window.max(all.window.min(1)) }
        }
    };
    for pool in &pools {
        let checked = pool.check(pages, kv.size);
        checked.map_err(|error| anyhow!("{error}{}", offload_advice(config, pool.owner)))?;
    }
    ensure!(pages.own > 0, "kv.size is less than one page of {page_bytes} bytes");
    ensure!(
        pages.own >= minimum,
        "kv.size is one page of {page_bytes} bytes, but a sequence needs at least {minimum}: for its own and \
         its encoder positions"
    );
    ensure!(
        pages.own < u32::MAX as usize,
        "kv.size is {} pages, more than page numbers can represent",
        pages.own
    );
    let cache = KvCacheConfig { ty: kv.ty, pages: pages.own + 1, window_pages: pages.window + 1 };
    Ok(KvPlan { cache, page })
}

/// Returns how a model that does not fit into a device's own memory, or into the machine's, may do so, to end
/// an error with; empty if there is no way.
fn offload_advice(config: &Config, owner: MemoryOwner) -> &'static str {
    match (owner, &config.tiers.device) {
        (MemoryOwner::Machine, _) => {}
        (MemoryOwner::Device, HostTier::All | HostTier::Bytes(1..)) => return LESS_ON_DEVICES,
        (MemoryOwner::Device, HostTier::Fraction(fraction)) if *fraction > 0.0 => return LESS_ON_DEVICES,
        (MemoryOwner::Device | MemoryOwner::Gpu, _) => return "",
    }
    let has_copies = config.device.memory.is_some();
    match config.tiers.host {
        HostTier::All if has_copies => {
            "; the weights that are not on the devices are there (tiers.host = \"all\"): with \"auto\" or a \
             size, some are read from disk instead"
        }
        HostTier::All => "; with tiers.host, weights of layers can be read from disk instead",
        HostTier::Bytes(1..) => "; a smaller tiers.host needs less memory",
        HostTier::Fraction(fraction) if fraction > 0.0 => "; a smaller tiers.host needs less memory",
        HostTier::Auto | HostTier::Bytes(0) | HostTier::Fraction(_) => "",
    }
}

/// Numbers of pages of both kinds of layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PageCounts {
    /// Pages of layers that see whole sequences.
    own: usize,
    /// Pages of windowed layers.
    window: usize,
}

impl PageCounts {
    /// Returns the smaller number of each kind.
    fn min(self, other: PageCounts) -> PageCounts {
        PageCounts { own: self.own.min(other.own), window: self.window.min(other.window) }
    }
}

/// The numbers of pages that the slots can use.
struct SlotDemand {
    /// Pages of a sequence of full length, in layers that see all of it.
    sequence: usize,
    /// Pages of a sequence in windowed layers; 0 without such layers.
    in_window: usize,
    /// Pages of all slots, in layers that see whole sequences.
    whole: usize,
    /// Pages of all slots, in windowed layers.
    in_windows: usize,
    /// Pages of a sequence that is alone, in windowed layers: if it begins with shared pages, it holds these
    /// beside its own.
    alone: usize,
}

impl SlotDemand {
    fn new(limits: &StepLimits) -> SlotDemand {
        let in_window = limits.window.map_or(0, |window| limits.pages_of_window(window));
        let sequence = limits.table_len() + limits.cross_table_len();
        let whole = limits.slots * sequence;
        SlotDemand {
            sequence,
            in_window,
            whole,
            in_windows: (limits.slots.max(2) * in_window).min(whole),
            alone: (2 * in_window).min(whole),
        }
    }

    /// Returns `pages` pages of each kind, but no more than the slots can use. If all layers are windowed,
    /// the other pages take no memory, and need not be short.
    fn of_each(&self, pages: usize, page: PageBytes) -> PageCounts {
        let window = pages.min(self.in_windows);
        let is_free = page.own == 0 && window >= self.alone;
        PageCounts { own: if is_free { self.whole } else { pages.min(self.whole) }, window }
    }

    /// Returns how many pages of both kinds fit into `bytes`, but no more than the slots can use.
    fn divide(&self, bytes: usize, page: PageBytes) -> PageCounts {
        let fitting = |bytes: usize, each: usize| bytes.checked_div(each).unwrap_or(usize::MAX);
        let of_each = fitting(bytes, page.of(1, 1));
        let own = fitting(self.own_bytes(bytes, page), page.own).min(self.whole);
        // A page of positions in windowed layers is of no use without one in the others.
        let most = if own < self.whole { of_each } else { usize::MAX };
        let window = fitting(bytes - page.of(own, 0), page.window).min(most);
        let window = window.max(of_each.min(self.alone)).min(self.in_windows);
        // With fewer pages than one sequence may need in windowed layers, none is longer than these.
        let own = if window < self.alone { window } else { fitting(bytes - page.of(0, window), page.own) };
        PageCounts { own: own.min(self.whole), window }
    }

    /// Returns how many of `bytes` bytes are for layers that see whole sequences, unless these need less or
    /// windowed layers leave more: the fraction that sequences of full length need, but no more than a third.
    /// Shorter sequences need more pages of windowed layers, in proportion.
    fn own_bytes(&self, bytes: usize, page: PageBytes) -> usize {
        let (own, window) = (page.of(self.sequence, 0) as f64, page.of(0, self.in_window) as f64);
        let fraction = if own + window > 0.0 { own / (own + window) } else { 0.0 };
        ((bytes as f64 * fraction) as usize).min(bytes / 3)
    }
}

/// Returns the minimum number of pages for a sequence's encoder positions.
pub(super) fn min_encoder_pages(limits: &StepLimits) -> usize {
    limits.cross_table_len().min(1)
}

/// Advice for devices with a memory that is a part of the machine's.
const LESS_ON_DEVICES: &str = "; a smaller tiers.device needs less memory on the devices";

/// The owner of a memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MemoryOwner {
    Machine,
    /// A device with a part of the machine's memory (`device.memory`), of which nothing is left to others.
    Device,
    /// A GPU with memory of its own.
    Gpu,
}

/// A memory, and what the devices in it need.
struct MemoryPool {
    devices: Vec<String>,
    /// Available bytes; `usize::MAX` if the devices need no memory.
    free: usize,
    /// Bytes of one page on all of the devices.
    page: PageBytes,
    /// Bytes of weights, activations, and buffers for communication.
    reserved: usize,
    owner: MemoryOwner,
}

/// Returns the bytes of each stage's communication buffers: for collectives among its ranks, and for the
/// hand-off to the next stage.
pub(super) fn stage_exchange_bytes(
    limits: &StepLimits,
    lanes: usize,
    row_bytes: usize,
    partition: &Partition,
) -> impl Iterator<Item = usize> {
    let room = Capacity { limits: *limits, row_bytes, max_steps: lanes };
    let last = partition.stages.len() - 1;
    let stages = partition.stages.iter().enumerate();
    stages.map(move |(at, stage)| stage_buffer_bytes(stage.ranks.len(), (at < last).then_some(room)))
}

/// Returns the memories in use: the machine's, for all devices that compute on the CPU, an unlimited one for
/// fake devices, those that devices have of their own, which are parts of the machine's, and those of GPUs.
/// Also returns the bytes of one page on all devices. Fails if a page's size overflows.
fn memory_pools(
    config: &Config,
    limits: &StepLimits,
    lanes: usize,
    source: &ModelSource,
    (partition, properties): (&Partition, DeviceProperties),
) -> Result<(Vec<MemoryPool>, PageBytes)> {
    let (mut machine, mut nowhere) = (MemoryPool::new(available_memory()), MemoryPool::new(usize::MAX));
    let (mut own, mut page_sum) = (Vec::new(), PageBytes::default());
    let own_bytes = config.device.memory.map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX));
    let row_bytes = source.spec.hidden * properties.activation_type.size();
    let between = stage_exchange_bytes(limits, lanes, row_bytes, partition);
    for ((devices, shards), between) in config.device.groups.iter().zip(partition.shards()).zip(between) {
        // The communication buffers are in the machine's memory, whatever the devices are.
        machine.reserved = machine.reserved.saturating_add(between);
        for (device, shard) in devices.iter().zip(shards) {
            let page = shard_page_bytes(source, &shard, config.kv.ty, limits)?;
            let in_host = shard_host_page_bytes(source, &shard, config.kv.ty, limits)?;
            let (page, in_host) = page.zip(in_host).with_context(|| {
                format!("kv.page_size: a page of {} tokens is too large", config.kv.page_size)
            })?;
            let with_host = page.checked_add(PageBytes { own: in_host, window: 0 }).unwrap_or(PageBytes::MAX);
            // Caches that stay in host memory have no buffers, which could be counted instead.
            let stays = source.cache_offload.as_ref().is_some_and(|offload| offload.attends_on_host);
            let counted = if stays { with_host } else { page };
            page_sum = page_sum.checked_add(counted).unwrap_or(PageBytes::MAX);
            let kv = KvCacheConfig { ty: config.kv.ty, pages: 1, window_pages: 0 };
            let needed = (properties.estimate)(device, &shard, kv, *limits)?;
            let on_device = needed.total_bytes() - needed.kv_bytes;
            let gpu = (properties.own_memory)(*device)?.map(|bytes| (bytes, MemoryOwner::Gpu));
            if let Some((bytes, owner)) = own_bytes.map(|bytes| (bytes, MemoryOwner::Device)).or(gpu) {
                let mut device_pool = MemoryPool { owner, ..MemoryPool::new(bytes) };
                // Nothing else is left for the null pages.
                let on_device = on_device.saturating_add(needed.driver_bytes);
                device_pool.add_device(device, page, on_device.saturating_add(page.of(1, 1)));
                own.push(device_pool);
            }
            let pool = match device.kind {
                DeviceKind::Cpu | DeviceKind::Reference => &mut machine,
                DeviceKind::Fake { .. } => &mut nowhere,
                DeviceKind::Cuda => continue,
            };
            let [weights_in_host, _] = needed.host_bytes();
            pool.add_device(device, with_host, on_device.saturating_add(weights_in_host));
        }
    }
    let shared = [machine, nowhere].into_iter().filter(|pool| !pool.devices.is_empty());
    Ok((own.into_iter().chain(shared).collect(), page_sum))
}

impl MemoryPool {
    /// Creates a memory of `free` bytes that several devices may share.
    fn new(free: usize) -> MemoryPool {
        let (page, owner) = (PageBytes::default(), MemoryOwner::Machine);
        MemoryPool { devices: Vec::new(), free, page, reserved: 0, owner }
    }

    /// Adds a device with `page` bytes per page and `reserved` other bytes.
    fn add_device(&mut self, device: &DeviceName, page: PageBytes, reserved: usize) {
        self.devices.push(device.to_string());
        self.page = self.page.checked_add(page).unwrap_or(PageBytes::MAX);
        self.reserved = self.reserved.saturating_add(reserved);
    }

    /// Returns the bytes that are left beside weights and buffers.
    fn remaining(&self) -> usize {
        self.free.saturating_sub(self.reserved)
    }

    /// Returns the numbers of pages in half of the remaining memory; the other half is left to other
    /// processes and to the file cache, which a device's own memory is not for. Of that of a GPU, a tenth is
    /// left to kernels and to the driver. `others` is the most memory that others take beside the pages, and
    /// the bytes of a page's record.
    fn spare_pages(&self, demand: &SlotDemand, others: Option<(usize, usize)>) -> PageCounts {
        let remaining = self.remaining();
        let mut spare = match self.owner {
            MemoryOwner::Machine => remaining / 2,
            MemoryOwner::Device => remaining,
            MemoryOwner::Gpu => remaining - remaining / 10,
        };
        if let Some((beside, record)) = others.filter(|_| self.owner == MemoryOwner::Machine) {
            let sizes = [self.page.own, self.page.window].into_iter().filter(|bytes| *bytes > 0);
            let page = sizes.min().unwrap_or(usize::MAX) as f64;
            let rest = self.remaining().saturating_sub(beside) as f64;
            // Others rarely take so much, and without a sequence of full length, most requests are refused.
            let one = self.page.of(demand.sequence, demand.alone);
            spare = spare.min(one.max((rest * page / (page + record as f64)) as usize));
        }
        demand.divide(spare, self.page)
    }

    /// Checks that so many pages of both kinds of layers fit into the memory.
    fn check(&self, pages: PageCounts, size: KvSize) -> Result<()> {
        let (wanted, taken, devices) =
            (self.page.of(pages.own, pages.window), self.reserved, self.devices.join(", "));
        ensure!(
            self.owner != MemoryOwner::Device || wanted <= self.remaining(),
            "device.memory must be at least {} bytes: the model needs {taken} bytes on {devices} for weights \
             and steps (scheduler.token_budget, scheduler.slots), and {wanted} for the KV cache",
            taken.saturating_add(wanted)
        );
        match size {
            KvSize::Auto => ensure!(
                wanted <= self.remaining(),
                "the model needs {taken} bytes on {devices} for weights and steps (scheduler.token_budget, \
                 scheduler.slots), and at least {wanted} for the KV cache, but only {} are available there",
                self.free
            ),
            KvSize::Tokens(_) | KvSize::Bytes(_) => ensure!(
                wanted <= self.remaining(),
                "kv.size needs {wanted} bytes on {devices}, but only {} are available there beside {taken} \
                 for weights and steps",
                self.remaining()
            ),
        }
        Ok(())
    }
}

/// Returns the bytes of the steps that are on their way: each device has an output, and each lane a step on
/// its way and one that is prepared.
pub fn queued_step_bytes(limits: &StepLimits, lanes: usize, devices: usize) -> usize {
    (2 * lanes + 1 + devices).saturating_mul(Step::bytes(limits))
}

/// Returns the bytes of a page's record, of its entry in the prefix index, and of the tokens in it.
fn page_record_bytes(limits: &StepLimits) -> usize {
    512 + 2 * size_of::<u32>() * limits.page_positions
}

/// Returns the bytes that a sequence of so many tokens takes beside the devices: its request, channel, places
/// in the queues and tokens.
pub fn sequence_bytes(tokens: usize) -> usize {
    // Prompt and output; the prompt again as its pages are found, with hashes.
    (16 << 10) + 4 * size_of::<u32>() * tokens
}

/// Returns the bytes that running sequences take beside the devices: their tokens, what the host needs to
/// choose the next ones, and the records of `pages` pages and of the tokens in them.
pub fn running_bytes(limits: &StepLimits, pages: usize) -> usize {
    // Logits, candidates and counts of running sequences, and counts of preempted ones.
    let host = limits.slots.saturating_mul(limits.vocab).saturating_mul(16 + 4 * PREEMPTED_FACTOR);
    let pages = pages.saturating_mul(page_record_bytes(limits));
    let sequence = sequence_bytes(limits.positions + limits.encoder_positions);
    limits.slots.saturating_mul(sequence).saturating_add(host).saturating_add(pages)
}

/// Returns the bytes that the system and this process's control group can still provide; `usize::MAX` if
/// neither sets a limit.
pub fn available_memory() -> usize {
    available_from(|path| std::fs::read_to_string(path).ok())
}

/// Returns the available memory according to the system files that `read` reads.
fn available_from(read: impl Fn(&str) -> Option<String>) -> usize {
    let system = || {
        let rest = sum_of_keys(&read("/proc/meminfo")?, &["MemAvailable:"])?;
        Some(rest.saturating_mul(1024))
    };
    let groups = CONTROL_GROUPS.iter().filter_map(|version| version.remaining(&read));
    groups.chain(system()).min().unwrap_or(usize::MAX)
}

/// A version of control groups, by its files.
struct ControlGroups {
    /// Folder of the outermost group that is visible.
    root: &'static str,
    /// Name of the controller in `/proc/self/cgroup`; that of version 2 is empty.
    controller: &'static str,
    limit: &'static str,
    used: &'static str,
    stat: &'static str,
    /// Keys of file cache pages in `stat`: counted as used, but reclaimed when memory is short. The model's
    /// files are among them.
    cache_keys: [&'static str; 2],
}

/// Control groups version 2, then version 1.
const CONTROL_GROUPS: [ControlGroups; 2] = [
    ControlGroups {
        root: "/sys/fs/cgroup",
        controller: "",
        limit: "memory.max",
        used: "memory.current",
        stat: "memory.stat",
        cache_keys: ["active_file", "inactive_file"],
    },
    ControlGroups {
        root: "/sys/fs/cgroup/memory",
        controller: "memory",
        limit: "memory.limit_in_bytes",
        used: "memory.usage_in_bytes",
        stat: "memory.stat",
        cache_keys: ["total_active_file", "total_inactive_file"],
    },
];

impl ControlGroups {
    /// Returns the bytes that this process's group and the groups around it can still provide; `None` without
    /// a limit. A container often sees its own group as the outermost one, at the root.
    fn remaining(&self, read: impl Fn(&str) -> Option<String>) -> Option<usize> {
        let own = read("/proc/self/cgroup").and_then(|list| self.path(&list)).unwrap_or_default();
        let inner = own.trim_matches('/').split('/').filter(|name| !name.is_empty());
        let folders = inner.scan(self.root.to_owned(), |folder, name| {
            *folder = format!("{folder}/{name}");
            Some(folder.clone())
        });
        let folders = std::iter::once(self.root.to_owned()).chain(folders);
        folders.filter_map(|folder| self.remaining_in(&folder, &read)).min()
    }

    /// Returns the path of this process's group in the content of `/proc/self/cgroup`; `None` if it is
    /// outside of what is visible.
    fn path(&self, list: &str) -> Option<String> {
        let entries = list.lines().filter_map(|line| line.split_once(':')?.1.split_once(':'));
        let own = |(controllers, _): &(&str, &str)| controllers.split(',').any(|it| it == self.controller);
        let (_, path) = entries.into_iter().find(own)?;
        (!path.split('/').any(|name| name == "..")).then(|| path.to_owned())
    }

    /// Returns the bytes that the group of a folder can still provide; `None` without a limit.
    fn remaining_in(&self, folder: &str, read: &impl Fn(&str) -> Option<String>) -> Option<usize> {
        let file = |name: &str| read(&format!("{folder}/{name}"));
        let number = |name: &str| file(name)?.trim().parse::<usize>().ok();
        let (limit, used) = (number(self.limit)?, number(self.used)?);
        let cached = file(self.stat).and_then(|text| sum_of_keys(&text, &self.cache_keys)).unwrap_or(0);
        Some(limit.saturating_sub(used.saturating_sub(cached)))
    }
}

/// Returns the sum of the values of `keys`, each at the beginning of a line; `None` if one is missing.
fn sum_of_keys(text: &str, keys: &[&str]) -> Option<usize> {
    let number = |key: &&str| {
        let mut lines = text.lines().map(str::split_ascii_whitespace);
        let mut line = lines.find_map(|mut words| (words.next() == Some(key)).then_some(words))?;
        line.next()?.parse::<usize>().ok()
    };
    keys.iter().map(number).try_fold(0, |sum: usize, number| Some(sum.saturating_add(number?)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Overrides;

    fn demand(slots: usize, sequence: usize, in_window: usize) -> SlotDemand {
        let whole = slots * sequence;
        let (in_windows, alone) = ((slots.max(2) * in_window).min(whole), (2 * in_window).min(whole));
        SlotDemand { sequence, in_window, whole, in_windows, alone }
    }

    #[test]
    fn an_error_for_a_memory_names_the_setting_for_that_memory() {
        let advice = |settings: &[(&'static str, &str)], is_own| {
            let mut flags = Overrides::default();
            settings.iter().for_each(|(key, value)| flags.set(key, Some(*value)));
            let owner = if is_own { MemoryOwner::Device } else { MemoryOwner::Machine };
            offload_advice(&Config::load(None, flags).unwrap(), owner)
        };
        let own = ("device.memory", "1GiB");
        for (settings, is_own, expected) in [
            (&[][..], false, "; with tiers.host, "),
            (&[own], false, "there (tiers.host = \"all\")"),
            (&[own, ("tiers.host", "2GiB")], false, "a smaller tiers.host"),
            (&[own, ("tiers.device", "20%")], true, "a smaller tiers.device"),
            (&[own, ("tiers.device", "20%")], false, "tiers.host"),
        ] {
            let found = advice(settings, is_own);
            assert!(found.contains(expected), "{settings:?}, {is_own}: {found}");
        }
        assert_eq!(advice(&[own], true), "");
        assert_eq!(advice(&[("tiers.host", "auto")], false), "");
    }

    fn counts(own: usize, window: usize) -> PageCounts {
        PageCounts { own, window }
    }

    #[test]
    fn devices_share_a_memory_and_are_named_in_errors() {
        let devices = ["cpu:0", "cpu:1"].map(str::to_owned).to_vec();
        let page = PageBytes { own: 8, window: 0 };
        let pool = MemoryPool { devices, page, reserved: 20, ..MemoryPool::new(100) };
        // Half of the 80 remaining bytes.
        assert_eq!(pool.spare_pages(&demand(9, 11, 0), None), counts(5, 0));
        assert!(pool.check(counts(10, 0), KvSize::Tokens(320)).is_ok());
        let error = pool.check(counts(11, 0), KvSize::Bytes(88)).unwrap_err().to_string();
        assert_eq!(
            error,
            "kv.size needs 88 bytes on cpu:0, cpu:1, but only 80 are available there beside 20 for weights \
             and steps"
        );
        assert!(pool.check(counts(10, 0), KvSize::Auto).is_ok());
        let error = pool.check(counts(11, 0), KvSize::Auto).unwrap_err().to_string();
        assert_eq!(
            error,
            "the model needs 20 bytes on cpu:0, cpu:1 for weights and steps (scheduler.token_budget, \
             scheduler.slots), and at least 88 for the KV cache, but only 100 are available there"
        );
        let gpu = MemoryPool { owner: MemoryOwner::Gpu, devices: vec!["cuda:0".to_owned()], ..pool };
        // Nine tenths of the 80 remaining bytes.
        assert_eq!(gpu.spare_pages(&demand(9, 11, 0), Some((79, 1))), counts(9, 0));
        let pool = MemoryPool { owner: MemoryOwner::Machine, ..gpu };
        assert_eq!(MemoryPool { reserved: 200, ..pool }.spare_pages(&demand(9, 11, 0), None), counts(0, 0));
        let nothing = MemoryPool::new(usize::MAX);
        let all = counts(99, 18);
        assert_eq!(
            nothing.spare_pages(&demand(9, 11, 2), Some((5, 1))),
            all,
            "pages of zero bytes are unlimited"
        );
    }

    /// Regression: pages took half of the memory, whatever a server needed beside them.
    #[test]
    fn pages_leave_what_a_server_takes() {
        let (demand, page, record) = (demand(100, 1000, 0), PageBytes { own: 4096, window: 0 }, 768);
        let pool = MemoryPool { page, reserved: 20 << 20, ..MemoryPool::new(100 << 20) };
        let half = (40 << 20) / page.own;
        // A sequence of full length has room, whatever others may take.
        for (beside, pages) in [(0, half), (10, half), (60, 4311), (79, 1000), (90, 1000)] {
            let PageCounts { own, .. } = pool.spare_pages(&demand, Some((beside << 20, record)));
            assert_eq!(own, pages, "{beside} MiB");
        }
        let short = MemoryPool { free: 21 << 20, ..pool };
        let PageCounts { own, .. } = short.spare_pages(&demand, Some((1 << 20, record)));
        assert_eq!(own, (1 << 20) / 2 / page.own, "no more than half of what is left");
    }

    /// Returns how many sequences of `len` pages fit at once.
    fn fitting(demand: &SlotDemand, pages: PageCounts, len: usize) -> usize {
        let in_windows = pages.window.checked_div(len.min(demand.in_window)).unwrap_or(usize::MAX);
        (pages.own / len).min(in_windows)
    }

    /// With any memory, at least as many sequences of full length fit as with as many pages of both kinds,
    /// and about as many as could with any division, up to a third; short sequences lose a third at most, and
    /// one that is alone nothing.
    #[test]
    fn memory_is_divided_between_both_kinds_of_layers() {
        // All layers have a window; five of six; every second one; few; none.
        for (own, window) in [(0, 7), (3, 15), (4, 4), (9, 2), (5, 0)] {
            let page = PageBytes { own, window };
            for (slots, sequence, in_window) in [(32, 1024, 146), (16, 63, 50), (4, 4096, 50), (1, 9, 5)] {
                let demand = demand(slots, sequence, if window == 0 { 0 } else { in_window });
                let all = page.of(demand.whole, demand.in_windows);
                for bytes in (0..=64).map(|part| all / 60 * part + part).chain(0..200) {
                    let (pages, same) = (demand.divide(bytes, page), bytes / page.of(1, 1));
                    let what = format!("{page:?}, {slots} of {sequence}, {in_window}: {bytes}: {pages:?}");
                    assert!(page.of(pages.own, pages.window) <= bytes, "{what}");
                    assert!(pages.own <= demand.whole && pages.window <= demand.in_windows, "{what}");
                    assert!(pages.own >= pages.window, "{what}: a page that nobody could use");
                    assert!(pages.own >= same.min(demand.whole), "{what}: fewer positions");
                    // Any sequence that is admitted can be computed alone.
                    assert!(pages.window >= pages.own.min(demand.alone), "{what}");
                    assert!(3 * pages.window + 3 >= 2 * same.min(demand.in_windows), "{what}");
                    let before = counts(same, same.min(demand.in_windows));
                    for len in [in_window * 3 / 2 + 1, in_window * 4, sequence] {
                        let len = len.min(sequence);
                        let (now, before) = (fitting(&demand, pages, len), fitting(&demand, before, len));
                        assert!(now >= before.min(slots), "{what}: {now} of {len}, {before} before");
                    }
                    let best = bytes / page.of(sequence, demand.in_window).max(1);
                    assert!(3 * (fitting(&demand, pages, sequence) + 1) >= best.min(slots), "{what}: {best}");
                }
                assert_eq!(demand.divide(all, page), counts(demand.whole, demand.in_windows));
            }
        }
    }

    /// Mistral 7B with a window of 4096 and Gemma 3 4B with a window of 1024, with F16 in 32 slots and a
    /// budget of 512 tokens.
    #[test]
    fn short_windows_leave_memory_for_long_sequences() {
        let windowed = (demand(32, 1024, 146), PageBytes { own: 0, window: 4 << 20 });
        assert_eq!(windowed.0.divide(8 << 30, windowed.1), counts(32 * 1024, 2048));
        // 8 chats of 16,000 tokens, four of which fit before.
        assert!(fitting(&windowed.0, windowed.0.divide(8 << 30, windowed.1), 500) >= 8);
        let mixed = (demand(32, 4096, 50), PageBytes { own: 5 << 17, window: 29 << 17 });
        let (pages, before) = (mixed.0.divide(2 << 30, mixed.1), counts(481, 481));
        assert_eq!(pages, counts(1096, 376));
        assert_eq!((fitting(&mixed.0, pages, 200), fitting(&mixed.0, before, 200)), (5, 2));
        assert_eq!((fitting(&mixed.0, pages, 20), fitting(&mixed.0, before, 20)), (18, 24));
    }

    #[test]
    fn a_number_of_tokens_is_for_both_kinds_of_layers() {
        let (mixed, all_windowed) = (PageBytes { own: 10, window: 5 }, PageBytes { own: 0, window: 5 });
        let demand = demand(4, 100, 3);
        for (pages, expected, windowed) in
            [(1, (1, 1), (1, 1)), (5, (5, 5), (5, 5)), (6, (6, 6), (400, 6)), (99, (99, 12), (400, 12))]
        {
            assert_eq!(demand.of_each(pages, mixed), counts(expected.0, expected.1));
            assert_eq!(demand.of_each(pages, all_windowed), counts(windowed.0, windowed.1));
        }
        assert_eq!(demand.of_each(usize::MAX, mixed), counts(400, 12));
    }

    const MEMINFO: (&str, &str) = (
        "/proc/meminfo",
        "MemTotal:       24623456 kB\nMemFree:          100000 kB\nMemAvailable:   20000000 kB\n",
    );

    fn available_with(files: &[(&str, &str)]) -> usize {
        available_from(|path| {
            files.iter().find(|(name, _)| *name == path).map(|(_, text)| (*text).to_owned())
        })
    }

    /// A restarted process finds the model's files in the file cache, which counts as available.
    #[test]
    fn file_cache_of_a_control_group_is_available() {
        assert_eq!((available_with(&[]), available_with(&[MEMINFO])), (usize::MAX, 20_480_000_000));
        let second = |stat| {
            available_with(&[
                MEMINFO,
                ("/sys/fs/cgroup/memory.max", "16000000000\n"),
                ("/sys/fs/cgroup/memory.current", "7000000000\n"),
                ("/sys/fs/cgroup/memory.stat", stat),
            ])
        };
        let stat = "anon 400\nfile 6600000000\nshmem 600000000\ninactive_anon 1\nactive_anon 2\n\
                    inactive_file 4000000000\nactive_file 2000000000\nunevictable 0\n";
        assert_eq!((second(stat), second("")), (15_000_000_000, 9_000_000_000));
        let first = available_with(&[
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "16000\n"),
            ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "7000\n"),
            (
                "/sys/fs/cgroup/memory/memory.stat",
                "inactive_file 1\nactive_file 2\ntotal_inactive_file 4000\ntotal_active_file 2000\n",
            ),
        ]);
        assert_eq!(first, 15_000);
        let unlimited = [
            MEMINFO,
            ("/sys/fs/cgroup/memory.max", "max\n"),
            ("/sys/fs/cgroup/memory.current", "7000000000\n"),
        ];
        assert_eq!(available_with(&unlimited), 20_480_000_000);
    }

    /// Without a namespace of its own, a process is in a group below the root, and each around it has a
    /// limit.
    #[test]
    fn the_smallest_limit_of_the_groups_around_the_process_counts() {
        let second = |list: &'static str| {
            available_with(&[
                MEMINFO,
                ("/proc/self/cgroup", list),
                ("/sys/fs/cgroup/a.slice/memory.max", "5000\n"),
                ("/sys/fs/cgroup/a.slice/memory.current", "1000\n"),
                ("/sys/fs/cgroup/a.slice/b/memory.max", "max\n"),
                ("/sys/fs/cgroup/a.slice/b/memory.current", "900\n"),
                ("/sys/fs/cgroup/c/memory.max", "300\n"),
                ("/sys/fs/cgroup/c/memory.current", "500\n"),
            ])
        };
        assert_eq!((second("0::/a.slice/b\n"), second("0::/a.slice\n")), (4000, 4000));
        assert_eq!(
            (second("0::/c\n"), second("0::/\n"), second("0::/../c\n")),
            (0, 20_480_000_000, 20_480_000_000)
        );
        let first = available_with(&[
            MEMINFO,
            (
                "/proc/self/cgroup",
                "12:cpu,cpuacct:/x\n5:memory,hugetlb:/docker/1\n1:name=systemd:/y\n0::/z\n",
            ),
            ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("/sys/fs/cgroup/memory/memory.usage_in_bytes", "1\n"),
            ("/sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes", "7000\n"),
            ("/sys/fs/cgroup/memory/docker/1/memory.usage_in_bytes", "1000\n"),
        ]);
        assert_eq!(first, 6000);
    }
}
