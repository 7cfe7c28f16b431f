//! A device: one OS thread that runs the steps it is sent, in order.
//!
//! Owns the executor (weights, KV cache, step buffers), and knows nothing of sequences and clients.
//! Invariant: every failure inside a step is reported to the group; between receiving a step and completing
//! it, nothing is allocated. A device thread that was abandoned while it ran something finds its mailbox
//! closed when it resumes, drops its executor, and exits.

pub use super::step::{ExecutorFactory, Step, StepResult};

use super::group::mailbox::{Assignment, Command, Mailbox, Role, StepMessage};
use super::group::state::{DeviceId, GroupState};
use crate::model::executor::{Executor, ExecutorReport};
use anyhow::{Context as _, Result};
use mainstem_kernels::{
    Aborted, Collective, DeviceError, HandoffPorts, LastLayerSignal, LateInputs, StepOutput,
};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Instant;

/// A factory shared by the successive threads of a device.
pub(super) type SharedExecutorFactory = Arc<Mutex<ExecutorFactory>>;

/// The state of a device's thread.
pub(super) struct Device {
    id: DeviceId,
    group: Arc<GroupState>,
    mailbox: Arc<Mailbox>,
    factory: SharedExecutorFactory,
    built: Option<BuiltExecutor>,
    /// Output buffer of the steps. Ranks that do not return results write it too, and nobody reads it.
    output: StepOutput,
    /// When the last step ended.
    last_step_end: Option<Instant>,
}

/// The executor and its assignment, from one build to the next.
struct BuiltExecutor {
    assignment: Assignment,
    executor: Box<dyn Executor>,
    /// Number that the next step must have; `None` right after a build.
    next_step: Option<u64>,
}

/// The reason for which a step failed.
enum StepFailure {
    Fault(DeviceError),
    Panic(Box<dyn Any + Send>),
}

/// Drop guard that reports, however the thread ends, that it is exiting.
struct ExitingGuard(Arc<GroupState>, DeviceId);

impl Drop for ExitingGuard {
    fn drop(&mut self) {
        self.0.report_exiting(self.1);
    }
}

/// Drop guard that reports that the thread has dropped its executor and is about to exit.
struct ExitedGuard(Arc<GroupState>, DeviceId);

impl Drop for ExitedGuard {
    fn drop(&mut self) {
        self.0.report_exited(self.1);
    }
}

impl Device {
    /// Starts the thread of a device; the executor is built on a later command.
    pub(super) fn spawn(
        id: DeviceId,
        group: Arc<GroupState>,
        mailbox: Arc<Mailbox>,
        factory: SharedExecutorFactory,
    ) -> std::io::Result<JoinHandle<()>> {
        // Thread names are limited to 15 bytes.
        let name = format!("dev {}", group.name(id));
        let output = StepOutput::with_capacity(group.limits());
        Builder::new().name(name).spawn(move || {
            // Drop order: the exit must be reported before the executor is dropped, because the other ranks
            // of the stage notice that and must not report it first; and until the executor is dropped, the
            // thread may still hang.
            let _leaving = ExitedGuard(group.clone(), id);
            let (built, last_step_end) = (None, None);
            let mut device =
                Device { id, group: group.clone(), mailbox, factory, built, output, last_step_end };
            let _ending = ExitingGuard(group, id);
            device.serve();
        })
    }

    /// Runs commands until the mailbox is closed.
    fn serve(&mut self) {
        while let Some(command) = self.mailbox.receive() {
            match command {
                Command::Clear => {
                    self.drop_executor();
                    self.group.report_cleared(self.id);
                }
                Command::Build(assignment, collective) => {
                    let build = assignment.build;
                    let result = self.build(assignment, collective);
                    self.group.report_built(self.id, build, result);
                }
                Command::Run(message) => self.run(message),
            }
        }
        self.drop_executor();
    }

    /// Drops the executor.
    fn drop_executor(&mut self) {
        let old = self.built.take();
        let _ = catch_unwind(AssertUnwindSafe(|| drop(old)));
    }

    /// Builds the executor.
    fn build(&mut self, assignment: Assignment, collective: Box<dyn Collective>) -> Result<ExecutorReport> {
        // The old executor is dropped first: two do not fit into memory.
        self.drop_executor();
        let built = catch_unwind(AssertUnwindSafe(|| {
            let mut factory = self.factory.lock().unwrap_or_else(PoisonError::into_inner);
            factory(collective)
        }));
        let mut executor = built
            .unwrap_or_else(|panic| {
                let failed = |panic: Box<dyn Any + Send>| anyhow::Error::from(fault_of(&*panic));
                Err(if panic.is::<Aborted>() { Aborted.into() } else { failed(panic) })
            })
            .with_context(|| format!("building the device {}", self.group.name(self.id)))?;
        executor.stop_on_abort(&assignment.abort);
        let report = executor.report();
        self.last_step_end = None;
        self.built = Some(BuiltExecutor { assignment, executor, next_step: None });
        Ok(report)
    }

    /// Runs a step, if it belongs to the current build, and reports the result.
    fn run(&mut self, message: StepMessage) {
        let Some(built) = self.built.as_mut().filter(|built| built.accepts(&message)) else { return };
        let (build, number) = (message.build, message.batch.step);
        let answers = matches!(built.assignment.role, Role::ReturnResults);
        let late = if answers { self.group.late_inputs(build, number) } else { None };
        let signal = || self.group.report_last_layer(build, number);
        let last_layer = if answers { LastLayerSignal::new(&signal) } else { LastLayerSignal::default() };
        let gap = self.last_step_end.map(|end| end.elapsed());
        let ran = built.run(&message, (late.as_ref(), last_layer), &mut self.output);
        self.last_step_end = Some(Instant::now());
        // The batch must be released before the step completes, so that it can be reused.
        drop((message, late));
        match ran {
            Err(failure) => self.report_fault(build, number, failure),
            Ok(()) if answers => self.group.report_result(build, number, &mut self.output, gap),
            Ok(()) => {}
        }
    }

    /// Reports a failure before anything is dropped: the other ranks notice that this one is gone, and must
    /// not report it first.
    fn report_fault(&mut self, build: u64, number: u64, failure: StepFailure) {
        let fault = match &failure {
            StepFailure::Fault(fault) => fault.clone(),
            StepFailure::Panic(panic) => fault_of(&**panic),
        };
        self.group.report_fault(self.id, build, number, fault);
    }
}

impl BuiltExecutor {
    /// Whether a step belongs to the current build and was not aborted.
    fn accepts(&self, message: &StepMessage) -> bool {
        message.build == self.assignment.build && !self.assignment.abort.is_aborted()
    }

    fn run(
        &mut self,
        message: &StepMessage,
        (late, last_layer): (Option<&Arc<LateInputs>>, LastLayerSignal<'_>),
        output: &mut StepOutput,
    ) -> Result<(), StepFailure> {
        let (number, expected) = (message.batch.step, self.next_step.replace(message.batch.step + 1));
        let BuiltExecutor { assignment, executor, .. } = self;
        let ran = catch_unwind(AssertUnwindSafe(|| {
            assert!(
                expected.is_none_or(|next| next == number),
                "steps are numbered consecutively; anything else is a bug"
            );
            let to = match &mut assignment.role {
                Role::HandOver(link) => Some(link.buffer()),
                Role::ReturnResults | Role::Nothing => None,
            };
            executor.run(
                &message.batch,
                HandoffPorts { input: message.handoff.as_deref(), output: to, late, last_layer },
                output,
            )?;
            match &mut assignment.role {
                Role::HandOver(link) if !assignment.abort.is_aborted() => link.send(&message.batch),
                Role::HandOver(_) | Role::ReturnResults | Role::Nothing => {}
            }
            Ok(())
        }));
        match ran {
            Ok(result) => result.map_err(StepFailure::Fault),
            Err(panic) => Err(StepFailure::Panic(panic)),
        }
    }
}

/// Returns the fault that a panic means. A device unwinds with its error as the payload.
fn fault_of(panic: &(dyn Any + Send)) -> DeviceError {
    match panic.downcast_ref::<DeviceError>() {
        Some(error) => error.clone(),
        None if panic.is::<Aborted>() => DeviceError::Fault(Aborted.to_string()),
        None => DeviceError::Fault(panic_message(panic)),
    }
}

/// Returns the message of a panic.
fn panic_message(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<String>()
        .cloned()
        .or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
        .unwrap_or_else(|| "a panic without words".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::actors::group::GroupConfig;
    use crate::actors::testing::LIMITS;
    use mainstem_kernels::{Abort, SingleRank, StepBatch};

    /// An executor that does nothing.
    struct NoopExecutor;

    impl Executor for NoopExecutor {
        fn run(&mut self, _: &StepBatch, _: HandoffPorts<'_>, _: &mut StepOutput) -> Result<(), DeviceError> {
            Ok(())
        }

        fn report(&self) -> ExecutorReport {
            ExecutorReport::default()
        }
    }

    #[test]
    fn a_gap_in_the_step_numbers_is_a_fault() {
        let assignment = Assignment { build: 1, abort: Abort::new(), role: Role::Nothing };
        let mut built = BuiltExecutor { assignment, executor: Box::new(NoopExecutor), next_step: None };
        let mut output = StepOutput::default();
        for (step, fits) in [(7, true), (8, true), (10, false), (11, true), (12, true), (12, false)] {
            let batch = Arc::new(StepBatch { step, ..StepBatch::default() });
            let message = StepMessage { build: 1, batch, handoff: None };
            let ran = built.run(&message, (None, LastLayerSignal::default()), &mut output);
            assert_eq!(ran.is_ok(), fits, "step {step}");
        }
    }

    /// An executor on a device whose operations unwind with this error.
    struct Unwinding(DeviceError);

    impl Executor for Unwinding {
        fn run(&mut self, _: &StepBatch, _: HandoffPorts<'_>, _: &mut StepOutput) -> Result<(), DeviceError> {
            std::panic::resume_unwind(Box::new(self.0.clone()))
        }

        fn report(&self) -> ExecutorReport {
            ExecutorReport::default()
        }
    }

    /// Regression: it was reported as a panic without words.
    #[test]
    fn an_error_of_a_device_that_unwinds_is_reported_as_it_is() {
        let error = DeviceError::OutOfMemory { bytes: 7, reason: "of a test".to_owned() };
        let assignment = Assignment { build: 1, abort: Abort::new(), role: Role::Nothing };
        let executor = Box::new(Unwinding(error.clone()));
        let mut built = BuiltExecutor { assignment, executor, next_step: None };
        let message = StepMessage { build: 1, batch: Arc::default(), handoff: None };
        let ran = built.run(&message, (None, LastLayerSignal::default()), &mut StepOutput::default());
        let Err(StepFailure::Panic(panic)) = ran else { panic!("the step unwinds") };
        assert_eq!(fault_of(&*panic).to_string(), error.to_string());
    }

    /// An executor that tells whether it was aborted.
    struct Listening(Arc<Mutex<Abort>>);

    impl Executor for Listening {
        fn run(&mut self, _: &StepBatch, _: HandoffPorts<'_>, _: &mut StepOutput) -> Result<(), DeviceError> {
            Ok(())
        }

        fn report(&self) -> ExecutorReport {
            ExecutorReport::default()
        }

        fn stop_on_abort(&mut self, abort: &Abort) {
            *self.0.lock().unwrap() = abort.clone();
        }
    }

    /// A step that waits for a disk must end with its build.
    #[test]
    fn executors_learn_of_the_abort_of_their_build() {
        let heard = Arc::new(Mutex::new(Abort::new()));
        let told = heard.clone();
        let factory: ExecutorFactory = Box::new(move |_| Ok(Box::new(Listening(told.clone()))));
        let mut device = Device {
            id: DeviceId { stage: 0, rank: 0, incarnation: 0 },
            group: Arc::new(GroupState::new(GroupConfig::new(vec![vec!["one".to_owned()]], LIMITS, 1))),
            mailbox: Arc::new(Mailbox::new(1)),
            factory: Arc::new(Mutex::new(factory)),
            built: None,
            output: StepOutput::default(),
            last_step_end: None,
        };
        let abort = Abort::new();
        let assignment = Assignment { build: 1, abort: abort.clone(), role: Role::Nothing };
        device.build(assignment, Box::new(SingleRank)).unwrap();
        abort.abort();
        assert!(heard.lock().unwrap().is_aborted());
    }

    #[test]
    fn steps_of_other_or_aborted_builds_are_not_run() {
        let abort = Abort::new();
        let assignment = Assignment { build: 2, abort: abort.clone(), role: Role::Nothing };
        let built = BuiltExecutor { assignment, executor: Box::new(NoopExecutor), next_step: None };
        let message = |build| StepMessage { build, batch: Arc::default(), handoff: None };
        assert_eq!([1, 2, 3].map(|build| built.accepts(&message(build))), [false, true, false]);
        abort.abort();
        assert!(!built.accepts(&message(2)));
    }
}
