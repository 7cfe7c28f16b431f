//! Tests of every fixture on every partition of up to four devices against a single device. Layer-wise splits
//! are bit-identical; with tensor-parallel sums, log-probabilities are close and greedy tokens are the same.
//!
//! The driver is minimal: one thread per rank plays the whole script; stages pass on bytes, and ranks use the
//! collectives of serving with smaller buffers, so that sums and columns are exchanged in several pieces.

mod activation_types;
mod script;
mod special_cases;
mod tolerance;

use crate::common::fixture;
use crate::encodings;
use crate::families::{decoders, family, others};
use crate::pickles::pickled;
use mainstem::model::executor::{Executor, KvCacheConfig, ModelExecutor};
use mainstem::model::partition::{Partition, Stage, StageRank};
use mainstem::model::shard::{ExpertSplit, ShardError};
use mainstem::model::spec::{LayerSpec, LinearSpec, MlpSpec, ModelSpec};
use mainstem::model::{ModelRef, ModelSource, Shard};
use mainstem_kernels::ActivationPrecision;
use mainstem_kernels::collective::local;
use mainstem_kernels::cpu::{CpuBackend, CpuConfig, Isa};
use mainstem_kernels::reference::Reference;
use mainstem_kernels::{Abort, ActivationHandoff, Backend, HandoffPorts, LocalRank, QuantType, StepOutput};
use script::Script;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use tolerance::{Near, check};

/// Tolerance of log-probabilities and hidden states if sums are computed in another order.
const TOLERANCE: f32 = 1e-4;
/// Tolerance with keys and values in half precision.
const HALF_TOLERANCE: f32 = 2e-3;

/// Sizes of the exchange buffers, cycled over the partitions: smaller than a row of logits, smaller than the
/// rows of a prompt, and larger than everything.
const EXCHANGED: [usize; 3] = [37, 300, 1 << 15];

fn open(path: &Path) -> ModelSource {
    ModelSource::open(&ModelRef::Path(path.to_owned()), None).expect("the fixture opens")
}

/// Creates an executor on the device kind that the name begins with.
fn device(
    name: &str,
    source: &ModelSource,
    shard: &Shard,
    kv: KvCacheConfig,
    place: Option<LocalRank>,
) -> Box<dyn Executor> {
    fn made<B: Backend>(
        mut backend: B,
        source: &ModelSource,
        shard: &Shard,
        kv: KvCacheConfig,
        place: Option<LocalRank>,
    ) -> Box<dyn Executor> {
        if let Some(place) = place {
            backend.join_stage(Box::new(place));
        }
        let limits = script::limits(&source.spec);
        Box::new(ModelExecutor::new(backend, source, shard, kv, limits).expect("the part loads"))
    }
    match name.starts_with("reference") {
        true => made(Reference::new(), source, shard, kv, place),
        false => made(cpu(), source, shard, kv, place),
    }
}

/// Creates an executor that does not round activations with BF16 weights: partial sums would be rounded
/// differently.
fn cpu() -> CpuBackend {
    let isas = [Isa::Avx512F, Isa::Avx2, Isa::Portable].into_iter();
    let made = |isa| {
        CpuBackend::new(CpuConfig { threads: 1, isa, activation_precision: ActivationPrecision::Int8 }).ok()
    };
    isas.filter_map(made).next().expect("the CPU is there")
}

/// Returns the output of a single device with a cache of this type.
fn script_of(source: &ModelSource, ty: QuantType) -> Script {
    Script::of(source, ty, |kv| device("cpu", source, &Shard::whole(&source.spec), kv, None))
}

/// One rank playing the script.
struct Player<'a> {
    source: &'a ModelSource,
    script: &'a Script,
    device: &'a str,
    shard: Shard,
    place: LocalRank,
    /// Input from the previous stage.
    from: Option<Receiver<Arc<ActivationHandoff>>>,
    /// Outputs to every rank of the next stage, for the first rank.
    to: Vec<Sender<Arc<ActivationHandoff>>>,
}

impl Player<'_> {
    fn play(self) -> Vec<StepOutput> {
        let mut executor = device(self.device, self.source, &self.shard, self.script.kv, Some(self.place));
        let mut outputs = Vec::new();
        for batch in &self.script.batches {
            let from = self.from.as_ref().map(|from| from.recv().expect("the stage before is there"));
            let (mut carried, mut output) = (ActivationHandoff::default(), StepOutput::default());
            let to = (!self.to.is_empty()).then_some(&mut carried);
            let flow = HandoffPorts { input: from.as_deref(), output: to, ..HandoffPorts::default() };
            executor.run(batch, flow, &mut output).expect("the step runs");
            let carried = Arc::new(carried);
            self.to.iter().for_each(|to| to.send(carried.clone()).expect("the next stage is there"));
            outputs.push(output);
        }
        outputs
    }
}

/// Plays the script on all ranks and returns the output of the first rank of the last stage. The exchange
/// buffers hold this many numbers.
fn play(source: &ModelSource, partition: &Partition, script: &Script, exchanged: usize) -> Vec<StepOutput> {
    thread::scope(|scope| {
        let (mut threads, mut next) = (Vec::new(), Vec::new());
        for (number, stage) in partition.stages.iter().enumerate().rev() {
            let (senders, receivers): (Vec<_>, Vec<_>) = stage.ranks.iter().map(|_| channel()).unzip();
            let places = local::create_ranks(stage.ranks.len(), exchanged, &Abort::new()).into_iter();
            let mut to = std::mem::replace(&mut next, senders);
            for (rank, (place, from)) in places.zip(receivers).enumerate() {
                let player = Player {
                    source,
                    script,
                    device: &stage.ranks[rank].device,
                    shard: partition.shard(number, rank),
                    place,
                    from: (number > 0).then_some(from),
                    to: std::mem::take(&mut to),
                };
                threads.push(scope.spawn(|| player.play()));
            }
        }
        // Joins every rank; a failed one has reported its error.
        let outputs: Vec<_> = threads.into_iter().map(|thread| thread.join()).collect();
        let mut outputs = outputs.into_iter().map(|output| output.expect("every rank plays to the end"));
        let answers = outputs.next().expect("the last stage was the first to begin");
        for output in outputs.flatten() {
            assert!(
                output.tokens.is_empty() && output.top_logprobs.is_empty() && output.hidden.is_empty(),
                "{output:?}"
            );
        }
        answers
    })
}

/// Returns all numbers of ranks per stage, for up to four devices.
fn shapes() -> Vec<Vec<usize>> {
    let mut all = vec![vec![]];
    let mut at = 0;
    while at < all.len() {
        let left = 4 - all[at].iter().sum::<usize>();
        let longer: Vec<_> = (1..=left).map(|ranks| [&all[at][..], &[ranks]].concat()).collect();
        all.extend(longer);
        at += 1;
    }
    all.retain(|shape| shape.iter().sum::<usize>() > 1);
    all
}

/// Returns the layer counts of the stages: even ones, and for layer-wise splits also the most uneven ones,
/// both ways.
fn layer_counts(layers: usize, shape: &[usize]) -> Vec<Vec<usize>> {
    let stages = shape.len();
    if stages > layers {
        return Vec::new();
    }
    let even = (0..stages).map(|stage| (stage + 1) * layers / stages - stage * layers / stages).collect();
    let mut all = vec![even];
    if shape.iter().all(|ranks| *ranks == 1) {
        for heavy in [0, stages - 1] {
            all.push((0..stages).map(|stage| if stage == heavy { layers + 1 - stages } else { 1 }).collect());
        }
    }
    all.dedup();
    all
}

/// Builds stages of these numbers of layers, the encoder's first, with ranks of these shares.
fn partition(spec: &ModelSpec, counts: &[usize], shares: &[Vec<u32>], experts: ExpertSplit) -> Partition {
    let of_encoder = spec.encoder.as_ref().map_or(0, |stack| stack.layers.len());
    let mut first = 0;
    let stages = counts.iter().zip(shares).map(|(count, shares)| {
        let layers = first..first + count;
        first = layers.end;
        let decoder = layers.start.saturating_sub(of_encoder)..layers.end.saturating_sub(of_encoder);
        let encoder = layers.start.min(of_encoder)..layers.end.min(of_encoder);
        let rank = |(rank, share): (usize, &u32)| StageRank { device: format!("cpu:{rank}"), share: *share };
        Stage { encoder, decoder, ranks: shares.iter().enumerate().map(rank).collect() }
    });
    Partition { stages: stages.collect(), experts }
}

/// Returns all partitions to test: equal and uneven shares, experts split by column and by expert.
fn partitions(spec: &ModelSpec) -> Vec<Partition> {
    let is_moe =
        spec.stacks().flat_map(|stack| &stack.layers).any(|layer| matches!(layer.mlp, MlpSpec::Experts(_)));
    let mut all = Vec::new();
    for shape in shapes() {
        let is_tensor_split = shape.iter().any(|ranks| *ranks > 1);
        for counts in layer_counts(spec.layers(), &shape) {
            let mut add = |share: fn(usize) -> u32, experts| {
                let shares: Vec<_> = shape.iter().map(|ranks| (0..*ranks).map(share).collect()).collect();
                all.push(partition(spec, &counts, &shares, experts));
            };
            add(|_| 1, ExpertSplit::Column);
            if is_tensor_split {
                add(|rank| [3, 1, 2, 1][rank], ExpertSplit::Column);
            }
            if is_tensor_split && is_moe {
                add(|rank| [1, 1, 2, 1][rank], ExpertSplit::Expert);
            }
        }
    }
    all
}

/// Returns the reason why a partition is refused, if any.
fn refusal(source: &ModelSource, partition: &Partition) -> Option<ShardError> {
    partition.shards().iter().flatten().find_map(|shard| source.shard_spec(shard).err())
}

/// Returns the maximum number of ranks of a stage: limited by the heads of a layer, and in block formats by
/// the blocks of a column. KV heads do not limit any fixture.
fn most(source: &ModelSource, stage: &Stage) -> usize {
    let spec = &source.spec;
    let of_encoder = spec.encoder.iter().flat_map(|stack| &stack.layers[stage.encoder.clone()]);
    let layers = of_encoder.chain(spec.decoder.iter().flat_map(|stack| &stack.layers[stage.decoder.clone()]));
    let blocks = |linear: &LinearSpec| {
        let tensor = source.checkpoint.tensor(&linear.weight.name).expect("the fixture opens");
        linear.k / tensor.quant_type().expect("it is computable").row().block_elements
    };
    let of_layer = |layer: &LayerSpec| {
        let of_mlp = match &layer.mlp {
            MlpSpec::Dense(dense) => blocks(&dense.down),
            MlpSpec::Experts(_) => usize::MAX,
        };
        layer.attention.heads.min(blocks(&layer.attention.o)).min(of_mlp)
    };
    layers.map(of_layer).min().expect("a stage has layers")
}

/// Plays the script on every possible partition and returns their number. Keys and values are stored as `ty`,
/// with the given tolerance.
fn check_partitions(name: &str, source: &ModelSource, (ty, tolerance): (QuantType, f32)) -> usize {
    let script = script_of(source, ty);
    let mut played = 0;
    for partition in partitions(&source.spec) {
        let what = format!("{name} on {partition:?}");
        let is_too_small = |stage: &&Stage| stage.ranks.len() > most(source, stage);
        match (refusal(source, &partition), partition.stages.iter().find(is_too_small)) {
            (None, None) => {}
            (Some(ShardError::TooManyRanks { ranks, most: allowed, .. }), Some(stage)) => {
                assert_eq!((ranks, allowed), (stage.ranks.len(), most(source, stage)), "{what}");
                continue;
            }
            (refusal, expected) => panic!("{what}: {refusal:?}, expected of {expected:?}"),
        }
        let is_exact = partition.stages.iter().all(|stage| stage.ranks.len() == 1);
        let near = if is_exact { Near::Bits } else { Near::Within(tolerance) };
        let exchanged = EXCHANGED[played % EXCHANGED.len()];
        check(&what, &play(source, &partition, &script, exchanged), &script.outputs, near);
        played += 1;
    }
    played
}

/// For models with at least two layers and two heads, both kinds of split are tested, and their combinations
/// if larger.
fn check_all(name: &str, source: &ModelSource) {
    let played = check_partitions(name, source, (QuantType::F32, TOLERANCE));
    let most = most(source, &Partition::single(&source.spec, "cpu:0").stages[0]);
    let minimum = if most >= 4 { 12 } else { 5 };
    let is_small = most < 2 || source.spec.layers() < 2;
    assert!(!is_small && played >= minimum, "{name}: only {played} were played, by {most} at most");
}

fn check_families(names: impl Iterator<Item = &'static str>) {
    for name in names {
        let source = open(&family(name, "partitions").0);
        match name {
            // Its rows are blocks, which no two ranks can share, so only the layers are divided.
            "ctranslate2_marian" => {
                let played = check_partitions(name, &source, (QuantType::F32, TOLERANCE));
                assert!(played >= 5, "{name}: only {played} were played");
            }
            _ => check_all(name, &source),
        }
    }
}

#[test]
fn decoders_answer_the_same_on_several_devices() {
    check_families(decoders().iter().copied().step_by(2));
}

#[test]
fn so_do_the_other_decoders() {
    check_families(decoders().iter().copied().skip(1).step_by(2));
}

/// Prompts begin with attention to keys and values of all heads, which ranks divide.
#[test]
fn so_do_models_with_openings() {
    for name in ["deepseek_v2", "minicpm3"] {
        let mut source = open(&family(name, "openings").0);
        source.spec.open_with_heads().expect("it has latent attention");
        check_all(&format!("{name} with openings"), &source);
    }
}

#[test]
fn so_do_encoders_and_models_with_both() {
    check_families(others());
}

/// Returns all models in these fixture directories.
#[test]
fn so_do_models_in_every_format() {
    let mut tried = 0;
    for folder in ["", "llama2c", "gguf"] {
        let entries = std::fs::read_dir(fixture(folder)).expect("the fixtures are there").flatten();
        let is_model = |path: &PathBuf| match path.extension().and_then(|ending| ending.to_str()) {
            Some("bin") => !path.ends_with("tokenizer.bin"),
            Some("gguf") => true,
            _ => path.join("config.json").exists(),
        };
        for path in entries.map(|entry| entry.path()).filter(is_model) {
            check_all(&path.display().to_string(), &open(&path));
            tried += 1;
        }
    }
    assert!(tried >= 26, "only {tried} were tried");
    check_all("pickled", &open(&pickled("zip", "partitions").0));
}

/// Ranks decode their rows and columns of matrices in the encodings of other packages.
#[test]
fn so_do_models_in_the_encodings_of_other_packages() {
    for style in encodings::STYLES {
        let source = open(&encodings::placed(style, "partitions").0);
        let most = most(&source, &Partition::single(&source.spec, "cpu:0").stages[0]);
        let played = check_partitions(style, &source, (QuantType::F32, TOLERANCE));
        assert!(most >= 2 && played >= 2, "{style}: only {played} were played, by {most} at most");
    }
}
