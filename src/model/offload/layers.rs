//! The matrices of a model's layers when they are loaded from a store: which of them stay in memory, and
//! where the others are.

use super::direct::DirectFile;
use super::experts::{ExpertMatrices, ExpertPool, PoolSize, PooledExperts};
use super::matrix::LayerMatrix;
use super::residency::Residency;
use super::store::{PackedStore, StoreKey, StorePlace, StoreWriter};
use super::stream::{HostBytes, StreamedLayers, buffer_sizes};
use super::transfers::Transfers;
use crate::model::load_target::LoadTarget;
use crate::model::spec::TensorSlice;
use crate::model::weights::{LayerWeights, Mlp, WeightSource};
use anyhow::{Context, Result, anyhow};
use mainstem_kernels::QuantType;
use std::path::PathBuf;
use std::sync::Arc;

/// The settings of a model whose layers are loaded from a store, and whose matrices do not all stay in
/// memory.
#[derive(Clone, Debug, PartialEq)]
pub struct Offload {
    pub resident: Residency,
    pub place: StorePlace,
    /// Whether a layer is read while the one before computes, rather than after it.
    pub overlaps: bool,
}

/// The places of the matrices of a model's layers, in bytes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct OffloadReport {
    /// Matrices that stay in memory.
    pub resident_bytes: usize,
    /// Matrices that are read in each pass through all layers.
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

/// A function that writes all layers of a model to a store.
pub type PackLayers<'a> = dyn FnMut(&mut StoreWriter) -> Result<()> + 'a;

/// The matrices of the layers that are loaded, and where they come from.
pub struct LayerNotes {
    /// The matrices of the layers so far, in loading order.
    pub matrices: Vec<Vec<LayerMatrix>>,
    /// The matrices in a store, if they are loaded from one.
    pub packed: Option<PackedLayers>,
    /// The expert that is being loaded, by its index on the device.
    pub expert: Option<usize>,
    /// Whether a layer is being loaded.
    in_layer: bool,
}

impl LayerNotes {
    /// Creates notes without layers, which come from a store if there is one.
    pub fn new(packed: Option<PackedLayers>) -> LayerNotes {
        LayerNotes { matrices: Vec::new(), packed, expert: None, in_layer: false }
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
        matrices.push(LayerMatrix::new(piece, layout, self.expert));
        self.packed.as_mut().map(|packed| packed.load(target)).transpose()
    }
}

/// The matrices of a model's layers in a store, by layer, in the order in which they are loaded.
pub struct PackedLayers {
    layers: Vec<Vec<LayerMatrix>>,
    /// The part of the matrices that stays in memory, and the matrices that do.
    fraction: Residency,
    resident: Vec<bool>,
    overlaps: bool,
    /// The store with its data file; `None` if matrices are counted only.
    store: Option<(PackedStore, DirectFile)>,
    transfers: Arc<Transfers>,
    report: OffloadReport,
    /// The next matrix to load, and its layer.
    next: usize,
    layer: usize,
    /// For each loaded layer its matrices that do not stay: places and indices in the store.
    streamed: Vec<Vec<(usize, usize)>>,
    /// For each loaded layer its experts, if they are read when rows choose them.
    pooled: ExpertMatrices,
}

impl PackedLayers {
    /// Opens the store of the matrices `layers`, and decides which stay in memory. `pack` writes the store if
    /// there is none; without it, matrices can be counted only.
    pub fn open(
        (offload, transfers): (&Offload, &Arc<Transfers>),
        key: StoreKey,
        layers: Vec<Vec<LayerMatrix>>,
        pack: Option<&mut PackLayers>,
    ) -> Result<PackedLayers> {
        let report = OffloadReport { stores: vec![offload.place.folder(&key)], ..OffloadReport::default() };
        let store = pack.map(|pack| match offload.place.open(&key)? {
            Some(store) => Ok(store),
            None => {
                let mut writer = offload.place.write(key)?;
                pack(&mut writer)?;
                writer.finish()
            }
        });
        let with_file = |store: PackedStore| {
            let path = store.data_file();
            let file = DirectFile::ordinary(&path);
            anyhow::Ok((store, file.with_context(|| format!("cannot read {}", path.display()))?))
        };
        Ok(PackedLayers {
            fraction: offload.resident,
            resident: choose(offload.resident, &layers),
            overlaps: offload.overlaps,
            store: store.transpose()?.map(with_file).transpose()?,
            layers,
            transfers: transfers.clone(),
            report,
            next: 0,
            layer: 0,
            streamed: Vec::new(),
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
        let LayerMatrix { layout, expert, .. } = &self.layers[self.layer - 1][index - before];
        target.prepare_weight(layout.ty, layout.k)?;
        if let Some(expert) = expert.filter(|_| !self.resident[index]) {
            let experts = self.pooled.last_mut().expect("a layer was begun; anything else is a bug");
            if experts.len() == expert {
                experts.push(index..index);
                self.report.experts += 1;
            }
            experts[expert].end = index + 1;
            self.report.expert_bytes += layout.bytes;
            return Ok(target.alloc(0)?);
        }
        if !self.resident[index] {
            let streamed = self.streamed.last_mut().expect("a layer was begun; anything else is a bug");
            streamed.push((index - before, index));
            self.report.streamed_bytes += layout.bytes;
            return Ok(target.alloc(0)?);
        }
        self.report.resident_bytes += layout.bytes;
        let mut buf = target.alloc(layout.bytes)?;
        if let Some((store, file)) = &self.store {
            let mut bytes = vec![0; layout.bytes];
            let read = file.read(store.matrices[index].offset, &mut bytes, &|| false);
            read.map_err(|error| anyhow!(store.read_failure(index, &error)))?;
            store.verify(index, &bytes).map_err(|reason| anyhow!(reason))?;
            target.upload(&mut buf, &bytes);
        }
        Ok(buf)
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
        let streamed = std::mem::take(&mut self.streamed);
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
                let device = (T::host_bytes as HostBytes<T::Buf>, self.transfers.clone());
                Box::new(StreamedLayers::start(layers, streamed, buffers, store.clone(), device)?)
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
        let with_experts: Vec<usize> =
            (0..experts.len()).filter(|layer| !experts[*layer].is_empty()).collect();
        experts.retain(|experts| !experts.is_empty());
        let size = PoolSize::new(&experts, bytes, self.fraction);
        self.report.pool_experts += size.slots;
        self.report.pool_bytes += size.bytes();
        let mut slot =
            || size.buffers.iter().map(|bytes| target.alloc(*bytes)).collect::<Result<Vec<_>, _>>();
        let slots = (0..size.slots).map(|_| slot()).collect::<Result<Vec<_>, _>>();
        let slots = slots.context("allocating the pool of experts")?;
        let Some((store, _)) = self.store.as_ref().filter(|_| !slots.is_empty()) else { return Ok(()) };
        let device = (T::host_bytes as HostBytes<T::Buf>, self.transfers.clone(), self.overlaps);
        let pool = ExpertPool::start(experts, slots, store.clone(), device)?;
        for (layer, index) in with_experts.into_iter().enumerate() {
            if let Mlp::Experts(moe) = &mut layers[index].mlp {
                moe.source = Some(Box::new(PooledExperts { pool: pool.clone(), layer }));
            }
        }
        Ok(())
    }
}

/// Returns for each matrix whether it stays in memory, of which this part may. Experts stay all or not at
/// all: their part is a pool for those that are chosen.
fn choose(fraction: Residency, layers: &[Vec<LayerMatrix>]) -> Vec<bool> {
    let is_pooled = |matrix: &LayerMatrix| matrix.expert.is_some() && fraction.0 < 1.0;
    let others = layers.iter().flatten().filter(|matrix| !is_pooled(matrix));
    let bytes: Vec<usize> = others.map(|matrix| matrix.layout.bytes).collect();
    let mut stays = fraction.choose(&bytes).into_iter();
    layers.iter().flatten().map(|matrix| !is_pooled(matrix) && stays.next() == Some(true)).collect()
}
