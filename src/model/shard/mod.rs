//! The part of a model that one device holds.
//!
//! Sharding is a transformation of the specification: [`cut`] makes of a model's the one of a member's part, with fewer
//! layers and heads, narrower networks, fewer experts, fewer rows of the vocabulary. Whatever loads, counts or computes
//! follows that one.
//!
//! Invariant: heads, MLP columns, experts and vocabulary rows of a member derive from its shard here and nowhere else; members
//! of a stage, each by itself, come to the same division.

mod bounds;

mod cut;

mod heads;

#[cfg(test)]
mod tests;

pub use bounds::members_max;
pub use cut::cut;
pub use heads::{Deal, Heads};

use super::spec::{ModelSpec, Piece, StackSpec};
use mainstem_kernels::QuantType;
use std::ops::Range;

/// Some layers, and one member's share of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// The encoder's layers that the stage holds.
    pub encoder: Range<usize>,
    /// The decoder's.
    pub decoder: Range<usize>,
    /// This device's place within the stage.
    pub rank: usize,
    /// How much each member of the stage takes, in proportion; by rank.
    pub shares: Vec<u32>,
    pub experts: ExpertSplit,
}

/// How the members of a stage share a mixture of experts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExpertSplit {
    /// Each has a part of every expert, so that all have work whatever a token chooses; experts are dealt out where
    /// they are too narrow to be cut.
    #[default]
    Column,
    /// Each has some of the experts.
    Expert,
}

/// How the numbers of a tensor are stored: blocks are not cut.
pub type Types<'a> = &'a dyn Fn(&Piece) -> QuantType;

/// Why a model cannot be shared like that.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// More members than something of the stage can be shared by.
    #[error("{members} members are too many for a stage: {reason}, so at most {most} can share it")]
    Members { members: usize, most: usize, reason: String },
    /// Layers that the model does not have, or not in that order.
    #[error("{0}")]
    Layers(String),
    /// A member that takes nothing.
    #[error("the share of member {0} of a stage is 0")]
    Share(usize),
}

/// What a member does beside its layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seams {
    /// What the whole model gives is given here: by the first member of the last stage.
    pub answers: bool,
    /// The encoder's last layer is here, and so is what comes behind it.
    pub ends_encoder: bool,
    /// The decoder's last layer is.
    pub ends_decoder: bool,
    /// A stage ahead reads what this one has of the encoder's rows.
    pub hands_on_source: bool,
}

impl Shard {
    /// The whole model on one device.
    pub fn whole(spec: &ModelSpec) -> Shard {
        Shard {
            encoder: 0..layers(spec.encoder.as_ref()),
            decoder: 0..layers(spec.decoder.as_ref()),
            rank: 0,
            shares: vec![1],
            experts: ExpertSplit::Column,
        }
    }

    /// Devices in the stage.
    pub fn members(&self) -> usize {
        self.shares.len()
    }

    /// This member's share of `units` things; see [`Shard::ranges`].
    pub fn share(&self, units: usize, granule: usize) -> Range<usize> {
        self.ranges(units, granule).swap_remove(self.rank)
    }

    /// All members' shares of `units` things that can only be handed out in multiples of `granule`: consecutive ranges by
    /// rank, as the shares say and rounded by the largest remainders. Each has something, if there is enough.
    pub fn ranges(&self, units: usize, granule: usize) -> Vec<Range<usize>> {
        divided(units, granule, &self.shares)
    }
}

impl Seams {
    /// Those of a member's part of `whole`.
    pub fn of(whole: &ModelSpec, shard: &Shard) -> Seams {
        let ends =
            |own: &Range<usize>, stack: Option<&StackSpec>| !own.is_empty() && own.end == layers(stack);
        let ends_encoder = ends(&shard.encoder, whole.encoder.as_ref());
        let ends_decoder = ends(&shard.decoder, whole.decoder.as_ref());
        let is_last = if whole.decoder.is_some() { ends_decoder } else { ends_encoder };
        Seams {
            answers: is_last && shard.rank == 0,
            ends_encoder,
            ends_decoder,
            hands_on_source: whole.encoder.is_some() && !is_last,
        }
    }
}

fn layers(stack: Option<&StackSpec>) -> usize {
    stack.map_or(0, |stack| stack.layers.len())
}

/// `units` things by shares: consecutive ranges that begin at multiples of `granule`.
fn divided(units: usize, granule: usize, shares: &[u32]) -> Vec<Range<usize>> {
    let counts = apportioned(units.div_ceil(granule), shares);
    let mut end = 0;
    let ranges = counts.into_iter().map(|count| {
        let start = end;
        end += count;
        (start * granule).min(units)..(end * granule).min(units)
    });
    ranges.collect()
}

/// So many things by shares, the largest remainders rounded up, and then one at least for each, from those that have most.
fn apportioned(things: usize, shares: &[u32]) -> Vec<usize> {
    let total = shares.iter().map(|share| u128::from(*share)).sum::<u128>().max(1);
    let exact = |share: u32| things as u128 * u128::from(share);
    let mut counts: Vec<usize> = shares.iter().map(|share| (exact(*share) / total) as usize).collect();
    let mut by_remainder: Vec<usize> = (0..shares.len()).collect();
    // The sort is stable: of equal remainders the lower rank's is first.
    by_remainder.sort_by_key(|rank| std::cmp::Reverse(exact(shares[*rank]) % total));
    let left = things - counts.iter().sum::<usize>();
    by_remainder.into_iter().take(left).for_each(|rank| counts[rank] += 1);
    while things >= shares.len()
        && let Some(poor) = counts.iter().position(|count| *count == 0)
    {
        let rich = (0..counts.len()).max_by_key(|rank| counts[*rank]).expect("a stage has members");
        counts[rich] -= 1;
        counts[poor] += 1;
    }
    counts
}

/// The least common multiple.
fn lcm(a: usize, b: usize) -> usize {
    let gcd = |mut a: usize, mut b: usize| {
        while b > 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    a / gcd(a, b) * b
}
