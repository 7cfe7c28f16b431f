//! Reports which layers and heads each device holds: the table of Shi et al. 2024, section 4.
//!
//! Invariant: ranges start at 1 and include both ends, as in the paper.

use crate::model::partition::Partition;
use crate::model::shard::Shard;
use crate::model::spec::ModelSpec;
use serde::{Serialize, Serializer};
use std::fmt;
use std::ops::Range;

/// The layers and heads that one device holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct DeviceAssignment {
    pub device: String,
    /// Stage number, from 1.
    pub stage: usize,
    /// Rank within the stage, from 0.
    pub rank: usize,
    /// Number of ranks of the stage.
    pub members: usize,
    pub encoder_layers: Option<InclusiveRange>,
    /// Layers of the decoder, or of an encoder-only model.
    pub layers: Option<InclusiveRange>,
    /// Query heads of each layer; if layers differ, of the first.
    pub heads: Option<InclusiveRange>,
}

/// A range that includes both ends, shown as `[1, 20]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InclusiveRange(pub usize, pub usize);

impl InclusiveRange {
    /// Converts a range that starts at 0 and excludes its end; `None` if it is empty.
    fn from_range(range: &Range<usize>) -> Option<InclusiveRange> {
        (!range.is_empty()).then(|| InclusiveRange(range.start + 1, range.end))
    }
}

impl fmt::Display for InclusiveRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "[{}, {}]", self.0, self.1)
    }
}

impl Serialize for InclusiveRange {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        [self.0, self.1].serialize(to)
    }
}

impl fmt::Display for DeviceAssignment {
    /// Writes the layers and heads.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let layers = match self.encoder_layers {
            Some(_) => "decoder layers",
            None => "layers",
        };
        let parts = [("encoder layers", self.encoder_layers), (layers, self.layers), ("heads", self.heads)];
        let parts = parts.iter().filter_map(|(what, span)| Some(format!("{what} {}", (*span)?)));
        f.write_str(&parts.collect::<Vec<_>>().join(", "))
    }
}

/// Returns what each device holds, by stage and rank. `heads` returns the number of query heads of a shard.
pub fn device_assignments(
    spec: &ModelSpec,
    partition: &Partition,
    heads: impl Fn(&Shard) -> usize,
) -> Vec<Vec<DeviceAssignment>> {
    let of_stage = |(stage, shards): (usize, Vec<Shard>)| {
        let ranks = &partition.stages[stage].ranks;
        let mut head = 0;
        let assigned = |shard: &Shard| {
            let first = head;
            head += heads(shard);
            DeviceAssignment {
                device: ranks[shard.rank].device.clone(),
                stage: stage + 1,
                rank: shard.rank,
                members: ranks.len(),
                encoder_layers: spec
                    .decoder
                    .as_ref()
                    .and_then(|_| InclusiveRange::from_range(&shard.encoder)),
                layers: InclusiveRange::from_range(if spec.decoder.is_some() {
                    &shard.decoder
                } else {
                    &shard.encoder
                }),
                heads: InclusiveRange::from_range(&(first..head)),
            }
        };
        shards.iter().map(assigned).collect()
    };
    partition.shards().into_iter().enumerate().map(of_stage).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::partition::{Stage, StageRank};
    use crate::model::shard::ExpertSplit;
    use crate::model::spec::SpecFile;
    use crate::model::synthetic::SHAPES;

    fn stage(encoder: Range<usize>, decoder: Range<usize>, devices: &[&str]) -> Stage {
        let rank = |device: &&str| StageRank { device: (*device).to_owned(), share: 1 };
        Stage { encoder, decoder, ranks: devices.iter().map(rank).collect() }
    }

    fn lines(spec: &ModelSpec, stages: Vec<Stage>) -> Vec<String> {
        let partition = Partition { stages, experts: ExpertSplit::Column };
        let all =
            device_assignments(spec, &partition, |shard| shard.range(32, 1).len()).into_iter().flatten();
        all.map(|row| format!("{}: {row}", row.device)).collect()
    }

    /// The table of the paper, for 40 layers with 32 heads.
    #[test]
    fn table_4() {
        let [.., seven_b, _] = SHAPES;
        let mut spec = seven_b.resolve(SpecFile::for_model_type(crate::specs::SYNTHETIC).unwrap()).unwrap();
        let stack = spec.decoder.as_mut().unwrap();
        stack.layers.resize(40, stack.layers[0].clone());
        let stages = vec![
            stage(0..0, 0..20, &["Device-0", "Device-1"]),
            stage(0..0, 20..40, &["Device-2", "Device-3"]),
        ];
        assert_eq!(
            lines(&spec, stages),
            [
                "Device-0: layers [1, 20], heads [1, 16]",
                "Device-1: layers [1, 20], heads [17, 32]",
                "Device-2: layers [21, 40], heads [1, 16]",
                "Device-3: layers [21, 40], heads [17, 32]",
            ]
        );
    }

    #[test]
    fn both_stacks_of_a_model_are_distinguished() {
        let [.., seven_b, _] = SHAPES;
        let mut spec = seven_b.resolve(SpecFile::for_model_type(crate::specs::SYNTHETIC).unwrap()).unwrap();
        spec.encoder = spec.decoder.clone();
        let stages =
            vec![stage(0..20, 0..0, &["a"]), stage(20..32, 0..4, &["b"]), stage(32..32, 4..32, &["c"])];
        assert_eq!(
            lines(&spec, stages),
            [
                "a: encoder layers [1, 20], heads [1, 32]",
                "b: encoder layers [21, 32], decoder layers [1, 4], heads [1, 32]",
                "c: layers [5, 32], heads [1, 32]",
            ]
        );
        let row = &device_assignments(&spec, &Partition::single(&spec, "cpu:0"), |_| 32)[0][0];
        let json = serde_json::to_value(row).unwrap();
        assert_eq!(json["layers"], serde_json::json!([1, 32]));
        assert_eq!((json["stage"].as_u64(), json["rank"].as_u64()), (Some(1), Some(0)));
    }
}
