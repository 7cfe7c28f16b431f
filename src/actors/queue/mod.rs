//! The queue of sequences that have not begun, and of preempted ones: who is next.
//!
//! Intake puts sequences into it, and prefill takes them out when a lane's next step can begin them; nothing
//! else lets sequences wait. Within the first class, and there within the lowest priority, the next sequence
//! is the oldest one of the client that was served the least: virtual token counters (Sheng et al., Fairness
//! in Serving Large Language Models, OSDI 2024), charged as tokens are computed and divided by the client's
//! weight. A client that comes back is lifted to the least counter among those whose turn may come as early,
//! so that it has no credit from its absence.
//! Invariant: a sequence in the queue holds no permit and no pages. Permits held plus free permits equal the
//! number of slots; a sequence that takes over the slot of a preempted one has its permit before that one's
//! is back, so the free ones may be fewer than none for a moment.

mod admission;
mod client;
mod forecast;
mod shares;

pub use shares::{Demand, Preemptible, Reason};

use super::account::Account;
use super::sequence::{Permit, PermitReleased, Sequence, SequenceKey};
use super::status::Status;
use crate::memory::{NoLease, TokenChain};
use crate::request::client::ClientId;
use crate::request::{Class, Client};
use crate::telemetry;
use actix::{Message, Recipient};
use client::{ByClass, LAST, QueuedClient, sum_by};
use forecast::EndRate;
use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Number of clients from which those without work are forgotten.
const CLIENTS_MAX: usize = 256;

/// Ratio of the queued sequences of all clients, in a class and those before it, to the maximum of one.
pub const ROOM_FACTOR: usize = 4;

/// Ratio of queued sequences of a class that were preempted, with the states of their strategies, to slots,
/// from which nobody else of the class is preempted for slots or for pages of a prompt.
pub const PREEMPTED_FACTOR: usize = 2;

/// Notifies prefill that the queue has changed, so that sequences may begin.
#[derive(Message)]
#[rtype(result = "()")]
pub struct QueueChanged;

/// The queue, shared by intake and prefill on the control thread.
#[derive(Clone)]
pub struct SharedQueue(Arc<Mutex<FairQueue>>);

impl SharedQueue {
    /// Creates an empty queue for an engine with `slots` slots. A client may have at most `max_waiting`
    /// sequences in it.
    pub fn new(slots: usize, max_waiting: usize, status: Arc<Status>) -> SharedQueue {
        SharedQueue(Arc::new(Mutex::new(FairQueue {
            slots,
            max_waiting,
            free_permits: slots as isize,
            clients: HashMap::new(),
            queued: BTreeSet::new(),
            forget_at: CLIENTS_MAX,
            waiting: Default::default(),
            total: Arc::default(),
            released: 0,
            searches: 0,
            preempted: Default::default(),
            last_served: Default::default(),
            ends: EndRate::default(),
            permit_return: None,
            is_reported: false,
            status,
        })))
    }

    /// Locks the queue, ignoring poisoning: each change of it is complete before anything can panic.
    pub fn lock(&self) -> MutexGuard<'_, FairQueue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sequences that wait, by client.
pub struct FairQueue {
    slots: usize,
    max_waiting: usize,
    free_permits: isize,
    clients: HashMap<ClientId, QueuedClient>,
    /// The clients with queued sequences.
    queued: BTreeSet<ClientId>,
    /// Number of clients at which those without work are forgotten.
    forget_at: usize,
    /// Number of slots that the queued sequences need, by class.
    waiting: ByClass,
    /// Tokens computed and generated for all clients.
    total: Arc<AtomicU64>,
    /// Number of sequences that belong to the current batch, under [`crate::config::Policy::Window`].
    released: usize,
    /// Number of queued beam searches, which need several slots.
    searches: usize,
    /// Number of queued sequences that were preempted, by class.
    preempted: ByClass,
    /// Accounts of the clients whose sequences were last taken out of the queue, by class.
    last_served: [Option<Arc<Account>>; Class::ALL.len()],
    ends: EndRate,
    permit_return: Option<Recipient<PermitReleased>>,
    /// Whether nothing has changed since the last report.
    is_reported: bool,
    status: Arc<Status>,
}

/// The place of a sequence in its client's line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    pub class: Class,
    pub priority: i32,
    pub key: SequenceKey,
}

/// The turn of a sequence among those of all clients: the least goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Turn {
    pub class: Class,
    pub priority: i32,
    pub served: u64,
}

impl Turn {
    /// Returns its class and priority, within which the turn is the client's that was served the least.
    pub fn rank(&self) -> (Class, i32) {
        (self.class, self.priority)
    }
}

/// A queued sequence.
pub struct QueuedSequence {
    pub sequence: Box<Sequence>,
    pub since: Instant,
    /// Its tokens, once prefill has tried to lease its pages; `None` if these are not shared.
    pub chain: Option<Option<TokenChain>>,
    /// The number of releases of pages when there were too few for it, and how many were too few.
    pub short_at: Option<(u64, NoLease)>,
    is_released: bool,
    /// The tokens that were computed for all clients when slots or pages were first missing for it.
    blocked_at: Option<u64>,
}

/// Sequences whose turn would come, but that cannot begin now.
#[derive(Debug, Default)]
pub struct Skipped {
    pub sequences: BTreeSet<SequenceKey>,
    /// Clients whose other sequences wait, too.
    pub clients: BTreeSet<ClientId>,
}

/// A sequence that may be the next one.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    pub client: ClientId,
    pub place: Place,
    pub turn: Turn,
    /// Number of slots that it needs.
    pub slots: usize,
}

impl FairQueue {
    /// Sets where permits are returned.
    pub fn set_permit_return(&mut self, intake: Recipient<PermitReleased>) {
        self.permit_return = Some(intake);
    }

    /// Adds a sequence that arrived. A client of which none could begin as early is lifted to those of which
    /// some could.
    pub fn push(&mut self, sequence: Box<Sequence>, now: Instant) {
        let (id, place) = (sequence.request.client.id, Place::of(&sequence));
        self.configure(&sequence.request.client, now);
        if !self.clients[&id].may_begin_by(place) {
            let others = self.queued().filter(|other| other.client.id != id && other.may_begin_by(place));
            let least = others.map(|other| other.account.served()).min();
            let last = self.last_served[place.class as usize].as_ref();
            let least = least.or_else(|| last.map(|last| last.served()));
            self.clients[&id].account.lift(least.unwrap_or(0));
        }
        self.insert(sequence, now, false);
    }

    /// Adds a sequence that begins again, because it was preempted or a fault came between. It keeps its
    /// place before those that arrived later, and gives back its permits.
    pub fn push_again(&mut self, mut sequence: Box<Sequence>, now: Instant) {
        self.free_permits += sequence.permits.len() as isize;
        sequence.permits.drain(..).for_each(Permit::forget);
        // A preempted sequence belongs to the batch that it began with.
        let is_released = sequence.progress.is_some();
        self.insert(sequence, now, is_released);
    }

    fn insert(&mut self, mut sequence: Box<Sequence>, now: Instant, is_released: bool) {
        let (slots, was_preempted) = (sequence.slots(), sequence.progress.is_some());
        let place = Place::of(&sequence);
        let client = self.client(&sequence.request.client, now);
        sequence.account = client.account.clone();
        let (chain, short_at, blocked_at) = (None, None, None);
        let queued = QueuedSequence { sequence, since: now, chain, short_at, is_released, blocked_at };
        client.line.insert(place, queued);
        client.waiting[place.class as usize] += slots;
        let id = client.client.id;
        self.queued.insert(id);
        self.waiting[place.class as usize] += slots;
        self.is_reported = false;
        self.searches += usize::from(slots > 1);
        self.preempted[place.class as usize] += usize::from(was_preempted);
        self.released += usize::from(is_released);
    }

    /// Returns the state of a client. Its settings are those that it has already, if it is known.
    fn client(&mut self, client: &Arc<Client>, now: Instant) -> &mut QueuedClient {
        if self.clients.len() >= self.forget_at && !self.clients.contains_key(&client.id) {
            self.clients.retain(|_, client| !client.is_forgettable(now));
            self.forget_at = CLIENTS_MAX.max(2 * self.clients.len());
        }
        let total = &self.total;
        self.clients.entry(client.id).or_insert_with(|| QueuedClient::new(client, total.clone(), now))
    }

    /// Returns the state of a client, with the settings of its latest request.
    fn configure(&mut self, client: &Arc<Client>, now: Instant) -> &mut QueuedClient {
        let known = self.client(client, now);
        if !Arc::ptr_eq(&known.client, client) {
            known.client = client.clone();
            known.account.configure(&client.settings, now);
            known.requests.set_limit(client.settings.requests_per_minute, now);
        }
        known
    }

    /// Returns the clients with queued sequences.
    fn queued(&self) -> impl Iterator<Item = &QueuedClient> {
        self.queued.iter().filter_map(|id| self.clients.get(id))
    }

    /// Returns the sequence whose turn it is, apart from those in `skipped` and of clients that may run no
    /// more; if `only_released`, among those of the current batch. Those whose clients are gone are dropped.
    pub fn first(&mut self, skipped: &Skipped, only_released: bool) -> Option<Candidate> {
        loop {
            let of_clients = self.queued().filter_map(|client| client.first(skipped, only_released));
            let first = of_clients.min_by_key(|candidate| (candidate.turn, candidate.place.key))?;
            if !self.get(&first).sequence.events.is_closed() {
                return Some(first);
            }
            self.remove(&first);
        }
    }

    /// Whether a sequence is still queued.
    pub fn has(&self, candidate: &Candidate) -> bool {
        let client = self.clients.get(&candidate.client);
        client.is_some_and(|client| client.line.contains_key(&candidate.place))
    }

    /// Returns a sequence that [`FairQueue::first`] has returned.
    pub fn get(&mut self, candidate: &Candidate) -> &mut QueuedSequence {
        let client = self.clients.get_mut(&candidate.client);
        let queued = client.and_then(|client| client.line.get_mut(&candidate.place));
        queued.expect("a candidate is in the queue; anything else is a bug")
    }

    /// Whether others of its class and priority may begin before a sequence that lacks slots or pages: until
    /// as many tokens were computed as it has itself, for each of the others that wait, or for each slot.
    /// From then on, slots and pages that come back are kept for it.
    pub fn may_be_passed(&mut self, candidate: &Candidate) -> bool {
        let others = self.queued().filter(|other| other.client.id != candidate.client);
        let others = others.filter(|other| other.may_begin_by(candidate.place)).take(self.slots).count();
        let total = self.total.load(Relaxed);
        let queued = self.get(candidate);
        let tokens = queued.sequence.request.input_tokens() + queued.sequence.generated().len();
        total - *queued.blocked_at.get_or_insert(total) < (others * tokens) as u64
    }

    /// Takes a sequence that begins out of the queue, with its permits.
    pub fn take(&mut self, candidate: &Candidate) -> QueuedSequence {
        let mut queued = self.remove(candidate);
        let Sequence { permits, account, request, .. } = &mut *queued.sequence;
        let of_intake = self.permit_return.clone();
        permits.extend(
            (0..candidate.slots).map(|_| Permit::new(of_intake.clone(), account.clone(), request.class)),
        );
        self.free_permits -= candidate.slots as isize;
        self.is_reported = false;
        self.last_served[request.class as usize] = Some(account.clone());
        queued
    }

    fn remove(&mut self, Candidate { client, place, slots, .. }: &Candidate) -> QueuedSequence {
        let class = place.class as usize;
        let found = self.clients.get_mut(client).and_then(|client| {
            client.waiting[class] -= slots;
            client.line.remove(place)
        });
        let queued = found.expect("a candidate is in the queue; anything else is a bug");
        if self.clients[client].line.is_empty() {
            self.queued.remove(client);
        }
        self.waiting[class] -= slots;
        self.is_reported = false;
        self.searches -= usize::from(*slots > 1);
        self.preempted[class] -= usize::from(queued.sequence.progress.is_some());
        self.released -= usize::from(queued.is_released);
        queued
    }

    /// Removes sequences whose clients are gone.
    pub fn drop_cancelled(&mut self) {
        let mut gone = Vec::new();
        for client in self.queued() {
            let closed = client.line.iter().filter(|(_, queued)| queued.sequence.events.is_closed());
            gone.extend(closed.map(|(place, queued)| client.candidate(*place, queued)));
        }
        gone.iter().for_each(|candidate| drop(self.remove(candidate)));
    }

    /// Counts a sequence that ended, whose permit is back.
    pub fn release_permit(&mut self, now: Instant) {
        self.free_permits += 1;
        self.is_reported = false;
        assert!(self.free_permits <= self.slots as isize, "a permit is returned only once");
        match self.is_empty() {
            true => self.ends.clear(),
            false => self.ends.count(now),
        }
    }

    /// Returns the number of tokens that clients were charged for.
    #[cfg(test)]
    pub fn charged(&self) -> u64 {
        self.total.load(Relaxed)
    }

    /// Returns the number of queued sequences.
    pub fn len(&self) -> usize {
        self.queued().map(|client| client.line.len()).sum()
    }

    /// Whether no sequence is queued.
    pub fn is_empty(&self) -> bool {
        self.queued.is_empty()
    }

    /// Returns the number of queued sequences whose clients may run them now.
    pub fn ready(&self) -> usize {
        self.queued().map(|client| client.line.len().min(client.room())).sum()
    }

    /// Returns the number of queued sequences that belong to the current batch.
    pub fn released(&self) -> usize {
        self.released
    }

    /// Returns since when the oldest sequence has been queued.
    pub fn oldest(&self) -> Option<Instant> {
        let all = self.queued().flat_map(|client| &client.line);
        all.min_by_key(|(place, _)| place.key).map(|(_, queued)| queued.since)
    }

    /// Makes the sequences whose turn comes first the current batch, as many as there are slots.
    pub fn release_batch(&mut self) {
        let (mut room, mut costs) = (self.slots, HashMap::<ClientId, (u64, usize)>::new());
        loop {
            let firsts = self.queued().filter_map(|client| {
                let (cost, begun) = costs.get(&client.client.id).copied().unwrap_or_default();
                let (place, queued) = client.line.iter().find(|(_, queued)| !queued.is_released)?;
                let mut candidate = client.candidate(*place, queued);
                candidate.turn.served += cost;
                client.may_run(begun, candidate.slots).then_some(candidate)
            });
            let first = firsts.min_by_key(|candidate| (candidate.turn, candidate.place.key));
            let Some(first) = first.filter(|candidate| candidate.slots <= room) else { return };
            room -= first.slots;
            let queued = self.get(&first);
            queued.is_released = true;
            let request = &queued.sequence.request;
            let (cost, begun) = costs.entry(first.client).or_default();
            *cost += queued.sequence.account.cost(request.input_tokens() as u64);
            *begun += first.slots;
            self.released += 1;
        }
    }

    /// Updates the counts of sequences that other threads read. Those for which there are free slots count as
    /// running.
    pub fn report(&mut self) {
        if std::mem::replace(&mut self.is_reported, true) {
            return;
        }
        let (startable, free) = (self.startable(), self.free_permits());
        let (waiting, running) = (self.waiting_by(LAST) - startable, self.slots - free + startable);
        self.status.set_counts(waiting, running);
        telemetry::REQUESTS_WAITING.set(waiting as f64);
        telemetry::REQUESTS_RUNNING.set(running as f64);
    }

    /// Returns the number of permits that nobody holds, and that no queued sequence is about to get.
    pub fn unclaimed_permits(&self) -> usize {
        self.free_permits() - self.startable()
    }

    /// Returns the number of slots that the queued sequences of a class and those before it need.
    fn waiting_by(&self, class: Class) -> usize {
        sum_by(&self.waiting, class)
    }

    /// Returns the number of permits that nobody holds.
    pub fn free_permits(&self) -> usize {
        self.free_permits.max(0) as usize
    }

    /// Returns for how many slots of queued sequences there are free ones.
    fn startable(&self) -> usize {
        let free = self.free_permits();
        let allowed = self.queued().map(|client| client.waiting_by(LAST).min(client.room())).sum::<usize>();
        if allowed <= free || self.searches == 0 {
            return allowed.min(free);
        }
        // A search begins with all of its slots, and those behind it wait for it.
        let all = self.queued().flat_map(|client| &client.line);
        let mut slots: Vec<_> = all.map(|(place, queued)| (place.key, queued.sequence.slots())).collect();
        slots.sort_unstable();
        let mut begun = 0;
        for (_, slots) in slots {
            if begun + slots > free {
                break;
            }
            begun += slots;
        }
        begun
    }
}

impl Place {
    fn of(sequence: &Sequence) -> Place {
        let Sequence { key, request, .. } = sequence;
        Place { class: request.class, priority: request.priority, key: *key }
    }
}

#[cfg(test)]
mod tests;
