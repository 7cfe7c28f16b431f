//! Tests of the load tester against TCP servers: correct, broken and stalled ones.
//!
//! Invariant: servers wait for events, never for time; a client that would wait forever ends by its own
//! timeout.

mod support;

mod answers;
mod connections;
mod loops;
mod program;
mod service;
