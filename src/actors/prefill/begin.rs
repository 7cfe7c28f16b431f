//! The begin of a sequence: its slot, taken from others if need be, and its pages.
//!
//! Invariant: a sequence leaves the queue with its pages leased, into a lane that has, or by then will have,
//! slots for it.

use super::{Prefill, ScheduledWork, StartedPrompt};
use crate::actors::queue::{Candidate, FairQueue, Preemptible, QueuedSequence, Reason};
use crate::actors::sequence::Sequence;
use crate::config::Policy;
use crate::memory::{NoLease, PageDemand};

/// The outcome of an attempt to begin a sequence.
pub(super) enum Begin {
    Begun,
    /// Another sequence is computing its next page.
    AwaitsPage,
    /// It lacks something, and those behind it wait for it.
    MustWait,
}

impl Prefill {
    /// Begins the sequence whose turn it is in a lane that may begin `share` more, with a chunk of at most
    /// `left` tokens.
    pub(super) fn begin(
        &mut self,
        queue: &mut FairQueue,
        (lane, share): (usize, &mut usize),
        next: &Candidate,
        left: &mut usize,
        work: &mut ScheduledWork,
    ) -> Begin {
        if min_chunk(&queue.get(next).sequence) > *left && !work.chunks.is_empty() {
            return Begin::MustWait;
        }
        let free = self.lanes[lane].free_slots;
        let has_slots = *share > 0 && next.slots <= free;
        let victims = match has_slots {
            true => Some(Vec::new()),
            false => self.victims_for_slots(queue, lane, next, work),
        };
        let Some(victims) = victims else { return Begin::MustWait };
        match self.lease_pages(queue.get(next)) {
            Ok(()) => {}
            Err(NoLease::Coming) => return Begin::AwaitsPage,
            Err(NoLease::Short) => {
                self.make_room(queue, lane, next, work);
                return Begin::MustWait;
            }
        }
        self.preempt(lane, &victims, work);
        let QueuedSequence { sequence, .. } = queue.take(next);
        let mut prompt = StartedPrompt::new(&sequence);
        let mut chunk = prompt.next_chunk(left);
        chunk.sequence = Some(sequence);
        work.chunks.push(chunk);
        *share = share.saturating_sub(1);
        let lane = &mut self.lanes[lane];
        lane.add_sequence(next.slots);
        if prompt.remaining() > 0 {
            lane.started.push(prompt);
        }
        Begin::Begun
    }

    /// Returns the sequences to preempt so that the next one gets the slots that it lacks, if no lane has them.
    fn victims_for_slots(
        &self,
        queue: &FairQueue,
        lane: usize,
        next: &Candidate,
        work: &ScheduledWork,
    ) -> Option<Vec<(Preemptible, Reason)>> {
        let is_batch = matches!(self.policy, Policy::Window { .. });
        if is_batch || self.lanes.iter().any(|lane| next.slots <= lane.free_slots) {
            return None;
        }
        let lane = &self.lanes[lane];
        let (victims, reason) =
            queue.victims_for_slots(next, next.slots - lane.free_slots, &lane.preemptible)?;
        // What clients run is known again when those that were preempted are back.
        let may_go = reason == Reason::Class || work.preempted.is_empty();
        may_go.then(|| victims.into_iter().map(|victim| (victim, reason)).collect())
    }

    /// Preempts sequences of later classes whose pages the next sequence lacks. It begins when they are back.
    fn make_room(&mut self, queue: &mut FairQueue, lane: usize, next: &Candidate, work: &mut ScheduledWork) {
        // Those that make room for it already do so with their lane's next update.
        let at = Some((next.place.key, self.pool.releases()));
        if matches!(self.policy, Policy::Window { .. }) || self.room_made_at == at {
            return;
        }
        let sequence = &queue.get(next).sequence;
        let needed = self.pool.pages_for(sequence.request.prompt.len() + sequence.generated().len())
            + self.pool.pages_for(sequence.encoder_positions())
            + self.margin;
        let missing = needed.saturating_sub(self.pool.available()).max(1);
        let found = queue.victims_for_pages(next, missing, &self.lanes[lane].preemptible);
        let Some(found) = found else { return };
        self.room_made_at = at;
        let victims: Vec<_> = found.into_iter().map(|victim| (victim, Reason::Class)).collect();
        self.preempt(lane, &victims, work);
    }

    fn preempt(&mut self, lane: usize, victims: &[(Preemptible, Reason)], work: &mut ScheduledWork) {
        let lane = &mut self.lanes[lane];
        for (victim, reason) in victims {
            self.preemptions[usize::from(*reason == Reason::Share)].increment(1);
            work.preempted.push(victim.key);
            lane.give_up(victim);
        }
    }

    /// Leases the pages of a waiting prompt, with those that hold its first tokens already.
    fn lease_pages(&mut self, queued: &mut QueuedSequence) -> Result<(), NoLease> {
        // Asked before, so that what is released meanwhile counts.
        let releases = self.pool.releases();
        if queued.short_at == Some(releases) {
            return Err(NoLease::Short);
        }
        let sequence = &mut queued.sequence;
        let page_positions = self.pool.page_positions();
        let chain = queued.chain.take().unwrap_or_else(|| self.prefix_rules.chain(sequence, page_positions));
        let len = sequence.request.prompt.len() + sequence.generated().len();
        // All rows of a prompt are scored, once. Otherwise, the last one gives the next token.
        let is_scored = sequence.request.prompt_logprobs.is_some() && sequence.generated().is_empty();
        let reusable = if is_scored { 0 } else { len.saturating_sub(1) };
        let demand = PageDemand {
            positions: if sequence.positions() == 0 { 0 } else { len },
            max_positions: sequence.positions(),
            encoder_positions: sequence.encoder_positions(),
            reusable,
            margin: self.margin,
        };
        // What is computed again after a preemption was not asked for again.
        let is_counted = self.prefix_rules.across_requests
            && chain.is_some()
            && reusable > 0
            && sequence.progress.is_none();
        match self.pool.begin(demand, chain) {
            Ok(lease) => {
                if is_counted {
                    self.queried_tokens.increment(len as u64);
                    self.found_tokens.increment(lease.computed() as u64);
                }
                sequence.lease = Some(lease);
                Ok(())
            }
            Err((why, chain)) => {
                queued.chain = Some(chain);
                queued.short_at = Some(releases).filter(|_| why == NoLease::Short);
                Err(why)
            }
        }
    }
}

/// Returns the size of the smallest possible first chunk: the encoder input, and one token.
fn min_chunk(sequence: &Sequence) -> usize {
    let request = &sequence.request;
    request.encoder_input.len() + request.prompt.len().min(1)
}

impl StartedPrompt {
    /// Creates the state of a prompt whose pages are leased.
    fn new(sequence: &Sequence) -> StartedPrompt {
        let request = &sequence.request;
        StartedPrompt {
            key: sequence.key,
            class: request.class,
            priority: request.priority,
            account: sequence.account.clone(),
            encoder_tokens: request.encoder_input.len(),
            len: request.prompt.len() + sequence.generated().len(),
            scheduled: sequence.lease.as_ref().map_or(0, |lease| lease.computed()),
            charged: sequence.charged,
            events: sequence.events.clone(),
        }
    }
}
