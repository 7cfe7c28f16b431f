//! A client with its sequences in the queue.
//!
//! Invariant: a client begins no sequence beyond its limit, apart from a search that was accepted before the
//! limit was.

use super::{Candidate, Place, QueuedSequence, Skipped, Turn};
use crate::actors::account::Account;
use crate::actors::bucket::Bucket;
use crate::actors::sequence::SequenceKey;
use crate::request::{Class, Client};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

/// The last class.
pub(super) const LAST: Class = Class::ALL[Class::ALL.len() - 1];

/// A count for each class.
pub(super) type ByClass = [usize; Class::ALL.len()];

/// A client with its sequences.
pub(super) struct QueuedClient {
    /// The client as its last request named it.
    pub(super) client: Arc<Client>,
    pub(super) account: Arc<Account>,
    pub(super) line: BTreeMap<Place, QueuedSequence>,
    /// Number of slots that its queued sequences need, by class.
    pub(super) waiting: ByClass,
    /// The rest of its requests per minute.
    pub(super) requests: Bucket,
}

impl QueuedClient {
    pub(super) fn new(client: &Arc<Client>, total: Arc<AtomicU64>, now: Instant) -> QueuedClient {
        let account = Arc::new(Account::new(client.id, total));
        account.configure(&client.settings, now);
        QueuedClient {
            client: client.clone(),
            account,
            line: BTreeMap::new(),
            waiting: Default::default(),
            requests: Bucket::new(client.settings.requests_per_minute, now),
        }
    }

    /// Returns how many further slots its sequences may take.
    pub(super) fn room(&self) -> usize {
        let limit = self.client.settings.max_sequences.unwrap_or(usize::MAX);
        limit.saturating_sub(self.account.all_running())
    }

    /// Whether a sequence of so many slots may run beside those that do, and `begun` slots more. A search
    /// with more beams than a limit that came later runs alone.
    pub(super) fn may_run(&self, begun: usize, slots: usize) -> bool {
        begun + slots <= self.room() || begun + self.account.all_running() == 0
    }

    /// Returns the number of slots that its queued sequences of a class and those before it need.
    pub(super) fn waiting_by(&self, class: Class) -> usize {
        sum_by(&self.waiting, class)
    }

    /// Whether it may run a sequence that waits in the class of a place, and whose priority is not later.
    pub(super) fn may_begin_by(&self, Place { class, priority, .. }: Place) -> bool {
        let first = Place { class, priority: i32::MIN, key: SequenceKey(0) };
        let last = Place { class, priority, key: SequenceKey(u64::MAX) };
        self.room() > 0 && self.line.range(first..=last).next().is_some()
    }

    /// Returns its next sequence, if it may run.
    pub(super) fn first(&self, skipped: &Skipped, only_released: bool) -> Option<Candidate> {
        if skipped.clients.contains(&self.client.id) {
            return None;
        }
        let may_begin = |(place, queued): &(&Place, &QueuedSequence)| {
            !skipped.sequences.contains(&place.key) && (queued.is_released || !only_released)
        };
        let (place, queued) = self.line.iter().find(may_begin)?;
        Some(self.candidate(*place, queued)).filter(|candidate| self.may_run(0, candidate.slots))
    }

    pub(super) fn candidate(&self, place: Place, queued: &QueuedSequence) -> Candidate {
        let turn = Turn { class: place.class, priority: place.priority, served: self.account.served() };
        Candidate { client: self.client.id, place, turn, slots: queued.sequence.slots() }
    }

    /// Whether nothing is lost if it is forgotten.
    pub(super) fn is_forgettable(&mut self, now: Instant) -> bool {
        self.line.is_empty()
            && self.account.all_running() == 0
            && self.requests.is_full(now)
            && self.account.tokens().is_full(now)
    }
}

/// Returns the sum of the counts of a class and those before it.
pub(super) fn sum_by(counts: &ByClass, class: Class) -> usize {
    counts[..=class as usize].iter().sum()
}
