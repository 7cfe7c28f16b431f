//! The state of a sequence, and the result of a row that changes it.

use super::history::History;
use super::plan::SamplingPlan;
use super::unit::Registers;

/// The result of one row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    pub token: u32,
    /// Log-probability of the token; NaN if it was not requested, or if the row has no finite largest logit.
    pub logprob: f32,
    /// The chooser's registers after this token, for [`SequenceState::accept`].
    pub(super) registers: Registers,
}

#[cfg(test)]
impl Draw {
    /// Returns the chooser's registers after this token.
    pub fn registers(&self) -> Registers {
        self.registers
    }
}

/// The state of one sequence: its tokens, and the registers of the plan's chooser.
#[derive(Clone, Debug)]
pub struct SequenceState {
    history: History,
    registers: Registers,
}

/// A state to which a sequence can be rolled back: a few bytes, because tokens are only appended.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Checkpoint {
    len: usize,
    registers: Registers,
}

impl SequenceState {
    /// Creates the state before the first generated token, with capacity for `max_tokens` of them.
    pub fn new(plan: &SamplingPlan, prompt: &[u32], max_tokens: usize) -> SequenceState {
        SequenceState { history: History::new(prompt, max_tokens), registers: plan.initial_registers() }
    }

    /// Appends the token of a draw, and keeps what the chooser learned from it.
    pub fn accept(&mut self, draw: &Draw) {
        self.registers = draw.registers;
        self.history.push(draw.token);
    }

    /// Appends a token that was not drawn, such as one that a grammar forces. The registers stay.
    pub fn accept_forced(&mut self, token: u32) {
        self.history.push(token);
    }

    /// Returns the present state, to roll back to.
    pub fn checkpoint(&self) -> Checkpoint {
        Checkpoint { len: self.history.tokens().len(), registers: self.registers }
    }

    /// Returns to a checkpoint of this sequence: forgets the tokens accepted since.
    pub fn roll_back(&mut self, checkpoint: &Checkpoint) {
        self.history.truncate(checkpoint.len);
        self.registers = checkpoint.registers;
    }

    /// Returns the tokens so far.
    pub fn history(&self) -> &History {
        &self.history
    }

    /// Returns the chooser's registers.
    pub fn registers(&self) -> Registers {
        self.registers
    }
}
