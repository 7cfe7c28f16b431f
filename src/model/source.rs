//! A model as the user names it: a hub's model folder, or a llama2.c file.
//!
//! Invariant: after `open` everything that was said about the model is read and consistent, tensors' names
//! and shapes included; none of their numbers has been touched yet.

use super::spec::{ModelSpec, SpecFile};
use super::tensors;
use crate::formats::{Checkpoint, GenerationConfig, HubConfig, Llama2cHeader};
use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};

/// An opened model.
pub struct ModelSource {
    /// The folder or file.
    pub path: PathBuf,
    pub kind: SourceKind,
    pub spec: ModelSpec,
    pub checkpoint: Checkpoint,
    /// Tokens that end a sequence.
    pub eos: Vec<u32>,
}

/// How the model lies on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SourceKind {
    /// A folder with config.json and safetensors.
    HubFolder,
    /// A llama2.c checkpoint, its tokenizer beside it.
    Llama2c,
}

/// llama2.c ends a text with the BOS token of the next one; EOS is there for good measure.
const LLAMA2C_EOS: [u32; 2] = [1, 2];

impl ModelSource {
    /// Opens `path`; `spec_file` takes the place of the shipped specification (a folder's own `spec.toml`
    /// does too).
    pub fn open(path: &Path, spec_file: Option<&Path>) -> Result<ModelSource> {
        let found = path.metadata().with_context(|| format!("cannot open the model {}", path.display()))?;
        let source =
            if found.is_dir() { open_folder(path, spec_file) } else { open_llama2c(path, spec_file) }?;
        tensors::check(path, &source.spec, &source.checkpoint)?;
        for id in &source.eos {
            ensure!(
                (*id as usize) < source.spec.vocab,
                "{}: eos_token_id {id} is not in the vocabulary of {}",
                path.display(),
                source.spec.vocab
            );
        }
        Ok(source)
    }

    /// The last part of the path, without a file's extension: what the model is called unless the user says.
    pub fn name(&self) -> String {
        let whole = self.path.canonicalize().unwrap_or_else(|_| self.path.clone());
        let part = match self.kind {
            SourceKind::HubFolder => whole.file_name(),
            SourceKind::Llama2c => whole.file_stem(),
        };
        part.map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
    }
}

fn open_folder(path: &Path, spec_file: Option<&Path>) -> Result<ModelSource> {
    let config = HubConfig::from_folder(path)?;
    let own = path.join("spec.toml");
    let spec = match spec_file.or(own.exists().then_some(own.as_path())) {
        Some(file) => read_spec(file)?,
        None => {
            let model_type = config
                .opt_str("model_type")?
                .with_context(|| format!("{}: the key 'model_type' is missing", config.file().display()))?;
            SpecFile::for_model_type(model_type).with_context(|| config.file().display().to_string())?
        }
    };
    let generation = GenerationConfig::from_folder(path, &config)?;
    Ok(ModelSource {
        path: path.to_owned(),
        kind: SourceKind::HubFolder,
        spec: spec.resolve(&config)?,
        checkpoint: Checkpoint::open_safetensors(path)?,
        eos: generation.eos,
    })
}

fn open_llama2c(path: &Path, spec_file: Option<&Path>) -> Result<ModelSource> {
    let (checkpoint, header) = Checkpoint::open_llama2c(path)?;
    let spec = match spec_file {
        Some(file) => read_spec(file)?,
        None => SpecFile::for_model_type("llama2c")?,
    };
    Ok(ModelSource {
        path: path.to_owned(),
        kind: SourceKind::Llama2c,
        spec: spec.resolve(&as_config(path, &header))?,
        checkpoint,
        eos: LLAMA2C_EOS.into_iter().filter(|id| (*id as usize) < header.vocab).collect(),
    })
}

fn read_spec(file: &Path) -> Result<SpecFile> {
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    SpecFile::parse(&file.display().to_string(), &text)
}

/// The header's sizes under the names that config.json has for them.
fn as_config(path: &Path, header: &Llama2cHeader) -> HubConfig {
    let sizes = [
        ("vocab_size", header.vocab),
        ("hidden_size", header.dim),
        ("intermediate_size", header.hidden_dim),
        ("num_hidden_layers", header.layers),
        ("num_attention_heads", header.heads),
        ("num_key_value_heads", header.kv_heads),
        ("max_position_embeddings", header.seq_len),
    ];
    let mut map: serde_json::Map<String, serde_json::Value> =
        sizes.into_iter().map(|(key, value)| (key.to_owned(), value.into())).collect();
    map.insert("tie_word_embeddings".to_owned(), header.shared_classifier.into());
    HubConfig::from_entries(path, map)
}
