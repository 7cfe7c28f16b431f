//! Plans for an opened model: its sizes, and the limits of its splits.
//!
//! Invariant: none of the model's weights is read.

use super::assignment::{self, DeviceAssignment};
use super::shape::ModelShape;
use super::split::{self, DeviceCapacity, PartitionError, ShardLimit};
use crate::config::{DeviceConfig, DeviceName};
use crate::model::partition::Partition;
use crate::model::shard::{self, Shard};
use crate::model::source::ModelSource;
use crate::model::spec::ModelSpec;
use mainstem_kernels::QuantType;

/// Returns the sizes of a model with a KV cache of the format `kv`.
pub fn shape(source: &ModelSource, kv: QuantType) -> ModelShape {
    ModelShape::from_spec(&source.name(), &source.spec, |piece| source.load_type(piece), kv)
}

/// Splits a model as configured by `config`. What the configuration leaves open is chosen by the speed and
/// memory of the devices.
pub fn partition(
    source: &ModelSource,
    config: &DeviceConfig,
    place: impl Fn(&DeviceName) -> DeviceCapacity,
) -> Result<Partition, PartitionError> {
    // The cache format does not affect the split, because the cache is split like the layers.
    split::partition(config, &shape(source, QuantType::F16), place, |shard| check_shard(source, shard))
}

/// Returns what each device holds, by stage and rank.
pub fn assignments(source: &ModelSource, partition: &Partition) -> Vec<Vec<DeviceAssignment>> {
    assignment::device_assignments(&source.spec, partition, |shard| query_heads(source, shard))
}

/// Checks that the shard's part of the model is possible.
pub fn check_shard(source: &ModelSource, shard: &Shard) -> Result<(), ShardLimit> {
    let why = match source.shard_spec(shard) {
        Ok(_) => return Ok(()),
        Err(why) => why,
    };
    Err(match why {
        shard::ShardError::TooManyRanks { most, reason, .. } => ShardLimit { reason, max_ranks: most },
        shard::ShardError::InvalidLayers(reason) => ShardLimit { reason, max_ranks: source.max_ranks(shard) },
        shard::ShardError::ZeroShare(rank) => {
            ShardLimit { reason: format!("the share of rank {rank} is 0"), max_ranks: shard.rank_count() }
        }
    })
}

/// Returns the number of query heads of the shard's first layer.
fn query_heads(source: &ModelSource, shard: &Shard) -> usize {
    let part = source.shard_spec(shard).ok();
    let first = part.iter().flat_map(ModelSpec::stacks).flat_map(|stack| &stack.layers).next();
    first.map_or(0, |layer| layer.attention.heads)
}
