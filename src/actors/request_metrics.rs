//! Metrics of a request as its client sees it: recorded and logged at its end.
//!
//! Invariant: every accepted request is recorded once, also if its client disconnects.

use super::speculation::DraftCounts;
use crate::request::{Request, RequestError, Task};
use crate::telemetry::{self, FinishedRequest, RequestSpan};
use mainstem_kernels::batch::Slot;
use std::cell::Cell;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tracing::info;

/// Token counts of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    /// Number of prompt tokens whose K and V were in the prefix cache.
    pub cached_tokens: usize,
    /// Numbers of drafts, if the request speculated.
    pub drafts: Option<DraftCounts>,
}

/// Times and token counts of a request: recorded as metrics, and logged in one line at the end. Dropping it
/// before the end counts as a disconnected client.
pub struct RequestMetrics {
    id: Arc<str>,
    operation: &'static str,
    arrived: Instant,
    /// When its first step was scheduled.
    scheduled: Cell<Option<Instant>>,
    /// The slot that it had last.
    pub(super) slot: Option<Slot>,
    max_tokens: u32,
    /// The span of the HTTP request that it is part of.
    span: Option<RequestSpan>,
    first_token_after: Option<Duration>,
    last_token: Instant,
    pub(super) usage: Usage,
    finished: bool,
    /// Histograms of the time to the first token, and of that between tokens; `None` if they do not apply.
    token_latency: Option<(metrics::Histogram, metrics::Histogram)>,
    time_limit: Option<Duration>,
}

impl RequestMetrics {
    /// Starts measuring a request that was just accepted.
    pub fn new(request: &Request) -> RequestMetrics {
        let drafts = request.speculation.map(|_| DraftCounts::default());
        // A search sends all of its tokens at its end, so the times between them mean nothing.
        let token_latency = (request.beams.is_none()).then(|| {
            (telemetry::TIME_TO_FIRST_TOKEN.histogram(), telemetry::INTER_TOKEN_LATENCY.histogram())
        });
        RequestMetrics {
            id: request.id.clone(),
            operation: match request.task {
                Task::Generate => "text_completion",
                Task::Embed(_) | Task::EmbedTokens => "embeddings",
                Task::FillMask { .. } => "fill_mask",
            },
            arrived: request.arrived,
            scheduled: Cell::new(None),
            slot: None,
            max_tokens: request.max_tokens,
            span: RequestSpan::current(),
            first_token_after: None,
            last_token: request.arrived,
            usage: Usage { prompt_tokens: request.input_tokens(), drafts, ..Usage::default() },
            finished: false,
            token_latency,
            time_limit: request.time_limit,
        }
    }

    /// Sets the number of prompt tokens, for a request of several inputs.
    pub fn with_prompt_tokens(mut self, prompt_tokens: usize) -> RequestMetrics {
        self.usage.prompt_tokens = prompt_tokens;
        self
    }

    /// Sets the name of the operation, by OpenTelemetry's conventions.
    pub(super) fn with_operation(mut self, operation: &'static str) -> RequestMetrics {
        self.operation = operation;
        self
    }

    /// Records that the first step of the request, or of one of its inputs, was scheduled.
    pub fn record_scheduled(&self, moment: Instant) {
        self.scheduled.set(Some(self.scheduled.get().map_or(moment, |earlier| earlier.min(moment))));
    }

    /// Returns whether the end of the request has been recorded.
    pub fn is_finished(&self) -> bool {
        self.finished
    }

    /// Records a generated token. `now` is when it was produced, so that a client that reads late does not
    /// count.
    pub(super) fn record_token(&mut self, now: Instant) {
        let since = now.saturating_duration_since(self.last_token);
        if let Some((to_first, between)) = &self.token_latency {
            let latency = if self.first_token_after.is_none() { to_first } else { between };
            latency.record(since.as_secs_f64());
        }
        self.first_token_after.get_or_insert(since);
        self.last_token = now;
        self.usage.completion_tokens += 1;
    }

    /// Returns the error for an event channel that the engine closed without an end: the engine may notice a
    /// timeout first.
    pub fn closed_error(&self) -> RequestError {
        match self.time_limit {
            Some(limit) if self.arrived.elapsed() >= limit => {
                RequestError::TimedOut { limit_s: limit.as_secs() }
            }
            _ => RequestError::EngineStopped,
        }
    }

    /// Ends the request with an error, unless it has ended.
    pub fn fail(&mut self, error: &RequestError) {
        if !self.finished {
            self.finish(match error {
                RequestError::TimedOut { .. } => "timeout",
                _ => "error",
            });
        }
    }

    /// Ends the request, and records and logs its metrics. `reason` is a value of the label
    /// `finished_reason`.
    pub fn finish(&mut self, reason: &'static str) {
        self.finished = true;
        let took = self.arrived.elapsed();
        let Usage { prompt_tokens, completion_tokens, cached_tokens, drafts } = self.usage;
        let (drafted, accepted) = drafts.map(|counts| (counts.drafted, counts.accepted)).unzip();
        telemetry::REQUEST_SUCCESS.count([reason]);
        telemetry::E2E_LATENCY.record(took.as_secs_f64());
        telemetry::REQUEST_PROMPT_TOKENS.record(prompt_tokens as f64);
        telemetry::REQUEST_GENERATION_TOKENS.record(completion_tokens as f64);
        let first_token_ms = self.first_token_after.map(telemetry::milliseconds);
        info!(
            request = &*self.id,
            reason,
            prompt_tokens,
            completion_tokens,
            cached_tokens,
            drafted,
            accepted,
            first_token_ms,
            took_ms = telemetry::milliseconds(took),
            "request finished"
        );
        let first_token = self.first_token_after.map(|after| self.arrived + after);
        let finished = FinishedRequest {
            id: &self.id,
            operation: self.operation,
            arrived: self.arrived,
            scheduled: self.scheduled.get(),
            first_token,
            last_token: first_token.map(|_| self.last_token),
            ended: self.arrived + took,
            prompt_tokens,
            cached_tokens,
            generated_tokens: completion_tokens,
            max_tokens: self.max_tokens,
            slot: self.slot,
            reason,
        };
        telemetry::record_request(&finished, self.span.as_ref());
    }
}

impl Drop for RequestMetrics {
    fn drop(&mut self) {
        if !self.finished {
            telemetry::CLIENTS_GONE.add(1);
            self.finish("abort");
        }
    }
}
