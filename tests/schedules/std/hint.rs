//! `std::hint`, without an effect of spinning: the clock ends it.

pub use ::std::hint::*;

/// Does nothing. It does not yield, so that a thread may spin as long as it likes before another one runs.
pub fn spin_loop() {}
