//! What is asked for: prompts and output lengths, of whom, and which clients leave early or read slowly.
//!
//! Invariant: a request is a pure function of the load, its seed and the request's index.

use std::sync::Arc;

use anyhow::ensure;
use serde::Serialize;
use serde_json::{Map, Value};

use super::{
    body::Body,
    draws::{Draws, Purpose},
    lengths::Length,
    prompts::{Prompts, Source},
    trace::Entry,
};

/// Everything the requests of a run have in common.
#[derive(Clone, Debug, PartialEq)]
pub struct Load {
    /// Requests in all.
    pub requests: usize,
    pub prompts: Prompts,
    /// Tokens per prompt. Of no matter with [`Prompts::Texts`].
    pub prompt: Length,
    /// Tokens asked for per answer; `None` takes them from the texts or the trace, and where those tell none,
    /// [`OUTPUT_LEN_FALLBACK`].
    pub output: Option<Length>,
    /// Lengths by index, of a trace with at least one entry; an entry's lengths go before the two above. A trace
    /// shorter than the run begins anew.
    pub trace: Option<Arc<[Entry]>>,
    /// Tokens (or words) at the beginning of each prompt that are the same for all of a group. A drawn prompt that
    /// is shorter is cut; a text comes after them.
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

/// Tokens asked for where neither the load nor the text nor the trace says how many.
pub const OUTPUT_LEN_FALLBACK: u32 = 128;

impl Load {
    /// Fails when the load asks what cannot be, at this endpoint or at all.
    pub fn check(&self, endpoint: Endpoint) -> anyhow::Result<()> {
        ensure!(self.requests > 0, "there must be at least one request");
        match &self.prompts {
            Prompts::Ids { vocab } => {
                ensure!(*vocab > 0, "prompts of token ids need a vocabulary of at least 1");
                ensure!(
                    endpoint == Endpoint::Completions,
                    "the chat endpoint takes texts: prompts of token ids need the completions endpoint"
                );
            }
            Prompts::Words => {}
            Prompts::Texts(texts) => ensure!(!texts.is_empty(), "there are no texts for prompts"),
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
        ensure!(self.models > 0, "there must be at least one model to ask");
        self.check_clients()
    }

    fn check_clients(&self) -> anyhow::Result<()> {
        let share = 0.0..=1.0;
        ensure!(share.contains(&self.hangup_share), "the share of clients that leave must be from 0 to 1");
        ensure!(self.hangup_share == 0.0 || self.hangup_after > 0, "clients leave after at least 1 token");
        ensure!(share.contains(&self.slow_share), "the share of slow readers must be from 0 to 1");
        ensure!(self.slow_share == 0.0 || self.slow_rate > 0, "slow readers read at least 1 byte per second");
        Ok(())
    }

    /// The request of this index. Each thing about it is drawn from a stream of its own, so that to change one
    /// changes no other.
    pub fn request(&self, index: usize) -> Request {
        let entry = self.trace.as_deref().map(|entries| entries[index % entries.len()]);
        let prompt_len = entry.and_then(|entry| entry.prompt_len);
        let prompt_len =
            prompt_len.unwrap_or_else(|| self.prompt.draw(&mut self.draws(Purpose::PromptLength, index)));
        let drawn = self.prompts.draw(&self.source(index), prompt_len);
        let output_len = entry.and_then(|entry| entry.output_len).or_else(|| self.output_len(index));
        Request {
            index,
            prompt: drawn.prompt,
            prompt_len: drawn.len,
            output_len: output_len.or(drawn.output_len).unwrap_or(OUTPUT_LEN_FALLBACK),
            hang_up_after: self.share(self.hangup_share, Purpose::HangUp, index).then_some(self.hangup_after),
            read_rate: self.share(self.slow_share, Purpose::SlowReader, index).then_some(self.slow_rate),
            model: self.one_of(self.models, Purpose::Model, index),
            key: (self.keys > 0).then(|| self.one_of(self.keys, Purpose::Key, index)),
            temperature: self.temperature,
            seed: self.seed.wrapping_add(index as u64),
            ignore_eos: self.ignore_eos,
        }
    }

    fn source(&self, index: usize) -> Source {
        let groups = self.prefix_groups.max(1) as usize;
        Source {
            seed: self.seed,
            index: index as u64,
            group: self.one_of(groups, Purpose::Group, index) as u64,
            shared: self.shared_prefix,
        }
    }

    fn output_len(&self, index: usize) -> Option<u32> {
        self.output.map(|output| output.draw(&mut self.draws(Purpose::OutputLength, index)))
    }

    /// Whether this request is of those who are so large a share.
    fn share(&self, share: f64, purpose: fn(u64) -> Purpose, index: usize) -> bool {
        self.draws(purpose, index).unit() < share
    }

    /// One of `count`, at random: of a Poisson process that is divided so, each part is one again; taking turns
    /// would make the parts more regular.
    fn one_of(&self, count: usize, purpose: fn(u64) -> Purpose, index: usize) -> usize {
        self.draws(purpose, index).between(0, (count - 1) as u32) as usize
    }

    fn draws(&self, purpose: fn(u64) -> Purpose, index: usize) -> Draws {
        Draws::new(self.seed, purpose(index as u64))
    }
}

impl Request {
    /// The JSON text of the request's body; the fields of `extra` go before ours: a field of the same name replaces
    /// ours, and one that is null removes it. Needs a load that was checked for this endpoint.
    pub fn body(&self, endpoint: Endpoint, model: &str, extra: &Map<String, Value>) -> String {
        Body { request: self, endpoint, model, extra }.json()
    }
}

#[cfg(test)]
mod tests;
