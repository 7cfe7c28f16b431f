//! An admitted request on its way through the actors.
//!
//! Invariant: a sequence owns every resource it was given (permit, lease, channel), so dropping it anywhere
//! releases all of them.

use super::stream::EventSender;
use crate::memory::Lease;
use crate::request::{Request, Task};
use actix::{Message, Recipient};
use std::time::Instant;

/// Identifies a sequence within the engine. Keys ascend in the order of admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceKey(pub u64);

/// An admitted request.
pub struct Sequence {
    pub key: SequenceKey,
    pub request: Request,
    /// Sender of the sequence's events; closed when the client is gone.
    pub events: EventSender,
    /// The right to a slot.
    pub permit: Permit,
    /// The sequence's KV pages; `None` until prefill has reserved them.
    pub lease: Option<Lease>,
    pub arrived: Instant,
}

/// The right to one slot. Dropping it returns it to intake.
pub struct Permit {
    intake: Recipient<PermitReleased>,
}

impl Permit {
    /// Creates a permit that is returned to `intake`. The caller counts it as taken.
    pub(super) fn new(intake: Recipient<PermitReleased>) -> Permit {
        Permit { intake }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.intake.do_send(PermitReleased);
    }
}

/// Returns a permit to intake.
#[derive(Message)]
#[rtype(result = "()")]
pub struct PermitReleased;

impl Sequence {
    /// Returns the number of positions that the sequence's own pages must hold: prompt plus generated tokens.
    pub fn positions(&self) -> usize {
        match self.request.task {
            Task::Generate => self.request.prompt.len() + self.request.max_tokens as usize,
            Task::Embed(_) | Task::FillMask { .. } => 0,
        }
    }

    /// Returns the number of encoder positions whose keys and values stay cached until the sequence ends:
    /// cross-attention reads them for each token.
    pub fn encoder_positions(&self) -> usize {
        match self.request.task {
            Task::Generate => self.request.encoder_input.len(),
            Task::Embed(_) | Task::FillMask { .. } => 0,
        }
    }
}
