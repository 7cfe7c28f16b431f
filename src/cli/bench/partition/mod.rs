//! Comparison of partitions of a model over devices: the experiment of Shi et al. 2024, Table 5.
//!
//! The devices are CPU devices with a part of the machine each, or simulated devices that take a set time per
//! layer. The batch per step is fixed: with lanes there are as many steps in flight as stages, otherwise one.
//! Invariant: all partitions have the same devices, and a prediction never uses the measurement that it is
//! compared with.

mod links;

pub mod rows;

use super::host_part::HostPart;
use super::measure::{Prompts, open_model as open, run_test};
use super::report::BenchReport;
use super::sample::TestKind;
use super::suite::{BenchTest, size_cache};
use crate::actors::EngineSetup;
use crate::actors::device::ExecutorFactory;
use crate::cli::start::{self, factories};
use crate::config::{
    Config, DeviceConfig, DeviceKind, DeviceName, Groups, LaneCount, format_groups, parse_bytes,
    parse_duration,
};
use crate::model::{ModelSource, Partition};
use crate::planner::shape::{LayerCost, ModelShape, ResourceCost, StackShape};
use crate::planner::strategies::strategies;
use crate::planner::{
    Device, DeviceCapacity, Hardware, Link, PartitionError, SharedMemory, Workload, forecast, model_source,
    split,
};
use crate::text::Tokenizer;
use anyhow::{Error, Result};
use clap::Args;
use indicatif::ProgressBar;
use rows::{PartitionRow, Predicted};
use std::sync::Arc;
use std::time::Duration;

/// Samples of the engine's overhead, of which the minimum counts.
const CALIBRATIONS: usize = 20;
/// Step time of each fake device in these samples.
const KNOWN_STEP: Duration = Duration::from_millis(1);

/// Prompt tokens of sequences that decode together.
const PROMPT: usize = 8;

/// Options of the partition benchmark.
#[derive(Args)]
#[command(next_help_heading = "Partition")]
pub struct PartitionTests {
    /// Compare partitions of the model over devices: by layers, by tensors, and both.
    #[arg(long, conflicts_with_all = ["fake_device", "SpeculationFlags", "prefill", "depth", "sequences",
                                      "scheduler_slots", "scheduler_lanes"])]
    pub partition: bool,
    /// Simulate devices that compute nothing and take this time per layer, such as 1ms.
    #[arg(long, value_name = "TIME", requires = "partition", value_parser = parse_duration)]
    fake_layer: Option<Duration>,
    /// Additional latency of each message between devices, such as 200us.
    #[arg(long, value_name = "TIME", requires = "partition", value_parser = parse_duration)]
    link_latency: Option<Duration>,
    /// Maximum bandwidth of links between devices, such as 100MB/s.
    #[arg(long, value_name = "SPEED", requires = "partition", value_parser = bytes_per_s)]
    link_bandwidth: Option<f64>,
    /// Sequences per step.
    #[arg(long, value_name = "N", default_value_t = 1, requires = "partition",
          value_parser = clap::value_parser!(u32).range(1..=1024))]
    batch: u32,
    /// Show the planner's predictions next to the measurements.
    #[arg(long, requires = "partition")]
    check_model: bool,
}

fn bytes_per_s(text: &str) -> Result<f64, String> {
    parse_bytes(text.strip_suffix("/s").unwrap_or(text)).map(|bytes| bytes as f64)
}

impl PartitionTests {
    /// The additional latency and the bandwidth limit of links; without options, neither.
    fn link(&self) -> Link {
        Link {
            latency: self.link_latency.unwrap_or_default().as_secs_f64(),
            bandwidth: self.link_bandwidth.unwrap_or(f64::INFINITY),
        }
    }

    fn slows_links(&self) -> bool {
        self.link_latency.is_some() || self.link_bandwidth.is_some()
    }
}

/// Measures every partition, with `tokens` tokens per sequence. If the future is dropped, the report keeps
/// the results so far.
pub async fn measure(
    mut config: Config,
    tests: &PartitionTests,
    tokens: usize,
    repeat: u32,
    report: &mut BenchReport,
    progress: &ProgressBar,
) -> Result<()> {
    let (source, tokenizer) = open(&mut config, report).await?;
    let mut bench = PartitionBench::new(config, tests, tokens, source, tokenizer)?;
    // The times of simulated devices must not include the calibration.
    let ways = bench.variants(&mut report.notes)?;
    if tests.check_model {
        bench.calibrate().await?;
    }
    progress.set_length(ways.len() as u64 * u64::from(2 * (repeat + 1)));
    for way in ways {
        bench.measure(&way, repeat, report, progress).await?;
    }
    Ok(())
}

/// Common parameters of all partitions.
struct PartitionBench<'a> {
    config: Config,
    tests: &'a PartitionTests,
    tokens: usize,
    source: Arc<ModelSource>,
    tokenizer: Arc<Tokenizer>,
    shape: ModelShape,
    /// Hardware that predictions assume.
    hardware: Hardware,
}

/// A partition of the model with a number of steps in flight.
struct PartitionVariant {
    strategy: &'static str,
    device: DeviceConfig,
    partition: Partition,
    lanes: usize,
}

impl<'a> PartitionBench<'a> {
    fn new(
        mut config: Config,
        tests: &'a PartitionTests,
        tokens: usize,
        source: Arc<ModelSource>,
        tokenizer: Arc<Tokenizer>,
    ) -> Result<PartitionBench<'a>> {
        let (shape, hardware) = match tests.fake_layer {
            Some(layer) => {
                config.device = with_fake_devices(&config.device);
                (equal_layers(&source), simulated_hardware(layer, tests.link()))
            }
            None => (model_source::shape(&source, config.kv.ty), measure_hardware(&config, tests)?),
        };
        Ok(PartitionBench { config, tests, tokens, source, tokenizer, shape, hardware })
    }

    /// Returns all even partitions and the configured one, each with one lane and with a lane per stage.
    /// Impossible partitions are reported in `notes`.
    fn variants(&self, notes: &mut Vec<String>) -> Result<Vec<PartitionVariant>> {
        let mut ways = Vec::new();
        for strategy in strategies(&self.config.device) {
            let divided = match self.tests.fake_layer {
                Some(_) => self.simulate(strategy.device).map_err(Error::from),
                None => start::partition(&strategy.device, &self.source).map(|it| (strategy.device, it)),
            };
            match divided.map_err(Error::downcast::<PartitionError>) {
                Ok((device, partition)) => {
                    let stages = device.groups.len();
                    let lanes = if stages > 1 { vec![1, stages] } else { vec![1] };
                    ways.extend(lanes.into_iter().map(|lanes| PartitionVariant {
                        strategy: strategy.name,
                        device: device.clone(),
                        partition: partition.clone(),
                        lanes,
                    }));
                }
                Err(Ok(refusal)) => notes.push(format!("{} skipped: {refusal}", strategy.name)),
                Err(Err(error)) => return Err(error),
            }
        }
        Ok(ways)
    }

    /// Returns simulated devices with their step times, and the partition. Fails if the partition is
    /// impossible.
    fn simulate(&self, device: DeviceConfig) -> Result<(DeviceConfig, Partition), PartitionError> {
        let alike = |_: &DeviceName| DeviceCapacity { speed: 1.0, memory: f64::INFINITY };
        let fits = |shard: &_| model_source::check_shard(&self.source, shard);
        let partition = split::partition(&device, &self.shape, alike, fits)?;
        let seconds = |batch| {
            let load = Workload { batch, context: 0, sequences: 0 };
            forecast(&self.shape, &partition, &self.hardware, load).stage_seconds
        };
        let (empty, one_row) = (seconds(0), seconds(1));
        let times = empty.iter().zip(&one_row).map(|(empty, one_row)| DeviceKind::Fake {
            step: Duration::from_secs_f64(*empty),
            row: Duration::from_secs_f64((one_row - empty).max(0.0)),
        });
        let stage = |(ranks, kind): (&Vec<DeviceName>, DeviceKind)| {
            ranks.iter().map(|rank| DeviceName { kind, ..*rank }).collect()
        };
        let groups: Groups = device.groups.iter().zip(times).map(stage).collect();
        Ok((DeviceConfig { groups, ..device }, partition))
    }

    /// Measures the engine's overhead per step and per hand-off between stages.
    async fn calibrate(&mut self) -> Result<()> {
        let step_seconds = self.engine_overhead(1).await?;
        let hop = if self.shape.layers() > 1 { self.engine_overhead(2).await? - step_seconds } else { 0.0 };
        apply_calibration(&mut self.hardware, self.tests.link(), step_seconds, hop);
        Ok(())
    }

    /// Measures the seconds of a step through `stages` fake devices of known step time, minus their time.
    async fn engine_overhead(&self, stages: u32) -> Result<f64> {
        let kind = DeviceKind::Fake { step: KNOWN_STEP, row: Duration::ZERO };
        let groups: Groups = (0..stages).map(|number| vec![DeviceName { kind, number }]).collect();
        let device = self.config.device.regrouped(&groups);
        let test = BenchTest::decode(0, self.tokens);
        let config = self.size_config(&device, 1, &[test])?;
        let setup = start::engine_setup(&config, &self.source)?;
        let factories = factories(&config.device, &self.source, &self.tokenizer, &setup);
        let (engine, _) = super::start_engine(setup, self.tokenizer.clone(), factories).await?;
        let mut prompts = Prompts::new(&self.source, &self.tokenizer);
        let mut shortest = f64::INFINITY;
        for _ in 0..CALIBRATIONS {
            let sample = run_test(&engine.intake, &test, &mut prompts, &HostPart::default()).await?;
            shortest = shortest.min(sample.seconds / sample.steps as f64);
        }
        engine.stop();
        Ok(shortest - (KNOWN_STEP * stages).as_secs_f64())
    }

    /// Measures a partition with one sequence, then with full batches in all lanes.
    async fn measure(
        &self,
        way: &PartitionVariant,
        repeat: u32,
        report: &mut BenchReport,
        progress: &ProgressBar,
    ) -> Result<()> {
        let sequences = self.tests.batch as usize * way.lanes;
        let tests = [BenchTest::decode(0, self.tokens), decode_together(sequences, self.tokens)];
        let config = self.size_config(&way.device, way.lanes, &tests)?;
        let setup = start::partitioned_setup(&config, &self.source, way.partition.clone())?;
        report.partitions.push(self.row(way, &setup, sequences));
        start::check_memory(&config.device, &self.source, &setup)?;
        let factories = factories(&config.device, &self.source, &self.tokenizer, &setup);
        let factories = if self.tests.slows_links() && self.tests.fake_layer.is_none() {
            links::slow_links(factories, self.tests.link())
        } else {
            factories
        };
        progress.set_message(format!("{} with {} lanes", way.strategy, way.lanes));
        self.run(setup, factories, &config, (tests, repeat), report, progress).await
    }

    async fn run(
        &self,
        setup: EngineSetup,
        factories: Vec<Vec<ExecutorFactory>>,
        config: &Config,
        (tests, repeat): ([BenchTest; 2], u32),
        report: &mut BenchReport,
        progress: &ProgressBar,
    ) -> Result<()> {
        let mut prompts = Prompts::new(&self.source, &self.tokenizer);
        let (engine, built) = super::start_engine(setup, self.tokenizer.clone(), factories).await?;
        report.record_device(config, &built);
        for test in tests {
            // The first run warms up.
            for number in 0..=repeat {
                let sample = run_test(&engine.intake, &test, &mut prompts, &HostPart::default()).await?;
                let row = report.partitions.last_mut().expect("it was pushed; anything else is a bug");
                let samples = match test.kind {
                    TestKind::Fused { .. } => &mut row.throughput,
                    _ => &mut row.decode,
                };
                samples.extend((number > 0).then_some(sample));
                progress.inc(1);
            }
        }
        engine.stop();
        Ok(())
    }

    /// Returns the configuration with slots, lanes and KV cache for the tests.
    fn size_config(&self, device: &DeviceConfig, lanes: usize, tests: &[BenchTest]) -> Result<Config> {
        let mut config = Config { device: device.clone(), ..self.config.clone() };
        let slots = self.tests.batch as usize * lanes;
        config.scheduler.slots = slots;
        config.scheduler.lanes = LaneCount::Number(lanes);
        config.scheduler.token_budget = config.scheduler.token_budget.max(2 * slots + PROMPT);
        size_cache(&mut config, tests)?;
        Ok(config)
    }

    /// Returns the report row of a partition, without samples.
    fn row(&self, way: &PartitionVariant, setup: &EngineSetup, sequences: usize) -> PartitionRow {
        let load =
            Workload { batch: self.tests.batch as usize, context: self.tokens / 2 + PROMPT, sequences };
        let predicted = self.tests.check_model.then(|| {
            let forecast = forecast(&self.shape, &setup.partition, &self.hardware, load);
            let throughput = match way.lanes {
                1 => forecast.throughput_one_lane,
                _ => forecast.throughput_lanes,
            };
            Predicted { decode: forecast.decode_speed, throughput }
        });
        PartitionRow {
            strategy: way.strategy,
            devices: format_groups(&way.device.groups),
            layers: setup.partition.stages.iter().map(|stage| stage.decoder.len()).collect(),
            lanes: way.lanes,
            sequences,
            decode: Vec::new(),
            throughput: Vec::new(),
            predicted,
        }
    }
}

/// Replaces the devices by as many fake ones in the same groups, renumbered because the originals may be of
/// several kinds. Their step time is zero.
fn with_fake_devices(device: &DeviceConfig) -> DeviceConfig {
    let kind = DeviceKind::Fake { step: Duration::ZERO, row: Duration::ZERO };
    let mut numbers = 0..;
    let mut stage = |ranks: &Vec<DeviceName>| -> Vec<DeviceName> {
        numbers.by_ref().take(ranks.len()).map(|number| DeviceName { kind, number }).collect()
    };
    DeviceConfig { groups: device.groups.iter().map(&mut stage).collect(), ..device.clone() }
}

/// Sets the measured overhead, in seconds: `step_seconds` per step, and `hop` per hand-off between stages in
/// addition to the latency of `link`. The measured hand-off includes the one between threads, so it replaces
/// the earlier latency.
fn apply_calibration(hardware: &mut Hardware, link: Link, step_seconds: f64, hop: f64) {
    hardware.overhead_seconds = step_seconds.max(0.0);
    hardware.inter_stage_link.latency = link.latency + hop.max(0.0);
}

/// Returns a test of sequences that begin together. Sequences of other lanes may be ahead of the one that
/// begins last, so each generates twice as many tokens.
fn decode_together(sequences: usize, tokens: usize) -> BenchTest {
    BenchTest {
        kind: TestKind::Fused { depth: PROMPT },
        sequences,
        prompt: PROMPT,
        tokens,
        max_tokens: 2 * tokens + PROMPT,
    }
}

/// Returns a shape whose layers are one unit of work each, without embedding and head.
fn equal_layers(source: &ModelSource) -> ModelShape {
    let shape = model_source::shape(source, mainstem_kernels::QuantType::F16);
    let work =
        ResourceCost { stored: 1.0, read: 1.0, read_max: 1.0, all_reduces: 2.0, ..ResourceCost::default() };
    let (layer, nothing) = (LayerCost { divided: work, ..LayerCost::default() }, ResourceCost::default());
    let decoder = StackShape { embedding: nothing, layers: vec![layer; shape.layers()], head: nothing };
    ModelShape { vocab: 0, encoder: None, decoder: Some(decoder), shared_tables: Vec::new(), ..shape }
}

/// Returns hardware whose devices take the time `layer` per unit of work.
fn simulated_hardware(layer: Duration, link: Link) -> Hardware {
    let bandwidth = 1.0 / layer.as_secs_f64().max(1e-9);
    Hardware {
        name: "simulated".to_owned(),
        devices: vec![Device { bandwidth, flops: f64::INFINITY, memory: f64::INFINITY, op_seconds: 0.0 }],
        shared_memory: SharedMemory::UNLIMITED,
        intra_stage_link: link,
        inter_stage_link: link,
        overhead_seconds: 0.0,
    }
}

/// Measures this machine, with the link options applied. Without predictions nothing is measured, and the
/// speeds are arbitrary.
fn measure_hardware(config: &Config, tests: &PartitionTests) -> Result<Hardware> {
    if !tests.check_model {
        return Ok(simulated_hardware(Duration::from_secs(1), tests.link()));
    }
    let mut machine = start::measure::measure_machine(&config.device)?;
    let slow = tests.link();
    for link in [&mut machine.intra_stage_link, &mut machine.inter_stage_link] {
        link.latency += slow.latency;
        link.bandwidth = link.bandwidth.min(slow.bandwidth);
    }
    Ok(machine)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The measured hand-off includes the one between threads, so that it counts once.
    #[test]
    fn the_latency_between_stages_is_the_link_plus_the_measured_hand_off() {
        let slow = Link { latency: 20e-3, bandwidth: 1e6 };
        let hand_over = Link { latency: 20e-3 + 11e-6, bandwidth: 1e6 };
        let mut hardware = simulated_hardware(KNOWN_STEP, slow);
        (hardware.intra_stage_link, hardware.inter_stage_link) = (hand_over, hand_over);
        apply_calibration(&mut hardware, slow, 100e-6, 30e-6);
        assert_eq!(hardware.inter_stage_link, Link { latency: 20e-3 + 30e-6, ..slow });
        assert_eq!((hardware.intra_stage_link, hardware.overhead_seconds), (hand_over, 100e-6));
        // Measured overheads may be negative.
        apply_calibration(&mut hardware, slow, -1e-6, -1e-6);
        assert_eq!((hardware.inter_stage_link, hardware.overhead_seconds), (slow, 0.0));
    }
}
