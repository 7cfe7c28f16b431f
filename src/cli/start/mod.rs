//! Engine startup: from a configuration to a running engine.
//!
//! Invariant: at most one spinner is shown at a time.

mod cache_folder;

mod cache_sizes;
mod choice_memory;

mod device_memory;
mod devices;

mod draft;

mod faults;
mod free_weights;

mod gpus;

mod memory;

mod overhead;

mod partition;

pub mod machine;

pub mod placement;

mod planned_tiers;

mod predictor;

mod tier_rules;
mod tiers;

pub mod measure;

#[cfg(test)]
mod tests;

pub use devices::{activation_type, describe_cpu, factories, forecast, merge_reports, observed_factories};
pub use draft::{attach_draft, fetch_draft};
pub use faults::inject_faults;
pub use gpus::{free_memory, unused as unused_gpus};
pub use machine::cpu_name;
pub use memory::MemoryBudget;
pub use partition::partition;
pub use placement::{JobSizes, with_placement};
pub use planned_tiers::TierSize;
pub use predictor::EnginePredictor;
pub use tiers::place_tiers;

use super::spinner::Spinner;
use crate::actors::classifier;
use crate::actors::engine::{self, DeviceProperties, Engine, EngineSetup};
use crate::actors::prompting_defaults::embeds;
use crate::config::{Config, DeviceConfig, DeviceName, FaultPlan, HubSettings, ModelConfig};
use crate::formats::{ChatTemplateSource, Folder, Gguf};
use crate::hub::{self, HubReference, ProgressBars};
use crate::model::offload::PackedStore;
use crate::model::source::{ModelRef, ModelSource, SourceKind};
use crate::model::spec::Kind;
use crate::model::spec::classifier::ClassifierSpec;
use crate::model::tensors;
use crate::model::{Partition, Shard};
use crate::text::{GgufVocabulary, Tokenizer, TokenizerFiles};
use anyhow::{Context, Result, bail, ensure};
use memory::EngineMemory;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::oneshot;
use tracing::warn;

/// An opened model with the sizes of all allocations, before anything is allocated.
pub struct PreparedModel {
    pub setup: EngineSetup,
    pub source: Arc<ModelSource>,
    pub tokenizer: Arc<Tokenizer>,
    pub device: DeviceConfig,
    pub faults: FaultPlan,
}

impl PreparedModel {
    /// Opens `model` with the configuration's options, and the configured draft model. `model` replaces the
    /// configured path.
    pub fn open(config: &Config, model: &ModelRef) -> Result<PreparedModel> {
        let _spinner = Spinner::start("opening the model");
        let (source, tokenizer) = open_with_draft(model, config)?;
        let mut setup = engine_setup(config, &source)?;
        setup.model.classifier = classifier::read(&source, &tokenizer)?.map(Arc::new);
        let (device, faults) = (config.device.clone(), config.faults.clone());
        Ok(PreparedModel { setup, source, tokenizer, device, faults })
    }

    /// The model's name in the API.
    pub fn name(&self) -> &str {
        &self.setup.model.name
    }

    /// Starts the actors and loads the weights.
    pub async fn start(self) -> Result<Engine> {
        let _spinner = Spinner::with_progress("loading the weights", self.source.progress.clone());
        check_memory(&self.device, &self.source, &self.setup)?;
        let factories = factories(&self.device, &self.source, &self.tokenizer, &self.setup);
        let factories = inject_faults(factories, &self.device.groups, &self.faults);
        engine::start(self.setup, self.tokenizer, factories).await
    }
}

/// Opens the configured model and its draft model. Hub models are fetched first. If the placement is to be
/// planned, it is, for requests of the usual sizes.
pub async fn prepare(config: &Config) -> Result<PreparedModel> {
    let config = with_placement(fetch_models(config).await?, None)?;
    let reference = configured_model(&config.model)?;
    if let Some(warning) = config.speculation.warning() {
        warn!("{}", warning.escape_debug());
    }
    PreparedModel::open(&config, &reference)
}

/// Opens the configured model as [`prepare`] does, for a server, which takes memory beside the engine.
pub async fn prepare_server(config: &Config) -> Result<PreparedModel> {
    prepare(&memory::with_reserve(fetch_models(config).await?)?).await
}

/// Fetches the configured model and its draft model if they are hub models, and returns the configuration
/// with their local folders.
pub async fn fetch_models(config: &Config) -> Result<Config> {
    let model = fetch_model_async(config.model.clone(), config.hub.clone()).await?;
    let (draft, hub) = (config.speculation.clone(), config.hub.clone());
    let speculation = off_loop(move || fetch_draft(draft, &hub)).await?;
    Ok(Config { model, speculation, ..config.clone() })
}

/// Returns the configured model, whose hub model is fetched already. Fails if the files that the settings
/// name cannot be opened.
pub fn configured_model(config: &ModelConfig) -> Result<ModelRef> {
    let model = ModelRef::parse(&config.path).context("model.path")?;
    if let ModelRef::Path(path) = &model {
        path.metadata().with_context(|| format!("model.path: cannot open the model {}", path.display()))?;
    }
    if let Some(file) = &config.spec {
        file.metadata().with_context(|| format!("model.spec: cannot read {}", file.display()))?;
    }
    Ok(model)
}

/// Opens the configured model, starts the actors and loads the weights.
pub async fn start_engine(config: &Config) -> Result<Engine> {
    prepare(config).await?.start().await
}

/// Computes the engine's sizes for a model divided among the configured devices.
pub fn engine_setup(config: &Config, source: &ModelSource) -> Result<EngineSetup> {
    partitioned_setup(config, source, partition(&config.device, source)?)
}

/// Computes the engine's sizes for a model divided as `partition` says.
pub fn partitioned_setup(config: &Config, source: &ModelSource, partition: Partition) -> Result<EngineSetup> {
    let estimate = |device: &DeviceName, shard: &Shard, kv, limits| {
        devices::estimate_device(device, shard, &config.device, source, (kv, limits))
    };
    let activation_type = devices::activation_type(&config.device)?;
    let properties = DeviceProperties { activation_type, estimate: &estimate, own_memory: &gpus::own_memory };
    EngineSetup::new(config, source, partition, properties)
}

/// Fails if the memory that an engine is going to allocate is not available to the process.
pub fn check_memory(device: &DeviceConfig, source: &ModelSource, setup: &EngineSetup) -> Result<()> {
    EngineMemory::predict(device, source, setup)?.check(setup)
}

/// Writes the stores of a model, one per configured device, beside the model if possible, and returns them.
/// Fails if a store cannot be written, or if the work is stopped through the model's progress.
pub fn write_stores(config: &Config, source: &ModelSource) -> Result<Vec<PackedStore>> {
    let (offload, partition) = (tiers::store_settings(config, source)?, partition(&config.device, source)?);
    devices::write_stores(&config.device, source, &partition, &offload)
}

/// Opens a model and its tokenizer.
pub fn open(model: &ModelRef, spec_file: Option<&Path>) -> Result<(Arc<ModelSource>, Arc<Tokenizer>)> {
    attach_tokenizer(ModelSource::open(model, spec_file)?)
}

/// Opens a model with its configured options, and its tokenizer.
pub fn open_configured(model: &ModelRef, config: &Config) -> Result<(Arc<ModelSource>, Arc<Tokenizer>)> {
    let mut source = open_source(model, &config.model)?;
    place_tiers(config, &mut source)?;
    attach_tokenizer(source)
}

/// Opens a model with its configured options and the configured draft model, and its tokenizer.
pub fn open_with_draft(model: &ModelRef, config: &Config) -> Result<(Arc<ModelSource>, Arc<Tokenizer>)> {
    let mut source = open_source(model, &config.model)?;
    let tokenizer = open_tokenizer(&source)?;
    attach_draft(&config.speculation, &mut source, &tokenizer)?;
    place_tiers(config, &mut source)?;
    Ok(share(source, tokenizer))
}

/// Opens the tokenizer of a model.
fn attach_tokenizer(source: ModelSource) -> Result<(Arc<ModelSource>, Arc<Tokenizer>)> {
    let tokenizer = open_tokenizer(&source)?;
    Ok(share(source, tokenizer))
}

/// Completes a model with its tokenizer: if the model names no end tokens, the tokenizer's is used.
fn share(mut source: ModelSource, tokenizer: Tokenizer) -> (Arc<ModelSource>, Arc<Tokenizer>) {
    if source.eos.is_empty() {
        source.eos.extend(tokenizer.eos_id());
    }
    (Arc::new(source), Arc::new(tokenizer))
}

/// Opens a model with the configured specification, weight formats and chat template. Fails if a weight rule
/// applies to no tensor.
pub fn open_source(model: &ModelRef, config: &ModelConfig) -> Result<ModelSource> {
    let mut source = ModelSource::open(model, config.spec.as_deref())?;
    let provenance = &source.spec.provenance;
    if !provenance.unread_keys.is_empty() {
        let (file, keys) = (provenance.config.display().to_string(), provenance.unread_keys.join(", "));
        warn!(
            "{} has keys that nothing reads, and that may change what the model computes: {}",
            file.escape_debug(),
            keys.escape_debug()
        );
    }
    if config.fast_openings {
        let outcome = source.spec.open_with_heads();
        outcome.with_context(|| format!("attention.mla is \"fast\": {}", source.path.display()))?;
    }
    source.weight_rules = config.weights.clone();
    let names: Vec<_> = tensors::required_slices(&source.spec).iter().map(|slice| slice.names()).collect();
    if let Some(pattern) = source.weight_rules.unused_pattern(&names) {
        bail!(
            "model.weights: '{pattern}' matches no tensor of {}, or only tensors of earlier rules",
            source.path.display()
        );
    }
    source.tokenizer_files =
        [&config.tokenizer, &config.target_tokenizer].map(|file| file.as_deref().map(Path::to_owned));
    if let Some(file) = &config.chat_template {
        let origin = file.display().to_string();
        let text = std::fs::read_to_string(file)
            .with_context(|| format!("model.chat_template: cannot read {origin}"))?;
        source.chat.template = Some(ChatTemplateSource { origin, text });
    }
    if !config.classifier_tokens.is_empty() {
        let head = source.spec.last_stack().head.as_ref().filter(|_| source.spec.kind == Kind::Decoder);
        let head = head.map(|head| head.table.clone()).with_context(|| {
            format!("model.classifier_tokens: {} is not a generative decoder", source.path.display())
        })?;
        source.spec.classifier = Some(ClassifierSpec::of_tokens(head, config.classifier_tokens.clone()));
    }
    let scores_pairs = source.spec.classifier.as_ref().is_some_and(ClassifierSpec::scores_pairs);
    ensure!(
        scores_pairs || config.pair_template.is_none(),
        "model.pair_template: {} has no classifier of pairs, which would read it",
        source.path.display()
    );
    // The state of a text's last token is that of a span of its own, which cannot follow an opening.
    ensure!(
        !config.fast_openings || source.spec.classifier.is_none() && !embeds(&source, config),
        "attention.mla is \"fast\": {} embeds or classifies texts, for which only \"absorbed\" is possible",
        source.path.display()
    );
    Ok(source)
}

/// Fetches a hub model and returns the configuration with its local folder and, unless one is configured, its
/// hub name as the served name. Other models are returned as they are. Blocks.
pub fn fetch_model(mut model: ModelConfig, settings: &HubSettings) -> Result<ModelConfig> {
    if HubReference::has_prefix(&model.path) {
        let reference = HubReference::parse(&model.path)?;
        model.path = fetch_folder(&reference, settings)?;
        if model.served_name.is_empty() {
            model.served_name = reference.repository().to_owned();
        }
    }
    Ok(model)
}

/// Downloads a hub model and returns its local folder. Blocks.
fn fetch_folder(reference: &HubReference, settings: &HubSettings) -> Result<String> {
    let folder = hub::fetch(reference, settings, &mut ProgressBars::default())?;
    Ok(folder.to_str().context("the path of the hub cache is not UTF-8")?.to_owned())
}

/// Runs [`fetch_model`] on a separate thread, which the process does not wait for at exit.
pub async fn fetch_model_async(model: ModelConfig, settings: HubSettings) -> Result<ModelConfig> {
    off_loop(move || fetch_model(model, &settings)).await
}

/// Runs a download on a separate thread, which the process does not wait for at exit.
pub async fn off_loop<T: Send + 'static>(download: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let (sender, receiver) = oneshot::channel();
    // The receiver may have been dropped.
    std::thread::spawn(move || _ = sender.send(download()));
    receiver.await.context("the download thread has panicked")?
}

/// Opens the model's tokenizer. Fails if it has far more tokens than the model.
pub fn open_tokenizer(source: &ModelSource) -> Result<Tokenizer> {
    let tokenizer = read_tokenizer(source)?;
    let named = || source.path.display().to_string();
    tokenizer.check_vocab_size(source.spec.vocab).with_context(named)?;
    tokenizer.source().check_vocab_size(source.spec.source_vocab).with_context(named)?;
    ensure!(
        !tokenizer.has_two_vocabularies() || source.spec.kind == Kind::EncoderDecoder,
        "{}: it has two tokenizers, but only an encoder-decoder can use both",
        named()
    );
    Ok(tokenizer)
}

fn read_tokenizer(source: &ModelSource) -> Result<Tokenizer> {
    let [own, target] = source.tokenizer_files.clone();
    let files = TokenizerFiles { tokenizer: own, target };
    match &source.kind {
        _ if files != TokenizerFiles::default() => {
            let folder = source.folder().unwrap_or_else(|| Folder::memory("no files", []));
            Tokenizer::from_files(&folder, &files)
        }
        SourceKind::HubFolder(folder) => Tokenizer::from_folder(folder),
        SourceKind::Gguf(gguf) => match GgufVocabulary::from_file(gguf)? {
            Some(own) => Tokenizer::from_gguf(gguf.path(), &own),
            None => tokenizer_beside_gguf(gguf, source.spec.vocab),
        },
        SourceKind::Llama2c => {
            Tokenizer::from_llama2c(&llama2c_tokenizer_file(&source.path)?, source.spec.vocab)
        }
        SourceKind::Synthetic => Tokenizer::bytes(source.spec.vocab),
    }
}

/// Opens the tokenizer in the folder of a GGUF file that has no vocabulary: `tokenizer.json` of a hub model,
/// else `tokenizer.bin` of a llama2.c model.
fn tokenizer_beside_gguf(gguf: &Gguf, vocab: usize) -> Result<Tokenizer> {
    let folder = gguf.folder();
    match (folder.has("tokenizer.json"), folder.has("tokenizer.bin")) {
        (true, _) => Tokenizer::from_folder(&folder),
        (false, true) => Tokenizer::from_llama2c(&folder.file("tokenizer.bin"), vocab),
        (false, false) => bail!(
            "{} has no vocabulary, and its folder has no tokenizer.json or tokenizer.bin",
            gguf.path().display()
        ),
    }
}

/// Returns the tokenizer file of a llama2.c model: `tokenizer.bin` in its folder, or the only `tok*.bin`
/// there.
fn llama2c_tokenizer_file(model: &Path) -> Result<PathBuf> {
    let folder = model.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let usual = folder.join("tokenizer.bin");
    if usual.exists() {
        return Ok(usual);
    }
    let entries = std::fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))?;
    let named_like_it = |path: &PathBuf| {
        let name = path.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
        name.starts_with("tok") && name.ends_with(".bin")
    };
    let mut found: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).filter(named_like_it).collect();
    match (found.pop(), found.is_empty()) {
        (Some(only), true) => Ok(only),
        (None, _) => bail!("the folder of {} has no tokenizer.bin or tok*.bin", model.display()),
        _ => bail!(
            "the folder of {} has several tok*.bin; rename the right one to tokenizer.bin",
            model.display()
        ),
    }
}
