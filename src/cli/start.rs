//! From a configuration to a running engine. The one place that names a concrete backend.

use crate::actors::device::Factory;
use crate::actors::engine::{self, Engine, EngineSetup};
use crate::config::{Config, DeviceConfig, DeviceKind};
use crate::model::executor::{Executor, KvPlan, ModelExecutor};
use crate::model::source::{ModelSource, SourceKind};
use crate::text::Tokenizer;
use anyhow::{Context, Result, bail};
use mainstem_kernels::StepLimits;
use mainstem_kernels::cpu::{CpuBackend, CpuConfig};
use mainstem_kernels::reference::Reference;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Opens the model, starts the actors, and loads the weights.
pub async fn engine(config: &Config) -> Result<Engine> {
    let mut source = ModelSource::open(&config.model.path, config.model.spec.as_deref())?;
    let tokenizer = Arc::new(tokenizer(&source)?);
    if source.eos.is_empty() {
        source.eos.extend(tokenizer.eos_id());
    }
    let source = Arc::new(source);
    let setup = EngineSetup::new(config, &source)?;
    let factory = factory(config.device.clone(), source, setup.kv, setup.limits);
    engine::start(setup, tokenizer, factory).await
}

/// Makes executors for the configured device, each time from the model's files.
pub fn factory(device: DeviceConfig, source: Arc<ModelSource>, kv: KvPlan, limits: StepLimits) -> Factory {
    Box::new(move || -> Result<Box<dyn Executor>> {
        match device.kind {
            DeviceKind::Cpu => {
                let backend = CpuBackend::new(CpuConfig { threads: device.threads, isa: device.isa })?;
                Ok(Box::new(ModelExecutor::new(backend, &source, kv, limits)?))
            }
            DeviceKind::Reference => Ok(Box::new(ModelExecutor::new(Reference::new(), &source, kv, limits)?)),
        }
    })
}

fn tokenizer(source: &ModelSource) -> Result<Tokenizer> {
    match source.kind {
        SourceKind::HubFolder => Tokenizer::from_folder(&source.path),
        SourceKind::Llama2c => Tokenizer::from_llama2c(&beside(&source.path)?, source.spec.vocab),
    }
}

/// The tokenizer of a llama2.c file: `tokenizer.bin` in its folder, or the one file there that is called
/// `tok*.bin`.
fn beside(model: &Path) -> Result<PathBuf> {
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
        (None, _) => bail!("{} has no tokenizer beside it: tokenizer.bin or tok*.bin", model.display()),
        _ => bail!("{} has several tok*.bin beside it; call the right one tokenizer.bin", model.display()),
    }
}
