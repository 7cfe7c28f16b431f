//! Pages for growing sequences, if necessary those of others.
//!
//! Invariant: the oldest sequence of the first class is never preempted for another one's pages, so something
//! always goes on. Of a class, clients with fewer pages keep theirs when sequences of one with more grow.

use super::{GrowingSequence, HeldSequence, KvManager, OpenUpdate, SequenceKey};
use crate::request::Class;
use crate::request::client::{ClientId, WEIGHT_MAX};
use std::collections::{BTreeMap, BTreeSet};

/// Factor by which pages can be divided by weights.
const WEIGHT_UNIT: u64 = WEIGHT_MAX as u64;

impl KvManager {
    /// Finds pages for all lanes that wait for a plan, the oldest sequence of the first class first, and
    /// replies to those that can go on.
    pub(super) fn settle(&mut self) {
        let open = self.lanes.iter().filter_map(|lane| lane.open.as_ref());
        let mut needs: Vec<GrowingSequence> = open.flat_map(|open| &open.needs).copied().collect();
        needs.sort_unstable_by_key(|need| self.rank(need.key));
        needs.retain(|need| !self.grow(*need));
        // Pages may have come back since sequences were asked to give up theirs.
        let held = &mut self.held;
        let mut lacks_pages = |need: &GrowingSequence| {
            held.get_mut(&need.key).is_some_and(|held| !held.lease.grow(need.positions))
        };
        self.lanes.iter_mut().for_each(|lane| lane.stalled.retain(&mut lacks_pages));
        if needs.is_empty() && self.lanes.iter().all(|lane| lane.stalled.is_empty()) {
            self.giving_up.clear();
        }
        // Those before it may have ended.
        let first = self.first();
        self.giving_up = self.giving_up.iter().filter(|key| !self.are_one(first, **key)).copied().collect();
        if let Some(asked) = self.giving_up.first().copied().filter(|key| self.lane_waits(*key)) {
            // One that goes before it may have come.
            self.giving_up.clear();
            let victim = self.victim().unwrap_or(asked);
            if self.lane_waits(victim) {
                self.preempt(victim);
            } else if self.class_of(victim) > self.class_of(asked) {
                self.giving_up.insert(victim);
            } else {
                self.preempt(asked);
            }
        }
        needs.into_iter().for_each(|need| self.find_pages(need));
        for lane in 0..self.lanes.len() {
            let search_of = |key| self.held.get(&key).and_then(|held| held.search);
            let can_go_on = |open: &mut OpenUpdate| {
                // The beams of a search are computed together.
                let stalled = open.needs.iter().map(|need| search_of(need.key).unwrap_or(need.key));
                let stalled = stalled.collect::<BTreeSet<SequenceKey>>().len();
                stalled == 0 || !open.plan.preempted.is_empty() || stalled < open.with_work
            };
            if let Some(open) = self.lanes[lane].open.take_if(can_go_on) {
                self.reply(lane, open);
            }
        }
    }

    /// Leases the pages that a sequence of a waiting lane needs. Returns false if there are too few.
    fn grow(&mut self, need: GrowingSequence) -> bool {
        let Some(HeldSequence { lane, lease, .. }) = self.held.get_mut(&need.key) else { return true };
        if !lease.grow(need.positions) {
            return false;
        }
        if let Some(open) = &mut self.lanes[*lane].open {
            open.needs.retain(|other| other.key != need.key);
            open.got.push(need);
        }
        true
    }

    /// Leases pages for a sequence that needs them, if necessary after preempting others. It stays among
    /// those with needs if another lane has to give up a sequence first.
    fn find_pages(&mut self, need: GrowingSequence) {
        while !self.grow(need) && self.giving_up.is_empty() {
            let victim = self.victim().unwrap_or(need.key);
            if self.lane_waits(victim) {
                self.preempt(victim);
            } else {
                self.giving_up.insert(victim);
            }
        }
    }

    /// Returns the class of a sequence and its key, by which sequences get their pages.
    fn rank(&self, key: SequenceKey) -> (Option<Class>, SequenceKey) {
        (self.class_of(key), key)
    }

    /// Returns the oldest sequence of the first class.
    fn first(&self) -> Option<SequenceKey> {
        self.held.iter().min_by_key(|(key, held)| (held.class, **key)).map(|(key, _)| *key)
    }

    /// Returns the sequence to preempt: of the last class, the youngest one of the client that has the most
    /// pages for its weight. The oldest one of each class is spared while there are others.
    fn victim(&self) -> Option<SequenceKey> {
        let others = |first: Option<SequenceKey>| {
            let keys = self.held.keys().filter(move |key| !self.are_one(first, **key));
            keys.copied().collect::<Vec<SequenceKey>>()
        };
        let class = others(self.first()).into_iter().map(|key| self.class_of(key)).max()?;
        let mut of_class = others(self.first());
        of_class.retain(|key| self.class_of(*key) == class);
        let oldest = self.held.iter().find(|(_, held)| Some(held.class) == class).map(|(key, _)| *key);
        let spared: Vec<SequenceKey> =
            of_class.iter().copied().filter(|key| !self.are_one(oldest, *key)).collect();
        let candidates = if spared.is_empty() { of_class } else { spared };
        let mut pages = BTreeMap::<ClientId, u64>::new();
        for held in self.held.values().filter(|held| Some(held.class) == class) {
            let part = held.lease.unshared() as u64 * WEIGHT_UNIT / u64::from(held.account.weight());
            *pages.entry(held.account.id).or_default() += part;
        }
        candidates.into_iter().max_by_key(|key| (pages[&self.held[key].account.id], *key))
    }

    /// Whether two sequences are the same one, or beams of one search.
    fn are_one(&self, one: Option<SequenceKey>, other: SequenceKey) -> bool {
        let search_of = |key: SequenceKey| self.held.get(&key).and_then(|held| held.search);
        one.is_some_and(|one| one == other || search_of(one).is_some_and(|it| search_of(other) == Some(it)))
    }

    /// Returns the class of a sequence, if it is held.
    fn class_of(&self, key: SequenceKey) -> Option<Class> {
        self.held.get(&key).map(|held| held.class)
    }

    /// Whether the lane of a sequence waits for a plan, so that it can give up the sequence.
    fn lane_waits(&self, key: SequenceKey) -> bool {
        self.held.get(&key).is_some_and(|held| self.lanes[held.lane].open.is_some())
    }

    /// Preempts a sequence for another one's pages.
    fn preempt(&mut self, key: SequenceKey) {
        self.preemptions.increment(1);
        self.take_slot(key);
    }

    /// Takes slot and pages from a sequence whose lane waits for a plan, or from all beams of its search.
    pub(super) fn take_slot(&mut self, key: SequenceKey) {
        // A search is known by the sequence that it began as, which may be none of its beams now.
        let is_meant =
            |(other, held): &(&SequenceKey, &HeldSequence)| **other == key || held.search == Some(key);
        let Some((_, HeldSequence { lane, search, .. })) = self.held.iter().find(is_meant) else { return };
        let (lane, search) = (*lane, *search);
        let is_victim = |other: &SequenceKey, held: &HeldSequence| {
            *other == key || (search.is_some() && held.search == search)
        };
        let victims = self.held.iter().filter(|(key, held)| is_victim(key, held));
        let victims: Vec<SequenceKey> = victims.map(|(key, _)| *key).collect();
        self.lanes[lane].gave_up = true;
        for victim in victims {
            drop(self.remove(victim));
            if let Some(open) = &mut self.lanes[lane].open {
                open.plan.preempted.push(victim);
                open.needs.retain(|need| need.key != victim);
            }
        }
    }
}
