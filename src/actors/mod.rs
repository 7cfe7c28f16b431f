//! The actors between a request's arrival and its last token: intake, prefill, the KV manager, the decode
//! loops and the device group.
//!
//! Invariant: messages are plain data, each piece of state has one owner, and only the decode loops issue
//! device work.

pub mod stream;

pub mod account;

mod bucket;

pub mod queue;

pub mod response_memory;

pub mod limits;

pub mod intake;

pub mod prefill;

mod prefix_rules;

pub mod kv;

pub mod sequence;

mod speculator;

pub mod decode;

mod loop_metrics;

pub mod group;

pub mod device;

pub mod step;

pub mod request_metrics;

pub mod reply;

pub mod status;

pub mod live;

pub mod prompting_defaults;

pub mod classifier;

mod model_sampling;

pub mod speculation;

pub mod engine;

#[cfg(test)]
mod testing;

pub use crate::model::spec::Kind;
pub use engine::{Engine, EngineSetup, ModelInfo};
pub use live::{LiveTotals, LiveView, Watcher};
pub use model_sampling::ModelSampling;
pub use prefix_rules::PrefixRules;
pub use prompting_defaults::{EmbeddingDefaults, EncoderDecoderPrompting, PromptingDefaults};
pub use status::Status;
pub use stream::{EventSender, IntakeHandle, Submit, TokenStream};
