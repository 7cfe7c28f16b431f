//! A device: one OS thread that runs the steps it is sent, in order, and nothing else.
//!
//! Owns the executor (weights, cache, step buffers). Knows no sequence and no client.
//! Invariant: whatever happens inside a step, the group hears of it; between a step's coming and its going nothing is
//! allocated. A device that was given up while it ran something wakes to a closed mailbox, drops what it has, and ends.

use super::group::hub::{Hub, Place};
use super::group::mailbox::{Duty, Mailbox, Order, Parcel, Seat};
use crate::model::executor::{Executor, ExecutorReport};
use anyhow::{Context as _, Result, anyhow};
use mainstem_kernels::{Aborted, Collective, DeviceError, Flow, StepBatch, StepLimits, StepOutput};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{Builder, JoinHandle};

/// A batch and the room for its results. They travel together, there and back, and are used again.
#[derive(Debug, Default)]
pub struct Step {
    pub batch: StepBatch,
    pub output: StepOutput,
}

impl Step {
    /// Room for any step within `limits`.
    pub fn with_capacity(limits: &StepLimits) -> Step {
        Step { batch: StepBatch::with_capacity(limits), output: StepOutput::with_capacity(limits) }
    }
}

/// A step that ran, or failed; then its output means nothing. The batch is room for another: what is in it may be an
/// earlier step's.
pub struct Ran {
    pub step: Box<Step>,
    pub result: Result<(), DeviceError>,
}

/// Makes an executor, each time from the beginning, that is the member of its stage which the collective says. Called on
/// the device's thread.
pub type Factory = Box<dyn FnMut(Box<dyn Collective>) -> Result<Box<dyn Executor>> + Send>;

/// A factory that outlives the threads it is called on.
pub(super) type SharedFactory = Arc<Mutex<Factory>>;

/// What the thread works with.
pub(super) struct Device {
    place: Place,
    hub: Arc<Hub>,
    mailbox: Arc<Mailbox>,
    factory: SharedFactory,
    held: Option<Held>,
    /// Of those that do not answer, nobody reads it.
    output: StepOutput,
}

/// What it has from one build to the next.
struct Held {
    seat: Seat,
    executor: Box<dyn Executor>,
    /// The number the next step must have; none right after a build.
    next_step: Option<u64>,
}

/// How a step went wrong.
enum Failure {
    Fault(DeviceError),
    Panic(Box<dyn Any + Send>),
}

/// Tells the group that the thread will end, whatever ends it.
struct Ending(Arc<Hub>, Place);

impl Drop for Ending {
    fn drop(&mut self) {
        self.0.ends(self.1);
    }
}

/// Tells the group that the device is gone, and its thread as good as.
struct Leaving(Arc<Hub>, Place);

impl Drop for Leaving {
    fn drop(&mut self) {
        self.0.left(self.1);
    }
}

impl Device {
    /// Starts the thread of a device that has yet to be built.
    pub(super) fn spawn(
        place: Place,
        hub: Arc<Hub>,
        mailbox: Arc<Mailbox>,
        factory: SharedFactory,
    ) -> std::io::Result<JoinHandle<()>> {
        // A thread's name has 15 bytes.
        let name = format!("dev {}", hub.name(place));
        let output = StepOutput::with_capacity(hub.limits());
        Builder::new().name(name).spawn(move || {
            // In this order: the others of a stage see that a device goes, and must not be heard before it; and as long
            // as it has something to drop, it may hang.
            let _leaving = Leaving(hub.clone(), place);
            let mut device = Device { place, hub: hub.clone(), mailbox, factory, held: None, output };
            let _ending = Ending(hub, place);
            device.serve();
        })
    }

    fn serve(&mut self) {
        while let Some(order) = self.mailbox.take() {
            match order {
                Order::Clear => {
                    self.clear();
                    self.hub.cleared(self.place);
                }
                Order::Build(seat, collective) => {
                    let build = seat.build;
                    let built = self.build(seat, collective);
                    self.hub.built(self.place, build, built);
                }
                Order::Run(parcel) => self.run(parcel),
            }
        }
        self.clear();
    }

    fn clear(&mut self) {
        let old = self.held.take();
        let _ = catch_unwind(AssertUnwindSafe(|| drop(old)));
    }

    fn build(&mut self, seat: Seat, collective: Box<dyn Collective>) -> Result<ExecutorReport> {
        // The old one goes first: two do not fit into memory.
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
        self.held = Some(Held { seat, executor, next_step: None });
        Ok(report)
    }

    fn run(&mut self, parcel: Parcel) {
        let Some(held) = self.held.as_mut().filter(|held| held.wants(&parcel)) else { return };
        let (build, number) = (parcel.build, parcel.batch.step);
        let ran = held.run(&parcel, &mut self.output);
        let answers = matches!(held.seat.duty, Duty::Answer);
        // When an answer goes out, nobody reads the batch any more: it can be filled anew.
        drop(parcel);
        match ran {
            Err(failure) => self.fail(build, number, failure),
            Ok(()) if answers => self.hub.answer(build, number, &mut self.output),
            Ok(()) => {}
        }
    }

    /// Tells the group before anything is dropped: the other members see that this one is gone, and must not be the first
    /// to be heard.
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
    /// Steps from before a fault are nobody's any more.
    fn wants(&self, parcel: &Parcel) -> bool {
        parcel.build == self.seat.build && !self.seat.abort.is_aborted()
    }

    fn run(&mut self, parcel: &Parcel, output: &mut StepOutput) -> Result<(), Failure> {
        let (number, expected) = (parcel.batch.step, self.next_step.replace(parcel.batch.step + 1));
        let Held { seat, executor, .. } = self;
        let ran = catch_unwind(AssertUnwindSafe(|| {
            assert!(expected.is_none_or(|next| next == number), "steps come in order, else this is a bug");
            let to = match &mut seat.duty {
                Duty::HandOn(link) => Some(link.room()),
                Duty::Answer | Duty::Nothing => None,
            };
            executor.run(&parcel.batch, Flow { from: parcel.carried.as_deref(), to }, output)?;
            match &mut seat.duty {
                Duty::HandOn(link) if !seat.abort.is_aborted() => link.hand_on(&parcel.batch),
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

/// What a panic said.
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

    /// Does nothing, well.
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
        let seat = Seat { build: 1, abort: Abort::new(), duty: Duty::Nothing };
        let mut held = Held { seat, executor: Box::new(Idle), next_step: None };
        let mut output = StepOutput::default();
        for (step, fits) in [(7, true), (8, true), (10, false), (11, true), (12, true), (12, false)] {
            let batch = Arc::new(StepBatch { step, ..StepBatch::default() });
            let ran = held.run(&Parcel { build: 1, batch, carried: None }, &mut output);
            assert_eq!(ran.is_ok(), fits, "step {step}");
        }
    }

    #[test]
    fn what_is_left_of_an_epoch_that_is_over_is_not_run() {
        let abort = Abort::new();
        let seat = Seat { build: 2, abort: abort.clone(), duty: Duty::Nothing };
        let held = Held { seat, executor: Box::new(Idle), next_step: None };
        let parcel = |build| Parcel { build, batch: Arc::default(), carried: None };
        assert_eq!([1, 2, 3].map(|build| held.wants(&parcel(build))), [false, true, false]);
        abort.abort();
        assert!(!held.wants(&parcel(2)));
    }
}
