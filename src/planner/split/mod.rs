//! Computes a partition from a device configuration: the layers of each stage and the share of each rank, or
//! the reason why it is impossible.
//!
//! Invariant: a returned partition can be loaded as it is, and so can the nearest one that an error suggests.

use super::balance::balanced;
use super::shape::{ModelShape, Unit};
use crate::config::{DeviceConfig, DeviceName, Experts, Groups, spelled};
use crate::model::partition::{Member, Partition, Stage};
use crate::model::shard::{ExpertSplit, Shard};
use std::ops::Range;

/// Speed and free memory of a device before anything is loaded on it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Place {
    /// Bytes of weights processed per second. Only the ratio to other devices matters.
    pub speed: f64,
    /// Bytes available for weights; infinite if the device has no memory of its own.
    pub memory: f64,
}

/// The reason why a shard is impossible, and the limit it exceeds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfit {
    /// Text that continues "has 3 ranks, but".
    pub reason: String,
    /// Maximum number of ranks of the stage.
    pub members_max: usize,
}

/// Reasons why a model cannot be split as configured. Each message names its key and the nearest possible
/// value, if there is one; there is none if memory is insufficient.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("device.groups: {asked} makes {stages} stages, but the model has {layers} {}; {nearest}",
            if *.layers == 1 { "layer" } else { "layers" })]
    Stages { asked: String, stages: usize, layers: usize, nearest: String },
    #[error("device.groups: stage {stage} of {asked} has {members} ranks, but {reason}; {nearest}")]
    Members { asked: String, stage: usize, members: usize, reason: String, nearest: String },
    #[error("device.layers: {asked:?} adds up to {sum} layers, but the model has {layers}; {nearest}")]
    Layers { asked: Vec<usize>, sum: usize, layers: usize, nearest: String },
    #[error(
        "device.groups: no split of the model's {layers} layers into {asked} fits the memory of each device"
    )]
    Memory { asked: String, layers: usize },
}

/// Splits a model as configured by `config`. What the configuration leaves open is chosen by the speed and
/// memory of the devices. `fits` checks every shard.
pub fn partition(
    config: &DeviceConfig,
    model: &ModelShape,
    place: impl Fn(&DeviceName) -> Place,
    fits: impl Fn(&Shard) -> Result<(), Unfit>,
) -> Result<Partition, Refusal> {
    let divider = Divider { model, place: &place, fits: &fits };
    divider.partition(config).map_err(|obstacle| divider.refusal(config, obstacle))
}

/// The reason why a partition is impossible.
enum Obstacle {
    /// More stages than layers.
    Stages,
    /// Layer counts that do not add up to the number of layers.
    Layers,
    Memory,
    /// More ranks than a stage can have.
    Members {
        stage: usize,
        unfit: Unfit,
    },
}

struct Divider<'a> {
    model: &'a ModelShape,
    place: &'a dyn Fn(&DeviceName) -> Place,
    fits: &'a dyn Fn(&Shard) -> Result<(), Unfit>,
}

impl Divider<'_> {
    fn partition(&self, config: &DeviceConfig) -> Result<Partition, Obstacle> {
        let layers = self.model.layers();
        if config.groups.len() > layers {
            return Err(Obstacle::Stages);
        }
        let counts = match &config.layers[..] {
            [] => self.by_speed(config).ok_or(Obstacle::Memory)?,
            asked if asked.iter().sum::<usize>() == layers => asked.to_vec(),
            _ => return Err(Obstacle::Layers),
        };
        let partition = assigned(config, self.model, &counts);
        for (stage, shards) in partition.shards().iter().enumerate() {
            for shard in shards {
                (self.fits)(shard).map_err(|unfit| Obstacle::Members { stage, unfit })?;
            }
        }
        Ok(partition)
    }

    /// Returns the layer counts for which the slowest stage is fastest. A stage is as fast as its slowest
    /// rank and has at most what each rank can hold. Encoder layers count like decoder layers, because inputs
    /// of new sequences are encoded while others decode.
    fn by_speed(&self, config: &DeviceConfig) -> Option<Vec<usize>> {
        let units = self.model.units();
        let bearers = |(stage, devices): (usize, &Vec<DeviceName>)| {
            let places: Vec<Place> = devices.iter().map(self.place).collect();
            Bearer::by_rank(&places, &config.shares_of(stage), &units)
        };
        let stages: Vec<Vec<Bearer>> = config.groups.iter().enumerate().map(bearers).collect();
        balanced(units.len(), stages.len(), |stage, layers| {
            let twice = self.model.stored_twice(&layers);
            let each = stages[stage].iter().map(|bearer| bearer.time(&layers, twice));
            each.fold(0.0, f64::max)
        })
    }

    fn refusal(&self, config: &DeviceConfig, obstacle: Obstacle) -> Refusal {
        let (asked, layers) = (spelled(&config.groups), self.model.layers());
        match obstacle {
            Obstacle::Stages => {
                let (stages, nearest) = (config.groups.len(), self.nearest(config));
                Refusal::Stages { asked, stages, layers, nearest }
            }
            Obstacle::Layers => {
                let (asked, sum) = (config.layers.clone(), config.layers.iter().sum());
                let nearest = self.nearest_counts(config);
                Refusal::Layers { asked, sum, layers, nearest }
            }
            Obstacle::Memory => Refusal::Memory { asked, layers },
            Obstacle::Members { stage, unfit } => {
                let (members, nearest) = (config.groups[stage].len(), self.nearest(config));
                Refusal::Members { asked, stage: stage + 1, members, reason: unfit.reason, nearest }
            }
        }
    }

    /// Describes the nearest possible layer counts; if there are none near the configured ones, the nearest
    /// groups.
    fn nearest_counts(&self, config: &DeviceConfig) -> String {
        let layers = nearest_sum(&config.layers, self.model.layers());
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
                Err(Obstacle::Stages) => groups.truncate(self.model.layers().max(1)),
                Err(Obstacle::Members { stage, unfit }) if groups[stage].len() > 1 => {
                    let parts = parted(&groups[stage], unfit.members_max);
                    groups.splice(stage..=stage, parts);
                }
                Ok(_) => {
                    return format!("the nearest possible is {}{}", spelled(&groups), left_open(config));
                }
                Err(_) => return "there is no similar split that is possible".to_owned(),
            }
        }
    }
}

/// Splits the ranks of a stage into as few stages as possible, at least two, with at most `most` ranks each.
fn parted(members: &[DeviceName], most: usize) -> Groups {
    let stages = members.len().div_ceil(most.clamp(1, members.len() - 1));
    members.chunks(members.len().div_ceil(stages)).map(<[DeviceName]>::to_vec).collect()
}

/// Returns the text that names the keys to reset if the groups change.
fn left_open(config: &DeviceConfig) -> String {
    let keys = [("device.layers", config.layers.is_empty()), ("device.shares", config.shares.is_empty())];
    let reset = keys.iter().filter(|(_, is_open)| !is_open).map(|(key, _)| format!("{key} = []"));
    match reset.collect::<Vec<_>>().join(" and ") {
        nothing if nothing.is_empty() => nothing,
        reset => format!(", with {reset}"),
    }
}

/// The load of one rank of a stage, for any range of layers.
struct Bearer {
    place: Place,
    /// The rank's fraction of everything that is split by shares.
    part: f64,
    /// Cumulative sums over the first n layers: bytes that the rank reads in a step, and bytes that it
    /// stores.
    read: Vec<f64>,
    stored: Vec<f64>,
}

impl Bearer {
    fn by_rank(places: &[Place], shares: &[u32], units: &[Unit]) -> Vec<Bearer> {
        let all = f64::from(shares.iter().sum::<u32>());
        let nothing = |(place, share): (&Place, &u32)| Bearer {
            place: *place,
            part: f64::from(*share) / all,
            read: vec![0.0],
            stored: vec![0.0],
        };
        let mut bearers: Vec<Bearer> = places.iter().zip(shares).map(nothing).collect();
        for (before, unit) in units.iter().enumerate() {
            for (bearer, part) in bearers.iter_mut().zip(unit.of_members(shares)) {
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
        let stored = of(&self.stored) - twice * self.part;
        if stored > self.place.memory { f64::INFINITY } else { of(&self.read) / self.place.speed }
    }
}

/// Scales layer counts to a sum of `layers`, keeping their proportions as well as whole numbers of at least 1
/// allow.
fn nearest_sum(asked: &[usize], layers: usize) -> Vec<usize> {
    let sum = asked.iter().sum::<usize>() as f64;
    let wanted = |count: usize| count as f64 * layers as f64 / sum;
    let mut counts: Vec<usize> = asked.iter().map(|count| (wanted(*count) as usize).max(1)).collect();
    let short = |counts: &[usize], stage: usize| wanted(asked[stage]) - counts[stage] as f64;
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

fn assigned(config: &DeviceConfig, model: &ModelShape, counts: &[usize]) -> Partition {
    let encoder = model.encoder_layers();
    let mut start = 0;
    let stage = |(stage, devices): (usize, &Vec<DeviceName>)| {
        let end = start + counts[stage];
        let layers = std::mem::replace(&mut start, end)..end;
        let member = |(device, share): (&DeviceName, u32)| Member { device: device.to_string(), share };
        Stage {
            encoder: layers.start.min(encoder)..layers.end.min(encoder),
            decoder: layers.start.max(encoder) - encoder..layers.end.max(encoder) - encoder,
            members: devices.iter().zip(config.shares_of(stage)).map(member).collect(),
        }
    };
    let stages = config.groups.iter().enumerate().map(stage).collect();
    let experts = match config.experts {
        Experts::Column => ExpertSplit::Column,
        Experts::Expert => ExpertSplit::Expert,
    };
    Partition { stages, experts }
}

#[cfg(test)]
mod tests;
