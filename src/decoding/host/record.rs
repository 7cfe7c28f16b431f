//! The record of a sequence whose tokens the host draws or masks. It never moves; the running sequence refers
//! to it, wherever its slot is.
//!
//! Invariant: the state depends on the tokens alone, in their order: the draw of a token or the mask after it
//! begins when the work for the token before is done.

use super::constraint::ConstraintState;
use crate::decoding::strategies::{HostSampler, LogprobsMode, Row, SamplingPlan, SequenceState};
use mainstem_grammar::GrammarError;
use mainstem_kernels::late::{MaskSender, TokenSender};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The record of one sequence.
pub(super) struct Record {
    /// Draws the tokens, if the device does not.
    pub(super) plan: Option<Arc<SamplingPlan>>,
    is_constrained: bool,
    /// Locked by the threads of the pool only, for as long as they compute.
    work: Mutex<Work>,
    mask: Mutex<MaskState>,
    reports: Mutex<VecDeque<LogprobReport>>,
    error: Mutex<Option<GrammarError>>,
}

/// Facts of a row that a draw depends on, besides its logits.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowContext {
    pub(super) seed: u64,
    pub(super) position: u32,
    /// Number of most likely tokens to report, if any log-probability is requested.
    pub(super) logprobs: Option<u8>,
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
    constraint: Option<ConstraintState>,
    /// Mask of the next token.
    next_mask: Vec<u32>,
    /// Whether it has been computed.
    mask_is_ready: bool,
}

impl Work {
    /// Computes the mask of the next token, unless that was done.
    fn prepare_mask(&mut self) -> Result<(), GrammarError> {
        if let Some(constraint) = self.constraint.as_mut().filter(|_| !self.mask_is_ready) {
            constraint.mask(&mut self.next_mask)?;
            self.mask_is_ready = true;
        }
        Ok(())
    }

    /// Advances the grammar by a token.
    fn accept(&mut self, token: u32) -> Result<(), GrammarError> {
        self.mask_is_ready = false;
        self.constraint.as_mut().map_or(Ok(()), |constraint| constraint.accept(token))
    }
}

/// The mask of the next token that the device draws.
enum MaskState {
    /// Being computed, and no row waits for it.
    Pending,
    Ready(Arc<[u32]>),
    /// The row of the next token waits for it.
    Wanted(MaskSender),
    /// There will be no mask; see the error.
    Failed,
}

impl Record {
    /// Creates the record of a sequence before its first generated token. `mask_words` is the length of
    /// masks.
    pub(super) fn new(
        plan: Option<Arc<SamplingPlan>>,
        state: Option<SequenceState>,
        constraint: Option<ConstraintState>,
        mask_words: usize,
    ) -> Record {
        let is_constrained = constraint.is_some();
        let next_mask = if is_constrained { vec![0; mask_words] } else { Vec::new() };
        Record {
            plan,
            is_constrained,
            work: Mutex::new(Work { state, constraint, next_mask, mask_is_ready: false }),
            mask: Mutex::new(MaskState::Pending),
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

    /// Draws a token, sends it, and adds it to the state. Without a token, the sender is dropped.
    pub(super) fn draw(
        &self,
        sampler: &mut HostSampler,
        row: &RowContext,
        logits: &[f32],
        sender: TokenSender,
    ) {
        let work = &mut *lock(&self.work);
        if let Err(error) = self.try_draw(work, sampler, row, logits, sender) {
            self.fail(error);
        }
    }

    fn try_draw(
        &self,
        work: &mut Work,
        sampler: &mut HostSampler,
        row: &RowContext,
        logits: &[f32],
        sender: TokenSender,
    ) -> Result<(), GrammarError> {
        let Some(plan) = self.plan.as_ref().filter(|_| self.error().is_none()) else { return Ok(()) };
        work.prepare_mask()?;
        let Some(state) = &mut work.state else { return Ok(()) };
        let is_processed = plan.logprobs_mode() == LogprobsMode::Processed;
        let row = Row {
            logits,
            seed: row.seed,
            position: row.position.into(),
            mask: self.is_constrained.then_some(&work.next_mask),
            logprobs: row.logprobs.filter(|_| is_processed).map(usize::from),
        };
        let draw = sampler.draw(plan, state, &row);
        let draw = draw.map_err(|empty| GrammarError::Stuck(empty.to_string()))?;
        if row.logprobs.is_some() {
            let report = LogprobReport { logprob: draw.logprob, top: sampler.top().to_vec() };
            lock(&self.reports).push_back(report);
        }
        sender.send(draw.token);
        state.accept(&draw);
        work.accept(draw.token)
    }

    /// Computes the mask of the next token that the host draws, so that the draw need not.
    pub(super) fn prepare_mask(&self) {
        if let Err(error) = lock(&self.work).prepare_mask() {
            self.fail(error);
        }
    }

    /// Advances the grammar by a token, if there is one, and computes the mask of the next token, which the
    /// device draws.
    pub(super) fn advance(&self, token: Option<u32>) {
        let work = &mut *lock(&self.work);
        let accepted = token.map_or(Ok(()), |token| work.accept(token));
        match accepted.and_then(|()| work.prepare_mask()) {
            Ok(()) => self.supply_mask(work.next_mask.as_slice().into()),
            Err(error) => self.fail(error),
        }
    }

    /// Registers the row of the next token that the device draws.
    pub(super) fn want_mask(&self, sender: MaskSender) {
        let mut mask = lock(&self.mask);
        match std::mem::replace(&mut *mask, MaskState::Pending) {
            MaskState::Ready(words) => sender.send(words),
            MaskState::Failed => *mask = MaskState::Failed,
            MaskState::Pending | MaskState::Wanted(_) => *mask = MaskState::Wanted(sender),
        }
    }

    fn supply_mask(&self, words: Arc<[u32]>) {
        let mut mask = lock(&self.mask);
        match std::mem::replace(&mut *mask, MaskState::Pending) {
            MaskState::Wanted(sender) => sender.send(words),
            MaskState::Failed => *mask = MaskState::Failed,
            MaskState::Pending | MaskState::Ready(_) => *mask = MaskState::Ready(words),
        }
    }

    /// Ends the sequence with an error: its rows, present and later, fail.
    fn fail(&self, error: GrammarError) {
        lock(&self.error).get_or_insert(error);
        *lock(&self.mask) = MaskState::Failed;
    }
}

/// Locks a mutex. What it protects is valid after a panic, too.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
