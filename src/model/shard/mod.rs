//! Shards: the part of a model that one device holds.
//!
//! Sharding is a transformation of the specification: [`shard_spec`] derives the specification of a rank's
//! part, with fewer layers and heads, narrower MLPs, fewer experts, and fewer rows of the vocabulary.
//! Loading, accounting and computation follow that specification.
//!
//! Invariant: the heads, MLP columns, experts and vocabulary rows of a rank are derived here from its shard
//! and nowhere else. All ranks of a stage compute the same division independently.

mod rank_limits;

mod transform;

mod heads;

#[cfg(test)]
mod tests;

pub use heads::{HeadSplit, RankHeads};
pub use rank_limits::max_ranks;
pub use transform::shard_spec;

use super::spec::{ModelSpec, StackSpec, TensorSlice};
use mainstem_kernels::QuantType;
use std::ops::Range;

/// A range of layers, and one rank's share of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Encoder layers of the stage.
    pub encoder: Range<usize>,
    /// Decoder layers of the stage.
    pub decoder: Range<usize>,
    /// Rank of this device within the stage.
    pub rank: usize,
    /// Proportional shares of all ranks of the stage.
    pub shares: Vec<u32>,
    pub experts: ExpertSplit,
}

/// The split of a mixture of experts over the ranks of a stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExpertSplit {
    /// Each rank has some columns of every expert, so that all ranks have work whatever experts a token
    /// chooses. Experts that are too narrow are distributed as a whole.
    #[default]
    Column,
    /// Each rank has some of the experts.
    Expert,
}

/// Returns the number format of a slice, whose blocks must not be split.
pub type TypeLookup<'a> = &'a dyn Fn(&TensorSlice) -> QuantType;

/// Reasons why a model cannot be split as requested.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShardError {
    /// More ranks than a part of the stage can be split into.
    #[error("a stage cannot have {ranks} ranks: {reason}, so at most {most} can share it")]
    TooManyRanks { ranks: usize, most: usize, reason: String },
    /// Layers that the model does not have, or that are out of order.
    #[error("{0}")]
    InvalidLayers(String),
    /// A rank with a share of 0.
    #[error("the share of rank {0} of a stage is 0")]
    ZeroShare(usize),
}

/// The tasks of a rank in addition to running its layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StageRole {
    /// Whether this rank returns the output of the model: the first rank of the last stage does.
    pub returns_output: bool,
    /// Whether the stage has the encoder's last layer, and so its final norm and head.
    pub ends_encoder: bool,
    /// Whether the stage has the decoder's last layer.
    pub ends_decoder: bool,
    /// Whether a later stage reads the encoder rows of this one.
    pub forwards_encoder_output: bool,
}

impl Shard {
    /// Returns the shard that is the whole model on one device.
    pub fn whole(spec: &ModelSpec) -> Shard {
        Shard {
            encoder: 0..layer_count(spec.encoder.as_ref()),
            decoder: 0..layer_count(spec.decoder.as_ref()),
            rank: 0,
            shares: vec![1],
            experts: ExpertSplit::Column,
        }
    }

    /// Returns the number of ranks of the stage.
    pub fn rank_count(&self) -> usize {
        self.shares.len()
    }

    /// Returns this rank's range of `units` items; see [`Shard::ranges`].
    pub fn range(&self, units: usize, granule: usize) -> Range<usize> {
        self.ranges(units, granule).swap_remove(self.rank)
    }

    /// Splits `units` items, which can only be split at multiples of `granule`, into consecutive ranges by
    /// rank. Ranges are proportional to the shares, rounded by the largest remainder method. Each rank gets
    /// something if there is enough.
    pub fn ranges(&self, units: usize, granule: usize) -> Vec<Range<usize>> {
        split_by_shares(units, granule, &self.shares)
    }
}

impl StageRole {
    /// Returns the role of a shard of the model `whole`.
    pub fn for_shard(whole: &ModelSpec, shard: &Shard) -> StageRole {
        let ends =
            |own: &Range<usize>, stack: Option<&StackSpec>| !own.is_empty() && own.end == layer_count(stack);
        let ends_encoder = ends(&shard.encoder, whole.encoder.as_ref());
        let ends_decoder = ends(&shard.decoder, whole.decoder.as_ref());
        let is_last = if whole.decoder.is_some() { ends_decoder } else { ends_encoder };
        StageRole {
            returns_output: is_last && shard.rank == 0,
            ends_encoder,
            ends_decoder,
            forwards_encoder_output: whole.encoder.is_some() && !is_last,
        }
    }
}

fn layer_count(stack: Option<&StackSpec>) -> usize {
    stack.map_or(0, |stack| stack.layers.len())
}

/// Splits `units` items by shares into consecutive ranges that begin at multiples of `granule`.
fn split_by_shares(units: usize, granule: usize, shares: &[u32]) -> Vec<Range<usize>> {
    let counts = apportion(units.div_ceil(granule), shares);
    let mut end = 0;
    let ranges = counts.into_iter().map(|count| {
        let start = end;
        end += count;
        (start * granule).min(units)..(end * granule).min(units)
    });
    ranges.collect()
}

/// Apportions `things` items by shares with the largest remainder method. Then each share without an item
/// gets one from the largest counts, if there are enough items.
fn apportion(things: usize, shares: &[u32]) -> Vec<usize> {
    let total = shares.iter().map(|share| u128::from(*share)).sum::<u128>().max(1);
    let exact = |share: u32| things as u128 * u128::from(share);
    let mut counts: Vec<usize> = shares.iter().map(|share| (exact(*share) / total) as usize).collect();
    let mut by_remainder: Vec<usize> = (0..shares.len()).collect();
    // The sort is stable: of equal remainders, that of the lower rank comes first.
    by_remainder.sort_by_key(|rank| std::cmp::Reverse(exact(shares[*rank]) % total));
    let left = things - counts.iter().sum::<usize>();
    by_remainder.into_iter().take(left).for_each(|rank| counts[rank] += 1);
    while things >= shares.len()
        && let Some(poor) = counts.iter().position(|count| *count == 0)
    {
        let rich = (0..counts.len()).max_by_key(|rank| counts[*rank]).expect("a stage has ranks");
        counts[rich] -= 1;
        counts[poor] += 1;
    }
    counts
}

/// Returns the least common multiple.
fn lcm(a: usize, b: usize) -> usize {
    let gcd = |mut a: usize, mut b: usize| {
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    a / gcd(a, b) * b
}
