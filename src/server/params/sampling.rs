//! Sampling parameters of a request: those of all strategies, and the seed.
//!
//! Invariant: the choices of a request share one plan, and each has a seed of its own. The device draws what
//! it can; otherwise the host does.

use crate::actors::ModelSampling;
use crate::decoding::SamplingPlan;
use crate::decoding::strategies::ParamError;
use crate::request::{Request, Sampling};
use crate::server::access::random;
use crate::server::error::ApiError;
use crate::server::fields::Fields;
use crate::telemetry;
use serde_json::Value;
use std::sync::Arc;

/// The sampling of a request's choices, with defaults filled in.
#[derive(Clone, Debug)]
pub struct RequestSampling {
    plan: Arc<SamplingPlan>,
    /// Seed of the first choice.
    seed: u64,
    /// Whether the request itself has a minimum number of tokens.
    has_min_tokens: bool,
}

impl RequestSampling {
    /// Parses the sampling parameters. `stop_ids` are the request's own stop tokens.
    pub(super) fn parse(
        fields: &mut Fields,
        model: &ModelSampling,
        ignore_eos: bool,
        stop_ids: &[u32],
    ) -> Result<RequestSampling, ApiError> {
        let seed = fields.take_with("seed", "a 64-bit integer", |value| {
            value.as_u64().or_else(|| value.as_i64().map(|seed| seed as u64))
        })?;
        let params = fields.take_all(SamplingPlan::param_names());
        let pairs = params.iter().map(|(name, value): &(&str, Value)| (*name, value));
        let plan = model.plan(pairs, ignore_eos, stop_ids)?;
        Ok(RequestSampling {
            plan: Arc::new(plan),
            seed: seed.unwrap_or_else(random),
            has_min_tokens: params.iter().any(|(name, _)| ["min_tokens", "min_new_tokens"].contains(name)),
        })
    }

    /// Returns the names of the strategies that are on.
    pub fn strategies(&self) -> &[&'static str] {
        self.plan.active()
    }

    /// Sets the sampling of the engine request for a choice, whose `max_tokens` are set.
    pub fn apply(&self, choice: u32, request: Request) -> Request {
        let seed = self.seed.wrapping_add(choice.into());
        // A default does not apply to a request that is shorter.
        let most = if self.has_min_tokens { u32::MAX } else { request.max_tokens };
        let min_tokens = self.plan.min_tokens().min(most);
        let Some(device) = self.plan.device() else {
            let sampling = Sampling { seed, ..Sampling::GREEDY };
            return Request { min_tokens, sampling, plan: Some(self.plan.clone()), ..request };
        };
        let (temperature, top_k, top_p, min_p) =
            (device.temperature, device.top_k, device.top_p, device.min_p);
        let sampling = Sampling { temperature, top_k, top_p, min_p, seed };
        Request { min_tokens, sampling, logit_bias: self.plan.logit_bias().clone(), ..request }
    }

    /// Counts the request in the metric of strategies.
    pub fn count(&self) {
        self.strategies().iter().for_each(|name| telemetry::REQUESTS_BY_STRATEGY.count([*name]));
    }
}

impl From<ParamError> for ApiError {
    fn from(error: ParamError) -> ApiError {
        let message = format!("'{}' {}", error.param, error.rest());
        ApiError::invalid(error.param, message)
    }
}
