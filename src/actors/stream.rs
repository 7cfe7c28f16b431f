//! The event channel of a sequence, and the message that submits requests.
//!
//! Invariant: dropping the [`TokenStream`] is the only way to cancel a sequence, and it is sufficient: the
//! holder of the [`EventSender`] checks for it before it spends more work on the sequence.

use super::response_memory::{HeldBytes, event_bytes};
use crate::request::{Request, RequestError, TokenEvent};
use actix::{Message, Recipient};
use mainstem_kernels::batch::Slot;
use std::future::poll_fn;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Instant;
use tokio::sync::mpsc;

/// Submits a group of requests to intake: all are accepted, or none. Intake replies at once with one stream
/// per request; the stream of a queued request has no events until the request is admitted.
#[derive(Message)]
#[rtype(result = "Result<Vec<TokenStream>, RequestError>")]
pub struct Submit {
    pub requests: Vec<Request>,
    pub kind: SubmitKind,
}

/// Whether a group is new or continues an accepted one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SubmitKind {
    /// All of a client's requests, or the first part of them.
    New,
    /// A later part of requests whose first part was accepted. It replaces sequences that have finished, so
    /// it is accepted even if the queue is full or the server is draining.
    Continuation,
}

/// The server's handle to the engine: submits requests to intake.
#[derive(Clone)]
pub struct IntakeHandle(pub Recipient<Submit>);

impl IntakeHandle {
    /// Submits a new group of at least one request. Returns each request's event stream, in order, or the
    /// reason why the group is refused.
    pub async fn submit(&self, requests: Vec<Request>) -> Result<Vec<TokenStream>, RequestError> {
        self.send(requests, SubmitKind::New).await
    }

    /// Submits a later part of an accepted group, with at most as many requests as have finished. A full
    /// queue or a draining server does not refuse it.
    pub async fn submit_continuation(
        &self,
        requests: Vec<Request>,
    ) -> Result<Vec<TokenStream>, RequestError> {
        self.send(requests, SubmitKind::Continuation).await
    }

    async fn send(&self, requests: Vec<Request>, kind: SubmitKind) -> Result<Vec<TokenStream>, RequestError> {
        assert!(!requests.is_empty(), "a group has at least one request; anything else is a bug");
        self.0.send(Submit { requests, kind }).await.unwrap_or(Err(RequestError::EngineStopped))
    }
}

/// The receiving end of an event channel, held by the reply stream.
pub struct TokenStream {
    events: mpsc::UnboundedReceiver<(Instant, TokenEvent)>,
    produced_at: Instant,
    unread: Arc<Unread>,
}

/// State of a channel that both of its ends know.
#[derive(Debug)]
struct Unread {
    bytes: HeldBytes,
    /// Whether an event did not fit into the memory of responses, so that the channel has ended in an error.
    has_overflowed: AtomicBool,
    /// The slot of the sequence; `Slot::MAX` until it has one.
    slot: AtomicU32,
}

impl TokenStream {
    /// Returns the next event; `None` after the last event, or when the engine dropped the sender without
    /// one.
    pub async fn next(&mut self) -> Option<TokenEvent> {
        poll_fn(|cx| self.poll_next(cx)).await
    }

    /// Polls for the next event; the async form is [`TokenStream::next`].
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<TokenEvent>> {
        let event = ready!(self.events.poll_recv(cx)).map(|(produced_at, event)| {
            self.produced_at = produced_at;
            self.unread.bytes.shrink(event_bytes(&event));
            event
        });
        Poll::Ready(event)
    }

    /// Cancels the sequence, as dropping the stream does.
    pub fn close(&mut self) {
        self.events.close();
    }

    /// Returns the slot that the sequence had last, if it had one.
    pub fn slot(&self) -> Option<Slot> {
        Some(self.unread.slot.load(Ordering::Relaxed)).filter(|slot| *slot != Slot::MAX)
    }

    /// Returns when the last received event was produced.
    pub fn produced_at(&self) -> Instant {
        self.produced_at
    }
}

impl Drop for TokenStream {
    fn drop(&mut self) {
        // The other end may live on for a while.
        self.unread.bytes.release();
    }
}

/// The sending end of an event channel, held with the sequence. Sending never waits: an event for which the
/// memory of responses is short ends the channel with an error instead.
#[derive(Clone, Debug)]
pub struct EventSender {
    events: mpsc::UnboundedSender<(Instant, TokenEvent)>,
    /// When the client is considered gone although its end is open: it may have stopped reading.
    deadline: Option<Instant>,
    unread: Arc<Unread>,
}

impl EventSender {
    /// Sets the time after which the channel counts as closed.
    pub fn with_deadline(self, deadline: Option<Instant>) -> EventSender {
        EventSender { deadline, ..self }
    }

    /// Sets the slot of the sequence.
    pub fn set_slot(&self, slot: Slot) {
        self.unread.slot.store(slot, Ordering::Relaxed);
    }

    /// Sends an event produced now. The event is dropped if the receiver is gone.
    pub fn send(&self, event: TokenEvent) {
        self.send_produced_at(event, Instant::now());
    }

    /// Sends an event produced at `produced_at`.
    pub fn send_produced_at(&self, event: TokenEvent, produced_at: Instant) {
        if self.unread.has_overflowed.load(Ordering::Relaxed) {
            return;
        }
        let event = self.unread.bytes.grow(event_bytes(&event)).map_or_else(
            |error| {
                self.unread.has_overflowed.store(true, Ordering::Relaxed);
                TokenEvent::Failed(error)
            },
            |()| event,
        );
        if self.events.send((produced_at, event)).is_err() {
            self.unread.bytes.release();
        }
    }

    /// Whether the client is gone, the deadline has passed, or the channel has overflowed.
    pub fn is_closed(&self) -> bool {
        let is_over = self.events.is_closed() || self.unread.has_overflowed.load(Ordering::Relaxed);
        is_over || self.deadline.is_some_and(|deadline| deadline <= Instant::now())
    }
}

/// Creates an event channel, whose unread events are held by `bytes`.
pub fn event_channel(bytes: HeldBytes) -> (EventSender, TokenStream) {
    let (tx, events) = mpsc::unbounded_channel();
    let unread = Arc::new(Unread { bytes, has_overflowed: AtomicBool::new(false), slot: Slot::MAX.into() });
    let stream = TokenStream { events, produced_at: Instant::now(), unread: unread.clone() };
    (EventSender { events: tx, deadline: None, unread }, stream)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::actors::response_memory::ResponseMemory;
    use crate::request::FinishReason;
    use crate::request::client::ClientId;

    fn token() -> TokenEvent {
        TokenEvent::Token(crate::request::Token { id: 5, logprob: None, rank: None, top: vec![(1, 0.5); 20] })
    }

    /// A client that does not read would otherwise take any amount of memory.
    #[actix_web::test]
    async fn unread_events_are_bounded_and_end_in_an_error() {
        let one = event_bytes(&token());
        let memory = ResponseMemory::new(6 * one);
        let (sender, mut stream) = event_channel(memory.hold(ClientId::Local));
        (0..3).for_each(|_| sender.send(token()));
        assert_eq!(stream.next().await, Some(token()));
        // What is read makes room.
        sender.send(token());
        assert!(!sender.is_closed());
        sender.send(token());
        assert!(sender.is_closed(), "the engine is to stop");
        sender.send(TokenEvent::Finished(FinishReason::Length));
        for _ in 0..3 {
            assert_eq!(stream.next().await, Some(token()));
        }
        let error = RequestError::ResponseTooLarge { limit: 6 * one };
        assert_eq!(stream.next().await, Some(TokenEvent::Failed(error)));
        drop(sender);
        assert_eq!(stream.next().await, None);
    }

    #[actix_web::test]
    async fn a_client_that_is_gone_holds_nothing() {
        let memory = ResponseMemory::new(1 << 20);
        let (sender, stream) = event_channel(memory.hold(ClientId::Local));
        sender.send(token());
        drop(stream);
        sender.send(token());
        assert!(memory.hold(ClientId::Local).grow(1 << 19).is_ok());
    }
}
