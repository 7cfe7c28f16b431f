//! The accounts of clients: the tokens that the engine computed for a client, and the permits that it has.
//!
//! Invariant: all users of an account are on the control thread, so that relaxed operations are enough and
//! the lock is free; both only allow that messages carry it.

use super::bucket::Bucket;
use crate::request::Class;
use crate::request::client::{ClientId, ClientSettings};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Cost of a generated token in prompt tokens: it takes a row of a step of its own, and the step's time is
/// shared by fewer rows.
const GENERATED_COST: u64 = 2;

/// Unit of the served work: parts of a prompt token, so that it can be divided by weights.
const UNIT: u64 = 1 << 12;

/// The account of a client, shared by its sequences.
#[derive(Debug)]
pub struct Account {
    /// The client.
    pub id: ClientId,
    weight: AtomicU32,
    served: AtomicU64,
    /// The rest of its tokens per minute.
    tokens: Mutex<Bucket>,
    /// Tokens computed and generated for all clients of the engine.
    total: Arc<AtomicU64>,
    /// Permits that its sequences hold, by class.
    running: [AtomicUsize; Class::ALL.len()],
}

/// The number of tokens of a sequence that its client was charged for: those of its encoder input, then of
/// its prompt, then the generated ones that are computed again. All that schedule them share it.
#[derive(Clone, Debug, Default)]
pub struct ChargedTokens(Arc<AtomicUsize>);

impl ChargedTokens {
    /// Raises the number to `end`. Returns how many of the tokens from `begin` to `end` were not charged for.
    pub fn raise(&self, begin: usize, end: usize) -> usize {
        end - self.0.fetch_max(end, Relaxed).clamp(begin, end)
    }
}

impl Account {
    /// Creates the account of a client that was served nothing. Its tokens are added to `total`, too.
    pub fn new(id: ClientId, total: Arc<AtomicU64>) -> Account {
        Account {
            id,
            weight: AtomicU32::new(1),
            served: AtomicU64::new(0),
            tokens: Mutex::new(Bucket::new(None, Instant::now())),
            total,
            running: Default::default(),
        }
    }

    /// Sets the client's weight, by which the cost of later tokens is divided, and its tokens per minute.
    pub fn configure(&self, settings: &ClientSettings, now: Instant) {
        self.weight.store(settings.weight.max(1), Relaxed);
        self.tokens().set_limit(settings.tokens_per_minute, now);
    }

    /// Returns the client's weight.
    pub fn weight(&self) -> u32 {
        self.weight.load(Relaxed)
    }

    /// Returns the work that the client was served, relative to its weight.
    pub fn served(&self) -> u64 {
        self.served.load(Relaxed)
    }

    /// Raises the served work to `least`, if it is less.
    pub fn lift(&self, least: u64) {
        self.served.fetch_max(least, Relaxed);
    }

    /// Returns what is left of the client's tokens per minute.
    pub fn tokens(&self) -> MutexGuard<'_, Bucket> {
        self.tokens.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Charges tokens of a prompt, which are computed in the next step.
    pub fn charge_prompt(&self, tokens: usize) {
        self.charge(tokens as u64, 1);
    }

    /// Charges generated tokens.
    pub fn charge_generated(&self, tokens: usize) {
        self.charge(tokens as u64, GENERATED_COST);
    }

    fn charge(&self, tokens: u64, cost: u64) {
        self.served.fetch_add(self.cost(tokens * cost), Relaxed);
        self.total.fetch_add(tokens, Relaxed);
        self.tokens().spend(tokens, Instant::now());
    }

    /// Returns the served work that so many tokens of a prompt are.
    pub fn cost(&self, tokens: u64) -> u64 {
        tokens * UNIT / u64::from(self.weight())
    }

    /// Returns the number of permits that the client's sequences of a class hold.
    pub fn running(&self, class: Class) -> usize {
        self.running[class as usize].load(Relaxed)
    }

    /// Returns the number of permits that all of its sequences hold.
    pub fn all_running(&self) -> usize {
        Class::ALL.into_iter().map(|class| self.running(class)).sum()
    }

    /// Counts a permit that a sequence got.
    pub fn begin(&self, class: Class) {
        self.running[class as usize].fetch_add(1, Relaxed);
    }

    /// Counts a permit that a sequence gave back.
    pub fn end(&self, class: Class) {
        self.running[class as usize].fetch_sub(1, Relaxed);
    }
}
