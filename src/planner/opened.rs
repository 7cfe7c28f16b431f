//! Plans for an opened model: its sizes, and the limits of its splits.
//!
//! Invariant: none of the model's weights is read.

use super::assignment::{self, Assigned};
use super::shape::ModelShape;
use super::split::{self, Place, Refusal, Unfit};
use crate::config::{DeviceConfig, DeviceName};
use crate::model::partition::Partition;
use crate::model::shard::{self, Shard};
use crate::model::source::ModelSource;
use crate::model::spec::ModelSpec;
use mainstem_kernels::QuantType;

/// Returns the sizes of a model with a KV cache of the format `kv`.
pub fn shape(source: &ModelSource, kv: QuantType) -> ModelShape {
    ModelShape::of_spec(&source.name(), &source.spec, |piece| source.loaded_as(piece), kv)
}

/// Splits a model as configured by `config`. What the configuration leaves open is chosen by the speed and
/// memory of the devices.
pub fn partition(
    source: &ModelSource,
    config: &DeviceConfig,
    place: impl Fn(&DeviceName) -> Place,
) -> Result<Partition, Refusal> {
    // The cache format does not affect the split, because the cache is split like the layers.
    split::partition(config, &shape(source, QuantType::F16), place, |shard| fits(source, shard))
}

/// Returns what each device holds, by stage and rank.
pub fn assigned(source: &ModelSource, partition: &Partition) -> Vec<Vec<Assigned>> {
    assignment::assignment(&source.spec, partition, |shard| heads(source, shard))
}

/// Checks that the shard's part of the model is possible.
pub fn fits(source: &ModelSource, shard: &Shard) -> Result<(), Unfit> {
    let why = match source.part(shard) {
        Ok(_) => return Ok(()),
        Err(why) => why,
    };
    Err(match why {
        shard::Refusal::Members { most, reason, .. } => Unfit { reason, members_max: most },
        shard::Refusal::Layers(reason) => Unfit { reason, members_max: source.members_max(shard) },
        shard::Refusal::Share(rank) => {
            Unfit { reason: format!("the share of rank {rank} is 0"), members_max: shard.members() }
        }
    })
}

/// Returns the number of query heads of the shard's first layer.
fn heads(source: &ModelSource, shard: &Shard) -> usize {
    let part = source.part(shard).ok();
    let first = part.iter().flat_map(ModelSpec::stacks).flat_map(|stack| &stack.layers).next();
    first.map_or(0, |layer| layer.attention.heads)
}
