//! The host's part in choosing the tokens of a sequence: draws that a device cannot make, and the masks of
//! grammars. It is computed by a pool of threads while the device works, and reaches the device as late
//! inputs of the step, so that neither the decode loop nor rows that the device draws wait for it.
//!
//! Invariant: which tokens come out depends on the logits, the plan, the grammar, the seed and the position,
//! not on when anything is computed.

mod constraint;

mod pool;

mod record;

mod rows;

#[cfg(test)]
mod tests;

pub use constraint::Constraint;
pub use pool::{HostPool, HostWork, Observer};
pub use record::LogprobReport;

use super::speculation::AcceptanceRule;
use super::strategies::{SamplingPlan, SequenceState};
use mainstem_grammar::GrammarError;
use mainstem_kernels::late::LateInputs;
use mainstem_kernels::{SampleMode, SamplingParams};
use pool::Job;
use record::Record;
use rows::RowContext;
use std::sync::Arc;

/// The host's part of one sequence. Work that was queued before it is dropped is still done, for nobody.
pub struct HostSequence {
    record: Arc<Record>,
    pool: Arc<HostPool>,
}

impl HostSequence {
    /// Begins a sequence of at most `max_tokens` generated tokens. The host draws them if there is a `plan`,
    /// and computes masks if there is a `constraint`; `None` if there is neither. `jump_limit` is the maximum
    /// number of tokens that [`Self::accept`] returns.
    pub fn begin(
        pool: &Arc<HostPool>,
        plan: Option<&Arc<SamplingPlan>>,
        constraint: Option<&Arc<Constraint>>,
        prompt: &[u32],
        max_tokens: u32,
        jump_limit: usize,
    ) -> Option<HostSequence> {
        if plan.is_none() && constraint.is_none() {
            return None;
        }
        let state = plan.map(|plan| SequenceState::new(plan, prompt, max_tokens as usize));
        let words = pool.vocabulary().div_ceil(u32::BITS as usize);
        let record = Arc::new(Record::new(plan.cloned(), state, constraint.cloned(), words, jump_limit));
        if constraint.is_some() {
            pool.submit(Job::Begin { record: record.clone() });
        }
        Some(HostSequence { record, pool: pool.clone() })
    }

    /// Returns whether the host draws the tokens.
    pub fn draws(&self) -> bool {
        self.record.plan.is_some()
    }

    /// Registers the row that samples the next token with the late inputs of its step, and completes its
    /// parameters.
    pub fn register(&self, late: &Arc<LateInputs>, row: usize, params: &mut SamplingParams) {
        if self.draws() {
            self.register_verified(late, row, params, AcceptanceRule::Coupled, 0);
        } else {
            params.masked = true;
            self.record.want_mask(late.mask_sender(row));
        }
    }

    /// Registers row number `index` of a span that verifies drafts, and completes its parameters; only for a
    /// sequence whose tokens the host draws. All rows of the span must be registered, in their order. Row 0
    /// computes the last known token, and each of the others a draft. A row gets its token by `rule` if the
    /// rows before it drew all drafts up to its own; otherwise it gets any token and changes nothing. So what
    /// follows the first token that is not the draft of the next row must be ignored.
    pub fn register_verified(
        &self,
        late: &Arc<LateInputs>,
        row: usize,
        params: &mut SamplingParams,
        rule: AcceptanceRule,
        index: usize,
    ) {
        let plan = self.record.plan.as_ref();
        let context = RowContext {
            seed: params.seed,
            position: params.position,
            logprobs: params.logprob.then_some(params.top_logprobs),
            rule: plan.map_or(AcceptanceRule::Coupled, |plan| plan.acceptance(rule)),
            computes_draft: index > 0,
        };
        params.mode = SampleMode::Host;
        late.draw_with(row, self.pool.draw(self.record.clone(), context));
    }

    /// Takes note of a sampled token that continues the sequence, whoever drew it. It must be called for
    /// each, in order. Returns the tokens that follow without a choice, if the grammar allowed no other
    /// token than this one: they belong to the output, the next row samples the token after them, and they
    /// are not accepted again. Whether there are such tokens depends on the grammar and the tokens before
    /// alone.
    pub fn accept(&self, token: u32) -> Vec<u32> {
        if self.draws() {
            return Vec::new();
        }
        self.record.take_forced().unwrap_or_else(|| {
            self.pool.submit(Job::Advance { record: self.record.clone(), token });
            Vec::new()
        })
    }

    /// Returns the log-probabilities of the next token that was drawn, if they are those of the candidates
    /// and not of the model.
    pub fn take_report(&self) -> Option<LogprobReport> {
        self.record.take_report()
    }

    /// Returns why the sequence cannot go on, if it cannot.
    pub fn error(&self) -> Option<GrammarError> {
        self.record.error()
    }
}

impl Drop for HostSequence {
    fn drop(&mut self) {
        // Freeing a grammar's state takes time, which the threads of the pool have.
        if self.record.is_constrained() {
            self.pool.submit(Job::End { record: self.record.clone() });
        }
    }
}
