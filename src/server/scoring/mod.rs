//! The APIs that compare texts and classify them: `/v1/rerank`, `/v1/score` and `/v1/classify`.
//!
//! A model compares two texts by its classifier, which reads both at once, or by the similarity of their
//! embeddings.
//! Invariant: a request gets as many results as it has documents, pairs or texts.

pub mod classify;

pub mod rerank;

pub mod score;

mod pairs;

mod texts;

use super::encoders::EncoderOutput;
use super::error::ApiError;
use crate::request::TokenEvent;
use std::time::{SystemTime, UNIX_EPOCH};

/// Maximum number of texts or pairs of one request.
const TEXTS_MAX: usize = 2048;

/// Returns the vector, or the vectors, that the engine computed for an input.
fn vector_of(found: &EncoderOutput) -> Result<&[f32], ApiError> {
    let vector = found.events.iter().find_map(|event| match event {
        TokenEvent::Embedding(vector) => Some(&vector[..]),
        _ => None,
    });
    vector.ok_or_else(|| ApiError::internal("the engine returned no vector for a text; this is a bug"))
}

/// Returns the number of tokens of all inputs.
fn token_count(found: &[EncoderOutput]) -> usize {
    found.iter().map(|found| found.input.ids.len()).sum()
}

/// Returns the current time in seconds of Unix time.
fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
