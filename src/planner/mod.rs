//! Plans where a model runs: which device holds which part of it, and how fast it will be.
//!
//! A model is described by its sizes (`shape`), a device by its speeds (`hardware`). They determine the
//! default split (`balance`, `split`; `model_source` for an opened model) and a forecast of any split's
//! speed (`speed`). On one machine whose memory may be too small, `placement` finds the best policy.
//! FlexGen's own cost model is apart (`flexgen`).
//!
//! Invariant: nothing is opened, allocated or measured; the same inputs give the same plan.

pub mod shape;

pub mod hardware;

pub mod balance;

pub mod split;

pub mod assignment;

pub mod model_source;

pub mod speed;

pub mod strategies;

pub mod flexgen;

pub mod placement;

pub use assignment::DeviceAssignment;
pub use hardware::{Device, Hardware, Link, SharedMemory};
pub use shape::{ModelShape, ResourceCost};
pub use speed::{Forecast, Workload, forecast};
pub use split::{DeviceCapacity, PartitionError, ShardLimit};
