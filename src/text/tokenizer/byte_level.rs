//! Byte-level BPE with the library's model; tokens write each byte as a printable character.
//!
//! Invariant: both parts of every merge and its result are tokens of the vocabulary.

use super::VOCAB_MAX;
use super::pipeline::{Normalizer, PipelineParts};
use super::spelling::ByteSpelling;
use anyhow::{Context, Result, anyhow, ensure};
use serde_json::Value;
use std::collections::{BTreeMap, HashMap};
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::{NormalizerWrapper, normalizers::NFC};

/// A byte-level BPE vocabulary with its merges.
pub struct ByteLevelVocabulary {
    vocabulary: HashMap<String, u32>,
    merges: Merges,
}

/// Whether a word that is a token is encoded as that token without applying merges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WholeWordLookup {
    Disabled,
    Enabled,
}

/// Unicode normalization of a text before it is split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnicodeNormalization {
    /// No normalization.
    None,
    /// Normalization form C: canonical composition.
    Nfc,
}

/// Checks that all ids are different. An error names two tokens with the same id.
pub fn check_unique_ids(vocabulary: &HashMap<String, u32>) -> Result<()> {
    let mut by_id: Vec<(u32, &str)> = vocabulary.iter().map(|(token, id)| (*id, token.as_str())).collect();
    by_id.sort_unstable();
    for pair in by_id.windows(2) {
        let [(id, token), (next, other)] = [pair[0], pair[1]];
        ensure!(id != next, "the tokens '{token}' and '{other}' both have id {id}");
    }
    Ok(())
}

impl ByteLevelVocabulary {
    /// Creates a vocabulary without merges. Fails if it is empty, or if ids are not unique or exceed the
    /// limit.
    pub fn new(vocabulary: HashMap<String, u32>) -> Result<ByteLevelVocabulary> {
        ensure!(!vocabulary.is_empty(), "its vocabulary is empty");
        check_unique_ids(&vocabulary)?;
        let largest = vocabulary.values().copied().max().unwrap_or_default();
        ensure!(largest < VOCAB_MAX, "its largest token id is {largest}: ids must be below {VOCAB_MAX}");
        Ok(ByteLevelVocabulary { vocabulary, merges: Vec::new() })
    }

    /// Appends a merge, written as two tokens with a space between them.
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

    /// Returns the id of a token.
    pub fn id(&self, token: &str) -> Option<u32> {
        self.vocabulary.get(token).copied()
    }

    /// Returns the largest id plus one.
    pub fn len(&self) -> u32 {
        self.vocabulary.values().max().map_or(0, |largest| largest + 1)
    }

    /// Returns the bytes of each id.
    pub fn pieces(&self) -> BTreeMap<u32, Vec<u8>> {
        self.vocabulary.iter().map(|(token, id)| (*id, ByteSpelling::ByteLevel.bytes(token))).collect()
    }

    /// Builds the pipeline components. `pre_tokenizer` is in the format of `tokenizer.json`; it splits texts
    /// and writes each byte as a printable character.
    pub fn pipeline_parts(
        self,
        composing: UnicodeNormalization,
        pre_tokenizer: Value,
        whole_words: WholeWordLookup,
    ) -> Result<PipelineParts> {
        let vocabulary: Vocab = self.vocabulary.into_iter().collect();
        let bpe = BPE::builder()
            .vocab_and_merges(vocabulary, self.merges)
            .ignore_merges(whole_words == WholeWordLookup::Enabled)
            .build();
        let nfc = || Normalizer::Library(NormalizerWrapper::NFC(NFC));
        Ok(PipelineParts {
            algorithm: bpe.map_err(|e| anyhow!(e))?.into(),
            normalizer: (composing == UnicodeNormalization::Nfc).then(nfc),
            pre_tokenizer: Some(serde_json::from_value(pre_tokenizer)?),
            decoder: None,
        })
    }
}
