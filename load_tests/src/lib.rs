//! The load tester: sends planned requests to an OpenAI-compatible server and measures the responses.
//!
//! Invariant: in an open loop, send times depend only on the plan, never on the server's speed.

/// The load plan: the requests and their due times, fixed before the first request is sent.
pub mod plan;

pub mod sample;

/// The HTTP client: one request on the wire.
pub mod client;

pub mod run;

pub mod scrape;

pub mod measure;

/// The report of a run and its output formats.
pub mod report;

pub mod sweep;

/// Experiments of papers: a server for each variant, and one report.
pub mod scenario;

pub mod soak;

#[cfg(test)]
mod testing;
