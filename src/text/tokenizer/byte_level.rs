//! Byte-level pairs: the library's model, with tokens that spell every byte as a printable character.
//!
//! Invariant: every pair and what it makes are tokens of the vocabulary.

use super::VOCAB_MAX;
use super::pipeline::{Normalizer, Stages};
use super::spelling::Spelling;
use anyhow::{Context, Result, anyhow, ensure};
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::{NormalizerWrapper, normalizers::NFC};

/// A vocabulary of tokens that pairs make.
pub struct ByteLevel {
    vocabulary: HashMap<String, u32>,
    merges: Merges,
}

/// Whether a word that is a token as a whole is looked at before its pairs merge.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WholeWords {
    Merged,
    Taken,
}

/// What happens to a text before it is split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Composing {
    /// Nothing.
    None,
    /// Characters and marks that make one character become it.
    Nfc,
}

/// An error that names two tokens with the same id.
pub fn different_ids(vocabulary: &HashMap<String, u32>) -> Result<()> {
    let mut by_id: Vec<(u32, &str)> = vocabulary.iter().map(|(token, id)| (*id, token.as_str())).collect();
    by_id.sort_unstable();
    for pair in by_id.windows(2) {
        let [(id, token), (next, other)] = [pair[0], pair[1]];
        ensure!(id != next, "the tokens '{token}' and '{other}' both have id {id}");
    }
    Ok(())
}

impl ByteLevel {
    /// A vocabulary without pairs yet. Ids must be different.
    pub fn new(vocabulary: HashMap<String, u32>) -> Result<ByteLevel> {
        ensure!(!vocabulary.is_empty(), "its vocabulary is empty");
        different_ids(&vocabulary)?;
        let largest = vocabulary.values().copied().max().unwrap_or_default();
        ensure!(largest < VOCAB_MAX, "its largest token id is {largest}: ids must be below {VOCAB_MAX}");
        Ok(ByteLevel { vocabulary, merges: Vec::new() })
    }

    /// Adds a pair, written with a space between, to merge after those before.
    pub fn push_merge(&mut self, line: &str) -> Result<()> {
        let parts = line.split_once(' ').filter(|(left, right)| !left.is_empty() && !right.contains(' '));
        let (left, right) =
            parts.with_context(|| format!("'{line}' is not two tokens with a space between"))?;
        for token in [left, right, &format!("{left}{right}")] {
            ensure!(self.id(token).is_some(), "'{line}': the vocabulary has no token '{token}'");
        }
        self.merges.push((left.to_owned(), right.to_owned()));
        Ok(())
    }

    /// The id of a token.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.vocabulary.get(token).copied()
    }

    /// One more than the largest id.
    pub fn len(&self) -> u32 {
        self.vocabulary.values().max().map_or(0, |largest| largest + 1)
    }

    /// What each id spells.
    pub fn pieces(&self) -> BTreeMap<u32, Vec<u8>> {
        self.vocabulary.iter().map(|(token, id)| (*id, Spelling::ByteLevel.bytes(token))).collect()
    }

    /// The stages of this vocabulary, for texts that `pre_tokenizer`, as `tokenizer.json` writes it, splits
    /// and spells.
    pub fn stages(
        self,
        composing: Composing,
        pre_tokenizer: Value,
        whole_words: WholeWords,
    ) -> Result<Stages> {
        let vocabulary: Vocab = self.vocabulary.into_iter().collect();
        let bpe = BPE::builder()
            .vocab_and_merges(vocabulary, self.merges)
            .ignore_merges(whole_words == WholeWords::Taken)
            .build();
        let nfc = || Normalizer::Library(NormalizerWrapper::NFC(NFC));
        Ok(Stages {
            algorithm: bpe.map_err(|e| anyhow!(e))?.into(),
            normalizer: (composing == Composing::Nfc).then(nfc),
            pre_tokenizer: Some(serde_json::from_value(pre_tokenizer)?),
            decoder: None,
        })
    }
}
