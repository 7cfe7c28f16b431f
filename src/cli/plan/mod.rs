//! `mainstem plan`: predicts the speed of a model for different partitions over devices.
//!
//! Invariant: no weights are loaded, and only what the plan needs is measured on this machine.

mod subject;

mod table;

use super::escape::one_line;
use super::flags::PartitionFlags;
use super::start::measure;
use super::{print, spinner, start};
use crate::config::{
    Config, ConfigError, DeviceConfig, DeviceName, Overrides, Source, bytes_of, duration_of, spelled,
};
use crate::planner::hardware::v100x4;
use crate::planner::strategies::{Strategy, strategies};
use crate::planner::{Device, Forecast, Hardware, Link, Load, Place, Refusal, forecast, split};
use crate::telemetry;
use anyhow::Result;
use clap::{Args, ValueHint};
use serde::Serialize;
use std::path::{Path, PathBuf};
use subject::Subject;

/// Compare partitions of a model over devices.
///
/// Predicts every split into stages of equal size, by layers, by tensors and both, and the configured split:
/// the decode speed of one sequence, the throughput with all stages busy, and the memory of each device.
/// docs/partition.md describes the prediction.
#[derive(Args)]
#[command(after_help = "\
Examples:
  mainstem plan --partition                               demo model on four devices of this machine
  mainstem plan --partition path/to/model --devices \"0;1\"
  mainstem plan --partition --shape 8B --devices \"0&1;2\" --layers 24,8 --json
  mainstem plan --partition --shape falcon-40b --hardware v100x4
  mainstem plan --partition --shape 7B --hardware my-machine.toml --link-latency 20us")]
pub struct PlanArgs {
    /// Plan a partition over several devices.
    #[arg(long, required = true)]
    #[allow(dead_code, reason = "the kind of plan is explicit, so that others can be added")]
    partition: bool,
    /// Folder, file or hf:owner/name[@revision]; the built-in demo model if not given
    #[arg(value_name = "MODEL", value_hint = ValueHint::AnyPath, conflicts_with = "shape")]
    model: Option<String>,
    /// Model shape instead of files: 8B, 1B:f32, falcon-40b, or layers=40,hidden=5120,...
    #[arg(long, value_name = "SHAPE")]
    shape: Option<String>,
    /// Hardware: v100x4, cpu (this machine, measured) or a file (TOML).
    #[arg(long, value_name = "HARDWARE", default_value = "cpu")]
    hardware: String,
    /// Link latency between devices, such as 50us, overriding the hardware's.
    #[arg(long, value_name = "TIME")]
    link_latency: Option<String>,
    /// Link bandwidth, such as 12GB/s, overriding the hardware's.
    #[arg(long, value_name = "SPEED")]
    link_bandwidth: Option<String>,
    /// Sequences per step.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    batch: u32,
    /// Cached tokens per sequence.
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    context: u32,
    /// Configuration file (TOML).
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    config: Option<PathBuf>,
    #[command(flatten)]
    devices: PartitionFlags,
    /// Compute threads per device; 0 divides the cores among the devices.
    #[arg(long, value_name = "N")]
    threads: Option<u32>,
    /// Print JSON.
    #[arg(long)]
    json: bool,
}

/// Computes the plan and prints it.
pub fn run(args: PlanArgs) -> Result<()> {
    let (asked, config) = args.asked()?;
    telemetry::start_log(&config.log, || spinner::Stderr);
    let plan = Plan::of(&asked, config)?;
    let text = match asked.json {
        true => serde_json::to_string_pretty(&plan)? + "\n",
        false => table::text(&plan),
    };
    print("plan", &text)
}

/// Options of the plan that are not part of the configuration.
struct Asked {
    shape: Option<String>,
    hardware: String,
    link_latency_s: Option<f64>,
    link_bandwidth: Option<f64>,
    batch: usize,
    context: usize,
    /// Whether the devices are configured explicitly.
    is_said: bool,
    json: bool,
}

impl PlanArgs {
    fn asked(self) -> Result<(Asked, Config)> {
        let mut flags = Overrides::default();
        flags.set("model.path", self.model);
        flags.set("device.threads", self.threads);
        flags.set_default("log.level", "warn");
        self.devices.add_to(&mut flags);
        let (config, is_said) = with_several(self.config.as_deref(), flags)?;
        let latency = self.link_latency.map(|text| duration_of(&text)).transpose();
        let latency = latency.map_err(|reason| usage("--link-latency", &reason))?;
        let speed = |text: String| bytes_of(text.strip_suffix("/s").unwrap_or(&text));
        let speed = self.link_bandwidth.map(speed).transpose();
        let speed = speed.map_err(|reason| usage("--link-bandwidth", &reason))?;
        let asked = Asked {
            shape: self.shape,
            hardware: self.hardware,
            link_latency_s: latency.map(|latency| latency.as_secs_f64()),
            link_bandwidth: speed.map(|speed| speed as f64),
            batch: self.batch as usize,
            context: self.context as usize,
            is_said,
            json: self.json,
        };
        Ok((asked, config))
    }
}

impl Asked {
    /// Returns the hardware, with the link options applied.
    fn hardware(&self, config: &DeviceConfig) -> Result<Hardware> {
        let mut hardware = match self.hardware.as_str() {
            "v100x4" => v100x4(),
            "cpu" => measure::machine(config)?,
            file => Hardware::read(Path::new(file))?,
        };
        for link in [&mut hardware.within, &mut hardware.between] {
            link.latency = self.link_latency_s.unwrap_or(link.latency);
            link.bandwidth = self.link_bandwidth.unwrap_or(link.bandwidth);
        }
        Ok(hardware)
    }
}

fn usage(flag: &str, reason: &str) -> ConfigError {
    ConfigError { origin: Source::CommandLine, message: format!("{flag}: {reason}") }
}

/// The complete plan. Its field names are the keys of the JSON output.
#[derive(Serialize)]
struct Plan {
    model: Model,
    hardware: Machine,
    /// Sequences per step.
    batch: usize,
    /// Cached tokens per sequence.
    context: usize,
    partitions: Vec<Planned>,
}

/// The planned model.
#[derive(Serialize)]
struct Model {
    name: String,
    layers: usize,
    weight_bytes: f64,
}

/// The hardware of a plan. Devices are in the order of `--devices`.
#[derive(Serialize)]
struct Machine {
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
/// device that has the same position as the machine's device.
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
struct Planned {
    strategy: &'static str,
    /// Device groups in the format of `--devices`.
    devices: String,
    /// Whether it is the configured partition.
    configured: bool,
    /// Why the partition is impossible; null if it is possible.
    refused: Option<String>,
    #[serde(flatten)]
    figures: Option<Figures>,
}

/// Predicted speed and memory of a partition.
#[derive(Serialize)]
struct Figures {
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

impl Plan {
    fn of(asked: &Asked, mut config: Config) -> Result<Plan> {
        let _spinner = spinner::Spinner::start("inspecting model and hardware");
        config.model = start::fetched(config.model, &config.hub)?;
        let subject = Subject::of(asked.shape.as_deref(), &config)?;
        let hardware = asked.hardware(&config.device)?;
        let planner = Planner { subject: &subject, hardware: &hardware, asked, config: &config.device };
        Ok(Plan {
            model: Model {
                name: one_line(&subject.shape.name).into_owned(),
                layers: subject.shape.layers(),
                weight_bytes: subject.shape.stored(),
            },
            batch: asked.batch,
            context: asked.context,
            partitions: planner.partitions(),
            hardware: Machine::of(&hardware, &config.device),
        })
    }
}

impl Machine {
    fn of(hardware: &Hardware, config: &DeviceConfig) -> Machine {
        let device = |(number, name): (usize, &DeviceName)| {
            let Device { bandwidth, flops, memory, op_seconds } = hardware.device(number);
            let (device, memory) = (name.to_string(), finite(memory));
            DeviceFigures { device, bandwidth, memory, flops, op_us: op_seconds * 1e6 }
        };
        let link = |link: Link| LinkFigures { latency_us: link.latency * 1e6, bandwidth: link.bandwidth };
        Machine {
            name: hardware.name.clone(),
            devices: config.devices().enumerate().map(device).collect(),
            bandwidth_together: finite(hardware.together.bandwidth),
            memory_together: finite(hardware.together.memory),
            within: link(hardware.within),
            between: link(hardware.between),
        }
    }
}

fn finite(figure: f64) -> Option<f64> {
    figure.is_finite().then_some(figure)
}

/// The inputs of all predictions of a plan.
struct Planner<'a> {
    subject: &'a Subject,
    hardware: &'a Hardware,
    asked: &'a Asked,
    config: &'a DeviceConfig,
}

impl Planner<'_> {
    fn partitions(&self) -> Vec<Planned> {
        strategies(self.config).into_iter().map(|strategy| self.planned(strategy)).collect()
    }

    fn planned(&self, strategy: Strategy) -> Planned {
        let configured = strategy.is_configured && self.asked.is_said;
        let Strategy { name: strategy, device, .. } = strategy;
        let devices = spelled(&device.groups);
        match self.figures(&device) {
            Ok(figures) => Planned { strategy, devices, configured, refused: None, figures: Some(figures) },
            Err(refusal) => {
                Planned { strategy, devices, configured, refused: Some(refusal.to_string()), figures: None }
            }
        }
    }

    fn figures(&self, config: &DeviceConfig) -> Result<Figures, Refusal> {
        let all: Vec<DeviceName> = config.devices().copied().collect();
        let number = |device: &DeviceName| all.iter().position(|other| other == device).unwrap_or(0);
        let place = |device: &DeviceName| {
            let device = self.hardware.device(number(device));
            Place { speed: device.bandwidth, memory: device.memory }
        };
        let roomy = |device: &DeviceName| Place { memory: f64::INFINITY, ..place(device) };
        let shape = &self.subject.shape;
        let fits = |shard: &_| self.subject.fits(shard);
        let partition = match split::partition(config, shape, place, fits) {
            // The speed is predicted even if the memory does not suffice.
            Err(Refusal::Memory { .. }) => split::partition(config, shape, roomy, fits)?,
            planned => planned?,
        };
        let Asked { batch, context, .. } = *self.asked;
        let load = Load { batch, context, sequences: batch * config.groups.len() };
        let forecast = forecast(shape, &partition, self.hardware, load);
        let layers = partition.stages.iter().map(|stage| stage.encoder.len() + stage.decoder.len());
        Ok(Figures::of(layers.collect(), forecast))
    }
}

impl Figures {
    fn of(layers: Vec<usize>, forecast: Forecast) -> Figures {
        Figures {
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
pub fn with_several(file: Option<&Path>, mut flags: Overrides) -> Result<(Config, bool), ConfigError> {
    const COUNTS: [&str; 2] = ["device.layers", "device.shares"];
    let mut without_counts = flags.clone();
    COUNTS.iter().for_each(|counts| without_counts.set(counts, Some("")));
    let devices = Config::of_process(file, without_counts)?.device;
    if flags.sets("device.groups") || devices.devices().count() > 1 {
        return Ok((Config::of_process(file, flags)?, true));
    }
    flags.set("device.groups", Some(DEVICES));
    // Counts in a file are for its single device, not for these.
    let (set, unset): (Vec<_>, Vec<_>) = COUNTS.into_iter().partition(|counts| flags.sets(counts));
    unset.into_iter().for_each(|counts| flags.set(counts, Some("")));
    Ok((Config::of_process(file, flags)?, !set.is_empty()))
}

/// Default devices for comparing partitions.
const DEVICES: &str = "0;1;2;3";
