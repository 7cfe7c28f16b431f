//! A model with its cache on one device: what turns a [`StepBatch`] into a [`StepOutput`].
//!
//! Invariant: everything is allocated in `new`; `run` allocates nothing.

use super::forward::{self, Activations, activation_bytes};
use super::load::{self, Model, TensorRecord};
use super::rope;
use super::shard::Shard;
use super::source::ModelSource;
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
    act: Activations<B::Buf>,
    report: ExecutorReport,
}

impl<B: Backend> ModelExecutor<B> {
    /// Loads the model and allocates all that steps within `limits` need.
    pub fn new(mut backend: B, source: &ModelSource, kv: KvPlan, limits: StepLimits) -> Result<Self> {
        let shard = Shard::whole(source.spec.layers);
        let mut measure = Measure::begin();
        let model = load::load(&mut backend, source, &shard, limits.positions)?;
        let weight_bytes = measure.since_last();
        let kv_layout = kv_layout(source, kv, limits.page_positions);
        let caches = shard
            .layers
            .clone()
            .map(|_| backend.alloc_kv(kv_layout))
            .collect::<Result<_, _>>()
            .context("allocating the KV cache")?;
        let kv_bytes = measure.since_last();
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
        Ok(ModelExecutor { backend, model, shard, kv: caches, act, report })
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
    backend.alloc_kv(KvLayout { pages: 0, ..kv_layout(source, kv, limits.page_positions) })?;
    let mut measure = Measure::begin();
    backend.prepare(&limits).context("allocating the step buffers")?;
    let step_bytes = measure.since_last();
    let page = page_bytes(source, kv.ty, limits.page_positions).context("a page is too large")?;
    let rope = rope::table_bytes(source.spec.rope.dims, limits.positions);
    Ok(ExecutorReport {
        device: backend.describe(),
        weight_bytes: tensors.iter().map(TensorRecord::loaded_bytes).sum::<usize>() + rope,
        tensors,
        kv_bytes: kv.pages.saturating_mul(page),
        activation_bytes: activation_bytes(&source.spec, &limits),
        step_bytes,
    })
}

/// Bytes of one page in all layers; `None` when they overflow.
pub fn page_bytes(source: &ModelSource, ty: QuantType, page_positions: usize) -> Option<usize> {
    let layout = kv_layout(source, KvPlan { ty, pages: 1 }, page_positions);
    layout.page_bytes()?.checked_mul(source.spec.layers)
}

fn kv_layout(source: &ModelSource, kv: KvPlan, page_positions: usize) -> KvLayout {
    let attention = &source.spec.attention;
    KvLayout {
        ty: kv.ty,
        pages: kv.pages,
        page_positions,
        kv_heads: attention.kv_heads,
        k_dim: attention.head_dim,
        v_dim: attention.head_dim,
    }
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
            &mut self.kv,
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
