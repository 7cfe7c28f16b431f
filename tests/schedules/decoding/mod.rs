//! The host's part of sampling, with strategies that count.

#[path = "../../../src/decoding/host/mod.rs"]
pub mod host;
pub mod scenarios;
pub mod speculation;
pub mod strategies;
