//! The choice of a row's token by a rule that depends on the row's draft.

use super::rule::AcceptanceRule;
use crate::decoding::strategies::plan::DeviceSampling;
use crate::decoding::strategies::unit::{Context, stream};
use mainstem_kernels::SamplingParams;
use mainstem_kernels::candidates::{Buffers, Candidates};
use mainstem_kernels::reference::draw::{ln, weight};

/// The draft that a row verifies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Proposal<'a> {
    pub token: u32,
    /// The raw logits (vocabulary) of the draft model, from which the draft was drawn with the parameters of
    /// [`draft_row`](super::draft_row). `None` if there is no draft model.
    pub draft_logits: Option<&'a [f32]>,
}

/// Chooses tokens. It keeps its memory, so that it allocates nothing once it has seen the largest vocabulary.
#[derive(Debug, Default)]
pub struct Verifier {
    draft: Buffers,
    /// Probabilities of the vocabulary for the draft model.
    shares: Vec<f64>,
}

impl Verifier {
    /// Returns the token that a rule chooses from the candidates of the target; `None` if the token is drawn
    /// as without speculation. `draft` has the parameters with which the draft was drawn.
    ///
    /// A draft without logits counts as the only possible one. [`AcceptanceRule::Rejection`] then accepts it
    /// with its probability for the target, and otherwise draws another token of the target: that is what
    /// drawing as without speculation does.
    pub fn choose(
        &mut self,
        candidates: &Candidates<'_>,
        proposal: &Proposal<'_>,
        rule: AcceptanceRule,
        draft: &DeviceSampling,
        context: &Context<'_>,
    ) -> Option<u32> {
        match rule {
            AcceptanceRule::Coupled => None,
            AcceptanceRule::Rejection => self.accept_or_replace(candidates, proposal, draft, context),
            AcceptanceRule::TopSampling => {
                let weight = weight_of(candidates, proposal.token);
                (weight > 0).then_some(proposal.token)
            }
        }
    }

    fn accept_or_replace(
        &mut self,
        candidates: &Candidates<'_>,
        proposal: &Proposal<'_>,
        draft: &DeviceSampling,
        context: &Context<'_>,
    ) -> Option<u32> {
        self.compute_shares(proposal.draft_logits?, draft)?;
        let q = self.shares.get(proposal.token as usize).copied().filter(|&share| share > 0.0)?;
        let total = candidates.total_weight() as f64;
        let p = weight_of(candidates, proposal.token) as f64 / total;
        if f64::from(context.uniform(stream::ACCEPTANCE)) * q < p {
            return Some(proposal.token);
        }
        let values = &mut self.draft.values;
        values.fill(f32::NEG_INFINITY);
        let largest = candidates.largest();
        candidates.visit(|id, value| {
            let rest = weight(value - largest) as f64 / total - self.shares[id as usize];
            if rest > 0.0 {
                values[id as usize] = ln(rest as f32);
            }
        });
        let mut rest = Candidates::new(&mut self.draft);
        // With rounding errors only, nothing may be left.
        (rest.largest() > f32::NEG_INFINITY).then(|| rest.draw(context.seed, context.position))
    }

    /// Computes the probabilities that drafts are drawn with, as the device that draws them does; `None` if
    /// it takes the most likely token.
    fn compute_shares(&mut self, logits: &[f32], draft: &DeviceSampling) -> Option<()> {
        let &DeviceSampling { temperature, top_k, top_p, min_p, .. } = draft;
        if temperature < SamplingParams::GREEDY_BELOW || top_k == 1 {
            return None;
        }
        self.draft.reserve(logits.len());
        self.draft.load(logits, None);
        let mut candidates = Candidates::new(&mut self.draft);
        if !candidates.largest().is_finite() {
            return None;
        }
        candidates.divide_by(temperature);
        if top_k > 0 {
            candidates.keep_first(top_k as usize);
        }
        if top_p < 1.0 {
            candidates.keep_fraction(top_p);
        }
        if min_p > 0.0 {
            candidates.keep_likely(min_p);
        }
        let (total, largest) = (candidates.total_weight() as f64, candidates.largest());
        self.shares.clear();
        self.shares.resize(logits.len(), 0.0);
        candidates.visit(|id, value| self.shares[id as usize] = weight(value - largest) as f64 / total);
        Some(())
    }
}

/// Returns the weight of a token, 0 if it is no candidate.
fn weight_of(candidates: &Candidates<'_>, token: u32) -> u64 {
    let largest = candidates.largest();
    let mut found = 0;
    candidates.visit(|id, value| {
        if id == token {
            found = weight(value - largest);
        }
    });
    found
}
