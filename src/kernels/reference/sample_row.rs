//! Sampling of an output row with its late input.
//!
//! Invariant: a row whose late input does not come has a result without a token.

use super::sample::{logprobs, sample};
use crate::backend::SamplingInputs;
use crate::batch::{RowFailure, SampleMode, SampledToken, SamplingParams, StepOutput};

/// Returns the token of a row of the batch; `None` if its late input does not come.
pub(super) fn sample_row(
    row: usize,
    logits: &[f32],
    params: &SamplingParams,
    inputs: SamplingInputs<'_>,
) -> Option<u32> {
    let biases = params.logit_biases(inputs.biases);
    match params.mode {
        SampleMode::Sample if params.masked => {
            let mut mask = vec![0; logits.len().div_ceil(u32::BITS as usize)];
            inputs.wait_mask(row, &mut mask).then(|| sample(logits, biases, Some(&mask), params))
        }
        SampleMode::Sample => Some(sample(logits, biases, None, params)),
        SampleMode::Host => inputs.wait_token(row, logits.len()),
        SampleMode::Score(token) => Some(token),
    }
}

/// Appends the result of one output row, which has no token if its late input did not come.
pub(super) fn append_result(
    token: Option<u32>,
    logits: &[f32],
    params: &SamplingParams,
    out: &mut StepOutput,
) {
    let result = token.map_or(SampledToken::failed(RowFailure::NoLateInput), SampledToken::new);
    let mut result = SampledToken { top_at: out.top_logprobs.len() as u32, ..result };
    if let Some(token) = token
        && (params.logprob || params.top_logprobs > 0)
    {
        let logprobs = logprobs(logits, params.top_logprobs.into());
        result.top_len = logprobs.top.len() as u32;
        if params.logprob {
            result.logprob = logprobs.logprob(logits[token as usize]);
        }
        out.top_logprobs.extend(logprobs.top);
    }
    out.tokens.push(result);
}
