//! A device: one OS thread that runs the steps it is sent, in order, and nothing else.
//!
//! Owns the executor (weights, cache, step buffers). Knows no sequence and no client.
//! Invariant: whatever happens inside a step, an answer goes out, and the device is rebuilt if it failed.

use crate::model::executor::{Executor, ExecutorReport};
use crate::telemetry;
use actix::{Actor, AsyncContext, Context, Handler, Message, MessageResult};
use anyhow::{Context as _, Result, anyhow};
use mainstem_kernels::{DeviceError, StepBatch, StepLimits, StepOutput};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use tracing::{error, info};

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

/// Runs one step.
#[derive(Message)]
#[rtype(result = "Ran")]
pub struct Run(pub Box<Step>);

/// A step that ran, or failed; then its output means nothing.
pub struct Ran {
    pub step: Box<Step>,
    pub result: Result<(), DeviceError>,
}

/// Builds the executor: sent once at start, and by the device to itself after a fault.
#[derive(Message)]
#[rtype(result = "Result<ExecutorReport>")]
pub struct Build;

/// Makes an executor, each time from the beginning. Called on the device's thread.
pub type Factory = Box<dyn FnMut() -> Result<Box<dyn Executor>> + Send>;

/// The actor. Give it an arbiter of its own.
pub struct Device {
    factory: Factory,
    executor: Option<Box<dyn Executor>>,
    /// The number the next step must have; none right after a build.
    next_step: Option<u64>,
}

impl Actor for Device {
    type Context = Context<Device>;
}

impl Handler<Build> for Device {
    type Result = Result<ExecutorReport>;

    fn handle(&mut self, _: Build, _: &mut Self::Context) -> Self::Result {
        self.build()
    }
}

impl Handler<Run> for Device {
    type Result = MessageResult<Run>;

    fn handle(&mut self, Run(mut step): Run, ctx: &mut Self::Context) -> Self::Result {
        let had_executor = self.executor.is_some();
        let result = self.run(&mut step);
        match &result {
            Ok(()) => {}
            Err(fault) if had_executor => {
                error!(step = step.batch.step, %fault, "the device failed; it is being rebuilt");
                telemetry::DEVICE_RESTARTS.add(1);
                ctx.notify(Rebuild);
            }
            Err(fault) => error!(%fault, "the device is still away; the next step will try again"),
        }
        MessageResult(Ran { step, result })
    }
}

#[derive(Message)]
#[rtype(result = "()")]
struct Rebuild;

impl Handler<Rebuild> for Device {
    type Result = ();

    fn handle(&mut self, _: Rebuild, _: &mut Self::Context) {
        if self.executor.is_some() {
            return; // A step that came first has done it.
        }
        match self.build() {
            Ok(_) => info!("the device is back"),
            Err(fault) => error!("the device cannot be rebuilt: {fault:#}; the next step will try again"),
        }
    }
}

impl Device {
    /// A device that has yet to be built.
    pub fn new(factory: Factory) -> Device {
        Device { factory, executor: None, next_step: None }
    }

    fn build(&mut self) -> Result<ExecutorReport> {
        // The old one goes first: two do not fit into memory.
        let old = self.executor.take();
        let _ = catch_unwind(AssertUnwindSafe(|| drop(old)));
        self.next_step = None;
        let built = catch_unwind(AssertUnwindSafe(|| (self.factory)()));
        let executor =
            built.unwrap_or_else(|panic| Err(anyhow!("{}", said(&*panic)))).context("building the device")?;
        let report = executor.report();
        self.executor = Some(executor);
        Ok(report)
    }

    fn run(&mut self, step: &mut Step) -> Result<(), DeviceError> {
        if self.executor.is_none() {
            self.build().map_err(|fault| DeviceError::Fault(format!("{fault:#}")))?;
        }
        let Some(executor) = &mut self.executor else {
            unreachable!("it was just built, else this is a bug")
        };
        let (number, expected) = (step.batch.step, self.next_step.replace(step.batch.step + 1));
        let ran = catch_unwind(AssertUnwindSafe(|| {
            assert!(expected.is_none_or(|next| next == number), "steps come in order, else this is a bug");
            executor.run(&step.batch, &mut step.output)
        }));
        let result = ran.unwrap_or_else(|panic| Err(DeviceError::Fault(said(&*panic))));
        if result.is_err() {
            let broken = self.executor.take();
            let _ = catch_unwind(AssertUnwindSafe(|| drop(broken)));
        }
        result
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

    /// Does nothing, well.
    struct Idle;

    impl Executor for Idle {
        fn run(&mut self, _: &StepBatch, _: &mut StepOutput) -> Result<(), DeviceError> {
            Ok(())
        }

        fn report(&self) -> ExecutorReport {
            ExecutorReport::default()
        }
    }

    fn step(number: u64) -> Run {
        let mut step = Box::new(Step::default());
        step.batch.step = number;
        Run(step)
    }

    #[actix::test]
    async fn a_gap_in_the_numbers_is_a_fault_and_the_device_goes_on_from_there() {
        let (built, count) = std::sync::mpsc::channel();
        let factory: Factory = Box::new(move || {
            built.send(())?;
            Ok(Box::new(Idle))
        });
        let device = Device::new(factory).start();
        device.send(Build).await.expect("the device answers").expect("it can be built");
        for (number, fits) in [(7, true), (8, true), (10, false), (11, true), (12, true), (12, false)] {
            let ran = device.send(step(number)).await.expect("the device answers");
            assert_eq!((ran.result.is_ok(), ran.step.batch.step), (fits, number), "step {number}");
        }
        device.send(step(1)).await.expect("the device answers").result.expect("it was built anew");
        assert_eq!(count.try_iter().count(), 3);
    }
}
