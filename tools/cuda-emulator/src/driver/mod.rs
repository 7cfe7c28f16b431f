//! The driver's interface: the functions of `libcuda` that programs call, on emulated devices.
//!
//! Work on a stream is queued. It runs when somebody must wait for it, in the thread that waits, or at
//! moments that a seed chooses; so a program that does not wait sees old data. The host's memory is read
//! and written when a copy runs, if it is pinned; copies of other memory are made as the driver makes them,
//! at the call.
//!
//! Invariant: no lock is held while a kernel runs but that of its device.

#![allow(unsafe_code)]

mod capture;
mod code;
mod contexts;
mod devices;
mod entry;
mod errors;
mod events;
mod functions;
mod graphs;
mod host;
mod launches;
mod library;
mod memory;
mod modules;
mod queue;
mod records;
mod settings;
mod state;
mod streams;

pub use library::Emulator;
pub use records::{findings, reset};
