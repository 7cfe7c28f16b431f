//! The part of a model that one device holds.
//!
//! Invariant: heads, MLP columns and vocabulary rows of a member derive from its shard here and nowhere else.

use std::ops::Range;

/// A range of layers, and one member of the stage that holds them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shard {
    /// Layers of the stage.
    pub layers: Range<usize>,
    /// Layers of the whole model.
    pub of_layers: usize,
    /// This device's place within the stage.
    pub rank: usize,
    /// Devices in the stage.
    pub members: usize,
}

impl Shard {
    /// The whole model on one device.
    pub fn whole(layers: usize) -> Shard {
        Shard { layers: 0..layers, of_layers: layers, rank: 0, members: 1 }
    }

    /// Whether the stage turns tokens into the residual stream.
    pub fn embeds(&self) -> bool {
        self.layers.start == 0
    }

    /// Whether the stage turns the residual stream into logits.
    pub fn heads_out(&self) -> bool {
        self.layers.end == self.of_layers
    }

    /// This member's share of `units` things that can only be handed out in multiples of `granule`:
    /// consecutive ranges by rank, the first ranks taking one granule more where it does not divide.
    pub fn share(&self, units: usize, granule: usize) -> Range<usize> {
        let granules = units.div_ceil(granule);
        let (each, extra) = (granules / self.members, granules % self.members);
        let start = |rank: usize| (rank * each + rank.min(extra)) * granule;
        start(self.rank).min(units)..start(self.rank + 1).min(units)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_everything_once_in_whole_granules() {
        for members in 1..=5 {
            for (units, granule) in [(32, 1), (5632, 32), (7, 2), (3, 1), (1, 4)] {
                let shares =
                    (0..members).map(|rank| Shard { rank, members, ..Shard::whole(2) }.share(units, granule));
                let mut next = 0;
                for share in shares {
                    assert_eq!(share.start, next);
                    assert!(share.start % granule == 0 || share.is_empty());
                    next = share.end;
                }
                assert_eq!(next, units);
            }
        }
    }
}
