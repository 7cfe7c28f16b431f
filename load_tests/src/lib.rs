//! The load tester: sends planned requests to an OpenAI-compatible server and measures what comes back.
//!
//! Invariant: when a request is sent depends on the plan alone, never on how the server does.

pub mod draws;

pub mod arrivals;
pub mod requests;

pub mod sse;

pub mod client;

pub mod run;

pub mod measure;
pub mod report;
