//! Tests of speculative decoding, as far as it needs no device.
//!
//! Invariant: seeds are fixed, so every statistic is a fixed number that is either within its bound or not.

mod depth;

mod lookup;

mod rules;
