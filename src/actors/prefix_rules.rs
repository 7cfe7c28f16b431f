//! Rules for sharing pages: K and V of a token depend on the tokens before it, and on a few other facts,
//! which must be the same where sequences share.

use super::sequence::Sequence;
use crate::config::KvConfig;
use crate::memory::{PageHash, TokenChain};
use crate::model::ModelSpec;
use crate::model::rope::ReservedLengths;
use crate::request::DraftSource;
use mainstem_kernels::Fraction;
use std::iter;

/// The bit that marks generated tokens; token ids are smaller.
const GENERATED_MARK: u32 = 1 << 31;

/// The rules by which pages are shared.
#[derive(Clone, Debug, Default)]
pub struct PrefixRules {
    /// Whether all requests share pages; otherwise only the answers of one request do.
    pub across_requests: bool,
    /// Whether K and V of a generated token differ from those of the same token in a prompt: with sparse
    /// attention, generated tokens do not read all values.
    pub marks_generated: bool,
    /// Whether no pages are shared, because keys of a prompt depend on where its first chunk ends.
    pub is_off: bool,
    /// The reserved lengths of sequences for which K is the same.
    pub lengths: ReservedLengths,
}

impl PrefixRules {
    /// Returns the rules for a model and its draft model, if it has one: their K and V are in the same pages.
    pub fn new(config: &KvConfig, spec: &ModelSpec, draft: Option<&ModelSpec>) -> PrefixRules {
        PrefixRules {
            across_requests: config.prefix_cache && !spec.opens_with_heads(),
            is_off: spec.opens_with_heads(),
            marks_generated: config.sparse_attention != Fraction::ONE,
            lengths: ReservedLengths::of(iter::once(spec).chain(draft)),
        }
    }

    /// Returns the tokens of a sequence, hashed for pages of `page_positions` positions; `None` if its pages
    /// are not shared: those of an encoder-decoder model depend on the encoder input.
    pub fn chain(&self, sequence: &Sequence, page_positions: usize) -> Option<TokenChain> {
        let request = &sequence.request;
        if self.is_off || !request.encoder_input.is_empty() || request.prompt.is_empty() {
            return None;
        }
        let named = |name: &Option<_>| (name.is_some() as u8, name.clone().unwrap_or_default());
        let ((has_salt, salt), (has_adapter, adapter)) =
            (named(&request.cache_salt), named(&request.adapter));
        // The pages then hold K and V of the draft model, too.
        let drafts = request.speculation.is_some_and(|speculation| speculation.drafter == DraftSource::Model);
        let group = if self.across_requests { 0 } else { sequence.group };
        let class = self.lengths.class_of(sequence.positions()) as u64;
        let root = PageHash::root(&[
            &[has_salt, has_adapter, drafts.into()],
            salt.as_bytes(),
            adapter.as_bytes(),
            &class.to_le_bytes(),
            &group.to_le_bytes(),
        ]);
        let mut chain = TokenChain::new(root, page_positions);
        chain.extend(request.prompt.iter().copied());
        chain.extend(sequence.generated().iter().map(|token| token | self.generated_mark()));
        Some(chain)
    }

    /// Returns the bits that are added to generated tokens, so that they differ from a prompt's.
    pub fn generated_mark(&self) -> u32 {
        if self.marks_generated { GENERATED_MARK } else { 0 }
    }
}
