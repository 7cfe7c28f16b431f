//! Tests of the program's concurrent code under many schedules.
//!
//! The files that share state between threads are modules of this library, under the paths that they have
//! in their crates, and `std` is the one of a deterministic scheduler. So the code is tested as it is
//! written. Each scenario runs under hundreds of schedules, chosen by fixed seeds: a failure repeats when
//! the test runs again.
//!
//! A scenario that waits for ever is reported as a deadlock, and one that runs for ever exceeds its maximum
//! number of steps. A timeout may pass at any time, and a thread may wake without a reason.
//!
//! Invariant: nothing here blocks a thread of the system, which all threads of a scenario share.

// Checks of all targets build it as a test, too, with the tests of the files.
#![cfg(not(test))]
#![allow(dead_code)] // The files have more functions than the scenarios use.

// Below, `std` is the scheduler's, and the kernels are this crate.
extern crate scheduled_std as std;
extern crate self as mainstem_kernels;

pub mod actors;
#[path = "../../src/kernels/collective/mod.rs"]
pub mod collective;
pub mod decoding;
#[path = "../../src/kernels/batch/handoff.rs"]
pub mod handoff;
#[path = "../../src/kernels/late/mod.rs"]
pub mod late;
pub mod model;
#[path = "../../src/kernels/cpu/pool.rs"]
pub mod pool;
pub mod scenarios;
mod schedules;
pub mod telemetry;

pub use collective::local::{Abort, LocalRank};
pub use collective::{Aborted, Collective, SingleRank};
pub use handoff::{ActivationHandoff, HandoffPorts, LastLayerSignal};
pub use kernels::*;
pub use late::{HostRow, LateInputs};
pub use schedules::check;
