//! The standard library, with the threads, locks, atomics and time of a deterministic scheduler
//! ([Shuttle](https://docs.rs/shuttle)). A crate that names this one `std` runs its code, unchanged, under
//! chosen schedules.
//!
//! Invariant: only one thread runs at a time, and the scheduler chooses which at every operation on a lock,
//! an atomic, a channel or a thread. All orderings of atomics act like `SeqCst`, and `Arc` has no such
//! points.

pub mod hint;
pub mod sync;
pub mod thread;
pub mod time;

pub use ::std::*;
