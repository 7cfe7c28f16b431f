//! A model with its KV cache on one device, which turns a [`StepBatch`] into a [`StepOutput`].
//!
//! Invariant: everything is allocated in `new`; `run` allocates nothing, unless the model is observed.

use super::activations::{Activations, activation_bytes};
use super::load;
use super::schedule::{self, Caches, StepIo};
use super::shard::Shard;
use super::source::ModelSource;
use super::spec::{AttentionSpec, MlpSpec, ModelSpec};
use super::weights::{Model, TensorRecord};
use crate::quantize::Observer;
use anyhow::{Context, Result, ensure};
use mainstem_kernels::{
    Backend, DeviceError, HandoffPorts, KvLayer, KvLayout, QuantType, StepBatch, StepLimits, StepOutput,
};

/// Runs steps on one device; used by a device's actor. The backend's type does not appear above this trait.
pub trait Executor: Send {
    /// Runs this device's part of one forward pass, between the activations that `flow` receives and sends.
    /// Clears `out` first, then writes the times to it; the first rank of the last stage also writes the
    /// results of the whole model. That rank sends the signal of `flow` before the decoder's final norm, if
    /// the step has decoder rows: then the next step is scheduled, and waits when this one returns. The ranks
    /// of a stage synchronize in every step, whatever it contains, so no rank is more than a step behind,
    /// which bounds the queue of messages for it.
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
    model: Model<B::Buf>,
    kv: Vec<KvLayer<B::Buf>>,
    /// The encoder's cache, whose contents last for one layer.
    scratch: Option<KvLayer<B::Buf>>,
    act: Activations<B::Buf>,
    report: ExecutorReport,
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
        let spec = source.shard_spec(shard)?;
        let (place, (rank, ranks)) = ((shard.rank, shard.rank_count()), backend.rank_and_count());
        ensure!(
            place == (rank, ranks),
            "the device joined its stage as rank {rank} of {ranks}, not {place:?}; this is a bug"
        );
        let mut allocated = AllocationMeter::default();
        let model = load::load(&mut backend, source, shard, spec, &limits)?;
        let spec = &model.spec;
        let weight_bytes = allocated.since_last(&backend);
        let caches = kv_layouts(spec, kv, limits.page_positions)
            .map(|layout| backend.alloc_kv(layout))
            .collect::<Result<_, _>>()
            .context("allocating the KV cache")?;
        let kv_bytes = allocated.since_last(&backend);
        let scratch = scratch_layout(spec, &limits).map(|layout| backend.alloc_kv(layout)).transpose();
        let scratch = scratch.context("allocating the encoder's cache")?;
        let mut act = Activations::new(&mut backend, spec, &limits).context("allocating the activations")?;
        let is_whole = ranks == 1;
        ensure!(
            is_whole || source.observations.is_none(),
            "inputs cannot be observed on a split model; this is a bug"
        );
        act.observer = source.observations.clone().map(Observer::new);
        let activation_bytes = allocated.since_last(&backend);
        backend.prepare(&limits).context("allocating the step buffers")?;
        let report = ExecutorReport {
            device: backend.describe(),
            tensors: model.tensors.clone(),
            weight_bytes,
            kv_bytes,
            activation_bytes,
            step_bytes: allocated.since_last(&backend),
        };
        Ok(ModelExecutor { backend, model, kv: caches, scratch, act, report })
    }
}

/// Returns what a [`ModelExecutor`] of these sizes would report, with the tensors in another order. Weights,
/// cache and activations are only counted; the step buffers are allocated by `backend`, which is consumed.
pub fn estimate_report<B: Backend>(
    mut backend: B,
    source: &ModelSource,
    shard: &Shard,
    kv: KvCacheConfig,
    limits: StepLimits,
) -> Result<ExecutorReport> {
    let spec = source.shard_spec(shard)?;
    let tensors = load::records(source, &spec);
    // The size of the step buffers depends on what the backend has allocated: matrices and a cache without
    // rows.
    for tensor in &tensors {
        if let [_, k] = tensor.shape[..] {
            backend.upload_weight(tensor.ty, 0, k, &[])?;
        }
    }
    for layout in kv_layouts(&spec, kv, limits.page_positions).chain(scratch_layout(&spec, &limits)) {
        backend.alloc_kv(KvLayout { pages: 0, ..layout })?;
    }
    for layer in spec.stacks().flat_map(|stack| &stack.layers) {
        if let MlpSpec::Experts(moe) = &layer.mlp {
            backend.prepare_moe(&moe.shape(), spec.hidden)?;
        }
    }
    let bytes = |tensor: &TensorRecord| match tensor.shape[..] {
        [n, k] => backend.weight_bytes(tensor.ty, n, k),
        _ => tensor.loaded_bytes(),
    };
    let weight_bytes = tensors.iter().map(bytes).sum::<usize>() + load::table_bytes(&spec, &limits);
    let before = backend.allocated_bytes();
    backend.prepare(&limits).context("allocating the step buffers")?;
    let step_bytes = backend.allocated_bytes() - before;
    let page = page_bytes(&spec, kv.ty, limits.page_positions).context("a page is too large")?;
    Ok(ExecutorReport {
        device: backend.describe(),
        weight_bytes,
        tensors,
        kv_bytes: kv.pages.saturating_mul(page),
        activation_bytes: working_bytes(&spec, &limits),
        step_bytes,
    })
}

/// Returns the size of one page in all layers of a model, or of one rank's part, in bytes; `None` on
/// overflow.
pub fn page_bytes(spec: &ModelSpec, ty: QuantType, page_positions: usize) -> Option<usize> {
    let mut layouts = kv_layouts(spec, KvCacheConfig { ty, pages: 1 }, page_positions);
    layouts.try_fold(0usize, |bytes, layout| bytes.checked_add(layout.page_bytes()?))
}

/// Returns the size of the buffers whose contents last for one step, in bytes, for a model or one rank's
/// part: activations, and an encoder's cache.
pub fn working_bytes(spec: &ModelSpec, limits: &StepLimits) -> usize {
    let scratch =
        scratch_layout(spec, limits).and_then(|layout| layout.page_bytes()?.checked_mul(layout.pages));
    activation_bytes(spec, limits).saturating_add(scratch.unwrap_or(0))
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
        schedule::run_step(
            &mut self.backend,
            &self.model,
            Caches { decoder: &mut self.kv, scratch: self.scratch.as_mut() },
            &mut self.act,
            StepIo { batch, handoff: flow, out },
        );
        let wanted = if self.model.role.returns_output { batch.sampling.len() } else { 0 };
        assert_eq!(out.tokens.len(), wanted, "there must be a result for each output row");
        out.times = self.backend.end_step();
        Ok(())
    }

    fn report(&self) -> ExecutorReport {
        self.report.clone()
    }
}

/// Measures what a backend allocates from one call to the next.
#[derive(Default)]
struct AllocationMeter(usize);

impl AllocationMeter {
    fn since_last(&mut self, backend: &impl Backend) -> usize {
        let now = backend.allocated_bytes();
        now - std::mem::replace(&mut self.0, now)
    }
}
