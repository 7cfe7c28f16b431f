//! The state of the lanes as prefill knows it, and the distribution of waiting prompts among them.
//!
//! Invariant: prefill knows of a lane what its last request said, updated by what it was given since.

use super::{Chunk, NextChunk, Prompt};
use crate::actors::sequence::Key;
use std::collections::VecDeque;
use tokio::sync::oneshot;

/// The state of a lane.
#[derive(Default)]
pub(super) struct Lane {
    /// Prompts that started in this lane and are not complete, oldest first.
    pub(super) begun: VecDeque<Prompt>,
    /// Running sequences. 0 until the lane's first request.
    /// Free slots. A lane that has not made a request yet has none, and gets no sequences.
    pub(super) live: usize,
    pub(super) places: usize,
    /// Token budget for prefill in its last step.
    pub(super) budget: usize,
    /// Steps of prefill chunks only that it has in flight.
    pub(super) ahead: usize,
    /// Its request and reply channel, while it waits for work.
    pub(super) held: Option<(NextChunk, oneshot::Sender<Vec<Chunk>>)>,
}

impl Lane {
    /// Stores a request that waits for its reply.
    pub(super) fn hold(&mut self, request: NextChunk, reply: oneshot::Sender<Vec<Chunk>>) {
        (self.live, self.places) = (request.live, request.places);
        (self.budget, self.ahead) = (request.budget, request.ahead);
        self.held = Some((request, reply));
    }

    /// Whether the lane has no sequences and waits for work.
    pub(super) fn rests(&self) -> bool {
        self.live == 0 && self.held.is_some()
    }

    /// Whether a prompt left to this lane would start at its next request: its own prompts must leave budget
    /// for that.
    fn takes(&self) -> bool {
        let backlog: usize = self.begun.iter().map(Prompt::left).sum();
        self.places > 0 && (self.rests() || backlog < self.budget)
    }

    /// Counts one more sequence in the lane.
    pub(super) fn begin(&mut self) {
        self.live += 1;
        self.places -= 1;
    }

    /// Resets a lane that restarts. It gets no sequences before its next request. Prompts of `except` are
    /// kept.
    pub(super) fn forget(&mut self, except: &[Key]) {
        self.begun.retain(|prompt| except.contains(&prompt.key));
        (self.live, self.places, self.ahead) = (0, 0, 0);
    }

    /// Returns chunks of the prompts that started here, oldest first, and deducts them from the budget.
    pub(super) fn go_on(&mut self, budget: &mut usize) -> Vec<Chunk> {
        let mut chunks = Vec::new();
        while *budget > 0
            && let Some(prompt) = self.begun.front_mut()
        {
            chunks.push(prompt.advance(budget));
            if prompt.left() == 0 {
                self.begun.pop_front();
            }
        }
        chunks
    }
}

/// Returns how many of the `waiting` prompts, from the head of the queue, the requesting lane takes, if each
/// prompt goes to the lane with the fewest sequences; the other lanes make their requests soon. A lane that
/// could not start the prompt in its next step is not considered.
pub(super) fn share(lanes: &[Lane], requesting: usize, waiting: usize) -> usize {
    let counted =
        |(at, lane): (usize, &Lane)| (at == requesting || lane.takes()).then_some((lane.live, lane.places));
    let mut candidates: Vec<_> = lanes.iter().enumerate().map(counted).collect();
    let mut share = 0;
    for _ in 0..waiting {
        let free = candidates.iter().enumerate().filter_map(|(at, candidate)| {
            let (running, free_slots) = (*candidate)?;
            (free_slots > 0).then_some((running, at != requesting, at))
        });
        let Some((.., at)) = free.min() else { break };
        if let Some((running, free_slots)) = &mut candidates[at] {
            (*running, *free_slots) = (*running + 1, *free_slots - 1);
        }
        share += usize::from(at == requesting);
    }
    share
}

/// Whether the lane may have one more step of prefill chunks only in flight. There are at most as many as
/// idle lanes, and they go to the prompt that started first.
pub(super) fn may_go_ahead(lanes: &[Lane], requesting: usize) -> bool {
    let idle = lanes.iter().filter(|lane| lane.rests()).count();
    let ahead: usize = lanes.iter().map(|lane| lane.ahead).sum();
    let oldest = |lane: &Lane| lane.begun.front().map(|prompt| prompt.key);
    let first: Option<Key> = lanes.iter().filter_map(oldest).min();
    ahead < idle && first.is_some() && oldest(&lanes[requesting]) == first
}
