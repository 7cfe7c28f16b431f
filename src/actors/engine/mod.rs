//! The engine: all actors of one model, started together and stopped together.
//!
//! Invariant: when `start` returns, the model is loaded, every buffer is allocated, and requests are served.

mod memory;

mod report;

pub use memory::available_memory;

use super::conventions::{self, Conventions};
use super::decode::{Decode, DecodeConfig, Neighbours};
use super::device::Factory;
use super::group::{Group, GroupConfig};
use super::intake::Intake;
use super::kv::Kv;
use super::limits::IntakeLimits;
use super::prefill::Prefill;
use super::status::Status;
use super::stream::IntakeHandle;
use crate::config::{Config, KvConfig, Lanes, Policy, SamplingDefaultsFrom, SchedulerConfig};
use crate::formats::{ChatSource, SamplingDefaults};
use crate::memory::PagePool;
use crate::model::executor::KvPlan;
use crate::model::spec::{Kind, ModelSpec};
use crate::model::{ModelSource, Partition};
use crate::planner::{Assigned, opened};
use crate::telemetry;
use crate::text::{ChatTemplate, Tokenizer};
use actix::{Actor, Addr, Arbiter};
use anyhow::{Result, ensure};
use mainstem_kernels::StepLimits;
use std::collections::HashSet;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tracing::warn;

/// Most likely tokens that can be asked for beside each token.
pub const TOP_LOGPROBS: usize = 20;

/// Biases of one sequence, tokens that end it counted.
pub const BIASES: usize = 512;

/// The sizes of everything, derived from configuration and model before anything is allocated.
#[derive(Clone, Debug)]
pub struct EngineSetup {
    pub scheduler: SchedulerConfig,
    pub limits: StepLimits,
    /// Width of the residual stream.
    pub width: usize,
    /// Steps in flight, each of a part of the slots of its own; every part has one at least.
    pub lanes: usize,
    /// How long the devices may go without an answer; `None` for ever.
    pub step_timeout: Option<Duration>,
    pub kv: KvPlan,
    pub model: ModelInfo,
    /// Which device holds which part of the model.
    pub partition: Partition,
    /// The same to show, stage by stage, by rank.
    pub assigned: Vec<Vec<Assigned>>,
    /// Keys of the model's generation_config.json that are not served.
    pub unserved: Vec<String>,
    /// What the model's files say otherwise of vectors than they are made, in words.
    pub caution: Option<String>,
}

/// What the server tells of the model.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    pub name: String,
    pub kind: Kind,
    /// Where its tasks are asked for.
    pub endpoints: Vec<&'static str>,
    /// Whether logits come out.
    pub has_head: bool,
    /// Tokens of prompt and answer together that the model, or the configuration, allows; of a lone encoder, those of
    /// its input.
    pub context: usize,
    /// The same, as far as the KV cache goes.
    pub longest: usize,
    /// Tokens of the longest source; 0 without an encoder.
    pub source_context: usize,
    /// Sequences that can be taken in at once: slots and places to wait.
    pub choices_max: usize,
    pub vocab: usize,
    pub eos: Vec<u32>,
    /// For requests that do not say.
    pub defaults: SamplingDefaults,
    /// How it wants to be asked, by its kind.
    pub conventions: Conventions,
    /// How messages become a prompt, if the model says so.
    pub chat: Option<Arc<ChatTemplate>>,
    /// When it was loaded, in seconds of Unix time.
    pub created: u64,
}

/// A running engine.
pub struct Engine {
    pub intake: IntakeHandle,
    pub status: Arc<Status>,
    pub tokenizer: Arc<Tokenizer>,
    pub model: ModelInfo,
    /// What was allocated for what, in lines.
    pub report: String,
    /// For checks: who holds what.
    pub actors: Actors,
    control: Arbiter,
    group: Arc<Group>,
}

/// The actors that hold things.
#[derive(Clone)]
pub struct Actors {
    pub intake: Addr<Intake>,
    pub kv: Addr<Kv>,
}

impl EngineSetup {
    /// Sizes for `source`, divided like that, as `config` wants them.
    pub fn new(config: &Config, source: &ModelSource, partition: Partition) -> Result<EngineSetup> {
        let spec = &source.spec;
        let scheduler = config.scheduler.clone();
        ensure!(
            spec.has_head() || spec.decoder.is_none(),
            "{}: head.kind is \"none\", but a decoder generates by its head",
            spec.provenance.specification
        );
        let context = context(&config.kv, spec.context)?;
        let mut limits = step_limits(config, spec, context);
        let lanes = lanes(&scheduler, partition.stages.len());
        let kv = memory::kv_plan(config, &limits, lanes, source, &partition)?;
        // No sequence outgrows the pool, and tables are made for the longest there can be.
        let own_pages = (kv.pages - 1).saturating_sub(memory::source_pages_min(&limits));
        limits.positions = limits.positions.min(own_pages * limits.page_positions);
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let name = match config.model.served_name.is_empty() {
            true => source.name(),
            false => config.model.served_name.clone(),
        };
        let chat = chat_template(source)?.map(Arc::new);
        let (defaults, unserved) = match config.model.sampling_defaults {
            SamplingDefaultsFrom::Model => (source.defaults, source.unserved.keys().cloned().collect()),
            SamplingDefaultsFrom::Neutral => (SamplingDefaults::default(), Vec::new()),
        };
        let model = ModelInfo {
            name,
            kind: spec.kind,
            endpoints: conventions::endpoints(spec),
            has_head: spec.has_head(),
            context,
            longest: if spec.decoder.is_some() { limits.positions } else { context },
            source_context: limits.source_positions,
            choices_max: scheduler.slots + scheduler.max_waiting,
            vocab: spec.vocab,
            eos: end_tokens(source)?,
            defaults,
            conventions: Conventions::of(source, &config.model)?,
            chat,
            created,
        };
        let caution = Conventions::caution(source, &config.model);
        let assigned = opened::assigned(source, &partition);
        let (width, step_timeout) = (spec.hidden, config.device.step_timeout);
        Ok(EngineSetup {
            scheduler,
            limits,
            width,
            lanes,
            step_timeout,
            kv,
            model,
            partition,
            assigned,
            unserved,
            caution,
        })
    }
}

/// Starts all actors: intake, prefill, decode and kv on one control thread, each device on its own. Fails when a device
/// cannot be built.
pub async fn start(
    setup: EngineSetup,
    tokenizer: Arc<Tokenizer>,
    factories: Vec<Vec<Factory>>,
) -> Result<Engine> {
    let (names, lanes, step_timeout) = (setup.partition.names(), setup.lanes, setup.step_timeout);
    let status = Arc::new(Status::new(quiet(setup.scheduler.policy, setup.lanes, setup.step_timeout), lanes));
    let config = GroupConfig {
        lanes,
        step_timeout,
        status: status.clone(),
        ..GroupConfig::new(names, setup.limits, setup.width)
    };
    let (group, built) = Group::start(factories, config).await?;
    let group = Arc::new(group);
    let report = report::report(&setup, &built);
    if !setup.unserved.is_empty() {
        let keys = setup.unserved.join(", ");
        warn!("generation_config.json asks for what is not served: {}", keys.escape_debug());
    }
    if let Some(caution) = &setup.caution {
        warn!("{}", caution.escape_debug());
    }
    telemetry::SLOTS.set(setup.limits.slots as f64);
    telemetry::WAITING_ROOM.set(setup.scheduler.max_waiting as f64);
    telemetry::KV_PAGES.set((setup.kv.pages - 1) as f64);

    let control = Arbiter::new();
    let actors = start_control(&control, &setup, group.clone(), status.clone());
    Ok(Engine {
        intake: IntakeHandle(actors.intake.clone().recipient()),
        status,
        tokenizer,
        model: setup.model,
        report,
        actors,
        control,
        group,
    })
}

impl Engine {
    /// Stops all actors and waits for the step that runs, though not for ever. Requests still in flight lose their streams.
    pub fn stop(self) {
        self.status.stop();
        // The control thread goes first, so that no step is sent to a device that is gone.
        self.control.stop();
        let _ = self.control.join();
        self.group.stop();
    }
}

/// How long a lane may be without a sign of life while all is well: while requests gather, and while a step of its comes
/// back. As many steps as lanes are on the devices, and before it as many wait for a place there as others sent ahead while
/// it rested; each may take that long after the one before.
fn quiet(policy: Policy, lanes: usize, step_timeout: Option<Duration>) -> Duration {
    let gathering = match policy {
        Policy::Window { window } => window,
        Policy::Fused | Policy::Concurrent => Duration::ZERO,
    };
    let steps = u32::try_from(2 * lanes - 1).unwrap_or(u32::MAX);
    gathering.saturating_add(step_timeout.unwrap_or_default().saturating_mul(steps))
}

/// How many lanes there are: each has a slot at least.
fn lanes(scheduler: &SchedulerConfig, stages: usize) -> usize {
    let wanted = match scheduler.lanes {
        Lanes::ByStages => stages,
        Lanes::Number(lanes) => lanes,
    };
    wanted.clamp(1, scheduler.slots)
}

fn start_control(control: &Arbiter, setup: &EngineSetup, group: Arc<Group>, status: Arc<Status>) -> Actors {
    let SchedulerConfig { slots, max_waiting, token_budget, policy, shuffle, .. } = setup.scheduler;
    let (limits, lanes, pages) = (setup.limits, setup.lanes, setup.kv.pages);
    let thread = control.handle();
    let kv = Kv::start_in_arbiter(&thread, move |_| {
        Kv::new(slots, lanes, shuffle, PagePool::new(pages, limits.page_positions))
    });
    let prefill = {
        let kv = kv.clone();
        Prefill::start_in_arbiter(&thread, move |_| {
            Prefill::new(kv.clone().recipient(), kv.recipient(), policy, slots, lanes)
        })
    };
    let config = DecodeConfig { policy, limits, token_budget, eos: setup.model.eos.clone(), lanes };
    let neighbours = Neighbours {
        prefill_next: prefill.clone().recipient(),
        prefill_ahead: prefill.clone().recipient(),
        prefill_forget: prefill.clone().recipient(),
        kv_turn: kv.clone().recipient(),
        kv_reset: kv.clone().recipient(),
        devices: group,
        status: status.clone(),
    };
    for lane in 0..lanes {
        let (neighbours, config) = (neighbours.clone(), config.clone());
        Decode::start_in_arbiter(&thread, move |_| Decode::new(lane, neighbours, config));
    }
    let door = IntakeLimits {
        slots,
        max_waiting,
        context: setup.model.context,
        source_context: limits.source_positions,
        vocab: limits.vocab,
        top_logprobs: limits.top_logprobs,
        biases: limits.biases,
        eos: setup.model.eos.len(),
        pages: pages - 1,
        page_positions: limits.page_positions,
        kind: setup.model.kind,
        has_head: setup.model.has_head,
        endpoints: setup.model.endpoints.clone(),
    };
    let intake = Intake::start_in_arbiter(&thread, move |_| Intake::new(door, prefill.recipient(), status));
    Actors { intake, kv }
}

fn chat_template(source: &ModelSource) -> Result<Option<ChatTemplate>> {
    let Some(ChatSource { origin, text }) = &source.chat.template else { return Ok(None) };
    ChatTemplate::new(origin, text, source.chat.special_tokens.clone()).map(Some)
}

/// The tokens that end a sequence, each once. They take the place of biases while `min_tokens` forbids them.
fn end_tokens(source: &ModelSource) -> Result<Vec<u32>> {
    let mut seen = HashSet::new();
    // What cannot be drawn need not be looked for.
    let ids = source.eos.iter().copied().filter(|id| (*id as usize) < source.spec.vocab && seen.insert(*id));
    let ids: Vec<u32> = ids.collect();
    ensure!(
        ids.len() <= BIASES,
        "{}: eos_token_id names {} tokens, but {BIASES} can end a sequence at most",
        source.path.display(),
        ids.len()
    );
    Ok(ids)
}

fn context(kv: &KvConfig, model: usize) -> Result<usize> {
    let context = kv.max_context.unwrap_or(model);
    ensure!(context <= model, "kv.max_context is {context}, but the model was made for {model} positions");
    Ok(context)
}

/// The bounds of a step, as if there were pages for all.
fn step_limits(config: &Config, spec: &ModelSpec, context: usize) -> StepLimits {
    let SchedulerConfig { slots, token_budget, .. } = config.scheduler;
    let source_positions = spec.source_context().min(config.kv.max_context.unwrap_or(usize::MAX));
    StepLimits {
        slots,
        // Prompt tokens of one step, or one source that is longer, beside a window that may be full of decoding slots
        // and holes.
        rows: token_budget.max(source_positions) + slots,
        logit_rows: if spec.has_head() { slots.max(32) } else { 1 },
        positions: if spec.decoder.is_some() { context } else { 0 },
        source_positions,
        page_positions: config.kv.page_positions,
        top_logprobs: TOP_LOGPROBS,
        biases: BIASES,
        vocab: spec.vocab,
        hidden: if spec.kind == Kind::Encoder { spec.hidden } else { 0 },
        attended: config.kv.attended,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Four lanes: three steps ahead in front of one that wakes, and that lane's own four turns.
    #[test]
    fn a_lane_is_quiet_for_as_long_as_all_steps_before_its_own_may_take() {
        let seconds = Duration::from_secs;
        let window = Policy::Window { window: seconds(3) };
        for (policy, lanes, timeout, expected) in [
            (Policy::Fused, 1, Some(20), 20),
            (Policy::Fused, 4, Some(20), 140),
            (Policy::Concurrent, 4, None, 0),
            (window, 2, Some(10), 33),
            (window, 2, None, 3),
        ] {
            assert_eq!(quiet(policy, lanes, timeout.map(seconds)), seconds(expected), "{lanes} lanes");
        }
        assert_eq!(quiet(Policy::Fused, usize::MAX / 4, Some(Duration::MAX)), Duration::MAX);
    }
}
