//! The threads that compute the host's part of sampling: draws, and masks of grammars.
//!
//! Invariant: a job waits for no device and no client. A job that fails or panics gives up the row that waits
//! for it, and no other.

use super::record::Record;
use super::rows::{PendingRow, RowContext, lock};
use crate::decoding::speculation::AcceptanceRule;
use crate::decoding::strategies::HostSampler;
use mainstem_grammar::GrammarError;
use mainstem_kernels::late::{HostRow, TokenSender};
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// Number of jobs per sequence for which the queue has memory from the start: one for all rows that wait for
/// their draw, one for a mask; the begin and the end of sequences that follow each other in a slot.
const JOBS: usize = 4;

/// Number of buffers of logits per sequence that are kept for later rows: one for each of two steps that are
/// built before the first one's rows are drawn. Rows that verify drafts take more, for as long as they wait.
const KEPT_BUFFERS: usize = 2;

/// A kind of work of the pool, for measurements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostWork {
    /// The draw of a token.
    Draw,
    /// The mask of a grammar, for one token.
    Mask,
}

/// Receives the duration of each piece of work.
pub type Observer = fn(HostWork, Duration);

/// The threads of the host's part of sampling, and their queue. They end when the pool is dropped.
#[derive(Debug)]
pub struct HostPool {
    queue: Arc<Queue>,
    /// Number of logits of a row.
    vocabulary: usize,
}

/// Work for a thread.
pub(super) enum Job {
    /// Draws the tokens of the rows that wait, in their order.
    Draw { record: Arc<Record> },
    /// Computes the first mask of a sequence.
    Begin { record: Arc<Record> },
    /// Advances the grammar by a token that the device drew, and computes the next mask.
    Advance { record: Arc<Record>, token: u32 },
    /// Frees the state of a sequence.
    End { record: Arc<Record> },
}

impl Job {
    fn record(&self) -> &Arc<Record> {
        match self {
            Job::Draw { record }
            | Job::Begin { record }
            | Job::Advance { record, .. }
            | Job::End { record } => record,
        }
    }
}

struct Queue {
    state: Mutex<QueueState>,
    changed: Condvar,
    /// Buffers of logits that are not in use, and their maximum number.
    buffers: Mutex<Vec<Vec<f32>>>,
    buffers_max: usize,
    observe: Observer,
}

struct QueueState {
    jobs: VecDeque<Job>,
    closed: bool,
}

impl HostPool {
    /// Starts `threads` threads for `sequences` sequences at once of a model with `vocabulary` logits. Fails
    /// if the system creates none.
    pub fn new(
        threads: usize,
        sequences: usize,
        vocabulary: usize,
        observe: Observer,
    ) -> std::io::Result<HostPool> {
        let state = QueueState { jobs: VecDeque::with_capacity(JOBS * sequences), closed: false };
        let queue = Queue {
            state: Mutex::new(state),
            changed: Condvar::new(),
            buffers: Mutex::default(),
            buffers_max: KEPT_BUFFERS * sequences,
            observe,
        };
        // If a thread cannot be created, dropping the pool ends the others.
        let pool = HostPool { queue: Arc::new(queue), vocabulary };
        for index in 0..threads.max(1) {
            let queue = pool.queue.clone();
            Builder::new().name(format!("sampler {index}")).spawn(move || queue.serve())?;
        }
        Ok(pool)
    }

    /// Returns the number of logits of a row.
    pub(super) fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    /// Returns the number of buffers that are kept for later rows.
    #[cfg(test)]
    pub(super) fn kept_buffers(&self) -> usize {
        lock(&self.queue.buffers).len()
    }

    /// Queues a job.
    pub(super) fn submit(&self, job: Job) {
        self.queue.submit(job);
    }

    /// Returns a function that copies logits and queues the draw of their row, the next one of its sequence.
    /// Calling it allocates nothing.
    pub(super) fn draw(
        &self,
        record: Arc<Record>,
        context: RowContext,
    ) -> impl FnOnce(HostRow<'_>, TokenSender) + Send + 'static {
        record.rows.announce();
        let queue = self.queue.clone();
        let mut logits = queue.buffer(self.vocabulary);
        let needs_draft_logits = context.rule == AcceptanceRule::Rejection;
        let mut draft_logits = needs_draft_logits.then(|| queue.buffer(self.vocabulary));
        move |given: HostRow<'_>, sender| {
            logits.extend_from_slice(given.logits);
            if let (Some(copy), Some(given)) = (&mut draft_logits, given.draft_logits) {
                copy.extend_from_slice(given);
            }
            let HostRow { input_token, next_token, .. } = given;
            let sender = Some(sender);
            let row = PendingRow { context, input_token, next_token, logits, draft_logits, sender };
            if record.rows.push(row) {
                queue.submit(Job::Draw { record });
            }
        }
    }
}

impl Drop for HostPool {
    fn drop(&mut self) {
        let mut state = lock(&self.queue.state);
        state.closed = true;
        let jobs = std::mem::take(&mut state.jobs);
        drop(state);
        jobs.iter().for_each(|job| job.record().rows.give_up());
        drop(jobs);
        self.queue.changed.notify_all();
    }
}

impl Queue {
    fn submit(&self, job: Job) {
        let mut state = lock(&self.state);
        if !state.closed {
            state.jobs.push_back(job);
            self.changed.notify_one();
            return;
        }
        drop(state);
        job.record().rows.give_up();
    }

    /// Returns an empty buffer for this number of logits.
    fn buffer(&self, vocabulary: usize) -> Vec<f32> {
        let mut buffer = lock(&self.buffers).pop().unwrap_or_default();
        buffer.clear();
        buffer.reserve(vocabulary);
        buffer
    }

    /// Runs jobs until the pool is dropped.
    fn serve(&self) {
        let mut sampler = HostSampler::new();
        while let Some(job) = self.next() {
            let record = job.record().clone();
            let done = catch_unwind(AssertUnwindSafe(|| self.run(job, &mut sampler)));
            if done.is_err() {
                record.fail(GrammarError::Stuck("an internal error; this is a bug".to_owned()));
                record.rows.give_up();
                // Its buffers may be in any state.
                sampler = HostSampler::new();
            }
        }
    }

    fn next(&self) -> Option<Job> {
        let mut state = lock(&self.state);
        loop {
            if state.closed {
                return None;
            }
            if let Some(job) = state.jobs.pop_front() {
                return Some(job);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn run(&self, job: Job, sampler: &mut HostSampler) {
        match job {
            Job::Draw { record } => {
                while let Some(row) = record.rows.pop() {
                    self.draw(&record, row, sampler);
                }
            }
            Job::Begin { record } if record.plan.is_some() => {
                self.timed(HostWork::Mask, || record.prepare_mask());
            }
            Job::Begin { record } => self.timed(HostWork::Mask, || record.advance(None)),
            Job::End { record } => drop(record),
            Job::Advance { record, token } => self.timed(HostWork::Mask, || record.advance(Some(token))),
        }
    }

    /// Draws the token of a row, and computes the mask of the next one. A row behind a draft that was not
    /// accepted gets any token, because the step waits for one.
    fn draw(&self, record: &Record, mut row: PendingRow, sampler: &mut HostSampler) {
        if record.begin_row(&row) {
            self.timed(HostWork::Draw, || record.draw(sampler, &mut row));
            if record.is_constrained() {
                self.timed(HostWork::Mask, || record.prepare_mask());
            }
        } else if let Some(sender) = row.sender.take() {
            sender.send(0);
        }
        self.keep(row.logits);
        row.draft_logits.into_iter().for_each(|buffer| self.keep(buffer));
    }

    /// Keeps a buffer for another row, unless there are enough.
    fn keep(&self, buffer: Vec<f32>) {
        let mut buffers = lock(&self.buffers);
        if buffers.len() < self.buffers_max {
            buffers.push(buffer);
        }
    }

    fn timed(&self, work: HostWork, run: impl FnOnce()) {
        let begin = Instant::now();
        run();
        (self.observe)(work, begin.elapsed());
    }
}

impl std::fmt::Debug for Queue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Queue").finish_non_exhaustive()
    }
}
