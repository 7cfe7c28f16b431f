//! The typed program that warps execute: PTX's instructions with registers by index, constants in a pool,
//! and the function of every arithmetic form chosen.

mod alu;
mod control;
mod conversions;
mod form;
mod lower;
mod memory;
mod moves;
mod op;
mod operands;
mod scope;
mod tensor;
mod warp;

pub(crate) use lower::{Addresses, Placement, device_variables, lower};
pub(crate) use op::*;

/// First generic address of shared memory; its lower 32 bits are zeros, so that the lower half of a generic
/// address is the address in the space.
pub(crate) const SHARED_WINDOW: u64 = 0x7f01_0000_0000;
/// First generic address of local memory.
pub(crate) const LOCAL_WINDOW: u64 = 0x7f02_0000_0000;
/// First generic address of kernel parameters.
pub(crate) const PARAM_WINDOW: u64 = 0x7f03_0000_0000;
/// Addresses of device functions: this and their index.
pub(crate) const FUNCTION_WINDOW: u64 = 0x7f04_0000_0000;
/// Bytes of each window.
pub(crate) const WINDOW: u64 = 1 << 32;
