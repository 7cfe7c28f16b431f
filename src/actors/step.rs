//! Steps for devices, their results, and the factories of the executors that run them.
//!
//! Invariant: the buffers of a step go to the devices and back, and are never allocated anew.

use crate::model::executor::Executor;
use anyhow::Result;
use mainstem_kernels::{Collective, DeviceError, StepBatch, StepLimits, StepOutput};

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
pub struct StepResult {
    pub step: Box<Step>,
    pub result: Result<(), DeviceError>,
}

/// Builds an executor from scratch, for the tensor-parallel rank that the collective specifies. Called on the
/// device's thread, once per (re)build.
pub type ExecutorFactory = Box<dyn FnMut(Box<dyn Collective>) -> Result<Box<dyn Executor>> + Send>;
