//! Integration tests: one binary, a module for each subject.

mod common;

mod boundaries;
mod cli;
mod faults;
mod http;
mod load;
mod oracle;
mod policies;
mod properties;
mod scheduling;
