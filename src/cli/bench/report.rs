//! What was measured where, and the figures that are made of it.
//!
//! Invariant: only samples are stored; every figure follows from them.

use super::ceilings::{Limit, Work};
use super::partition::rows::PartitionRow;
use crate::config::{Config, KvConfig, SchedulerConfig};
use crate::model::ModelSource;
use crate::model::executor::ExecutorReport;
use crate::model::load;
use mainstem_kernels::cpu::Ceilings;
use serde::Serialize;

/// All that one run has to tell.
pub struct Report {
    pub machine: Machine,
    pub model: Option<ModelFacts>,
    pub settings: Settings,
    pub allocated: Option<Allocated>,
    pub rows: Vec<Row>,
    /// Of ways to divide the model, where those are measured.
    pub partitions: Vec<PartitionRow>,
    /// What a reader of the figures must know, such as tests that were left out.
    pub notes: Vec<String>,
    /// It ended before everything was measured.
    pub interrupted: bool,
}

/// Where it was measured.
#[derive(Debug, Serialize)]
pub struct Machine {
    /// The CPU's name.
    pub cpu: String,
    /// That this process may use.
    pub cores: usize,
    /// What computed: its name, instruction set and threads. Empty if nothing was built.
    pub device: String,
}

/// What was measured.
#[derive(Debug, Serialize)]
pub struct ModelFacts {
    pub name: String,
    pub parameters: usize,
    /// In the number formats they are loaded in.
    pub weight_bytes: usize,
    /// Those of the matrices.
    pub dtype: String,
    /// Tokens of prompt and answer together that the model was made for.
    pub context: usize,
}

/// What the engine was given.
#[derive(Debug, Serialize)]
pub struct Settings {
    pub repeat: u32,
    pub slots: usize,
    pub token_budget: usize,
    pub policy: &'static str,
    pub shuffle: bool,
    pub kv_type: &'static str,
    pub page_positions: usize,
}

/// Bytes, by purpose.
#[derive(Debug, Serialize)]
pub struct Allocated {
    pub weight_bytes: usize,
    pub kv_bytes: usize,
    pub kv_positions: usize,
    pub activation_bytes: usize,
    pub step_bytes: usize,
}

/// One measurement.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Sample {
    /// Tokens read or made, of all sequences together.
    pub tokens: u64,
    /// What the time is told of: steps, or 1.
    pub steps: u64,
    pub seconds: f64,
    /// What the machine could do right before.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ceilings: Option<Ceilings>,
}

/// The samples of one test.
pub struct Row {
    pub what: What,
    pub sequences: usize,
    /// Tokens of each sequence in one sample: of its prompt, or of its answer.
    pub tokens: usize,
    /// Weights that every step reads, in bytes, where that bounds the speed.
    pub weight_bytes: Option<usize>,
    /// What each step must do, where that is known.
    pub work: Option<Work>,
    pub samples: Vec<Sample>,
}

/// What a row measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    Prefill,
    /// With so many positions in the cache already.
    Decode {
        depth: usize,
    },
    /// The same for several sequences at once.
    Fused {
        depth: usize,
    },
    /// Layers around a device that takes no time.
    Loop,
    Events,
    Http,
}

/// A row's figures.
#[derive(Serialize)]
pub struct Figures<'a> {
    pub test: &'static str,
    pub sequences: usize,
    pub depth: Option<usize>,
    pub tokens: usize,
    pub tokens_per_s: Summary,
    /// What `time` is: its unit, and of what.
    pub time_is: &'static str,
    pub time: Summary,
    /// Bytes of weights read in a second, at the median.
    pub weight_bytes_per_s: Option<f64>,
    /// The least time that a step can take on this machine, over the time it took; and what limits it.
    pub share: Option<Summary>,
    pub limit: Option<Limit>,
    /// Median tokens per second, over that of one sequence.
    pub ratio: Option<f64>,
    pub samples: &'a [Sample],
}

/// Of several values.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Summary {
    pub min: f64,
    /// Between the two in the middle, when there are two.
    pub median: f64,
    pub max: f64,
}

impl Summary {
    /// Of at least one value; none is NaN.
    pub fn of(values: impl Iterator<Item = f64>) -> Summary {
        let mut values: Vec<f64> = values.collect();
        values.sort_by(f64::total_cmp);
        let [min, .., max] = values[..] else {
            let only = *values.first().expect("a summary is of something; anything else is a bug");
            return Summary { min: only, median: only, max: only };
        };
        let middle = values.len() / 2;
        let median = match values.len() % 2 {
            0 => (values[middle - 1] + values[middle]) / 2.0,
            _ => values[middle],
        };
        Summary { min, median, max }
    }
}

impl Sample {
    fn tokens_per_s(&self) -> f64 {
        self.tokens as f64 / self.seconds
    }

    fn seconds_per_step(&self) -> f64 {
        self.seconds / self.steps as f64
    }
}

impl What {
    pub fn name(self) -> &'static str {
        match self {
            What::Prefill => "prefill",
            What::Decode { .. } => "decode",
            What::Fused { .. } => "fused decode",
            What::Loop => "loop",
            What::Events => "loop + text",
            What::Http => "loop + text + HTTP",
        }
    }

    fn is_fused(self) -> bool {
        matches!(self, What::Fused { .. })
    }

    fn depth(self) -> Option<usize> {
        match self {
            What::Decode { depth } | What::Fused { depth } => Some(depth),
            _ => None,
        }
    }

    /// What the time of a sample's step is, and how many of it are a second.
    fn time(self) -> (&'static str, f64) {
        match self {
            What::Prefill => ("ms to first token", 1e3),
            What::Decode { .. } => ("ms per token", 1e3),
            What::Fused { .. } => ("ms per step", 1e3),
            What::Loop | What::Events | What::Http => ("us per step", 1e6),
        }
    }
}

impl Row {
    /// Of each sample the least time of a step, and what bounds it.
    fn least(&self) -> impl Iterator<Item = (&Sample, (f64, Limit))> {
        let least = |sample: &Sample| Some(self.work?.least(&sample.ceilings?));
        self.samples.iter().filter_map(move |sample| Some((sample, least(sample)?)))
    }

    fn share(&self) -> Option<Summary> {
        let mut shares =
            self.least().map(|(sample, (least, _))| least / sample.seconds_per_step()).peekable();
        shares.peek().is_some().then_some(())?;
        Some(Summary::of(shares))
    }

    /// What bounds most samples.
    fn limit(&self) -> Option<Limit> {
        let (reading, all) = self.least().fold((0, 0), |(reading, all), (_, (_, limit))| {
            (reading + usize::from(limit == Limit::Reading), all + 1)
        });
        (all > 0).then_some(if 2 * reading >= all { Limit::Reading } else { Limit::Arithmetic })
    }

    fn tokens_per_s(&self) -> Summary {
        Summary::of(self.samples.iter().map(Sample::tokens_per_s))
    }

    fn figures(&self, one: Option<f64>) -> Figures<'_> {
        let tokens_per_s = self.tokens_per_s();
        let (time_is, per_second) = self.what.time();
        let time = Summary::of(self.samples.iter().map(|sample| per_second * sample.seconds_per_step()));
        Figures {
            test: self.what.name(),
            sequences: self.sequences,
            depth: self.what.depth(),
            tokens: self.tokens,
            tokens_per_s,
            time_is,
            time,
            weight_bytes_per_s: self.weight_bytes.map(|bytes| bytes as f64 * per_second / time.median),
            share: self.share(),
            limit: self.limit(),
            ratio: one.filter(|_| self.what.is_fused()).map(|one| tokens_per_s.median / one),
            samples: &self.samples,
        }
    }
}

impl ModelFacts {
    /// Of a model as it is to be loaded.
    pub fn of(source: &ModelSource) -> ModelFacts {
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

impl Allocated {
    /// What a device was built of; `kv_positions` have room in its cache.
    pub fn of(built: &ExecutorReport, kv_positions: usize) -> Allocated {
        let &ExecutorReport { weight_bytes, kv_bytes, activation_bytes, step_bytes, .. } = built;
        Allocated { weight_bytes, kv_bytes, kv_positions, activation_bytes, step_bytes }
    }
}

impl Report {
    /// A report on what `config` asks for, with nothing measured yet.
    pub fn new(config: &Config, repeat: u32) -> Report {
        let machine = Machine { cpu: cpu_name(), cores: cores(), device: String::new() };
        let settings = Settings::of(config, repeat);
        Report {
            machine,
            model: None,
            settings,
            allocated: None,
            rows: Vec::new(),
            partitions: Vec::new(),
            notes: Vec::new(),
            interrupted: false,
        }
    }

    /// Notes what the engine was given, and its device.
    pub fn built(&mut self, config: &Config, built: &ExecutorReport) {
        self.settings = Settings::of(config, self.settings.repeat);
        self.machine.device = built.device.clone();
    }

    /// The medians of those that were measured beside the samples.
    pub fn ceilings(&self) -> Option<Ceilings> {
        let samples = || self.rows.iter().flat_map(|row| &row.samples);
        let all: Vec<Ceilings> = samples().filter_map(|sample| sample.ceilings).collect();
        if all.is_empty() {
            return None;
        }
        let median = |of: fn(&Ceilings) -> f64| Summary::of(all.iter().map(of)).median;
        Some(Ceilings {
            read: median(|all| all.read),
            f32: median(|all| all.f32),
            codes: median(|all| all.codes),
            bf16: median(|all| all.bf16),
        })
    }

    /// Of every row that has a sample.
    pub fn figures(&self) -> Vec<Figures<'_>> {
        let measured = || self.rows.iter().filter(|row| !row.samples.is_empty());
        let one = measured().find(|row| row.what.is_fused() && row.sequences == 1);
        let one = one.map(|row| row.tokens_per_s().median);
        measured().map(|row| row.figures(one)).collect()
    }
}

impl Settings {
    fn of(config: &Config, repeat: u32) -> Settings {
        let SchedulerConfig { slots, token_budget, policy, shuffle, .. } = config.scheduler;
        let KvConfig { ty, page_positions, .. } = config.kv;
        let policy = policy.name();
        Settings { repeat, slots, token_budget, policy, shuffle, kv_type: ty.name(), page_positions }
    }
}

/// What the system calls its CPU.
fn cpu_name() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("model name")?.split_once(':'));
    name.map_or_else(|| std::env::consts::ARCH.to_owned(), |(_, name)| name.trim().to_owned())
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::config::Overrides;

    fn of(values: &[f64]) -> (f64, f64, f64) {
        let Summary { min, median, max } = Summary::of(values.iter().copied());
        (min, median, max)
    }

    #[test]
    fn the_median_is_in_the_middle_whatever_the_order() {
        assert_eq!(of(&[3.0]), (3.0, 3.0, 3.0));
        assert_eq!(of(&[4.0, 1.0]), (1.0, 2.5, 4.0));
        assert_eq!(of(&[9.0, 1.0, 2.0]), (1.0, 2.0, 9.0));
        assert_eq!(of(&[8.0, 1.0, 4.0, 2.0]), (1.0, 3.0, 8.0));
    }

    pub fn row(what: What, sequences: usize, seconds: &[f64]) -> Row {
        let ceilings = Some(Ceilings { read: 1e4, f32: 1e6, codes: 1e6, bf16: 1e6 });
        let sample = |&seconds: &f64| Sample { tokens: 10 * sequences as u64, steps: 10, seconds, ceilings };
        let samples = seconds.iter().map(sample).collect();
        let work = Some(Work { read: 1000.0, f32: 2e4 * sequences as f64, ..Work::default() });
        Row { what, sequences, tokens: 10, weight_bytes: Some(1000), work, samples }
    }

    pub fn report(rows: Vec<Row>) -> Report {
        let config = Config::load(None, Overrides::default()).unwrap();
        Report { rows, ..Report::new(&config, 3) }
    }

    #[test]
    fn figures_are_made_of_the_samples() {
        let rows = vec![
            row(What::Fused { depth: 8 }, 1, &[1.0, 2.0, 4.0]),
            row(What::Fused { depth: 8 }, 4, &[2.0, 2.0, 8.0]),
            row(What::Decode { depth: 7 }, 1, &[5.0]),
            row(What::Prefill, 1, &[]),
        ];
        let report = report(rows);
        let figures = report.figures();
        assert_eq!(figures.len(), 3, "what was not measured is not shown");
        assert_eq!(figures[0].tokens_per_s, Summary { min: 2.5, median: 5.0, max: 10.0 });
        assert_eq!(figures[0].time, Summary { min: 100.0, median: 200.0, max: 400.0 });
        assert_eq!(figures[0].weight_bytes_per_s, Some(5000.0));
        let share = |i: usize| (figures[i].share.unwrap().median, figures[i].limit.unwrap());
        assert_eq!(share(0), (0.5, Limit::Reading), "0.1 s to read what a step of 0.2 s needs");
        assert_eq!(share(1), (0.5, Limit::Reading));
        assert_eq!((figures[0].ratio, figures[1].ratio, figures[2].ratio), (Some(1.0), Some(4.0), None));
        assert_eq!((figures[1].depth, figures[2].depth), (Some(8), Some(7)));
    }
}
