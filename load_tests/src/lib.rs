//! The load tester: sends planned requests to an OpenAI-compatible server and measures what comes back.
//!
//! Invariant: in an open loop, when a request is sent depends on the plan alone, never on how the server does.

/// What is asked for and when: fixed before the first request is sent.
pub mod plan;

pub mod sample;

/// One request on the wire.
pub mod client;

pub mod run;

pub mod scrape;

pub mod measure;

/// The figures of a run, and every form they leave in.
pub mod report;

pub mod sweep;

/// The papers' protocols: a server for each variant, one report of all.
pub mod scenario;

#[cfg(test)]
mod testing;
