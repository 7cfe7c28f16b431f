//! Memory of a device with what is known about every byte: whether it was written, and who accessed it last.

mod clocks;
mod global;
mod region;

pub(crate) use clocks::{CtaClock, Epochs, Known};
pub(crate) use global::{Fault, GlobalMemory, device_of};
pub(crate) use region::{Access, Actor, Clash, Region};
