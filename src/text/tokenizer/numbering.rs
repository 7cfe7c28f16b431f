//! Vocabularies of models that number the tokens of a tokenizer in their own order.
//!
//! Invariant: all ids that a renumbered tokenizer takes and returns are the model's.

use super::token_bytes::TokenBytes;
use super::{Encoder, SurroundingTokens, Tokenizer};
use crate::formats::ctranslate2::vocabulary::Vocabulary;
use anyhow::{Context, Result, bail};

/// Stands for a token that the tokenizer does not have.
const NONE: u32 = u32::MAX;

/// The ids of tokens in both orders.
#[derive(Debug)]
pub(super) struct Numbering {
    /// Id of the model, by the id of the tokenizer.
    to_model: Vec<u32>,
    /// Id of the tokenizer, by the id of the model.
    to_own: Vec<u32>,
    unknown: u32,
}

impl Numbering {
    /// Returns the model's ids of tokens.
    pub(super) fn model_ids(&self, own: Vec<u32>) -> Vec<u32> {
        let id = |own: u32| self.to_model.get(own as usize).copied().filter(|id| *id != NONE);
        own.into_iter().map(|own| id(own).unwrap_or(self.unknown)).collect()
    }

    /// Returns the tokenizer's ids of tokens, without those that it does not have.
    pub(super) fn own_ids(&self, model: &[u32]) -> Vec<u32> {
        let own = |id: &u32| self.to_own.get(*id as usize).copied().filter(|own| *own != NONE);
        model.iter().filter_map(own).collect()
    }
}

impl Tokenizer {
    /// Gives the tokens of a `tokenizer.json` the ids of a vocabulary. Its tokens that the vocabulary lacks
    /// become the unknown one. Fails if the tokenizer lacks a token of the vocabulary, unless it also lacks
    /// all later ones, as vocabularies are padded. The error names the token.
    pub(super) fn renumbered(self, vocabulary: &Vocabulary) -> Result<Tokenizer> {
        let Encoder::Pipeline(pipeline) = &self.encoder else { bail!("bytes have no other ids") };
        let ids = vocabulary.ids();
        let name = |own: u32| pipeline.library().id_to_token(own);
        let to_model: Vec<u32> = (0..self.vocab_size() as u32)
            .map(|own| name(own).and_then(|name| ids.get(name.as_str()).copied()).unwrap_or(NONE))
            .collect();
        let mut to_own = vec![NONE; vocabulary.tokens.len()];
        for (own, model) in (0u32..).zip(&to_model).filter(|(_, model)| **model != NONE) {
            to_own[*model as usize] = own;
        }
        let end = to_own.iter().rposition(|own| *own != NONE).context("it has none of the model's tokens")?;
        if let Some(missing) = to_own[..end].iter().position(|own| *own == NONE) {
            let (token, file) = (&vocabulary.tokens[missing], &vocabulary.file);
            match ids.get(token.as_str()).filter(|first| **first as usize != missing) {
                Some(first) => bail!("the token '{token}' is both {first} and {missing} in {file}"),
                None => bail!("it has no token '{token}', which is {missing} in {file}"),
            }
        }
        // Tokens that the vocabulary lacks become the unknown one, even if the tokenizer does not have that.
        let end = end.max(vocabulary.unknown as usize);
        if (0u32..).zip(&to_model).all(|(own, model)| own == *model) {
            return Ok(self);
        }
        let model_id = |own: u32| to_model.get(own as usize).copied().filter(|model| *model != NONE);
        let pieces: TokenBytes = to_own[..=end].iter().map(|own| self.pieces.get(*own).to_vec()).collect();
        let special = self.special.iter().filter_map(|own| model_id(*own)).collect();
        let [bos, eos] = [self.bos, self.eos].map(|own| own.and_then(model_id));
        let SurroundingTokens { before, after, between, drop_first, drop_last } = self.surrounding;
        let [before, after, between] = [before, after, between]
            .map(|tokens| tokens.into_iter().filter_map(model_id).collect::<Vec<u32>>());
        let around = SurroundingTokens { before, after, between, drop_first, drop_last };
        let numbering = Numbering { to_model, to_own, unknown: vocabulary.unknown };
        let tokenizer = Tokenizer::new(self.encoder, self.joining, pieces, special, [bos, eos], around);
        Ok(Tokenizer { numbering: Some(numbering), ..tokenizer })
    }

    /// Adds tokens around every text, unless they are there already.
    pub(super) fn with_surrounding(mut self, before: Option<u32>, after: Option<u32>) -> Result<Tokenizer> {
        // A text with tokens of its own shows on which side a token is.
        let around = self.encode("a", true)?;
        let is_first = |token: &u32| around.first() == Some(token);
        let is_last = |token: &u32| around.last() == Some(token);
        let before = before.filter(|token| !is_first(token));
        let after = after.filter(|token| !is_last(token));
        self.surrounding.before.splice(0..0, before);
        self.surrounding.after.extend(after);
        Ok(self)
    }
}
