//! The sampling parameters of drafts.

use super::rule::AcceptanceRule;
use crate::decoding::strategies::plan::DeviceSampling;
use mainstem_kernels::{SampleMode, SamplingParams};

/// Returns the sampling parameters of the draft at a position, for
/// [`DraftSpan::sampling`](mainstem_kernels::batch::DraftSpan::sampling). `rule` is the one that
/// [`SamplingPlan::acceptance`](crate::decoding::SamplingPlan::acceptance) returns, `sampling` the result of
/// [`SamplingPlan::draft`](crate::decoding::SamplingPlan::draft) or the parameters of a request that the
/// device draws, of which penalties are ignored, `seed` the seed of the sequence. Logit biases may be added
/// only if the rule is [`AcceptanceRule::Coupled`], because the others compute the probability of a draft
/// without them.
pub fn draft_row(
    rule: AcceptanceRule,
    sampling: &DeviceSampling,
    seed: u64,
    position: u32,
) -> SamplingParams {
    let &DeviceSampling { temperature, top_k, top_p, min_p, .. } = sampling;
    SamplingParams {
        mode: SampleMode::Sample,
        position,
        seed: rule.draft_seed(seed),
        temperature,
        top_k,
        top_p,
        min_p,
        ..SamplingParams::GREEDY
    }
}
