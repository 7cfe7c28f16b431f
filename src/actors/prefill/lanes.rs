//! The lanes as prefill knows them, and who of those that wait begins in which.
//!
//! Invariant: what is known of a lane is what it said when it asked last, and what it was given since.

use super::{Chunk, NextChunk, Prompt};
use crate::actors::sequence::Key;
use std::collections::VecDeque;
use tokio::sync::oneshot;

/// A lane.
#[derive(Default)]
pub(super) struct Lane {
    /// Prompts that began in it and are not through, oldest first.
    pub(super) begun: VecDeque<Prompt>,
    /// Sequences it has, and how many more it has slots for. A lane that has not asked yet takes nobody.
    pub(super) live: usize,
    pub(super) places: usize,
    /// Tokens of prompts that its last step had room for.
    pub(super) budget: usize,
    /// Steps of prompt chunks alone that it has in flight.
    pub(super) ahead: usize,
    /// Its question, while it waits for work.
    pub(super) held: Option<(NextChunk, oneshot::Sender<Vec<Chunk>>)>,
}

impl Lane {
    /// It asks, and waits for the answer.
    pub(super) fn hold(&mut self, question: NextChunk, reply: oneshot::Sender<Vec<Chunk>>) {
        (self.live, self.places) = (question.live, question.places);
        (self.budget, self.ahead) = (question.budget, question.ahead);
        self.held = Some((question, reply));
    }

    /// Whether it has nothing to do, and waits for work.
    pub(super) fn rests(&self) -> bool {
        self.live == 0 && self.held.is_some()
    }

    /// Whether somebody left to it begins when it asks next: its own prompts must leave room for that.
    fn takes(&self) -> bool {
        let backlog: usize = self.begun.iter().map(Prompt::left).sum();
        self.places > 0 && (self.rests() || backlog < self.budget)
    }

    /// It takes one more in.
    pub(super) fn begin(&mut self) {
        self.live += 1;
        self.places -= 1;
    }

    /// It starts afresh, and asks before it takes anybody.
    pub(super) fn forget(&mut self, but: &[Key]) {
        self.begun.retain(|prompt| but.contains(&prompt.key));
        (self.live, self.places, self.ahead) = (0, 0, 0);
    }

    /// Chunks of the prompts that began here, oldest first, within what is left of the budget.
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

/// How many of `waiting` prompts are for the lane that asks, if each goes where there are the fewest sequences: those at
/// the head of the line, for the others ask soon. One that could not begin there in its next step is not waited for.
pub(super) fn share(lanes: &[Lane], asking: usize, waiting: usize) -> usize {
    let counted =
        |(at, lane): (usize, &Lane)| (at == asking || lane.takes()).then_some((lane.live, lane.places));
    let mut takers: Vec<_> = lanes.iter().enumerate().map(counted).collect();
    let mut share = 0;
    for _ in 0..waiting {
        let free = takers.iter().enumerate().filter_map(|(at, taker)| {
            let (live, places) = (*taker)?;
            (places > 0).then_some((live, at != asking, at))
        });
        let Some((.., at)) = free.min() else { break };
        if let Some((live, places)) = &mut takers[at] {
            (*live, *places) = (*live + 1, *places - 1);
        }
        share += usize::from(at == asking);
    }
    share
}

/// Whether the lane may have one more step of prompt chunks alone in flight: there are as many as lanes rest, and they go
/// to the prompt that began first.
pub(super) fn may_go_ahead(lanes: &[Lane], asking: usize) -> bool {
    let resting = lanes.iter().filter(|lane| lane.rests()).count();
    let ahead: usize = lanes.iter().map(|lane| lane.ahead).sum();
    let oldest = |lane: &Lane| lane.begun.front().map(|prompt| prompt.key);
    let first: Option<Key> = lanes.iter().filter_map(oldest).min();
    ahead < resting && first.is_some() && oldest(&lanes[asking]) == first
}
