//! The activations that one pipeline stage sends to the next: the residual stream of a step's rows, as bytes.
//!
//! Invariant: for steps within the limits, the buffers never grow.

use crate::late::LateInputs;
use serde::{Deserialize, Serialize};
use std::fmt;
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

/// A signal from a running step to whoever schedules the next one. Sending it allocates nothing.
#[derive(Clone, Copy, Default)]
pub struct LastLayerSignal<'a>(Option<&'a dyn Fn()>);

/// The connections of a device during a step: activation buffers at the start and the end of its pipeline
/// stage, the late inputs, and a signal.
#[derive(Debug, Default)]
pub struct HandoffPorts<'a> {
    /// Activations from the previous stage; `None` in the first stage.
    pub input: Option<&'a ActivationHandoff>,
    /// Activations for the next stage, overwritten; `None` in the last stage.
    pub output: Option<&'a mut ActivationHandoff>,
    /// Late inputs, for the rank that samples. Without them, rows that need one fail.
    pub late: Option<&'a Arc<LateInputs>>,
    /// Sent when the decoder's last layer is computed, or queued on a device with its own queue.
    pub last_layer: LastLayerSignal<'a>,
}

impl<'a> LastLayerSignal<'a> {
    /// Creates a signal that calls `on_sent` on the device's thread.
    pub fn new(on_sent: &'a dyn Fn()) -> LastLayerSignal<'a> {
        LastLayerSignal(Some(on_sent))
    }

    /// Sends the signal. The default signal goes nowhere.
    pub fn send(self) {
        if let Some(on_sent) = self.0 {
            on_sent();
        }
    }
}

impl fmt::Debug for LastLayerSignal<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("LastLayerSignal").field(&self.0.is_some()).finish()
    }
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
