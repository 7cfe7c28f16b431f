//! APIs of other servers, translated: a request becomes one of the native API, whose answer is translated
//! back, chunk by chunk if it streams.
//!
//! Invariant: a dialect has no scheduling, sampling or parsing of output of its own, and its errors have its
//! own shape, whoever refused the request.

mod dialect;

mod frames;

mod handler;

mod native_body;

mod token_text;

mod anthropic;

pub mod inferflow;

pub mod llama_server;

pub mod ollama;

mod root;

pub mod tgi;

pub mod vllm;

pub mod responses;

mod errors;

pub use anthropic::{CountTokens, Messages};
pub use dialect::{Caller, Dialect};
pub use errors::shape_errors;
pub use frames::Framing;
pub use handler::respond;
pub use responses::Responses;
pub use root::is_of_tgi;
