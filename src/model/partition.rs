//! Partitions of a model: which device holds which layers, by stage and rank.
//!
//! A layer-wise partition has n stages of one rank, a tensor-wise partition one stage of n ranks, a hybrid
//! partition n stages of m ranks (Shi et al. 2024, section 4).
//!
//! Invariant: every layer is in one stage, in order; the encoder's layers come before the decoder's.

use super::shard::{ExpertSplit, Shard};
use super::spec::ModelSpec;
use std::ops::Range;

/// The assignment of a whole model to devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Partition {
    pub stages: Vec<Stage>,
    pub experts: ExpertSplit,
}

/// A pipeline stage: the devices that share the same layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stage {
    /// Encoder layers of the stage.
    pub encoder: Range<usize>,
    /// Decoder layers of the stage.
    pub decoder: Range<usize>,
    /// The devices, by rank.
    pub ranks: Vec<StageRank>,
}

/// A rank of a stage: its device and its share of the work.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageRank {
    /// Name of the device in the configuration, such as "cpu:0".
    pub device: String,
    /// Share of each layer, in proportion to the other ranks.
    pub share: u32,
}

impl Partition {
    /// Returns the partition with the whole model on one device.
    pub fn single(spec: &ModelSpec, device: &str) -> Partition {
        let Shard { encoder, decoder, experts, .. } = Shard::whole(spec);
        let ranks = vec![StageRank { device: device.to_owned(), share: 1 }];
        Partition { stages: vec![Stage { encoder, decoder, ranks }], experts }
    }

    /// Returns the names of the devices, by stage and rank.
    pub fn device_names(&self) -> Vec<Vec<String>> {
        let of_stage = |stage: &Stage| stage.ranks.iter().map(|rank| rank.device.clone()).collect();
        self.stages.iter().map(of_stage).collect()
    }

    /// Returns the shard of one rank of a stage.
    pub fn shard(&self, stage: usize, rank: usize) -> Shard {
        let Stage { encoder, decoder, ranks } = &self.stages[stage];
        Shard {
            encoder: encoder.clone(),
            decoder: decoder.clone(),
            rank,
            shares: ranks.iter().map(|rank| rank.share).collect(),
            experts: self.experts,
        }
    }

    /// Returns all shards, by stage and rank.
    pub fn shards(&self) -> Vec<Vec<Shard>> {
        let of_stage =
            |stage: usize| (0..self.stages[stage].ranks.len()).map(move |rank| self.shard(stage, rank));
        (0..self.stages.len()).map(|stage| of_stage(stage).collect()).collect()
    }
}
