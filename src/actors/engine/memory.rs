//! Sizes the KV cache: the number of pages, by the free memory of the devices.
//!
//! Devices of one machine share its memory, so their needs are summed up.
//! Invariant: a sequence's pages have the same numbers on every device.

use crate::actors::group::link::Room;
use crate::actors::group::stage_bytes;
use crate::config::{Config, DeviceKind, DeviceName, KvSize};
use crate::model::executor::{KvPlan, page_bytes, working_bytes};
use crate::model::load;
use crate::model::{ModelSource, ModelSpec, Partition, Shard, TensorRecord};
use anyhow::{Context, Result, ensure};
use mainstem_kernels::{QuantType, StepLimits};

/// Returns the number of pages of the KV cache, including the null page, given the memory that `lanes` lanes
/// need otherwise. An encoder-only model caches nothing: it has only the null page.
pub(super) fn kv_plan(
    config: &Config,
    limits: &StepLimits,
    lanes: usize,
    source: &ModelSource,
    partition: &Partition,
) -> Result<KvPlan> {
    let kv = &config.kv;
    if source.spec.decoder.is_none() {
        return Ok(KvPlan { ty: kv.ty, pages: 1 });
    }
    let pools = pools(config, limits, lanes, source, partition)
        .with_context(|| format!("kv.page_size: a page of {} tokens is too large", kv.page_positions))?;
    // Bytes of one page on all devices together.
    let page = pools.iter().map(|pool| pool.page).fold(0, usize::saturating_add).max(1);
    let whole = limits.slots * (limits.table_len() + limits.cross_table_len());
    let least = 1 + source_pages_min(limits);
    let pages = match kv.size {
        KvSize::Tokens(tokens) => tokens.div_ceil(kv.page_positions),
        KvSize::Bytes(bytes) => (bytes / page as u64) as usize,
        KvSize::Fitting => pools.iter().map(Pool::spare_pages).fold(whole, usize::min).max(least),
    };
    // More pages than all slots can use would waste memory.
    let pages = pages.min(whole);
    pools.iter().try_for_each(|pool| pool.check(pages, kv.size))?;
    ensure!(pages > 0, "kv.size is less than one page of {page} bytes");
    ensure!(
        pages >= least,
        "kv.size is one page of {page} bytes, but a sequence needs at least {least}: for its own and its encoder positions"
    );
    ensure!(pages < u32::MAX as usize, "kv.size is {pages} pages, more than page numbers can represent");
    Ok(KvPlan { ty: kv.ty, pages: pages + 1 })
}

/// Returns the minimum number of pages for a sequence's encoder positions.
pub(super) fn source_pages_min(limits: &StepLimits) -> usize {
    limits.cross_table_len().min(1)
}

/// A memory, and what the devices in it need.
struct Pool {
    devices: Vec<String>,
    /// Available bytes; `usize::MAX` if the devices need no memory.
    free: usize,
    /// Bytes of one page on all of the devices.
    page: usize,
    /// Bytes of weights, activations, and buffers for communication.
    taken: usize,
}

/// Returns the bytes of each stage's communication buffers: for collectives among its ranks, and for the
/// hand-off to the next stage.
pub(super) fn between(
    limits: &StepLimits,
    lanes: usize,
    width: usize,
    partition: &Partition,
) -> impl Iterator<Item = usize> {
    let room = Room { limits: *limits, width, steps: lanes };
    let last = partition.stages.len() - 1;
    let stages = partition.stages.iter().enumerate();
    stages.map(move |(at, stage)| stage_bytes(stage.members.len(), (at < last).then_some(room)))
}

/// Returns the memories in use: the machine's, for all devices that compute on the CPU, and an unlimited one
/// for fake devices. `None` if a page's size overflows.
fn pools(
    config: &Config,
    limits: &StepLimits,
    lanes: usize,
    source: &ModelSource,
    partition: &Partition,
) -> Option<Vec<Pool>> {
    let pool = |free| Pool { devices: Vec::new(), free, page: 0, taken: 0 };
    let (mut machine, mut nowhere) = (pool(available_memory()), pool(usize::MAX));
    let between = between(limits, lanes, source.spec.hidden, partition);
    for ((devices, shards), between) in config.device.groups.iter().zip(partition.shards()).zip(between) {
        // The communication buffers are in the machine's memory, whatever the devices are.
        machine.taken = machine.taken.saturating_add(between);
        for (device, shard) in devices.iter().zip(shards) {
            let pool = match device.kind {
                DeviceKind::Cpu | DeviceKind::Reference => &mut machine,
                DeviceKind::Fake { .. } => &mut nowhere,
            };
            pool.add(device, shard_page(source, &shard, config.kv.ty, limits.page_positions)?);
            pool.taken = pool.taken.saturating_add(shard_bytes(source, &shard, limits));
        }
    }
    Some([machine, nowhere].into_iter().filter(|pool| !pool.devices.is_empty()).collect())
}

/// Adds a device with `page` bytes per page.
impl Pool {
    fn add(&mut self, device: &DeviceName, page: usize) {
        self.devices.push(device.to_string());
        self.page = self.page.saturating_add(page);
    }

    /// Returns the bytes that are left beside weights and buffers.
    fn left(&self) -> usize {
        self.free.saturating_sub(self.taken)
    }

    /// Returns the number of pages in half of the remaining memory; the other half is left to other processes
    /// and to the file cache.
    fn spare_pages(&self) -> usize {
        (self.left() / 2).checked_div(self.page).unwrap_or(usize::MAX)
    }

    /// Checks that `pages` pages fit into the memory.
    fn check(&self, pages: usize, size: KvSize) -> Result<()> {
        let (wanted, taken, devices) = (pages.saturating_mul(self.page), self.taken, self.devices.join(", "));
        match size {
            // Only the minimum is checked; whether the weights fit is not checked here.
            KvSize::Fitting => ensure!(
                wanted <= self.free,
                "the KV cache needs at least {wanted} bytes on {devices}, but only {} are available there",
                self.free
            ),
            KvSize::Tokens(_) | KvSize::Bytes(_) => ensure!(
                wanted <= self.left(),
                "kv.size needs {wanted} bytes on {devices}, but only {} are available there beside {taken} for weights \
                 and steps",
                self.left()
            ),
        }
        Ok(())
    }
}

/// Returns the bytes of a page of the shard's layers and heads; `None` on overflow.
fn shard_page(source: &ModelSource, shard: &Shard, ty: QuantType, page_positions: usize) -> Option<usize> {
    page_bytes(&part(source, shard), ty, page_positions)
}

/// Returns the bytes of the shard's weights, lookup tables and activations.
fn shard_bytes(source: &ModelSource, shard: &Shard, limits: &StepLimits) -> usize {
    let part = part(source, shard);
    let weights = load::records(source, &part).iter().map(TensorRecord::loaded_bytes).sum::<usize>();
    weights.saturating_add(load::table_bytes(&part, limits)).saturating_add(working_bytes(&part, limits))
}

/// Returns the specification of a shard.
fn part(source: &ModelSource, shard: &Shard) -> ModelSpec {
    source.part(shard).expect("the partition was checked; anything else is a bug")
}

/// Returns the bytes that the system and this process's control group can still provide; `usize::MAX` if
/// neither sets a limit.
pub fn available_memory() -> usize {
    available(|path| std::fs::read_to_string(path).ok())
}

/// Returns the available memory according to the system files that `read` reads.
fn available(read: impl Fn(&str) -> Option<String>) -> usize {
    let system = || {
        let rest = numbers(&read("/proc/meminfo")?, &["MemAvailable:"])?;
        Some(rest.saturating_mul(1024))
    };
    let group = CONTROL_GROUPS.iter().find_map(|group| group.rest(&read));
    system().unwrap_or(usize::MAX).min(group.unwrap_or(usize::MAX))
}

/// Files that describe the memory of a control group.
struct ControlGroup {
    limit: &'static str,
    used: &'static str,
    stat: &'static str,
    /// Keys of file cache pages in `stat`: counted as used, but reclaimed when memory is short. The model's
    /// files are among them.
    cached: [&'static str; 2],
}

/// Control groups version 2, then version 1.
const CONTROL_GROUPS: [ControlGroup; 2] = [
    ControlGroup {
        limit: "/sys/fs/cgroup/memory.max",
        used: "/sys/fs/cgroup/memory.current",
        stat: "/sys/fs/cgroup/memory.stat",
        cached: ["active_file", "inactive_file"],
    },
    ControlGroup {
        limit: "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        used: "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        stat: "/sys/fs/cgroup/memory/memory.stat",
        cached: ["total_active_file", "total_inactive_file"],
    },
];

impl ControlGroup {
    /// Returns the bytes that the group can still provide; `None` without a limit.
    fn rest(&self, read: impl Fn(&str) -> Option<String>) -> Option<usize> {
        let number = |path: &str| read(path)?.trim().parse::<usize>().ok();
        let (limit, used) = (number(self.limit)?, number(self.used)?);
        let cached = read(self.stat).and_then(|text| numbers(&text, &self.cached)).unwrap_or(0);
        Some(limit.saturating_sub(used.saturating_sub(cached)))
    }
}

/// Returns the sum of the values of `keys`, each at the beginning of a line; `None` if one is missing.
fn numbers(text: &str, keys: &[&str]) -> Option<usize> {
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
    fn devices_of_one_memory_take_of_it_together_and_are_named() {
        let devices = ["cpu:0", "cpu:1"].map(str::to_owned).to_vec();
        let pool = Pool { devices, free: 100, page: 8, taken: 20 };
        // Half of the 80 remaining bytes.
        assert_eq!(pool.spare_pages(), 5);
        assert!(pool.check(10, KvSize::Tokens(320)).is_ok());
        let error = pool.check(11, KvSize::Bytes(88)).unwrap_err().to_string();
        assert_eq!(
            error,
            "kv.size needs 88 bytes on cpu:0, cpu:1, but only 80 are available there beside 20 for weights and steps"
        );
        // Without a configured size only the minimum is checked, and weights that do not fit are another
        // matter.
        assert!(pool.check(11, KvSize::Fitting).is_ok() && pool.check(13, KvSize::Fitting).is_err());
        assert_eq!(Pool { taken: 200, ..pool }.spare_pages(), 0);
        let nothing = Pool { devices: Vec::new(), free: usize::MAX, page: 0, taken: 0 };
        assert_eq!(nothing.spare_pages(), usize::MAX, "pages of zero bytes are unlimited");
    }

    const MEMINFO: (&str, &str) = (
        "/proc/meminfo",
        "MemTotal:       24623456 kB\nMemFree:          100000 kB\nMemAvailable:   20000000 kB\n",
    );

    fn of(files: &[(&str, &str)]) -> usize {
        available(|path| files.iter().find(|(name, _)| *name == path).map(|(_, text)| (*text).to_owned()))
    }

    /// A restarted process finds the model's files in the file cache, which counts as available.
    #[test]
    fn what_files_take_of_a_control_group_is_to_be_had() {
        assert_eq!((of(&[]), of(&[MEMINFO])), (usize::MAX, 20_480_000_000));
        let second = |stat| {
            of(&[
                MEMINFO,
                ("/sys/fs/cgroup/memory.max", "16000000000\n"),
                ("/sys/fs/cgroup/memory.current", "7000000000\n"),
                ("/sys/fs/cgroup/memory.stat", stat),
            ])
        };
        let stat = "anon 400\nfile 6600000000\nshmem 600000000\ninactive_anon 1\nactive_anon 2\n\
                    inactive_file 4000000000\nactive_file 2000000000\nunevictable 0\n";
        assert_eq!((second(stat), second("")), (15_000_000_000, 9_000_000_000));
        let first = of(&[
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
        assert_eq!(of(&unlimited), 20_480_000_000);
    }
}
