//! Integration tests: one binary, a module for each subject.

mod common;
mod coverage;
mod program;

mod bench;
mod boundaries;
mod cli;
mod endings;
mod endpoints;
mod fake_device;
mod families;
mod faults;
mod gguf;
mod group;
mod http;
mod hub;
mod inspect;
mod kinds;
mod lanes;
mod load;
mod models;
mod monitoring;
mod names;
mod oracle;
mod parted;
mod partition_config;
mod partitions;
mod pickles;
mod policies;
mod properties;
mod run;
mod scenarios;
mod scheduling;
mod security;
mod streams;
mod weights;
