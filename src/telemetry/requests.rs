//! Records of requests that have ended, which the inflight log and traces are made of.
//!
//! Invariant: this is plain data; what it is written to does not change it.

use std::time::{Duration, Instant};

/// Times and token counts of a request that has ended: of a choice of a completion, or of the texts of a
/// request to an encoder-only model together.
#[derive(Clone, Copy, Debug)]
pub struct FinishedRequest<'a> {
    pub id: &'a str,
    /// The operation, by the names of OpenTelemetry's conventions for generative AI.
    pub operation: &'static str,
    pub arrived: Instant,
    /// When its first step was scheduled, if it was.
    pub scheduled: Option<Instant>,
    /// When its first and its last token were generated, if there are any.
    pub first_token: Option<Instant>,
    pub last_token: Option<Instant>,
    pub ended: Instant,
    pub prompt_tokens: usize,
    pub cached_tokens: usize,
    pub generated_tokens: usize,
    pub max_tokens: u32,
    /// The slot that it had last, if it had one.
    pub slot: Option<u32>,
    /// A value of the label `finished_reason`.
    pub reason: &'static str,
}

impl FinishedRequest<'_> {
    /// Returns the time from its arrival to `moment`.
    pub(super) fn since_arrival(&self, moment: Instant) -> Duration {
        moment.saturating_duration_since(self.arrived)
    }
}
