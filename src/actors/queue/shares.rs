//! Which running sequences make way for a queued one.
//!
//! Invariant: nobody is preempted in favor of a later class, or of a client that has at least its share of
//! the slots; and no client loses a part of its share, except to an earlier class. A sequence that was
//! preempted is not chosen again before it has made progress.

use super::{Candidate, FairQueue, PREEMPTED_FACTOR, QueuedClient};
use crate::actors::sequence::SequenceKey;
use crate::request::Class;
use crate::request::client::ClientId;
use std::cmp::Reverse;

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
    /// Number of its pages; some may be shared.
    pub pages: usize,
    /// Whether it was preempted before.
    pub was_preempted: bool,
    /// Number of tokens that it has generated since it began, or began again; 0 for a search.
    pub progress: usize,
}

/// The reason for a preemption.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Pages for a sequence that grows.
    Pages,
    /// An earlier class.
    Class,
    /// A client that has less than its share of the slots.
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
    fn has_progressed(&self, tokens: usize) -> bool {
        !self.was_preempted || self.progress >= tokens
    }
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
        if !self.may_preempt() {
            return None;
        }
        let of_class = lower_classes(candidate.turn.class, missing, running, |victim| victim.slots);
        let of_class = of_class.map(|victims| (victims, Reason::Class));
        of_class.or_else(|| Some((vec![self.above_its_share(candidate, missing, running)?], Reason::Share)))
    }

    /// Returns those of the `running` sequences of a lane to preempt so that `candidate` gets `missing`
    /// pages; `None` if it has to wait.
    pub fn victims_for_pages(
        &self,
        candidate: &Candidate,
        missing: usize,
        running: &[Preemptible],
    ) -> Option<Vec<Preemptible>> {
        let found = lower_classes(candidate.turn.class, missing, running, |victim| victim.pages);
        found.filter(|_| self.may_preempt())
    }

    /// Whether the queue may hold a further preempted sequence: they take more memory than others.
    fn may_preempt(&self) -> bool {
        self.preempted < PREEMPTED_FACTOR * self.slots
    }

    /// Returns the youngest sequence of the client that is most above its share, if the candidate's is below.
    fn above_its_share(
        &self,
        candidate: &Candidate,
        missing: usize,
        running: &[Preemptible],
    ) -> Option<Preemptible> {
        let class = candidate.turn.class;
        let client = self.clients.get(&candidate.client)?;
        if client.account.running(class) + candidate.slots > self.share_of_slots(client, class) {
            return None;
        }
        let excess = |victim: &Preemptible| {
            let other = self.clients.get(&victim.client)?;
            let excess = other.account.running(class).checked_sub(self.share_of_slots(other, class))?;
            (excess >= victim.slots && other.account.served() >= candidate.turn.served).then_some(excess)
        };
        let may_go = |victim: &&Preemptible| {
            victim.class == class
                && victim.client != candidate.client
                && victim.slots >= missing
                && victim.has_progressed(QUANTUM)
        };
        let victims = running.iter().filter(may_go).filter_map(|victim| Some((excess(victim)?, victim)));
        victims.max_by_key(|(excess, victim)| (*excess, victim.key)).map(|(_, victim)| *victim)
    }

    /// Returns a client's share of the slots, by its weight among the clients with work in the class.
    fn share_of_slots(&self, client: &QueuedClient, class: Class) -> usize {
        let is_active = |other: &&QueuedClient| other.waits_in(class) || other.account.running(class) > 0;
        let weights = self.clients.values().filter(is_active).map(|other| u64::from(other.account.weight()));
        let share = self.slots as u64 * u64::from(client.account.weight()) / weights.sum::<u64>().max(1);
        share.max(1) as usize
    }
}

/// Returns sequences of later classes than `class` that have `missing` slots or pages together, by `size`:
/// the last class first, the youngest first.
fn lower_classes(
    class: Class,
    missing: usize,
    running: &[Preemptible],
    size: impl Fn(&Preemptible) -> usize,
) -> Option<Vec<Preemptible>> {
    let may_go = |victim: &&Preemptible| victim.class > class && victim.has_progressed(1);
    let mut victims: Vec<Preemptible> = running.iter().filter(may_go).copied().collect();
    victims.sort_unstable_by_key(|victim| Reverse((victim.class, victim.key)));
    let mut sum = 0;
    let mut enough = victims.iter().map(|victim| {
        sum += size(victim);
        sum >= missing
    });
    let count = 1 + enough.position(|is_enough| is_enough)?;
    victims.truncate(count);
    Some(victims)
}
