//! An accepted request on its way through the actors.
//!
//! Invariant: a sequence owns every resource it was given (permit, lease, channel), so dropping it anywhere
//! releases all of them.

use super::account::{Account, ChargedTokens};
use super::loop_metrics::SequenceTimes;
use super::speculator::Speculator;
use super::stream::EventSender;
use crate::decoding::HostSequence;
use crate::memory::Lease;
use crate::request::{Class, Request, RequestError, Task, TokenEvent};
use actix::{Message, Recipient};
use std::sync::Arc;
use std::time::Instant;

/// Identifies a sequence within the engine. Keys ascend in the order of arrival, in which sequences do not
/// necessarily begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SequenceKey(pub u64);

/// A sequence to compute.
pub struct Sequence {
    pub key: SequenceKey,
    /// Number of the group of requests that it was submitted with.
    pub group: u64,
    pub request: Request,
    /// Sender of the sequence's events; closed when the client is gone.
    pub events: EventSender,
    /// Senders of the further results of a beam search.
    pub followers: Vec<EventSender>,
    /// The account of its client.
    pub account: Arc<Account>,
    /// The right to a slot, once it has begun; of a beam search, to one for each beam. The beams themselves
    /// have none.
    pub permits: Vec<Permit>,
    /// The sequence's KV pages, on the way from prefill to the KV manager.
    pub lease: Option<Lease>,
    pub arrived: Instant,
    /// Its progress when it was preempted, if it was.
    pub progress: Option<Progress>,
    /// The tokens that its client was charged for.
    pub charged: ChargedTokens,
}

/// The progress of a preempted sequence, besides its K and V.
pub struct Progress {
    /// The tokens generated so far; the client has them.
    pub generated: Vec<u32>,
    /// The host's part in choosing its tokens, if it has one.
    pub host: Option<HostSequence>,
    pub times: SequenceTimes,
    /// The speculation on its tokens, if it has one.
    pub speculator: Option<Speculator>,
}

/// The right to one slot. Dropping it returns it to intake.
pub struct Permit {
    intake: Option<Recipient<PermitReleased>>,
    account: Arc<Account>,
    class: Class,
}

impl Permit {
    /// Creates a permit of a client's sequence of a class, which is returned to `intake`. The caller counts
    /// it as taken.
    pub(super) fn new(
        intake: Option<Recipient<PermitReleased>>,
        account: Arc<Account>,
        class: Class,
    ) -> Permit {
        account.begin(class);
        Permit { intake, account, class }
    }

    /// Drops the permit without returning it; the caller counts it as returned.
    pub(super) fn forget(mut self) {
        self.intake = None;
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.account.end(self.class);
        if let Some(intake) = &self.intake {
            intake.do_send(PermitReleased);
        }
    }
}

/// Returns a permit to intake.
#[derive(Message)]
#[rtype(result = "()")]
pub struct PermitReleased;

impl Sequence {
    /// Returns the senders of all its clients: those of a beam search, one for each result.
    pub fn clients(&self) -> impl Iterator<Item = &EventSender> {
        std::iter::once(&self.events).chain(&self.followers)
    }

    /// Sends an error to all its clients.
    pub fn fail(&self, error: &RequestError) {
        self.clients().for_each(|events| events.send(TokenEvent::Failed(error.clone())));
    }

    /// Returns the number of slots that the sequence needs: one for each beam.
    pub fn slots(&self) -> usize {
        self.request.beams.map_or(1, |beams| beams.width)
    }

    /// Returns the maximum number of positions of the sequence: prompt plus generated tokens.
    pub fn positions(&self) -> usize {
        // A text for an encoder has no prompt.
        self.request.prompt.len() + self.request.max_tokens as usize
    }

    /// Returns the tokens that were generated before the sequence was preempted.
    pub fn generated(&self) -> &[u32] {
        self.progress.as_ref().map_or(&[], |progress| &progress.generated)
    }

    /// Returns the number of encoder positions whose keys and values stay cached until the sequence ends:
    /// cross-attention reads them for each token.
    pub fn encoder_positions(&self) -> usize {
        match self.request.task {
            Task::Generate => self.request.encoder_input.len(),
            Task::Embed(_) | Task::EmbedTokens | Task::FillMask { .. } => 0,
        }
    }
}
