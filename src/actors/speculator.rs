//! The speculation of one sequence: where its drafts come from, and what became of them.
//!
//! Invariant: plain state, which a preempted sequence takes along.

use crate::decoding::SamplingPlan;
use crate::decoding::speculation::{AcceptanceRule, PromptLookup, SpeculationStats};
use crate::request::{DraftSource, Speculation};
use std::sync::Arc;

/// Number of tokens that the draft model computes together with making drafts. It misses tokens while a
/// sequence has no drafts.
const MISSING_MAX: usize = 16;

/// The speculation of one sequence.
pub struct Speculator {
    source: DraftSource,
    max_drafts: usize,
    rule: AcceptanceRule,
    /// Finds drafts in the text, if that is where they come from.
    lookup: Option<PromptLookup>,
    /// Number of leading positions whose tokens the draft model has computed.
    draft_positions: usize,
    /// Number of positions that the draft model can compute.
    context: usize,
    /// Number of drafts in the next step.
    depth: usize,
    /// Number of known positions that the draft model has not computed, and whether they are so many that it
    /// computes them before it makes drafts.
    missing: usize,
    is_behind: bool,
    /// Number of these that it computes in the next step, which then has no drafts.
    catch_up: usize,
    /// These drafts, if they are known before the step: those of the draft model are only if a step before
    /// made them.
    given: Vec<u32>,
    /// Whether all drafts so far of the step that is being processed were accepted.
    is_open: bool,
    /// Drafts of this step that were accepted.
    accepted_now: usize,
    stats: SpeculationStats,
    /// Numbers of drafts, and of those that were accepted, in all steps.
    drafted: usize,
    accepted: usize,
}

impl Speculator {
    /// Creates the speculation of a sequence. `prior` is the rate at which drafts of other sequences were
    /// accepted.
    pub fn new(
        speculation: Speculation,
        plan: Option<&SamplingPlan>,
        prompt: &Arc<[u32]>,
        prior: f64,
    ) -> Speculator {
        let Speculation { drafter: source, max_drafts, rule } = speculation;
        let lookup = match source {
            DraftSource::Model => None,
            DraftSource::PromptLookup { shortest, longest } => {
                Some(PromptLookup::new(shortest..=longest, prompt.clone()))
            }
        };
        Speculator {
            source,
            max_drafts,
            rule: plan.map_or(AcceptanceRule::Coupled, |plan| plan.acceptance(rule)),
            lookup,
            draft_positions: 0,
            context: 0,
            depth: 0,
            missing: 0,
            is_behind: false,
            catch_up: 0,
            given: Vec::new(),
            is_open: false,
            accepted_now: 0,
            stats: SpeculationStats::new(prior),
            drafted: 0,
            accepted: 0,
        }
    }

    /// Returns this speculation where the logits of drafts are not kept, so that nothing can be rejected by
    /// their probabilities: tokens are drawn as without speculation, from the same distribution.
    pub fn without_draft_logits(mut self) -> Speculator {
        if self.rule == AcceptanceRule::Rejection {
            self.rule = AcceptanceRule::Coupled;
        }
        self
    }

    /// Begins, or begins anew after a preemption, with the first positions computed by both models, as far as
    /// the draft model's `context` reaches.
    pub fn begin(&mut self, computed: usize, context: usize) {
        self.context = context;
        self.note_prompt(computed);
        (self.depth, self.catch_up) = (0, 0);
    }

    /// Uses the index of another sequence's prompt if both find their drafts in the same prompt.
    pub fn share_prompt(&mut self, other: &Speculator) {
        if let (Some(lookup), Some(other)) = (&mut self.lookup, &other.lookup) {
            lookup.share_prompt(other);
        }
    }

    /// Indexes up to `limit` tokens of the prompt, if drafts are found there. Returns their number.
    pub fn index_prompt(&self, limit: usize) -> usize {
        self.lookup.as_ref().map_or(0, |lookup| lookup.index_prompt(limit))
    }

    /// Returns whether the drafts come from the draft model.
    pub fn uses_model(&self) -> bool {
        self.source == DraftSource::Model
    }

    /// Returns the rule by which drafts are accepted.
    pub fn rule(&self) -> AcceptanceRule {
        self.rule
    }

    /// Begins the plan of a step: sets the maximum number of drafts, at most `limit`, and finds them if they
    /// come from the text. `known` is the number of positions whose tokens are known, and `rows` the number
    /// of rows that there are for speculation.
    pub fn begin_plan(&mut self, known: usize, limit: usize, rows: usize) {
        self.missing = known.saturating_sub(self.draft_positions);
        self.is_behind = self.uses_model() && self.missing > MISSING_MAX.min(1 + rows);
        self.catch_up = 0;
        self.depth = self.max_drafts.min(limit).min(rows);
        if let Some(lookup) = &self.lookup {
            self.given.clear();
            self.depth = lookup.propose(self.depth, &mut self.given);
        }
    }

    /// Sets the number of drafts in the next step, which is within its limit.
    pub fn set_depth(&mut self, depth: usize) {
        self.depth = depth;
        if self.lookup.is_some() {
            self.given.truncate(depth);
        }
    }

    /// Returns the number of tokens that the draft model has missed, if they are so many that they are
    /// computed before it makes drafts; else 0.
    pub fn missing_before_drafts(&self) -> usize {
        if self.is_behind { self.missing } else { 0 }
    }

    /// Makes the plan fit into `left` rows, and returns the rows that it takes. If the draft model is behind,
    /// it computes what it has missed instead of making drafts.
    pub fn fit_rows(&mut self, left: usize) -> usize {
        if self.uses_model() && self.depth > 0 && (self.is_behind || self.missing > 1 + left) {
            // The last token is left for the span that makes drafts.
            (self.depth, self.catch_up) = (0, (self.missing - 1).min(left));
        }
        self.set_depth(self.depth.min(left));
        self.rows()
    }

    /// Returns the number of rows that the plan adds to the next step, or to the draft model's part of it,
    /// whichever is more.
    pub fn rows(&self) -> usize {
        match self.depth {
            0 => self.catch_up,
            depth if self.uses_model() => depth.max(self.missing.saturating_sub(1)),
            depth => depth,
        }
    }

    /// Returns the number of missed positions that the draft model computes in the next step.
    pub fn catch_up(&self) -> usize {
        self.catch_up
    }

    /// Returns how often drafts were accepted.
    pub fn stats(&self) -> &SpeculationStats {
        &self.stats
    }

    /// Returns the number of drafts in the next step.
    pub fn depth(&self) -> usize {
        self.depth
    }

    /// Returns the drafts of the next step, if they are known before it: those of the draft model are only if
    /// a step before made them.
    pub fn given(&self) -> &[u32] {
        &self.given
    }

    /// Keeps the drafts that the draft model made for the next step.
    pub fn keep_drafts(&mut self, drafts: impl IntoIterator<Item = u32>) {
        self.given.clear();
        self.given.extend(drafts);
    }

    /// Returns the number of leading positions whose tokens the draft model has computed.
    pub fn draft_positions(&self) -> usize {
        self.draft_positions
    }

    /// Notes that the draft model computes the first `positions` positions, which are of the prompt.
    pub fn note_prompt(&mut self, positions: usize) {
        self.draft_positions = positions.min(self.context);
    }

    /// Takes note of the token that row `number` of a verification gives, and of the draft that the next row
    /// verifies, if there is one. `known` is the number of positions whose tokens were known before the step.
    /// Returns whether the draft was accepted.
    pub fn verify(&mut self, number: u32, token: u32, draft: Option<u32>, known: usize) -> bool {
        if number == 0 {
            self.drafted += self.depth;
            self.draft_positions = known;
            self.accepted_now = 0;
        }
        self.is_open = draft == Some(token);
        if self.is_open {
            self.accepted += 1;
            self.accepted_now += 1;
            // The draft model has computed all drafts but the last one.
            self.draft_positions += usize::from((number as usize) + 1 < self.depth);
        } else {
            self.stats.observe(self.depth, self.accepted_now);
        }
        self.is_open
    }

    /// Returns whether all drafts so far of the step that is being processed were accepted.
    pub fn is_open(&self) -> bool {
        self.is_open
    }

    /// Takes note of a token of the sequence.
    pub fn learn(&mut self, token: u32) {
        if let Some(lookup) = &mut self.lookup {
            lookup.push(token);
        }
    }

    /// Returns the number of leading positions that others may share, as far as it depends on the draft
    /// model.
    pub fn shared_positions(&self) -> usize {
        match self.source {
            // Nobody misses what is beyond the draft model's context.
            DraftSource::Model if self.draft_positions < self.context => self.draft_positions,
            DraftSource::Model => usize::MAX,
            DraftSource::PromptLookup { .. } => usize::MAX,
        }
    }

    /// Returns the numbers of drafts that were made and accepted.
    pub fn counts(&self) -> (usize, usize) {
        (self.drafted, self.accepted)
    }
}
