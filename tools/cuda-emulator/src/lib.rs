//! A library with the CUDA driver's interface that executes PTX on the CPU, for tests on machines without a
//! GPU.

#![deny(unsafe_code)]

mod arith;
mod driver;
mod exec;
mod findings;
mod machine;
mod memory;
mod mma;
mod program;
mod ptx;

pub use driver::{findings, reset};
pub use findings::{Finding, Kind};
pub use machine::{Machine, Module, Params, Report, Shape, kinds};
pub use ptx::PtxError;
