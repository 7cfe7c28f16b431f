//! The rows of a sequence that wait for their draw.
//!
//! Invariant: they are drawn one at a time, in the order in which the device hands them over.

use crate::decoding::speculation::AcceptanceRule;
use mainstem_kernels::late::TokenSender;
use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Facts of a row that its draw depends on, and that are known when the step is built.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowContext {
    pub(super) seed: u64,
    pub(super) position: u32,
    /// Number of most likely tokens to report, if any log-probability is requested.
    pub(super) logprobs: Option<u8>,
    /// The rule by which the row accepts the draft of the next row.
    pub(super) rule: AcceptanceRule,
    /// Whether the row computes a draft, behind the row that verifies it.
    pub(super) computes_draft: bool,
}

/// A row whose logits have come.
pub(super) struct PendingRow {
    pub(super) context: RowContext,
    /// The token that the row computed.
    pub(super) input_token: u32,
    /// The draft that it verifies.
    pub(super) next_token: Option<u32>,
    /// A copy of the row's logits.
    pub(super) logits: Vec<f32>,
    /// Memory for a copy of the draft's logits, if the rule needs them; empty if there are none.
    pub(super) draft_logits: Option<Vec<f32>>,
    /// Sends the token; `None` once the draw has begun.
    pub(super) sender: Option<TokenSender>,
}

/// The queue of one sequence.
#[derive(Default)]
pub(super) struct RowQueue(Mutex<Rows>);

#[derive(Default)]
struct Rows {
    waiting: VecDeque<PendingRow>,
    /// Number of rows that were announced and have not come.
    announced: usize,
    /// Whether a job draws the waiting rows.
    has_job: bool,
}

impl RowQueue {
    /// Reserves memory for one more row, so that [`Self::push`] allocates nothing.
    pub(super) fn announce(&self) {
        let rows = &mut *lock(&self.0);
        rows.announced += 1;
        rows.waiting.reserve(rows.announced);
    }

    /// Appends a row. Returns whether a job must be submitted that draws the waiting rows.
    pub(super) fn push(&self, row: PendingRow) -> bool {
        let rows = &mut *lock(&self.0);
        rows.announced = rows.announced.saturating_sub(1);
        rows.waiting.push_back(row);
        !std::mem::replace(&mut rows.has_job, true)
    }

    /// Takes the first row. If there is none, the job ends.
    pub(super) fn pop(&self) -> Option<PendingRow> {
        let rows = &mut *lock(&self.0);
        let row = rows.waiting.pop_front();
        rows.has_job = row.is_some();
        row
    }

    /// Gives up the rows whose job is gone: their senders are dropped.
    pub(super) fn give_up(&self) {
        let rows = {
            let rows = &mut *lock(&self.0);
            rows.has_job = false;
            std::mem::take(&mut rows.waiting)
        };
        drop(rows);
    }
}

/// Locks a mutex. Its data is valid after a panic, too.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
