//! The interface of a model on a device.

/// The executor of a device.
pub mod executor {
    use crate::{Abort, DeviceError, HandoffPorts, StepBatch, StepOutput};

    /// Runs steps on one device.
    pub trait Executor: Send {
        /// Runs this device's part of a step.
        fn run(
            &mut self,
            batch: &StepBatch,
            flow: HandoffPorts<'_>,
            out: &mut StepOutput,
        ) -> Result<(), DeviceError>;

        /// Returns what was allocated.
        fn report(&self) -> ExecutorReport;

        /// Lets an abort end waits for a disk, of which there are none.
        fn stop_on_abort(&mut self, _abort: &Abort) {}
    }

    /// The allocations of an executor: none.
    #[derive(Clone, Debug, Default, PartialEq)]
    pub struct ExecutorReport;
}
