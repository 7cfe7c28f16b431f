//! The log's writer, and the metric of the group.

#[path = "../../../src/telemetry/log_writer.rs"]
pub mod log_writer;
pub mod scenarios;

/// A metric that is not recorded.
pub struct Counter;

impl Counter {
    /// Does nothing.
    pub fn add(&self, _: u64) {}
}

/// The number of restarts of the devices.
pub static DEVICE_RESTARTS: Counter = Counter;
