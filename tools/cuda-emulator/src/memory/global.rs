//! Device memory: allocations with addresses that are not used again soon.

use super::region::Region;
use crate::findings::Kind;

/// The reason why an address cannot be accessed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) kind: Kind,
    pub(crate) what: String,
}

/// An allocation.
#[derive(Debug)]
struct Allocation {
    base: u64,
    bytes: u64,
    region: Region,
    /// The first byte that kernels may only read.
    constant: u64,
}

/// The memory of a device.
#[derive(Debug)]
pub(crate) struct GlobalMemory {
    next: u64,
    limit: u64,
    used: u64,
    /// In order of their addresses.
    allocations: Vec<Allocation>,
    /// Ranges that were freed.
    freed: Vec<(u64, u64)>,
    last: usize,
}

/// The first address of device 0.
const FIRST: u64 = 0x10_0000_0000;
/// Bytes between the first addresses of two devices.
const DEVICE_WINDOW: u64 = 1 << 40;
/// The index of the device that an address would belong to.
pub(crate) fn device_of(address: u64) -> Option<usize> {
    Some((address.checked_sub(FIRST)? / DEVICE_WINDOW) as usize)
}

/// Alignment of allocations.
const ALIGN: u64 = 512;
/// Most pages of records that are kept after a launch: about 128 MiB.
const RECORD_PAGES: usize = 1 << 14;
/// Bytes between allocations, which no access may touch.
const GAP: u64 = 4096;

impl GlobalMemory {
    /// Memory of `limit` bytes of the device with that index.
    pub(crate) fn new(device: usize, limit: u64) -> GlobalMemory {
        let first = FIRST + device as u64 * DEVICE_WINDOW;
        GlobalMemory { next: first, limit, used: 0, allocations: Vec::new(), freed: Vec::new(), last: 0 }
    }

    /// Bytes that are not allocated.
    pub(crate) fn free_bytes(&self) -> u64 {
        self.limit.saturating_sub(self.used)
    }

    /// All bytes.
    pub(crate) fn total_bytes(&self) -> u64 {
        self.limit
    }

    /// Allocates; none if the limit is reached.
    pub(crate) fn alloc(&mut self, bytes: u64) -> Option<u64> {
        self.alloc_module(bytes, bytes)
    }

    /// Allocates memory that kernels may only read from the byte `constant` on.
    pub(crate) fn alloc_module(&mut self, bytes: u64, constant: u64) -> Option<u64> {
        let size = bytes.max(1).next_multiple_of(ALIGN);
        if bytes == 0 || size > self.free_bytes() {
            return None;
        }
        let base = self.next;
        self.next = base + size.next_multiple_of(GAP) + GAP;
        self.used += size;
        self.allocations.push(Allocation { base, bytes, region: Region::new(bytes as usize), constant });
        Some(base)
    }

    /// Drops the records of accesses, which are of launches that have ended, if they take much memory.
    pub(crate) fn trim_records(&mut self) {
        let pages: usize = self.allocations.iter().map(|it| it.region.record_pages()).sum();
        if pages > RECORD_PAGES {
            self.allocations.iter_mut().for_each(|it| it.region.drop_records());
        }
    }

    /// Frees an allocation; tells whether `base` is one.
    pub(crate) fn free(&mut self, base: u64) -> bool {
        let Ok(at) = self.allocations.binary_search_by_key(&base, |it| it.base) else { return false };
        let allocation = self.allocations.remove(at);
        self.used -= allocation.bytes.max(1).next_multiple_of(ALIGN);
        self.freed.push((base, allocation.bytes));
        self.last = 0;
        true
    }

    /// Frees everything; gives the addresses and sizes of the allocations that there were.
    pub(crate) fn free_all(&mut self) -> Vec<(u64, u64)> {
        let left: Vec<(u64, u64)> = self.allocations.iter().map(|it| (it.base, it.bytes)).collect();
        self.freed.extend(self.allocations.drain(..).map(|it| (it.base, it.bytes)));
        self.used = 0;
        self.last = 0;
        left
    }

    /// Base and size of the allocation around an address.
    pub(crate) fn range(&self, address: u64) -> Option<(u64, u64)> {
        let at = self.index(address)?;
        Some((self.allocations[at].base, self.allocations[at].bytes))
    }

    fn index(&self, address: u64) -> Option<usize> {
        let at = self.allocations.partition_point(|it| it.base <= address).checked_sub(1)?;
        (address - self.allocations[at].base < self.allocations[at].bytes).then_some(at)
    }

    /// The region of `n` bytes at `address`, and the offset in it.
    #[inline]
    pub(crate) fn at(&mut self, address: u64, n: u64) -> Result<(&mut Region, usize), Fault> {
        let hit = |it: &Allocation| address >= it.base && address - it.base < it.bytes;
        if !self.allocations.get(self.last).is_some_and(hit) {
            self.last = match self.index(address) {
                Some(at) => at,
                None => return Err(self.fault(address, n)),
            };
        }
        let allocation = &mut self.allocations[self.last];
        let offset = address - allocation.base;
        if n > allocation.bytes - offset {
            let over = offset + n - allocation.bytes;
            let what = format!("{over} bytes past the end of an allocation of {} bytes", allocation.bytes);
            return Err(Fault { kind: Kind::OutOfBounds, what });
        }
        Ok((&mut allocation.region, offset as usize))
    }

    /// Whether kernels may write to an address of the allocation that was found last.
    #[inline]
    pub(crate) fn writable(&self, address: u64) -> bool {
        self.allocations.get(self.last).is_none_or(|it| address - it.base < it.constant)
    }

    fn fault(&self, address: u64, n: u64) -> Fault {
        if let Some((base, bytes)) =
            self.freed.iter().rev().find(|(base, bytes)| (*base..base + bytes).contains(&address))
        {
            let what = format!("byte {} of an allocation of {bytes} bytes that was freed", address - base);
            return Fault { kind: Kind::UseAfterFree, what };
        }
        let before = self.allocations.iter().rev().find(|it| it.base <= address);
        let what = match before {
            Some(it) if address - it.base < it.bytes + GAP => {
                let over = address - it.base - it.bytes;
                format!("{n} bytes, {over} bytes past the end of an allocation of {} bytes", it.bytes)
            }
            _ => format!("{n} bytes outside of every allocation"),
        };
        Fault { kind: Kind::OutOfBounds, what }
    }
}
