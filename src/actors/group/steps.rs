//! The steps of a group: which are on the devices, and which wait for a place there.
//!
//! Invariant: every step that is taken in is answered once; steps are answered in the order of their numbers. No step is on
//! the devices, or waits, that goes on from what a fault took: a fault ends them all, and who sends on without having heard
//! of it is refused.

use crate::actors::device::{Ran, Step};
use mainstem_kernels::{DeviceError, StepBatch, StepLimits, StepOutput};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// The book of them.
pub(super) struct Steps {
    limits: StepLimits,
    /// Steps that are on the devices at once, at most.
    most: usize,
    /// Number of the step sent to the devices last. It goes on for as long as the group lives.
    number: u64,
    /// On the devices, the oldest first.
    running: VecDeque<Pending>,
    /// For a place on the devices, or for devices that are away.
    waiting: VecDeque<Pending>,
    /// When a step was last answered.
    answered: Instant,
    /// Batches that the devices read, and those that nobody reads any more, to be used again.
    batches: Vec<Arc<StepBatch>>,
    /// How often what the devices remember was lost, and by what the last time.
    epoch: u64,
    fault: Option<DeviceError>,
}

struct Pending {
    step: Box<Step>,
    answer: oneshot::Sender<Ran>,
    sent: Instant,
}

impl Steps {
    pub fn new(limits: StepLimits, most: usize) -> Steps {
        // A member may still read the one that was answered last.
        let batches = (0..=most).map(|_| Arc::new(StepBatch::with_capacity(&limits))).collect();
        Steps {
            limits,
            most,
            number: 0,
            running: VecDeque::with_capacity(most),
            waiting: VecDeque::new(),
            answered: Instant::now(),
            batches,
            epoch: 0,
            fault: None,
        }
    }

    /// How often what the devices remember was lost.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Fails when that epoch is over, and says what ended it.
    pub fn lasts(&self, epoch: u64) -> Result<(), DeviceError> {
        match &self.fault {
            Some(fault) if epoch != self.epoch => Err(fault.clone()),
            _ => Ok(()),
        }
    }

    /// Takes in a step of the epoch at hand; it waits.
    pub fn take_in(&mut self, step: Box<Step>, answer: oneshot::Sender<Ran>) {
        self.waiting.push_back(Pending { step, answer, sent: Instant::now() });
    }

    /// The next step that waits, for the devices from here on; `None` when they have as many as they may.
    pub fn start_next(&mut self) -> Option<Arc<StepBatch>> {
        if self.running.len() >= self.most {
            return None;
        }
        let mut pending = self.waiting.pop_front()?;
        self.number += 1;
        pending.step.batch.step = self.number;
        pending.sent = Instant::now();
        let batch = self.shared(&mut pending.step.batch);
        self.running.push_back(pending);
        Some(batch)
    }

    /// The batch for all devices to read; in its place is left one that was used before. The members of a stage meet in
    /// every step, so that none still reads an older one than the last that was answered: only a thread that hangs with one
    /// makes another necessary. That one stays, and is used when the thread has let go of the first.
    fn shared(&mut self, batch: &mut StepBatch) -> Arc<StepBatch> {
        let free = self.batches.iter_mut().position(|batch| Arc::get_mut(batch).is_some());
        let at = free.unwrap_or(self.batches.len());
        if free.is_none() {
            self.batches.push(Arc::new(StepBatch::with_capacity(&self.limits)));
        }
        let free = Arc::get_mut(&mut self.batches[at]).expect("nobody else has it, else this is a bug");
        std::mem::swap(free, batch);
        self.batches[at].clone()
    }

    /// That step is through. Its results are exchanged for an output to use again.
    pub fn answer(&mut self, number: u64, output: &mut StepOutput) {
        let mut pending = self.running.pop_front().expect("who answers was asked, else this is a bug");
        let oldest = self.number - self.running.len() as u64;
        assert_eq!(number, oldest, "steps are answered in order, else this is a bug");
        std::mem::swap(&mut pending.step.output, output);
        self.answered = Instant::now();
        pending.answer(Ok(()));
    }

    /// By that fault everything on the devices is lost, or there are none to be had: whoever waits for a step is told, and
    /// who goes on from what there was will be.
    pub fn lose(&mut self, fault: &DeviceError) {
        self.epoch += 1;
        self.fault = Some(fault.clone());
        for pending in self.running.drain(..).chain(self.waiting.drain(..)) {
            pending.answer(Err(fault.clone()));
        }
    }

    /// Answers nobody any more.
    pub fn forget(&mut self) {
        self.running.clear();
        self.waiting.clear();
    }

    /// Number of the oldest step on the devices.
    pub fn oldest(&self) -> u64 {
        self.number + 1 - self.running.len() as u64
    }

    /// Whether steps wait.
    pub fn wait(&self) -> bool {
        !self.waiting.is_empty()
    }

    /// When the devices should have answered, if each answer may take so long.
    pub fn due(&self, timeout: Duration) -> Option<Instant> {
        self.running.front().map(|oldest| oldest.sent.max(self.answered) + timeout)
    }
}

impl Pending {
    /// Whoever asked may be gone.
    fn answer(self, result: Result<(), DeviceError>) {
        let _ = self.answer.send(Ran { step: self.step, result });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::actors::testing::LIMITS;

    fn sent(steps: &mut Steps) -> oneshot::Receiver<Ran> {
        let (answer, answered) = oneshot::channel();
        steps.take_in(Box::new(Step::with_capacity(&LIMITS)), answer);
        answered
    }

    #[test]
    fn as_many_steps_as_may_be_are_on_the_devices() {
        let mut steps = Steps::new(LIMITS, 2);
        let mut answers: Vec<_> = (0..4).map(|_| sent(&mut steps)).collect();
        let on_devices: Vec<u64> =
            std::iter::from_fn(|| steps.start_next()).map(|batch| batch.step).collect();
        assert_eq!((on_devices, steps.oldest()), (vec![1, 2], 1));
        steps.answer(1, &mut StepOutput::default());
        assert!(answers[0].try_recv().is_ok_and(|ran| ran.result.is_ok()));
        assert_eq!(steps.start_next().map(|batch| batch.step), Some(3));
        assert!(steps.start_next().is_none() && steps.wait());
    }

    /// Whether it is on the devices, waits for a place there, or is sent later by who has not heard.
    #[test]
    fn a_fault_ends_every_step_that_goes_on_from_what_it_took() {
        let mut steps = Steps::new(LIMITS, 1);
        let before = steps.epoch();
        let answers = [sent(&mut steps), sent(&mut steps)];
        assert!(steps.start_next().is_some() && steps.start_next().is_none());
        assert!(steps.lasts(before).is_ok());
        steps.lose(&DeviceError::Fault("one".to_owned()));
        for mut answer in answers {
            let told = answer.try_recv().expect("it is told").result.unwrap_err();
            assert_eq!(told.to_string(), "device fault: one");
        }
        assert_eq!(steps.lasts(before).unwrap_err().to_string(), "device fault: one");
        assert!(steps.lasts(steps.epoch()).is_ok(), "who begins now loses nothing");
        steps.lose(&DeviceError::Fault("two".to_owned()));
        assert_eq!(steps.lasts(before).unwrap_err().to_string(), "device fault: two");
    }
}
