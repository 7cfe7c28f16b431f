//! The activations that one pipeline stage sends to the next: the residual stream of a step's rows, as bytes.
//!
//! Invariant: for steps within the limits, the buffers never grow.

use crate::late::LateInputs;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// The residual stream of a step between two pipeline stages: (rows, hidden) for each stack, in the
/// [`crate::ActivationType`] of the sending device, little-endian. The receiving device has the same type.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ActivationHandoff {
    /// Rows of the encoder; after its last layer, the encoder output that the decoder attends to. Empty if no
    /// later stage needs them.
    pub encoder: Vec<u8>,
    /// Rows of the decoder; empty before its first layer.
    pub decoder: Vec<u8>,
}

/// Activation buffers at the start and the end of a pipeline stage, and the late inputs of the step.
#[derive(Debug, Default)]
pub struct HandoffPorts<'a> {
    /// Activations from the previous stage; `None` in the first stage.
    pub input: Option<&'a ActivationHandoff>,
    /// Activations for the next stage, overwritten; `None` in the last stage.
    pub output: Option<&'a mut ActivationHandoff>,
    /// Late inputs, for the rank that samples. Without them, rows that need one fail.
    pub late: Option<&'a Arc<LateInputs>>,
}

impl ActivationHandoff {
    /// Allocates buffers for any step within `limits` whose rows have `row_bytes` bytes.
    pub fn with_capacity(limits: &crate::StepLimits, row_bytes: usize) -> ActivationHandoff {
        let [encoder, decoder] = Self::stack_capacities(limits, row_bytes);
        ActivationHandoff { encoder: Vec::with_capacity(encoder), decoder: Vec::with_capacity(decoder) }
    }

    /// Returns the total capacity of such buffers, in bytes.
    pub fn capacity_bytes(limits: &crate::StepLimits, row_bytes: usize) -> usize {
        let [encoder, decoder] = Self::stack_capacities(limits, row_bytes);
        encoder.saturating_add(decoder)
    }

    /// Returns the capacity for each stack, in bytes: the rows of the largest step if the model has the
    /// stack.
    fn stack_capacities(limits: &crate::StepLimits, row_bytes: usize) -> [usize; 2] {
        let bytes = limits.rows.saturating_mul(row_bytes);
        [limits.encoder_positions, limits.positions].map(|positions| if positions > 0 { bytes } else { 0 })
    }
}
