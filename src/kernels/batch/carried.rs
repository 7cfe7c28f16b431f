//! What one stage hands the next: the residual stream of a step's rows, as bytes.
//!
//! Invariant: as long as a step is within the limits, its buffers never grow.

use serde::{Deserialize, Serialize};
use std::mem::size_of;

/// The residual streams of a step between two stages, F32, little-endian, (rows, hidden).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Carried {
    /// Of the encoder's rows; behind its last layer what a decoder attends to. Empty where no stage ahead wants it.
    pub encoder: Vec<u8>,
    /// Of the decoder's rows; empty before its first layer.
    pub decoder: Vec<u8>,
}

/// How a stage's part of a step begins and ends.
#[derive(Debug, Default)]
pub struct Flow<'a> {
    /// What the stage before gave; `None` in the first.
    pub from: Option<&'a Carried>,
    /// What the next one gets, overwritten; `None` in the last.
    pub to: Option<&'a mut Carried>,
}

impl Carried {
    /// Room for any step within `limits` of a model of that width.
    pub fn with_capacity(limits: &crate::StepLimits, hidden: usize) -> Carried {
        let [encoder, decoder] = Self::capacities(limits, hidden);
        Carried { encoder: Vec::with_capacity(encoder), decoder: Vec::with_capacity(decoder) }
    }

    /// Bytes of that room.
    pub fn bytes(limits: &crate::StepLimits, hidden: usize) -> usize {
        let [encoder, decoder] = Self::capacities(limits, hidden);
        encoder.saturating_add(decoder)
    }

    /// Of either stack: any step's rows, where the model has it.
    fn capacities(limits: &crate::StepLimits, hidden: usize) -> [usize; 2] {
        let rows = limits.rows.saturating_mul(hidden).saturating_mul(size_of::<f32>());
        [limits.source_positions, limits.positions].map(|positions| if positions > 0 { rows } else { 0 })
    }
}
