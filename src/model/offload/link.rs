//! The link between a device with memory of its own and the host, with a limited rate.
//!
//! Invariant: transfers in one direction follow one another, and those in different directions do not wait
//! for each other.

use super::held::HeldMemory;
use super::tier::Tier;
use super::transfers::{Stream, Transfers};
use crate::model::shard::Shard;
use mainstem_kernels::Abort;
use std::hint;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// Longest time for which a thread does not look whether it has to stop.
const NAP: Duration = Duration::from_millis(20);

/// Time by which a sleep may be too long: many rows cross a link in it.
const OVERSLEPT: Duration = Duration::from_micros(100);

/// Longest time of a transfer that is counted, so that points in time do not overflow.
const LONGEST: Duration = Duration::from_secs(86_400);

/// A direction of a link.
#[derive(Clone, Copy, Debug)]
pub enum Direction {
    ToDevice,
    FromDevice,
}

/// A link of a device that carries at most so many bytes per second in each direction.
#[derive(Debug)]
pub struct Link {
    rate: f64,
    /// The end of the last transfer in each direction.
    ends: [Mutex<Option<Instant>>; 2],
}

impl Link {
    /// Creates the link of a device, of `rate` bytes per second.
    pub fn new(rate: f64) -> Link {
        Link { rate, ends: Default::default() }
    }

    /// Returns when a transfer ends that begins at `began`, if those before it in its direction have ended.
    fn end(&self, direction: Direction, bytes: usize, began: Instant) -> Instant {
        let mut last = self.ends[direction as usize].lock().unwrap_or_else(PoisonError::into_inner);
        let begins = last.map_or(began, |last| last.max(began));
        let time = Duration::try_from_secs_f64(bytes as f64 / self.rate).unwrap_or(LONGEST);
        *last.insert(begins + time.min(LONGEST))
    }

    /// Waits until a transfer that began at `began`, and of which the bytes are copied, would have ended.
    /// Ends early if `is_stopped` says so.
    pub fn wait(&self, direction: Direction, bytes: usize, began: Instant, is_stopped: &dyn Fn() -> bool) {
        let end = self.end(direction, bytes, began);
        while !is_stopped() {
            match end.checked_duration_since(Instant::now()) {
                Some(left) if left > OVERSLEPT => thread::sleep((left - OVERSLEPT).min(NAP)),
                Some(left) if !left.is_zero() => hint::spin_loop(),
                _ => return,
            }
        }
    }
}

/// The counters of a device's transfers, and its link if that has a limited rate.
#[derive(Clone, Debug, Default)]
pub struct TransferPath {
    pub transfers: Arc<Transfers>,
    pub link: Option<Arc<Link>>,
    /// The memory that builds of the device hold beside its own.
    pub held: Arc<HeldMemory>,
}

impl TransferPath {
    /// Creates the path of the device with a shard, whose link carries `rate` bytes per second if that is
    /// limited.
    pub fn new(transfers: &Arc<Transfers>, rate: Option<f64>, device: &Shard) -> TransferPath {
        let (link, held) = (rate.map(Link::new).map(Arc::new), transfers.held_by(device));
        TransferPath { transfers: transfers.clone(), link, held }
    }

    /// Waits as [`Link::wait`] does, if there is a link.
    pub fn wait(&self, direction: Direction, bytes: usize, began: Instant, is_stopped: &dyn Fn() -> bool) {
        self.link.iter().for_each(|link| link.wait(direction, bytes, began, is_stopped));
    }
}

/// The way of rows of activations from a device to attention in the memory of the host, and back.
#[derive(Debug)]
pub struct RowLink {
    path: TransferPath,
    abort: OnceLock<Abort>,
}

impl RowLink {
    /// Creates the way of a device's rows over `path`.
    pub fn new(path: TransferPath) -> RowLink {
        RowLink { path, abort: OnceLock::new() }
    }

    /// Counts `bytes` of queries, keys or values, and waits until the host has them.
    pub fn send(&self, bytes: usize) {
        self.carry(Stream::StoreRows, Direction::FromDevice, bytes);
    }

    /// Counts `bytes` of attention outputs, and waits until the device has them.
    pub fn receive(&self, bytes: usize) {
        self.carry(Stream::LoadRows, Direction::ToDevice, bytes);
    }

    /// Lets `abort` end the waits. The results of the step are then of no use.
    pub fn stop_on_abort(&self, abort: &Abort) {
        self.abort.get_or_init(|| abort.clone());
    }

    fn carry(&self, stream: Stream, direction: Direction, bytes: usize) {
        let began = Instant::now();
        self.path.wait(direction, bytes, began, &|| self.abort.get().is_some_and(Abort::is_aborted));
        self.path.transfers.add_bytes(stream, Tier::Host, bytes);
        self.path.transfers.add_stall(stream, began.elapsed());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_of_a_direction_take_turns_at_the_rate() {
        let (link, start) = (Link::new(1e6), Instant::now());
        let at = |millis| start + Duration::from_millis(millis);
        // Two at once, by two threads; one later, while the second is on its way; one after a pause.
        assert_eq!(link.end(Direction::ToDevice, 10_000, at(0)), at(10));
        assert_eq!(link.end(Direction::ToDevice, 5_000, at(0)), at(15));
        assert_eq!(link.end(Direction::FromDevice, 1_000, at(0)), at(1), "the other direction is free");
        assert_eq!(link.end(Direction::ToDevice, 1_000, at(12)), at(16));
        assert_eq!(link.end(Direction::ToDevice, 1_000, at(100)), at(101));
    }

    /// A device that is rebuilt does not wait for a slow link.
    #[test]
    fn a_wait_ends_when_it_is_stopped() {
        let link = Link::new(f64::MIN_POSITIVE);
        link.wait(Direction::ToDevice, usize::MAX, Instant::now(), &|| true);
    }
}
