//! A model with its cache on one device: what turns a [`StepBatch`] into a [`StepOutput`].
//!
//! Invariant: everything is allocated in `new`; `run` allocates nothing, unless the model is observed.

use super::activations::{Activations, activation_bytes};
use super::importance::Observer;
use super::load::{self, Model, TensorRecord};
use super::schedule::{self, Caches, Traffic};
use super::shard::Shard;
use super::source::ModelSource;
use super::spec::{AttentionSpec, MlpSpec, ModelSpec};
use anyhow::{Context, Result, ensure};
use mainstem_kernels::{
    Backend, DeviceError, Flow, HostBuf, KvLayer, KvLayout, QuantType, StepBatch, StepLimits, StepOutput,
};
use std::time::Instant;

/// What a device's actor drives. The type of the backend ends here.
pub trait Executor: Send {
    /// This device's part of one forward pass, `flow` before and behind it; what it took goes to `out`, which is cleared
    /// first, and the results of the whole do on the first member of the last stage. The members of a stage meet in every
    /// step, whatever is in it: so none of them is more than a step behind, which bounds what waits for it.
    fn run(&mut self, batch: &StepBatch, flow: Flow<'_>, out: &mut StepOutput) -> Result<(), DeviceError>;

    /// What was allocated for what.
    fn report(&self) -> ExecutorReport;
}

/// What was allocated for what, in bytes, for the report at start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExecutorReport {
    /// Name, instruction set and threads of the device.
    pub device: String,
    pub tensors: Vec<TensorRecord>,
    /// Weights, and the table of rotary positions.
    pub weight_bytes: usize,
    pub kv_bytes: usize,
    /// Buffers between operations, and the cache that an encoder's layers use one after another.
    pub activation_bytes: usize,
    /// What the backend needs beside them for its steps.
    pub step_bytes: usize,
}

/// The cache's number format and size: everything of it that the model does not say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvPlan {
    pub ty: QuantType,
    /// Pages, the sink included.
    pub pages: usize,
}

/// A model on a device of type `B`.
pub struct ModelExecutor<B: Backend> {
    backend: B,
    model: Model<B::Buf>,
    kv: Vec<KvLayer<B::Buf>>,
    /// The encoder's cache, which lasts for one layer.
    scratch: Option<KvLayer<B::Buf>>,
    act: Activations<B::Buf>,
    report: ExecutorReport,
}

impl<B: Backend> ModelExecutor<B> {
    /// Loads the shard's part of the model and allocates all that steps within `limits` need. The backend has joined its
    /// stage before, if that has other members.
    pub fn new(
        mut backend: B,
        source: &ModelSource,
        shard: &Shard,
        kv: KvPlan,
        limits: StepLimits,
    ) -> Result<Self> {
        let spec = source.part(shard)?;
        let (place, (rank, members)) = ((shard.rank, shard.members()), backend.place());
        ensure!(
            place == (rank, members),
            "the device joined its stage as {rank} of {members}, not {place:?}; this is a bug"
        );
        let mut measure = Measure::begin();
        let model = load::load(&mut backend, source, shard, spec, &limits)?;
        let spec = &model.spec;
        let weight_bytes = measure.since_last();
        let caches = kv_layouts(spec, kv, limits.page_positions)
            .map(|layout| backend.alloc_kv(layout))
            .collect::<Result<_, _>>()
            .context("allocating the KV cache")?;
        let kv_bytes = measure.since_last();
        let scratch = scratch_layout(spec, &limits).map(|layout| backend.alloc_kv(layout)).transpose();
        let scratch = scratch.context("allocating the encoder's cache")?;
        let mut act = Activations::new(&mut backend, spec, &limits).context("allocating the activations")?;
        let is_whole = members == 1;
        ensure!(is_whole || source.observations.is_none(), "members see parts of inputs; this is a bug");
        act.observer = source.observations.clone().map(Observer::new);
        let activation_bytes = measure.since_last();
        backend.prepare(&limits).context("allocating the step buffers")?;
        let report = ExecutorReport {
            device: backend.describe(),
            tensors: model.tensors.clone(),
            weight_bytes,
            kv_bytes,
            activation_bytes,
            step_bytes: measure.since_last(),
        };
        Ok(ModelExecutor { backend, model, kv: caches, scratch, act, report })
    }
}

/// What a [`ModelExecutor`] of these sizes would report, the tensors in another order. Weights, cache and
/// activations are only counted; of `backend`, which is used up, the step buffers are made.
pub fn forecast<B: Backend>(
    mut backend: B,
    source: &ModelSource,
    shard: &Shard,
    kv: KvPlan,
    limits: StepLimits,
) -> Result<ExecutorReport> {
    let spec = source.part(shard)?;
    let tensors = load::records(source, &spec);
    // The step buffers are as wide as what the backend has seen: matrices and a cache of no rows.
    for tensor in &tensors {
        if let [_, inp] = tensor.shape[..] {
            backend.upload_weight(tensor.ty, 0, inp, &[])?;
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
        [out, inp] => backend.weight_bytes(tensor.ty, out, inp),
        _ => tensor.loaded_bytes(),
    };
    let weight_bytes = tensors.iter().map(bytes).sum::<usize>() + load::table_bytes(&spec, &limits);
    let mut measure = Measure::begin();
    backend.prepare(&limits).context("allocating the step buffers")?;
    let step_bytes = measure.since_last();
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

/// Bytes of one page in all layers of a model, or of a member's part of one; `None` when they overflow.
pub fn page_bytes(spec: &ModelSpec, ty: QuantType, page_positions: usize) -> Option<usize> {
    let mut layouts = kv_layouts(spec, KvPlan { ty, pages: 1 }, page_positions);
    layouts.try_fold(0usize, |bytes, layout| bytes.checked_add(layout.page_bytes()?))
}

/// Bytes of all that a step of a model, or of a member's part of one, works in and leaves nothing in: activations, and an
/// encoder's cache.
pub fn working_bytes(spec: &ModelSpec, limits: &StepLimits) -> usize {
    let scratch =
        scratch_layout(spec, limits).and_then(|layout| layout.page_bytes()?.checked_mul(layout.pages));
    activation_bytes(spec, limits).saturating_add(scratch.unwrap_or(0))
}

/// The caches of the decoder's layers.
fn kv_layouts(spec: &ModelSpec, kv: KvPlan, page_positions: usize) -> impl Iterator<Item = KvLayout> {
    let layers = spec.cached_layers().iter();
    layers.map(move |layer| layout(&layer.attention, kv, page_positions))
}

/// The cache that an encoder's layers use one after another. It is in single precision: nothing of it stays.
fn scratch_layout(spec: &ModelSpec, limits: &StepLimits) -> Option<KvLayout> {
    let layers = &spec.encoder.as_ref()?.layers;
    let kv = KvPlan { ty: QuantType::F32, pages: limits.scratch_positions().div_ceil(limits.page_positions) };
    Some(layout(&layers.first()?.attention, kv, limits.page_positions))
}

fn layout(attention: &AttentionSpec, kv: KvPlan, page_positions: usize) -> KvLayout {
    let AttentionSpec { kv_heads, k_dim, v_dim, .. } = *attention;
    KvLayout { ty: kv.ty, pages: kv.pages, page_positions, kv_heads, k_dim, v_dim }
}

impl<B: Backend> Executor for ModelExecutor<B> {
    fn run(&mut self, batch: &StepBatch, flow: Flow<'_>, out: &mut StepOutput) -> Result<(), DeviceError> {
        let began = Instant::now();
        out.clear();
        out.step = batch.step;
        schedule::step_major(
            &mut self.backend,
            &self.model,
            Caches { own: &mut self.kv, scratch: self.scratch.as_mut() },
            &mut self.act,
            Traffic { batch, flow, out },
        );
        let wanted = if self.model.seams.answers { batch.samples.len() } else { 0 };
        assert_eq!(out.rows.len(), wanted, "a result for each wanted row");
        out.times.forward = began.elapsed() - out.times.sample;
        Ok(())
    }

    fn report(&self) -> ExecutorReport {
        self.report.clone()
    }
}

/// What is allocated from one look to the next on this thread, which drives the device: others are built at the same
/// time.
struct Measure(usize);

impl Measure {
    fn begin() -> Measure {
        Measure(HostBuf::allocated_here(0).1)
    }

    fn since_last(&mut self) -> usize {
        let (more, now) = HostBuf::allocated_here(self.0);
        self.0 = now;
        more
    }
}
