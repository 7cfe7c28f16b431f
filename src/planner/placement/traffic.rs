//! The data that a step moves between the tiers: weights and caches that are not on a device come from the
//! memory of the host or from a disk, and the pages of caches that a step changes go back there.
//!
//! Invariant: what is on a device is never moved, and more of it there moves no more on any route.

use super::rates::DiskRates;
use mainstem_kernels::QuantType;

/// Number of routes.
pub const ROUTES: usize = 3;

/// A route that data takes. All data on one route shares its rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// From the host to a device with memory of its own.
    ToDevice,
    /// From such a device to the host.
    FromDevice,
    /// From and to the disk.
    Disk,
}

impl Route {
    /// All routes, in the order of their numbers.
    pub const ALL: [Route; ROUTES] = [Route::ToDevice, Route::FromDevice, Route::Disk];
}

/// The rates of what devices are connected to.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Links {
    /// Bytes per second between a device with memory of its own and the host, in each direction; infinite for
    /// devices that have the memory of the host.
    pub device: f64,
    /// The disk; `None` if nothing may be there.
    pub disk: Option<DiskRates>,
}

/// A movement of data between a device and the tiers below.
#[derive(Clone, Copy, Debug)]
enum Movement {
    LoadWeights,
    LoadCache,
    StoreCache,
}

/// Bytes of data in each tier.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ByTier {
    /// In the memory of devices, which may be that of the host.
    pub device: f64,
    /// In the memory of the host, for devices with memory of their own.
    pub host: f64,
    pub disk: f64,
}

impl ByTier {
    /// Returns the bytes in all tiers.
    pub fn total(&self) -> f64 {
        self.device + self.host + self.disk
    }

    /// Returns the bytes that are not on devices.
    pub fn below(&self) -> f64 {
        self.host + self.disk
    }

    /// Adds the bytes of another device.
    pub fn add(&mut self, other: ByTier) {
        self.device += other.device;
        self.host += other.host;
        self.disk += other.disk;
    }

    /// Returns the seconds on each route of a movement of what is not on the device.
    fn seconds(&self, links: &Links, movement: Movement) -> [f64; ROUTES] {
        let disk_rate = links.disk.map_or(0.0, |disk| match movement {
            Movement::LoadWeights => disk.read,
            Movement::LoadCache => disk.read.min(disk.pages),
            Movement::StoreCache => disk.write.min(disk.pages),
        });
        let seconds = |bytes: f64, rate: f64| if bytes > 0.0 { bytes / rate } else { 0.0 };
        let (link, disk) = (seconds(self.below(), links.device), seconds(self.disk, disk_rate));
        match movement {
            Movement::LoadWeights | Movement::LoadCache => [link, 0.0, disk],
            Movement::StoreCache => [0.0, link, disk],
        }
    }
}

/// The places of the data of a device's layers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StageData {
    /// Matrices.
    pub weights: ByTier,
    /// KV caches, without those of windowed layers, which all stay on the device.
    pub caches: ByTier,
    /// Positions that the caches have room for.
    pub positions: f64,
    /// Whether all experts of a mixture are moved in each step, rather than those that rows choose.
    pub whole_experts: bool,
}

/// The parts of a policy that affect the time of a device's steps.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct StepPolicy {
    /// Format of the KV cache.
    pub kv: QuantType,
    /// Positions of a page of the KV cache.
    pub page: f64,
    /// Seconds on each route of moving all matrices of the layers that are not on the device, those of all
    /// experts included.
    pub weights: [f64; ROUTES],
    /// Seconds on each route of moving K and V of a position to the device, and from it.
    pub load: [f64; ROUTES],
    pub store: [f64; ROUTES],
    /// See [`StageData::whole_experts`].
    pub whole_experts: bool,
}

impl StepPolicy {
    /// Creates the policy of a device whose data is in these places.
    pub fn new(data: &StageData, links: &Links, kv: QuantType, page: usize) -> StepPolicy {
        let per_position =
            |movement| data.caches.seconds(links, movement).map(|seconds| seconds / data.positions.max(1.0));
        StepPolicy {
            kv,
            page: page as f64,
            weights: data.weights.seconds(links, Movement::LoadWeights),
            load: per_position(Movement::LoadCache),
            store: per_position(Movement::StoreCache),
            whole_experts: data.whole_experts,
        }
    }
}
