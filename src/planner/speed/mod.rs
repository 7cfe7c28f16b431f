//! Forecasts how fast a partition is, from sizes and speeds alone.
//!
//! For its part of a layer, with b rows over c positions each, a device takes
//!
//! ```text
//! max((weights + K and V) / bandwidth, 2 x multiplications / flops) + operations x op_seconds
//! ```
//!
//! In a stage of m ranks, each rank receives the results of the m - 1 others twice per layer: (m - 1)
//! messages of (b, hidden) values. A stage sends one such message to each rank of the next stage and waits
//! until they are sent; after a stage that has only encoder layers, a decoded token has no rows yet, and the
//! message is empty. So a step takes the sum of all stages' times. With n lanes (steps in flight),
//! the interval between steps is that sum divided by n, but at least the time of the slowest stage.
//!
//! Invariant: more of anything (bytes, rows, latency) is never faster.

use super::hardware::{Device, Hardware};
use super::shape::{LayerCost, ModelShape, ResourceCost};
use crate::model::partition::{Partition, Stage};
use std::ops::Range;

/// The workload of a decode step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Workload {
    /// Number of sequences in one step.
    pub batch: usize,
    /// Cached positions of each sequence.
    pub context: usize,
    /// Number of sequences that fit into the cache.
    pub sequences: usize,
}

/// The predicted speed and memory use of a partition.
#[derive(Clone, Debug, PartialEq)]
pub struct Forecast {
    /// Tokens per second of a single sequence.
    pub decode_speed: f64,
    /// Tokens per second of all sequences, with one step at a time.
    pub throughput_one_lane: f64,
    /// Tokens per second of all sequences, with as many steps in flight as there are stages.
    pub throughput_lanes: f64,
    /// Time of each stage for its part of a step in seconds, with all other stages idle.
    pub stage_seconds: Vec<f64>,
    /// Bytes that each device holds, weights and cache, by stage and rank.
    pub bytes: Vec<Vec<f64>>,
    /// Whether each device has enough memory.
    pub fits: bool,
}

/// Size of a value that is sent between devices, in bytes.
const VALUE_BYTES: f64 = 4.0;

/// Forecasts the speed of `partition` on `hardware`, whose devices are used in order.
pub fn forecast(model: &ModelShape, partition: &Partition, hardware: &Hardware, load: Workload) -> Forecast {
    let machine = Estimator { model, partition, hardware, costs: rank_costs(model, partition) };
    let stages = 0..partition.stages.len();
    let alone = |stage: usize| machine.stage_seconds(stage, load, machine.stage_devices(stage));
    let among_all = |stage: usize| machine.stage_seconds(stage, load, machine.all_devices());
    let all_busy: Vec<f64> = stages.clone().map(among_all).collect();
    let slowest = all_busy.iter().copied().fold(0.0, f64::max);
    let interval =
        slowest.max((all_busy.iter().sum::<f64>() + hardware.overhead_seconds) / all_busy.len() as f64);
    let bytes = machine.bytes(load);
    Forecast {
        decode_speed: 1.0 / machine.step_seconds(Workload { batch: 1, ..load }),
        throughput_one_lane: load.batch as f64 / machine.step_seconds(load),
        throughput_lanes: load.batch as f64 / interval,
        stage_seconds: stages.map(alone).collect(),
        fits: fits(&bytes, hardware),
        bytes,
    }
}

/// Returns whether each device has enough memory, and the shared memory has enough for all.
fn fits(bytes: &[Vec<f64>], hardware: &Hardware) -> bool {
    let held = || bytes.iter().flatten();
    let each = held().enumerate().all(|(number, bytes)| *bytes <= hardware.device(number).memory);
    each && held().sum::<f64>() <= hardware.shared_memory.memory
}

/// The costs of one rank's part of the model.
struct RankCost {
    held: ResourceCost,
    /// Cost of decoding a token: in a model with encoder and decoder, only the decoder.
    decoding: ResourceCost,
}

/// Returns the costs of each device, by stage and rank.
fn rank_costs(model: &ModelShape, partition: &Partition) -> Vec<Vec<RankCost>> {
    let (units, mut end) = (model.layer_costs(), 0);
    let first_decoding = if model.decoder.is_some() { model.encoder_layers() } else { 0 };
    let mut of_stage = |stage: &Stage| {
        let own = end..end + stage.encoder.len() + stage.decoder.len();
        end = own.end;
        let decoding = own.start.max(first_decoding)..own.end.max(first_decoding);
        let twice = model.duplicate_bytes(&own);
        let shares: Vec<u32> = stage.ranks.iter().map(|rank| rank.share).collect();
        let all = f64::from(shares.iter().sum::<u32>());
        let held = sum_by_rank(&units[own], &shares).into_iter().zip(&shares);
        let held = held.map(|(held, share)| ResourceCost {
            stored: held.stored - twice * f64::from(*share) / all,
            ..held
        });
        let decoding = sum_by_rank(&units[decoding], &shares);
        held.zip(decoding).map(|(held, decoding)| RankCost { held, decoding }).collect()
    };
    partition.stages.iter().map(&mut of_stage).collect()
}

/// Returns the total costs of these layers for ranks with these shares.
fn sum_by_rank(units: &[LayerCost], shares: &[u32]) -> Vec<ResourceCost> {
    let nothing = vec![ResourceCost::default(); shares.len()];
    units.iter().fold(nothing, |sums, unit| {
        sums.into_iter().zip(unit.by_rank(shares)).map(|(sum, part)| sum + part).collect()
    })
}

struct Estimator<'a> {
    model: &'a ModelShape,
    partition: &'a Partition,
    hardware: &'a Hardware,
    /// The costs by stage and rank.
    costs: Vec<Vec<RankCost>>,
}

impl Estimator<'_> {
    /// Returns the time of a step that runs alone, in seconds.
    fn step_seconds(&self, load: Workload) -> f64 {
        let alone = |stage: usize| self.stage_seconds(stage, load, self.stage_devices(stage));
        (0..self.costs.len()).map(alone).sum::<f64>() + self.hardware.overhead_seconds
    }

    /// Returns the time of one stage in seconds while the devices `busy` read their memory.
    fn stage_seconds(&self, stage: usize, load: Workload, busy: Range<usize>) -> f64 {
        let each = self.bandwidth_each(busy);
        let slowest = self.stage_devices(stage).zip(&self.costs[stage]).map(|(number, share)| {
            let device = self.hardware.device(number);
            let device = Device { bandwidth: device.bandwidth.min(each), ..device };
            device_seconds(share.decoding, device, load)
        });
        slowest.fold(0.0, f64::max) + self.all_reduce_seconds(stage, load) + self.handoff_seconds(stage, load)
    }

    /// Returns the maximum bandwidth of each of the devices `busy` in a shared memory: it is divided evenly,
    /// and what slow devices do not use is left to the others.
    fn bandwidth_each(&self, busy: Range<usize>) -> f64 {
        let mut speeds: Vec<f64> = busy.map(|number| self.hardware.device(number).bandwidth).collect();
        speeds.sort_by(f64::total_cmp);
        let mut left = self.hardware.shared_memory.bandwidth;
        for (number, speed) in speeds.iter().enumerate() {
            let even = left / (speeds.len() - number) as f64;
            if *speed >= even {
                return even;
            }
            left -= speed;
        }
        f64::INFINITY
    }

    /// Returns the time of the all-reduces of a stage in seconds: each rank receives the others' results one
    /// after another, and after the head their parts of the logits.
    fn all_reduce_seconds(&self, stage: usize, load: Workload) -> f64 {
        let (ranks, rows) = (self.costs[stage].len() as f64, load.batch as f64);
        let others = ranks - 1.0;
        let sum =
            others * self.hardware.intra_stage_link.seconds(rows * self.model.hidden as f64 * VALUE_BYTES);
        let is_last = stage + 1 == self.costs.len();
        let logits = rows * self.model.vocab as f64 / ranks * VALUE_BYTES;
        let gathered = if is_last && ranks > 1.0 {
            others * self.hardware.intra_stage_link.seconds(logits)
        } else {
            0.0
        };
        match self.costs[stage][0].decoding.all_reduces {
            // A stage without rows still synchronizes over one value, so that no rank runs ahead.
            0.0 => others * self.hardware.intra_stage_link.seconds(VALUE_BYTES),
            sums => sums * sum + gathered,
        }
    }

    /// Returns the time to send the activations to each rank of the next stage, in seconds. A token has no
    /// rows before the decoder's first layer.
    fn handoff_seconds(&self, stage: usize, load: Workload) -> f64 {
        let next = self.costs.get(stage + 1).map_or(0, Vec::len);
        let mut so_far = self.partition.stages[..=stage].iter();
        let has_rows = self.model.decoder.is_none() || so_far.any(|stage| !stage.decoder.is_empty());
        let rows = if has_rows { load.batch } else { 0 };
        let bytes = rows as f64 * self.model.hidden as f64 * VALUE_BYTES;
        next as f64 * self.hardware.inter_stage_link.seconds(bytes)
    }

    fn bytes(&self, load: Workload) -> Vec<Vec<f64>> {
        let positions = (load.sequences * load.context) as f64;
        let held = |share: &RankCost| share.held.stored + share.held.kv * positions;
        self.costs.iter().map(|stage| stage.iter().map(held).collect()).collect()
    }

    /// Returns the numbers of a stage's devices.
    fn stage_devices(&self, stage: usize) -> Range<usize> {
        let first = self.partition.stages[..stage].iter().map(|stage| stage.ranks.len()).sum();
        first..first + self.costs[stage].len()
    }

    fn all_devices(&self) -> Range<usize> {
        0..self.costs.iter().map(Vec::len).sum()
    }
}

/// Returns the time of a device for its part of a step, in seconds.
fn device_seconds(part: ResourceCost, device: Device, load: Workload) -> f64 {
    let (rows, positions) = (load.batch as f64, load.context as f64);
    let read = part.bytes_read(rows) + part.kv * rows * positions;
    let computed = 2.0 * rows * (part.macs + part.macs_per_position * positions);
    (read / device.bandwidth).max(computed / device.flops) + part.ops * device.op_seconds
}

#[cfg(test)]
mod tests;
