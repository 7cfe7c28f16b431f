//! The matrices of a model's layers when they are loaded from a store: which of them stay on the device,
//! which have a copy in the memory of the host, and which are read from the store for each step.

use super::buffers::buffer_sizes;
use super::direct::DirectFile;
use super::experts::{ExpertMatrices, ExpertPool, PoolSize, PooledExperts};
use super::held::HostCopy;
use super::link::TransferPath;
use super::matrix::LayerMatrix;
use super::residency::Residency;
use super::store::{PackedStore, StorePlace, StoreWriter};
use super::stream::{HostBytes, Place, StreamedLayers};
use super::tier::{SpreadRule, Tier, TierRules, host_memory};
use crate::model::load_target::LoadTarget;
use crate::model::spec::TensorSlice;
use crate::model::weights::{LayerWeights, Mlp, WeightSource};
use anyhow::{Context, Result, anyhow};
use mainstem_kernels::{QuantType, Weight};
use std::path::PathBuf;

/// The settings of a model whose layers are loaded from a store, and whose matrices do not all stay in the
/// memory of the device.
#[derive(Clone, Debug)]
pub struct Offload {
    /// The fraction that stays in the memory of the device, of the matrices without an override.
    pub resident: Residency,
    /// The tiers of the others.
    pub tiers: TierRules,
    pub place: StorePlace,
    /// Whether a layer is read while the one before computes, rather than after it.
    pub overlaps: bool,
    /// Size in bytes up to which weights are placed and read as a whole. Larger ones are divided by rows,
    /// except for experts of mixtures.
    pub max_slab: usize,
}

impl Offload {
    /// Usual value of [`Offload::max_slab`].
    pub const MAX_SLAB: usize = 32 << 20;

    /// Returns the size above which matrices are divided by rows, given the bytes of those that may be: small
    /// enough that the fractions in the tiers are exact to half a percent, unless the model is so small that
    /// [`MIN_SLAB`] is more. FlexGen's rule is about whole matrices.
    pub fn slab(&self, bytes: usize) -> usize {
        match self.tiers.rule {
            SpreadRule::Even => (bytes / 256).max(MIN_SLAB).min(self.max_slab),
            SpreadRule::MidPoint => usize::MAX,
        }
    }
}

/// Smallest size that weights are divided into, unless a smaller one is asked for: with less, reading and
/// computing parts would take longer.
const MIN_SLAB: usize = 512 << 10;

/// The places of the matrices of a model's layers, in bytes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OffloadReport {
    /// Matrices that stay in the memory of the device.
    pub resident_bytes: usize,
    /// Matrices in the memory of the host, which are copied in each pass through all layers.
    pub host_bytes: usize,
    /// Matrices that are read from disk in each pass through all layers.
    pub streamed_bytes: usize,
    /// Buffers for matrices that are read.
    pub buffer_bytes: usize,
    /// Experts of mixtures, which are read when rows choose them.
    pub experts: usize,
    pub expert_bytes: usize,
    /// Experts that are in memory at the same time, and the bytes of the pool that they are in.
    pub pool_experts: usize,
    pub pool_bytes: usize,
    /// The folders of the stores: one per device, with its part of the model.
    pub stores: Vec<PathBuf>,
}

impl OffloadReport {
    /// Adds the places of another device's matrices.
    pub fn add(&mut self, other: OffloadReport) {
        self.resident_bytes += other.resident_bytes;
        self.host_bytes += other.host_bytes;
        self.streamed_bytes += other.streamed_bytes;
        self.buffer_bytes += other.buffer_bytes;
        self.experts += other.experts;
        self.expert_bytes += other.expert_bytes;
        self.pool_experts += other.pool_experts;
        self.pool_bytes += other.pool_bytes;
        self.stores.extend(other.stores);
    }

    /// Returns the bytes of the matrices that do not stay in memory.
    pub fn offloaded_bytes(&self) -> usize {
        self.streamed_bytes + self.expert_bytes
    }

    /// Returns the bytes that a step reads if its rows choose all experts.
    pub fn max_read_bytes(&self) -> usize {
        self.streamed_bytes + self.expert_bytes.saturating_sub(self.pool_bytes)
    }
}

/// The matrices of the layers that are loaded, and where they come from.
pub struct LayerNotes {
    /// The matrices of the layers so far, in loading order.
    pub matrices: Vec<Vec<LayerMatrix>>,
    /// The matrices in a store, if they are loaded from one.
    pub packed: Option<PackedLayers>,
    /// The writer that packs them, if they are loaded for a store.
    pub packing: Option<StoreWriter>,
    /// The expert that is being loaded, by its index on the device.
    pub expert: Option<usize>,
    /// Whether what is being loaded is for openings only.
    pub is_for_openings: bool,
    /// Whether a layer is being loaded.
    in_layer: bool,
}

impl LayerNotes {
    /// Creates notes without layers, which come from a store if there is one.
    pub fn new(packed: Option<PackedLayers>) -> LayerNotes {
        LayerNotes {
            matrices: Vec::new(),
            packed,
            packing: None,
            expert: None,
            is_for_openings: false,
            in_layer: false,
        }
    }

    /// Begins the next layer.
    pub fn begin(&mut self) {
        self.matrices.push(Vec::new());
        self.packed.iter_mut().for_each(PackedLayers::begin_layer);
        self.in_layer = true;
    }

    /// Ends the layer: the next matrices belong to none.
    pub fn end(&mut self) {
        self.in_layer = false;
    }

    /// Notes a matrix, given its format, rows and columns, and returns its buffer if it comes from a store.
    /// `None` for others, and outside of layers.
    pub fn load<T: LoadTarget>(
        &mut self,
        target: &mut T,
        piece: &TensorSlice,
        (ty, n, k): (QuantType, usize, usize),
    ) -> Result<Option<T::Buf>> {
        let Some(matrices) = self.matrices.last_mut().filter(|_| self.in_layer) else { return Ok(None) };
        let layout = target.device_sizes().packed_layout(ty, n, k);
        let matrix = LayerMatrix::new(piece, layout, self.expert);
        matrices.push(LayerMatrix { is_for_openings: self.is_for_openings, ..matrix });
        self.packed.as_mut().map(|packed| packed.load(target)).transpose()
    }

    /// Moves a loaded matrix of a layer to the store that is being written, if one is: its buffer is empty
    /// then, so that the device holds one matrix at a time.
    pub fn pack<T: LoadTarget>(&mut self, target: &mut T, weight: &mut Weight<T::Buf>) -> Result<()> {
        if let Some(writer) = self.packing.as_mut().filter(|_| self.in_layer) {
            writer.append_weight(target, weight)?;
            weight.buf = target.alloc(0)?;
        }
        Ok(())
    }
}

/// The matrices of a model's layers in a store, by layer, in the order in which they are loaded.
pub struct PackedLayers {
    layers: Vec<Vec<LayerMatrix>>,
    tiers: Vec<Tier>,
    /// The part of the experts that is in memory at once, if they are read when rows choose them.
    pool: Option<Residency>,
    overlaps: bool,
    /// The store with its data file; `None` if matrices are counted only.
    store: Option<(PackedStore, DirectFile)>,
    path: TransferPath,
    report: OffloadReport,
    /// The next matrix to load, and its layer.
    next: usize,
    layer: usize,
    /// For each loaded layer its matrices that do not stay: places and indices in the store.
    streamed: Vec<Vec<(usize, usize)>>,
    /// Their places, in the same order, and whether only openings use them.
    places: Vec<(Place, bool)>,
    /// For each loaded layer its experts, if they are read when rows choose them.
    pooled: ExpertMatrices,
}

impl PackedLayers {
    /// Decides about the tiers of the matrices `layers`, which are in a store; without it, they can be
    /// counted only. `folder` is that of the store.
    pub fn new(
        (offload, path): (&Offload, &TransferPath),
        layers: Vec<Vec<LayerMatrix>>,
        (folder, store): (PathBuf, Option<PackedStore>),
    ) -> Result<PackedLayers> {
        let report = OffloadReport { stores: vec![folder], ..OffloadReport::default() };
        let with_file = |store: PackedStore| {
            let path = store.data_file();
            let file = DirectFile::ordinary(&path);
            anyhow::Ok((store, file.with_context(|| format!("cannot read {}", path.display()))?))
        };
        Ok(PackedLayers {
            tiers: offload.tiers.choose(offload.resident, &layers),
            pool: offload.tiers.pools_experts(offload.resident, &layers).then_some(offload.resident),
            overlaps: offload.overlaps,
            store: store.map(with_file).transpose()?,
            layers,
            path: path.clone(),
            report,
            next: 0,
            layer: 0,
            streamed: Vec::new(),
            places: Vec::new(),
            pooled: Vec::new(),
        })
    }

    /// Begins the next layer.
    fn begin_layer(&mut self) {
        self.streamed.push(Vec::new());
        self.pooled.push(Vec::new());
        self.layer += 1;
    }

    /// Returns the buffer of the next matrix: with its bytes if it stays in memory, else an empty one.
    fn load<T: LoadTarget>(&mut self, target: &mut T) -> Result<T::Buf> {
        let index = self.next;
        self.next += 1;
        let before: usize = self.layers[..self.layer - 1].iter().map(Vec::len).sum();
        let LayerMatrix { layout, expert, is_for_openings, .. } =
            &self.layers[self.layer - 1][index - before];
        target.prepare_weight(layout.ty, layout.k)?;
        let (bytes, tier) = (layout.bytes, self.tiers[index]);
        if let Some(expert) = expert.filter(|_| self.pool.is_some()) {
            let experts = self.pooled.last_mut().expect("a layer was begun; anything else is a bug");
            if experts.len() == expert {
                experts.push(index..index);
                self.report.experts += 1;
            }
            experts[expert].end = index + 1;
            self.report.expert_bytes += bytes;
            return Ok(target.alloc(0)?);
        }
        let data = if tier == Tier::Disk { None } else { self.read(index, bytes)? };
        let place = match (tier, data) {
            (Tier::Device, data) => {
                self.report.resident_bytes += bytes;
                let mut buf = target.alloc(bytes)?;
                data.iter().for_each(|data| target.upload(&mut buf, data));
                return Ok(buf);
            }
            (Tier::Host, data) => {
                self.report.host_bytes += bytes;
                Place::Host(HostCopy::new(data.unwrap_or_default(), &self.path.held))
            }
            (Tier::Disk, _) => {
                self.report.streamed_bytes += bytes;
                Place::Disk
            }
        };
        let streamed = self.streamed.last_mut().expect("a layer was begun; anything else is a bug");
        streamed.push((index - before, index));
        self.places.push((place, *is_for_openings));
        Ok(target.alloc(0)?)
    }

    /// Reads a matrix of so many bytes from the store; `None` if matrices are counted only.
    fn read(&self, index: usize, bytes: usize) -> Result<Option<Box<[u8]>>> {
        let Some((store, file)) = &self.store else { return Ok(None) };
        let mut data = host_memory(bytes).context("tiers.host")?;
        let read = file.read(store.matrices[index].offset, &mut data, &|| false);
        read.map_err(|error| anyhow!(store.read_failure(index, &error)))?;
        store.verify(index, &data).map_err(|reason| anyhow!(reason))?;
        Ok(Some(data))
    }

    /// Returns the places of the matrices loaded so far.
    pub fn report(&self) -> OffloadReport {
        self.report.clone()
    }

    /// Returns the source of the layers loaded since the last call: all in memory, or partly read for each
    /// step, into buffers that are allocated here.
    pub fn weight_source<T: LoadTarget>(
        &mut self,
        target: &mut T,
        mut layers: Vec<LayerWeights<T::Buf>>,
    ) -> Result<Box<dyn WeightSource<T::Buf>>> {
        let (streamed, places) = (std::mem::take(&mut self.streamed), std::mem::take(&mut self.places));
        let all: Vec<usize> = self.layers.iter().flatten().map(|matrix| matrix.layout.bytes).collect();
        self.pool_experts(target, &all, &mut layers)?;
        let of_layer = |layer: &Vec<(usize, usize)>| layer.iter().map(|(_, index)| all[*index]).collect();
        let sizes = buffer_sizes(&streamed.iter().map(of_layer).collect::<Vec<Vec<usize>>>(), self.overlaps);
        self.report.buffer_bytes += sizes.iter().map(|(size, count)| size * count).sum::<usize>();
        let mut alloc = |(size, count)| {
            let buffers = (0..count).map(|_| target.alloc(size)).collect::<Result<Vec<_>, _>>();
            anyhow::Ok((
                size,
                buffers.context("allocating the buffers for weights that are read for each step")?,
            ))
        };
        let buffers = sizes.into_iter().map(&mut alloc).collect::<Result<Vec<_>>>()?;
        Ok(match &self.store {
            Some((store, _)) if !buffers.is_empty() => {
                let device = (T::host_bytes as HostBytes<T::Buf>, self.path.clone());
                Box::new(StreamedLayers::start(layers, streamed, buffers, (store.clone(), places), device)?)
            }
            _ => Box::new(layers),
        })
    }

    /// Gives the mixtures of the layers loaded since the last call a pool for their experts, if these are
    /// read when rows choose them. `bytes` has those of all matrices in the store.
    fn pool_experts<T: LoadTarget>(
        &mut self,
        target: &mut T,
        bytes: &[usize],
        layers: &mut [LayerWeights<T::Buf>],
    ) -> Result<()> {
        let mut experts = std::mem::take(&mut self.pooled);
        let Some(part) = self.pool else { return Ok(()) };
        let with_experts: Vec<usize> =
            (0..experts.len()).filter(|layer| !experts[*layer].is_empty()).collect();
        experts.retain(|experts| !experts.is_empty());
        let size = PoolSize::new(&experts, bytes, part);
        self.report.pool_experts += size.slots;
        self.report.pool_bytes += size.bytes();
        let mut slot =
            || size.buffers.iter().map(|bytes| target.alloc(*bytes)).collect::<Result<Vec<_>, _>>();
        let slots = (0..size.slots).map(|_| slot()).collect::<Result<Vec<_>, _>>();
        let slots = slots.context("allocating the pool of experts")?;
        let Some((store, _)) = self.store.as_ref().filter(|_| !slots.is_empty()) else { return Ok(()) };
        let device = (T::host_bytes as HostBytes<T::Buf>, self.path.clone(), self.overlaps);
        let pool = ExpertPool::start(experts, slots, store.clone(), device)?;
        for (layer, index) in with_experts.into_iter().enumerate() {
            if let Mlp::Experts(moe) = &mut layers[index].mlp {
                moe.source = Some(Box::new(PooledExperts { pool: pool.clone(), layer }));
            }
        }
        Ok(())
    }
}
