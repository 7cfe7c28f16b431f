//! The load tester against servers on real TCP: good ones, broken ones, stalled ones.
//!
//! Invariant: servers wait for events, never for time; a client that would wait for ever is cut off by its own
//! timeout.

mod support;

mod answers;
mod connections;
mod loops;
mod program;
mod service;
