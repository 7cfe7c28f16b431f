//! The event channel of a sequence, and the message that submits requests.
//!
//! Invariant: dropping the [`TokenStream`] is the only way to cancel a sequence, and it is sufficient: the
//! holder of the [`EventSender`] checks for it before it spends more work on the sequence.

use crate::request::{Request, RequestError, TokenEvent};
use actix::{Message, Recipient};
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
}

impl TokenStream {
    /// Returns the next event; `None` after the last event, or when the engine dropped the sender without
    /// one.
    pub async fn next(&mut self) -> Option<TokenEvent> {
        let (produced_at, event) = self.events.recv().await?;
        self.produced_at = produced_at;
        Some(event)
    }

    /// Polls for the next event; the async form is [`TokenStream::next`].
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<TokenEvent>> {
        let event = ready!(self.events.poll_recv(cx)).map(|(produced_at, event)| {
            self.produced_at = produced_at;
            event
        });
        Poll::Ready(event)
    }

    /// Cancels the sequence, as dropping the stream does.
    pub fn close(&mut self) {
        self.events.close();
    }

    /// Returns when the last received event was produced.
    pub fn produced_at(&self) -> Instant {
        self.produced_at
    }
}

/// The sending end of an event channel, held with the sequence. The number of events is bounded by the prompt
/// length and `max_tokens`, so the channel is unbounded and sending never waits.
#[derive(Clone, Debug)]
pub struct EventSender {
    events: mpsc::UnboundedSender<(Instant, TokenEvent)>,
    /// When the client is considered gone although its end is open: it may have stopped reading.
    deadline: Option<Instant>,
}

impl EventSender {
    /// Sets the time after which the channel counts as closed.
    pub fn with_deadline(self, deadline: Option<Instant>) -> EventSender {
        EventSender { deadline, ..self }
    }

    /// Sends an event produced now. The event is dropped if the receiver is gone.
    pub fn send(&self, event: TokenEvent) {
        self.send_produced_at(event, Instant::now());
    }

    /// Sends an event produced at `produced_at`.
    pub fn send_produced_at(&self, event: TokenEvent, produced_at: Instant) {
        let _ = self.events.send((produced_at, event));
    }

    /// Whether the client is gone or the deadline has passed.
    pub fn is_closed(&self) -> bool {
        self.events.is_closed() || self.deadline.is_some_and(|deadline| deadline <= Instant::now())
    }
}

/// Creates an event channel.
pub fn event_channel() -> (EventSender, TokenStream) {
    let (tx, events) = mpsc::unbounded_channel();
    (EventSender { events: tx, deadline: None }, TokenStream { events, produced_at: Instant::now() })
}
