//! The plan of a placement: its options, and what it reports.
//!
//! Invariant: speeds are predictions; nothing but the machine is measured.

mod report;

mod text;

use super::super::flags::ConfigFlags;
use super::super::start::placement::{
    PlacementPlan, PlacementRequest, open_for_plan, parse_disk, usual_workload,
};
use super::super::{print, start, start_log, to_json};
use super::usage;
use crate::config::{Config, Overrides, parse_bytes, parse_duration};
use crate::model::ModelSource;
use crate::planner::placement::{Objective, Workload};
use anyhow::{Context, Result};
use clap::{Args, ValueEnum, ValueHint};
use report::PlacementReport;
use std::path::PathBuf;

/// Options of plans of a placement.
#[derive(Args)]
#[command(next_help_heading = "Placement")]
pub struct PlacementArgs {
    /// Memory of the program, such as 4GiB, instead of what is available.
    #[arg(long, value_name = "SIZE", conflicts_with = "PartitionArgs")]
    memory: Option<String>,
    /// Rate of the disk, such as 1.2GB/s, or a folder on the disk to measure and use.
    #[arg(long, value_name = "RATE|FOLDER", conflicts_with = "PartitionArgs")]
    disk: Option<String>,
    /// Tokens of a prompt; by default 512.
    #[arg(long, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..), conflicts_with = "PartitionArgs")]
    prompt: Option<u32>,
    /// Tokens of an answer; by default 128.
    #[arg(long, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..), conflicts_with = "PartitionArgs")]
    output: Option<u32>,
    /// Number of requests; by default 256.
    #[arg(long, value_name = "N",
          value_parser = clap::value_parser!(u32).range(1..), conflicts_with = "PartitionArgs")]
    requests: Option<u32>,
    /// Objective of the plan: most tokens per second, or the least time of a request.
    #[arg(long, value_name = "OBJECTIVE", default_value = "throughput", conflicts_with = "PartitionArgs")]
    objective: PlanObjective,
    /// Maximum time between two tokens of an answer, such as 500ms.
    #[arg(long, value_name = "TIME", conflicts_with = "PartitionArgs")]
    max_token_time: Option<String>,
    /// Allow weights and KV cache with 8 or 4 bits.
    #[arg(long, conflicts_with = "PartitionArgs")]
    allow_compression: bool,
    /// Measure this machine again.
    #[arg(long, conflicts_with = "PartitionArgs")]
    measure: bool,
    /// Write the best policy to a file, for --policy-file of other commands.
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath, conflicts_with = "PartitionArgs")]
    write: Option<PathBuf>,
}

/// Objectives of a plan.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum PlanObjective {
    Throughput,
    Latency,
}

/// Plans a placement, prints the plan, and writes the policy file if one is asked for.
pub fn run(model: Option<String>, args: PlacementArgs, config: ConfigFlags, json: bool) -> Result<()> {
    let write = args.write.clone();
    let (config, request, lengths) = args.layers(model, config)?;
    start_log(&config)?;
    let config = Config {
        model: start::fetch_model(config.model.clone(), &config.hub)?,
        speculation: start::fetch_draft(config.speculation.clone(), &config.hub)?,
        ..config
    };
    let mut source = open_for_plan(&config)?;
    let workload = lengths.workload(&config, &source);
    let request = PlacementRequest { workload: Some(workload), ..request };
    let plan = PlacementPlan::new(&config, &mut source, &request)?;
    let report = PlacementReport::new(&plan, request.objective);
    if let (Some(path), Some(best)) = (&write, plan.policies.first()) {
        let text = plan.policy(best).to_toml(&plan.settings(best));
        std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    print("plan", &if json { to_json(&report) } else { text::text(&report) })
}

/// The sizes of requests that are given.
struct Lengths {
    requests: Option<u32>,
    prompt: Option<u32>,
    output: Option<u32>,
}

impl Lengths {
    /// Returns the requests of the plan; what is not given is the usual.
    fn workload(&self, config: &Config, source: &ModelSource) -> Workload {
        let usual = usual_workload(config, source);
        let or = |given: Option<u32>, usual: usize| given.map_or(usual, |given| given as usize);
        Workload {
            requests: or(self.requests, usual.requests),
            prompt: or(self.prompt, usual.prompt),
            output: or(self.output, usual.output),
        }
    }
}

impl PlacementArgs {
    /// Returns the configuration, what is asked of the plan, and the sizes of requests.
    fn layers(
        self,
        model: Option<String>,
        config: ConfigFlags,
    ) -> Result<(Config, PlacementRequest, Lengths)> {
        let mut flags = Overrides::default();
        flags.set("model.path", model);
        flags.set_default("log.level", "warn");
        flags.set_default("tiers.placement", "auto");
        let file = config.add_to(&mut flags);
        let disk = self.disk.as_deref().map(parse_disk).transpose();
        let disk = disk.map_err(|reason| usage("--disk", &reason))?;
        if disk == Some(None) {
            flags.set("tiers.disk_path", self.disk);
        }
        let memory = self.memory.as_deref().map(parse_bytes).transpose();
        let memory = memory.map_err(|reason| usage("--memory", &reason))?;
        let longest = self.max_token_time.as_deref().map(parse_duration).transpose();
        let longest = longest.map_err(|reason| usage("--max-token-time", &reason))?;
        let request = PlacementRequest {
            memory: memory.map(|bytes| usize::try_from(bytes).unwrap_or(usize::MAX)),
            disk: disk.flatten(),
            workload: None,
            longest: None,
            objective: match self.objective {
                PlanObjective::Throughput => Objective::Throughput,
                PlanObjective::Latency => Objective::Latency,
            },
            max_token_seconds: longest.map(|time| time.as_secs_f64()),
            allow_compression: self.allow_compression,
            measure: self.measure,
        };
        let lengths = Lengths { requests: self.requests, prompt: self.prompt, output: self.output };
        Ok((Config::from_process(file.as_deref(), flags)?, request, lengths))
    }
}
