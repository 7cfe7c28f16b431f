//! Computes a partition from a device configuration: the layers of each stage and the share of each rank, or
//! the reason why it is impossible.
//!
//! Invariant: a returned partition can be loaded as it is, and so can the nearest one that an error suggests.

use super::balance::balance_layers;
use super::shape::{LayerCost, ModelShape};
use crate::config::{DeviceConfig, DeviceName, ExpertPlacement, Groups, format_groups};
use crate::model::partition::{Partition, Stage, StageRank};
use crate::model::shard::{ExpertSplit, Shard};
use std::ops::Range;

/// Speed and free memory of a device before anything is loaded on it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeviceCapacity {
    /// Bytes of weights processed per second. Only the ratio to other devices matters.
    pub speed: f64,
    /// Bytes available for weights; infinite if the device has no memory of its own.
    pub memory: f64,
}

/// The reason why a shard is impossible, and the limit it exceeds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardLimit {
    /// Text that continues "has 3 ranks, but".
    pub reason: String,
    /// Maximum number of ranks of the stage.
    pub max_ranks: usize,
}

/// Reasons why a model cannot be split as configured. Each message names its key and the nearest possible
/// value, if there is one; there is none if memory is insufficient.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PartitionError {
    #[error("device.groups: {requested} makes {stages} stages, but the model has {layers} {}; {nearest}",
            if *.layers == 1 { "layer" } else { "layers" })]
    TooManyStages { requested: String, stages: usize, layers: usize, nearest: String },
    #[error("device.groups: stage {stage} of {requested} has {ranks} ranks, but {reason}; {nearest}")]
    TooManyRanks { requested: String, stage: usize, ranks: usize, reason: String, nearest: String },
    #[error("device.layers: {requested:?} adds up to {sum} layers, but the model has {layers}; {nearest}")]
    WrongLayerSum { requested: Vec<usize>, sum: usize, layers: usize, nearest: String },
    #[error(
        "device.groups: no split of the model's {layers} layers into {requested} fits the memory of each \
         device"
    )]
    InsufficientMemory { requested: String, layers: usize },
}

/// Splits a model as configured by `config`. What the configuration leaves open is chosen by the speed and
/// memory of the devices. `fits` checks every shard.
pub fn partition(
    config: &DeviceConfig,
    model: &ModelShape,
    place: impl Fn(&DeviceName) -> DeviceCapacity,
    fits: impl Fn(&Shard) -> Result<(), ShardLimit>,
) -> Result<Partition, PartitionError> {
    let divider = Partitioner { model, capacity: &place, fits: &fits };
    divider.partition(config).map_err(|obstacle| divider.error(config, obstacle))
}

/// The reason why a partition is impossible.
enum Conflict {
    /// More stages than layers.
    Stages,
    /// Layer counts that do not add up to the number of layers.
    Layers,
    Memory,
    /// More ranks than a stage can have.
    Ranks {
        stage: usize,
        limit: ShardLimit,
    },
}

struct Partitioner<'a> {
    model: &'a ModelShape,
    capacity: &'a dyn Fn(&DeviceName) -> DeviceCapacity,
    fits: &'a dyn Fn(&Shard) -> Result<(), ShardLimit>,
}

impl Partitioner<'_> {
    fn partition(&self, config: &DeviceConfig) -> Result<Partition, Conflict> {
        let layers = self.model.layers();
        if config.groups.len() > layers {
            return Err(Conflict::Stages);
        }
        let counts = match &config.layers[..] {
            [] => self.balanced_counts(config).ok_or(Conflict::Memory)?,
            requested if requested.iter().sum::<usize>() == layers => requested.to_vec(),
            _ => return Err(Conflict::Layers),
        };
        let partition = build_partition(config, self.model, &counts);
        for (stage, shards) in partition.shards().iter().enumerate() {
            for shard in shards {
                (self.fits)(shard).map_err(|unfit| Conflict::Ranks { stage, limit: unfit })?;
            }
        }
        Ok(partition)
    }

    /// Returns the layer counts for which the slowest stage is fastest. A stage is as fast as its slowest
    /// rank and has at most what each rank can hold. Encoder layers count like decoder layers, because inputs
    /// of new sequences are encoded while others decode.
    fn balanced_counts(&self, config: &DeviceConfig) -> Option<Vec<usize>> {
        let units = self.model.layer_costs();
        let bearers = |(stage, devices): (usize, &Vec<DeviceName>)| {
            let places: Vec<DeviceCapacity> = devices.iter().map(self.capacity).collect();
            RankLoad::by_rank(&places, &config.stage_shares(stage), &units)
        };
        let stages: Vec<Vec<RankLoad>> = config.groups.iter().enumerate().map(bearers).collect();
        balance_layers(units.len(), stages.len(), |stage, layers| {
            let twice = self.model.duplicate_bytes(&layers);
            let each = stages[stage].iter().map(|bearer| bearer.time(&layers, twice));
            each.fold(0.0, f64::max)
        })
    }

    fn error(&self, config: &DeviceConfig, obstacle: Conflict) -> PartitionError {
        let (requested, layers) = (format_groups(&config.groups), self.model.layers());
        match obstacle {
            Conflict::Stages => {
                let (stages, nearest) = (config.groups.len(), self.nearest(config));
                PartitionError::TooManyStages { requested, stages, layers, nearest }
            }
            Conflict::Layers => {
                let (requested, sum) = (config.layers.clone(), config.layers.iter().sum());
                let nearest = self.nearest_counts(config);
                PartitionError::WrongLayerSum { requested, sum, layers, nearest }
            }
            Conflict::Memory => PartitionError::InsufficientMemory { requested, layers },
            Conflict::Ranks { stage, limit: unfit } => {
                let (ranks, nearest) = (config.groups[stage].len(), self.nearest(config));
                PartitionError::TooManyRanks {
                    requested,
                    stage: stage + 1,
                    ranks,
                    reason: unfit.reason,
                    nearest,
                }
            }
        }
    }

    /// Describes the nearest possible layer counts; if there are none near the configured ones, the nearest
    /// groups.
    fn nearest_counts(&self, config: &DeviceConfig) -> String {
        let layers = rescale_counts(&config.layers, self.model.layers());
        match self.partition(&DeviceConfig { layers: layers.clone(), ..config.clone() }) {
            Ok(_) => format!("the nearest possible is {layers:?}"),
            Err(_) => self.nearest(config),
        }
    }

    /// Describes the nearest possible groups: ranks beyond a stage's limit move into stages of their own, as
    /// far as there are layers for these. Also names the keys that must be reset because they belong to the
    /// configured groups.
    fn nearest(&self, config: &DeviceConfig) -> String {
        let mut groups = config.groups.clone();
        loop {
            match self.partition(&config.regrouped(&groups)) {
                Err(Conflict::Stages) => groups.truncate(self.model.layers().max(1)),
                Err(Conflict::Ranks { stage, limit: unfit }) if groups[stage].len() > 1 => {
                    let parts = split_stage(&groups[stage], unfit.max_ranks);
                    groups.splice(stage..=stage, parts);
                }
                Ok(_) => {
                    return format!(
                        "the nearest possible is {}{}",
                        format_groups(&groups),
                        keys_to_reset(config)
                    );
                }
                Err(_) => return "there is no similar split that is possible".to_owned(),
            }
        }
    }
}

/// Splits the ranks of a stage into as few stages as possible, at least two, with at most `most` ranks each.
fn split_stage(ranks: &[DeviceName], most: usize) -> Groups {
    let stages = ranks.len().div_ceil(most.clamp(1, ranks.len() - 1));
    ranks.chunks(ranks.len().div_ceil(stages)).map(<[DeviceName]>::to_vec).collect()
}

/// Returns the text that names the keys to reset if the groups change.
fn keys_to_reset(config: &DeviceConfig) -> String {
    let keys = [("device.layers", config.layers.is_empty()), ("device.shares", config.shares.is_empty())];
    let reset = keys.iter().filter(|(_, is_open)| !is_open).map(|(key, _)| format!("{key} = []"));
    match reset.collect::<Vec<_>>().join(" and ") {
        nothing if nothing.is_empty() => nothing,
        reset => format!(", with {reset}"),
    }
}

/// The load of one rank of a stage, for any range of layers.
struct RankLoad {
    capacity: DeviceCapacity,
    /// The rank's fraction of everything that is split by shares.
    fraction: f64,
    /// Cumulative sums over the first n layers: bytes that the rank reads in a step, and bytes that it
    /// stores.
    read: Vec<f64>,
    stored: Vec<f64>,
}

impl RankLoad {
    fn by_rank(places: &[DeviceCapacity], shares: &[u32], units: &[LayerCost]) -> Vec<RankLoad> {
        let all = f64::from(shares.iter().sum::<u32>());
        let nothing = |(place, share): (&DeviceCapacity, &u32)| RankLoad {
            capacity: *place,
            fraction: f64::from(*share) / all,
            read: vec![0.0],
            stored: vec![0.0],
        };
        let mut bearers: Vec<RankLoad> = places.iter().zip(shares).map(nothing).collect();
        for (before, unit) in units.iter().enumerate() {
            for (bearer, part) in bearers.iter_mut().zip(unit.by_rank(shares)) {
                bearer.read.push(bearer.read[before] + part.bytes_read(1.0));
                bearer.stored.push(bearer.stored[before] + part.stored);
            }
        }
        bearers
    }

    /// Returns the relative time of a step through these layers, infinite if they do not fit into memory.
    /// `twice` is the number of bytes that are counted twice but held once.
    fn time(&self, layers: &Range<usize>, twice: f64) -> f64 {
        let of = |first: &[f64]| first[layers.end] - first[layers.start];
        let stored = of(&self.stored) - twice * self.fraction;
        if stored > self.capacity.memory { f64::INFINITY } else { of(&self.read) / self.capacity.speed }
    }
}

/// Scales layer counts to a sum of `layers`, keeping their proportions as well as whole numbers of at least 1
/// allow.
fn rescale_counts(requested: &[usize], layers: usize) -> Vec<usize> {
    let sum = requested.iter().sum::<usize>() as f64;
    let wanted = |count: usize| count as f64 * layers as f64 / sum;
    let mut counts: Vec<usize> = requested.iter().map(|count| (wanted(*count) as usize).max(1)).collect();
    let short = |counts: &[usize], stage: usize| wanted(requested[stage]) - counts[stage] as f64;
    let by_want = |counts: &[usize], a: usize, b: usize| short(counts, a).total_cmp(&short(counts, b));
    // The stage furthest below its target gets a layer; the stage furthest above loses one.
    while counts.iter().sum::<usize>() < layers {
        let stage =
            (0..counts.len()).rev().max_by(|a, b| by_want(&counts, *a, *b)).expect("there is a stage");
        counts[stage] += 1;
    }
    while counts.iter().sum::<usize>() > layers {
        let can_give = (0..counts.len()).filter(|stage| counts[*stage] > 1);
        let stage = can_give
            .min_by(|a, b| by_want(&counts, *a, *b))
            .expect("there are at least as many layers as stages");
        counts[stage] -= 1;
    }
    counts
}

fn build_partition(config: &DeviceConfig, model: &ModelShape, counts: &[usize]) -> Partition {
    let encoder = model.encoder_layers();
    let mut start = 0;
    let stage = |(stage, devices): (usize, &Vec<DeviceName>)| {
        let end = start + counts[stage];
        let layers = std::mem::replace(&mut start, end)..end;
        let rank = |(device, share): (&DeviceName, u32)| StageRank { device: device.to_string(), share };
        Stage {
            encoder: layers.start.min(encoder)..layers.end.min(encoder),
            decoder: layers.start.max(encoder) - encoder..layers.end.max(encoder) - encoder,
            ranks: devices.iter().zip(config.stage_shares(stage)).map(rank).collect(),
        }
    };
    let stages = config.groups.iter().enumerate().map(stage).collect();
    let experts = match config.experts {
        ExpertPlacement::Column => ExpertSplit::Column,
        ExpertPlacement::Expert => ExpertSplit::Expert,
    };
    Partition { stages, experts }
}

#[cfg(test)]
mod tests;
