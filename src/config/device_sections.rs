//! The sections of devices and their faults: structs of checked values.
//!
//! Invariant: this is plain data, as that of [`super::sections`].

use super::policy::PlacementPolicy;
use mainstem_kernels::ActivationPrecision;
use mainstem_kernels::cpu::Isa;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// Options of the devices.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceConfig {
    /// The stages, at least one, each with at least one device.
    pub groups: Groups,
    /// Layers per stage, encoder and decoder layers together; if empty, they are divided by speed, and by
    /// memory where devices have their own.
    pub layers: Vec<usize>,
    /// Relative share of its stage per rank, at least 1; if empty, all shares are equal.
    pub shares: Vec<Vec<u32>>,
    pub experts: ExpertPlacement,
    /// Maximum time of a step; `None` is unlimited.
    pub step_timeout: Option<Duration>,
    /// Compute threads per device; at least 1.
    pub threads: usize,
    pub isa: Isa,
    /// Activation precision in GEMMs with quantized or bf16 weights.
    pub activation_precision: ActivationPrecision,
    /// Bytes of each device's own memory; `None` if devices have that of the host.
    pub memory: Option<u64>,
    /// Bytes per second between a device's own memory and the host; `None` without a limit.
    pub link: Option<f64>,
    /// The NVRTC library, or a folder with it; `None` searches for it.
    pub nvrtc: Option<PathBuf>,
    pub kernel_cache: KernelCache,
}

impl DeviceConfig {
    /// Iterates over all devices, stage by stage, in rank order.
    pub fn devices(&self) -> impl Iterator<Item = &DeviceName> {
        self.groups.iter().flatten()
    }

    /// Returns the relative shares of a stage's ranks.
    pub fn stage_shares(&self, stage: usize) -> Vec<u32> {
        self.shares.get(stage).cloned().unwrap_or_else(|| vec![1; self.groups[stage].len()])
    }

    /// Returns this configuration with other groups and the automatic split of layers and shares.
    pub fn regrouped(&self, groups: &[Vec<DeviceName>]) -> DeviceConfig {
        DeviceConfig { groups: groups.to_vec(), layers: Vec::new(), shares: Vec::new(), ..self.clone() }
    }

    /// Whether layers and shares are the defaults.
    pub fn has_default_split(&self) -> bool {
        self.layers.is_empty() && self.shares.iter().flatten().all(|share| *share == 1)
    }
}

/// The memories and disks that hold a model's weights and KV caches.
#[derive(Clone, Debug, PartialEq)]
pub struct TierConfig {
    /// Memory of devices for the weights of layers, if they have their own.
    pub device: HostTier,
    /// Memory of the host for the weights of layers.
    pub host: HostTier,
    /// Memory of devices for the KV caches of layers.
    pub kv: HostTier,
    /// Memory of the host for other KV caches of layers, if devices have memory of their own.
    pub host_kv: HostTier,
    /// Whether attention on these is computed in the memory of the host.
    pub attends_on_host: bool,
    pub rule: TierRule,
    /// Tiers of weights by the names of their tensors. The first that matches counts.
    pub overrides: Vec<TierPattern>,
    /// Whether the experts of mixtures are in the memory of the host.
    pub cpu_moe: bool,
    /// Whether layers are read and written while others compute.
    pub overlap: bool,
    /// Folder for weights and KV caches that are on disk; `None` is the usual cache folder.
    pub disk_path: Option<PathBuf>,
    pub placement: Placement,
    /// The policy that set some keys, if one did.
    pub policy: Option<PlacementPolicy>,
    /// Bytes that a server takes beside its engine and the sequences that run, for sizes that follow from the
    /// memory; `None` for programs that serve nobody. No key sets it: the start does.
    pub reserved: Option<usize>,
}

/// The way in which the weights of each tier are spread over the layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TierRule {
    /// Evenly over all matrices.
    Even,
    /// FlexGen's rule within each attention block and each MLP.
    MidPoint,
}

/// A memory or disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TierName {
    Device,
    Host,
    Disk,
}

/// The tier of the weights whose names a valid regular expression matches anywhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TierPattern {
    pub pattern: String,
    pub tier: TierName,
}

/// The way to choose the number of sequences at once, and what stays in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placement {
    /// The configuration.
    Configured,
    /// The planner, at start, apart from what the configuration sets.
    Auto {
        /// Whether `scheduler.slots` is set.
        slots: bool,
        /// Whether `scheduler.token_budget` is set.
        token_budget: bool,
    },
}

/// Memory for the weights of a model's layers, or for their KV caches. Those that do not stay in it are read
/// from disk for each step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum HostTier {
    All,
    /// All of them if they fit, else as many as do.
    Auto,
    /// At most so many bytes, of all devices together.
    Bytes(u64),
    /// At most this fraction of their bytes, from 0 to 1.
    Fraction(f64),
}

/// A device's name, such as `cpu:0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceName {
    pub kind: DeviceKind,
    /// Index among the devices of this kind.
    pub number: u32,
}

impl fmt::Display for DeviceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.kind.name(), self.number)
    }
}

/// Pipeline stages, each with its devices in rank order.
pub type Groups = Vec<Vec<DeviceName>>;

/// Split of a mixture of experts over the ranks of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpertPlacement {
    /// Each rank has a part of every expert.
    Column,
    /// Each rank has some of the experts.
    Expert,
}

/// The folder of compiled kernels.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KernelCache {
    /// The usual one, in the cache folder of the user.
    Usual,
    Folder(PathBuf),
    /// Kernels are compiled at every start.
    Off,
}

/// Compute backend of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    Cpu,
    Reference,
    /// A GPU.
    Cuda,
    /// No arithmetic: a step takes `step` plus `row` for each of its rows.
    Fake {
        step: Duration,
        row: Duration,
    },
}

impl DeviceKind {
    /// The backend's name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            DeviceKind::Cpu => "cpu",
            DeviceKind::Reference => "reference",
            DeviceKind::Cuda => "cuda",
            DeviceKind::Fake { .. } => "fake",
        }
    }

    /// Whether the device computes on the cores of the host.
    pub fn is_host(self) -> bool {
        match self {
            DeviceKind::Cpu | DeviceKind::Reference => true,
            DeviceKind::Cuda | DeviceKind::Fake { .. } => false,
        }
    }

    /// Whether the device has memory that is no part of the host's.
    pub fn has_own_memory(self) -> bool {
        self == DeviceKind::Cuda
    }
}

/// Faults of devices; none, if faults are not enabled.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FaultPlan {
    /// Seed of the faults at random steps.
    pub seed: u64,
    pub rules: Vec<FaultRule>,
}

/// A fault of one device.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FaultRule {
    pub kind: FaultKind,
    pub device: DeviceName,
    pub when: FaultTime,
}

/// The fault that a device is made to have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// The step fails with an error.
    Fail,
    /// The device's thread panics.
    Panic,
    /// The device does nothing for longer than the timeout of steps.
    Hang(Duration),
    /// The step takes longer by this time.
    Slow(Duration),
    /// One row of the results is not finite.
    Nan,
}

impl FaultKind {
    /// The names of all kinds.
    pub const NAMES: [&str; 5] = ["fail", "panic", "hang", "slow", "nan"];

    /// Returns the name of the kind in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            FaultKind::Fail => "fail",
            FaultKind::Panic => "panic",
            FaultKind::Hang(_) => "hang",
            FaultKind::Slow(_) => "slow",
            FaultKind::Nan => "nan",
        }
    }
}

/// The steps of a device at which a fault happens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum FaultTime {
    /// Once, at a step: 1 is the first one of the device since the start.
    Step(u64),
    /// At each step with this probability, more than 0 and at most 1.
    Chance(f32),
}
