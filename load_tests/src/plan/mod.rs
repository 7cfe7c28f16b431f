pub mod random;
#[cfg(test)]
mod testing;

pub mod arrivals;
pub mod lengths;

mod files;

pub mod dataset;
pub mod prompts;
pub mod trace;

mod body;
pub mod requests;

mod words;
