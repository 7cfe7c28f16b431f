//! The host's sampler: draws the token of one row according to a plan.

use super::plan::{LogprobsMode, SamplingPlan};
use super::state::{Draw, SequenceState};
use super::unit::{Context, EditScratch};
use crate::decoding::speculation::rule::AcceptanceRule;
use crate::decoding::speculation::verifier::{Proposal, Verifier};
use mainstem_kernels::candidates::{Buffers, Candidates, largest, nan_to_lowest};

/// The logits of one row, and what else decides its token.
#[derive(Clone, Copy, Debug)]
pub struct Row<'a> {
    /// Raw logits (vocabulary). NaN counts as negative infinity.
    pub logits: &'a [f32],
    pub seed: u64,
    /// Position of the token to be drawn.
    pub position: u64,
    /// A bit per token, the lowest bit of a word first: whether a grammar allows it. Tokens beyond the mask
    /// are not allowed.
    pub mask: Option<&'a [u32]>,
    /// Number of most likely tokens to report; `Some(0)` reports the log-probability of the token only.
    pub logprobs: Option<usize>,
}

/// The mask allows no token of the vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the grammar allows no token")]
pub struct EmptyMask;

/// Draws rows, one after another. It keeps its memory, so that it allocates nothing once it has seen the
/// largest vocabulary and the longest sequence.
#[derive(Debug, Default)]
pub struct HostSampler {
    buffers: Buffers,
    scratch: EditScratch,
    verifier: Verifier,
    top: Vec<(u32, f32)>,
}

impl HostSampler {
    /// Creates a sampler without memory.
    pub fn new() -> HostSampler {
        HostSampler::default()
    }

    /// Draws the token of a row. The state stays as it is until it accepts the result.
    ///
    /// 1. Tokens that the mask does not allow get negative infinity, then the plan's edits are applied. Edits
    ///    that leave no logit above negative infinity are ignored, all of them; the mask never is.
    /// 2. If still no logit is above negative infinity, the token is the lowest id that the mask allows.
    /// 3. A greedy plan takes the largest logit, the lowest id on ties; so does every plan if that is
    ///    infinite.
    /// 4. Otherwise filters remove candidates, each leaving at least the most likely one, and the plan's
    ///    chooser takes one.
    pub fn draw(
        &mut self,
        plan: &SamplingPlan,
        state: &SequenceState,
        row: &Row<'_>,
    ) -> Result<Draw, EmptyMask> {
        self.verify(plan, state, row, None, AcceptanceRule::Coupled)
    }

    /// Draws the token of a row that verifies a draft, by the rule that [`SamplingPlan::acceptance`] returns
    /// for `rule`. Without a draft or with [`AcceptanceRule::Coupled`], this is [`Self::draw`]; otherwise the
    /// rule chooses among the candidates that are left in step 4. The draft is accepted if it is the result.
    pub fn verify(
        &mut self,
        plan: &SamplingPlan,
        state: &SequenceState,
        row: &Row<'_>,
        proposal: Option<Proposal<'_>>,
        rule: AcceptanceRule,
    ) -> Result<Draw, EmptyMask> {
        let lowest = self.load(row)?;
        self.edit(plan, state, row)?;
        let mut registers = state.registers();
        let context = Context { history: state.history(), seed: row.seed, position: row.position };
        let rule = plan.acceptance(rule);
        let mut candidates = Candidates::new(&mut self.buffers);
        let token = if candidates.largest() == f32::NEG_INFINITY {
            lowest
        } else if plan.is_greedy || candidates.largest() == f32::INFINITY {
            candidates.most_likely()
        } else {
            plan.filters.iter().for_each(|filter| filter.filter(&mut candidates, &context));
            match &plan.chooser {
                Some(chooser) => chooser.choose(&mut candidates, &context, &mut registers),
                None => {
                    let (verifier, draft) = (&mut self.verifier, plan.draft());
                    let chosen = proposal
                        .filter(|proposal| proposal.draft_logits.is_none_or(|q| q.len() == row.logits.len()))
                        .and_then(|draft_of| verifier.choose(&candidates, &draft_of, rule, &draft, &context));
                    chosen.unwrap_or_else(|| candidates.draw(row.seed, row.position))
                }
            }
        };
        let logprob = match (row.logprobs, plan.logprobs_mode()) {
            (None, _) => f32::NAN,
            (Some(n), LogprobsMode::Processed) => {
                let of_token = report(&mut candidates, token, n, &mut self.top);
                // Forbidden tokens are no candidates.
                self.top.retain(|(_, logprob)| *logprob > f32::NEG_INFINITY);
                of_token
            }
            (Some(n), LogprobsMode::Raw) => {
                self.buffers.load(row.logits, None);
                report(&mut Candidates::new(&mut self.buffers), token, n, &mut self.top)
            }
        };
        Ok(Draw { token, logprob, registers })
    }

    /// Returns the most likely tokens (id, log-probability) of the last row that requested them, most likely
    /// first. In processed mode, fewer than requested if fewer candidates were left.
    pub fn top(&self) -> &[(u32, f32)] {
        &self.top
    }

    /// Copies the logits that the mask allows, and returns the lowest allowed id.
    fn load(&mut self, row: &Row<'_>) -> Result<u32, EmptyMask> {
        self.buffers.reserve(row.logits.len());
        self.buffers.load(row.logits, row.mask).ok_or(EmptyMask)
    }

    /// Applies the plan's edits, unless they leave no candidate.
    fn edit(&mut self, plan: &SamplingPlan, state: &SequenceState, row: &Row<'_>) -> Result<(), EmptyMask> {
        if plan.edits.is_empty() {
            return Ok(());
        }
        let HostSampler { buffers, scratch, .. } = self;
        scratch.marks.resize(row.logits.len(), 0);
        scratch.lengths.clear();
        scratch.lengths.reserve(state.history().capacity());
        for edit in &plan.edits {
            edit.edit(&mut buffers.values, state.history(), scratch);
        }
        buffers.values.iter_mut().for_each(|value| *value = nan_to_lowest(*value));
        if let Some(mask) = row.mask {
            // An edit that forces a token may have undone the mask.
            buffers.forbid(mask);
        }
        if largest(&buffers.values) == f32::NEG_INFINITY {
            self.load(row)?;
        }
        Ok(())
    }
}

/// Computes the log-probability of a token among the candidates, and of the `n` most likely ones. All are NaN
/// if the largest value is not finite, as [`mainstem_kernels::reference::logprobs`] defines.
fn report(candidates: &mut Candidates<'_>, token: u32, n: usize, top: &mut Vec<(u32, f32)>) -> f32 {
    let largest = candidates.largest();
    let mut sum = 0.0;
    candidates.visit(|_, value| sum += f64::from((value - largest).exp()));
    let log_sum = f64::from(largest) + f64::ln(sum);
    let logprob = |value: f32| (f64::from(value) - log_sum) as f32;
    let of_token = logprob(candidates.value(token));
    top.clear();
    if n > 0 {
        candidates.keep_first(n);
        top.extend(candidates.first(n).map(|(id, value)| (id, logprob(value))));
    }
    of_token
}
