//! A model: what it is made of, where its tensors come from, and the one definition of a layer.
//!
//! Invariant: knows kernels (by their trait) and file formats, and no request. No model's name decides
//! anything here: a model is the blocks its specification names.

pub mod provenance;

pub mod spec;

pub mod gguf;

pub mod tensors;

pub mod source;

pub mod synthetic;

pub mod shard;

pub mod partition;

pub mod weights;

pub mod progress;

pub mod load;

pub mod rope;

pub mod distance;

pub mod pieces;

pub mod coding;

pub mod importance;

pub mod quantize;

pub mod activations;

pub mod forward;

pub mod schedule;

pub mod executor;

pub mod fake;

pub use executor::{Executor, ModelExecutor};
pub use fake::FakeExecutor;
pub use load::{Model, TensorRecord};
pub use partition::Partition;
pub use shard::Shard;
pub use source::{ModelRef, ModelSource};
pub use spec::ModelSpec;
