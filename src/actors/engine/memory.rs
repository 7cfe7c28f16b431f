//! Sizes the KV cache: the number of pages, by the free memory of the devices.
//!
//! Devices of one machine share its memory, so their needs are summed up.
//! Layers that see a window of a sequence have pages of their own, unless a sequence would need as many as in
//! other layers: a running sequence holds no more of them than a step sees.
//! Invariant: a sequence's pages have the same numbers on every device.

use crate::actors::group::link::Capacity;
use crate::actors::group::stage_buffer_bytes;
use crate::config::{Config, DeviceKind, DeviceName, KvSize};
use crate::model::executor::{ExecutorReport, KvCacheConfig, PageBytes, shard_page_bytes};
use crate::model::spec::ModelSpec;
use crate::model::{ModelSource, Partition, Shard};
use anyhow::{Context, Result, ensure};
use mainstem_kernels::{ActivationType, Mask, StepLimits};

/// Predicts the allocations of a configured device with a part of the model.
pub type DeviceEstimate<'a> =
    dyn Fn(&DeviceName, &Shard, KvCacheConfig, StepLimits) -> Result<ExecutorReport> + 'a;

/// Properties of the configured devices. Only the program knows the kinds of devices.
#[derive(Clone, Copy)]
pub struct DeviceProperties<'a> {
    /// Type of the activations of all devices.
    pub activation_type: ActivationType,
    pub estimate: &'a DeviceEstimate<'a>,
}

/// The size of the KV cache.
pub(super) struct KvPlan {
    pub(super) cache: KvCacheConfig,
    /// Bytes of one page on all devices together.
    pub(super) page: PageBytes,
}

/// Returns the largest window of the layers that get pages of their own, because a sequence needs fewer of
/// these; `None` without such layers.
pub(super) fn windowed_layers(spec: &ModelSpec, limits: &StepLimits) -> Option<usize> {
    // Encoder positions are in the pages of all layers.
    let layers = spec.cached_layers().iter().filter(|_| spec.encoder.is_none());
    let windows = layers.filter_map(|layer| match layer.attention.mask {
        Mask::Causal { window } => window,
        Mask::Bidirectional { .. } => None,
    });
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
    let pools = memory_pools(config, limits, lanes, source, (partition, devices))?;
    let sum = |sum: PageBytes, pool: &MemoryPool| sum.checked_add(pool.page).unwrap_or(PageBytes::MAX);
    let page = pools.iter().fold(PageBytes::default(), sum);
    let demand = SlotDemand::new(limits);
    let (whole, page_bytes) = (demand.whole, page.of(1, 1).max(1));
    let minimum = 1 + min_encoder_pages(limits);
    let pages = match kv.size {
        KvSize::Tokens(tokens) => tokens.div_ceil(kv.page_size),
        KvSize::Bytes(bytes) => demand.pages_in(usize::try_from(bytes).unwrap_or(usize::MAX), page),
        KvSize::Auto => {
            pools.iter().map(|pool| pool.spare_pages(&demand)).fold(whole, usize::min).max(minimum)
        }
    };
    // More pages than all slots can use would waste memory.
    let pages = pages.min(whole);
    pools.iter().try_for_each(|pool| pool.check(page_counts(&demand, pages), kv.size))?;
    ensure!(pages > 0, "kv.size is less than one page of {page_bytes} bytes");
    ensure!(
        pages >= minimum,
        "kv.size is one page of {page_bytes} bytes, but a sequence needs at least {minimum}: for its own and \
         its encoder positions"
    );
    ensure!(pages < u32::MAX as usize, "kv.size is {pages} pages, more than page numbers can represent");
    let (mut pages, window) = page_counts(&demand, pages);
    // If all layers are windowed, other pages take no memory, and need not be short.
    if page.own == 0 && window == demand.in_windows {
        pages = whole;
    }
    let cache = KvCacheConfig { ty: kv.ty, pages: pages + 1, window_pages: window + 1 };
    Ok(KvPlan { cache, page })
}

/// The numbers of pages that the slots can use.
struct SlotDemand {
    /// Of all slots, in layers that see whole sequences.
    whole: usize,
    /// Of all slots, in windowed layers. A sequence that begins with shared pages holds these beside its own.
    in_windows: usize,
}

impl SlotDemand {
    fn new(limits: &StepLimits) -> SlotDemand {
        let in_window = limits.window.map_or(0, |window| limits.pages_of_window(window));
        SlotDemand {
            whole: limits.slots * (limits.table_len() + limits.cross_table_len()),
            in_windows: limits.slots.max(2) * in_window,
        }
    }

    /// Returns how many pages fit into `bytes`, with as many of windowed layers as they need.
    fn pages_in(&self, bytes: usize, page: PageBytes) -> usize {
        let both = bytes.checked_div(page.of(1, 1)).unwrap_or(usize::MAX);
        match both < self.in_windows {
            true => both,
            false => (bytes - page.of(0, self.in_windows)).checked_div(page.own).unwrap_or(usize::MAX),
        }
    }
}

/// Returns the numbers of pages of both kinds of layers for `pages` pages of a cache.
fn page_counts(demand: &SlotDemand, pages: usize) -> (usize, usize) {
    (pages, pages.min(demand.in_windows))
}

/// Returns the minimum number of pages for a sequence's encoder positions.
pub(super) fn min_encoder_pages(limits: &StepLimits) -> usize {
    limits.cross_table_len().min(1)
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

/// Returns the memories in use: the machine's, for all devices that compute on the CPU, and an unlimited one
/// for fake devices. Fails if a page's size overflows.
fn memory_pools(
    config: &Config,
    limits: &StepLimits,
    lanes: usize,
    source: &ModelSource,
    (partition, properties): (&Partition, DeviceProperties),
) -> Result<Vec<MemoryPool>> {
    let pool = |free| MemoryPool { devices: Vec::new(), free, page: PageBytes::default(), reserved: 0 };
    let (mut machine, mut nowhere) = (pool(available_memory()), pool(usize::MAX));
    let row_bytes = source.spec.hidden * properties.activation_type.size();
    let between = stage_exchange_bytes(limits, lanes, row_bytes, partition);
    for ((devices, shards), between) in config.device.groups.iter().zip(partition.shards()).zip(between) {
        // The communication buffers are in the machine's memory, whatever the devices are.
        machine.reserved = machine.reserved.saturating_add(between);
        for (device, shard) in devices.iter().zip(shards) {
            let pool = match device.kind {
                DeviceKind::Cpu | DeviceKind::Reference => &mut machine,
                DeviceKind::Fake { .. } => &mut nowhere,
            };
            let page = shard_page_bytes(source, &shard, config.kv.ty, limits)?;
            let page = page.with_context(|| {
                format!("kv.page_size: a page of {} tokens is too large", config.kv.page_size)
            })?;
            pool.add_device(device, page);
            let kv = KvCacheConfig { ty: config.kv.ty, pages: 1, window_pages: 0 };
            let needed = (properties.estimate)(device, &shard, kv, *limits)?;
            pool.reserved = pool.reserved.saturating_add(needed.total_bytes() - needed.kv_bytes);
        }
    }
    Ok([machine, nowhere].into_iter().filter(|pool| !pool.devices.is_empty()).collect())
}

impl MemoryPool {
    /// Adds a device with `page` bytes per page.
    fn add_device(&mut self, device: &DeviceName, page: PageBytes) {
        self.devices.push(device.to_string());
        self.page = self.page.checked_add(page).unwrap_or(PageBytes::MAX);
    }

    /// Returns the bytes that are left beside weights and buffers.
    fn remaining(&self) -> usize {
        self.free.saturating_sub(self.reserved)
    }

    /// Returns the number of pages in half of the remaining memory; the other half is left to other processes
    /// and to the file cache.
    fn spare_pages(&self, demand: &SlotDemand) -> usize {
        demand.pages_in(self.remaining() / 2, self.page)
    }

    /// Checks that so many pages of both kinds of layers fit into the memory.
    fn check(&self, (pages, window_pages): (usize, usize), size: KvSize) -> Result<()> {
        let (wanted, taken, devices) =
            (self.page.of(pages, window_pages), self.reserved, self.devices.join(", "));
        match size {
            KvSize::Auto => ensure!(
                wanted <= self.remaining(),
                "the model needs {taken} bytes on {devices} for weights and steps, and at least {wanted} for \
                 the KV cache, but only {} are available there",
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

    #[test]
    fn devices_share_a_memory_and_are_named_in_errors() {
        let devices = ["cpu:0", "cpu:1"].map(str::to_owned).to_vec();
        let page = PageBytes { own: 8, window: 0 };
        let demand = SlotDemand { whole: 99, in_windows: 0 };
        let pool = MemoryPool { devices, free: 100, page, reserved: 20 };
        // Half of the 80 remaining bytes.
        assert_eq!(pool.spare_pages(&demand), 5);
        assert!(pool.check((10, 0), KvSize::Tokens(320)).is_ok());
        let error = pool.check((11, 0), KvSize::Bytes(88)).unwrap_err().to_string();
        assert_eq!(
            error,
            "kv.size needs 88 bytes on cpu:0, cpu:1, but only 80 are available there beside 20 for weights \
             and steps"
        );
        assert!(pool.check((10, 0), KvSize::Auto).is_ok());
        let error = pool.check((11, 0), KvSize::Auto).unwrap_err().to_string();
        assert_eq!(
            error,
            "the model needs 20 bytes on cpu:0, cpu:1 for weights and steps, and at least 88 for the KV \
             cache, but only 100 are available there"
        );
        assert_eq!(MemoryPool { reserved: 200, ..pool }.spare_pages(&demand), 0);
        let nothing =
            MemoryPool { devices: Vec::new(), free: usize::MAX, page: PageBytes::default(), reserved: 0 };
        assert_eq!(nothing.spare_pages(&demand), usize::MAX, "pages of zero bytes are unlimited");
    }

    #[test]
    fn windowed_layers_take_no_more_pages_than_the_slots_can_use() {
        let demand = SlotDemand { whole: 400, in_windows: 12 };
        let (mixed, all_windowed) = (PageBytes { own: 10, window: 5 }, PageBytes { own: 0, window: 5 });
        for (bytes, pages) in [(0, 0), (29, 1), (30, 2), (180, 12), (189, 12), (190, 13), (1060, 100)] {
            assert_eq!(demand.pages_in(bytes, mixed), pages, "{bytes} bytes");
            let (own, window) = page_counts(&demand, pages);
            assert!(mixed.of(own, window) <= bytes, "{bytes} bytes");
        }
        assert_eq!(demand.pages_in(59, all_windowed), 11);
        assert_eq!(demand.pages_in(65, all_windowed), usize::MAX);
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
