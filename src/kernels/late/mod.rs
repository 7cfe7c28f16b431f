//! Late inputs of a step: what sampling needs from the host, and a step is launched without.
//!
//! The host registers the rows when it builds the step, and supplies masks and tokens while the device
//! computes. Only the rank that samples waits, right before it draws the rows concerned.
//! A sender that is kept without being used holds up the step until its timeout fails the group, so whoever
//! supplies an input must drop the sender at a limit of its own; and an input must not depend on a draw of
//! the same step, which may come later.
//! Invariant: every wait ends, with the input, with the drop of its sender, or with an abort. Nothing is
//! allocated on the thread that waits.

#[cfg(test)]
mod tests;

use crate::collective::Aborted;
use std::fmt;
use std::mem::replace;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The late inputs of one step, shared by the host that supplies them and the device that waits for them.
/// Rows are numbered as in [`crate::batch::StepBatch::sampling`].
#[derive(Default)]
pub struct LateInputs {
    state: Mutex<State>,
    changed: Condvar,
}

/// Supplies the mask of one row. Dropping it without a mask fails the row, and no other.
#[derive(Debug)]
pub struct MaskSender(Sender);

/// Supplies the token of one row that the host draws. Dropping it without a token fails the row, and no
/// other.
#[derive(Debug)]
pub struct TokenSender(Sender);

/// A row whose token the host draws.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct HostRow<'a> {
    /// The raw logits (vocabulary).
    pub logits: &'a [f32],
    /// The token that the row computed. In a span that verifies drafts, it is a draft, except in the first
    /// row.
    pub input_token: u32,
    /// The token of the next row of the same span; `None` in its last row. In a span that verifies drafts,
    /// it is the draft that the sampled token is compared with.
    pub next_token: Option<u32>,
    /// The raw logits (vocabulary) of the draft model from which that draft was sampled, if the batch keeps
    /// them ([`crate::batch::StepBatch::draft_logits`]) and the draft was made in the same step. Tokens
    /// that the draft model does not have are at negative infinity.
    pub draft_logits: Option<&'a [f32]>,
}

impl<'a> HostRow<'a> {
    /// Creates a row about which only the logits are known.
    pub fn of_logits(logits: &'a [f32]) -> HostRow<'a> {
        HostRow { logits, input_token: 0, next_token: None, draft_logits: None }
    }
}

/// A function that draws the token of a row.
type Draw = Box<dyn FnOnce(HostRow<'_>, TokenSender) + Send>;

#[derive(Default)]
struct State {
    aborted: bool,
    /// The registered rows, ascending.
    rows: Vec<(usize, RowInput)>,
}

/// The late input of a row.
enum RowInput {
    Pending,
    Mask(Arc<[u32]>),
    /// A draw that waits for the logits.
    Draw(Draw),
    Token(u32),
    /// The sender was dropped.
    Dropped,
}

/// The sender of a row's input.
#[derive(Debug)]
struct Sender {
    inputs: Arc<LateInputs>,
    row: usize,
}

/// The interface of the host.
impl LateInputs {
    /// Registers a row that waits for its mask. A mask has a bit for each token, least significant bit first,
    /// which is set if the token is allowed; bits beyond the vocabulary are ignored. Rows must be registered
    /// before the step is launched.
    pub fn mask_sender(self: &Arc<Self>, row: usize) -> MaskSender {
        self.register(row, RowInput::Pending);
        MaskSender(Sender { inputs: self.clone(), row })
    }

    /// Registers a row that the host draws. `draw` gets the row with its raw logits, on the thread of the
    /// device, which must not wait: it either draws at once, or copies the logits and lets another thread
    /// draw. Rows come in ascending order. Biases, masks and the other sampling parameters are its own
    /// business. Rows must be registered before the step is launched.
    pub fn draw_with(
        self: &Arc<Self>,
        row: usize,
        draw: impl FnOnce(HostRow<'_>, TokenSender) + Send + 'static,
    ) {
        self.register(row, RowInput::Draw(Box::new(draw)));
    }

    /// Returns whether no row was registered, and nothing aborted.
    pub fn is_unused(&self) -> bool {
        let state = self.lock();
        state.rows.is_empty() && !state.aborted
    }

    /// Ends all waits, present and future, with an error.
    pub fn abort(&self) {
        self.lock().aborted = true;
        self.changed.notify_all();
    }

    fn register(&self, row: usize, input: RowInput) {
        let rows = &mut self.lock().rows;
        match rows.binary_search_by_key(&row, |entry| entry.0) {
            Ok(_) => panic!("row {row} has a late input already; this is a bug"),
            Err(at) => rows.insert(at, (row, input)),
        }
    }
}

/// The interface of the device.
impl LateInputs {
    /// Waits for the mask of a row and copies it to `mask`. Returns false if there is none: the row was not
    /// registered for one, its sender was dropped, or the mask has another length.
    pub fn wait_mask(&self, row: usize, mask: &mut [u32]) -> Result<bool, Aborted> {
        let copied = self.wait(row, |input| match input {
            RowInput::Mask(words) if words.len() == mask.len() => {
                mask.copy_from_slice(words);
                Some(())
            }
            _ => None,
        });
        copied.map(|copied| copied.is_some())
    }

    /// Hands row number `row` to the host, which draws its token. A panic of the host's function fails the
    /// row only.
    pub fn begin_draw(self: &Arc<Self>, row: usize, given: HostRow<'_>) {
        let taken = match self.lock().row(row) {
            Some(input @ RowInput::Draw(_)) => replace(input, RowInput::Pending),
            _ => return,
        };
        if let RowInput::Draw(draw) = taken {
            let sender = TokenSender(Sender { inputs: self.clone(), row });
            let _ = catch_unwind(AssertUnwindSafe(|| draw(given, sender)));
        }
    }

    /// Waits for the token of a row whose draw has begun. Returns `None` if there is none: the row was not
    /// registered, or its sender was dropped.
    pub fn wait_token(&self, row: usize) -> Result<Option<u32>, Aborted> {
        self.wait(row, |input| match input {
            RowInput::Token(token) => Some(*token),
            _ => None,
        })
    }

    /// Waits until the input of a row is no longer pending, and returns what `take` makes of it.
    fn wait<T>(&self, row: usize, take: impl FnOnce(&RowInput) -> Option<T>) -> Result<Option<T>, Aborted> {
        let mut state = self.lock();
        loop {
            if state.aborted {
                return Err(Aborted);
            }
            match state.row(row) {
                Some(RowInput::Pending) => {}
                Some(input) => return Ok(take(input)),
                None => return Ok(None),
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Returns the input of a row, if it is registered.
    fn row(&mut self, row: usize) -> Option<&mut RowInput> {
        let at = self.rows.binary_search_by_key(&row, |entry| entry.0).ok()?;
        Some(&mut self.rows[at].1)
    }
}

impl MaskSender {
    /// Supplies the mask, `vocabulary.div_ceil(32)` words. A mask of another length fails the row.
    pub fn send(self, mask: Arc<[u32]>) {
        self.0.supply(RowInput::Mask(mask));
    }
}

impl TokenSender {
    /// Supplies the token. A token beyond the vocabulary fails the row.
    pub fn send(self, token: u32) {
        self.0.supply(RowInput::Token(token));
    }
}

impl Sender {
    /// Supplies the input of the row, if it is pending.
    fn supply(&self, input: RowInput) {
        if let Some(pending @ RowInput::Pending) = self.inputs.lock().row(self.row) {
            *pending = input;
        }
        self.inputs.changed.notify_all();
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.supply(RowInput::Dropped);
    }
}

impl fmt::Debug for LateInputs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LateInputs").finish_non_exhaustive()
    }
}
