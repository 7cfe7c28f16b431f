//! Tests of instructions, with values worked out from the PTX ISA manual (sections as of version 8.8), and
//! of what the emulator finds.

mod atomics;
mod bits;
mod common;
mod compare;
mod control;
mod convert;
mod float;
mod half;
mod integer;
mod memory;
mod nvrtc;
mod order;
mod refused;
mod tensor;
mod warp;
mod zoo;
