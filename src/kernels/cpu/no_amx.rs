//! Replacement of the AMX module on architectures other than x86-64, which have no AMX.
//!
//! Invariant: no value of [`Amx`] exists.

/// Proof that this CPU has AMX; it has no values on this architecture.
#[derive(Clone, Copy)]
pub enum Amx {}
