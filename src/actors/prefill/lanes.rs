//! The state of the lanes as prefill knows it, and the distribution of waiting prompts among them.
//!
//! Invariant: prefill knows of a lane what its last request said, updated by what it was given since.

use super::{Budget, NextChunks, ScheduledChunk, ScheduledWork, StartedPrompt};
use crate::actors::queue::{Preemptible, Turn};
use crate::actors::sequence::SequenceKey;
use std::iter;
use tokio::sync::oneshot;

/// The state of a lane.
#[derive(Default)]
pub(super) struct LaneState {
    /// Prompts that started in this lane and are not complete, oldest first.
    pub(super) started: Vec<StartedPrompt>,
    /// Running sequences. 0 until the lane's first request.
    pub(super) running: usize,
    /// Free slots. A lane that has not made a request yet has none, and gets no sequences.
    pub(super) free_slots: usize,
    /// Token budget for prefill in its last step.
    pub(super) budget: Budget,
    /// Steps of prefill chunks only that it has in flight.
    pub(super) steps_ahead: usize,
    /// The reply channel of its last request, while it waits for work.
    pub(super) pending_reply: Option<oneshot::Sender<ScheduledWork>>,
    /// Running sequences that may be preempted.
    pub(super) preemptible: Vec<Preemptible>,
    /// Whether the reply to its last request took slots and pages that may not be back yet.
    pub(super) gives_up: bool,
}

impl LaneState {
    /// Stores a request that waits for its reply.
    pub(super) fn set_request(&mut self, request: NextChunks, reply: oneshot::Sender<ScheduledWork>) {
        (self.running, self.free_slots) = (request.running, request.free_slots);
        (self.budget, self.steps_ahead) = (request.budget, request.steps_ahead);
        self.preemptible = request.preemptible;
        self.gives_up = false;
        self.pending_reply = Some(reply);
    }

    /// Whether the lane has no sequences and waits for work.
    pub(super) fn is_idle(&self) -> bool {
        self.running == 0 && self.pending_reply.is_some()
    }

    /// Whether a prompt left to this lane would start at its next request: its own prompts must leave budget
    /// for that.
    fn accepts(&self) -> bool {
        let staying = self.started.iter().filter(|prompt| !prompt.is_leaving);
        let backlog: usize = staying.map(StartedPrompt::remaining).sum();
        self.free_slots > 0 && (self.is_idle() || backlog < self.budget.all)
    }

    /// Counts one more sequence in the lane, which needs so many slots.
    pub(super) fn add_sequence(&mut self, slots: usize) {
        self.running += 1;
        self.free_slots -= slots;
    }

    /// Takes the slots of a sequence, or of the beams of a search, that is preempted.
    pub(super) fn give_up(&mut self, victim: &Preemptible) {
        self.free_slots += victim.slots;
        self.preemptible.retain(|other| other.key != victim.key);
        let started = self.started.iter_mut().filter(|prompt| prompt.key == victim.key);
        started.for_each(|prompt| prompt.is_leaving = true);
        self.gives_up = true;
    }

    /// Returns the running sequences that may be preempted and have no chunk in the next step.
    pub(super) fn may_go(&self, work: &ScheduledWork) -> impl Iterator<Item = &Preemptible> {
        let has_chunk = |key| work.chunks.iter().any(|chunk| chunk.key == key);
        self.preemptible.iter().filter(move |running| !has_chunk(running.key))
    }

    /// Resets a lane that restarts. It gets no sequences before its next request.
    pub(super) fn reset(&mut self) {
        self.started.clear();
        self.preemptible.clear();
        (self.running, self.free_slots, self.steps_ahead, self.gives_up) = (0, 0, 0, false);
    }

    /// Returns the index of the started prompt whose turn comes first, the oldest one of these, and its turn.
    pub(super) fn first_started(&self) -> Option<(usize, Turn)> {
        let started = self.started.iter().enumerate().filter(|(_, prompt)| !prompt.is_leaving);
        let turns = started.map(|(at, prompt)| (at, prompt.turn()));
        turns.min_by_key(|(at, turn)| (*turn, *at))
    }

    /// Returns the next chunk of a started prompt, and deducts it from the budget.
    pub(super) fn continue_prompt(&mut self, at: usize, budget: &mut usize) -> ScheduledChunk {
        let chunk = self.started[at].next_chunk(budget);
        if self.started[at].remaining() == 0 {
            self.started.remove(at);
        }
        chunk
    }
}

/// Returns how many of the `waiting` prompts, from the head of the queue, the requesting lane takes, if each
/// prompt goes to the lane with the fewest sequences; the other lanes make their requests soon. A lane that
/// could not start the prompt in its next step is not considered: it needs one slot, and the first prompt
/// `first_slots`.
pub(super) fn lane_share(
    lanes: &[LaneState],
    requesting: usize,
    waiting: usize,
    first_slots: usize,
) -> usize {
    let counted = |(at, lane): (usize, &LaneState)| {
        (at == requesting || lane.accepts()).then_some((lane.running, lane.free_slots))
    };
    let mut candidates: Vec<_> = lanes.iter().enumerate().map(counted).collect();
    let mut share = 0;
    for needed in iter::once(first_slots).chain(iter::repeat(1)).take(waiting) {
        let free = candidates.iter().enumerate().filter_map(|(at, candidate)| {
            let (running, free_slots) = (*candidate)?;
            (free_slots >= needed).then_some((running, at != requesting, at))
        });
        let Some((.., at)) = free.min() else {
            // Others may pass a search for which no lane has slots.
            if needed > 1 { continue } else { break }
        };
        if let Some((running, free_slots)) = &mut candidates[at] {
            (*running, *free_slots) = (*running + 1, *free_slots - 1);
        }
        share += usize::from(at == requesting);
    }
    share
}

/// Whether the lane may have one more step of prefill chunks only in flight. There are at most as many as
/// idle lanes, and they go to the prompt that started first.
pub(super) fn may_send_ahead(lanes: &[LaneState], requesting: usize) -> bool {
    let idle = lanes.iter().filter(|lane| lane.is_idle()).count();
    let ahead: usize = lanes.iter().map(|lane| lane.steps_ahead).sum();
    let oldest =
        |lane: &LaneState| lane.started.iter().find(|prompt| !prompt.is_leaving).map(|prompt| prompt.key);
    let first: Option<SequenceKey> = lanes.iter().filter_map(oldest).min();
    ahead < idle && first.is_some() && oldest(&lanes[requesting]) == first
}
