//! Mainstem serves transformer models: every live request is a tributary, and one decode loop, the main
//! stem, carries all of them. The modules, in the order in which to read them:

#![deny(unsafe_code)]

/// What is asked and answered: plain data. Whatever is admitted is valid.
pub mod request;

/// The typed configuration: read once, checked once, split by consumer.
pub mod config;

/// The live part: intake, prefill, decode, kv, device. Only decode issues device work.
pub mod actors;

/// Logits to token: pure functions.
pub mod decoding;

/// Slots, pages and who holds them: pure bookkeeping.
pub mod memory;

/// What a model is made of, and the one definition of a layer.
pub mod model;

/// Which device holds which part of a model, and how fast that is. Sizes and speeds only.
pub mod planner;

/// The families that ship, as data.
pub mod specs;

/// Bytes to named tensors. Nothing a file says is believed before it is checked.
pub mod formats;

/// The models that are part of the program.
pub mod demo;

/// A hub's models to folders in the hub's cache.
pub mod hub;

/// Text to token ids and back. No half character ever leaves.
pub mod text;

/// HTTP: sees text and requests, never tensors.
pub mod server;

/// Every metric, in one table.
pub mod telemetry;

/// What tests of several modules share.
#[cfg(test)]
mod testing;

/// The command line: one file per subcommand; the only place that names a backend.
pub mod cli;
