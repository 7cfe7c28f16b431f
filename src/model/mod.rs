//! Models: their specifications, the origin of their tensors, and the one definition of a transformer layer.
//!
//! Invariant: this module knows the kernels (through their trait) and file formats, and nothing of requests.
//! No model's name decides anything here: a model is the blocks that its specification names.

pub mod provenance;

pub mod spec;

pub mod gguf;

pub mod tensors;

pub mod choose_spec;

pub mod source;

pub mod spec_check;

pub mod synthetic;

pub mod shard;

pub mod partition;

pub mod progress;

pub mod weights;

pub mod load_target;

pub mod offload;

pub mod load;

pub mod rope;

pub mod distances;

pub mod relative_bias;

pub mod tensor_slices;

pub mod activations;

pub mod layer_cache;

mod gemm_terms;

pub mod forward;

mod latent;

pub mod drafter;

pub mod schedule;

pub mod draft_model;

pub mod executor;

pub mod fake;

pub use executor::{Executor, ModelExecutor};
pub use fake::FakeExecutor;
pub use partition::Partition;
pub use shard::Shard;
pub use source::{ModelRef, ModelSource};
pub use spec::ModelSpec;
pub use weights::{Model, TensorRecord};
