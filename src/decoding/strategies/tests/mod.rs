//! Tests of the strategies, of the sampler, and of the parameters of a request.
//!
//! Invariant: seeds are fixed, so every statistic is a fixed number that is either within its bound or not.

mod chi_square;

mod docs;

mod parameters;

mod pools;

mod sampling;

use super::{
    CheckedDefaults, Checkpoint, Draw, HostSampler, ParamError, Row, SamplingPlan, SequenceState, Vocabulary,
};
use mainstem_kernels::random::{noise, uniform};
use serde_json::Value as Json;
use std::borrow::Cow;

/// A vocabulary whose token n is the n-th letter, and whose last token is a space.
struct Letters(usize);

impl Vocabulary for Letters {
    fn size(&self) -> usize {
        self.0
    }

    fn end_tokens(&self) -> Cow<'_, [u32]> {
        Cow::Borrowed(&[1])
    }

    fn encode(&self, text: &str) -> Vec<u32> {
        let letter = |c: char| if c == ' ' { self.0 as u32 - 1 } else { u32::from(c).wrapping_sub(97) };
        text.chars().map(letter).filter(|&id| (id as usize) < self.0).collect()
    }

    fn tokens_with(&self, text: &str) -> Vec<u32> {
        self.encode(text)
    }

    fn thinking(&self) -> Option<(u32, Cow<'_, [u32]>)> {
        (self.0 >= 24).then_some((20, Cow::Borrowed(&[21, 22])))
    }
}

/// Returns the plan of a request's parameters, a JSON object, for a vocabulary of `size`.
fn parse(params: &Json, size: usize) -> Result<SamplingPlan, ParamError> {
    let params = params.as_object().expect("an object");
    SamplingPlan::parse(
        &CheckedDefaults::default(),
        params.iter().map(|(name, value)| (name.as_str(), value)),
        &Letters(size),
    )
}

/// Returns the plan of valid parameters, as JSON text.
fn plan(params: &str, size: usize) -> SamplingPlan {
    let params = serde_json::from_str(params).expect("JSON");
    parse(&params, size).unwrap_or_else(|error| panic!("{params}: {error}"))
}

/// Returns the state of a sequence with generated tokens.
fn state(plan: &SamplingPlan, prompt: &[u32], generated: &[u32]) -> SequenceState {
    let mut state = SequenceState::new(plan, prompt, 16);
    generated.iter().for_each(|&token| state.accept_forced(token));
    state
}

/// Draws the token at a position of a sequence without tokens.
fn draw(plan: &SamplingPlan, logits: &[f32], position: u64) -> Draw {
    let row = Row { logits, seed: 9, position, mask: None, logprobs: None };
    HostSampler::new().draw(plan, &state(plan, &[], &[]), &row).expect("no mask")
}
