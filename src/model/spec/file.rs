//! Parses specification files. Errors name the line and suggest the nearest known key.
//!
//! Invariant: unknown keys and values are errors, never ignored.

use super::classifier_table::ClassifierTable;
use super::inherit;
use super::tables::{EmbeddingTable, HeadTable, Override, SizeTable, SpecText};
use super::unread::{self, NamedKeys};
use super::unused;
use crate::specs;
use anyhow::{Context, Result, anyhow, ensure};
use std::collections::BTreeMap;
use std::sync::LazyLock;
use toml::Table;

/// The model types of each built-in file, with its index.
static TYPES: LazyLock<Vec<(usize, Vec<String>)>> = LazyLock::new(|| {
    let types = |text: &str| text.parse::<Table>().ok()?.remove("model_types")?.try_into().ok();
    specs::ALL.iter().enumerate().filter_map(|(at, (_, text))| Some((at, types(text)?))).collect()
});

/// The error that no built-in specification is for a type of models.
#[derive(Debug, thiserror::Error)]
#[error("there is no built-in specification for model_type '{0}'")]
pub struct UnknownType(String);

/// A parsed specification file whose values are not resolved yet.
#[derive(Clone, Debug)]
pub struct SpecFile {
    /// Name of the file, for error messages.
    pub(super) file: String,
    pub(super) text: Box<SpecText>,
    /// Its entries, with those of its bases.
    pub(super) entries: Table,
    /// The keys of config.json that it names.
    pub(super) named: NamedKeys,
}

impl SpecFile {
    /// Parses a specification, and adds what it inherits. Errors name `file`, and the line and key at fault.
    pub fn parse(file: &str, text: &str) -> Result<SpecFile> {
        let _: Box<SpecText> = toml::from_str(text).map_err(|error| parse_error(file, &error))?;
        let own: Table = toml::from_str(text).map_err(|error| parse_error(file, &error))?;
        let entries = inherit::with_base(own).with_context(|| file.to_owned())?;
        let spec = SpecFile::of_entries(file, entries)?;
        unused::check(&spec.text).with_context(|| file.to_owned())?;
        Ok(spec)
    }

    /// Parses the entries of a specification that was merged with values for many families, which may be of
    /// blocks that this one does not have.
    pub fn of_entries(file: &str, entries: Table) -> Result<SpecFile> {
        let named = unread::named_keys(&entries);
        unused::check_formulas(&entries).with_context(|| file.to_owned())?;
        let text: Box<SpecText> = entries.clone().try_into().map_err(|error| parse_error(file, &error))?;
        text.overrides.iter().try_for_each(check_override).with_context(|| file.to_owned())?;
        Ok(SpecFile { file: file.to_owned(), text, entries, named })
    }

    /// Returns the built-in specification with a name.
    pub fn named(name: &str) -> Result<SpecFile> {
        let (file, text) = specs::named(name).with_context(|| inherit::unknown_name(name))?;
        SpecFile::parse(file, text)
    }

    /// Returns the built-in specification for a `model_type` of config.json.
    pub fn for_model_type(model_type: &str) -> Result<SpecFile> {
        let (file, text) = SpecFile::built_in(model_type)?;
        SpecFile::parse(file, text)
    }

    /// Returns file name and entries of the built-in specification for a `model_type` of config.json, with
    /// what it inherits.
    pub fn shipped(model_type: &str) -> Result<(&'static str, Table)> {
        let (file, text) = SpecFile::built_in(model_type)?;
        Ok((file, inherit::with_base(text.parse().context(file)?).context(file)?))
    }

    fn built_in(model_type: &str) -> Result<(&'static str, &'static str)> {
        let found = TYPES.iter().find(|(_, types)| types.iter().any(|known| known == model_type));
        let (at, _) = found.ok_or_else(|| UnknownType(model_type.to_owned()))?;
        Ok(specs::ALL[*at])
    }

    /// Returns the name of the file.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Returns what is written in the file and in its bases.
    pub fn entries(&self) -> &Table {
        &self.entries
    }

    /// Returns the values of config.json's `model_type` that select this file.
    pub fn model_types(&self) -> &[String] {
        &self.text.model_types
    }

    /// Returns the keys of the configuration that would change what is computed, each with its supported
    /// values.
    pub fn supported_values(&self) -> &BTreeMap<String, Vec<serde_json::Value>> {
        &self.text.supported_values
    }
}

/// Checks that an override for some layers has no tables that concern the whole stack.
fn check_override(given: &Override) -> Result<()> {
    let Some(pick) = &given.layers else { return Ok(()) };
    let Override { size, embedding, head, classifier, .. } = given;
    for (table, is_empty) in [
        ("size", *size == SizeTable::default()),
        ("embedding", *embedding == EmbeddingTable::default()),
        ("head", *head == HeadTable::default()),
        ("classifier", *classifier == ClassifierTable::default()),
    ] {
        ensure!(
            is_empty,
            "an override for some layers cannot have a table '{table}', which applies to the whole stack"
        );
    }
    ensure!(pick.at.is_none() || pick.every.is_some(), "'layers.at' requires 'layers.every'");
    ensure!(pick.is.is_none() || pick.key.is_some(), "'layers.is' requires 'layers.key'");
    Ok(())
}

/// Describes a TOML error, with the nearest valid word for an unknown one.
fn parse_error(file: &str, error: &toml::de::Error) -> anyhow::Error {
    let message = error.message();
    let mut words = message.split('`').skip(1).step_by(2);
    let hint = match message.starts_with("unknown ") {
        true => words
            .next()
            .and_then(|wrong| nearest(wrong, words))
            .map(|word| format!("; did you mean `{word}`?")),
        false => None,
    };
    anyhow!("{file} is not a valid model specification: {error}{}", hint.unwrap_or_default())
}

fn nearest<'a>(word: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    known.min_by_key(|known| strsim::levenshtein(word, known))
}
