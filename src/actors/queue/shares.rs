//! Which running sequences make way for a queued one.
//!
//! Invariant: nobody is preempted in favor of a later class, or of a client that has at least its share of
//! the slots or pages; and no client loses a part of its share, except to an earlier class. A sequence that
//! was preempted makes way for a client's share again only after it has made progress.

use super::{Candidate, FairQueue, LAST, PREEMPTED_FACTOR, QueuedClient};
use crate::actors::sequence::SequenceKey;
use crate::request::Class;
use crate::request::client::ClientId;
use std::cmp::Reverse;
use std::collections::HashMap;

/// Number of tokens that a preempted sequence generates at least before it makes way for its client's share
/// again: they pay for computing it anew.
const QUANTUM: usize = 32;

/// A running sequence, or a beam search, that may be preempted.
#[derive(Clone, Copy, Debug)]
pub struct Preemptible {
    pub key: SequenceKey,
    pub class: Class,
    pub client: ClientId,
    /// Number of its slots: of a search, those of all beams.
    pub slots: usize,
    /// Number of its pages, without those that others held when it began.
    pub pages: usize,
    /// Whether it was preempted before.
    pub was_preempted: bool,
    /// Number of tokens that it has generated since it began, or began again; 0 for a search, which would
    /// begin anew.
    pub progress: usize,
}

/// The reason for a preemption.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Pages for a sequence that grows.
    Pages,
    /// An earlier class.
    Class,
    /// A client that has less than its share of the slots or pages.
    Share,
}

impl Reason {
    /// Returns its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Reason::Pages => "pages",
            Reason::Class => "class",
            Reason::Share => "share",
        }
    }
}

impl Preemptible {
    fn has_progressed(&self) -> bool {
        !self.was_preempted || self.progress >= QUANTUM
    }
}

/// A number of slots or pages that a sequence needs to begin.
#[derive(Clone, Copy, Debug)]
pub struct Demand {
    /// Number that it takes for itself.
    pub needed: usize,
    /// Number of these that are not free.
    pub missing: usize,
    /// Number that all sequences have together.
    pub total: usize,
}

impl FairQueue {
    /// Returns those of the `running` sequences of a lane to preempt so that `candidate` gets `missing`
    /// slots; `None` if it has to wait.
    pub fn victims_for_slots(
        &self,
        candidate: &Candidate,
        missing: usize,
        running: &[Preemptible],
    ) -> Option<(Vec<Preemptible>, Reason)> {
        let (class, size) = (candidate.turn.class, |victim: &Preemptible| victim.slots);
        let found = self.later_classes(class, missing, running, size);
        found.map(|victims| (victims, Reason::Class)).or_else(|| {
            let demand = Demand { needed: candidate.slots, missing, total: self.slots };
            let held = |client| self.clients.get(&client).map_or(0, |it| it.account.running(class));
            let victims = self.above_their_shares(candidate, demand, held, running, size)?;
            Some((victims, Reason::Share))
        })
    }

    /// Returns sequences to preempt so that `candidate` gets the pages that it lacks; `None` if it has to
    /// wait. `running` are the sequences that hold pages; those that `may_go` can be preempted.
    pub fn victims_for_pages(
        &self,
        candidate: &Candidate,
        demand: Demand,
        running: &[Preemptible],
        may_go: impl Fn(&Preemptible) -> bool,
    ) -> Option<(Vec<Preemptible>, Reason)> {
        let (class, size) = (candidate.turn.class, |victim: &Preemptible| victim.pages);
        let others: Vec<Preemptible> = running.iter().filter(|it| may_go(it)).copied().collect();
        let found = self.later_classes(class, demand.missing, &others, size);
        found.map(|victims| (victims, Reason::Class)).or_else(|| {
            let held = |client| {
                let own = running.iter().filter(|it| it.class == class && it.client == client);
                own.map(size).sum()
            };
            let victims = self.above_their_shares(candidate, demand, held, &others, size)?;
            Some((victims, Reason::Share))
        })
    }

    /// Returns how many further preempted sequences of a class the queue may hold: they take more memory than
    /// others.
    fn room_for_preempted(&self, class: Class) -> usize {
        (PREEMPTED_FACTOR * self.slots).saturating_sub(self.preempted[class as usize])
    }

    /// Returns sequences of later classes than `class` that have `missing` slots or pages together, by
    /// `size`: the last class first, there those that have progressed, the youngest first.
    fn later_classes(
        &self,
        class: Class,
        missing: usize,
        running: &[Preemptible],
        size: impl Fn(&Preemptible) -> usize,
    ) -> Option<Vec<Preemptible>> {
        let mut victims: Vec<Preemptible> = running.iter().filter(|it| it.class > class).copied().collect();
        victims.sort_unstable_by_key(|victim| Reverse((victim.class, victim.has_progressed(), victim.key)));
        enough(victims.into_iter().take(self.room_for_preempted(LAST)), missing, size)
    }

    /// Returns sequences of clients that have more than their shares of the slots or pages, if the
    /// candidate's client has no more than its own with the candidate: of the client most above its share
    /// first, the youngest first. `held` is what a client has in the class, `size` what a sequence has.
    fn above_their_shares(
        &self,
        candidate: &Candidate,
        Demand { needed, missing, total }: Demand,
        held: impl Fn(ClientId) -> usize,
        running: &[Preemptible],
        size: impl Fn(&Preemptible) -> usize,
    ) -> Option<Vec<Preemptible>> {
        let (class, weights) = (candidate.turn.class, self.active_weights(candidate.turn.class));
        let share = |client: &QueuedClient| {
            let share = total as u64 * u64::from(client.account.weight()) / weights.max(1);
            share.max(1) as usize
        };
        if held(candidate.client) + needed > share(self.clients.get(&candidate.client)?) {
            return None;
        }
        // A client that was served less would be the next one, and take back what it gave.
        let may_go = |it: &&Preemptible| {
            let client = self.clients.get(&it.client);
            it.class == class
                && it.client != candidate.client
                && it.has_progressed()
                && client.is_some_and(|client| client.account.served() >= candidate.turn.served)
        };
        let mut left: Vec<Preemptible> = running.iter().filter(may_go).copied().collect();
        let mut excess = HashMap::<ClientId, usize>::new();
        for it in &left {
            let of_client = || held(it.client).saturating_sub(share(&self.clients[&it.client]));
            excess.entry(it.client).or_insert_with(of_client);
        }
        let next = std::iter::from_fn(|| {
            let fits = |it: &&Preemptible| excess[&it.client] >= size(it);
            let victim = *left.iter().filter(fits).max_by_key(|it| (excess[&it.client], it.key))?;
            left.retain(|it| it.key != victim.key);
            *excess.entry(victim.client).or_default() -= size(&victim);
            Some(victim)
        });
        enough(next.take(self.room_for_preempted(class)), missing, &size)
    }

    /// Returns the sum of the weights of the clients with work in a class.
    fn active_weights(&self, class: Class) -> u64 {
        let is_active =
            |client: &&QueuedClient| client.waiting[class as usize] > 0 || client.account.running(class) > 0;
        self.clients.values().filter(is_active).map(|client| u64::from(client.account.weight())).sum()
    }
}

/// Returns the first victims that have `missing` together, by `size`, without those that are not needed then.
fn enough(
    victims: impl Iterator<Item = Preemptible>,
    missing: usize,
    size: impl Fn(&Preemptible) -> usize,
) -> Option<Vec<Preemptible>> {
    let (mut chosen, mut sum) = (Vec::new(), 0);
    for victim in victims.filter(|victim| size(victim) > 0) {
        sum += size(&victim);
        chosen.push(victim);
        if sum >= missing {
            chosen.retain(|victim| {
                let is_needed = sum - size(victim) < missing;
                sum -= if is_needed { 0 } else { size(victim) };
                is_needed
            });
            return Some(chosen);
        }
    }
    None
}
