//! Pages for growing sequences, if necessary those of others.
//!
//! Invariant: the oldest sequence of the first class is never preempted for another one's pages, so something
//! always goes on.

use super::{GrowingSequence, HeldSequence, KvManager, OpenUpdate, SequenceKey};
use crate::request::Class;
use std::collections::BTreeSet;

impl KvManager {
    /// Finds pages for all lanes that wait for a plan, the oldest sequence of the first class first, and replies
    /// to those that can go on.
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
        // Younger ones may have come, too.
        let youngest = self.last();
        self.giving_up.retain(|key| Some(*key) == youngest);
        if let Some(asked) = self.giving_up.first().copied().filter(|key| self.lane_waits(*key)) {
            self.preempt(asked);
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
            let youngest = self.last().expect("at least this sequence is held");
            if self.lane_waits(youngest) {
                self.preempt(youngest);
            } else {
                self.giving_up.insert(youngest);
            }
        }
    }

    /// Returns the class of a sequence and its key: the later they are, the sooner it is preempted.
    fn rank(&self, key: SequenceKey) -> (Option<Class>, SequenceKey) {
        (self.held.get(&key).map(|held| held.class), key)
    }

    /// Returns the youngest sequence of the last class.
    fn last(&self) -> Option<SequenceKey> {
        self.held.iter().max_by_key(|(key, held)| (held.class, **key)).map(|(key, _)| *key)
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
        let Some(HeldSequence { lane, search, .. }) = self.held.get(&key) else { return };
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
