//! From what is asked for to a partition: the layers of each stage, the share of each member; or why there is none.
//!
//! Invariant: a partition that comes from here can be loaded as it is, and so can the nearest one that a refusal names.

use super::balance::{Cost, Room, balanced};
use super::shape::{ModelShape, Part};
use crate::config::{DeviceConfig, DeviceName, Experts, Groups, spelled};
use crate::model::partition::{Member, Partition, Stage};
use crate::model::shard::{ExpertSplit, Shard};

/// What is known of a device before anything is on it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Place {
    /// Bytes of weights that it goes through in a second. Only how it compares with the others counts.
    pub speed: f64,
    /// Bytes that it has for weights; infinite where it has none of its own.
    pub memory: f64,
}

/// Why a shard cannot be made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unfit {
    /// In words that go on from "has 3 members, but".
    pub reason: String,
    /// Most members of a stage that there can be.
    pub members_max: usize,
}

/// Why a model cannot be divided as asked. Each names its key, and the nearest that is possible; where memory is too
/// small, there is none.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("device.groups: {asked} makes {stages} stages, but the model has {layers} {}; the nearest possible is {nearest}",
            if *.layers == 1 { "layer" } else { "layers" })]
    Stages { asked: String, stages: usize, layers: usize, nearest: String },
    #[error(
        "device.groups: stage {stage} of {asked} has {members} members, but {reason}; the nearest possible is {nearest}"
    )]
    Members { asked: String, stage: usize, members: usize, reason: String, nearest: String },
    #[error(
        "device.layers: {asked:?} makes {sum} layers, but the model has {layers}; the nearest possible is {nearest:?}"
    )]
    Layers { asked: Vec<usize>, sum: usize, layers: usize, nearest: Vec<usize> },
    #[error(
        "device.groups: no split of the model's {layers} layers into {asked} fits the memory of each device"
    )]
    Memory { asked: String, layers: usize },
}

/// Divides a model as `config` asks; what it leaves open goes by what the devices are. `fits` is asked of every shard.
pub fn partition(
    config: &DeviceConfig,
    model: &ModelShape,
    place: impl Fn(&DeviceName) -> Place,
    fits: impl Fn(&Shard) -> Result<(), Unfit>,
) -> Result<Partition, Refusal> {
    let divider = Divider { model, place: &place, fits: &fits };
    divider.partition(config).map_err(|obstacle| divider.refusal(config, obstacle))
}

/// What is in the way of a partition.
enum Obstacle {
    /// More stages than layers.
    Stages,
    /// Counts that make another number of layers.
    Layers,
    Memory,
    /// Members that a stage cannot have.
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

    /// The split whose slowest stage is fastest. A stage is as fast as its members together. An encoder's layers count as
    /// a decoder's do: while some sequences decode, the sources of others are read.
    fn by_speed(&self, config: &DeviceConfig) -> Option<Vec<usize>> {
        let units = self.model.units();
        let cost = |part: Part| Cost { work: part.bytes_read(1.0), bytes: part.stored };
        let mut costs: Vec<Cost> = units.iter().map(|unit| cost(unit.whole())).collect();
        if let ([_], Some(last)) = (&config.groups[..], costs.last_mut()) {
            last.bytes -= self.model.stored_twice(&(0..units.len()));
        }
        let room =
            |(stage, members): (usize, &Vec<DeviceName>)| room(members, &config.shares_of(stage), self.place);
        let rooms: Vec<Room> = config.groups.iter().enumerate().map(room).collect();
        balanced(&costs, &rooms)
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
                let nearest = nearest_sum(&asked, layers);
                Refusal::Layers { asked, sum, layers, nearest }
            }
            Obstacle::Memory => Refusal::Memory { asked, layers },
            Obstacle::Members { stage, unfit } => {
                let (members, nearest) = (config.groups[stage].len(), self.nearest(config));
                Refusal::Members { asked, stage: stage + 1, members, reason: unfit.reason, nearest }
            }
        }
    }

    /// The groups that are possible, in words: members that a stage cannot have go into stages of their own, as far as there
    /// are layers for those. Counts that are for the groups asked for are said to go.
    fn nearest(&self, config: &DeviceConfig) -> String {
        let mut groups = config.groups.clone();
        loop {
            match self.partition(&config.regrouped(&groups)) {
                Err(Obstacle::Stages) => groups.truncate(self.model.layers().max(1)),
                Err(Obstacle::Members { stage, unfit }) if groups[stage].len() > 1 => {
                    let parts = parted(&groups[stage], unfit.members_max);
                    groups.splice(stage..=stage, parts);
                }
                Ok(_) | Err(_) => return spelled(&groups) + &left_open(config),
            }
        }
    }
}

/// A stage's members in as many stages as it takes for no more than `most` each, two at least.
fn parted(members: &[DeviceName], most: usize) -> Groups {
    let stages = members.len().div_ceil(most.clamp(1, members.len() - 1));
    members.chunks(members.len().div_ceil(stages)).map(<[DeviceName]>::to_vec).collect()
}

/// What must be left to the program with other groups.
fn left_open(config: &DeviceConfig) -> String {
    let keys = [("device.layers", config.layers.is_empty()), ("device.shares", config.shares.is_empty())];
    let said = keys.iter().filter(|(_, is_open)| !is_open).map(|(key, _)| format!("{key} = []"));
    match said.collect::<Vec<_>>().join(" and ") {
        nothing if nothing.is_empty() => nothing,
        said => format!(", with {said}"),
    }
}

/// What a stage's members come to: all wait for the one that is slowest for its share, and the one whose memory is
/// smallest for its share bounds all.
fn room(stage: &[DeviceName], shares: &[u32], place: impl Fn(&DeviceName) -> Place) -> Room {
    let all: u32 = shares.iter().sum();
    let each = stage.iter().zip(shares).map(|(device, share)| {
        let (place, part) = (place(device), f64::from(*share) / f64::from(all));
        Room { speed: place.speed / part, memory: place.memory / part }
    });
    let nobody = Room { speed: f64::INFINITY, memory: f64::INFINITY };
    each.fold(nobody, |a, b| Room { speed: a.speed.min(b.speed), memory: a.memory.min(b.memory) })
}

/// The counts in the same proportions, as far as whole numbers from 1 go.
fn nearest_sum(asked: &[usize], layers: usize) -> Vec<usize> {
    let sum = asked.iter().sum::<usize>() as f64;
    let wanted = |count: usize| count as f64 * layers as f64 / sum;
    let mut counts: Vec<usize> = asked.iter().map(|count| (wanted(*count) as usize).max(1)).collect();
    let short = |counts: &[usize], stage: usize| wanted(asked[stage]) - counts[stage] as f64;
    let by_want = |counts: &[usize], a: usize, b: usize| short(counts, a).total_cmp(&short(counts, b));
    // Whoever is furthest below what it should have gets one more; whoever is furthest above, one less.
    while counts.iter().sum::<usize>() < layers {
        let stage =
            (0..counts.len()).rev().max_by(|a, b| by_want(&counts, *a, *b)).expect("there is a stage");
        counts[stage] += 1;
    }
    while counts.iter().sum::<usize>() > layers {
        let can_give = (0..counts.len()).filter(|stage| counts[*stage] > 1);
        let stage =
            can_give.min_by(|a, b| by_want(&counts, *a, *b)).expect("there are layers for all stages");
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
