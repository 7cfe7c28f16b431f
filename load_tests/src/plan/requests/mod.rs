//! The requests of a load: prompts, output lengths, models, keys, and which clients hang up or read slowly.
//!
//! Invariant: a request is a pure function of the load, its seed and the request's index.

use std::sync::Arc;

use anyhow::ensure;
use serde::Serialize;
use serde_json::{Map, Value};

use super::{
    body::Body,
    lengths::LengthDistribution,
    prompts::{PromptSeed, PromptSource},
    random::{Purpose, RandomStream},
    trace::TraceEntry,
};

/// The definition of a load: the parameters that determine all its requests.
#[derive(Clone, Debug, PartialEq)]
pub struct LoadSpec {
    /// Number of requests.
    pub requests: usize,
    pub prompts: PromptSource,
    /// Tokens per prompt. Ignored with `Prompts::Texts`.
    pub prompt: LengthDistribution,
    /// Output tokens per request; `None` uses the length of the trace or the text, or [`OUTPUT_LEN_FALLBACK`]
    /// if they have none.
    pub output: Option<LengthDistribution>,
    /// Lengths by request index, from a trace with at least one entry; they override `prompt` and `output`. A
    /// trace shorter than the run is repeated.
    pub trace: Option<Arc<[TraceEntry]>>,
    /// Length in tokens (or words) of the prefix shared by the prompts of a group. A random prompt that is
    /// shorter consists of the start of the prefix; a text of a file is appended to the prefix.
    pub shared_prefix: u32,
    /// Number of prefix groups; at least 1.
    pub prefix_groups: u32,
    pub temperature: f32,
    pub seed: u64,
    /// Whether to request the full output length, past end-of-sequence tokens, with `ignore_eos`.
    pub ignore_eos: bool,
    /// Fraction of clients that hang up early, 0 to 1.
    pub hangup_share: f64,
    /// Number of tokens after which they hang up; at least 1.
    pub hangup_after: u32,
    /// Fraction of clients that read slowly, 0 to 1.
    pub slow_share: f64,
    /// Read rate of slow clients in bytes per second.
    pub slow_rate: u32,
    /// Number of models that requests are spread over; at least 1.
    pub models: usize,
    /// Number of API keys; with 0, none is sent.
    pub keys: usize,
}

/// One request of a load.
#[derive(Clone, Debug, PartialEq)]
pub struct Request {
    /// Index in the run, from 0.
    pub index: usize,
    pub prompt: Prompt,
    /// Number of prompt tokens, as far as it is known in advance.
    pub prompt_len: u32,
    /// Number of output tokens to request.
    pub output_len: u32,
    /// Number of tokens after which the client hangs up; `None` reads to the end.
    pub hang_up_after: Option<u32>,
    /// Read rate of the client in bytes per second; `None` is unlimited.
    pub read_rate: Option<u32>,
    /// Index of the model among those of the run.
    pub model: usize,
    /// Index of the API key among those of the run.
    pub key: Option<usize>,
    pub temperature: f32,
    pub seed: u64,
    pub ignore_eos: bool,
}

/// The prompt of a request body.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Prompt {
    Ids(Vec<u32>),
    Text(String),
}

/// The endpoint that requests are sent to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// `/v1/completions`.
    Completions,
    /// `/v1/chat/completions`, with the prompt as one user message. Prompts must be texts.
    Chat,
}

/// Output tokens requested if neither the load nor the text nor the trace gives a number.
pub const OUTPUT_LEN_FALLBACK: u32 = 128;

impl LoadSpec {
    /// Validates the load. Fails when a parameter is invalid, or invalid for this endpoint.
    pub fn check(&self, endpoint: Endpoint) -> anyhow::Result<()> {
        ensure!(self.requests > 0, "there must be at least one request");
        match &self.prompts {
            PromptSource::Ids { vocab } => {
                ensure!(*vocab > 0, "prompts of token ids need a vocabulary of at least 1");
                ensure!(
                    endpoint == Endpoint::Completions,
                    "the chat endpoint requires text prompts: prompts of token ids need the completions \
                     endpoint"
                );
            }
            PromptSource::Words => {}
            PromptSource::Texts(texts) => ensure!(!texts.is_empty(), "there are no texts for prompts"),
        }
        ensure!(self.trace.as_ref().is_none_or(|trace| !trace.is_empty()), "the trace has no entries");
        ensure!(
            self.shared_prefix == 0 || self.prefix_groups > 0,
            "a shared prefix needs at least one group"
        );
        ensure!(
            self.temperature.is_finite() && self.temperature >= 0.0,
            "the temperature must be at least 0"
        );
        ensure!(self.models > 0, "there must be at least one model");
        self.check_clients()
    }

    fn check_clients(&self) -> anyhow::Result<()> {
        let share = 0.0..=1.0;
        ensure!(
            share.contains(&self.hangup_share),
            "the fraction of clients that hang up must be from 0 to 1"
        );
        ensure!(
            self.hangup_share == 0.0 || self.hangup_after > 0,
            "clients must receive at least 1 token before they hang up"
        );
        ensure!(share.contains(&self.slow_share), "the fraction of slow readers must be from 0 to 1");
        ensure!(
            self.slow_share == 0.0 || self.slow_rate > 0,
            "slow readers must read at least 1 byte per second"
        );
        Ok(())
    }

    /// Generates the request of this index. Each property is sampled from its own stream, so that changing
    /// one parameter does not affect the others.
    pub fn request(&self, index: usize) -> Request {
        let entry = self.trace.as_deref().map(|entries| entries[index % entries.len()]);
        let prompt_len = entry.and_then(|entry| entry.prompt_len);
        let prompt_len =
            prompt_len.unwrap_or_else(|| self.prompt.sample(&mut self.stream(Purpose::PromptLength, index)));
        let generated = self.prompts.generate(&self.prompt_seed(index), prompt_len);
        let output_len = entry.and_then(|entry| entry.output_len).or_else(|| self.output_len(index));
        Request {
            index,
            prompt: generated.prompt,
            prompt_len: generated.len,
            output_len: output_len.or(generated.output_len).unwrap_or(OUTPUT_LEN_FALLBACK),
            hang_up_after: self
                .is_in_share(self.hangup_share, Purpose::HangUp, index)
                .then_some(self.hangup_after),
            read_rate: self
                .is_in_share(self.slow_share, Purpose::SlowReader, index)
                .then_some(self.slow_rate),
            model: self.pick(self.models, Purpose::Model, index),
            key: (self.keys > 0).then(|| self.pick(self.keys, Purpose::Key, index)),
            temperature: self.temperature,
            seed: self.seed.wrapping_add(index as u64),
            ignore_eos: self.ignore_eos,
        }
    }

    fn prompt_seed(&self, index: usize) -> PromptSeed {
        let groups = self.prefix_groups.max(1) as usize;
        PromptSeed {
            seed: self.seed,
            index: index as u64,
            group: self.pick(groups, Purpose::Group, index) as u64,
            shared: self.shared_prefix,
        }
    }

    fn output_len(&self, index: usize) -> Option<u32> {
        self.output.map(|output| output.sample(&mut self.stream(Purpose::OutputLength, index)))
    }

    /// Returns whether this request belongs to a random fraction `share` of all.
    fn is_in_share(&self, share: f64, purpose: fn(u64) -> Purpose, index: usize) -> bool {
        self.stream(purpose, index).unit() < share
    }

    /// Picks one of `count` at random. A Poisson process split at random yields Poisson processes; a
    /// round-robin split would make the parts more regular.
    fn pick(&self, count: usize, purpose: fn(u64) -> Purpose, index: usize) -> usize {
        self.stream(purpose, index).between(0, (count - 1) as u32) as usize
    }

    fn stream(&self, purpose: fn(u64) -> Purpose, index: usize) -> RandomStream {
        RandomStream::new(self.seed, purpose(index as u64))
    }
}

impl Request {
    /// Serializes the JSON body of the request. A field of `extra` replaces the standard field of the same
    /// name; null removes it. The load must have been validated for this endpoint with [`LoadSpec::check`].
    pub fn body(&self, endpoint: Endpoint, model: &str, extra: &Map<String, Value>) -> String {
        Body { request: self, endpoint, model, extra }.json()
    }
}

#[cfg(test)]
mod tests;
