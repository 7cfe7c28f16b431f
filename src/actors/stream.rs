//! The two ends of a sequence's event channel, and the message that opens one.
//!
//! Invariant: dropping the [`TokenStream`] is the only way to cancel, and it is enough: whoever holds the
//! [`EventSender`] sees it before it spends more work on the sequence.

use crate::request::{Request, RequestError, TokenEvent};
use actix::{Message, Recipient};
use std::task::{Context, Poll, ready};
use std::time::Instant;
use tokio::sync::mpsc;

/// Asks intake to take a group of requests in: all of them, or none. Answered at once with a stream for each;
/// a stream whose request has to wait simply stays silent until then.
#[derive(Message)]
#[rtype(result = "Result<Vec<TokenStream>, RequestError>")]
pub struct Submit {
    pub requests: Vec<Request>,
    pub standing: Standing,
}

/// Where a group stands in what its client asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// It is all of it, or the first part.
    New,
    /// It follows on a part that was taken in: it takes the places of sequences that are through, and has been
    /// promised its end.
    Continued,
}

/// The server's way to the actors.
#[derive(Clone)]
pub struct IntakeHandle(pub Recipient<Submit>);

impl IntakeHandle {
    /// Hands a group of requests in, at least one. The answer is each one's stream of events, in order, or
    /// why the group is refused.
    pub async fn submit(&self, requests: Vec<Request>) -> Result<Vec<TokenStream>, RequestError> {
        self.send(requests, Standing::New).await
    }

    /// Hands more in of what was taken in, no more than is through of it. Neither a full waiting room nor the
    /// way out is in its way.
    pub async fn go_on(&self, requests: Vec<Request>) -> Result<Vec<TokenStream>, RequestError> {
        self.send(requests, Standing::Continued).await
    }

    async fn send(
        &self,
        requests: Vec<Request>,
        standing: Standing,
    ) -> Result<Vec<TokenStream>, RequestError> {
        assert!(!requests.is_empty(), "a group has a request, else this is a bug");
        self.0.send(Submit { requests, standing }).await.unwrap_or(Err(RequestError::EngineGone))
    }
}

/// The receiving end, held by the reply stream.
pub struct TokenStream {
    events: mpsc::UnboundedReceiver<(Instant, TokenEvent)>,
    made_at: Instant,
}

impl TokenStream {
    /// The next event; `None` after the end has been told (or when the engine went away without a word).
    pub async fn next(&mut self) -> Option<TokenEvent> {
        let (made_at, event) = self.events.recv().await?;
        self.made_at = made_at;
        Some(event)
    }

    /// [`TokenStream::next`] for who polls.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<TokenEvent>> {
        let event = ready!(self.events.poll_recv(cx)).map(|(made_at, event)| {
            self.made_at = made_at;
            event
        });
        Poll::Ready(event)
    }

    /// Hangs up, as dropping does.
    pub fn close(&mut self) {
        self.events.close();
    }

    /// When the event that came last was made.
    pub fn made_at(&self) -> Instant {
        self.made_at
    }
}

/// The sending end, held with the sequence. Events are bounded by prompt and `max_tokens`, so the channel
/// needs no limit and sending never waits.
#[derive(Clone, Debug)]
pub struct EventSender {
    events: mpsc::UnboundedSender<(Instant, TokenEvent)>,
    /// When the client is as good as gone, though its end be open: it may have stopped reading.
    deadline: Option<Instant>,
}

impl EventSender {
    /// Nobody waits for what comes after `deadline`.
    pub fn until(self, deadline: Option<Instant>) -> EventSender {
        EventSender { deadline, ..self }
    }

    /// Sends an event made just now; one that nobody waits for any more is dropped.
    pub fn send(&self, event: TokenEvent) {
        self.send_made(event, Instant::now());
    }

    /// Sends an event made at `made_at`.
    pub fn send_made(&self, event: TokenEvent, made_at: Instant) {
        let _ = self.events.send((made_at, event));
    }

    /// Whether the client is gone, or its time is up.
    pub fn is_closed(&self) -> bool {
        self.events.is_closed() || self.deadline.is_some_and(|deadline| deadline <= Instant::now())
    }
}

/// A fresh channel.
pub fn channel() -> (EventSender, TokenStream) {
    let (tx, events) = mpsc::unbounded_channel();
    (EventSender { events: tx, deadline: None }, TokenStream { events, made_at: Instant::now() })
}
