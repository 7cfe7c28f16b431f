//! Mainstem serves transformer models. All running requests share one decode loop, which batches their tokens
//! into common steps. The modules, in suggested reading order:

#![deny(unsafe_code)]

/// Requests and their results as plain data. An admitted request is valid.
pub mod request;

/// Typed configuration: read once, checked once, split by consumer.
pub mod config;

/// Actors of a running engine: intake, prefill, decode, kv, device. Only decode issues device work.
pub mod actors;

/// Token selection: pure functions from logits to tokens.
pub mod decoding;

/// Bookkeeping of slots and KV pages and their owners, without I/O or device memory.
pub mod memory;

/// Model specifications, weights, and the single definition of a transformer layer.
pub mod model;

/// Conversion of weights to other number formats: rules, rounding, and the importance matrix of a text.
pub mod quantize;

/// Writes a model in other number formats.
pub mod export;

/// Names of tensors and patterns of such names.
pub mod tensor_names;

/// Partition planning: which device holds which part of a model, and the predicted speed. Works on sizes and
/// speeds only.
pub mod planner;

/// Specifications of the built-in model families, as data.
pub mod specs;

/// File formats: bytes to named tensors. Everything that a file states is checked before use.
pub mod formats;

/// Demo models compiled into the binary.
pub mod demo;

/// Hub downloads: fetches a hub's model into a folder of the hub cache.
pub mod hub;

/// Tokenization: text to token ids and back. Partial UTF-8 characters are never emitted.
pub mod text;

/// HTTP server. It handles text and requests, never tensors.
pub mod server;

/// Metrics, in one table, and the log.
pub mod telemetry;

/// Helpers shared by the tests of several modules.
#[cfg(test)]
mod testing;

/// Command line: one module per subcommand. The only place that names a concrete backend.
pub mod cli;
