//! No CPU but an x86-64 has AMX.
//!
//! Invariant: there is no [`Amx`].

/// Proof of what is not there.
#[derive(Clone, Copy)]
pub enum Amx {}
