//! A model with its KV cache on one device, which turns a [`StepBatch`] into a [`StepOutput`].
//!
//! Invariant: everything is allocated in `new`; `run` allocates nothing, unless the model is observed.

use super::activations::Activations;
use super::load;
use super::load_target::{ByteCounter, LoadTarget};
use super::schedule::{self, Caches, StepIo};
use super::shard::Shard;
use super::source::ModelSource;
use super::spec::{AttentionSpec, ModelSpec};
use super::weights::{Model, TensorRecord};
use crate::quantize::Observer;
use anyhow::{Context, Result, ensure};
use mainstem_kernels::{
    Backend, DeviceError, DeviceSizes, HandoffPorts, KvLayer, KvLayout, QuantType, StepBatch, StepLimits,
    StepOutput,
};

/// Runs steps on one device; used by a device's actor. The backend's type does not appear above this trait.
pub trait Executor: Send {
    /// Runs this device's part of one forward pass, between the activations that `flow` receives and sends.
    /// Clears `out` first, then writes the times to it; the first rank of the last stage also writes the
    /// results of the whole model. The ranks of a stage synchronize in every step, whatever it contains, so
    /// no rank is more than a step behind, which bounds the queue of messages for it. Fails if weights that
    /// are not in the device's memory cannot be read.
    fn run(
        &mut self,
        batch: &StepBatch,
        flow: HandoffPorts<'_>,
        out: &mut StepOutput,
    ) -> Result<(), DeviceError>;

    /// Returns what was allocated.
    fn report(&self) -> ExecutorReport;
}

/// The allocations of an executor in bytes, for the report at startup.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExecutorReport {
    /// Name, instruction set and threads of the device.
    pub device: String,
    pub tensors: Vec<TensorRecord>,
    /// Weights and position tables.
    pub weight_bytes: usize,
    pub kv_bytes: usize,
    /// Activation buffers, and the cache that an encoder's layers share one after another.
    pub activation_bytes: usize,
    /// Other step buffers of the backend.
    pub step_bytes: usize,
}

impl ExecutorReport {
    /// Returns all bytes that are allocated.
    pub fn total_bytes(&self) -> usize {
        self.weight_bytes + self.kv_bytes + self.activation_bytes + self.step_bytes
    }
}

/// Number format and size of the KV cache: everything that the model does not determine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvCacheConfig {
    pub ty: QuantType,
    /// Number of pages, including the null page.
    pub pages: usize,
}

/// A model on a device of type `B`.
pub struct ModelExecutor<B: Backend> {
    backend: B,
    allocated: Allocated<B::Buf>,
    report: ExecutorReport,
}

/// Everything that an executor allocates, apart from the backend's own buffers.
struct Allocated<Buf> {
    model: Model<Buf>,
    kv: Vec<KvLayer<Buf>>,
    /// The encoder's cache, whose contents last for one layer.
    scratch: Option<KvLayer<Buf>>,
    act: Activations<Buf>,
}

impl<B: Backend> ModelExecutor<B> {
    /// Loads the shard's part of the model and allocates everything that steps within `limits` need. If the
    /// stage has other ranks, the backend must have joined it before.
    pub fn new(
        mut backend: B,
        source: &ModelSource,
        shard: &Shard,
        kv: KvCacheConfig,
        limits: StepLimits,
    ) -> Result<Self> {
        let (place, (rank, ranks)) = ((shard.rank, shard.rank_count()), backend.rank_and_count());
        ensure!(
            place == (rank, ranks),
            "the device joined its stage as rank {rank} of {ranks}, not {place:?}; this is a bug"
        );
        ensure!(
            ranks == 1 || source.observations.is_none(),
            "inputs cannot be observed on a split model; this is a bug"
        );
        let (mut allocated, report) = allocate(&mut backend, source, shard, kv, &limits)?;
        allocated.act.observer = source.observations.clone().map(Observer::new);
        Ok(ModelExecutor { backend, allocated, report })
    }
}

/// Returns what a [`ModelExecutor`] with these sizes would report on a device of these sizes. Neither is a
/// device created nor tensor data read.
pub fn estimate_report(
    sizes: &dyn DeviceSizes,
    source: &ModelSource,
    shard: &Shard,
    kv: KvCacheConfig,
    limits: StepLimits,
) -> Result<ExecutorReport> {
    Ok(allocate(&mut ByteCounter::new(sizes), source, shard, kv, &limits)?.1)
}

/// Loads the shard's part of the model into `target` and allocates everything that steps within `limits` need.
fn allocate<T: LoadTarget>(
    target: &mut T,
    source: &ModelSource,
    shard: &Shard,
    kv: KvCacheConfig,
    limits: &StepLimits,
) -> Result<(Allocated<T::Buf>, ExecutorReport)> {
    let mut meter = AllocationMeter::default();
    let model = load::load(target, source, shard, source.shard_spec(shard)?, limits)?;
    let spec = &model.spec;
    let weight_bytes = meter.since_last(target);
    let caches = kv_layouts(spec, kv, limits.page_positions)
        .map(|layout| target.alloc_kv(layout))
        .collect::<Result<_, _>>()
        .context("allocating the KV cache")?;
    let kv_bytes = meter.since_last(target);
    let scratch = scratch_layout(spec, limits).map(|layout| target.alloc_kv(layout)).transpose();
    let scratch = scratch.context("allocating the encoder's cache")?;
    let act = Activations::new(target, spec, limits).context("allocating the activations")?;
    let activation_bytes = meter.since_last(target);
    target.prepare(limits).context("allocating the step buffers")?;
    let report = ExecutorReport {
        device: target.describe(),
        tensors: model.tensors.clone(),
        weight_bytes,
        kv_bytes,
        activation_bytes,
        step_bytes: meter.since_last(target),
    };
    Ok((Allocated { model, kv: caches, scratch, act }, report))
}

/// Returns the size of one page in all layers of a model, or of one rank's part, in bytes; `None` on
/// overflow.
pub fn page_bytes(spec: &ModelSpec, ty: QuantType, page_positions: usize) -> Option<usize> {
    let mut layouts = kv_layouts(spec, KvCacheConfig { ty, pages: 1 }, page_positions);
    layouts.try_fold(0usize, |bytes, layout| bytes.checked_add(layout.page_bytes()?))
}

/// Returns the cache layouts of the decoder's layers.
fn kv_layouts(spec: &ModelSpec, kv: KvCacheConfig, page_positions: usize) -> impl Iterator<Item = KvLayout> {
    let layers = spec.cached_layers().iter();
    layers.map(move |layer| kv_layout(&layer.attention, kv, page_positions))
}

/// Returns the layout of the cache that an encoder's layers share one after another. It is F32, because its
/// contents are temporary.
fn scratch_layout(spec: &ModelSpec, limits: &StepLimits) -> Option<KvLayout> {
    let layers = &spec.encoder.as_ref()?.layers;
    let kv = KvCacheConfig {
        ty: QuantType::F32,
        pages: limits.scratch_positions().div_ceil(limits.page_positions),
    };
    Some(kv_layout(&layers.first()?.attention, kv, limits.page_positions))
}

fn kv_layout(attention: &AttentionSpec, kv: KvCacheConfig, page_positions: usize) -> KvLayout {
    let AttentionSpec { kv_heads, k_dim, v_dim, .. } = *attention;
    KvLayout { ty: kv.ty, pages: kv.pages, page_positions, kv_heads, k_dim, v_dim }
}

impl<B: Backend> Executor for ModelExecutor<B> {
    fn run(
        &mut self,
        batch: &StepBatch,
        flow: HandoffPorts<'_>,
        out: &mut StepOutput,
    ) -> Result<(), DeviceError> {
        out.clear();
        out.step = batch.step;
        let Allocated { model, kv, scratch, act } = &mut self.allocated;
        let outcome = schedule::run_step(
            &mut self.backend,
            model,
            Caches { decoder: kv, scratch: scratch.as_mut() },
            act,
            StepIo { batch, handoff: flow, out },
        );
        out.times = self.backend.end_step();
        outcome?;
        let wanted = if self.allocated.model.role.returns_output { batch.sampling.len() } else { 0 };
        assert_eq!(out.tokens.len(), wanted, "there must be a result for each output row");
        Ok(())
    }

    fn report(&self) -> ExecutorReport {
        self.report.clone()
    }
}

/// Measures what is allocated from one call to the next.
#[derive(Default)]
struct AllocationMeter(usize);

impl AllocationMeter {
    fn since_last(&mut self, target: &impl LoadTarget) -> usize {
        let now = target.allocated_bytes();
        now - std::mem::replace(&mut self.0, now)
    }
}
