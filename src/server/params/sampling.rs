//! Sampling parameters of a request: those of all strategies, and the seed. Of them, a beam search has a
//! minimum length only.
//!
//! Invariant: the choices of a request share one plan, and each has a seed of its own. The device draws what
//! it can; otherwise the host does.

use super::beams::NO_USE;
use crate::actors::ModelSampling;
use crate::decoding::SamplingPlan;
use crate::decoding::strategies::{DeviceSampling, LogprobsMode, ParamError};
use crate::request::{AcceptanceRule, Request, Sampling, Speculation};
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
    /// The plan without minimum length, for choices that are shorter than a default minimum.
    short_plan: Option<Arc<SamplingPlan>>,
    /// Seed of the first choice.
    seed: u64,
    /// Whether a beam search finds the tokens, so that of the plan only the minimum length applies.
    is_search: bool,
}

impl RequestSampling {
    /// Parses the sampling parameters. `limit` is the request's maximum number of tokens, with its name.
    /// `stop_ids` are the request's own stop tokens. A beam search is refused beside parameters that change
    /// what is drawn; default parameters do not apply to it.
    pub(super) fn parse(
        fields: &mut Fields,
        model: &ModelSampling,
        is_search: bool,
        (limit, limit_name): (Option<u32>, &str),
        ignore_eos: bool,
        stop_ids: &[u32],
    ) -> Result<RequestSampling, ApiError> {
        // llama.cpp and vLLM take -1 for a random seed.
        let seed = fields.take_with("seed", "a 64-bit integer", |value| match value.as_i64() {
            Some(-1) => Some(random()),
            seed => value.as_u64().or(seed.map(|seed| seed as u64)),
        })?;
        let params = fields.take_all(SamplingPlan::param_names());
        let pairs = || params.iter().map(|(name, value): &(&str, Value)| (*name, value));
        let plan = model.plan(pairs(), ignore_eos, stop_ids)?;
        if is_search {
            check_plain(model, &params)?;
        }
        let min_tokens = plan.min_tokens();
        let is_short = limit.map(|limit| limit < min_tokens);
        let own_minimum = params.iter().find(|(name, _)| ["min_tokens", "min_new_tokens"].contains(name));
        let short_plan = match (own_minimum, is_short) {
            (Some((name, _)), Some(true)) => {
                let most = limit.unwrap_or_default();
                let message = format!("'{name}' is {min_tokens} but '{limit_name}' is {most}");
                return Err(ApiError::invalid(*name, message));
            }
            (Some(_), _) | (None, Some(false)) => None,
            (None, _) if min_tokens == 0 => None,
            // Without a limit, it depends on the prompt whether a choice is shorter.
            (None, _) => {
                Some(model.plan(pairs().chain([("min_tokens", &0.into())]), ignore_eos, stop_ids)?)
            }
        };
        Ok(RequestSampling {
            plan: Arc::new(plan),
            short_plan: short_plan.map(Arc::new),
            seed: seed.unwrap_or_else(random),
            is_search,
        })
    }

    /// Returns the names of the strategies that are on.
    fn strategies(&self) -> &[&'static str] {
        if self.is_search { &["beam_search"] } else { self.plan.active() }
    }

    /// Returns the rule by which drafts are accepted if the request asks for `rule`.
    pub fn acceptance(&self, rule: AcceptanceRule) -> AcceptanceRule {
        self.plan.acceptance(rule)
    }

    /// Sets the sampling of the engine request for a choice, of which everything else is set.
    pub fn apply(&self, choice: u32, request: Request) -> Request {
        let seed = self.seed.wrapping_add(choice.into());
        // A default minimum does not apply to a choice that is shorter.
        let is_short = request.max_tokens < self.plan.min_tokens();
        let plan = self.short_plan.as_ref().filter(|_| is_short).unwrap_or(&self.plan);
        let min_tokens = plan.min_tokens();
        if self.is_search {
            return Request { min_tokens, ..request };
        }
        let on_host = |it: Speculation| {
            request.constraint.is_some() || plan.acceptance(it.rule) != AcceptanceRule::Coupled
        };
        // Masks of drafts, penalties by them, and rules that compare probabilities, are the host's part.
        let is_drawn = |device: &DeviceSampling| {
            !request.speculation.is_some_and(|it| !device.penalties.is_none() || on_host(it))
        };
        let Some(device) = plan.device().filter(is_drawn) else {
            let sampling = Sampling { seed, ..Sampling::GREEDY };
            return Request { min_tokens, sampling, plan: Some(plan.clone()), ..request };
        };
        let DeviceSampling { temperature, top_k, top_p, min_p, penalties } = device;
        let sampling = Sampling { temperature, top_k, top_p, min_p, penalties, seed };
        Request { min_tokens, sampling, logit_bias: plan.logit_bias().clone(), ..request }
    }

    /// Counts the request in the metric of strategies.
    pub fn count(&self) {
        self.strategies().iter().for_each(|name| telemetry::REQUESTS_BY_STRATEGY.count([*name]));
    }
}

/// Returns an error that names the first parameter that changes how tokens are chosen.
fn check_plain(model: &ModelSampling, params: &[(&str, Value)]) -> Result<(), ApiError> {
    let is_plain = |params: &[(&str, Value)]| {
        let pairs = params.iter().map(|(name, value)| (*name, value));
        let plan = model.plan_without_defaults(pairs)?;
        let is_plain = |name: &&str| ["sample", "greedy", "min_tokens"].contains(name);
        Ok(plan.logprobs_mode() == LogprobsMode::Raw && plan.active().iter().all(is_plain))
    };
    if is_plain(params)? {
        return Ok(());
    }
    let changes =
        |param: &&(&str, Value)| matches!(is_plain(std::slice::from_ref(param)), Ok::<_, ParamError>(false));
    let (name, _) = params.iter().find(changes).unwrap_or(&params[0]);
    Err(ApiError::invalid(*name, format!("'{name}' {NO_USE}")))
}

impl From<ParamError> for ApiError {
    fn from(error: ParamError) -> ApiError {
        let message = format!("'{}' {}", error.param, error.rest());
        ApiError::invalid(error.param, message)
    }
}
