pub mod draws;

pub mod arrivals;
pub mod lengths;

pub mod dataset;
pub mod prompts;
pub mod trace;

pub mod requests;
