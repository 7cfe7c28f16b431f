//! Records requests that have ended.
//!
//! Invariant: a request that is recorded waits for neither the disk nor the network.

use super::inflight_log;
use super::requests::FinishedRequest;
use super::traces::RequestSpan;

/// Writes a request that has ended to the inflight log, and to the trace that `span` belongs to, if there are
/// these.
pub fn record_request(request: &FinishedRequest<'_>, span: Option<&RequestSpan>) {
    inflight_log::write(request);
    if let Some(span) = span {
        span.record(request);
    }
}
