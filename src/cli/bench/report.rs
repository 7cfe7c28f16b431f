//! Benchmark results, and the values computed from them.
//!
//! Invariant: only samples are stored; all other values are computed from them.

use super::partition::rows::PartitionRow;
use super::roofline::{Bottleneck, StepWork};
use super::sample::{Sample, Summary, TestKind};
use super::speculation::rows::SpeculationRow;
use crate::cli::start::cpu_name;
use crate::config::{Config, KvConfig, SchedulerConfig};
use crate::model::ModelSource;
use crate::model::executor::ExecutorReport;
use crate::model::load;
use crate::model::offload::{Stream, Timeline, TransferTotals};
use mainstem_kernels::cpu::Roofline;
use serde::Serialize;

/// The results of one run.
pub struct BenchReport {
    pub machine: MachineInfo,
    pub model: Option<ModelFacts>,
    pub settings: EngineSettings,
    pub allocated: Option<AllocatedMemory>,
    pub rows: Vec<BenchRow>,
    /// Results of the partition benchmark.
    pub partitions: Vec<PartitionRow>,
    /// Results of the benchmark of speculative decoding.
    pub speculation: Vec<SpeculationRow>,
    /// The last step, if it was traced.
    pub timeline: Option<Timeline>,
    /// Notes for the reader, such as skipped tests.
    pub notes: Vec<String>,
    /// Whether the run ended before all tests were measured.
    pub interrupted: bool,
}

/// The machine that was measured.
#[derive(Debug, Serialize)]
pub struct MachineInfo {
    /// Name of the CPU.
    pub cpu: String,
    /// Cores that this process may use.
    pub cores: usize,
    /// Device name, instruction set and threads. Empty if no device was built.
    pub device: String,
}

/// The model that was measured.
#[derive(Debug, Serialize)]
pub struct ModelFacts {
    pub name: String,
    pub parameters: usize,
    /// Bytes of the weights as loaded.
    pub weight_bytes: usize,
    /// Number formats of the matrices.
    pub dtype: String,
    /// Context length: maximum tokens of prompt and answer together.
    pub context: usize,
}

/// Engine configuration of the run.
#[derive(Debug, Serialize)]
pub struct EngineSettings {
    pub repeat: u32,
    pub slots: usize,
    pub token_budget: usize,
    pub policy: &'static str,
    pub shuffle: bool,
    pub kv_type: &'static str,
    /// KV page size in tokens.
    pub page_size: usize,
}

/// Allocated memory, by purpose.
#[derive(Debug, Serialize)]
pub struct AllocatedMemory {
    pub weight_bytes: usize,
    pub kv_bytes: usize,
    pub kv_positions: usize,
    pub activation_bytes: usize,
    pub step_bytes: usize,
}

/// The samples of one test.
pub struct BenchRow {
    pub kind: TestKind,
    pub sequences: usize,
    /// Tokens per sequence in one sample: of its prompt, or of its answer.
    pub tokens: usize,
    /// Bytes of weights that every step reads, if that bounds the speed.
    pub weight_bytes: Option<usize>,
    /// Minimum work of each step, if known.
    pub work: Option<StepWork>,
    pub samples: Vec<Sample>,
    /// Transfers between memory and disk in the runs of the test, if there were any.
    pub offload: Option<OffloadBreakdown>,
}

/// The times and streams of the runs of a test, with weights or KV caches on disk. The runs include what is
/// not in the samples, such as prompts before decoding.
#[derive(Clone, Debug, Default, Serialize)]
pub struct OffloadBreakdown {
    pub seconds: f64,
    /// Seconds in which no device waited for a stream: of several devices, the sum is counted.
    pub compute_seconds: f64,
    pub streams: Vec<StreamFigures>,
    /// Layers whose weights, or whose cache, were in a buffer when they were needed, and those that were not.
    pub layers_ready: u64,
    pub layers_late: u64,
    /// Mean fraction of the buffers for weights that were ready when a layer was needed, if weights are on
    /// disk.
    pub buffers_ready: Option<f64>,
    /// Uses of experts that were in memory when rows chose them, and of those that were read.
    pub expert_hits: u64,
    pub expert_misses: u64,
}

/// Transfers of a stream between the memory of devices and what is below.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct StreamFigures {
    pub stream: &'static str,
    /// Bytes that came from the memory of the host or went there, or from disk or to it.
    pub bytes: u64,
    /// Bytes of them that were in the memory of the host, if devices have memory of their own.
    pub host_bytes: u64,
    /// Seconds that devices waited for it.
    pub stall_seconds: f64,
}

impl OffloadBreakdown {
    /// Creates the breakdown of `seconds` in which this was moved; `None` if it is nothing.
    pub fn new(moved: &TransferTotals, seconds: f64) -> Option<OffloadBreakdown> {
        let of_stream = |(at, stream): (usize, Stream)| StreamFigures {
            stream: stream.name(),
            bytes: moved.bytes[at].iter().sum(),
            host_bytes: moved.bytes[at][0],
            stall_seconds: moved.stalls[at].as_secs_f64(),
        };
        let streams: Vec<_> = Stream::ALL.into_iter().enumerate().map(of_stream).collect();
        let stalled: f64 = streams.iter().map(|stream| stream.stall_seconds).sum();
        let (layers_ready, layers_late) = (moved.ready, moved.late);
        let compute_seconds = (seconds - stalled).max(0.0);
        let TransferTotals { expert_hits, expert_misses, .. } = *moved;
        let bytes: u64 = streams.iter().map(|stream| stream.bytes).sum();
        (layers_ready + layers_late + expert_hits + expert_misses + bytes > 0).then_some(OffloadBreakdown {
            seconds,
            compute_seconds,
            streams,
            layers_ready,
            layers_late,
            buffers_ready: moved.occupancy(),
            expert_hits,
            expert_misses,
        })
    }
}

/// The values of a row.
#[derive(Serialize)]
pub struct RowFigures<'a> {
    pub test: &'static str,
    pub sequences: usize,
    pub depth: Option<usize>,
    pub tokens: usize,
    pub tokens_per_s: Summary,
    /// Unit of `time`, such as "ms per step".
    pub time_is: &'static str,
    pub time: Summary,
    /// Bytes of weights read per second, at the median time.
    pub weight_bytes_per_s: Option<f64>,
    /// Fraction of the roofline: the minimum step time on this machine divided by the measured time.
    pub share: Option<Summary>,
    /// Bottleneck of most samples.
    pub limit: Option<Bottleneck>,
    /// Median tokens per second divided by that of one sequence.
    pub ratio: Option<f64>,
    pub samples: &'a [Sample],
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offload: Option<&'a OffloadBreakdown>,
}

impl BenchRow {
    /// Iterates over the samples with the minimum time of a step and its bottleneck.
    fn min_step_seconds(&self) -> impl Iterator<Item = (&Sample, (f64, Bottleneck))> {
        let min_seconds = |sample: &Sample| Some(self.work?.min_seconds(&sample.roofline?));
        self.samples.iter().filter_map(move |sample| Some((sample, min_seconds(sample)?)))
    }

    fn share(&self) -> Option<Summary> {
        let mut shares = self
            .min_step_seconds()
            .map(|(sample, (min_seconds, _))| min_seconds / sample.seconds_per_step())
            .peekable();
        shares.peek().is_some().then_some(())?;
        Some(Summary::from_values(shares))
    }

    /// Returns the bottleneck of most samples.
    fn limit(&self) -> Option<Bottleneck> {
        let (reading, all) = self.min_step_seconds().fold((0, 0), |(reading, all), (_, (_, limit))| {
            (reading + usize::from(limit == Bottleneck::Reading), all + 1)
        });
        (all > 0).then_some(if 2 * reading >= all { Bottleneck::Reading } else { Bottleneck::Arithmetic })
    }

    fn tokens_per_s(&self) -> Summary {
        Summary::from_values(self.samples.iter().map(Sample::tokens_per_s))
    }

    fn figures(&self, one: Option<f64>) -> RowFigures<'_> {
        let tokens_per_s = self.tokens_per_s();
        let (time_is, per_second) = self.kind.time_unit();
        let time =
            Summary::from_values(self.samples.iter().map(|sample| per_second * sample.seconds_per_step()));
        RowFigures {
            test: self.kind.name(),
            sequences: self.sequences,
            depth: self.kind.depth(),
            tokens: self.tokens,
            tokens_per_s,
            time_is,
            time,
            weight_bytes_per_s: self.weight_bytes.map(|bytes| bytes as f64 * per_second / time.median),
            share: self.share(),
            limit: self.limit(),
            ratio: one.filter(|_| self.kind.is_fused()).map(|one| tokens_per_s.median / one),
            samples: &self.samples,
            offload: self.offload.as_ref(),
        }
    }
}

impl ModelFacts {
    /// Collects the facts of a model as it is to be loaded.
    pub fn from_source(source: &ModelSource) -> ModelFacts {
        let tensors = load::records(source, &source.spec);
        let matrices = tensors.iter().filter(|tensor| tensor.shape.len() > 1);
        let mut types: Vec<&str> = matrices.map(|tensor| tensor.ty.name()).collect();
        types.sort_unstable();
        types.dedup();
        ModelFacts {
            name: source.name(),
            parameters: tensors.iter().map(|tensor| tensor.shape.iter().product::<usize>()).sum(),
            weight_bytes: tensors.iter().map(|tensor| tensor.bytes).sum(),
            dtype: types.join(", "),
            context: source.spec.context,
        }
    }
}

impl AllocatedMemory {
    /// Extracts the memory of a device's report. `kv_positions` is the KV cache size in tokens.
    pub fn from_report(built: &ExecutorReport, kv_positions: usize) -> AllocatedMemory {
        let &ExecutorReport { weight_bytes, kv_bytes, activation_bytes, step_bytes, .. } = built;
        AllocatedMemory { weight_bytes, kv_bytes, kv_positions, activation_bytes, step_bytes }
    }
}

impl BenchReport {
    /// Creates a report without results.
    pub fn new(config: &Config, repeat: u32) -> BenchReport {
        let machine = MachineInfo { cpu: cpu_name(), cores: cores(), device: String::new() };
        let settings = EngineSettings::from_config(config, repeat);
        BenchReport {
            machine,
            model: None,
            settings,
            allocated: None,
            rows: Vec::new(),
            partitions: Vec::new(),
            speculation: Vec::new(),
            timeline: None,
            notes: Vec::new(),
            interrupted: false,
        }
    }

    /// Records the engine's configuration and its device.
    pub fn record_device(&mut self, config: &Config, built: &ExecutorReport) {
        self.settings = EngineSettings::from_config(config, self.settings.repeat);
        self.machine.device = built.device.clone();
    }

    /// Returns the median roofline over all samples, if it was measured.
    pub fn roofline(&self) -> Option<Roofline> {
        let samples = || self.rows.iter().flat_map(|row| &row.samples);
        let all: Vec<Roofline> = samples().filter_map(|sample| sample.roofline).collect();
        if all.is_empty() {
            return None;
        }
        let median = |of: fn(&Roofline) -> f64| Summary::from_values(all.iter().map(of)).median;
        Some(Roofline {
            read: median(|all| all.read),
            f32: median(|all| all.f32),
            int8: median(|all| all.int8),
            bf16: median(|all| all.bf16),
        })
    }

    /// Computes the values of all rows that have samples.
    pub fn figures(&self) -> Vec<RowFigures<'_>> {
        let measured = || self.rows.iter().filter(|row| !row.samples.is_empty());
        let one = measured().find(|row| row.kind.is_fused() && row.sequences == 1);
        let one = one.map(|row| row.tokens_per_s().median);
        measured().map(|row| row.figures(one)).collect()
    }
}

impl EngineSettings {
    fn from_config(config: &Config, repeat: u32) -> EngineSettings {
        let SchedulerConfig { slots, token_budget, policy, shuffle, .. } = config.scheduler;
        let KvConfig { ty, page_size, .. } = config.kv;
        let policy = policy.name();
        EngineSettings { repeat, slots, token_budget, policy, shuffle, kv_type: ty.name(), page_size }
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::config::Overrides;

    fn summarize(values: &[f64]) -> (f64, f64, f64) {
        let Summary { min, median, max } = Summary::from_values(values.iter().copied());
        (min, median, max)
    }

    #[test]
    fn the_median_is_in_the_middle_whatever_the_order() {
        assert_eq!(summarize(&[3.0]), (3.0, 3.0, 3.0));
        assert_eq!(summarize(&[4.0, 1.0]), (1.0, 2.5, 4.0));
        assert_eq!(summarize(&[9.0, 1.0, 2.0]), (1.0, 2.0, 9.0));
        assert_eq!(summarize(&[8.0, 1.0, 4.0, 2.0]), (1.0, 3.0, 8.0));
    }

    pub fn row(what: TestKind, sequences: usize, seconds: &[f64]) -> BenchRow {
        let roofline = Some(Roofline { read: 1e4, f32: 1e6, int8: 1e6, bf16: 1e6 });
        let sample = |&seconds: &f64| Sample { tokens: 10 * sequences as u64, steps: 10, seconds, roofline };
        let samples = seconds.iter().map(sample).collect();
        let work = Some(StepWork { read: 1000.0, f32: 2e4 * sequences as f64, ..StepWork::default() });
        BenchRow { kind: what, sequences, tokens: 10, weight_bytes: Some(1000), work, samples, offload: None }
    }

    pub fn report(rows: Vec<BenchRow>) -> BenchReport {
        let config = Config::load(None, Overrides::default()).unwrap();
        BenchReport { rows, ..BenchReport::new(&config, 3) }
    }

    #[test]
    fn figures_are_made_of_the_samples() {
        let rows = vec![
            row(TestKind::Fused { depth: 8 }, 1, &[1.0, 2.0, 4.0]),
            row(TestKind::Fused { depth: 8 }, 4, &[2.0, 2.0, 8.0]),
            row(TestKind::Decode { depth: 7 }, 1, &[5.0]),
            row(TestKind::Prefill, 1, &[]),
        ];
        let report = report(rows);
        let figures = report.figures();
        assert_eq!(figures.len(), 3, "what was not measured is not shown");
        assert_eq!(figures[0].tokens_per_s, Summary { min: 2.5, median: 5.0, max: 10.0 });
        assert_eq!(figures[0].time, Summary { min: 100.0, median: 200.0, max: 400.0 });
        assert_eq!(figures[0].weight_bytes_per_s, Some(5000.0));
        let share = |i: usize| (figures[i].share.unwrap().median, figures[i].limit.unwrap());
        assert_eq!(share(0), (0.5, Bottleneck::Reading), "0.1 s to read what a step of 0.2 s needs");
        assert_eq!(share(1), (0.5, Bottleneck::Reading));
        assert_eq!((figures[0].ratio, figures[1].ratio, figures[2].ratio), (Some(1.0), Some(4.0), None));
        assert_eq!((figures[1].depth, figures[2].depth), (Some(8), Some(7)));
    }
}
