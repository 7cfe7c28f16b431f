//! A model with its cache on one device: what turns a [`StepBatch`] into a [`StepOutput`].
//!
//! Invariant: everything is allocated in `new`; `run` allocates nothing.

use super::activations::{Activations, activation_bytes};
use super::forward::{self, Caches};
use super::load::{self, Model, TensorRecord};
use super::shard::Shard;
use super::source::ModelSource;
use super::spec::{AttentionSpec, MlpSpec};
use anyhow::{Context, Result};
use mainstem_kernels::{
    Backend, DeviceError, HostBuf, KvLayer, KvLayout, QuantType, StepBatch, StepLimits, StepOutput,
};
use std::time::Instant;

/// What a device's actor drives. The type of the backend ends here.
pub trait Executor: Send {
    /// One forward pass; results, and what it took, go to `out`, which is cleared first.
    fn run(&mut self, batch: &StepBatch, out: &mut StepOutput) -> Result<(), DeviceError>;

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
    shard: Shard,
    kv: Vec<KvLayer<B::Buf>>,
    /// The encoder's cache, which lasts for one layer.
    scratch: Option<KvLayer<B::Buf>>,
    act: Activations<B::Buf>,
    report: ExecutorReport,
}

impl<B: Backend> ModelExecutor<B> {
    /// Loads the model and allocates all that steps within `limits` need.
    pub fn new(mut backend: B, source: &ModelSource, kv: KvPlan, limits: StepLimits) -> Result<Self> {
        let shard = Shard::whole(source.spec.cached_layers().len());
        let mut measure = Measure::begin();
        let model = load::load(&mut backend, source, &shard, &limits)?;
        let weight_bytes = measure.since_last();
        let caches = kv_layouts(source, kv, limits.page_positions)
            .map(|layout| backend.alloc_kv(layout))
            .collect::<Result<_, _>>()
            .context("allocating the KV cache")?;
        let kv_bytes = measure.since_last();
        let scratch = scratch_layout(source, &limits).map(|layout| backend.alloc_kv(layout)).transpose();
        let scratch = scratch.context("allocating the encoder's cache")?;
        let act =
            Activations::new(&mut backend, &source.spec, &limits).context("allocating the activations")?;
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
        Ok(ModelExecutor { backend, model, shard, kv: caches, scratch, act, report })
    }
}

/// What a [`ModelExecutor`] of these sizes would report, the tensors in another order. Weights, cache and
/// activations are only counted; of `backend`, which is used up, the step buffers are made.
pub fn forecast<B: Backend>(
    mut backend: B,
    source: &ModelSource,
    kv: KvPlan,
    limits: StepLimits,
) -> Result<ExecutorReport> {
    let tensors = load::records(source);
    // The step buffers are as wide as what the backend has seen: matrices and a cache of no rows.
    for tensor in &tensors {
        if let [_, inp] = tensor.shape[..] {
            backend.upload_weight(tensor.ty, 0, inp, &[])?;
        }
    }
    for layout in kv_layouts(source, kv, limits.page_positions).chain(scratch_layout(source, &limits)) {
        backend.alloc_kv(KvLayout { pages: 0, ..layout })?;
    }
    for layer in source.spec.stacks().flat_map(|stack| &stack.layers) {
        if let MlpSpec::Experts(moe) = &layer.mlp {
            backend.prepare_moe(&moe.shape(), source.spec.hidden)?;
        }
    }
    let mut measure = Measure::begin();
    backend.prepare(&limits).context("allocating the step buffers")?;
    let step_bytes = measure.since_last();
    let page = page_bytes(source, kv.ty, limits.page_positions).context("a page is too large")?;
    Ok(ExecutorReport {
        device: backend.describe(),
        weight_bytes: tensors.iter().map(TensorRecord::loaded_bytes).sum::<usize>()
            + load::table_bytes(&source.spec, &limits),
        tensors,
        kv_bytes: kv.pages.saturating_mul(page),
        activation_bytes: working_bytes(source, &limits),
        step_bytes,
    })
}

/// Bytes of one page in all layers; `None` when they overflow.
pub fn page_bytes(source: &ModelSource, ty: QuantType, page_positions: usize) -> Option<usize> {
    let mut layouts = kv_layouts(source, KvPlan { ty, pages: 1 }, page_positions);
    layouts.try_fold(0usize, |bytes, layout| bytes.checked_add(layout.page_bytes()?))
}

/// Bytes of all that a step works in and leaves nothing in: activations, and an encoder's cache.
pub fn working_bytes(source: &ModelSource, limits: &StepLimits) -> usize {
    let scratch =
        scratch_layout(source, limits).and_then(|layout| layout.page_bytes()?.checked_mul(layout.pages));
    activation_bytes(&source.spec, limits).saturating_add(scratch.unwrap_or(0))
}

/// The caches of the decoder's layers.
fn kv_layouts(source: &ModelSource, kv: KvPlan, page_positions: usize) -> impl Iterator<Item = KvLayout> {
    let layers = source.spec.cached_layers().iter();
    layers.map(move |layer| layout(&layer.attention, kv, page_positions))
}

/// The cache that an encoder's layers use one after another. It is in single precision: nothing of it stays.
fn scratch_layout(source: &ModelSource, limits: &StepLimits) -> Option<KvLayout> {
    let layers = &source.spec.encoder.as_ref()?.layers;
    let kv = KvPlan { ty: QuantType::F32, pages: limits.scratch_positions().div_ceil(limits.page_positions) };
    Some(layout(&layers.first()?.attention, kv, limits.page_positions))
}

fn layout(attention: &AttentionSpec, kv: KvPlan, page_positions: usize) -> KvLayout {
    let AttentionSpec { kv_heads, k_dim, v_dim, .. } = *attention;
    KvLayout { ty: kv.ty, pages: kv.pages, page_positions, kv_heads, k_dim, v_dim }
}

impl<B: Backend> Executor for ModelExecutor<B> {
    fn run(&mut self, batch: &StepBatch, out: &mut StepOutput) -> Result<(), DeviceError> {
        let began = Instant::now();
        out.clear();
        out.step = batch.step;
        forward::step_major(
            &mut self.backend,
            &self.model,
            &self.shard,
            Caches { own: &mut self.kv, scratch: self.scratch.as_mut() },
            &mut self.act,
            batch,
            out,
        );
        assert_eq!(out.rows.len(), batch.samples.len(), "a result for each wanted row");
        out.times.forward = began.elapsed() - out.times.sample;
        Ok(())
    }

    fn report(&self) -> ExecutorReport {
        self.report.clone()
    }
}

/// What is allocated from one look to the next. Buffers are counted for the whole process, so that what
/// another device allocates meanwhile is counted too: good for a report, not for a decision.
struct Measure(usize);

impl Measure {
    fn begin() -> Measure {
        Measure(HostBuf::allocated())
    }

    fn since_last(&mut self) -> usize {
        let now = HostBuf::allocated();
        now.saturating_sub(std::mem::replace(&mut self.0, now))
    }
}
