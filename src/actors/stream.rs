//! The two ends of a sequence's event channel, and the message that opens one.
//!
//! Invariant: dropping the [`TokenStream`] is the only way to cancel, and it is enough: whoever holds the
//! [`EventSender`] sees it before it spends more work on the sequence.

use crate::request::{Request, RequestError, TokenEvent};
use actix::{Message, Recipient};
use std::time::Instant;
use tokio::sync::mpsc;

/// Asks intake to take a request in. Answered at once when there is room, else when the request leaves
/// the waiting room is of no concern: the stream simply stays silent until then.
#[derive(Message)]
#[rtype(result = "Result<TokenStream, RequestError>")]
pub struct Submit(pub Request);

/// The server's way to the actors.
#[derive(Clone)]
pub struct IntakeHandle(pub Recipient<Submit>);

impl IntakeHandle {
    /// Hands a request in. The answer is its stream of events, or why it is refused.
    pub async fn submit(&self, request: Request) -> Result<TokenStream, RequestError> {
        self.0.send(Submit(request)).await.unwrap_or(Err(RequestError::EngineGone))
    }
}

/// The receiving end, held by the reply stream.
pub struct TokenStream {
    events: mpsc::UnboundedReceiver<(Instant, TokenEvent)>,
    sent_at: Instant,
}

impl TokenStream {
    /// The next event; `None` after the end has been told (or when the engine went away without a word).
    pub async fn next(&mut self) -> Option<TokenEvent> {
        let (sent_at, event) = self.events.recv().await?;
        self.sent_at = sent_at;
        Some(event)
    }

    /// When the event that came last was sent.
    pub fn sent_at(&self) -> Instant {
        self.sent_at
    }
}

/// The sending end, held with the sequence. Events are bounded by prompt and `max_tokens`, so the channel
/// needs no limit and sending never waits.
#[derive(Clone, Debug)]
pub struct EventSender(mpsc::UnboundedSender<(Instant, TokenEvent)>);

impl EventSender {
    /// Sends an event; one that nobody waits for any more is dropped.
    pub fn send(&self, event: TokenEvent) {
        let _ = self.0.send((Instant::now(), event));
    }

    /// Whether the client is gone.
    pub fn is_closed(&self) -> bool {
        self.0.is_closed()
    }
}

/// A fresh channel.
pub fn channel() -> (EventSender, TokenStream) {
    let (tx, events) = mpsc::unbounded_channel();
    (EventSender(tx), TokenStream { events, sent_at: Instant::now() })
}
