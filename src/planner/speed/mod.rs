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
//! message is empty. So a step takes the sum of all stages' times. With n lanes (micro-batches in flight), the
//! interval between steps is that sum divided by n, but at least the time of the slowest stage.
//!
//! Invariant: more of anything (bytes, rows, latency) is never faster.

use super::hardware::{Device, Hardware};
use super::shape::{ModelShape, Part, Unit};
use crate::model::partition::{Partition, Stage};
use std::ops::Range;

/// The workload of a decode step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Load {
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
const NUMBER: f64 = 4.0;

/// Forecasts the speed of `partition` on `hardware`, whose devices are used in order.
pub fn forecast(model: &ModelShape, partition: &Partition, hardware: &Hardware, load: Load) -> Forecast {
    let machine = Machine { model, partition, hardware, shares: shares(model, partition) };
    let stages = 0..partition.stages.len();
    let alone = |stage: usize| machine.stage_seconds(stage, load, machine.of_stage(stage));
    let among_all = |stage: usize| machine.stage_seconds(stage, load, machine.all());
    let all_busy: Vec<f64> = stages.clone().map(among_all).collect();
    let slowest = all_busy.iter().copied().fold(0.0, f64::max);
    let interval =
        slowest.max((all_busy.iter().sum::<f64>() + hardware.turn_seconds) / all_busy.len() as f64);
    let bytes = machine.bytes(load);
    Forecast {
        decode_speed: 1.0 / machine.step_seconds(Load { batch: 1, ..load }),
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
    each && held().sum::<f64>() <= hardware.together.memory
}

/// The costs of one rank's part of the model.
struct Share {
    held: Part,
    /// Cost of decoding a token: in a model with encoder and decoder, only the decoder.
    decoding: Part,
}

/// Returns the costs of each device, by stage and rank.
fn shares(model: &ModelShape, partition: &Partition) -> Vec<Vec<Share>> {
    let (units, mut end) = (model.units(), 0);
    let first_decoding = if model.decoder.is_some() { model.encoder_layers() } else { 0 };
    let mut of_stage = |stage: &Stage| {
        let own = end..end + stage.encoder.len() + stage.decoder.len();
        end = own.end;
        let decoding = own.start.max(first_decoding)..own.end.max(first_decoding);
        let twice = model.stored_twice(&own);
        let shares: Vec<u32> = stage.members.iter().map(|member| member.share).collect();
        let all = f64::from(shares.iter().sum::<u32>());
        let held = of_members(&units[own], &shares).into_iter().zip(&shares);
        let held =
            held.map(|(held, share)| Part { stored: held.stored - twice * f64::from(*share) / all, ..held });
        let decoding = of_members(&units[decoding], &shares);
        held.zip(decoding).map(|(held, decoding)| Share { held, decoding }).collect()
    };
    partition.stages.iter().map(&mut of_stage).collect()
}

/// Returns the total costs of these layers for ranks with these shares.
fn of_members(units: &[Unit], shares: &[u32]) -> Vec<Part> {
    let nothing = vec![Part::default(); shares.len()];
    units.iter().fold(nothing, |sums, unit| {
        sums.into_iter().zip(unit.of_members(shares)).map(|(sum, part)| sum + part).collect()
    })
}

struct Machine<'a> {
    model: &'a ModelShape,
    partition: &'a Partition,
    hardware: &'a Hardware,
    /// The costs by stage and rank.
    shares: Vec<Vec<Share>>,
}

impl Machine<'_> {
    /// Returns the time of a step that runs alone, in seconds.
    fn step_seconds(&self, load: Load) -> f64 {
        let alone = |stage: usize| self.stage_seconds(stage, load, self.of_stage(stage));
        (0..self.shares.len()).map(alone).sum::<f64>() + self.hardware.turn_seconds
    }

    /// Returns the time of one stage in seconds while the devices `busy` read their memory.
    fn stage_seconds(&self, stage: usize, load: Load, busy: Range<usize>) -> f64 {
        let each = self.bandwidth_each(busy);
        let slowest = self.of_stage(stage).zip(&self.shares[stage]).map(|(number, share)| {
            let device = self.hardware.device(number);
            let device = Device { bandwidth: device.bandwidth.min(each), ..device };
            seconds(share.decoding, device, load)
        });
        slowest.fold(0.0, f64::max) + self.merging_seconds(stage, load) + self.sending_seconds(stage, load)
    }

    /// Returns the maximum bandwidth of each of the devices `busy` in a shared memory: it is divided evenly,
    /// and what slow devices do not use is left to the others.
    fn bandwidth_each(&self, busy: Range<usize>) -> f64 {
        let mut speeds: Vec<f64> = busy.map(|number| self.hardware.device(number).bandwidth).collect();
        speeds.sort_by(f64::total_cmp);
        let mut left = self.hardware.together.bandwidth;
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
    fn merging_seconds(&self, stage: usize, load: Load) -> f64 {
        let (members, rows) = (self.shares[stage].len() as f64, load.batch as f64);
        let others = members - 1.0;
        let sum = others * self.hardware.within.seconds(rows * self.model.hidden as f64 * NUMBER);
        let is_last = stage + 1 == self.shares.len();
        let logits = rows * self.model.vocab as f64 / members * NUMBER;
        let gathered =
            if is_last && members > 1.0 { others * self.hardware.within.seconds(logits) } else { 0.0 };
        match self.shares[stage][0].decoding.sums {
            // A stage without rows still synchronizes over one value, so that no rank runs ahead.
            0.0 => others * self.hardware.within.seconds(NUMBER),
            sums => sums * sum + gathered,
        }
    }

    /// Returns the time to send the activations to each rank of the next stage, in seconds. A token has no
    /// rows before the decoder's first layer.
    fn sending_seconds(&self, stage: usize, load: Load) -> f64 {
        let next = self.shares.get(stage + 1).map_or(0, Vec::len);
        let mut so_far = self.partition.stages[..=stage].iter();
        let has_rows = self.model.decoder.is_none() || so_far.any(|stage| !stage.decoder.is_empty());
        let rows = if has_rows { load.batch } else { 0 };
        let bytes = rows as f64 * self.model.hidden as f64 * NUMBER;
        next as f64 * self.hardware.between.seconds(bytes)
    }

    fn bytes(&self, load: Load) -> Vec<Vec<f64>> {
        let positions = (load.sequences * load.context) as f64;
        let held = |share: &Share| share.held.stored + share.held.kv * positions;
        self.shares.iter().map(|stage| stage.iter().map(held).collect()).collect()
    }

    /// Returns the numbers of a stage's devices.
    fn of_stage(&self, stage: usize) -> Range<usize> {
        let first = self.partition.stages[..stage].iter().map(|stage| stage.members.len()).sum();
        first..first + self.shares[stage].len()
    }

    fn all(&self) -> Range<usize> {
        0..self.shares.iter().map(Vec::len).sum()
    }
}

/// Returns the time of a device for its part of a step, in seconds.
fn seconds(part: Part, device: Device, load: Load) -> f64 {
    let (rows, positions) = (load.batch as f64, load.context as f64);
    let read = part.bytes_read(rows) + part.kv * rows * positions;
    let computed = 2.0 * rows * (part.macs + part.macs_per_position * positions);
    (read / device.bandwidth).max(computed / device.flops) + part.ops * device.op_seconds
}

#[cfg(test)]
mod tests;
