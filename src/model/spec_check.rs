//! Compares a specification with a model's files, and finds all that does not fit rather than the first.
//!
//! Invariant: no weights are read, and a model without differences can be loaded.

use super::choose_spec::{OWN_SPEC, folder_spec};
use super::source::read_folder;
use super::spec::nearest::{Relative, nearest};
use super::spec::{ModelSpec, SpecFile};
use super::tensors::{self, Differences};
use crate::formats::Folder;
use anyhow::Result;
use serde::Serialize;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// The comparison of a specification with a model.
#[derive(Debug, Serialize)]
pub struct SpecCheck {
    pub model: PathBuf,
    /// The file that was compared.
    pub specification: String,
    /// Whether the model has no specification, so that the nearest one was compared.
    pub is_relative: bool,
    /// The model's `model_type`; empty if there is none.
    pub model_type: String,
    /// The nearest built-in specification.
    pub nearest: Option<Relative>,
    /// Reasons for which the specification does not describe the model, other than names of tensors.
    pub problems: Vec<String>,
    /// Tensors that the specification requires and the files lack, with `{i}` for numbers.
    pub missing: Vec<Names>,
    /// Tensors that the files have and the specification does not use.
    pub unknown: Vec<Names>,
    /// Keys of config.json that nothing reads.
    pub unread_keys: Vec<String>,
}

/// Names of tensors that differ in numbers only.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub struct Names {
    pub pattern: String,
    pub count: usize,
}

impl SpecCheck {
    /// Compares the model in a folder with a specification: the given one, the folder's own, the built-in one
    /// for its type, or else the nearest. Fails if files cannot be read, or none is near.
    pub fn of_folder(path: &Path, spec_file: Option<&Path>) -> Result<SpecCheck> {
        let folder = Folder::disk(path);
        let (config, checkpoint) = read_folder(&folder)?;
        let relative = nearest(&config, checkpoint.names());
        let (spec, is_relative) = match folder_spec(&folder, &config, spec_file) {
            Ok(spec) => (spec, false),
            Err(error) if spec_file.is_some() || folder.has(OWN_SPEC) => return Err(error),
            Err(error) => match &relative {
                Some(relative) => (SpecFile::named(relative.name)?, true),
                None => return Err(error),
            },
        };
        let mut check = SpecCheck {
            model: path.to_owned(),
            specification: spec.file().to_owned(),
            is_relative,
            model_type: config.opt_str("model_type")?.unwrap_or_default().to_owned(),
            nearest: relative,
            problems: Vec::new(),
            missing: Vec::new(),
            unknown: Vec::new(),
            unread_keys: Vec::new(),
        };
        match spec.resolve(&config, &|name| checkpoint.tensor(name).is_some()) {
            Ok(spec) => check.add(&spec, tensors::compare(&spec, &checkpoint)),
            Err(error) => check.add_unresolved(&spec, &error, checkpoint.names()),
        }
        Ok(check)
    }

    /// Returns whether the specification describes the model.
    pub fn fits(&self) -> bool {
        !self.is_relative && self.problems.is_empty() && self.missing.is_empty() && self.unknown.is_empty()
    }

    fn add(&mut self, spec: &ModelSpec, Differences { missing, unfit, unknown }: Differences) {
        for Names { pattern, count } in alike(unfit.iter().map(|(name, _)| name.as_str())) {
            let first = unfit.iter().find(|(name, _)| without_numbers(name) == pattern);
            let others = if count > 1 { format!(" (and {} more like it)", count - 1) } else { String::new() };
            self.problems.extend(first.map(|(_, error)| format!("{error:#}{others}")));
        }
        self.missing = alike(missing.iter().map(String::as_str));
        self.unknown = alike(unknown.iter().map(String::as_str));
        self.unread_keys.clone_from(&spec.provenance.unread_keys);
    }

    /// Adds what is known if a value is missing: which tensors are required is not, but which it never names.
    fn add_unresolved<'a>(
        &mut self,
        spec: &SpecFile,
        error: &anyhow::Error,
        names: impl Iterator<Item = &'a str>,
    ) {
        self.problems = vec![format!("{error:#}")];
        let known = spec.known_names();
        self.unknown = alike(names.filter(|name| !known.contain(name)));
    }
}

/// Groups names that differ in numbers only, in the order of their first.
fn alike<'a>(names: impl Iterator<Item = &'a str>) -> Vec<Names> {
    let (mut groups, mut places): (Vec<Names>, HashMap<String, usize>) = Default::default();
    for name in names {
        let pattern = without_numbers(name);
        let place = *places.entry(pattern.clone()).or_insert(groups.len());
        match groups.get_mut(place) {
            Some(group) => group.count += 1,
            None => groups.push(Names { pattern, count: 1 }),
        }
    }
    groups
}

/// Returns a name with `{i}` for its first component that is a number, and `{e}` for the second.
fn without_numbers(name: &str) -> String {
    let mut marks = ["{i}", "{e}"].into_iter();
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let parts = name.split('.').map(|part| if is_number(part) { marks.next().unwrap_or(part) } else { part });
    parts.collect::<Vec<_>>().join(".")
}
