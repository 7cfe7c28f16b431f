//! Settings and samples for tests; times are in milliseconds.
//!
//! Invariant: a sample has the outcome its function is named after, model 0 and index 0.

use std::time::{Duration, SystemTime};

use crate::{
    plan::{
        arrivals::Arrivals,
        lengths::LengthDistribution,
        prompts::PromptSource,
        requests::{Endpoint, LoadSpec},
    },
    run::{Connections, RunRecord, RunSettings, Target},
    sample::{Delivery, FailureKind, Outcome, Sample},
};

/// Returns `ms` milliseconds.
pub fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Returns a completed sample with one token at each of the times: 10 prompt tokens, 3 output tokens
/// requested, ended at the last token.
pub fn completed(scheduled: u64, sent: u64, tokens: &[u64]) -> Sample {
    Sample {
        index: 0,
        model: 0,
        prompt_len: 10,
        requested_output_len: 3,
        output_len: tokens.len() as u32,
        scheduled: ms(scheduled),
        sent: ms(sent),
        ended: ms(*tokens.last().unwrap_or(&sent)),
        retries: 0,
        deliveries: tokens.iter().map(|&at| Delivery::new(ms(at), 1)).collect(),
        outcome: Outcome::Completed,
    }
}

/// Returns a sample rejected with status 500 at once.
pub fn failed(scheduled: u64, sent: u64) -> Sample {
    let failure = FailureKind::Status(500).with_message("out of luck");
    Sample { outcome: Outcome::Failed(failure), ..completed(scheduled, sent, &[]) }
}

/// Returns settings of an open loop at 2 requests per second, with 4 prompt tokens and 2 output tokens.
pub fn settings() -> RunSettings {
    RunSettings {
        label: None,
        target: Target {
            url: "http://localhost:1".into(),
            models: Vec::new(),
            keys: Vec::new(),
            endpoint: Endpoint::Completions,
            extra_body: Default::default(),
            ca: None,
            metrics_url: None,
        },
        load: load(),
        arrivals: Arrivals::Poisson { mean_gap: ms(500) },
        max_concurrency: None,
        retries: 0,
        connections: Connections::New,
        workers: 1,
        warmups: 0,
        request_timeout: ms(1000),
        time_limit: ms(9000),
    }
}

fn load() -> LoadSpec {
    LoadSpec {
        requests: 5,
        prompts: PromptSource::Ids { vocab: 10 },
        prompt: LengthDistribution::Fixed(4),
        output: Some(LengthDistribution::Fixed(2)),
        trace: None,
        shared_prefix: 0,
        prefix_groups: 1,
        temperature: 0.0,
        seed: 9,
        ignore_eos: true,
        hangup_share: 0.0,
        hangup_after: 1,
        slow_share: 0.0,
        slow_rate: 1,
        models: 1,
        keys: 0,
    }
}

/// Returns a run of one model with one unsent request.
pub fn record(samples: Vec<Sample>) -> RunRecord {
    let samples = samples.into_iter().enumerate().map(|(index, sample)| Sample { index, ..sample }).collect();
    RunRecord { models: vec!["m".into()], began: SystemTime::UNIX_EPOCH, samples, unsent: 1, server: None }
}
