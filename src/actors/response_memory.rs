//! The memory of responses: events that their clients have not read, and answers that are collected and
//! written.
//!
//! Invariant: what is held never exceeds the limit, and a client holds at most as much as is left free,
//! except for what it takes at the same time from several threads. A request whose response does not fit ends
//! with an error, and what it held is free again once it is dropped.

use crate::request::client::ClientId;
use crate::request::{RequestError, Token, TokenEvent};
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Instant;

/// The bytes of all responses together, with their limit.
#[derive(Debug)]
pub struct ResponseMemory {
    used: AtomicUsize,
    limit: usize,
    /// The bytes of each client that holds some.
    clients: Mutex<HashMap<ClientId, Weak<AtomicUsize>>>,
}

/// The bytes that a part of a response holds, until it is dropped.
#[derive(Debug)]
pub struct HeldBytes {
    memory: Arc<ResponseMemory>,
    /// The bytes of all responses to the same client.
    client: Arc<AtomicUsize>,
    bytes: AtomicUsize,
}

impl ResponseMemory {
    /// Creates the memory of `limit` bytes, nothing of which is held.
    pub fn new(limit: usize) -> Arc<ResponseMemory> {
        Arc::new(ResponseMemory { used: AtomicUsize::new(0), limit, clients: Mutex::default() })
    }

    /// Returns a part for a response to `client` that holds nothing yet.
    pub fn hold(self: &Arc<Self>, client: ClientId) -> HeldBytes {
        let mut clients = self.lock();
        let known = clients.get(&client).and_then(Weak::upgrade).unwrap_or_else(|| {
            clients.retain(|_, held| held.strong_count() > 0);
            let held = Arc::default();
            clients.insert(client, Arc::downgrade(&held));
            held
        });
        HeldBytes { memory: self.clone(), client: known, bytes: AtomicUsize::new(0) }
    }

    /// Fails if `client` holds more than half of what is free, so that it should begin no new request; those
    /// that it has begun can use the rest of its part.
    pub fn check_new(&self, client: ClientId) -> Result<(), RequestError> {
        let held = self.lock().get(&client).and_then(Weak::upgrade);
        let held = held.map_or(0, |held| held.load(Ordering::Relaxed));
        let free = self.limit.saturating_sub(self.used.load(Ordering::Relaxed));
        if held > free / 2 { Err(self.exhausted()) } else { Ok(()) }
    }

    fn exhausted(&self) -> RequestError {
        RequestError::ResponsesTooLarge { limit: self.limit }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ClientId, Weak<AtomicUsize>>> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl HeldBytes {
    /// Holds `bytes` more. Fails, holding as many as before, if they do not fit into the limit, or the client
    /// would hold more than it leaves free; and with another error if that is so of this part alone.
    pub fn grow(&self, bytes: usize) -> Result<(), RequestError> {
        let (relaxed, limit) = (Ordering::Relaxed, self.memory.limit);
        if self.bytes.load(relaxed).saturating_add(bytes) > limit / 2 {
            return Err(RequestError::ResponseTooLarge { limit });
        }
        let held = self.client.load(relaxed).saturating_add(bytes);
        // What does not fit is never added, not even for a moment: another response could fail meanwhile.
        let more = |used: usize| {
            let used = used.checked_add(bytes)?;
            (held <= limit.saturating_sub(used)).then_some(used)
        };
        self.memory.used.fetch_update(relaxed, relaxed, more).map_err(|_| self.memory.exhausted())?;
        self.client.fetch_add(bytes, relaxed);
        self.bytes.fetch_add(bytes, relaxed);
        Ok(())
    }

    /// Holds `bytes` less, of those that it holds.
    pub fn shrink(&self, bytes: usize) {
        let less = |held: usize| Some(held.saturating_sub(bytes));
        let (relaxed, held) = (Ordering::Relaxed, &self.bytes);
        let before = held.fetch_update(relaxed, relaxed, less).unwrap_or_else(|held| held);
        self.client.fetch_sub(before.min(bytes), relaxed);
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

    const FULL: Result<(), RequestError> = Err(RequestError::ResponsesTooLarge { limit: 100 });

    #[test]
    fn what_is_held_never_exceeds_the_limit_and_is_returned() {
        let memory = ResponseMemory::new(100);
        let (one, two) = (memory.hold(ClientId::Key(1)), memory.hold(ClientId::Key(1)));
        one.grow(30).unwrap();
        assert!(memory.check_new(ClientId::Key(1)).is_ok());
        two.grow(20).unwrap();
        assert_eq!(memory.check_new(ClientId::Key(1)), FULL);
        assert_eq!(one.grow(1), FULL);
        one.shrink(15);
        one.grow(10).unwrap();
        // What nobody holds cannot be returned.
        two.shrink(1000);
        drop(two);
        assert_eq!(memory.used.load(Ordering::Relaxed), 25);
        drop(one);
        assert_eq!(memory.used.load(Ordering::Relaxed), 0);
    }

    /// Regression: a client that read nothing kept everyone else from every answer.
    #[test]
    fn a_client_leaves_as_much_as_it_holds() {
        let memory = ResponseMemory::new(100);
        let [one, two, three] = [1, 2, 3].map(|client| memory.hold(ClientId::Key(client)));
        let too_large = Err(RequestError::ResponseTooLarge { limit: 100 });
        assert_eq!(one.grow(51), too_large, "not even at once");
        one.grow(50).unwrap();
        assert_eq!(memory.check_new(ClientId::Key(1)), FULL);
        memory.check_new(ClientId::Key(2)).unwrap();
        two.grow(25).unwrap();
        assert_eq!(two.grow(1), FULL);
        memory.check_new(ClientId::Key(3)).unwrap();
        three.grow(12).unwrap();
        assert_eq!(memory.used.load(Ordering::Relaxed), 87);
        drop(one);
        two.grow(18).unwrap();
        // Clients without responses are forgotten.
        let _another = memory.hold(ClientId::Key(4));
        assert_eq!(memory.lock().len(), 3);
    }

    /// Regression: what did not fit was added and taken away again, and streams that grew meanwhile ended.
    #[test]
    fn what_does_not_fit_takes_nothing_from_others() {
        let memory = ResponseMemory::new(1000);
        let (large, small) = (memory.hold(ClientId::Key(1)), memory.hold(ClientId::Key(2)));
        std::thread::scope(|scope| {
            let failing = scope.spawn(|| (0..200_000).all(|_| large.grow(1001).is_err()));
            while !failing.is_finished() {
                small.grow(1).expect("there is memory");
                small.shrink(1);
            }
            assert!(failing.join().expect("it does not panic"));
        });
    }
}
