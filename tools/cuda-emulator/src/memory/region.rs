//! A piece of memory: bytes, which of them were written, and the last accesses of every word.

use super::clocks::{CtaClock, Epochs};

/// The last accesses of four bytes, or of one. Two reads are kept, so that a write by one of the readers is
/// still seen to race with the other.
#[derive(Clone, Copy, Debug, Default)]
struct Word {
    write: Record,
    reads: [Record; 2],
}

/// Accesses of one warp in one epoch.
#[derive(Clone, Copy, Debug, Default)]
struct Record {
    epoch: u32,
    lanes: u32,
    bytes: u8,
    strong: bool,
    /// Whether strong accesses reach other CTAs.
    wide: bool,
    /// Whether several lanes read different bytes, so that it is not known which read which.
    mixed: bool,
}

/// Words of a page of records, which is made when the first of them is accessed.
const PAGE: usize = 256;

/// Records of a page: of each word, or of each byte once threads have written parts of a word.
#[derive(Debug)]
enum Page {
    Words(Box<[Word; PAGE]>),
    Bytes(Box<[Word; 4 * PAGE]>),
}

/// An access that races with one before it, as a clause about the later one.
pub(crate) type Clash = &'static str;

/// The kind of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Access {
    pub(crate) write: bool,
    /// Strong accesses do not race with each other.
    pub(crate) strong: bool,
    /// Whether a strong access is so for other CTAs.
    pub(crate) wide: bool,
    /// Whether a read takes memory to be constant for the whole launch (`.nc`).
    pub(crate) constant: bool,
    /// Whether a write leaves the bytes as they are, so that its order among writes does not matter.
    pub(crate) same: bool,
}

/// The lane that accesses memory.
pub(crate) struct Actor<'a> {
    pub(crate) clock: &'a CtaClock,
    pub(crate) epochs: &'a Epochs,
    pub(crate) warp: usize,
    pub(crate) lane: u32,
    /// Epochs before this one are over for all who can access the memory.
    pub(crate) floor: u32,
}

/// A piece of memory.
#[derive(Debug, Default)]
pub(crate) struct Region {
    pub(crate) data: Vec<u8>,
    /// A bit for each byte: whether it differs from `all_written`.
    written: Vec<u8>,
    /// All bits or none: whether bytes count as written unless their bit says otherwise.
    all_written: u8,
    words: Vec<Option<Page>>,
    /// Pages of records.
    pages: usize,
    /// Bytes that asynchronous copies will write; empty if there were none.
    pending: Vec<u8>,
}

/// Content of memory that nobody has written.
const POISON: u8 = 0xcb;

/// Bytes from which on memory is not poisoned, and cleared as a whole, so that the host has only those parts
/// of it that are accessed.
const SPARSE: usize = 1 << 28;

impl Region {
    /// Memory that nobody has written.
    pub(crate) fn new(bytes: usize) -> Region {
        Region {
            data: vec![if bytes < SPARSE { POISON } else { 0 }; bytes],
            written: vec![0; bytes.div_ceil(8) + 1],
            all_written: 0,
            words: (0..bytes.div_ceil(4 * PAGE)).map(|_| None).collect(),
            pages: 0,
            pending: Vec::new(),
        }
    }

    /// Forgets what was written. Records of accesses stay: their epochs are over.
    pub(crate) fn clear(&mut self) {
        self.data.fill(POISON);
        self.written.fill(0);
        self.all_written = 0;
        self.pending.clear();
    }

    /// Writes zeros to all `n` bytes, if that is all there is and so large that it must not be touched; tells
    /// whether it did.
    pub(crate) fn zero_sparsely(&mut self, n: usize) -> bool {
        if n < SPARSE || n != self.data.len() {
            return false;
        }
        // New memory is zeros without being touched.
        (self.data, self.written) = (vec![0; n], vec![0; n.div_ceil(8) + 1]);
        self.all_written = 0xff;
        true
    }

    /// Pages of records of accesses.
    pub(crate) fn record_pages(&self) -> usize {
        self.pages
    }

    /// Drops the records of accesses.
    pub(crate) fn drop_records(&mut self) {
        self.words.iter_mut().for_each(|page| *page = None);
        self.pages = 0;
    }

    /// Whether the `n` bytes at `at` were written; `n` is at most 8, and `at` its multiple.
    #[inline]
    pub(crate) fn is_written(&self, at: usize, n: usize) -> bool {
        let mask = (0xffu8 >> (8 - n)) << (at & 7);
        (self.written[at >> 3] ^ self.all_written) & mask == mask
    }

    /// As [`Region::is_written`], of up to 32 bytes.
    #[inline]
    pub(crate) fn is_all_written(&self, at: usize, n: usize) -> bool {
        if n <= 8 {
            return self.is_written(at, n);
        }
        self.written[at >> 3..(at + n) >> 3].iter().all(|it| *it ^ self.all_written == 0xff)
    }

    /// Notes that the `n` bytes at `at` were written; as for [`Region::is_written`].
    #[inline]
    pub(crate) fn mark(&mut self, at: usize, n: usize) {
        let (mask, byte) = ((0xffu8 >> (8 - n)) << (at & 7), &mut self.written[at >> 3]);
        *byte = ((*byte ^ self.all_written) | mask) ^ self.all_written;
    }

    /// Notes that a range was written.
    pub(crate) fn mark_range(&mut self, at: usize, n: usize) {
        self.set_range(at, n, true);
    }

    /// Sets whether a range counts as written.
    pub(crate) fn set_range(&mut self, at: usize, n: usize, written: bool) {
        let mut at = at;
        let end = (at + n).min(self.data.len());
        while at < end {
            if at & 7 == 0 && end - at >= 8 {
                let whole = (end - at) / 8;
                self.written[at >> 3..(at >> 3) + whole].fill(if written {
                    !self.all_written
                } else {
                    self.all_written
                });
                at += whole * 8;
            } else {
                let bit = 1 << (at & 7);
                let differs = written != (self.all_written != 0);
                if differs {
                    self.written[at >> 3] |= bit
                } else {
                    self.written[at >> 3] &= !bit
                }
                at += 1;
            }
        }
    }

    /// Whether byte `at` was written.
    pub(crate) fn byte_written(&self, at: usize) -> bool {
        (self.written[at >> 3] ^ self.all_written) >> (at & 7) & 1 == 1
    }

    /// The offset of the first byte of a range that was never written.
    pub(crate) fn first_unwritten(&self, at: usize, n: usize) -> Option<usize> {
        let mut offset = 0;
        while offset < n {
            let here = at + offset;
            if here & 7 == 0 && self.written[here >> 3] ^ self.all_written == 0xff {
                offset += 8;
            } else if self.byte_written(here) {
                offset += 1;
            } else {
                return Some(offset);
            }
        }
        None
    }

    /// The value of `n` bytes at `at`.
    #[inline]
    pub(crate) fn get(&self, at: usize, n: usize) -> u64 {
        let bytes = &self.data[at..at + n];
        match bytes.len() {
            4 => u64::from(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])),
            8 => u64::from_le_bytes([
                bytes[0], bytes[1], bytes[2], bytes[3], bytes[4], bytes[5], bytes[6], bytes[7],
            ]),
            2 => u64::from(u16::from_le_bytes([bytes[0], bytes[1]])),
            _ => u64::from(bytes[0]),
        }
    }

    /// Stores the lower `n` bytes of `value` at `at`.
    #[inline]
    pub(crate) fn put(&mut self, at: usize, n: usize, value: u64) {
        self.data[at..at + n].copy_from_slice(&value.to_le_bytes()[..n]);
    }

    /// Notes that a copy will write a range, or has.
    pub(crate) fn set_pending(&mut self, at: usize, n: usize, pending: bool) {
        if self.pending.is_empty() {
            self.pending = vec![0; self.data.len()];
        }
        let end = (at + n).min(self.data.len());
        for count in &mut self.pending[at..end] {
            *count = if pending { count.saturating_add(1) } else { count.saturating_sub(1) };
        }
    }

    /// Whether a copy that has not landed writes to a range.
    pub(crate) fn is_pending(&self, at: usize, n: usize) -> bool {
        !self.pending.is_empty()
            && self.pending[at..(at + n).min(self.pending.len())].iter().any(|it| *it > 0)
    }

    /// Records an access to `n` bytes at `at`, a multiple of `n`, which is at most 32; tells what kind of
    /// access before it races with it.
    #[inline]
    pub(crate) fn record(&mut self, at: usize, n: usize, access: Access, actor: &Actor) -> Option<Clash> {
        let mut race = None;
        let pages = &mut self.pages;
        let page = self.words[at / (4 * PAGE)].get_or_insert_with(|| {
            *pages += 1;
            Page::Words(Box::new([Word::default(); PAGE]))
        });
        let mut at = at;
        let mut left = n;
        while left > 0 {
            let within = at & 3;
            let take = left.min(4 - within);
            let bytes = (0xfu8 >> (4 - take)) << within;
            let index = at >> 2;
            if let Page::Words(words) = page
                && access.write
                && words[index % PAGE].would_lose(bytes, actor)
            {
                *pages += 3;
                *page = split(words);
            }
            let found = match page {
                Page::Words(words) => words[index % PAGE].access(bytes, access, actor),
                Page::Bytes(all) => {
                    let first = index % PAGE * 4;
                    let each = all[first + within..first + within + take].iter_mut().enumerate();
                    each.fold(None, |found, (byte, it)| {
                        let here = it.access(1 << (within + byte), access, actor);
                        found.or(here)
                    })
                }
            };
            race = race.or(found);
            at += take;
            left -= take;
        }
        race
    }
}

/// The records of a page byte by byte.
#[cold]
fn split(words: &[Word; PAGE]) -> Page {
    let mut all = Box::new([Word::default(); 4 * PAGE]);
    for (at, byte) in all.iter_mut().enumerate() {
        *byte = words[at / 4];
        let [first, second] = &mut byte.reads;
        for record in [&mut byte.write, first, second] {
            record.bytes &= 1 << (at % 4);
        }
    }
    Page::Bytes(all)
}

impl Word {
    /// Whether a write of `bytes` would replace what is known of writes to other bytes in this launch.
    #[inline]
    fn would_lose(&self, bytes: u8, actor: &Actor) -> bool {
        self.write.bytes & !bytes != 0 && self.write.epoch >= actor.floor
    }

    #[inline]
    fn access(&mut self, bytes: u8, access: Access, actor: &Actor) -> Option<Clash> {
        let mut race = None;
        if !access.same && self.write.conflicts(bytes, access, actor) {
            race = Some("that an earlier write does not precede");
        } else if access.constant && self.write.bytes & bytes != 0 && self.write.epoch >= actor.floor {
            race = Some("as constant (.nc), after a write of the same launch");
        }
        if access.write {
            for read in &mut self.reads {
                if read.conflicts(bytes, access, actor) {
                    race = race.or(Some("that an earlier read does not precede"));
                }
                if bytes & read.bytes == read.bytes {
                    read.bytes = 0;
                }
            }
            self.write.take(bytes, access, actor);
        } else {
            let epoch = actor.clock.epoch(actor.warp);
            let [first, second] = &mut self.reads;
            if first.epoch == epoch || first.bytes == 0 || first.is_ordered(actor) {
                first.take(bytes, access, actor);
            } else if second.epoch == epoch || second.bytes == 0 || second.is_ordered(actor) {
                second.take(bytes, access, actor);
            }
        }
        race
    }
}

impl Record {
    fn is_ordered(&self, actor: &Actor) -> bool {
        self.epoch < actor.floor
            || actor.clock.ordered(actor.epochs, actor.warp, actor.lane, self.epoch, self.lanes)
    }

    #[inline]
    fn conflicts(&self, bytes: u8, access: Access, actor: &Actor) -> bool {
        if self.bytes & bytes == 0 || self.is_ordered(actor) {
            return false;
        }
        if self.strong && access.strong {
            let reach = self.wide && access.wide;
            return !reach && !actor.clock.same_cta(actor.epochs, self.epoch);
        }
        // Of reads by several lanes, it is certain that another lane read these bytes if they are all that
        // were read, or if this lane read none.
        let all = self.bytes & !bytes == 0 && self.bytes.count_ones() > 1;
        let certain = all || self.lanes >> actor.lane & 1 == 0;
        !self.mixed || certain || !actor.clock.same_warp(actor.epochs, actor.warp, self.epoch)
    }

    /// Adds an access: to those of the same epoch, or in place of older ones.
    #[inline]
    fn take(&mut self, bytes: u8, access: Access, actor: &Actor) {
        let epoch = actor.clock.epoch(actor.warp);
        let lane = 1 << actor.lane;
        if self.epoch == epoch && self.bytes != 0 {
            self.mixed |= self.lanes != lane && (self.bytes != bytes || self.mixed);
            self.lanes |= lane;
            self.bytes |= bytes;
            self.strong &= access.strong;
            self.wide &= access.wide;
        } else {
            let Access { strong, wide, .. } = access;
            *self = Record { epoch, lanes: lane, bytes, strong, wide, mixed: false };
        }
    }
}
