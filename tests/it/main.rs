//! Integration tests: one binary, a module for each subject.

mod common;
mod program;

mod bench;
mod boundaries;
mod cli;
mod endings;
mod fake_device;
mod faults;
mod http;
mod hub;
mod inspect;
mod load;
mod models;
mod monitoring;
mod oracle;
mod pickles;
mod policies;
mod properties;
mod run;
mod scenarios;
mod scheduling;
mod security;
mod streams;
