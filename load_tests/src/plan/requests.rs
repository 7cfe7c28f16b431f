//! What is asked for: random prompts and output lengths, and which clients leave early.
//!
//! Invariant: a request is a pure function of the load, its seed and the request's index.

use std::sync::Arc;

use serde::Serialize;
use serde_json::{Map, Value};

use super::{lengths::Length, prompts::Prompts, trace::Entry};

/// Everything the requests of a run have in common.
#[derive(Clone, Debug, PartialEq)]
pub struct Load {
    /// Requests in all.
    pub requests: usize,
    pub prompts: Prompts,
    /// Tokens per prompt. Of no matter with [`Prompts::Texts`].
    pub prompt: Length,
    /// Tokens asked for per answer; `None` takes them from the texts or the trace.
    pub output: Option<Length>,
    /// Lengths by index, of a trace; an entry's lengths go before the two above.
    pub trace: Option<Arc<[Entry]>>,
    /// Tokens (or words) at the beginning of each prompt that are the same for all of a group.
    pub shared_prefix: u32,
    /// How many such groups there are; at least 1.
    pub prefix_groups: u32,
    pub temperature: f32,
    pub seed: u64,
    /// Answers go on to their length past end-of-sequence tokens, where the server knows `ignore_eos`.
    pub ignore_eos: bool,
    /// Share of the clients that leave early, 0 to 1.
    pub hangup_share: f64,
    /// Tokens after which they leave; at least 1.
    pub hangup_after: u32,
    /// Share of the clients that read slowly, 0 to 1.
    pub slow_share: f64,
    /// Bytes per second that they read.
    pub slow_rate: u32,
    /// How many models requests are spread over; at least 1.
    pub models: usize,
    /// How many keys; 0 sends none.
    pub keys: usize,
}

/// One request, ready to be sent.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Its place in the run, from 0.
    pub index: usize,
    pub prompt: Prompt,
    /// Tokens of the prompt, as far as they are known beforehand.
    pub prompt_len: u32,
    /// Tokens asked for.
    pub output_len: u32,
    /// The client leaves when it has this many tokens; `None` stays to the end.
    pub hang_up_after: Option<u32>,
    /// Bytes per second that the client reads; `None` reads all that comes.
    pub read_rate: Option<u32>,
    /// Which of the run's models it asks.
    pub model: usize,
    /// Which of the run's keys it shows.
    pub key: Option<usize>,
    pub temperature: f32,
    pub seed: u64,
    pub ignore_eos: bool,
}

/// What is sent as the prompt.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Prompt {
    Ids(Vec<u32>),
    Text(String),
}

/// Which endpoint is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/completions`.
    Completions,
    /// `/v1/chat/completions`, the prompt as one user's message. Prompts are texts.
    Chat,
}

impl Load {
    /// The request of this index.
    pub fn request(&self, _index: usize) -> Request {
        todo!()
    }
}

impl Request {
    /// The JSON text of the request's body; the fields of `extra` go before ours.
    pub fn body(&self, _endpoint: Endpoint, _model: &str, _extra: &Map<String, Value>) -> String {
        todo!()
    }
}
