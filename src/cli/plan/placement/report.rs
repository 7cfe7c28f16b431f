//! The report of a plan of a placement.
//!
//! Invariant: speeds are predictions; nothing but the machine is measured.

use crate::cli::escape::one_line;
use crate::cli::start::TierSize;
use crate::cli::start::placement::PlacementPlan;
use crate::planner::placement::{
    Bound, ByTier, Objective, PlannedPolicy, Prediction, Route, StepTime, Workload,
};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// The complete plan. Its field names are the keys of the JSON output.
#[derive(Serialize)]
pub struct PlacementReport {
    pub model: String,
    pub parameters: u64,
    pub objective: &'static str,
    pub requests: usize,
    pub prompt: usize,
    pub output: usize,
    /// Tokens of the longest request that the KV cache has room for.
    pub longest_request: usize,
    /// Bytes of memory that are available, of which not all are used.
    pub memory: usize,
    pub tiers: Vec<TierFigures>,
    /// The best policy.
    pub policy: PolicyFigures,
    /// Other policies, the best first.
    pub next_best: Vec<PolicyFigures>,
}

/// A memory or disk that weights and caches lie in.
#[derive(Serialize)]
pub struct TierFigures {
    pub name: &'static str,
    /// Bytes that may be used; null if there is no limit.
    pub bytes: Option<f64>,
    pub read_bytes_per_second: f64,
}

/// A policy with its predictions.
#[derive(Serialize)]
pub struct PolicyFigures {
    /// The configuration keys that it sets.
    pub settings: BTreeMap<&'static str, Value>,
    pub slots: usize,
    pub token_budget: usize,
    pub kv_type: &'static str,
    /// Rule of the number formats of weights; null if the configured ones are kept.
    pub weights: Option<&'static str>,
    /// Bytes that are used of the memory, or of that of devices with their own, and of the host beside these.
    pub memory: f64,
    pub host_memory: f64,
    /// Whether all weights and caches are in the first tier.
    pub resident: bool,
    /// Bytes of the layers' weights, and of their KV caches, by tier.
    pub layer_bytes: Vec<f64>,
    pub cache_bytes: Vec<f64>,
    pub prefill: StepFigures,
    /// Null for a model that generates nothing.
    pub decode: Option<StepFigures>,
    pub job_seconds: f64,
    /// Generated tokens per second of the whole job; of a model that generates none, tokens of prompts.
    pub job_tokens_per_second: f64,
    /// Seconds of one request among others.
    pub request_seconds: f64,
    /// The bound of the rate: `compute`, `memory` bandwidth, a direction of the link, or the disk.
    pub bound: &'static str,
}

/// A predicted step.
#[derive(Serialize)]
pub struct StepFigures {
    pub tokens_per_second: f64,
    pub seconds: f64,
    pub compute_seconds: f64,
    /// Seconds of moving weights and caches over the link of devices, and from and to the disk.
    pub to_device_seconds: f64,
    pub from_device_seconds: f64,
    pub disk_seconds: f64,
}

impl PlacementReport {
    /// Creates the report of a plan for an objective.
    pub fn new(plan: &PlacementPlan, objective: Objective) -> PlacementReport {
        let Workload { requests, prompt, output } = plan.workload;
        let tier = |tier: &TierSize| TierFigures {
            name: tier.name,
            bytes: tier.bytes.is_finite().then_some(tier.bytes),
            read_bytes_per_second: tier.read,
        };
        let mut policies = plan.policies.iter().map(|policy| PolicyFigures::new(plan, policy));
        PlacementReport {
            model: one_line(&plan.model).into_owned(),
            parameters: plan.parameters,
            objective: match objective {
                Objective::Throughput => "throughput",
                Objective::Latency => "latency",
            },
            requests,
            prompt,
            output,
            longest_request: plan.longest().0,
            memory: plan.memory,
            tiers: plan.tiers.iter().map(tier).collect(),
            policy: policies.next().expect("a plan has a policy; anything else is a bug"),
            next_best: policies.collect(),
        }
    }
}

impl PolicyFigures {
    fn new(plan: &PlacementPlan, policy: &PlannedPolicy) -> PolicyFigures {
        let Prediction { prefill, decode, prefill_rate, decode_rate, job_seconds, request_seconds, bound } =
            policy.prediction;
        let Workload { requests, prompt, output } = plan.workload;
        let step = |time: StepTime, tokens_per_second| StepFigures {
            tokens_per_second,
            seconds: time.seconds,
            compute_seconds: time.compute,
            to_device_seconds: time.moved[Route::ToDevice as usize],
            from_device_seconds: time.moved[Route::FromDevice as usize],
            disk_seconds: time.moved[Route::Disk as usize],
        };
        let by_tier = |bytes: ByTier| {
            let of = |tier: &TierSize| match tier.name {
                "host" => bytes.host,
                "disk" => bytes.disk,
                _ => bytes.device,
            };
            plan.tiers.iter().map(of).collect()
        };
        let json = |value| serde_json::to_value(value).unwrap_or_default();
        PolicyFigures {
            settings: plan.settings(policy).into_iter().map(|(key, value)| (key, json(value))).collect(),
            slots: policy.choice.slots,
            token_budget: policy.choice.token_budget,
            kv_type: policy.choice.kv.name(),
            weights: plan.weights(policy),
            memory: policy.fit.memory,
            host_memory: policy.fit.host_memory,
            resident: policy.fit.is_resident(),
            layer_bytes: by_tier(policy.fit.weight_bytes()),
            cache_bytes: by_tier(policy.fit.cache_bytes()),
            prefill: step(prefill, prefill_rate),
            decode: (decode.seconds > 0.0).then(|| step(decode, decode_rate)),
            job_seconds,
            job_tokens_per_second: (requests * if output > 0 { output } else { prompt }) as f64 / job_seconds,
            request_seconds,
            bound: match bound {
                Bound::Compute => "compute",
                Bound::Memory => "memory",
                Bound::Route(Route::ToDevice) => "link_to_device",
                Bound::Route(Route::FromDevice) => "link_from_device",
                Bound::Route(Route::Disk) => "disk",
            },
        }
    }
}
