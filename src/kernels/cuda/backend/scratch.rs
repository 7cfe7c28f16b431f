//! Scratch buffers of an operation, whose sizes follow from the limits of a step and the shapes held.
//!
//! Invariant: buffers never shrink, and none is allocated during a step.

use crate::backend::DeviceError;
use crate::cuda::{Context, CudaBuf};

/// Scratch buffers.
pub(super) struct Scratch<const N: usize>(pub [CudaBuf; N]);

impl<const N: usize> Scratch<N> {
    /// Creates empty buffers.
    pub fn new(context: &Context) -> Result<Scratch<N>, DeviceError> {
        let mut bufs = Vec::with_capacity(N);
        for _ in 0..N {
            bufs.push(context.alloc(0)?);
        }
        Ok(Scratch(bufs.try_into().unwrap_or_else(|_| unreachable!("there are N of them"))))
    }

    /// Allocates those buffers anew that are shorter than these sizes.
    pub fn grow(&mut self, context: &Context, bytes: [usize; N]) -> Result<(), DeviceError> {
        for (buf, bytes) in self.0.iter_mut().zip(bytes) {
            if buf.len() < bytes {
                // The old one is freed first.
                *buf = context.alloc(0)?;
                *buf = context.alloc(bytes)?;
            }
        }
        Ok(())
    }
}
