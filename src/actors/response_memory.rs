//! The memory of responses: events that their clients have not read, and answers that are collected and
//! written.
//!
//! Invariant: what is held never exceeds the limit. A request whose response does not fit ends with an error,
//! and what it held is free again once it is dropped.

use crate::request::{RequestError, Token, TokenEvent};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

/// The bytes of all responses together, with their limit.
#[derive(Debug)]
pub struct ResponseMemory {
    used: AtomicUsize,
    limit: usize,
}

/// The bytes that a part of a response holds, until it is dropped.
#[derive(Debug)]
pub struct HeldBytes {
    memory: Arc<ResponseMemory>,
    bytes: AtomicUsize,
}

impl ResponseMemory {
    /// Creates the memory of `limit` bytes, nothing of which is held.
    pub fn new(limit: usize) -> Arc<ResponseMemory> {
        Arc::new(ResponseMemory { used: AtomicUsize::new(0), limit })
    }

    /// Returns a part that holds nothing yet.
    pub fn hold(self: &Arc<Self>) -> HeldBytes {
        HeldBytes { memory: self.clone(), bytes: AtomicUsize::new(0) }
    }

    /// Fails if more than half is held, so that no new request should begin; those that have begun can use
    /// the rest.
    pub fn check_new(&self) -> Result<(), RequestError> {
        if self.used.load(Ordering::Relaxed) > self.limit / 2 { Err(self.exhausted()) } else { Ok(()) }
    }

    fn exhausted(&self) -> RequestError {
        RequestError::ResponsesTooLarge { limit: self.limit }
    }
}

impl HeldBytes {
    /// Holds `bytes` more. Fails, holding as many as before, if they do not fit into the limit.
    pub fn grow(&self, bytes: usize) -> Result<(), RequestError> {
        let before = self.memory.used.fetch_add(bytes, Ordering::Relaxed);
        if before.saturating_add(bytes) > self.memory.limit {
            self.memory.used.fetch_sub(bytes, Ordering::Relaxed);
            return Err(self.memory.exhausted());
        }
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        Ok(())
    }

    /// Holds `bytes` less, of those that it holds.
    pub fn shrink(&self, bytes: usize) {
        let less = |held: usize| Some(held.saturating_sub(bytes));
        let (relaxed, held) = (Ordering::Relaxed, &self.bytes);
        let before = held.fetch_update(relaxed, relaxed, less).unwrap_or_else(|held| held);
        self.memory.used.fetch_sub(before.min(bytes), relaxed);
    }

    /// Holds at most `bytes` from now on.
    pub fn shrink_to(&self, bytes: usize) {
        self.shrink(self.bytes.load(Ordering::Relaxed).saturating_sub(bytes));
    }

    /// Holds nothing any more.
    pub fn release(&self) {
        self.shrink(usize::MAX);
    }
}

impl Drop for HeldBytes {
    fn drop(&mut self) {
        self.release();
    }
}

/// Returns the bytes that an event takes in its channel.
pub fn event_bytes(event: &TokenEvent) -> usize {
    let tokens = |tokens: &[Token]| tokens.iter().map(token_bytes).sum();
    size_of::<(Instant, TokenEvent)>()
        + match event {
            TokenEvent::Prompt(prompt) => tokens(prompt),
            TokenEvent::Token(token) | TokenEvent::EndToken(token) | TokenEvent::MaskFilled(token) => {
                token_bytes(token)
            }
            TokenEvent::Embedding(vector) => size_of_val(&**vector),
            TokenEvent::Started { .. }
            | TokenEvent::BeamScore(_)
            | TokenEvent::Speculated { .. }
            | TokenEvent::Finished(_)
            | TokenEvent::Failed(_) => 0,
        }
}

/// Returns the bytes that a token takes, with the most likely tokens at its position.
pub fn token_bytes(token: &Token) -> usize {
    size_of::<Token>() + size_of_val(&*token.top)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_held_never_exceeds_the_limit_and_is_returned() {
        let memory = ResponseMemory::new(100);
        let (one, two) = (memory.hold(), memory.hold());
        one.grow(40).unwrap();
        assert!(memory.check_new().is_ok());
        two.grow(60).unwrap();
        assert_eq!(memory.check_new(), Err(RequestError::ResponsesTooLarge { limit: 100 }));
        assert_eq!(one.grow(1), Err(RequestError::ResponsesTooLarge { limit: 100 }));
        one.shrink(15);
        one.grow(10).unwrap();
        // What nobody holds cannot be returned.
        two.shrink(1000);
        drop(two);
        assert_eq!(memory.used.load(Ordering::Relaxed), 35);
        drop(one);
        assert_eq!(memory.used.load(Ordering::Relaxed), 0);
    }
}
