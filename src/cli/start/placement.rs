//! Plans of the placement on this machine: how many sequences run at once, and which weights and KV caches
//! stay in which memory.
//!
//! Invariant: the memory of a policy is counted by the functions that the start of the engine uses.

use super::cache_sizes::CacheSizes;
use super::choice_memory::{Memories, MemoryCounter, batch_rows, candidate};
use super::machine::{KnownRates, RateNeeds, planned_devices};
use super::memory::contexts;
use super::planned_tiers::{TierSettings, TierSize, links, tiers};
use super::tiers::parameter_count;
use super::{attach_draft, configured_model, open_source, open_tokenizer, partition};
use crate::actors::engine::available_memory;
use crate::cli::spinner::Spinner;
use crate::config::{
    Config, LaneCount, POLICY_VERSION, Placement, PlacementPolicy, PolicyPrediction, PolicyWorkload,
    TierRule, parse_bytes,
};
use crate::model::{ModelSource, ModelSpec, Shard};
use crate::planner::placement::{
    Choice, DiskRates, MachineRates, ModelCost, Objective, PlacementProblem, PlannedPolicy, Prediction,
    Variant, Workload, slot_counts, token_budgets,
};
use crate::quantize::WeightRules;
use anyhow::{Context, Result, anyhow, ensure};
use mainstem_kernels::QuantType;
use toml::Value;
use tracing::{info, warn};

/// Fraction of the memory that weights, cache and steps may take. The rest is for the program itself, its
/// tokenizer, requests and responses, and for other processes.
const USABLE: f64 = 0.85;

/// Requests of a plan that names none: their number, and the tokens of a prompt and of an answer.
const WORKLOAD: Workload = Workload { requests: 256, prompt: 512, output: 128 };

/// Formats of weights that a plan may choose, in the order of preference.
const COMPRESSED_WEIGHTS: [&str; 2] = ["q8", "q4"];

/// Formats of the KV cache that a plan may choose.
const COMPRESSED_KV: [QuantType; 2] = [QuantType::Q8_0, QuantType::G4_B64];

/// Number of policies that are searched, and of those that a plan has.
const SEARCHED: usize = 48;
const LISTED: usize = 4;

/// The question that a plan answers.
#[derive(Clone, Copy, Debug)]
pub struct PlacementRequest {
    /// Bytes of memory; `None` is what is available.
    pub memory: Option<usize>,
    /// Rates of the disk instead of the measured ones.
    pub disk: Option<DiskRates>,
    /// `None` is the usual one.
    pub workload: Option<Workload>,
    /// Maximum tokens of a prompt and of an answer; `None` is what the context has room for.
    pub longest: Option<[usize; 2]>,
    pub objective: Objective,
    /// Maximum seconds of a step of decoding.
    pub max_token_seconds: Option<f64>,
    /// Whether formats with fewer bits may be chosen for weights and cache.
    pub allow_compression: bool,
    /// Whether the machine is measured again.
    pub measure: bool,
}

impl PlacementRequest {
    /// Most tokens per second in the available memory.
    pub const THROUGHPUT: PlacementRequest = PlacementRequest {
        memory: None,
        disk: None,
        workload: None,
        longest: None,
        objective: Objective::Throughput,
        max_token_seconds: None,
        allow_compression: false,
        measure: false,
    };
}

/// A plan.
pub struct PlacementPlan {
    pub model: String,
    pub parameters: u64,
    pub workload: Workload,
    /// Bytes of memory that were available.
    pub memory: usize,
    /// The memories and the disk, the fastest first.
    pub tiers: Vec<TierSize>,
    pub rates: MachineRates,
    /// The best policies that differ in more than the rows of a step; at least one, the best first.
    pub policies: Vec<PlannedPolicy>,
    variants: Vec<Variant>,
    batch_rows: usize,
    cache: CacheSizes,
    /// Whether devices have memory of their own.
    has_own_memory: bool,
    /// Tokens of the longest request, for which the cache may be too small.
    longest: usize,
}

/// The sizes of a job's requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobSizes {
    /// Requests of equal sizes that are together as large.
    pub workload: Workload,
    /// Maximum tokens of a prompt and of an answer.
    pub longest: [usize; 2],
}

impl PlacementPlan {
    /// Plans the placement of a model that is open, for the configured device.
    pub fn new(
        config: &Config,
        source: &mut ModelSource,
        request: &PlacementRequest,
    ) -> Result<PlacementPlan> {
        let tiers = &config.tiers;
        for (key, is_set) in [
            ("tiers.rule", tiers.rule != TierRule::Even),
            ("tiers.overrides", !tiers.overrides.is_empty()),
            ("tiers.cpu_moe", tiers.cpu_moe),
            ("tiers.attend_on", tiers.attends_on_host),
        ] {
            ensure!(!is_set, "{key}: the placement of weights cannot be planned with it");
        }
        planned_devices(&config.device)?;
        let rules = source.weight_rules.clone();
        let (offload, cache_offload) = (source.offload.clone(), source.cache_offload.clone());
        let planned = PlacementPlan::search(config, source, request, &rules);
        (source.weight_rules, source.offload, source.cache_offload) = (rules, offload, cache_offload);
        planned
    }

    fn search(
        config: &Config,
        source: &mut ModelSource,
        request: &PlacementRequest,
        rules: &WeightRules,
    ) -> Result<PlacementPlan> {
        let (parameters, model) = (parameter_count(source), source.name());
        let workload = workload(config, source, request.workload)?;
        let kvs = kv_types(config, request);
        let variants = variants(config, source, request)?;
        let memory = request.memory.unwrap_or_else(available_memory);
        let reserved = config.tiers.reserved.unwrap_or(0);
        let usable = (memory as f64 * USABLE).min(memory.saturating_sub(reserved) as f64);
        let cache = CacheSizes::new(config, source, &workload, request.longest);
        let mut counter = MemoryCounter::new(config, source, &variants, rules, cache);
        let costs = || variants.iter().flat_map(|variant| &variant.stages);
        let needs = RateNeeds {
            formats: costs().flat_map(ModelCost::formats).collect(),
            attention: kvs
                .iter()
                .flat_map(|kv| costs().flat_map(|cost| cost.attention_shapes(*kv)))
                .collect(),
            // Unless there is twice as much memory as weights, these may have to be read.
            disk: request.disk.is_none()
                && counter.least(&smallest(config)).is_none_or(|least| least.with_layers(2.0) > usable),
        };
        let rates = measured_rates(config, &needs, request)?;
        let links = links(config, &rates);
        let device = config.device.memory.map(|bytes| bytes as f64);
        let memories = Memories { usable, device, has_disk: links.disk.is_some() };
        let problem = PlacementProblem {
            variants: &variants,
            choices: choices(config, &variants, &kvs, &workload),
            workload,
            objective: request.objective,
            max_token_seconds: request.max_token_seconds,
            rates: &rates,
            links,
            page: config.kv.page_size,
        };
        // Caches of devices with memory of their own may be elsewhere.
        if device.is_none() {
            counter.shorten_to(&memories, &problem);
        }
        let found = problem.search(SEARCHED, |choice| counter.fits(choice, &memories));
        let mut policies: Vec<PlannedPolicy> = Vec::new();
        for policy in found {
            let is_new = policies.iter().all(|other| !is_alike(&other.choice, &policy.choice));
            policies.extend((is_new && policies.len() < LISTED).then_some(policy));
        }
        if policies.is_empty() {
            return Err(failure(&mut counter, config, (memory, &memories), request));
        }
        let tiers = tiers(config, &rates, &memories, &links);
        let (longest, cache, batch_rows) = (cache.longest(), counter.cache, batch_rows(config));
        Ok(PlacementPlan {
            model,
            parameters,
            workload,
            memory,
            tiers,
            rates,
            policies,
            variants,
            batch_rows,
            cache,
            has_own_memory: device.is_some(),
            longest,
        })
    }

    /// Returns the tokens of the longest request that the KV cache has room for, whatever the policy, and
    /// those that it was to have room for.
    pub fn longest(&self) -> (usize, usize) {
        (self.cache.longest(), self.longest)
    }

    /// Returns the number format rule of a policy's weights; `None` if the configured one is kept.
    pub fn weights(&self, policy: &PlannedPolicy) -> Option<&'static str> {
        self.variants[policy.choice.variant].weights
    }

    /// Returns the settings of a policy.
    pub fn settings(&self, policy: &PlannedPolicy) -> Vec<(&'static str, Value)> {
        let Choice { kv, slots, token_budget, .. } = policy.choice;
        let number = |number: usize| Value::Integer(number as i64);
        let mut settings = vec![
            ("scheduler.slots", number(slots)),
            ("scheduler.token_budget", number(token_budget)),
            ("scheduler.batch_rows", number(self.batch_rows)),
        ];
        if let Some(tokens) = self.cache.tokens(slots) {
            settings.push(("kv.type", kv.name().into()));
            settings.push(("kv.size", format!("{tokens} tokens").into()));
        }
        let tiers = TierSettings::new(&policy.fit.weights, &policy.fit.caches, self.has_own_memory);
        let amount = |bytes: Option<u64>| bytes.map_or("all".into(), |bytes| Value::Integer(bytes as i64));
        settings.extend(tiers.0.into_iter().map(|(key, bytes)| (key, amount(bytes))));
        settings.extend(self.weights(policy).map(|rule| ("model.weights", rule.into())));
        settings
    }

    /// Returns what the file of a policy says apart from its settings.
    pub fn policy(&self, policy: &PlannedPolicy) -> PlacementPolicy {
        let Workload { requests, prompt, output } = self.workload;
        let Prediction { prefill_rate, decode_rate, job_seconds, request_seconds, .. } = policy.prediction;
        PlacementPolicy {
            version: POLICY_VERSION,
            model: self.model.clone(),
            parameters: self.parameters,
            workload: PolicyWorkload { requests, prompt, output },
            predicted: PolicyPrediction {
                prefill_tokens_per_second: prefill_rate,
                decode_tokens_per_second: decode_rate,
                job_seconds,
                request_seconds,
                memory_bytes: (policy.fit.memory + policy.fit.host_memory) as u64,
            },
        }
    }

    /// Returns the configuration with a policy.
    fn applied(&self, config: &Config, policy: &PlannedPolicy) -> Config {
        let rules = &config.model.weights;
        let mut config = candidate(config, &policy.choice, &self.variants, rules, &self.cache);
        TierSettings::new(&policy.fit.weights, &policy.fit.caches, self.has_own_memory).apply(&mut config);
        config.tiers.placement = Placement::Configured;
        config.tiers.policy = Some(self.policy(policy));
        config
    }
}

/// Returns whether two choices differ in the rows of a step only.
fn is_alike(a: &Choice, b: &Choice) -> bool {
    (a.variant, a.kv, a.slots) == (b.variant, b.kv, b.slots)
}

/// Plans the placement if the configuration says so, and returns the configuration with the best policy. The
/// models are fetched already. `job` has the sizes of the requests; `None` is the usual ones.
pub fn with_placement(config: Config, job: Option<JobSizes>) -> Result<Config> {
    if config.tiers.placement == Placement::Configured {
        return Ok(config);
    }
    let mut source = {
        let _spinner = Spinner::start("opening the model");
        open_for_plan(&config)?
    };
    let workload = job.map(|job| shortened(job.workload, contexts(&config, &source)));
    let request =
        PlacementRequest { workload, longest: job.map(|job| job.longest), ..PlacementRequest::THROUGHPUT };
    let plan = PlacementPlan::new(&config, &mut source, &request)?;
    let best = plan.policies.first().context("a plan has a policy; anything else is a bug")?;
    let settings = plan.settings(best);
    let settings: Vec<String> = settings.iter().map(|(key, value)| format!("{key} = {value}")).collect();
    info!("planned placement: {}", settings.join(", "));
    let (longest, wanted) = plan.longest();
    if longest < wanted {
        warn!(
            "memory is short: the KV cache has room for requests of {longest} tokens, not of {wanted}; \
             longer ones may be refused or cut short (kv.max_context)"
        );
    }
    Ok(plan.applied(&config, best))
}

/// Opens the configured model, with its draft model, without deciding what stays in memory.
pub fn open_for_plan(config: &Config) -> Result<ModelSource> {
    let mut source = open_source(&configured_model(&config.model)?, &config.model)?;
    if config.speculation.draft_model().is_some() {
        let tokenizer = open_tokenizer(&source)?;
        attach_draft(&config.speculation, &mut source, &tokenizer)?;
    }
    Ok(source)
}

/// Returns a workload whose requests are short enough for a model.
fn shortened(workload: Workload, [context, encoder]: [usize; 2]) -> Workload {
    let prompt = if encoder > 0 { encoder } else { context - context / 4 };
    let output = if encoder > 0 { context.saturating_sub(1) } else { context / 4 };
    let Workload { requests, prompt: own, output: answer } = workload;
    Workload { requests, prompt: own.min(prompt), output: answer.min(output) }
}

/// Returns the requests of a plan that names none.
pub fn usual_workload(config: &Config, source: &ModelSource) -> Workload {
    shortened(WORKLOAD, contexts(config, source))
}

/// Returns the requests of a plan. Fails if they are longer than the model's context.
fn workload(config: &Config, source: &ModelSource, asked: Option<Workload>) -> Result<Workload> {
    let [context, encoder] = contexts(config, source);
    let Workload { requests, prompt, output } = asked.unwrap_or_else(|| usual_workload(config, source));
    let output = if source.spec.decoder.is_some() { output.max(1) } else { 0 };
    let (input, own) = if encoder > 0 { (prompt, output) } else { (0, prompt + output) };
    ensure!(input <= encoder, "--prompt is {prompt} tokens, but the model's encoder takes {encoder}");
    ensure!(own <= context, "--prompt and --output are {own} tokens together, but the context has {context}");
    Ok(Workload { requests: requests.max(1), prompt: prompt.max(1), output })
}

/// Returns the formats of the KV cache to choose from.
fn kv_types(config: &Config, request: &PlacementRequest) -> Vec<QuantType> {
    let own = config.kv.ty;
    let smaller = COMPRESSED_KV.into_iter().filter(|ty| ty.bits_per_element() < own.bits_per_element());
    [own].into_iter().chain(smaller.filter(|_| request.allow_compression)).collect()
}

/// Returns the models to choose from: with the configured formats of weights, and, if they may be chosen and
/// no rules are configured, with smaller ones.
fn variants(config: &Config, source: &mut ModelSource, request: &PlacementRequest) -> Result<Vec<Variant>> {
    let mut all = vec![variant(config, source, None)?];
    let own = std::mem::take(&mut source.weight_rules);
    if request.allow_compression && config.model.weights == WeightRules::default() {
        for rule in COMPRESSED_WEIGHTS {
            source.weight_rules = WeightRules::parse(rule).map_err(|reason| anyhow!(reason))?;
            all.push(variant(config, source, Some(rule))?);
        }
    }
    source.weight_rules = own;
    Ok(all)
}

/// Returns the cost of a model, as it is loaded now, on the configured devices.
pub(super) fn variant(
    config: &Config,
    source: &ModelSource,
    weights: Option<&'static str>,
) -> Result<Variant> {
    let cost = |spec: &ModelSpec| ModelCost::from_spec(spec, &|piece| source.load_type(piece));
    let whole = cost(&source.spec);
    let shards: Vec<Shard> = partition(&config.device, source)?.shards().into_iter().flatten().collect();
    let mut stages = Vec::new();
    for (at, shard) in shards.iter().enumerate() {
        stages.push(cost(&source.shard_spec(shard)?).of_stage(&whole, at + 1 == shards.len()));
    }
    let lanes = match config.scheduler.lanes {
        LaneCount::PerStage => stages.len(),
        LaneCount::Number(lanes) => lanes,
    };
    Ok(Variant { weights, stages, lanes })
}

/// Returns the rates of the machine, which are measured if they are not known.
fn measured_rates(config: &Config, needs: &RateNeeds, request: &PlacementRequest) -> Result<MachineRates> {
    let mut known = KnownRates::open(config)?;
    if request.measure {
        known.forget();
    }
    if !known.have(needs) {
        let _spinner = Spinner::start("measuring this machine");
        known.complete(config, needs)?;
    }
    let disk = request.disk.or(known.rates.disk);
    Ok(MachineRates { disk, ..known.rates })
}

/// Returns all choices.
fn choices(config: &Config, variants: &[Variant], kvs: &[QuantType], workload: &Workload) -> Vec<Choice> {
    let fixed = match config.tiers.placement {
        Placement::Configured => (false, false),
        Placement::Auto { slots, token_budget } => (slots, token_budget),
    };
    let slots = if fixed.0 { vec![config.scheduler.slots] } else { slot_counts(workload.requests) };
    let mut all = Vec::new();
    for (variant, kv) in (0..variants.len()).flat_map(|variant| kvs.iter().map(move |kv| (variant, *kv))) {
        for slots in slots.iter().copied() {
            let budgets = match fixed.1 && !config.scheduler.is_budget_auto {
                true => vec![config.scheduler.token_budget],
                false => token_budgets(slots, workload.prompt),
            };
            let larger = budgets.into_iter().filter(|budget| *budget > slots);
            all.extend(larger.map(|token_budget| Choice { variant, kv, slots, token_budget }));
        }
    }
    all
}

/// Returns the choice that needs the least memory.
fn smallest(config: &Config) -> Choice {
    Choice { variant: 0, kv: config.kv.ty, slots: 1, token_budget: 128 }
}

/// Returns the error of a plan without a policy: what the smallest choice needs.
fn failure(
    counter: &mut MemoryCounter,
    config: &Config,
    (memory, memories): (usize, &Memories),
    request: &PlacementRequest,
) -> anyhow::Error {
    let reason = counter.reason.take();
    let Memories { usable, device, .. } = *memories;
    let least = counter.least(&smallest(config));
    let mib = |bytes: f64| bytes / f64::from(1 << 20);
    match (least, device, reason) {
        (Some(least), Some(own), _) if least.of_device() > own => anyhow!(
            "device.memory: no policy fits into {:.1} MiB: the model needs at least {:.1} MiB on a device",
            mib(own),
            mib(least.of_device())
        ),
        (Some(least), Some(_), _) if least.host_room(memories) < 0.0 => anyhow!(
            "device.memory: {:.0} MiB of memory are too little for the devices' own: it must be at least \
             {:.0} MiB",
            mib(memory as f64),
            mib(memory as f64 - least.host_room(memories) / USABLE)
        ),
        (Some(least), None, _) if least.total() > usable => anyhow!(
            "no policy fits into {:.0} MiB of memory: the model needs at least {:.0} MiB",
            mib(memory as f64),
            mib(memory as f64 + (least.total() - usable) / USABLE)
        ),
        _ if request.max_token_seconds.is_some() => {
            anyhow!("no policy that fits into memory decodes a token in the time that is allowed")
        }
        (.., Some(reason)) => reason.context("no policy is possible"),
        _ => anyhow!("no policy fits: scheduler.token_budget must be more than scheduler.slots"),
    }
}

/// Parses the rate or the folder of a disk: `1.2GB/s`, or a path, whose disk is that of stores.
pub fn parse_disk(text: &str) -> Result<Option<DiskRates>, String> {
    let Some(rate) = text.strip_suffix("/s") else { return Ok(None) };
    let rate = parse_bytes(rate)? as f64;
    Ok(Some(DiskRates { read: rate, write: rate, pages: rate }))
}
