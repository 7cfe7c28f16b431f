//! The engine: all actors of one model, started together and stopped together.
//!
//! Invariant: when `start` returns, the model is loaded, every buffer is allocated, and requests are served.

use super::conventions::{self, Conventions};
use super::decode::{Decode, DecodeConfig, Neighbours};
use super::device::{Build, Device, Factory};
use super::group::Group;
use super::intake::Intake;
use super::kv::Kv;
use super::limits::IntakeLimits;
use super::prefill::Prefill;
use super::status::Status;
use super::stream::IntakeHandle;
use crate::config::{Config, DeviceKind, KvConfig, KvSize, Policy, SamplingDefaultsFrom, SchedulerConfig};
use crate::formats::{ChatSource, SamplingDefaults};
use crate::memory::PagePool;
use crate::model::ModelSource;
use crate::model::executor::{ExecutorReport, KvPlan, page_bytes, working_bytes};
use crate::model::spec::{Kind, ModelSpec};
use crate::telemetry;
use crate::text::{ChatTemplate, Tokenizer};
use actix::{Actor, Addr, Arbiter};
use anyhow::{Context, Result, ensure};
use mainstem_kernels::StepLimits;
use std::collections::HashSet;
use std::fmt::Write;
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
    pub kv: KvPlan,
    pub model: ModelInfo,
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
    device: Arbiter,
}

/// The actors that hold things.
#[derive(Clone)]
pub struct Actors {
    pub intake: Addr<Intake>,
    pub kv: Addr<Kv>,
}

impl EngineSetup {
    /// Sizes for `source` as `config` wants them.
    pub fn new(config: &Config, source: &ModelSource) -> Result<EngineSetup> {
        let spec = &source.spec;
        let scheduler = config.scheduler.clone();
        ensure!(
            spec.has_head() || spec.decoder.is_none(),
            "{}: head.kind is \"none\", but a decoder generates by its head",
            spec.provenance.specification
        );
        let context = context(&config.kv, spec.context)?;
        let mut limits = step_limits(config, spec, context);
        let kv = kv_plan(&config.kv, &limits, source, free_memory(config.device.kind))?;
        // No sequence outgrows the pool, and tables are made for the longest there can be.
        let own_pages = (kv.pages - 1).saturating_sub(source_pages_min(&limits));
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
        Ok(EngineSetup { scheduler, limits, kv, model, unserved, caution })
    }
}

/// Starts all actors: intake, prefill, decode and kv on one control thread, the device on its own. Fails
/// when the device cannot be built.
pub async fn start(setup: EngineSetup, tokenizer: Arc<Tokenizer>, factory: Factory) -> Result<Engine> {
    let device_arbiter = Arbiter::new();
    let device = Device::start_in_arbiter(&device_arbiter.handle(), move |_| Device::new(factory));
    let built = device.send(Build).await.context("the device's thread is gone").flatten();
    let built = built.inspect_err(|_| _ = device_arbiter.stop())?;
    let report = report(&setup, &built);
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

    let gathering = match setup.scheduler.policy {
        Policy::Window { window } => window,
        Policy::Fused | Policy::Concurrent => Duration::ZERO,
    };
    let status = Arc::new(Status::new(gathering));
    let control = Arbiter::new();
    let actors = start_control(&control, &setup, Group::single(device.recipient()), status.clone());
    Ok(Engine {
        intake: IntakeHandle(actors.intake.clone().recipient()),
        status,
        tokenizer,
        model: setup.model,
        report,
        actors,
        control,
        device: device_arbiter,
    })
}

impl Engine {
    /// Stops all actors and waits for the step that runs. Requests still in flight lose their streams.
    pub fn stop(self) {
        self.status.stop();
        // The control thread goes first, so that no step is sent to a device that is gone.
        self.control.stop();
        let _ = self.control.join();
        self.device.stop();
        let _ = self.device.join();
    }
}

fn start_control(control: &Arbiter, setup: &EngineSetup, group: Group, status: Arc<Status>) -> Actors {
    let SchedulerConfig { slots, max_waiting, token_budget, policy, shuffle, .. } = setup.scheduler;
    let (limits, pages) = (setup.limits, setup.kv.pages);
    let thread = control.handle();
    let kv = Kv::start_in_arbiter(&thread, move |_| {
        Kv::new(slots, shuffle, PagePool::new(pages, limits.page_positions))
    });
    let prefill = {
        let kv = kv.clone();
        Prefill::start_in_arbiter(&thread, move |_| {
            Prefill::new(kv.clone().recipient(), kv.recipient(), policy, slots)
        })
    };
    let config = DecodeConfig { policy, limits, token_budget, eos: setup.model.eos.clone() };
    let neighbours = Neighbours {
        prefill_next: prefill.clone().recipient(),
        prefill_forget: prefill.clone().recipient(),
        kv_turn: kv.clone().recipient(),
        kv_reset: kv.clone().recipient(),
        group: Arc::new(group),
        status: status.clone(),
    };
    Decode::start_in_arbiter(&thread, move |_| Decode::new(neighbours, config));
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
    }
}

/// Pages that a sequence's source takes at least.
fn source_pages_min(limits: &StepLimits) -> usize {
    limits.cross_table_len().min(1)
}

/// Bytes that a device of this kind may take. The fake one takes none, so nothing bounds its cache.
fn free_memory(device: DeviceKind) -> usize {
    match device {
        DeviceKind::Cpu | DeviceKind::Reference => available_memory(),
        DeviceKind::Fake { .. } => usize::MAX,
    }
}

/// How many pages the cache gets, the sink included, where `free` bytes are to be had. A lone encoder keeps nothing: the
/// sink is all it has.
fn kv_plan(kv: &KvConfig, limits: &StepLimits, source: &ModelSource, free: usize) -> Result<KvPlan> {
    if source.spec.decoder.is_none() {
        return Ok(KvPlan { ty: kv.ty, pages: 1 });
    }
    let page = page_bytes(source, kv.ty, kv.page_positions)
        .with_context(|| format!("kv.page_positions: a page of {} is too large", kv.page_positions))?;
    let whole = limits.slots * (limits.table_len() + limits.cross_table_len());
    let least = 1 + source_pages_min(limits);
    let pages = match kv.size {
        KvSize::Tokens(tokens) => tokens.div_ceil(kv.page_positions),
        KvSize::Bytes(bytes) => (bytes / page as u64) as usize,
        KvSize::Fitting => whole.min(spare_memory(free, limits, source) / page).max(least),
    };
    // More than every slot can use would only be memory lost.
    let pages = pages.min(whole);
    let wanted = pages.saturating_mul(page);
    ensure!(wanted <= free, "kv.size asks for {wanted} bytes, but only {free} are free");
    ensure!(pages > 0, "the configured KV cache is smaller than one page of {page} bytes");
    ensure!(
        pages >= least,
        "the configured KV cache is one page of {page} bytes, but a sequence takes {least}: its own and its source's"
    );
    ensure!(
        pages < u32::MAX as usize,
        "the configured KV cache has {pages} pages, more than can be numbered"
    );
    Ok(KvPlan { ty: kv.ty, pages: pages + 1 })
}

/// Half of what is left of the `free` bytes once weights and activations are in: the other half belongs to whoever
/// else uses the machine, and to the page cache.
fn spare_memory(free: usize, limits: &StepLimits, source: &ModelSource) -> usize {
    let taken = source.checkpoint.total_bytes() + working_bytes(source, limits);
    free.saturating_sub(taken) / 2
}

/// Bytes that the system, and the control group this process is in, would still give. Without a word from
/// either, no bound.
pub fn available_memory() -> usize {
    let read = |path: &str| std::fs::read_to_string(path).ok();
    let number = |path: &str| read(path)?.trim().parse::<usize>().ok();
    let system = read("/proc/meminfo").and_then(|text| {
        let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
        Some(line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()?.saturating_mul(1024))
    });
    // Version 2 of control groups, then version 1.
    let group = [
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ]
    .into_iter()
    .find_map(|(limit, used)| Some(number(limit)?.saturating_sub(number(used)?)));
    system.unwrap_or(usize::MAX).min(group.unwrap_or(usize::MAX))
}

fn report(setup: &EngineSetup, built: &ExecutorReport) -> String {
    let mib = |bytes: usize| bytes as f64 / (1 << 20) as f64;
    let EngineSetup { scheduler, limits, kv, model, .. } = setup;
    let mut text = String::new();
    let lines = [
        format!(
            "model        {}: {}, vocabulary {}, context {}",
            model.name,
            stacks(model),
            model.vocab,
            model.context
        ),
        format!("device       {}", built.device),
        format!("weights      {:.1} MiB in {} tensors", mib(built.weight_bytes), built.tensors.len()),
        format!(
            "kv cache     {:.1} MiB: {} pages of {} positions, {}",
            mib(built.kv_bytes),
            kv.pages - 1,
            limits.page_positions,
            kv.ty
        ),
        format!("activations  {:.1} MiB for {} rows a step", mib(built.activation_bytes), limits.rows),
        format!("step buffers {:.1} MiB", mib(built.step_bytes)),
        format!(
            "scheduler    {} slots, {} may wait, {:?}, shuffle {}",
            limits.slots,
            scheduler.max_waiting,
            scheduler.policy,
            if scheduler.shuffle { "on" } else { "off" }
        ),
    ];
    for line in lines {
        let _ = writeln!(text, "{line}");
    }
    text
}

/// The stacks of layers there are.
fn stacks(model: &ModelInfo) -> String {
    match model.kind {
        Kind::Decoder => "decoder".to_owned(),
        Kind::Encoder => "encoder".to_owned(),
        Kind::EncoderDecoder => {
            format!("encoder for sources of up to {} and decoder", model.source_context)
        }
    }
}
