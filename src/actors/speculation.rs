//! The speculative decoding that an engine offers.
//!
//! Invariant: a draft model is listed here exactly if the devices load it.

use crate::config::{LookupSizes, SpeculationConfig};
use crate::model::ModelSource;
use crate::model::load;
use crate::model::spec::Kind;
use crate::request::{AcceptanceRule, DraftSource};
use anyhow::{Result, ensure};
use std::ops::Add;

/// The drafters of an engine, and the defaults of requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SpeculationSetup {
    /// The source of drafts for requests that choose none; `None` if these do not speculate.
    pub drafter: Option<DraftSource>,
    /// The draft model, if there is one. Prompt lookup is always possible.
    pub draft: Option<DraftModelFacts>,
    /// Maximum number of drafts of a sequence in a step; at least 1.
    pub max_drafts: usize,
    /// The rule of requests that choose none.
    pub acceptance: AcceptanceRule,
    pub lookup: LookupSizes,
}

/// Numbers of drafts of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DraftCounts {
    pub drafted: usize,
    pub accepted: usize,
}

/// Facts of a draft model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DraftModelFacts {
    pub name: String,
    /// Bytes of the weights as loaded.
    pub weight_bytes: usize,
    /// Maximum number of tokens of a sequence for which it makes drafts.
    pub context: usize,
}

impl SpeculationSetup {
    /// Returns the setup of an engine for `source`, to which its draft model is attached; `None` if
    /// speculative decoding is off, or nobody asks for it for a model that is not decoder-only. Fails if the
    /// configuration asks for it there.
    pub fn new(config: &SpeculationConfig, source: &ModelSource) -> Result<Option<SpeculationSetup>> {
        let draft = source.draft.as_deref().map(DraftModelFacts::from_source);
        let can_draft = |drafter: &DraftSource| *drafter != DraftSource::Model || draft.is_some();
        let drafter = config.drafter().filter(can_draft);
        let is_decoder = source.spec.kind == Kind::Decoder;
        ensure!(
            is_decoder || drafter.is_none(),
            "speculation: {} is not a decoder-only model, so no drafts can be made for it",
            source.name()
        );
        let &SpeculationConfig { max_drafts, acceptance, lookup, .. } = config;
        let setup = SpeculationSetup { drafter, draft, max_drafts, acceptance, lookup };
        Ok((is_decoder && !config.is_off()).then_some(setup))
    }
}

impl Add for DraftCounts {
    type Output = DraftCounts;

    fn add(self, other: DraftCounts) -> DraftCounts {
        let (drafted, accepted) = (self.drafted + other.drafted, self.accepted + other.accepted);
        DraftCounts { drafted, accepted }
    }
}

impl DraftModelFacts {
    fn from_source(draft: &ModelSource) -> DraftModelFacts {
        DraftModelFacts {
            name: draft.name(),
            weight_bytes: load::records(draft, &draft.spec).iter().map(|record| record.bytes).sum(),
            context: draft.spec.context,
        }
    }
}
