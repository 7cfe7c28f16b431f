//! Components of a tokenizer: the common result of reading any kind of vocabulary other than
//! `tokenizer.json`.
//!
//! Invariant: an added token's bytes are its name, whatever the vocabulary has at its id.

use super::json::library_token_bytes;
use super::pipeline::{Pipeline, PipelineParts};
use super::token_bytes::TokenBytes;
use super::{DecodeMethod, Encoder, SurroundingTokens, Tokenizer};
use anyhow::Result;
use std::collections::BTreeMap;
use tokenizers::AddedToken;

/// Components of a tokenizer.
pub struct TokenizerParts {
    pub stages: PipelineParts,
    pub decode_method: DecodeMethod,
    /// Bytes of each id; unused if the library decodes.
    pub pieces: BTreeMap<u32, Vec<u8>>,
    /// Added tokens in the order of their ids.
    pub added: Vec<(u32, AddedToken)>,
    pub bos: Option<u32>,
    pub eos: Option<u32>,
    pub surrounding: SurroundingTokens,
}

impl TokenizerParts {
    /// Builds the tokenizer.
    pub fn build(self) -> Result<Tokenizer> {
        let TokenizerParts {
            stages,
            decode_method: joining,
            mut pieces,
            added,
            bos,
            eos,
            surrounding: around,
        } = self;
        let pipeline = Pipeline::new(stages, &added)?;
        pieces.extend(added.iter().map(|(id, token)| (*id, token.content.clone().into_bytes())));
        let largest = pieces.last_key_value().map_or(0, |(id, _)| *id);
        let pieces: TokenBytes = match joining {
            DecodeMethod::Bytes { .. } => {
                (0..=largest).map(|id| pieces.remove(&id).unwrap_or_default()).collect()
            }
            DecodeMethod::Library => library_token_bytes(&pipeline, largest)?,
        };
        let special = added.iter().filter(|(_, token)| token.special).map(|(id, _)| *id).collect();
        let encoder = Encoder::Pipeline(Box::new(pipeline));
        Ok(Tokenizer::new(encoder, joining, pieces, special, [bos, eos], around))
    }
}

/// Returns the id of the token `name`. Added tokens take precedence over those of the vocabulary, `find`.
pub fn find_token_id(
    added: &[(u32, AddedToken)],
    find: impl Fn(&str) -> Option<u32>,
    name: &str,
) -> Option<u32> {
    let added = added.iter().find(|(_, token)| token.content == name);
    added.map(|(id, _)| *id).or_else(|| find(name))
}
