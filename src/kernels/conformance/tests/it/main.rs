//! Tests of the backends of `mainstem-kernels`: the conformance suite, and what it cannot check.

mod backends;
mod cpu;
