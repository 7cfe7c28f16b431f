//! `mainstem plan`: predicts the speed of a model on this machine, and finds the best placement of its
//! weights (`placement`); or predicts the speed of partitions over several devices.
//!
//! Invariant: no weights are loaded, and only what the plan needs is measured on this machine.

mod model;

mod placement;

mod table;

use super::escape::one_line;
use super::flags::{ConfigFlags, MODEL_HELP};
use super::start::measure;
use super::{print, spinner, start, start_log, to_json};
use crate::config::{
    Config, ConfigError, ConfigSource, DeviceConfig, DeviceName, Overrides, format_groups, parse_bytes,
    parse_duration,
};
use crate::planner::hardware::v100x4;
use crate::planner::strategies::{Strategy, strategies};
use crate::planner::{
    Device, DeviceCapacity, Forecast, Hardware, Link, PartitionError, Workload, forecast, split,
};
use anyhow::Result;
use clap::{Args, ValueHint};
use model::PlannedModel;
use placement::PlacementArgs;
use serde::Serialize;
use std::path::Path;

/// Plan how to run a model on this machine, and predict its speed.
///
/// Finds how many sequences should run at once, and which weights should stay in memory while the others are
/// read from disk, for the highest throughput or the lowest latency of some requests. docs/plan.md describes
/// it. With --partition, compares partitions over several devices instead: every split into stages of equal
/// size, by layers, by tensors and both, and the configured split; docs/partition.md describes that.
#[derive(Args)]
#[command(after_help = "\
Examples:
  mainstem plan path/to/model                             the best policy for throughput
  mainstem plan path/to/model --memory 4GiB --prompt 512 --output 32 --requests 64
  mainstem plan path/to/model --objective latency --write policy.toml
  mainstem serve path/to/model --policy-file policy.toml
  mainstem plan --partition                               demo model on four devices of this machine
  mainstem plan --partition path/to/model --devices \"0;1\"
  mainstem plan --partition --shape 8B --devices \"0&1;2\" --layers 24,8 --json
  mainstem plan --shape falcon-40b --hardware v100x4
  mainstem plan --shape 7B --hardware my-machine.toml --link-latency 20us")]
pub struct PlanArgs {
    #[arg(help = MODEL_HELP, value_name = "MODEL", value_hint = ValueHint::AnyPath, conflicts_with = "shape")]
    model: Option<String>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    placement: PlacementArgs,
    #[command(flatten)]
    of_partition: PartitionArgs,
    #[command(flatten)]
    config: ConfigFlags,
}

/// Options of plans of a partition.
#[derive(Args)]
#[command(next_help_heading = "Partition")]
struct PartitionArgs {
    /// Plan a partition over several devices; not needed with the options below.
    #[arg(long)]
    partition: bool,
    /// Model shape instead of files: 8B, 1B:f32, falcon-40b, or layers=40,hidden=5120,...
    #[arg(long, value_name = "SHAPE")]
    shape: Option<String>,
    /// Hardware: v100x4, cpu (this machine, measured; the default) or a file (TOML).
    #[arg(long, value_name = "HARDWARE")]
    hardware: Option<String>,
    /// Link latency between devices, such as 50us, overriding the hardware's.
    #[arg(long, value_name = "TIME")]
    link_latency: Option<String>,
    /// Link bandwidth, such as 12GB/s, overriding the hardware's.
    #[arg(long, value_name = "SPEED")]
    link_bandwidth: Option<String>,
    /// Sequences per step; by default 1.
    #[arg(
        long,
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..=65_536)
    )]
    batch: Option<u32>,
    /// Cached tokens per sequence; by default 512.
    #[arg(long, value_name = "TOKENS")]
    context: Option<u32>,
}

impl PartitionArgs {
    /// Whether a partition is planned: also if only one of its options is given.
    fn is_wanted(&self) -> bool {
        let PartitionArgs { partition, shape, hardware, link_latency, link_bandwidth, batch, context } = self;
        let texts = [shape, hardware, link_latency, link_bandwidth];
        *partition || texts.iter().any(|text| text.is_some()) || batch.or(*context).is_some()
    }
}

/// Computes the plan and prints it.
pub fn run(args: PlanArgs) -> Result<()> {
    if !args.of_partition.is_wanted() {
        let PlanArgs { model, json, placement, config, .. } = args;
        return placement::run(model, placement, config, json);
    }
    let (options, config) = args.options()?;
    start_log(&config)?;
    let plan = PartitionPlan::new(&options, config)?;
    let text = match options.json {
        true => to_json(&plan),
        false => table::text(&plan),
    };
    print("plan", &text)
}

/// Name of the hardware that is this machine.
const THIS_MACHINE: &str = "cpu";

/// Options of the plan that are not part of the configuration.
struct PlanOptions {
    shape: Option<String>,
    hardware: String,
    link_latency_s: Option<f64>,
    link_bandwidth: Option<f64>,
    batch: usize,
    context: usize,
    /// Whether the devices are configured explicitly.
    is_explicit: bool,
    json: bool,
}

impl PlanArgs {
    fn options(self) -> Result<(PlanOptions, Config)> {
        let PlanArgs { model, json, of_partition, config, .. } = self;
        let mut flags = Overrides::default();
        flags.set("model.path", model);
        flags.set_default("log.level", "warn");
        let file = config.add_to(&mut flags);
        let (config, is_explicit) = load_with_several_devices(file.as_deref(), flags)?;
        let latency = of_partition.link_latency.map(|text| parse_duration(&text)).transpose();
        let latency = latency.map_err(|reason| usage("--link-latency", &reason))?;
        let speed = |text: String| parse_bytes(text.strip_suffix("/s").unwrap_or(&text));
        let speed = of_partition.link_bandwidth.map(speed).transpose();
        let speed = speed.map_err(|reason| usage("--link-bandwidth", &reason))?;
        let options = PlanOptions {
            shape: of_partition.shape,
            hardware: of_partition.hardware.unwrap_or_else(|| THIS_MACHINE.to_owned()),
            link_latency_s: latency.map(|latency| latency.as_secs_f64()),
            link_bandwidth: speed.map(|speed| speed as f64),
            batch: of_partition.batch.unwrap_or(1) as usize,
            context: of_partition.context.unwrap_or(512) as usize,
            is_explicit,
            json,
        };
        Ok((options, config))
    }
}

impl PlanOptions {
    /// Formats device groups. Devices of other hardware have no kind: the configured one is that of this
    /// machine.
    fn device_names(&self, groups: &[Vec<DeviceName>]) -> String {
        if self.hardware == THIS_MACHINE {
            return format_groups(groups);
        }
        let stage = |ranks: &Vec<DeviceName>| {
            ranks.iter().map(|device| device.number.to_string()).collect::<Vec<_>>().join("&")
        };
        groups.iter().map(stage).collect::<Vec<_>>().join(";")
    }

    /// Returns the hardware, with the link options applied.
    fn hardware(&self, config: &DeviceConfig) -> Result<Hardware> {
        let mut hardware = match self.hardware.as_str() {
            "v100x4" => v100x4(),
            THIS_MACHINE => measure::measure_machine(config)?,
            file => Hardware::read(Path::new(file))?,
        };
        for link in [&mut hardware.intra_stage_link, &mut hardware.inter_stage_link] {
            link.latency = self.link_latency_s.unwrap_or(link.latency);
            link.bandwidth = self.link_bandwidth.unwrap_or(link.bandwidth);
        }
        Ok(hardware)
    }
}

fn usage(flag: &str, reason: &str) -> ConfigError {
    ConfigError { origin: ConfigSource::CommandLine, message: format!("{flag}: {reason}") }
}

/// The complete plan. Its field names are the keys of the JSON output.
#[derive(Serialize)]
struct PartitionPlan {
    model: ModelSummary,
    hardware: MachineSummary,
    /// Sequences per step.
    batch: usize,
    /// Cached tokens per sequence.
    context: usize,
    partitions: Vec<PlannedPartition>,
}

/// The planned model.
#[derive(Serialize)]
struct ModelSummary {
    name: String,
    layers: usize,
    weight_bytes: f64,
}

/// The hardware of a plan. Devices are in the order of `--devices`.
#[derive(Serialize)]
struct MachineSummary {
    name: String,
    devices: Vec<DeviceFigures>,
    /// Bytes per second of the memory that all devices share; null if it is not shared or not known.
    bandwidth_together: Option<f64>,
    /// Bytes of the memory that all devices share; null if it is not shared or not known.
    memory_together: Option<f64>,
    /// Link between the ranks of a stage.
    within: LinkFigures,
    /// Link between successive stages.
    between: LinkFigures,
}

/// A device of a plan. Speeds are in bytes and operations per second. The name is that of the configured
/// device that has the same position as the machine's device; on other hardware, its number.
#[derive(Serialize)]
struct DeviceFigures {
    device: String,
    bandwidth: f64,
    /// Bytes of the device's own memory; null if not known.
    memory: Option<f64>,
    flops: f64,
    op_us: f64,
}

/// A link of a plan. The bandwidth is in bytes per second.
#[derive(PartialEq, Serialize)]
struct LinkFigures {
    latency_us: f64,
    bandwidth: f64,
}

/// One partition of a plan.
#[derive(Serialize)]
struct PlannedPartition {
    strategy: &'static str,
    /// Device groups in the format of `--devices`; on other hardware than this machine, without kinds.
    devices: String,
    /// Whether it is the configured partition.
    configured: bool,
    /// The reason why the partition is impossible; null if it is possible.
    rejected: Option<String>,
    #[serde(flatten)]
    figures: Option<PredictedFigures>,
}

/// Predicted speed and memory of a partition.
#[derive(Serialize)]
struct PredictedFigures {
    /// Layers per stage.
    layers: Vec<usize>,
    /// Time of a step per stage.
    stage_ms: Vec<f64>,
    /// Decode speed of one sequence.
    decode_tokens_per_s: f64,
    /// Tokens per second with one step in flight.
    throughput_one_lane: f64,
    /// Tokens per second with a step in flight per stage.
    throughput_lanes: f64,
    /// Bytes per device, stage by stage, by rank.
    bytes: Vec<Vec<f64>>,
    fits: bool,
}

impl PartitionPlan {
    fn new(options: &PlanOptions, mut config: Config) -> Result<PartitionPlan> {
        let _spinner = spinner::Spinner::start("inspecting model and hardware");
        config.model = start::fetch_model(config.model, &config.hub)?;
        let subject = PlannedModel::open(options.shape.as_deref(), &config)?;
        let hardware = options.hardware(&config.device)?;
        let planner = Planner { subject: &subject, hardware: &hardware, options, config: &config.device };
        Ok(PartitionPlan {
            model: ModelSummary {
                name: one_line(&subject.shape.name).into_owned(),
                layers: subject.shape.layers(),
                weight_bytes: subject.shape.stored(),
            },
            batch: options.batch,
            context: options.context,
            partitions: planner.partitions(),
            hardware: MachineSummary::new(&hardware, &config.device, options),
        })
    }
}

impl MachineSummary {
    fn new(hardware: &Hardware, config: &DeviceConfig, options: &PlanOptions) -> MachineSummary {
        let device = |(number, name): (usize, &DeviceName)| {
            let Device { bandwidth, flops, memory, op_seconds } = hardware.device(number);
            let (device, memory) = (options.device_names(&[vec![*name]]), finite(memory));
            DeviceFigures { device, bandwidth, memory, flops, op_us: op_seconds * 1e6 }
        };
        let link = |link: Link| LinkFigures { latency_us: link.latency * 1e6, bandwidth: link.bandwidth };
        MachineSummary {
            name: hardware.name.clone(),
            devices: config.devices().enumerate().map(device).collect(),
            bandwidth_together: finite(hardware.shared_memory.bandwidth),
            memory_together: finite(hardware.shared_memory.memory),
            within: link(hardware.intra_stage_link),
            between: link(hardware.inter_stage_link),
        }
    }
}

fn finite(figure: f64) -> Option<f64> {
    figure.is_finite().then_some(figure)
}

/// The inputs of all predictions of a plan.
struct Planner<'a> {
    subject: &'a PlannedModel,
    hardware: &'a Hardware,
    options: &'a PlanOptions,
    config: &'a DeviceConfig,
}

impl Planner<'_> {
    fn partitions(&self) -> Vec<PlannedPartition> {
        strategies(self.config).into_iter().map(|strategy| self.plan_strategy(strategy)).collect()
    }

    fn plan_strategy(&self, strategy: Strategy) -> PlannedPartition {
        let configured = strategy.is_configured && self.options.is_explicit;
        let Strategy { name: strategy, device, .. } = strategy;
        let devices = self.options.device_names(&device.groups);
        match self.predict(&device) {
            Ok(figures) => {
                PlannedPartition { strategy, devices, configured, rejected: None, figures: Some(figures) }
            }
            Err(refusal) => PlannedPartition {
                strategy,
                devices,
                configured,
                rejected: Some(refusal.to_string()),
                figures: None,
            },
        }
    }

    fn predict(&self, config: &DeviceConfig) -> Result<PredictedFigures, PartitionError> {
        let all: Vec<DeviceName> = config.devices().copied().collect();
        let number = |device: &DeviceName| all.iter().position(|other| other == device).unwrap_or(0);
        let place = |device: &DeviceName| {
            let device = self.hardware.device(number(device));
            DeviceCapacity { speed: device.bandwidth, memory: device.memory }
        };
        let roomy = |device: &DeviceName| DeviceCapacity { memory: f64::INFINITY, ..place(device) };
        let shape = &self.subject.shape;
        let fits = |shard: &_| self.subject.fits(shard);
        let partition = match split::partition(config, shape, place, fits) {
            // The speed is predicted even if the memory does not suffice.
            Err(PartitionError::InsufficientMemory { .. }) => split::partition(config, shape, roomy, fits)?,
            planned => planned?,
        };
        let PlanOptions { batch, context, .. } = *self.options;
        let load = Workload { batch, context, sequences: batch * config.groups.len() };
        let forecast = forecast(shape, &partition, self.hardware, load);
        let layers = partition.stages.iter().map(|stage| stage.encoder.len() + stage.decoder.len());
        Ok(PredictedFigures::from_forecast(layers.collect(), forecast))
    }
}

impl PredictedFigures {
    fn from_forecast(layers: Vec<usize>, forecast: Forecast) -> PredictedFigures {
        PredictedFigures {
            layers,
            stage_ms: forecast.stage_seconds.iter().map(|seconds| seconds * 1e3).collect(),
            decode_tokens_per_s: forecast.decode_speed,
            throughput_one_lane: forecast.throughput_one_lane,
            throughput_lanes: forecast.throughput_lanes,
            bytes: forecast.bytes,
            fits: forecast.fits,
        }
    }
}

/// Loads the configuration for comparing partitions: unless a flag sets the devices or more than one is
/// configured, it has four devices. Also returns whether the devices, or their layers or shares, are set
/// explicitly.
pub fn load_with_several_devices(
    file: Option<&Path>,
    mut flags: Overrides,
) -> Result<(Config, bool), ConfigError> {
    const COUNTS: [&str; 2] = ["device.layers", "device.shares"];
    let mut without_counts = flags.clone();
    COUNTS.iter().for_each(|counts| without_counts.set(counts, Some("")));
    let devices = Config::from_process(file, without_counts)?.device;
    if flags.sets("device.groups") || devices.devices().count() > 1 {
        return Ok((Config::from_process(file, flags)?, true));
    }
    flags.set("device.groups", Some(DEVICES));
    // Counts in a file are for its single device, not for these.
    let (set, unset): (Vec<_>, Vec<_>) = COUNTS.into_iter().partition(|counts| flags.sets(counts));
    unset.into_iter().for_each(|counts| flags.set(counts, Some("")));
    Ok((Config::from_process(file, flags)?, !set.is_empty()))
}

/// Default devices for comparing partitions.
const DEVICES: &str = "0;1;2;3";
