//! What strategies remember of a sequence.

use super::plan::SamplingPlan;
use super::sampler::Draw;
use super::unit::Registers;

/// The tokens of a sequence so far: its prompt, then its generated tokens.
#[derive(Clone, Debug, Default)]
pub struct History {
    tokens: Vec<u32>,
    prompt_len: usize,
}

impl History {
    /// Creates a history with a prompt, and capacity for `max_tokens` generated tokens.
    pub fn new(prompt: &[u32], max_tokens: usize) -> History {
        let mut tokens = Vec::with_capacity(prompt.len() + max_tokens);
        tokens.extend_from_slice(prompt);
        History { tokens, prompt_len: prompt.len() }
    }

    /// Returns all tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Returns the generated tokens.
    pub fn generated(&self) -> &[u32] {
        &self.tokens[self.prompt_len..]
    }

    /// Returns the last `n` tokens, or all of them if `n` is negative; and how many of them are of the
    /// prompt.
    pub fn last(&self, n: i64) -> (&[u32], usize) {
        let len = usize::try_from(n).unwrap_or(usize::MAX).min(self.tokens.len());
        let start = self.tokens.len() - len;
        (&self.tokens[start..], self.prompt_len.saturating_sub(start))
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
        self.history.tokens.push(draw.token);
    }

    /// Appends a token that was not drawn, such as one that a grammar forces. The registers stay.
    pub fn accept_forced(&mut self, token: u32) {
        self.history.tokens.push(token);
    }

    /// Returns the present state, to roll back to.
    pub fn checkpoint(&self) -> Checkpoint {
        Checkpoint { len: self.history.tokens.len(), registers: self.registers }
    }

    /// Returns to a checkpoint of this sequence: forgets the tokens accepted since.
    pub fn roll_back(&mut self, checkpoint: &Checkpoint) {
        self.history.tokens.truncate(checkpoint.len);
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
