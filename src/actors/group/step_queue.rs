//! The steps of a group: those in flight on the devices, and those that wait.
//!
//! Invariant: every accepted step is completed once, in the order of the step numbers. No step that depends
//! on state lost in a fault runs or waits: a fault fails all of them and aborts their late inputs, and later
//! steps of the old epoch are refused.

use crate::actors::step::{Step, StepResult};
use mainstem_kernels::{DeviceError, LateInputs, StepBatch, StepLimits, StepOutput};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Steps in flight and waiting steps of a group.
pub(super) struct StepQueue {
    limits: StepLimits,
    /// Maximum number of steps in flight.
    max_running: usize,
    /// Number of the step that was sent last. It increases over the whole life of the group.
    last_number: u64,
    /// Steps in flight, oldest first.
    running: VecDeque<PendingStep>,
    /// Steps that wait for capacity or for the devices.
    waiting: VecDeque<PendingStep>,
    /// When a step last completed.
    last_completed_at: Instant,
    /// Batches that the devices read, and free ones for reuse.
    batch_pool: Vec<Arc<StepBatch>>,
    /// Number of faults so far.
    epoch: u64,
    /// The last fault.
    last_fault: Option<DeviceError>,
}

/// A step that is not complete.
struct PendingStep {
    step: Box<Step>,
    reply: oneshot::Sender<StepResult>,
    /// The signal after the last layer, until it is sent. It is dropped with the step.
    signal: Option<oneshot::Sender<()>>,
    sent_at: Instant,
}

impl StepQueue {
    /// Creates an empty queue for at most `max_running` steps at once.
    pub fn new(limits: StepLimits, max_running: usize) -> StepQueue {
        // A rank may still read the batch of the step that completed last.
        let batches = (0..=max_running).map(|_| Arc::new(StepBatch::with_capacity(&limits))).collect();
        StepQueue {
            limits,
            max_running,
            last_number: 0,
            running: VecDeque::with_capacity(max_running),
            waiting: VecDeque::new(),
            last_completed_at: Instant::now(),
            batch_pool: batches,
            epoch: 0,
            last_fault: None,
        }
    }

    /// Returns the current epoch, which is the number of faults so far.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns the fault that ended the epoch, as an error, if it is over.
    pub fn check_epoch(&self, epoch: u64) -> Result<(), DeviceError> {
        match &self.last_fault {
            Some(fault) if epoch != self.epoch => Err(fault.clone()),
            _ => Ok(()),
        }
    }

    /// Adds a step of the current epoch to the waiting ones.
    pub fn push(&mut self, step: Box<Step>, reply: oneshot::Sender<StepResult>, signal: oneshot::Sender<()>) {
        let signal = Some(signal);
        self.waiting.push_back(PendingStep { step, reply, signal, sent_at: Instant::now() });
    }

    /// Moves the next waiting step to those in flight, and returns its batch; `None` if no step waits or the
    /// maximum is in flight.
    pub fn start_next(&mut self) -> Option<Arc<StepBatch>> {
        if self.running.len() >= self.max_running {
            return None;
        }
        let mut pending = self.waiting.pop_front()?;
        self.last_number += 1;
        pending.step.batch.step = self.last_number;
        pending.sent_at = Instant::now();
        let batch = self.share_batch(&mut pending.step.batch);
        self.running.push_back(pending);
        Some(batch)
    }

    /// Returns the batch as shared data for all devices, and leaves a free one in its place. The ranks of a
    /// stage synchronize in every step, so none of them still reads a batch older than that of the last
    /// completed step. Only a hung thread that holds a batch makes an additional one necessary, which is then
    /// kept for reuse.
    fn share_batch(&mut self, batch: &mut StepBatch) -> Arc<StepBatch> {
        let free = self.batch_pool.iter_mut().position(|batch| Arc::get_mut(batch).is_some());
        let at = free.unwrap_or(self.batch_pool.len());
        if free.is_none() {
            self.batch_pool.push(Arc::new(StepBatch::with_capacity(&self.limits)));
        }
        let free = Arc::get_mut(&mut self.batch_pool[at]).expect("the batch is free, as seen above");
        std::mem::swap(free, batch);
        self.batch_pool[at].clone()
    }

    /// Sends the signal of the oldest step, which must have this number; at most once.
    pub fn signal(&mut self, number: u64) {
        assert_eq!(number, self.oldest_number(), "steps complete in order; anything else is a bug");
        if let Some(signal) = self.running.front_mut().and_then(|oldest| oldest.signal.take()) {
            let _ = signal.send(());
        }
    }

    /// Completes the oldest step, which must have this number. `output` is exchanged for a buffer to reuse.
    pub fn complete(&mut self, number: u64, output: &mut StepOutput, gap: Option<Duration>) {
        let mut pending =
            self.running.pop_front().expect("a completed step was in flight; anything else is a bug");
        let oldest = self.last_number - self.running.len() as u64;
        assert_eq!(number, oldest, "steps complete in order; anything else is a bug");
        std::mem::swap(&mut pending.step.output, output);
        pending.step.gap = gap;
        self.last_completed_at = Instant::now();
        pending.reply(Ok(()));
    }

    /// Fails all steps with `fault`, because the devices' state is lost or they are unavailable, and begins a
    /// new epoch.
    pub fn fail_all(&mut self, fault: &DeviceError) {
        self.epoch += 1;
        self.last_fault = Some(fault.clone());
        for pending in self.running.drain(..).chain(self.waiting.drain(..)) {
            pending.step.late.abort();
            pending.reply(Err(fault.clone()));
        }
    }

    /// Drops all steps without completing them.
    pub fn clear(&mut self) {
        self.running.drain(..).chain(self.waiting.drain(..)).for_each(|pending| pending.step.late.abort());
    }

    /// Returns the late inputs of the step in flight with this number; `None` if it is not in flight.
    pub fn late_inputs(&self, number: u64) -> Option<Arc<LateInputs>> {
        let at = number.checked_sub(self.oldest_number())?;
        self.running.get(at as usize).map(|pending| pending.step.late.clone())
    }

    /// Returns the number of the oldest step in flight.
    pub fn oldest_number(&self) -> u64 {
        self.last_number + 1 - self.running.len() as u64
    }

    /// Whether steps wait.
    pub fn has_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// Returns when the oldest step in flight must complete; `None` if there is none.
    pub fn deadline(&self, timeout: Duration) -> Option<Instant> {
        self.running.front().map(|oldest| oldest.sent_at.max(self.last_completed_at) + timeout)
    }
}

impl PendingStep {
    /// Sends the result; the receiver may be gone.
    fn reply(self, result: Result<(), DeviceError>) {
        let _ = self.reply.send(StepResult { step: self.step, result });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::actors::testing::LIMITS;

    fn push_step(steps: &mut StepQueue) -> oneshot::Receiver<StepResult> {
        let (answer, answered) = oneshot::channel();
        steps.push(Box::new(Step::with_capacity(&LIMITS)), answer, oneshot::channel().0);
        answered
    }

    #[test]
    fn steps_in_flight_are_limited() {
        let mut steps = StepQueue::new(LIMITS, 2);
        let mut answers: Vec<_> = (0..4).map(|_| push_step(&mut steps)).collect();
        let on_devices: Vec<u64> =
            std::iter::from_fn(|| steps.start_next()).map(|batch| batch.step).collect();
        assert_eq!((on_devices, steps.oldest_number()), (vec![1, 2], 1));
        steps.complete(1, &mut StepOutput::default(), None);
        assert!(answers[0].try_recv().is_ok_and(|ran| ran.result.is_ok()));
        assert_eq!(steps.start_next().map(|batch| batch.step), Some(3));
        assert!(steps.start_next().is_none() && steps.has_waiting());
    }

    /// Whether the step is in flight, waits, or is sent later with the old epoch.
    #[test]
    fn a_fault_fails_every_step_of_its_epoch() {
        let mut steps = StepQueue::new(LIMITS, 1);
        let before = steps.epoch();
        let answers = [push_step(&mut steps), push_step(&mut steps)];
        assert!(steps.start_next().is_some() && steps.start_next().is_none());
        assert!(steps.check_epoch(before).is_ok());
        steps.fail_all(&DeviceError::Fault("one".to_owned()));
        for mut answer in answers {
            let fault = answer.try_recv().expect("the step failed").result.unwrap_err();
            assert_eq!(fault.to_string(), "device fault: one");
        }
        assert_eq!(steps.check_epoch(before).unwrap_err().to_string(), "device fault: one");
        assert!(steps.check_epoch(steps.epoch()).is_ok(), "the new epoch is not affected");
        steps.fail_all(&DeviceError::Fault("two".to_owned()));
        assert_eq!(steps.check_epoch(before).unwrap_err().to_string(), "device fault: two");
    }

    /// A device may wait for the inputs of any step in flight.
    #[test]
    fn late_inputs_are_found_by_number_and_aborted_with_their_steps() {
        let mut steps = StepQueue::new(LIMITS, 2);
        let mut pushed = Vec::new();
        let mut push = |steps: &mut StepQueue| {
            let (answer, answered) = oneshot::channel();
            let step = Box::new(Step::with_capacity(&LIMITS));
            pushed.push((step.late.clone(), answered));
            steps.push(step, answer, oneshot::channel().0);
        };
        (0..3).for_each(|_| push(&mut steps));
        while steps.start_next().is_some() {}
        steps.complete(1, &mut StepOutput::default(), None);
        assert!(steps.start_next().is_some());
        push(&mut steps);
        let found = |steps: &StepQueue, number: u64| steps.late_inputs(number);
        assert!([0, 1, 4].iter().all(|number| found(&steps, *number).is_none()), "these are not in flight");
        let in_flight = [2, 3].map(|number| found(&steps, number).expect("it is in flight"));
        steps.fail_all(&DeviceError::Fault("one".to_owned()));
        (0..2).for_each(|_| push(&mut steps));
        assert!(steps.start_next().is_some());
        let last = found(&steps, 4).expect("it is in flight");
        steps.clear();
        let is_aborted = |late: &Arc<LateInputs>| late.wait_token(0).is_err();
        assert_eq!(
            pushed.iter().map(|(late, _)| is_aborted(late)).collect::<Vec<_>>(),
            [false, true, true, true, true, true]
        );
        assert!(Arc::ptr_eq(&in_flight[0], &pushed[1].0) && Arc::ptr_eq(&in_flight[1], &pushed[2].0));
        assert!(Arc::ptr_eq(&last, &pushed[4].0));
    }
}
