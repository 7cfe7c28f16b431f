//! An opened model as the planner sees it: its sizes, and where it can be cut.
//!
//! Invariant: none of its weights is touched.

use super::assignment::{self, Assigned};
use super::shape::ModelShape;
use super::split::{self, Place, Refusal, Unfit};
use crate::config::{DeviceConfig, DeviceName};
use crate::model::partition::Partition;
use crate::model::shard::{self, Shard};
use crate::model::source::ModelSource;
use crate::model::spec::ModelSpec;
use mainstem_kernels::QuantType;

/// Its sizes, with a cache of that type.
pub fn shape(source: &ModelSource, kv: QuantType) -> ModelShape {
    ModelShape::of_spec(&source.name(), &source.spec, |piece| source.loaded_as(piece), kv)
}

/// Divides it as `config` asks; what that leaves open goes by what the devices are.
pub fn partition(
    source: &ModelSource,
    config: &DeviceConfig,
    place: impl Fn(&DeviceName) -> Place,
) -> Result<Partition, Refusal> {
    // The cache is no matter of the split: it is divided as the layers are.
    split::partition(config, &shape(source, QuantType::F16), place, |shard| fits(source, shard))
}

/// What each device holds, stage by stage, by rank.
pub fn assigned(source: &ModelSource, partition: &Partition) -> Vec<Vec<Assigned>> {
    assignment::assignment(&source.spec, partition, |shard| heads(source, shard))
}

/// Whether the shard's part of the model can be made.
pub fn fits(source: &ModelSource, shard: &Shard) -> Result<(), Unfit> {
    let why = match source.part(shard) {
        Ok(_) => return Ok(()),
        Err(why) => why,
    };
    Err(match why {
        shard::Refusal::Members { most, reason, .. } => Unfit { reason, members_max: most },
        shard::Refusal::Layers(reason) => Unfit { reason, members_max: source.members_max(shard) },
        shard::Refusal::Share(rank) => {
            Unfit { reason: format!("the share of number {rank} is 0"), members_max: shard.members() }
        }
    })
}

/// Query heads of the shard's first layer.
fn heads(source: &ModelSource, shard: &Shard) -> usize {
    let part = source.part(shard).ok();
    let first = part.iter().flat_map(ModelSpec::stacks).flat_map(|stack| &stack.layers).next();
    first.map_or(0, |layer| layer.attention.heads)
}
