//! Steps for devices, their results, and the factories of the executors that run them.
//!
//! Invariant: the buffers of a step go to the devices and back, and are never allocated anew, except for late
//! inputs that were used.

use crate::model::executor::Executor;
use anyhow::Result;
use mainstem_kernels::{
    Collective, DeviceError, LateInputs, SampledToken, SamplingParams, Span, StepBatch, StepLimits,
    StepOutput, TableUpdate,
};
use std::sync::Arc;
use std::time::Duration;

/// Number of logit biases for which a batch keeps memory. A request may have one for each token.
const BIASES_KEPT: usize = 1 << 16;

/// A batch, its late inputs, and the buffers for its output. Batch and output are reused from step to step.
#[derive(Debug, Default)]
pub struct Step {
    pub batch: StepBatch,
    /// The inputs of sampling that the step is launched without. The group aborts them if the step fails.
    pub late: Arc<LateInputs>,
    pub output: StepOutput,
    /// Time of the device between its previous step and this one; `None` for its first step. Written with
    /// the output.
    pub gap: Option<Duration>,
}

impl Step {
    /// Allocates buffers for any step within `limits`.
    pub fn with_capacity(limits: &StepLimits) -> Step {
        let (batch, output) = (StepBatch::with_capacity(limits), StepOutput::with_capacity(limits));
        Step { batch, late: Arc::default(), output, gap: None }
    }

    /// Returns about how many bytes [`Step::with_capacity`] allocates.
    pub fn bytes(limits: &StepLimits) -> usize {
        let row = size_of::<Span>()
            + size_of::<SamplingParams>()
            + size_of::<SampledToken>()
            + 2 * size_of::<u32>()
            + limits.top_logprobs * size_of::<(u32, f32)>()
            + limits.hidden * size_of::<f32>();
        let tables = limits.table_len() + limits.window_table_len() + limits.cross_table_len();
        let updates = limits.slots.saturating_mul(tables).saturating_mul(size_of::<TableUpdate>());
        limits.rows.saturating_mul(row).saturating_add(updates)
    }

    /// Clears the batch and the late inputs for another step.
    pub fn clear(&mut self) {
        self.batch.clear();
        self.batch.logit_biases.shrink_to(BIASES_KEPT);
        self.batch.token_counts.shrink_to(BIASES_KEPT);
        if !self.late.is_unused() {
            self.late = Arc::default();
        }
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
