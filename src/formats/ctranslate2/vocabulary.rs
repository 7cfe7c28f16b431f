//! Vocabularies of CTranslate2: lists of tokens, whose positions are their ids.
//!
//! Invariant: the unknown token is in the list: it is appended to one that lacks it.

use crate::formats::Folder;
use anyhow::{Context, Result, ensure};
use std::collections::HashMap;

/// The token that stands for unknown ones if config.json names no other.
const UNKNOWN: &str = "<unk>";

/// A vocabulary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vocabulary {
    /// File name, for error messages.
    pub file: String,
    pub tokens: Vec<String>,
    /// Id of the unknown token.
    pub unknown: u32,
}

impl Vocabulary {
    /// Creates a vocabulary from the tokens in the order of their ids.
    pub fn new(file: &str, mut tokens: Vec<String>, unknown: Option<&str>) -> Vocabulary {
        let unknown = unknown.unwrap_or(UNKNOWN);
        let at = tokens.iter().position(|token| token == unknown).unwrap_or_else(|| {
            tokens.push(unknown.to_owned());
            tokens.len() - 1
        });
        Vocabulary { file: file.to_owned(), tokens, unknown: at as u32 }
    }

    /// Returns the id of a token.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.tokens.iter().position(|known| known == token).map(|id| id as u32)
    }

    /// Returns the ids of all tokens; of equal ones the first.
    pub fn ids(&self) -> HashMap<&str, u32> {
        let ids = 0..self.tokens.len() as u32;
        ids.zip(&self.tokens).rev().map(|(id, token)| (token.as_str(), id)).collect()
    }
}

/// Source and target vocabulary of a model; equal if it has only one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vocabularies {
    pub source: Vocabulary,
    pub target: Vocabulary,
}

impl Vocabularies {
    /// Reads the vocabularies of a folder. `unknown` is the token that stands for unknown ones. `None` if
    /// the folder has none.
    pub fn read(folder: &Folder, unknown: Option<&str>) -> Result<Option<Vocabularies>> {
        for name in ["shared_vocabulary", "vocabulary"] {
            if let Some(shared) = read(folder, name, unknown)? {
                return Ok(Some(Vocabularies { source: shared.clone(), target: shared }));
            }
        }
        let source = read(folder, "source_vocabulary", unknown)?;
        let target = read(folder, "target_vocabulary", unknown)?;
        let both = source.is_some() == target.is_some();
        ensure!(
            both,
            "{}: there is only one of the files source_vocabulary and target_vocabulary",
            folder.path().display()
        );
        Ok(source.zip(target).map(|(source, target)| Vocabularies { source, target }))
    }
}

fn read(folder: &Folder, name: &str, unknown: Option<&str>) -> Result<Option<Vocabulary>> {
    let (json, text) = (format!("{name}.json"), format!("{name}.txt"));
    if let Some(content) = folder.read(&json)? {
        let tokens: Vec<String> =
            serde_json::from_slice(&content).with_context(|| folder.file(&json).display().to_string())?;
        return Ok(Some(Vocabulary::new(&json, tokens, unknown)));
    }
    let Some(content) = folder.read_text(&text)? else { return Ok(None) };
    // Some tokens end with a carriage return, so it belongs to lines only if all have one.
    let lines: Vec<&str> = content.strip_suffix('\n').unwrap_or(&content).split('\n').collect();
    let cut = if lines.iter().all(|line| line.ends_with('\r')) { 1 } else { 0 };
    let tokens = lines.iter().map(|line| line[..line.len() - cut].to_owned()).collect();
    Ok(Some(Vocabulary::new(&text, tokens, unknown)))
}
