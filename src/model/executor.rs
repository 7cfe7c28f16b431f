//! A model with its KV cache on one device, which turns a [`StepBatch`] into a [`StepOutput`].
//!
//! Invariant: everything is allocated in `new`; `run` allocates nothing, unless logits are returned.

use super::activations::Activations;
use super::draft_model::{DraftModel, draft_limits, load_draft};
use super::drafter::Drafter;
use super::layer_cache::LayerCache;
use super::load;
use super::load_target::{ByteCounter, LoadTarget};
use super::offload::{
    CacheOffload, CacheReport, OffloadReport, RowLink, StepTrace, StreamedCaches, Tier, TransferPath,
    buffer_layouts,
};
use super::schedule::{self, Caches, DecoderCaches, StepIo};
use super::shard::{Shard, StageRole};
use super::source::ModelSource;
use super::spec::{AttentionSpec, ModelSpec};
use super::weights::{Model, TensorRecord};
use anyhow::{Context, Result, ensure};
use mainstem_kernels::{
    Abort, Backend, DeviceError, DeviceSizes, HandoffPorts, KvLayer, KvLayout, KvTable, QuantType, StepBatch,
    StepLimits, StepOutput, StepTimes,
};
use std::sync::Arc;
use std::time::Instant;

/// Runs steps on one device; used by a device's actor. The backend's type does not appear above this trait.
pub trait Executor: Send {
    /// Runs this device's part of one forward pass, between the activations that `flow` receives and sends.
    /// Clears `out` first, then writes the times to it; the first rank of the last stage also makes the
    /// drafts of the batch, and writes the results of the whole model. That rank sends the signal of `flow`
    /// before the decoder's final norm, if the step has decoder rows: then the next step is scheduled, and
    /// waits when this one returns. The ranks of a stage synchronize in every step, whatever it contains, so
    /// no rank is more than a step behind, which bounds the queue of messages for it. Fails if weights that
    /// are not in the device's memory cannot be read.
    ///
    /// The rank that writes the results waits for the late inputs of `flow`, right before it samples the rows
    /// that have one. Unwinds with [`mainstem_kernels::Aborted`] if the step is aborted meanwhile.
    fn run(
        &mut self,
        batch: &StepBatch,
        flow: HandoffPorts<'_>,
        out: &mut StepOutput,
    ) -> Result<(), DeviceError>;

    /// Returns what was allocated.
    fn report(&self) -> ExecutorReport;

    /// Lets `abort`, which concerns all steps of this executor, end the waits of a step for a disk. The step
    /// then fails with [`mainstem_kernels::Aborted`]. Does nothing for an executor that never waits for one.
    fn stop_on_abort(&mut self, _abort: &Abort) {}
}

/// The allocations of an executor in bytes, for the report at startup.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ExecutorReport {
    /// Name, instruction set and threads of the device.
    pub device: String,
    /// The tensors of the model, without those of a draft model.
    pub tensors: Vec<TensorRecord>,
    /// Weights and position tables, those of a draft model included.
    pub weight_bytes: usize,
    /// KV caches, those of a draft model included.
    pub kv_bytes: usize,
    /// Activation buffers, and the cache that an encoder's layers share one after another.
    pub activation_bytes: usize,
    /// Other step buffers of the backend.
    pub step_bytes: usize,
    /// Bytes that the device's driver takes beside these, in a forecast: it rounds buffers up, and loads
    /// code.
    pub driver_bytes: usize,
    /// The places of the layers' weights, if these are loaded from a store. What is on the device is a part
    /// of `weight_bytes`.
    pub offload: Option<OffloadReport>,
    /// The places of the KV caches that do not stay on the device. Their buffers are a part of `kv_bytes`.
    pub cache_offload: Option<CacheReport>,
}

impl ExecutorReport {
    /// Returns all bytes that are allocated on the device.
    pub fn total_bytes(&self) -> usize {
        self.weight_bytes + self.kv_bytes + self.activation_bytes + self.step_bytes
    }

    /// Returns the bytes of weights and of KV caches that are in the memory of the host instead of that of
    /// the device.
    pub fn host_bytes(&self) -> [usize; 2] {
        let weights = self.offload.as_ref().map_or(0, |offload| offload.host_bytes);
        [weights, self.cache_offload.map_or(0, |caches| caches.host_bytes)]
    }
}

/// Number format and size of the KV cache: everything that the model does not determine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvCacheConfig {
    pub ty: QuantType,
    /// Number of pages, including the null page.
    pub pages: usize,
    /// Number of pages of the layers that use the window table, with a null page; unused without such layers.
    pub window_pages: usize,
}

/// A model on a device of type `B`.
pub struct ModelExecutor<B: Backend> {
    backend: B,
    allocated: Allocated<B::Buf>,
    report: ExecutorReport,
    limits: StepLimits,
    /// The record of the times of steps, if they are wanted.
    trace: Option<StepTrace>,
}

/// Everything that an executor allocates, apart from the backend's own buffers.
struct Allocated<Buf> {
    model: Model<Buf>,
    kv: DecoderCaches<Buf>,
    /// The encoder's cache, whose contents last for one layer.
    scratch: Option<LayerCache<Buf>>,
    act: Activations<Buf>,
    draft: Option<DraftModel<Buf>>,
}

impl<B: Backend> ModelExecutor<B> {
    /// Loads the shard's part of the model and allocates everything that steps within `limits` need. The rank
    /// that returns the results also loads the draft model, if the source has one. If the stage has other
    /// ranks, the backend must have joined it before.
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
        let (allocated, report) = allocate(&mut backend, source, shard, kv, &limits)?;
        let trace = source.transfers.trace();
        let trace = trace.map(|trace| StepTrace::start(trace, &shard.encoder, &shard.decoder));
        Ok(ModelExecutor { backend, allocated, report, limits, trace })
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

/// Loads the shard's part of the model into `target`, and allocates what steps within `limits` need.
fn allocate<T: LoadTarget>(
    target: &mut T,
    source: &ModelSource,
    shard: &Shard,
    kv: KvCacheConfig,
    limits: &StepLimits,
) -> Result<(Allocated<T::Buf>, ExecutorReport)> {
    let mut meter = AllocationMeter::default();
    let path = TransferPath::new(&source.transfers, source.link_rate, shard);
    if T::READS_DATA {
        path.held.begin_build()?;
    }
    let (model, offload) = load::load(target, (source, &path), shard, source.shard_spec(shard)?, limits)?;
    let draft_source = draft_of(source, shard);
    let draft = draft_source.map(|draft| load_draft(target, draft, limits)).transpose()?;
    let spec = &model.spec;
    let weight_bytes = meter.since_last(target);
    let (caches, cache_offload) = alloc_caches(target, (spec, kv), limits, Some((source, &path)))?;
    let draft_limits = draft_source.map(|draft| draft_limits(draft, limits));
    let of_draft = draft.as_ref().zip(draft_limits.as_ref());
    let draft_kv = of_draft
        .map(|(draft, limits)| {
            alloc_caches(target, (&draft.spec, kv), limits, None).map(|(caches, _)| caches)
        })
        .transpose();
    let draft_kv = draft_kv.context("the draft model")?;
    let kv_bytes = meter.since_last(target);
    let scratch = scratch_layout(spec, limits).map(|layout| target.alloc_kv(layout)).transpose();
    let scratch = scratch.context("allocating the encoder's cache")?;
    let scratch = scratch.map(|kv| LayerCache::on_device(KvTable::Scratch, kv));
    let mut activations = |(spec, ranks): (&ModelSpec, usize), limits: &StepLimits| {
        Activations::new(target, (spec, ranks), limits).context("allocating the activations")
    };
    let act = activations((spec, shard.rank_count()), limits)?;
    let draft = match (draft_limits, draft, draft_kv) {
        (Some(limits), Some(model), Some(kv)) => {
            let act = activations((&model.spec, 1), &limits)?;
            Some(DraftModel::new(model, kv, act, limits))
        }
        _ => None,
    };
    let activation_bytes = meter.since_last(target);
    // Tokens are counted where they are sampled.
    let counts_tokens = limits.counts_tokens && StageRole::for_shard(&source.spec, shard).returns_output;
    target.prepare(&StepLimits { counts_tokens, ..*limits }).context("allocating the step buffers")?;
    let report = ExecutorReport {
        device: target.describe(),
        tensors: model.tensors.clone(),
        weight_bytes,
        kv_bytes,
        activation_bytes,
        step_bytes: meter.since_last(target),
        driver_bytes: target.driver_bytes(),
        offload,
        cache_offload,
    };
    Ok((Allocated { model, kv: caches, scratch, act, draft }, report))
}

/// Returns the draft model that the device with a shard holds.
fn draft_of<'a>(source: &'a ModelSource, shard: &Shard) -> Option<&'a ModelSource> {
    let is_here = StageRole::for_shard(&source.spec, shard).returns_output;
    source.draft.as_deref().filter(|_| is_here)
}

/// Allocates the caches of the decoder's layers of a model, of which some are not on the device if `source`
/// says so.
fn alloc_caches<T: LoadTarget>(
    target: &mut T,
    (spec, kv): (&ModelSpec, KvCacheConfig),
    limits: &StepLimits,
    source: Option<(&ModelSource, &TransferPath)>,
) -> Result<(DecoderCaches<T::Buf>, Option<CacheReport>)> {
    let layouts: Vec<_> = kv_layouts(spec, kv, limits).collect();
    let offload = source.and_then(|(source, path)| Some((source.cache_offload.as_ref()?, path)));
    let tiers = cache_tiers(offload.map(|(offload, _)| offload), &layouts);
    let row_link = offload.filter(|(offload, _)| offload.attends_on_host);
    let row_link = row_link.map(|(_, path)| Arc::new(RowLink::new(path.clone())));
    let alloc = |((table, layout), tier): (&(KvTable, KvLayout), &Tier)| {
        let kv = match (tier, &row_link) {
            (Tier::Device, _) => target.alloc_kv(*layout)?,
            (Tier::Host, Some(_)) => target.alloc_host_kv(*layout).context("tiers.attend_on")?,
            (Tier::Host | Tier::Disk, _) => {
                KvLayer { k: target.alloc(0)?, v: target.alloc(0)?, layout: *layout }
            }
        };
        let row_link = row_link.clone().filter(|_| *tier == Tier::Host);
        anyhow::Ok(LayerCache { row_link, ..LayerCache::on_device(*table, kv) })
    };
    let layers = layouts.iter().zip(&tiers).map(alloc).collect::<Result<_, _>>();
    let layers = layers.context("allocating the KV cache")?;
    let Some((offload, path)) = offload.filter(|_| tiers.iter().any(|tier| *tier != Tier::Device)) else {
        return Ok((DecoderCaches { layers, streamed: None }, None));
    };
    let places: Vec<_> = layouts.into_iter().map(|(_, layout)| layout).zip(tiers).collect();
    let bytes_of = |target: &T, layout: &KvLayout| target.device_sizes().kv_bytes(layout).map(|[k, v]| k + v);
    let (mut report, mut streamed) = (CacheReport::default(), Vec::new());
    for (layout, tier) in places.iter().filter(|(_, tier)| *tier != Tier::Device) {
        let bytes = bytes_of(target, layout)?;
        *(if *tier == Tier::Host { &mut report.host_bytes } else { &mut report.file_bytes }) += bytes;
        match offload.attends_in(*tier) {
            true => report.attended_bytes += bytes,
            false => streamed.push(*layout),
        }
    }
    let mut buffers = Vec::new();
    for (layout, count) in buffer_layouts(&streamed, offload.overlaps) {
        report.buffer_bytes += count * bytes_of(target, &layout)?;
        let caches = (0..count).map(|_| target.alloc_kv(layout)).collect::<Result<Vec<_>, _>>();
        buffers.push((layout, caches.context("allocating the buffers of the KV cache")?));
    }
    let streamed = (T::READS_DATA && !streamed.is_empty())
        .then(|| StreamedCaches::start(&places, buffers, limits, (offload, path, T::host_bytes)))
        .transpose()?;
    Ok((DecoderCaches { layers, streamed }, Some(report)))
}

/// Returns the tier of the cache of each layer: all are on the device if nothing else is set.
fn cache_tiers(offload: Option<&CacheOffload>, layouts: &[(KvTable, KvLayout)]) -> Vec<Tier> {
    offload.map_or_else(|| vec![Tier::Device; layouts.len()], |offload| offload.choose(layouts))
}

/// The sizes of one page in bytes, summed over layers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageBytes {
    /// Sum over the layers that use the own table.
    pub own: usize,
    /// Sum over the layers that use the window table.
    pub window: usize,
}

impl PageBytes {
    /// Sizes too large to represent.
    pub const MAX: PageBytes = PageBytes { own: usize::MAX, window: usize::MAX };

    /// Adds sizes; `None` on overflow.
    pub fn checked_add(self, other: PageBytes) -> Option<PageBytes> {
        let (own, window) = (self.own.checked_add(other.own)?, self.window.checked_add(other.window)?);
        Some(PageBytes { own, window })
    }

    /// Returns the bytes of so many pages of each table, or the largest number on overflow.
    pub fn of(self, own: usize, window: usize) -> usize {
        self.own.saturating_mul(own).saturating_add(self.window.saturating_mul(window))
    }
}

/// Returns the sizes of a page in the memory of the device with a shard: in its layers, and in those of the
/// draft model if it has that; `None` on overflow. Fails if the model cannot be split like that.
pub fn shard_page_bytes(
    source: &ModelSource,
    shard: &Shard,
    ty: QuantType,
    limits: &StepLimits,
) -> Result<Option<PageBytes>> {
    let page = page_bytes_in_memory(&source.shard_spec(shard)?, ty, limits, source.cache_offload.as_ref());
    let draft = draft_of(source, shard).map_or(Some(PageBytes::default()), |draft| {
        page_bytes(&draft.spec, ty, &draft_limits(draft, limits))
    });
    Ok(page.zip(draft).and_then(|(page, draft)| page.checked_add(draft)))
}

/// Returns the sizes of a page in the layers of a model, or of one rank's part; `None` on overflow.
pub fn page_bytes(spec: &ModelSpec, ty: QuantType, limits: &StepLimits) -> Option<PageBytes> {
    page_bytes_in_memory(spec, ty, limits, None)
}

/// Returns the bytes of a page that are in the memory of the host, in layers whose caches are there; `None`
/// on overflow. Fails if the model cannot be split like that.
pub fn shard_host_page_bytes(
    source: &ModelSource,
    shard: &Shard,
    ty: QuantType,
    limits: &StepLimits,
) -> Result<Option<usize>> {
    let kv = KvCacheConfig { ty, pages: 1, window_pages: 1 };
    let layouts: Vec<_> = kv_layouts(&source.shard_spec(shard)?, kv, limits).collect();
    let tiers = cache_tiers(source.cache_offload.as_ref(), &layouts);
    let mut in_host = layouts.iter().zip(tiers).filter(|(_, tier)| *tier == Tier::Host);
    Ok(in_host.try_fold(0usize, |sum, ((_, layout), _)| sum.checked_add(layout.page_bytes()?)))
}

/// Returns the sizes of the part of a page that is on the device: in the layers whose caches stay there, and
/// in the buffers for the others.
fn page_bytes_in_memory(
    spec: &ModelSpec,
    ty: QuantType,
    limits: &StepLimits,
    offload: Option<&CacheOffload>,
) -> Option<PageBytes> {
    let layouts: Vec<_> = kv_layouts(spec, KvCacheConfig { ty, pages: 1, window_pages: 1 }, limits).collect();
    let mut streamed = Vec::new();
    let mut sum = PageBytes::default();
    for ((table, layout), tier) in layouts.iter().zip(cache_tiers(offload, &layouts)) {
        let bytes = layout.page_bytes()?;
        sum = sum.checked_add(match (tier, table) {
            (Tier::Host | Tier::Disk, _) => {
                streamed.extend(offload.filter(|offload| offload.streams_from(tier)).map(|_| *layout));
                PageBytes::default()
            }
            (Tier::Device, KvTable::Window) => PageBytes { own: 0, window: bytes },
            (Tier::Device, _) => PageBytes { own: bytes, window: 0 },
        })?;
    }
    let overlaps = offload.is_none_or(|offload| offload.overlaps);
    buffer_layouts(&streamed, overlaps).into_iter().try_fold(sum, |sum, (layout, count)| {
        sum.checked_add(PageBytes { own: layout.page_bytes()?.checked_mul(count)?, window: 0 })
    })
}

/// Returns the page table and the cache layout of each of the decoder's layers.
fn kv_layouts(
    spec: &ModelSpec,
    kv: KvCacheConfig,
    limits: &StepLimits,
) -> impl Iterator<Item = (KvTable, KvLayout)> {
    let (layers, limits) = (spec.cached_layers().iter(), *limits);
    layers.map(move |layer| {
        let table = limits.table_of(layer.attention.mask);
        let pages = if table == KvTable::Window { kv.window_pages } else { kv.pages };
        (table, kv_layout(&layer.attention, KvCacheConfig { pages, ..kv }, limits.page_positions))
    })
}

/// Returns the layout of the cache that an encoder's layers share one after another. It is F32, because its
/// contents are temporary.
fn scratch_layout(spec: &ModelSpec, limits: &StepLimits) -> Option<KvLayout> {
    let layers = &spec.encoder.as_ref()?.layers;
    let kv = KvCacheConfig {
        ty: QuantType::F32,
        pages: limits.scratch_positions().div_ceil(limits.page_positions),
        window_pages: 0,
    };
    Some(kv_layout(&layers.first()?.attention, kv, limits.page_positions))
}

fn kv_layout(attention: &AttentionSpec, kv: KvCacheConfig, page_positions: usize) -> KvLayout {
    let AttentionSpec { kv_heads, k_dim, v_dim, .. } = *attention;
    let v_in_k = attention.latent.is_some();
    KvLayout { ty: kv.ty, pages: kv.pages, page_positions, kv_heads, k_dim, v_dim, v_in_k }
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
        let (began, trace) = (Instant::now(), self.trace.as_ref());
        let Allocated { model, kv, scratch, act, draft } = &mut self.allocated;
        act.begin(batch, &self.limits);
        let outcome = schedule::run_step(
            &mut self.backend,
            model,
            Caches { decoder: kv, scratch: scratch.as_mut() },
            act,
            draft.as_mut().map(|draft| draft as &mut dyn Drafter<B>),
            StepIo { batch, biases: &batch.logit_biases, handoff: flow, out, trace },
        );
        if let Some(trace) = trace {
            trace.end_step(began);
        }
        out.times = StepTimes { draft: out.times.draft, ..self.backend.end_step() };
        outcome?;
        let is_returned = self.allocated.model.role.returns_output;
        let (wanted, drafts) = if is_returned { (batch.sampling.len(), batch.draft_count()) } else { (0, 0) };
        assert_eq!(out.tokens.len(), wanted, "there must be a result for each output row");
        assert_eq!(out.drafts.len(), drafts, "there must be a drafter if the batch has drafts");
        Ok(())
    }

    fn report(&self) -> ExecutorReport {
        self.report.clone()
    }

    fn stop_on_abort(&mut self, abort: &Abort) {
        let Allocated { model, kv, .. } = &mut self.allocated;
        for stack in [&mut model.encoder, &mut model.decoder].into_iter().flatten() {
            stack.weights.stop_on_abort(abort);
        }
        if let Some(streamed) = &kv.streamed {
            streamed.stop_on_abort(abort);
        }
        kv.layers.iter().filter_map(|cache| cache.row_link.as_ref()).for_each(|it| it.stop_on_abort(abort));
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::offload::{Offload, Residency, StorePlace, TierRules};
    use crate::model::weights::{LayerWeights, Mlp, WeightSource};
    use crate::model::{ModelRef, ModelSource};
    use crate::quantize::WeightRules;
    use crate::testing::Scratch;
    use mainstem_kernels::cpu::{CpuBackend, CpuConfig, Isa};
    use mainstem_kernels::{
        ActivationPrecision, Fraction, HostBuf, PackedLayout, SamplingParams, Span, SpanModel, SpanOutput,
        SpanStack, SpanTable, SpanTokens, TableUpdate, Weight,
    };
    use std::any::Any;
    use std::path::Path;
    use std::sync::{Arc, Mutex};

    /// Events of layers with their stacks: the layer's number when it was acquired, and its number plus
    /// [`RELEASED`] when it was released.
    type Log = Arc<Mutex<Vec<(SpanStack, usize)>>>;

    const RELEASED: usize = 1000;

    /// A source that keeps the matrices of one layer. It overwrites those of released layers with bytes that
    /// mean NaN or nonsense, and fills those of acquired layers from their packed bytes.
    struct OneLayer {
        stack: SpanStack,
        layers: Vec<LayerWeights<HostBuf>>,
        packed: Vec<Vec<(PackedLayout, Vec<u8>)>>,
        present: Option<usize>,
        log: Log,
        /// The number of acquisitions until one fails.
        until_failure: usize,
    }

    impl OneLayer {
        fn wrap(
            resident: &mut Box<dyn WeightSource<HostBuf>>,
            backend: &mut CpuBackend,
            stack: SpanStack,
            log: &Log,
        ) {
            let taken = std::mem::replace(resident, Box::new(Vec::new()));
            let layers = *(taken as Box<dyn Any>)
                .downcast::<Vec<LayerWeights<HostBuf>>>()
                .expect("all layers are resident");
            let (log, present, until_failure) = (log.clone(), None, usize::MAX);
            let mut source = OneLayer { stack, layers, packed: Vec::new(), present, log, until_failure };
            for layer in &mut source.layers {
                let pack = |w: &mut Weight<HostBuf>| {
                    let layout = w.packed_layout(backend.sizes());
                    let mut packed = vec![0; layout.bytes];
                    backend.download(&w.buf, 0, &mut packed);
                    w.buf.bytes_mut().fill(0xff);
                    (layout, packed)
                };
                source.packed.push(matrices(layer).into_iter().map(pack).collect());
            }
            *resident = Box::new(source);
        }

        fn record(&self, event: usize) {
            self.log.lock().expect("no test has panicked").push((self.stack, event));
        }
    }

    impl WeightSource<HostBuf> for OneLayer {
        fn acquire(
            &mut self,
            device: &mut dyn Backend<Buf = HostBuf>,
            layer: usize,
        ) -> Result<(), DeviceError> {
            assert_eq!(self.present, None, "a layer is still acquired");
            self.until_failure -= 1;
            if self.until_failure == 0 {
                return Err(DeviceError::Fault(format!("layer {layer} cannot be read")));
            }
            for (w, (layout, packed)) in
                matrices(&mut self.layers[layer]).into_iter().zip(&self.packed[layer])
            {
                device.refill_weight(w, layout, packed)?;
            }
            self.present = Some(layer);
            self.record(layer);
            Ok(())
        }

        fn layer(&self, layer: usize) -> &LayerWeights<HostBuf> {
            assert_eq!(self.present, Some(layer), "the layer is not acquired");
            &self.layers[layer]
        }

        fn release(&mut self, _: &mut dyn Backend<Buf = HostBuf>, layer: usize) {
            assert_eq!(self.present.take(), Some(layer), "the layer is not acquired");
            matrices(&mut self.layers[layer]).into_iter().for_each(|w| w.buf.bytes_mut().fill(0xff));
            self.record(layer + RELEASED);
        }
    }

    /// Returns all matrices of a layer.
    fn matrices(layer: &mut LayerWeights<HostBuf>) -> Vec<&mut Weight<HostBuf>> {
        let cross = layer.cross.as_mut().map(|(_, cross)| cross);
        let attentions = [&mut layer.attention].into_iter().chain(cross);
        let mut all: Vec<_> =
            attentions.flat_map(|it| [&mut it.q, &mut it.k, &mut it.v, &mut it.o]).collect();
        match &mut layer.mlp {
            Mlp::Dense(dense) => {
                all.extend([&mut dense.gate, &mut dense.down].into_iter().chain(&mut dense.up))
            }
            Mlp::Experts(_) => panic!("the fixtures of this test have no experts"),
        }
        all.into_iter().map(|linear| &mut linear.weight).collect()
    }

    fn open(fixture: &str) -> ModelSource {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(fixture);
        ModelSource::open(&ModelRef::Path(path), None).unwrap()
    }

    fn executor(source: &ModelSource) -> ModelExecutor<CpuBackend> {
        try_executor(source).unwrap()
    }

    fn try_executor(source: &ModelSource) -> Result<ModelExecutor<CpuBackend>> {
        executor_in_batches(source, usize::MAX)
    }

    /// Returns an executor that computes at most so many rows at once, or a whole encoder input.
    fn executor_in_batches(source: &ModelSource, batch_rows: usize) -> Result<ModelExecutor<CpuBackend>> {
        let config =
            CpuConfig { threads: 1, isa: Isa::Auto, activation_precision: ActivationPrecision::Int8 };
        let kv = KvCacheConfig { ty: QuantType::F16, pages: 5, window_pages: 0 };
        let limits = StepLimits {
            slots: 2,
            rows: 32,
            batch_rows,
            logit_rows: 8,
            positions: if source.spec.decoder.is_some() { 32 } else { 0 },
            encoder_positions: if source.spec.encoder.is_some() { 10 } else { 0 },
            page_positions: 32,
            window: None,
            top_logprobs: 0,
            vocab: source.spec.vocab,
            hidden: source.spec.hidden,
            drafts: 0,
            draft_logits: false,
            counts_tokens: false,
            opening_rows: 0,
            attended_fraction: Fraction::ONE,
        };
        let backend = CpuBackend::new(config).unwrap();
        ModelExecutor::new(backend, source, &Shard::whole(&source.spec), kv, limits)
    }

    /// Returns the executor with one layer of each stack in memory.
    fn streamed(source: &ModelSource) -> (ModelExecutor<CpuBackend>, Log) {
        let (mut executor, log) = (executor(source), Log::default());
        let ModelExecutor { backend, allocated: Allocated { model, .. }, .. } = &mut executor;
        let stacks = [(SpanStack::Encoder, &mut model.encoder), (SpanStack::Decoder, &mut model.decoder)];
        for (which, stack) in stacks {
            if let Some(stack) = stack {
                OneLayer::wrap(&mut stack.weights, backend, which, &log);
            }
        }
        (executor, log)
    }

    /// Returns a step with encoder inputs for the slots `encoded` and prompts for the slots `decoded`.
    fn batch(source: &ModelSource, encoded: &[u32], decoded: &[u32]) -> StepBatch {
        let ModelSpec { encoder, decoder, .. } = &source.spec;
        let mut batch = StepBatch { tokens: (5..25).collect(), return_logits: true, ..StepBatch::default() };
        let span = |stack, slot, table, len, output| Span {
            model: SpanModel::Target,
            stack,
            slot,
            start: 0,
            tokens: SpanTokens::Given { at: slot, len },
            table,
            reserved: 32,
            encoder_len: if encoder.is_some() { 9 } else { 0 },
            output,
        };
        let hidden = if decoder.is_some() { SpanOutput::None } else { SpanOutput::Hidden };
        for slot in encoded.iter().filter(|_| encoder.is_some()) {
            batch.spans.push(span(SpanStack::Encoder, *slot, SpanTable::Scratch, 9, hidden));
        }
        for slot in decoded.iter().filter(|_| decoder.is_some()) {
            batch.spans.push(span(SpanStack::Decoder, *slot, SpanTable::Own, 4, SpanOutput::Last));
            batch.sampling.push(SamplingParams::GREEDY);
        }
        let entry = |slot, table, page| TableUpdate { slot, table, index: 0, page };
        let own = (0..2).map(|slot| entry(slot, KvTable::Own, 1 + slot));
        batch.table_updates.extend(own.filter(|_| decoder.is_some()));
        let cross = (0..2).map(|slot| entry(slot, KvTable::Cross, 3 + slot));
        batch.table_updates.extend(cross.filter(|_| decoder.is_some() && encoder.is_some()));
        batch
    }

    fn run(executor: &mut ModelExecutor<CpuBackend>, batch: &StepBatch) -> Result<StepOutput, DeviceError> {
        let mut out = StepOutput::default();
        executor.run(batch, HandoffPorts::default(), &mut out).map(|()| out)
    }

    /// Encoder inputs are also computed in steps without decoder rows, and decoder rows in steps without
    /// encoder inputs.
    #[test]
    fn layers_are_used_one_at_a_time_in_order_while_they_are_acquired() {
        for fixture in ["gqa", "gguf/q8_0.gguf", "families/bert_gamma", "families/flan_t5", "families/m2m100"]
        {
            let source = open(fixture);
            let (mut resident, (mut streamed, log)) = (executor(&source), streamed(&source));
            for (encoded, decoded) in [(&[0][..], &[0][..]), (&[1], &[]), (&[], &[0, 1]), (&[0, 1], &[0, 1])]
            {
                let batch = batch(&source, encoded, decoded);
                let [expected, found] = [&mut resident, &mut streamed].map(|it| run(it, &batch).unwrap());
                let what = format!("{fixture}: inputs of {encoded:?} and prompts of {decoded:?}");
                assert!(!batch.spans.is_empty() || expected.tokens.is_empty(), "{what}");
                assert_eq!((expected.hidden, expected.logits), (found.hidden, found.logits), "{what}");
                let ModelSpec { encoder, decoder, .. } = &source.spec;
                let layers =
                    |stack: SpanStack, spec: &Option<crate::model::spec::StackSpec>, is_used: bool| {
                        let count = spec.as_ref().map_or(0, |spec| spec.layers.len());
                        let used = if is_used { 0..count } else { 0..0 };
                        used.flat_map(move |layer| [(stack, layer), (stack, layer + RELEASED)])
                    };
                let has_spans = !batch.spans.is_empty();
                let expected: Vec<_> = layers(SpanStack::Encoder, encoder, !encoded.is_empty())
                    .chain(layers(SpanStack::Decoder, decoder, has_spans))
                    .collect();
                assert_eq!(std::mem::take(&mut *log.lock().unwrap()), expected, "{what}");
            }
        }
    }

    /// Checks that the results are those of weights in memory, with these parts of them in memory.
    fn assert_offloaded_alike(what: &str, mut source: ModelSource, fractions: &[f64]) {
        let folder = Scratch::new();
        let mut resident = executor(&source);
        for fraction in fractions {
            source.offload = Some(offload(&folder, *fraction));
            let mut offloaded = executor(&source);
            let places = offloaded.report.offload.clone().unwrap();
            let what = format!("{what}, {fraction} in memory: {places:?}");
            let all = places.resident_bytes + places.streamed_bytes;
            let mut tensors = offloaded.report.tensors.clone();
            let stacks = source.spec.encoder.iter().chain(&source.spec.decoder);
            let mut layers_of = stacks.into_iter().map(|stack| &stack.layers);
            if layers_of.any(|all| all.iter().enumerate().any(|(at, layer)| all[..at].contains(layer))) {
                // In memory, equal layers are one, but they are read one by one.
                let mut names = std::collections::BTreeSet::new();
                tensors.retain(|tensor| names.insert(tensor.name.clone()));
            }
            assert_eq!(tensors, resident.report.tensors, "{what}: each tensor once");
            assert!(places.resident_bytes as f64 <= fraction * all as f64 + 0.5, "{what}");
            assert!([places.streamed_bytes, places.buffer_bytes].map(|it| it == 0) == [*fraction == 1.0; 2]);
            for (encoded, decoded) in [(&[0][..], &[0][..]), (&[1], &[]), (&[], &[0, 1]), (&[0, 1], &[0, 1])]
            {
                let batch = batch(&source, encoded, decoded);
                let [expected, found] = [&mut resident, &mut offloaded].map(|it| run(it, &batch).unwrap());
                assert_eq!((expected.hidden, expected.logits), (found.hidden, found.logits), "{what}");
            }
        }
        let stores = folder.path().read_dir().unwrap().flatten().filter(|entry| entry.path().is_dir());
        assert_eq!(stores.count(), 1, "{what}: all of them use one store");
    }

    #[test]
    fn layers_of_every_format_that_are_read_for_each_step_give_the_same_results() {
        for (fixture, weights) in [
            ("gqa", ""),
            ("gqa", "q3h"),
            ("gqa", "q4"),
            ("f16", ""),
            ("bf16", ""),
            ("gguf/q4_0.gguf", ""),
            ("gguf/q8_0.gguf", ""),
        ] {
            let mut source = open(fixture);
            source.weight_rules = WeightRules::parse(weights).unwrap();
            let what = format!("{fixture} with '{weights}'");
            assert_offloaded_alike(&what, source, &[0.0, 0.2, 0.4, 1.0]);
        }
    }

    /// Mixtures of experts, encoders, cross-attention, and every other kind of layer.
    #[test]
    fn layers_of_every_family_that_are_read_for_each_step_give_the_same_results() {
        let families = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families");
        let models = families.read_dir().unwrap().map(|entry| entry.unwrap().path());
        let mut count = 0;
        for path in models.filter(|path| path.join("config.json").exists()) {
            let source = ModelSource::open(&ModelRef::Path(path.clone()), None).unwrap();
            assert_offloaded_alike(&path.display().to_string(), source, &[0.2]);
            count += 1;
        }
        assert!(count > 40, "{count} models");
    }

    /// Chunks that are cut, encoder inputs that are not, and generated tokens, with weights and caches in the
    /// memory of the host and on disk.
    #[test]
    fn rows_in_batches_give_the_same_results() {
        let families = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/families");
        let models = families.read_dir().unwrap().map(|entry| entry.unwrap().path());
        let ids = |out: &StepOutput| out.tokens.iter().map(|token| token.token).collect::<Vec<_>>();
        let (mut count, folder) = (0, Scratch::new());
        for path in models.filter(|path| path.join("config.json").exists()) {
            let mut source = ModelSource::open(&ModelRef::Path(path.clone()), None).unwrap();
            let mut whole = executor(&source);
            let tiers = TierRules { host: 0.3, uses_host: true, ..TierRules::default() };
            source.offload = Some(Offload { tiers, ..offload(&folder, 0.4) });
            let mut divided = [(1, 0.0), (3, 0.3), (11, 0.6)].map(|(rows, cached)| {
                let (resident, folder) = (Residency(cached), folder.path().to_owned());
                source.cache_offload = Some(CacheOffload {
                    resident,
                    host: 0.4,
                    folder,
                    overlaps: rows > 3,
                    attends_on_host: rows == 11,
                });
                executor_in_batches(&source, rows).unwrap()
            });
            for (encoded, decoded) in [(&[0, 1][..], &[0, 1][..]), (&[1, 0], &[]), (&[], &[0, 1])] {
                let mut batch = batch(&source, encoded, decoded);
                for step in 0..2 {
                    let expected = run(&mut whole, &batch).unwrap();
                    for (number, divided) in divided.iter_mut().enumerate() {
                        let found = run(divided, &batch).unwrap();
                        let what = format!("{}: {encoded:?} {decoded:?} {step} {number}", path.display());
                        assert_eq!(
                            (&expected.hidden, &expected.logits),
                            (&found.hidden, &found.logits),
                            "{what}"
                        );
                        assert_eq!(ids(&expected), ids(&found), "{what}");
                    }
                    batch.spans.retain(|span| span.stack == SpanStack::Decoder);
                    let next = |span: &mut Span| (span.start, span.tokens) = (4, SpanTokens::Last);
                    batch.spans.iter_mut().for_each(next);
                }
            }
            count += 1;
        }
        assert!(count > 40, "{count} models");
    }

    /// Returns the settings of layers in a store in `folder`.
    fn offload(folder: &Scratch, fraction: f64) -> Offload {
        let place = StorePlace(folder.path().to_owned());
        let tiers = TierRules::default();
        Offload { resident: Residency(fraction), tiers, place, overlaps: fraction < 0.4, max_slab: 4 << 10 }
    }

    /// A step fails if a layer cannot be read, and the next one succeeds if it can be read again.
    #[test]
    fn a_store_that_cannot_be_read_fails_steps() {
        let (mut source, folder) = (open("gqa"), Scratch::new());
        source.offload = Some(offload(&folder, 0.3));
        let mut executor = executor(&source);
        let batch = batch(&source, &[], &[0]);
        let expected = run(&mut executor, &batch).unwrap();
        let data = executor.report.offload.as_ref().unwrap().stores[0].join("weights.bin");
        let bytes = std::fs::read(&data).unwrap();
        std::fs::write(&data, &bytes[..5000]).unwrap();
        // Both layers have been read before.
        let failed = (0..3).find_map(|_| run(&mut executor, &batch).err()).unwrap().to_string();
        assert!(
            failed.starts_with("device fault: cannot read ") && failed.contains("weights.bin"),
            "{failed}"
        );
        std::fs::write(&data, &bytes).unwrap();
        for _ in 0..3 {
            assert_eq!(run(&mut executor, &batch).unwrap().logits, expected.logits);
        }
    }

    /// Bytes that have changed are noticed when they are first used; the next executor writes them anew.
    #[test]
    fn a_store_that_has_changed_is_not_used() {
        for fraction in [0.0, 1.0] {
            let (mut source, folder) = (open("gqa"), Scratch::new());
            let right = executor(&source);
            let batch = batch(&source, &[], &[0]);
            let expected = [right].iter_mut().map(|it| run(it, &batch).unwrap().logits).next();
            source.offload = Some(offload(&folder, fraction));
            let data = executor(&source).report.offload.unwrap().stores[0].join("weights.bin");
            let mut bytes = std::fs::read(&data).unwrap();
            let last = bytes.len() - 4096;
            bytes[last] ^= 1;
            std::fs::write(&data, bytes).unwrap();
            let failed = match try_executor(&source) {
                Ok(mut built) => run(&mut built, &batch).unwrap_err().to_string(),
                Err(error) => format!("{error:#}"),
            };
            assert!(failed.contains("has changed; the next start writes it anew"), "{failed}");
            assert_eq!(run(&mut executor(&source), &batch).unwrap().logits, expected.unwrap());
        }
    }

    /// The next step succeeds, if its layers can be read.
    #[test]
    fn a_layer_that_cannot_be_read_fails_the_step() {
        let source = open("gqa");
        let (mut streamed, _) = streamed(&source);
        let batch = batch(&source, &[], &[0]);
        let expected = run(&mut streamed, &batch).unwrap();
        let decoder = streamed.allocated.model.decoder.as_mut().unwrap();
        let weights: &mut dyn Any = &mut *decoder.weights;
        weights.downcast_mut::<OneLayer>().unwrap().until_failure = 2;
        let failed = run(&mut streamed, &batch).unwrap_err().to_string();
        assert_eq!(failed, "device fault: layer 1 cannot be read");
        let decoder = streamed.allocated.model.decoder.as_mut().unwrap();
        let weights: &mut dyn Any = &mut *decoder.weights;
        weights.downcast_mut::<OneLayer>().unwrap().until_failure = usize::MAX;
        assert_eq!(run(&mut streamed, &batch).unwrap().logits, expected.logits);
    }
}
