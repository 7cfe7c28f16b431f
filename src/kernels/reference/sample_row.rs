//! Sampling of an output row with its late input.
//!
//! Invariant: a row that fails has a result without a token.

use super::sample::{is_finite_row, logprobs, rank, sample_counted};
use crate::backend::SamplingInputs;
use crate::batch::{RowFailure, SampleMode, SampledToken, SamplingParams, StepOutput};

/// Returns the token of a row of the batch, whose slot has these counts of tokens.
pub(super) fn sample_row(
    row: usize,
    logits: &[f32],
    (params, counts): (&SamplingParams, &[u16]),
    inputs: SamplingInputs<'_>,
) -> Result<u32, RowFailure> {
    let biases = params.logit_biases(inputs.biases);
    let token = match params.mode {
        SampleMode::Sample if params.masked => {
            let mut mask = vec![0; logits.len().div_ceil(u32::BITS as usize)];
            match inputs.wait_mask(row, &mut mask) {
                true => sample_counted(logits, biases, counts, Some(&mask), params),
                false => Err(RowFailure::NoLateInput),
            }
        }
        SampleMode::Sample => sample_counted(logits, biases, counts, None, params),
        SampleMode::Host => inputs.wait_token(row, logits.len()).ok_or(RowFailure::NoLateInput),
        SampleMode::Score(token) => Ok(token),
    };
    match token {
        Err(RowFailure::NoLateInput) => token,
        _ if !is_finite_row(logits) => Err(RowFailure::NotFinite),
        _ => token,
    }
}

/// Appends the result of one output row.
pub(super) fn append_result(
    token: Result<u32, RowFailure>,
    logits: &[f32],
    params: &SamplingParams,
    out: &mut StepOutput,
) {
    let result = token.map_or_else(SampledToken::failed, SampledToken::new);
    let mut result = SampledToken { top_at: out.top_logprobs.len() as u32, ..result };
    if let Ok(token) = token
        && (params.logprob || params.top_logprobs > 0)
    {
        let logprobs = logprobs(logits, params.top_logprobs.into());
        result.top_len = logprobs.top.len() as u32;
        if params.logprob {
            result.logprob = logprobs.logprob(logits[token as usize]);
            if let SampleMode::Score(token) = params.mode {
                result.rank = rank(logits, token);
            }
        }
        out.top_logprobs.extend(logprobs.top);
    }
    out.tokens.push(result);
}
