//! The record of a sequence whose tokens the host draws or masks. It never moves; the running sequence refers
//! to it, wherever its slot is.
//!
//! Invariant: the state depends on the tokens alone, in their order: the draw of a token or the mask after it
//! begins when the work for the token before is done. A row that verifies a draft changes it only if the rows
//! before it drew all drafts before.

use super::constraint::{Constraint, ConstraintState};
use super::rows::{PendingRow, RowContext, RowQueue, lock};
use crate::decoding::speculation::Proposal;
use crate::decoding::strategies::{HostSampler, LogprobsMode, Row, SamplingPlan, SequenceState};
use mainstem_grammar::GrammarError;
use mainstem_kernels::late::{MaskSender, TokenSender};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex};

/// The record of one sequence.
pub(super) struct Record {
    /// Draws the tokens, if the device does not.
    pub(super) plan: Option<Arc<SamplingPlan>>,
    is_constrained: bool,
    /// The rows that wait for their draw.
    pub(super) rows: RowQueue,
    /// Locked by the threads of the pool only, for as long as they compute.
    work: Mutex<Work>,
    masks: Mutex<Masks>,
    /// Maximum number of tokens to force at once.
    jump_limit: usize,
    /// The tokens that follow the only one that the last supplied mask allows.
    forced: Mutex<Option<Vec<u32>>>,
    reports: Mutex<VecDeque<LogprobReport>>,
    error: Mutex<Option<GrammarError>>,
}

/// Log-probabilities of a token among the candidates that it was drawn from.
#[derive(Clone, Debug, PartialEq)]
pub struct LogprobReport {
    pub logprob: f32,
    /// Most likely tokens, most likely first: (id, log-probability).
    pub top: Vec<(u32, f32)>,
}

struct Work {
    state: Option<SequenceState>,
    /// The token of the last row, if that row drew one.
    drawn: Option<u32>,
    /// The constraint whose state is created by the first job, because that copies the compiled grammar.
    new_constraint: Option<Arc<Constraint>>,
    constraint: Option<ConstraintState>,
    /// Mask of the next token.
    next_mask: Vec<u32>,
    /// Whether it has been computed.
    mask_is_ready: bool,
}

impl Work {
    /// Computes the mask of the next token, unless that was done. Returns the token if the grammar allows
    /// only one.
    fn prepare_mask(&mut self) -> Result<Option<u32>, GrammarError> {
        let mut only = None;
        if let Some(constraint) = self.new_constraint.take() {
            self.constraint = Some(ConstraintState::new(&constraint));
        }
        if let Some(constraint) = self.constraint.as_mut().filter(|_| !self.mask_is_ready) {
            only = constraint.mask(&mut self.next_mask)?;
            self.mask_is_ready = true;
        }
        Ok(only)
    }

    /// Returns the tokens that follow the only one that the grammar allows, and accepts them.
    fn force(&mut self, only: u32, limit: usize) -> Result<Option<Vec<u32>>, GrammarError> {
        let Some(constraint) = &mut self.constraint else { return Ok(None) };
        let forced = constraint.force(only, limit, &mut self.next_mask)?;
        self.mask_is_ready = forced.is_none();
        Ok(forced)
    }

    /// Advances the grammar by a token.
    fn accept(&mut self, token: u32) -> Result<(), GrammarError> {
        self.mask_is_ready = false;
        self.constraint.as_mut().map_or(Ok(()), |constraint| constraint.accept(token))
    }
}

/// The masks of the next tokens that the device draws.
#[derive(Default)]
struct Masks {
    /// Masks that no row waits for, in the order of the tokens: one, or two if the first allows one token
    /// only.
    ready: VecDeque<Arc<[u32]>>,
    /// The rows that wait for the next masks: with run-ahead, a row is registered while the one before it
    /// still waits.
    wanted: VecDeque<MaskSender>,
    /// Whether there will be no further mask; see the error.
    failed: bool,
}

impl Record {
    /// Creates the record of a sequence before its first generated token. `mask_words` is the length of
    /// masks, and `jump_limit` the maximum number of tokens that a grammar forces at once.
    pub(super) fn new(
        plan: Option<Arc<SamplingPlan>>,
        state: Option<SequenceState>,
        constraint: Option<Arc<Constraint>>,
        mask_words: usize,
        jump_limit: usize,
    ) -> Record {
        let is_constrained = constraint.is_some();
        let next_mask = if is_constrained { vec![0; mask_words] } else { Vec::new() };
        Record {
            plan,
            is_constrained,
            rows: RowQueue::default(),
            work: Mutex::new(Work {
                state,
                drawn: None,
                new_constraint: constraint,
                constraint: None,
                next_mask,
                mask_is_ready: false,
            }),
            masks: Mutex::default(),
            jump_limit,
            forced: Mutex::default(),
            reports: Mutex::default(),
            error: Mutex::default(),
        }
    }

    pub(super) fn is_constrained(&self) -> bool {
        self.is_constrained
    }

    /// Returns why the sequence cannot go on, if it cannot.
    pub(super) fn error(&self) -> Option<GrammarError> {
        lock(&self.error).clone()
    }

    /// Returns the report of the oldest token that has one.
    pub(super) fn take_report(&self) -> Option<LogprobReport> {
        lock(&self.reports).pop_front()
    }

    /// Begins the next row. Returns whether it draws a token: a row that computes a draft does so only if the
    /// row before it drew that draft.
    pub(super) fn begin_row(&self, row: &PendingRow) -> bool {
        let before = lock(&self.work).drawn.take();
        !row.context.computes_draft || before == Some(row.input_token)
    }

    /// Draws a token, sends it, and adds it to the state. Without a token, the sender is dropped.
    pub(super) fn draw(&self, sampler: &mut HostSampler, row: &mut PendingRow) {
        let work = &mut *lock(&self.work);
        let mut sender = row.sender.take();
        if let Err(error) = self.try_draw(work, sampler, row, &mut sender) {
            // Before the sender is dropped, so that whoever sees the row fail finds the reason.
            self.fail(error);
        }
    }

    fn try_draw(
        &self,
        work: &mut Work,
        sampler: &mut HostSampler,
        pending: &PendingRow,
        sender: &mut Option<TokenSender>,
    ) -> Result<(), GrammarError> {
        let Some(plan) = self.plan.as_ref().filter(|_| self.error().is_none()) else { return Ok(()) };
        work.prepare_mask()?;
        let Some(state) = &mut work.state else { return Ok(()) };
        let is_processed = plan.logprobs_mode() == LogprobsMode::Processed;
        let RowContext { seed, position, logprobs, rule, .. } = pending.context;
        let row = Row {
            logits: &pending.logits,
            seed,
            position: position.into(),
            mask: self.is_constrained.then_some(&work.next_mask),
            logprobs: logprobs.filter(|_| is_processed).map(usize::from),
        };
        let draft_logits = pending.draft_logits.as_deref().filter(|logits| !logits.is_empty());
        let proposal = pending.next_token.map(|token| Proposal { token, draft_logits });
        let draw = sampler.verify(plan, state, &row, proposal, rule);
        let draw = draw.map_err(|empty| GrammarError::Stuck(empty.to_string()))?;
        if row.logprobs.is_some() {
            let report = LogprobReport { logprob: draw.logprob, top: sampler.top().to_vec() };
            lock(&self.reports).push_back(report);
        }
        if let Some(sender) = sender.take() {
            sender.send(draw.token);
        }
        state.accept(&draw);
        work.drawn = Some(draw.token);
        work.accept(draw.token)
    }

    /// Computes the mask of the next token that the host draws, so that the draw need not.
    pub(super) fn prepare_mask(&self) {
        if let Err(error) = lock(&self.work).prepare_mask() {
            self.fail(error);
        }
    }

    /// Advances the grammar by a token, if there is one, and computes the mask of the next token, which the
    /// device draws. If the grammar allows only one, it is advanced by that one and by what must follow, too.
    /// After an error, whose cause may have left any state, there are no more masks.
    pub(super) fn advance(&self, token: Option<u32>) {
        if let Err(error) = self.try_advance(token) {
            self.fail(error);
        }
    }

    fn try_advance(&self, token: Option<u32>) -> Result<(), GrammarError> {
        if self.error().is_some() {
            return Ok(());
        }
        let work = &mut *lock(&self.work);
        token.map_or(Ok(()), |token| work.accept(token))?;
        let only = work.prepare_mask()?;
        let mask: Arc<[u32]> = work.next_mask.as_slice().into();
        let forced = match only.filter(|_| self.jump_limit > 0) {
            Some(only) => work.force(only, self.jump_limit)?,
            None => None,
        };
        let is_forced = forced.is_some();
        // Before the mask, so that whoever sees its token finds them.
        *lock(&self.forced) = forced;
        self.supply_mask(mask);
        if is_forced {
            work.prepare_mask()?;
            self.supply_mask(work.next_mask.as_slice().into());
        }
        Ok(())
    }

    /// Returns the tokens that follow the last one without a choice, if its mask allowed no other; the
    /// grammar is behind them then.
    pub(super) fn take_forced(&self) -> Option<Vec<u32>> {
        lock(&self.forced).take()
    }

    /// Registers the row of the next token that the device draws.
    pub(super) fn want_mask(&self, sender: MaskSender) {
        let masks = &mut *lock(&self.masks);
        match masks.ready.pop_front() {
            Some(words) => sender.send(words),
            None if masks.failed => drop(sender),
            None => masks.wanted.push_back(sender),
        }
    }

    fn supply_mask(&self, words: Arc<[u32]>) {
        let masks = &mut *lock(&self.masks);
        match masks.wanted.pop_front() {
            Some(sender) => sender.send(words),
            None => masks.ready.push_back(words),
        }
    }

    /// Ends the sequence with an error: rows without a mask or token, present and later, fail.
    pub(super) fn fail(&self, error: GrammarError) {
        lock(&self.error).get_or_insert(error);
        let masks = &mut *lock(&self.masks);
        masks.failed = true;
        masks.wanted.clear();
    }
}
