//! The engine: starts and stops all actors of a model.
//!
//! Invariant: when `start` returns, the model is loaded, every buffer is allocated, and requests are served.

mod memory;

mod report;
mod step_limits;

pub use memory::{
    DeviceEstimate, DeviceProperties, available_memory, queued_step_bytes, running_bytes, sequence_bytes,
};
pub use report::{Fact, STORE};

use self::step_limits::{scheduler_for, step_limits};
use super::decode::{Decode, DecodeConfig, LoopHandles};
use super::device::ExecutorFactory;
use super::group::{Group, GroupConfig};
use super::intake::Intake;
use super::kv::KvManager;
use super::limits::IntakeLimits;
use super::live::LiveView;
use super::model_sampling::ModelSampling;
use super::prefill::Prefill;
use super::prefix_rules::PrefixRules;
use super::prompting_defaults::{self, PromptingDefaults};
use super::queue::SharedQueue;
use super::speculation::SpeculationSetup;
use super::status::Status;
use super::stream::IntakeHandle;
use crate::config::{
    Config, KvConfig, LaneCount, PairTemplate, Policy, SamplingDefaultsSource, SchedulerConfig,
};
use crate::decoding::{Classifier, HostPool, HostWork};
use crate::formats::ChatTemplateSource;
use crate::memory::{PagePool, WindowCache, split_slots};
use crate::model::executor::{KvCacheConfig, PageBytes};
use crate::model::offload::Transfers;
use crate::model::spec::Kind;
use crate::model::{ModelSource, Partition};
use crate::planner::{DeviceAssignment, model_source};
use crate::request::{ParamList, SamplingDefaults};
use crate::telemetry;
use crate::text::output::OutputFormats;
use crate::text::{ChatTemplate, Tokenizer};
use actix::{Actor, Addr, Arbiter};
use anyhow::{Context as _, Result, anyhow, ensure};
use mainstem_kernels::StepLimits;
use std::collections::HashSet;
use std::num::NonZero;
use std::sync::Arc;
use std::thread::available_parallelism;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tracing::warn;

/// Maximum number of most likely tokens reported per token.
pub const TOP_LOGPROBS: usize = 20;

/// The sizes of everything, derived from configuration and model before any allocation.
#[derive(Clone, Debug)]
pub struct EngineSetup {
    pub scheduler: SchedulerConfig,
    pub limits: StepLimits,
    /// Bytes of a row of the residual stream, which a stage hands to the next.
    pub row_bytes: usize,
    /// Number of steps in flight (lanes), each with its own part of the slots; every lane has at
    /// least one slot.
    pub lanes: usize,
    /// Maximum time of the devices for a step; `None` for no limit.
    pub step_timeout: Option<Duration>,
    /// Maximum memory of responses that are computed or not read yet, in bytes.
    pub response_bytes: usize,
    pub kv: KvCacheConfig,
    /// Bytes of one page of the cache on all devices together.
    pub page: PageBytes,
    /// The rules by which sequences share pages.
    pub prefix_rules: PrefixRules,
    pub model: ModelInfo,
    /// The part of the model that each device holds.
    pub partition: Partition,
    /// The partition for display, by stage and rank.
    pub assignments: Vec<Vec<DeviceAssignment>>,
    /// Keys of the model's generation_config.json that are not supported.
    pub unsupported_keys: Vec<String>,
    /// Warning about unsupported embedding settings in the model's files.
    pub embedding_warning: Option<String>,
    /// Counts of what the devices move between memory and disk.
    pub transfers: Arc<Transfers>,
}

/// Properties of the model that the server reports and uses.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    pub name: String,
    pub kind: Kind,
    /// Endpoints that serve the model's tasks.
    pub endpoints: Vec<&'static str>,
    /// Whether the model has an output head, and so computes logits.
    pub has_head: bool,
    /// Maximum tokens of prompt and answer together, by the model or the configuration; of an encoder-only
    /// model, of its input.
    pub context: usize,
    /// Maximum tokens of a sequence that fit into the KV cache; of an encoder-only model, the same as
    /// `context`.
    pub max_sequence_tokens: usize,
    /// Maximum tokens of the encoder input; 0 without an encoder.
    pub encoder_context: usize,
    /// Maximum number of sequences that can be accepted at once: slots plus queue.
    pub max_choices: usize,
    pub vocab: usize,
    /// Size of the vocabulary of the encoder input.
    pub source_vocab: usize,
    pub eos: Vec<u32>,
    /// Default sampling parameters of requests.
    pub sampling_defaults: SamplingDefaults,
    /// Prompting defaults, by kind of model.
    pub prompting: PromptingDefaults,
    /// The classifier, once it is read.
    pub classifier: Option<Arc<Classifier>>,
    /// The text that a classifier reads for a pair, if it is not that of the tokenizer.
    pub pair_template: Option<PairTemplate>,
    /// The template that renders chat messages to a prompt, if the model has one.
    pub chat_template: Option<Arc<ChatTemplate>>,
    /// Formats of tool calls and reasoning in the model's output.
    pub output_formats: OutputFormats,
    /// Speculative decoding; `None` if it is off.
    pub speculation: Option<SpeculationSetup>,
    /// When the model was loaded, in seconds of Unix time.
    pub created: u64,
}

impl ModelInfo {
    /// Returns whether the model generates text.
    pub fn generates(&self) -> bool {
        self.has_head && self.kind != Kind::Encoder
    }

    /// Returns the maximum number of tokens of a text that is embedded, classified or filled: a prompt of a
    /// decoder, and otherwise an encoder input.
    pub fn text_context(&self) -> usize {
        match self.kind {
            Kind::Decoder => self.max_sequence_tokens,
            Kind::Encoder | Kind::EncoderDecoder => self.encoder_context,
        }
    }

    /// Creates the plan builder of the model's requests. Fails for defaults that the model cannot serve.
    pub fn sampling(&self, tokenizer: &Arc<Tokenizer>) -> Result<ModelSampling> {
        let (size, eos) = (self.vocab, self.eos.clone());
        ModelSampling::new(tokenizer.clone(), size, eos, &self.output_formats, &self.sampling_defaults)
    }
}

/// A running engine.
pub struct Engine {
    pub intake: IntakeHandle,
    pub status: Arc<Status>,
    /// The view of the sequences in flight for those who watch.
    pub live: Arc<LiveView>,
    pub tokenizer: Arc<Tokenizer>,
    pub sampling: Arc<ModelSampling>,
    pub model: ModelInfo,
    /// The report of what was allocated, in the order to show it.
    pub facts: Vec<Fact>,
    /// The actors, for tests and diagnostics.
    pub actors: Actors,
    control: Arbiter,
    group: Arc<Group>,
}

/// Actors that own resources.
#[derive(Clone)]
pub struct Actors {
    pub intake: Addr<Intake>,
    pub kv: Addr<KvManager>,
}

impl EngineSetup {
    /// Computes the sizes for the model `source`, partitioned by `partition`, under `config`.
    pub fn new(
        config: &Config,
        source: &ModelSource,
        partition: Partition,
        devices: DeviceProperties,
    ) -> Result<EngineSetup> {
        let spec = &source.spec;
        let scheduler = scheduler_for(config, source);
        ensure!(
            spec.has_head()
                || spec.decoder.is_none()
                || spec.classifier.is_some()
                || prompting_defaults::embeds(source, &config.model),
            "{}: head.kind is \"none\", but a decoder needs an output head to generate, or a classifier",
            spec.provenance.specification
        );
        let context = context_length(&config.kv, spec.context)?;
        let mut limits = step_limits(config, source, context, partition.device_names().concat().len())?;
        let lanes = lane_count(&scheduler, partition.stages.len());
        let plan = memory::kv_plan(config, &limits, lanes, source, (&partition, devices))?;
        // No sequence is longer than the pool allows, so page tables need no more entries.
        let own_pages = (plan.cache.pages - 1).saturating_sub(memory::min_encoder_pages(&limits));
        limits.positions = limits.positions.min(own_pages * limits.page_positions);
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let served_name = Some(&config.model.served_name).filter(|name| !name.is_empty());
        let name = served_name.cloned().unwrap_or_else(|| source.name());
        let chat_template = chat_template(source)?.map(Arc::new);
        let parsers = (&*config.model.tool_parser, &*config.model.reasoning_parser);
        let output_formats = OutputFormats::select(parsers, chat_template.as_deref())
            .map_err(|problem| anyhow!("model.tool_parser or model.reasoning_parser: {problem}"))?;
        let (of_model, unsupported_keys) = sampling_of_model(config, source);
        let model = ModelInfo {
            name,
            kind: spec.kind,
            endpoints: prompting_defaults::endpoints(source, &config.model),
            has_head: spec.has_head(),
            context,
            max_sequence_tokens: if spec.decoder.is_some() { limits.positions } else { context },
            encoder_context: limits.encoder_positions,
            max_choices: scheduler.slots + scheduler.max_waiting,
            vocab: spec.vocab,
            source_vocab: spec.source_vocab,
            eos: eos_tokens(source),
            sampling_defaults: SamplingDefaults { server: config.model.sampling.clone(), model: of_model },
            prompting: PromptingDefaults::from_model(source, &config.model)?,
            classifier: None,
            pair_template: config.model.pair_template.clone(),
            chat_template,
            output_formats,
            speculation: SpeculationSetup::new(&config.speculation, source)?,
            created,
        };
        Ok(EngineSetup {
            scheduler,
            limits,
            prefix_rules: PrefixRules::new(&config.kv, spec, source.draft.as_ref().map(|draft| &draft.spec)),
            row_bytes: spec.hidden * devices.activation_type.size(),
            lanes,
            step_timeout: config.device.step_timeout,
            response_bytes: config.server.response_bytes,
            kv: plan.cache,
            page: plan.page,
            model,
            assignments: model_source::assignments(source, &partition),
            partition,
            unsupported_keys,
            embedding_warning: PromptingDefaults::embedding_warning(source, &config.model),
            transfers: source.transfers.clone(),
        })
    }
}

/// Returns the sampling defaults in the model's files, and their keys that are not supported.
fn sampling_of_model(config: &Config, source: &ModelSource) -> (ParamList, Vec<String>) {
    match config.model.sampling_defaults {
        SamplingDefaultsSource::Model => {
            (source.sampling_defaults.clone(), source.unsupported_settings.keys().cloned().collect())
        }
        SamplingDefaultsSource::Neutral => (ParamList::default(), Vec::new()),
    }
}

/// Starts all actors: intake, prefill, decode and kv on one control thread, each device on a thread of its
/// own. Fails if a device cannot be built.
pub async fn start(
    setup: EngineSetup,
    tokenizer: Arc<Tokenizer>,
    factories: Vec<Vec<ExecutorFactory>>,
) -> Result<Engine> {
    let sampling = Arc::new(setup.model.sampling(&tokenizer)?);
    let (names, lanes, step_timeout) = (setup.partition.device_names(), setup.lanes, setup.step_timeout);
    let silence = allowed_silence(setup.scheduler.policy, setup.lanes, setup.step_timeout);
    let status = Arc::new(Status::new(silence, lanes).with_response_memory(setup.response_bytes));
    let config = GroupConfig {
        lanes,
        step_timeout,
        status: status.clone(),
        ..GroupConfig::new(names, setup.limits, setup.row_bytes)
    };
    let (group, built) = Group::start(factories, config).await?;
    let group = Arc::new(group);
    let facts = report::facts(&setup, &built);
    if !setup.unsupported_keys.is_empty() {
        let keys = setup.unsupported_keys.join(", ");
        warn!("generation_config.json has unsupported keys: {}", keys.escape_debug());
    }
    if let Some(warning) = &setup.embedding_warning {
        warn!("{}", warning.escape_debug());
    }
    telemetry::SLOTS.set(setup.limits.slots as f64);
    telemetry::QUEUE_CAPACITY.set(setup.scheduler.max_waiting as f64);
    telemetry::WAITING_ROOM.set(setup.scheduler.max_waiting as f64);
    telemetry::KV_PAGES.set((setup.kv.pages - 1) as f64);
    report::record_cache_config(&setup);
    telemetry::KV_WINDOW_PAGES.set(setup.kv.window_pages.saturating_sub(1) as f64);

    let threads = setup.scheduler.sampling_threads.or_else(|| available_parallelism().ok());
    let threads = threads.map_or(1, NonZero::get);
    let host_pool = HostPool::new(threads, setup.limits.slots, setup.limits.vocab, record_host_sampling);
    let host_pool = Arc::new(host_pool.context("cannot start the threads of sampling")?);
    let control = Arbiter::new();
    let (actors, live) = start_control(&control, &setup, group.clone(), status.clone(), host_pool);
    Ok(Engine {
        intake: IntakeHandle(actors.intake.clone().recipient()),
        status,
        live,
        tokenizer,
        sampling,
        model: setup.model,
        facts,
        actors,
        control,
        group,
    })
}

impl Engine {
    /// Returns the report of what was allocated as text, with a line for each fact.
    pub fn report(&self) -> String {
        report::text(&self.facts)
    }

    /// Stops all actors, and waits a limited time for the running step. Requests in flight lose their
    /// streams.
    pub fn stop(self) {
        self.status.set_stopping();
        // The control thread is stopped first, so that no step is sent to a stopped device.
        self.control.stop();
        let _ = self.control.join();
        self.group.stop();
    }
}

/// Returns how long a lane with work may go without a heartbeat: while requests gather, and while its step
/// completes. There may be as many steps on the devices as lanes, and before the lane's step as many waiting
/// ones that other lanes sent ahead while it was idle; each may take the whole timeout after the previous
/// one.
fn allowed_silence(policy: Policy, lanes: usize, step_timeout: Option<Duration>) -> Duration {
    let gathering = match policy {
        Policy::Window { window } => window,
        Policy::Fused | Policy::Concurrent => Duration::ZERO,
    };
    let steps = u32::try_from(2 * lanes - 1).unwrap_or(u32::MAX);
    gathering.saturating_add(step_timeout.unwrap_or_default().saturating_mul(steps))
}

/// Returns the number of lanes; each has at least one slot.
fn lane_count(scheduler: &SchedulerConfig, stages: usize) -> usize {
    let configured = match scheduler.lanes {
        LaneCount::PerStage => stages,
        LaneCount::Number(lanes) => lanes,
    };
    configured.clamp(1, scheduler.slots)
}

/// Records the time of the host's part in sampling a token.
fn record_host_sampling(work: HostWork, time: Duration) {
    let label = match work {
        HostWork::Draw => "draw",
        HostWork::Mask => "mask",
    };
    telemetry::HOST_SAMPLING.histogram_with([label]).record(time.as_secs_f64());
}

/// Starts the actors of the control thread. Also returns what watchers see of them.
fn start_control(
    control: &Arbiter,
    setup: &EngineSetup,
    group: Arc<Group>,
    status: Arc<Status>,
    host_pool: Arc<HostPool>,
) -> (Actors, Arc<LiveView>) {
    let SchedulerConfig { slots, max_waiting, token_budget, itl_target, policy, shuffle, run_ahead, .. } =
        setup.scheduler;
    let (limits, lanes, kv) = (setup.limits, setup.lanes, setup.kv);
    let thread = control.handle();
    let (pool, window) = page_pool(kv, &limits);
    let live = Arc::new(LiveView::new(split_slots(slots, lanes), pool.clone()));
    let prefix_rules = setup.prefix_rules.clone();
    let generated_mark = prefix_rules.generated_mark();
    let queue = SharedQueue::new(slots, max_waiting, status.clone());
    let (shared_queue, shared_pool) = (queue.clone(), pool.clone());
    let prefill = Prefill::start_in_arbiter(&thread, move |_| {
        Prefill::new(shared_queue, shared_pool, prefix_rules, policy, limits, lanes)
    });
    let changed = prefill.clone().recipient();
    let kv = KvManager::start_in_arbiter(&thread, move |_| {
        KvManager::new((slots, lanes, shuffle), pool, generated_mark, changed)
    });
    let draft = setup.model.speculation.as_ref().and_then(|speculation| speculation.draft.as_ref());
    let draft_context = draft.map_or(0, |draft| draft.context);
    let eos = setup.model.eos.clone();
    let config =
        DecodeConfig { policy, limits, token_budget, eos, lanes, run_ahead, draft_context, itl_target };
    let handles = LoopHandles {
        next_chunks: prefill.clone().recipient(),
        chunks_ahead: prefill.clone().recipient(),
        drop_started: prefill.clone().recipient(),
        requeue: prefill.clone().recipient(),
        update_slots: kv.clone().recipient(),
        reset_lane: kv.clone().recipient(),
        devices: group,
        status: status.clone(),
        host_pool,
        transfers: setup.transfers.clone(),
        live: live.clone(),
    };
    for lane in 0..lanes {
        let (handles, config) = (handles.clone(), config.clone());
        Decode::start_in_arbiter(&thread, move |_| Decode::new(lane, handles, config));
    }
    let intake_limits = IntakeLimits {
        slots,
        max_beams: slots / lanes,
        max_waiting,
        context: setup.model.context,
        encoder_context: limits.encoder_positions,
        vocab: limits.vocab,
        source_vocab: setup.model.source_vocab,
        eos: setup.model.eos.len(),
        top_logprobs: TOP_LOGPROBS,
        pages: setup.kv.pages - 1,
        window,
        page_positions: limits.page_positions,
        kind: setup.model.kind,
        has_head: setup.model.has_head,
        returns_hidden: limits.hidden > 0,
        endpoints: setup.model.endpoints.clone(),
    };
    let intake = Intake::start_in_arbiter(&thread, move |_| {
        Intake::new(intake_limits, queue, prefill.recipient(), status)
    });
    (Actors { intake, kv }, live)
}

/// Creates the pool of the cache's pages. Also returns the cache of windowed layers with pages of their own.
fn page_pool(kv: KvCacheConfig, limits: &StepLimits) -> (PagePool, Option<WindowCache>) {
    let window = limits.window.map(|window| WindowCache {
        pages: kv.window_pages,
        window,
        step_pages: limits.pages_of_window(window),
    });
    (PagePool::with_window(kv.pages, limits.page_positions, window), window)
}

/// Compiles the model's chat template, if it has one.
fn chat_template(source: &ModelSource) -> Result<Option<ChatTemplate>> {
    let Some(ChatTemplateSource { origin, text }) = &source.chat.template else { return Ok(None) };
    ChatTemplate::new(origin, text, source.chat.special_tokens.clone()).map(Some)
}

/// Returns the tokens that end a sequence, without duplicates.
fn eos_tokens(source: &ModelSource) -> Vec<u32> {
    let mut seen = HashSet::new();
    // Tokens outside the vocabulary are never sampled.
    let ids = source.eos.iter().copied();
    ids.filter(|id| (*id as usize) < source.spec.vocab && seen.insert(*id)).collect()
}

/// Returns the context length by configuration and model.
fn context_length(kv: &KvConfig, model: usize) -> Result<usize> {
    let context = kv.max_context.unwrap_or(model);
    ensure!(context <= model, "kv.max_context is {context}, but the model supports only {model} positions");
    Ok(context)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// For four lanes: three steps sent ahead before a lane wakes up, and four steps of that lane's own
    /// round.
    #[test]
    fn allowed_silence_covers_all_steps_before_a_lanes_own() {
        let seconds = Duration::from_secs;
        let window = Policy::Window { window: seconds(3) };
        for (policy, lanes, timeout, expected) in [
            (Policy::Fused, 1, Some(20), 20),
            (Policy::Fused, 4, Some(20), 140),
            (Policy::Concurrent, 4, None, 0),
            (window, 2, Some(10), 33),
            (window, 2, None, 3),
        ] {
            assert_eq!(
                allowed_silence(policy, lanes, timeout.map(seconds)),
                seconds(expected),
                "{lanes} lanes"
            );
        }
        assert_eq!(allowed_silence(Policy::Fused, usize::MAX / 4, Some(Duration::MAX)), Duration::MAX);
    }
}
