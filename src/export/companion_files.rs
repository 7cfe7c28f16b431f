//! The files of a model folder that are not weights: settings, vocabulary, templates, licences.
//!
//! Invariant: they are copied byte for byte, except that config.json loses its `quantization_config`: written
//! weights are not stored by that method any more.

use super::write;
use crate::formats::{CONFIG_FILE, Folder, SentenceConfig};
use crate::model::choose_spec::OWN_SPEC;
use anyhow::{Context, Result};
use serde_json::value::RawValue;
use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

/// Suffixes of the names of such files.
const SUFFIXES: [&str; 7] = [".json", ".txt", ".model", ".spm", ".jinja", ".tiktoken", ".md"];
const NAMES: [&str; 4] = ["LICENSE", "LICENCE", "NOTICE", OWN_SPEC];

/// The files beside a GGUF file that apply to it.
const BESIDE_GGUF: [&str; 6] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "tokenizer.bin",
];

/// Returns whether a file with that name is copied along with the weights.
pub(super) fn is_companion_file(name: &str) -> bool {
    let is_index = name.ends_with(".index.json");
    let ends = SUFFIXES.iter().any(|ending| name.ends_with(ending));
    !is_index && (ends || NAMES.contains(&name) || BESIDE_GGUF.contains(&name))
}

/// Returns a config.json without the quantization method; `None` if it has none.
fn without_method(content: &[u8]) -> Result<Option<Vec<u8>>> {
    // Values keep their text: numbers are not read.
    let mut entries: BTreeMap<String, Box<RawValue>> = serde_json::from_slice(content)?;
    Ok(match entries.remove("quantization_config") {
        Some(_) => Some(serde_json::to_vec_pretty(&entries)?),
        None => None,
    })
}

/// Relative paths and contents of the files.
pub(super) struct CompanionFiles(Vec<(String, Cow<'static, [u8]>)>);

impl CompanionFiles {
    /// Reads the files of a hub model's folder. `spec` replaces the folder's own specification.
    pub(super) fn of_folder(folder: &Folder, spec: Option<&Path>) -> Result<CompanionFiles> {
        let mut names: Vec<String> =
            folder.names()?.into_iter().filter(|name| is_companion_file(name)).collect();
        names.extend(SentenceConfig::module_files(folder));
        names.sort_unstable();
        names.dedup();
        let mut settings = CompanionFiles::read(folder, names)?;
        for (name, content) in settings.0.iter_mut().filter(|(name, _)| name == CONFIG_FILE) {
            if let Some(rest) = without_method(content).with_context(|| name.clone())? {
                *content = rest.into();
            }
        }
        if let Some(spec) = spec {
            let own = std::fs::read(spec).with_context(|| format!("cannot read {}", spec.display()))?;
            settings.0.retain(|(name, _)| name != OWN_SPEC);
            settings.0.push((OWN_SPEC.to_owned(), own.into()));
        }
        Ok(settings)
    }

    /// Reads the files that apply to a GGUF file in that folder.
    pub(super) fn beside_gguf(folder: &Folder) -> Result<CompanionFiles> {
        CompanionFiles::read(folder, BESIDE_GGUF.map(str::to_owned).to_vec())
    }

    /// Reads those of the files that exist.
    fn read(folder: &Folder, names: Vec<String>) -> Result<CompanionFiles> {
        let mut found = Vec::new();
        for name in names.into_iter().filter(|name| folder.has(name)) {
            let content = folder.read_required(&name)?;
            found.push((name, content));
        }
        Ok(CompanionFiles(found))
    }

    pub(super) fn write(&self, to: &Path) -> Result<()> {
        for (name, content) in &self.0 {
            let path = to.join(name);
            if let Some(folder) = path.parent() {
                std::fs::create_dir_all(folder)
                    .with_context(|| format!("cannot write {}", folder.display()))?;
            }
            write::write_file(&path, content)?;
        }
        Ok(())
    }
}
