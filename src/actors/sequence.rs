//! One request's tokens on their way through the actors.
//!
//! Invariant: a sequence holds everything it was given (permit, lease, channel), so that dropping it gives
//! everything back, wherever it is dropped.

use super::intake::Permit;
use super::stream::EventSender;
use crate::memory::Lease;
use crate::request::{Request, Task};
use std::time::Instant;

/// A sequence's name within the engine; ascending in the order of arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(pub u64);

/// An admitted request.
pub struct Sequence {
    pub key: Key,
    pub request: Request,
    /// Where its tokens go; closed when the client is gone.
    pub events: EventSender,
    /// The right to a slot.
    pub permit: Permit,
    /// The right to its pages; prefill obtains it.
    pub lease: Option<Lease>,
    pub arrived: Instant,
}

impl Sequence {
    /// Positions its own pages must have room for: prompt and answer.
    pub fn positions(&self) -> usize {
        match self.request.task {
            Task::Generate => self.request.prompt.len() + self.request.max_tokens as usize,
            Task::Embed(_) | Task::Fill { .. } => 0,
        }
    }

    /// Positions of its source that must stay until its end: cross-attention sees them with each token.
    pub fn source_positions(&self) -> usize {
        match self.request.task {
            Task::Generate => self.request.source.len(),
            Task::Embed(_) | Task::Fill { .. } => 0,
        }
    }
}
