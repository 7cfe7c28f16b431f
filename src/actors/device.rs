//! A device: one OS thread that runs the steps it is sent, in order.
//!
//! Owns the executor (weights, KV cache, step buffers), and knows nothing of sequences and clients.
//! Invariant: every failure inside a step is reported to the group; between receiving a step and completing
//! it, nothing is allocated. A device thread that was abandoned while it ran something finds its mailbox
//! closed when it resumes, drops its executor, and exits.

use super::group::hub::{Hub, Place};
use super::group::mailbox::{Duty, Mailbox, Order, Parcel, Seat};
use crate::model::executor::{Executor, ExecutorReport};
use anyhow::{Context as _, Result, anyhow};
use mainstem_kernels::{Aborted, Collective, DeviceError, Flow, StepBatch, StepLimits, StepOutput};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};

/// A batch and the buffers for its output. Both are reused from step to step.
#[derive(Debug, Default)]
pub struct Step {
    pub batch: StepBatch,
    pub output: StepOutput,
}

impl Step {
    /// Allocates buffers for any step within `limits`.
    pub fn with_capacity(limits: &StepLimits) -> Step {
        Step { batch: StepBatch::with_capacity(limits), output: StepOutput::with_capacity(limits) }
    }
}

/// The result of a step. If it failed, the output is undefined. The batch may be an earlier step's; it is
/// returned for reuse.
pub struct Ran {
    pub step: Box<Step>,
    pub result: Result<(), DeviceError>,
}

/// Builds an executor from scratch, for the tensor-parallel rank that the collective specifies. Called on the
/// device's thread, once per (re)build.
pub type Factory = Box<dyn FnMut(Box<dyn Collective>) -> Result<Box<dyn Executor>> + Send>;

/// A factory shared by the successive threads of a device.
pub(super) type SharedFactory = Arc<Mutex<Factory>>;

/// The state of a device's thread.
pub(super) struct Device {
    place: Place,
    hub: Arc<Hub>,
    mailbox: Arc<Mailbox>,
    factory: SharedFactory,
    held: Option<Held>,
    /// Output buffer of the steps. Ranks that do not return results write it too, and nobody reads it.
    output: StepOutput,
}

/// The executor and its assignment, from one build to the next.
struct Held {
    seat: Seat,
    executor: Box<dyn Executor>,
    /// Number that the next step must have; `None` right after a build.
    next_step: Option<u64>,
}

/// Why a step failed.
enum Failure {
    Fault(DeviceError),
    Panic(Box<dyn Any + Send>),
}

/// Drop guard that reports, however the thread ends, that it is exiting.
struct Ending(Arc<Hub>, Place);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.ends(self.1);
    }
}

/// Drop guard that reports that the thread has dropped its executor and is about to exit.
struct Leaving(Arc<Hub>, Place);

impl Drop for Leaving {
    fn drop(&mut self) {
        self.0.left(self.1);
    }
}

impl Device {
    /// Starts the thread of a device; the executor is built on a later command.
    pub(super) fn spawn(
        id: Place,
        group: Arc<Hub>,
        mailbox: Arc<Mailbox>,
        factory: SharedFactory,
    ) -> std::io::Result<JoinHandle<()>> {
        // Thread names are limited to 15 bytes.
        let name = format!("dev {}", group.name(id));
        let output = StepOutput::with_capacity(group.limits());
        Builder::new().name(name).spawn(move || {
            // Drop order: the exit must be reported before the executor is dropped, because the other ranks
            // of the stage notice that and must not report it first; and until the executor is dropped, the
            // thread may still hang.
            let _leaving = Leaving(group.clone(), id);
            let mut device = Device { place: id, hub: group.clone(), mailbox, factory, held: None, output };
            let _ending = Ending(group, id);
            device.serve();
        })
    }

    /// Runs commands until the mailbox is closed.
    fn serve(&mut self) {
        while let Some(command) = self.mailbox.take() {
            match command {
                Order::Clear => {
                    self.clear();
                    self.hub.cleared(self.place);
                }
                Order::Build(assignment, collective) => {
                    let build = assignment.build;
                    let result = self.build(assignment, collective);
                    self.hub.built(self.place, build, result);
                }
                Order::Run(message) => self.run(message),
            }
        }
        self.clear();
    }

    /// Drops the executor.
    fn clear(&mut self) {
        let old = self.held.take();
        let _ = catch_unwind(AssertUnwindSafe(|| drop(old)));
    }

    /// Builds the executor.
    fn build(&mut self, assignment: Seat, collective: Box<dyn Collective>) -> Result<ExecutorReport> {
        // The old executor is dropped first: two do not fit into memory.
        self.clear();
        let built = catch_unwind(AssertUnwindSafe(|| {
            let mut factory = self.factory.lock().unwrap_or_else(PoisonError::into_inner);
            factory(collective)
        }));
        let executor = built
            .unwrap_or_else(|panic| match panic.is::<Aborted>() {
                true => Err(Aborted.into()),
                false => Err(anyhow!("{}", said(&*panic))),
            })
            .with_context(|| format!("building the device {}", self.hub.name(self.place)))?;
        let report = executor.report();
        self.held = Some(Held { seat: assignment, executor, next_step: None });
        Ok(report)
    }

    /// Runs a step, if it belongs to the current build, and reports the result.
    fn run(&mut self, message: Parcel) {
        let Some(built) = self.held.as_mut().filter(|built| built.wants(&message)) else { return };
        let (build, number) = (message.build, message.batch.step);
        let ran = built.run(&message, &mut self.output);
        let answers = matches!(built.seat.duty, Duty::Answer);
        // The batch must be released before the step completes, so that it can be reused.
        drop(message);
        match ran {
            Err(failure) => self.fail(build, number, failure),
            Ok(()) if answers => self.hub.answer(build, number, &mut self.output),
            Ok(()) => {}
        }
    }

    /// Reports a failure before anything is dropped: the other ranks notice that this one is gone, and must
    /// not report it first.
    fn fail(&mut self, build: u64, number: u64, failure: Failure) {
        let fault = match &failure {
            Failure::Fault(fault) => fault.clone(),
            Failure::Panic(panic) if panic.is::<Aborted>() => DeviceError::Fault(Aborted.to_string()),
            Failure::Panic(panic) => DeviceError::Fault(said(&**panic)),
        };
        self.hub.failed(self.place, build, number, fault);
    }
}

impl Held {
    /// Whether a step belongs to the current build and was not aborted.
    fn wants(&self, message: &Parcel) -> bool {
        message.build == self.seat.build && !self.seat.abort.is_aborted()
    }

    fn run(&mut self, message: &Parcel, output: &mut StepOutput) -> Result<(), Failure> {
        let (number, expected) = (message.batch.step, self.next_step.replace(message.batch.step + 1));
        let Held { seat: assignment, executor, .. } = self;
        let ran = catch_unwind(AssertUnwindSafe(|| {
            assert!(
                expected.is_none_or(|next| next == number),
                "steps are numbered consecutively; anything else is a bug"
            );
            let to = match &mut assignment.duty {
                Duty::HandOn(link) => Some(link.room()),
                Duty::Answer | Duty::Nothing => None,
            };
            executor.run(&message.batch, Flow { from: message.carried.as_deref(), to }, output)?;
            match &mut assignment.duty {
                Duty::HandOn(link) if !assignment.abort.is_aborted() => link.hand_on(&message.batch),
                Duty::HandOn(_) | Duty::Answer | Duty::Nothing => {}
            }
            Ok(())
        }));
        match ran {
            Ok(result) => result.map_err(Failure::Fault),
            Err(panic) => Err(Failure::Panic(panic)),
        }
    }
}

/// Returns the message of a panic.
fn said(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
        .unwrap_or_else(|| "a panic without words".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use mainstem_kernels::Abort;

    /// An executor that does nothing.
    struct Idle;

    impl Executor for Idle {
        fn run(&mut self, _: &StepBatch, _: Flow<'_>, _: &mut StepOutput) -> Result<(), DeviceError> {
            Ok(())
        }

        fn report(&self) -> ExecutorReport {
            ExecutorReport::default()
        }
    }

    #[test]
    fn a_gap_in_the_numbers_is_a_fault() {
        let assignment = Seat { build: 1, abort: Abort::new(), duty: Duty::Nothing };
        let mut built = Held { seat: assignment, executor: Box::new(Idle), next_step: None };
        let mut output = StepOutput::default();
        for (step, fits) in [(7, true), (8, true), (10, false), (11, true), (12, true), (12, false)] {
            let batch = Arc::new(StepBatch { step, ..StepBatch::default() });
            let ran = built.run(&Parcel { build: 1, batch, carried: None }, &mut output);
            assert_eq!(ran.is_ok(), fits, "step {step}");
        }
    }

    #[test]
    fn what_is_left_of_an_epoch_that_is_over_is_not_run() {
        let abort = Abort::new();
        let assignment = Seat { build: 2, abort: abort.clone(), duty: Duty::Nothing };
        let built = Held { seat: assignment, executor: Box::new(Idle), next_step: None };
        let message = |build| Parcel { build, batch: Arc::default(), carried: None };
        assert_eq!([1, 2, 3].map(|build| built.wants(&message(build))), [false, true, false]);
        abort.abort();
        assert!(!built.wants(&message(2)));
    }
}
