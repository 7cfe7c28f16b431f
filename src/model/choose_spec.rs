//! Chooses the specification of a model.
//!
//! Invariant: a given file comes before the folder's own, and that before a built-in one.

use super::spec::nearest::{Relative, nearest};
use super::spec::{SpecFile, UnknownType};
use crate::formats::{Checkpoint, Folder, HubConfig};
use anyhow::{Context, Error, Result, anyhow};
use std::path::Path;

/// File name of a folder's own specification.
pub const OWN_SPEC: &str = "spec.toml";

/// Adds to the error of an unknown type of models what to do about it.
pub fn with_nearest(error: Error, folder: &Folder, config: &HubConfig, checkpoint: &Checkpoint) -> Error {
    if !error.is::<UnknownType>() {
        return error;
    }
    let nearest = nearest(config, checkpoint.names()).map_or(String::new(), |nearest| {
        let Relative { name, known, names } = nearest;
        format!(" the nearest is '{name}', which has {known} of the {names} names of its tensors;")
    });
    anyhow!(
        "{error:#};{nearest} docs/models.md shows how to write one, and `mainstem spec check {}` lists the \
         differences",
        folder.path().display()
    )
}

/// Returns the given specification, otherwise the folder's own, otherwise the shipped one for its model type.
pub fn folder_spec(folder: &Folder, config: &HubConfig, spec_file: Option<&Path>) -> Result<SpecFile> {
    if let Some(file) = spec_file {
        let spec = read_spec(file)?;
        if let Some(model_type) = config.opt_str("model_type")?
            && !spec.model_types().iter().any(|known| known == model_type)
        {
            let known = spec.model_types().join(", ");
            let reason = format_args!(
                "{} is a specification of {known}, not of '{model_type}'; if it is right for this model, add \
                 '{model_type}' to its 'model_types'",
                file.display()
            );
            return Err(config.key_error("model_type", reason));
        }
        return Ok(spec);
    }
    if let Some(own) = folder.read_text(OWN_SPEC)? {
        return SpecFile::parse(&folder.file(OWN_SPEC).display().to_string(), &own);
    }
    let file = || config.file().display().to_string();
    let model_type = config
        .opt_str("model_type")?
        .with_context(|| format!("{}: the key 'model_type' is missing", file()))?;
    SpecFile::for_model_type(model_type).with_context(file)
}

/// Returns the given specification, otherwise the shipped one for a type.
pub fn given_or_shipped(spec_file: Option<&Path>, model_type: &str) -> Result<SpecFile> {
    match spec_file {
        Some(file) => read_spec(file),
        None => SpecFile::for_model_type(model_type),
    }
}

/// Reads a specification.
pub fn read_spec(file: &Path) -> Result<SpecFile> {
    let text = std::fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    SpecFile::parse(&file.display().to_string(), &text)
}
