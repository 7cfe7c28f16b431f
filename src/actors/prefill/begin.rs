//! The begin of a sequence: its slot, taken from others if need be, and its pages.
//!
//! Invariant: a sequence leaves the queue with its pages leased, into a lane that has, or by then will have,
//! slots for it.

use super::lanes::LaneState;
use super::{Prefill, ScheduledWork, StartedPrompt};
use crate::actors::queue::{Candidate, Demand, FairQueue, Preemptible, QueuedSequence, Reason};
use crate::actors::sequence::Sequence;
use crate::config::Policy;
use crate::memory::{NoLease, PageDemand};
use crate::request::{Pooling, Task};
use mainstem_kernels::StepLimits;

/// A running sequence that makes way for another one, and why.
pub(super) type Victim = (Preemptible, Reason);

/// The outcome of an attempt to begin a sequence.
pub(super) enum Begin {
    Begun,
    /// Another sequence is computing its next page.
    AwaitsPage,
    /// Slots or pages are missing in all lanes.
    Lacks,
    /// Another step or lane may begin it.
    NotHere,
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
        if min_chunk(&queue.get(next).sequence, &self.limits) > *left && !work.chunks.is_empty() {
            return Begin::NotHere;
        }
        let free = self.lanes[lane].free_slots;
        let has_slots = *share > 0 && next.slots <= free;
        if !has_slots && self.lanes.iter().any(|lane| next.slots <= lane.free_slots) {
            return Begin::NotHere;
        }
        let victims = match has_slots {
            true => Some(Vec::new()),
            false => self.victims_for_slots(queue, lane, next, work),
        };
        let Some(victims) = victims else { return Begin::Lacks };
        match self.lease_pages(queue.get(next)) {
            Ok(()) => {}
            Err(NoLease::Coming) => return Begin::AwaitsPage,
            Err(NoLease::Short { needed, missing }) => {
                let demand = Demand { needed, missing, total: self.pool.total() };
                let is_coming = self.make_room(queue, lane, next, demand, work);
                // Others would take what is there already.
                return if is_coming { Begin::NotHere } else { Begin::Lacks };
            }
        }
        self.preempt(lane, &victims, work);
        let QueuedSequence { sequence, .. } = queue.take(next);
        let mut prompt = StartedPrompt::new(&sequence, &self.limits);
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

    /// Returns the sequences to preempt so that the next one gets the slots that it lacks.
    fn victims_for_slots(
        &self,
        queue: &FairQueue,
        lane: usize,
        next: &Candidate,
        work: &ScheduledWork,
    ) -> Option<Vec<Victim>> {
        if matches!(self.policy, Policy::Window { .. }) {
            return None;
        }
        let missing = next.slots - self.lanes[lane].free_slots;
        let running: Vec<_> = self.lanes[lane].may_go(work).copied().collect();
        let (victims, reason) = queue.victims_for_slots(next, missing, &running)?;
        // What clients run is known again when those that were preempted are back.
        let are_back = work.preempted.is_empty() && !self.lanes.iter().any(|lane| lane.gives_up);
        let may_go = reason == Reason::Class || are_back;
        may_go.then(|| victims.into_iter().map(|victim| (victim, reason)).collect())
    }

    /// Chooses sequences of all lanes whose pages the next sequence gets. It begins when they are back.
    /// Returns whether pages come back.
    fn make_room(
        &mut self,
        queue: &mut FairQueue,
        lane: usize,
        next: &Candidate,
        demand: Demand,
        work: &mut ScheduledWork,
    ) -> bool {
        if matches!(self.policy, Policy::Window { .. }) {
            return false;
        }
        // Pages of those chosen before may be enough.
        if !self.yielding.is_empty() || self.lanes.iter().any(|lane| lane.gives_up) {
            return true;
        }
        let running = self.lanes.iter().flat_map(|lane| &lane.preemptible).copied();
        let beginning = work.chunks.iter().filter_map(|chunk| beginning(chunk.sequence.as_deref()?));
        let running: Vec<Preemptible> = running.chain(beginning).collect();
        let has_chunk = |key| work.chunks.iter().any(|chunk| chunk.key == key);
        let found = queue.victims_for_pages(next, demand, &running, |victim| !has_chunk(victim.key));
        let Some((victims, reason)) = found else { return false };
        self.yielding = victims.into_iter().map(|victim| (victim, reason)).collect();
        self.yields_for = Some(*next);
        self.take_yielding(queue, lane, work);
        true
    }

    /// Preempts those of the lane that were chosen to give up their pages, and forgets those that ended. If
    /// the sequence that they were chosen for waits no longer, all stay.
    pub(super) fn take_yielding(&mut self, queue: &FairQueue, lane: usize, work: &mut ScheduledWork) {
        let mut yielding = std::mem::take(&mut self.yielding);
        if !self.yields_for.is_some_and(|candidate| queue.has(&candidate)) {
            return;
        }
        let is_in = |lane: &LaneState, (victim, _): &Victim| {
            lane.preemptible.iter().any(|other| other.key == victim.key)
        };
        let here: Vec<Victim> = yielding.extract_if(.., |victim| is_in(&self.lanes[lane], victim)).collect();
        self.preempt(lane, &here, work);
        yielding.retain(|victim| self.lanes.iter().any(|lane| is_in(lane, victim)));
        self.yielding = yielding;
    }

    fn preempt(&mut self, lane: usize, victims: &[Victim], work: &mut ScheduledWork) {
        for (victim, reason) in victims {
            self.preemptions[usize::from(*reason == Reason::Share)].increment(1);
            work.preempted.push(victim.key);
            self.lanes[lane].give_up(victim);
        }
    }

    /// Leases the pages of a waiting prompt, with those that hold its first tokens already.
    fn lease_pages(&mut self, queued: &mut QueuedSequence) -> Result<(), NoLease> {
        // Asked before, so that what is released meanwhile counts.
        let releases = self.pool.releases();
        if let Some((at, short)) = queued.short_at
            && at == releases
        {
            return Err(short);
        }
        let sequence = &mut queued.sequence;
        let page_positions = self.pool.page_positions();
        let chain = queued.chain.take().unwrap_or_else(|| self.prefix_rules.chain(sequence, page_positions));
        let len = sequence.request.prompt.len() + sequence.generated().len();
        // All rows of a prompt are scored, once, or have a part in a mean. Otherwise, the last one gives the
        // next token.
        let is_scored = sequence.request.prompt_logprobs.is_some() && sequence.generated().is_empty();
        let needs_all = is_scored || sequence.request.task == Task::Embed(Pooling::Mean);
        let reusable = if needs_all { 0 } else { len.saturating_sub(1) };
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
                queued.short_at = Some((releases, why)).filter(|_| why != NoLease::Coming);
                Err(why)
            }
        }
    }
}

/// Returns what a sequence that begins in the next step holds.
fn beginning(sequence: &Sequence) -> Option<Preemptible> {
    Some(Preemptible {
        key: sequence.key,
        class: sequence.request.class,
        client: sequence.account.id,
        slots: sequence.slots(),
        pages: sequence.lease.as_ref()?.unshared(),
        was_preempted: sequence.progress.is_some(),
        progress: 0,
    })
}

/// Returns the size of the smallest possible first chunk: the opening, or the encoder input and one token.
fn min_chunk(sequence: &Sequence, limits: &StepLimits) -> usize {
    let request = &sequence.request;
    request.encoder_input.len() + request.prompt.len().min(1).max(opening(sequence, limits))
}

/// Returns the number of tokens of the opening of a prompt; 0 without one.
fn opening(sequence: &Sequence, limits: &StepLimits) -> usize {
    let len = sequence.request.prompt.len().min(limits.opening_rows);
    if limits.opens_with(len) { len } else { 0 }
}

impl StartedPrompt {
    /// Creates the state of a prompt whose pages are leased.
    fn new(sequence: &Sequence, limits: &StepLimits) -> StartedPrompt {
        let request = &sequence.request;
        StartedPrompt {
            key: sequence.key,
            class: request.class,
            priority: request.priority,
            account: sequence.account.clone(),
            encoder_tokens: request.encoder_input.len(),
            encoder_len: request.encoder_input.len(),
            opening: opening(sequence, limits),
            len: request.prompt.len() + sequence.generated().len(),
            scheduled: sequence.lease.as_ref().map_or(0, |lease| lease.computed()),
            charged: sequence.charged.clone(),
            is_leaving: false,
            events: sequence.events.clone(),
        }
    }
}
