//! The errors of a device.
//!
//! Invariant: an error's text makes sense to a user, without the name of the operation that failed.

/// An error of a device.
#[derive(Clone, Debug, thiserror::Error)]
pub enum DeviceError {
    /// An allocation failed.
    #[error("out of memory: {bytes} bytes cannot be allocated ({reason})")]
    OutOfMemory { bytes: usize, reason: String },
    /// The device does not support what was asked of it; the text says what.
    #[error("{0}")]
    Unsupported(String),
    /// The device failed.
    #[error("device fault: {0}")]
    Fault(String),
}
