//! Layers whose matrices come from a store, in parts that are placed one by one.
//!
//! Invariant: a store is packed by the same code that loads a model without one, one matrix at a time.

use super::{Loader, ModelTensors, count_on};
use crate::model::load_target::LoadTarget;
use crate::model::offload::{
    LayerMatrix, ModelStores, Offload, PackedLayers, PackedStore, StoreWriter, TransferPath,
};
use crate::model::shard::Shard;
use crate::model::source::ModelSource;
use crate::model::spec::ModelSpec;
use anyhow::{Context, Result};
use mainstem_kernels::DeviceSizes;

/// Prepares the layers of a model that are loaded from a store. If there is none, it is written. Also returns
/// the largest size of their weights in bytes.
pub(super) fn packed_layers<T: LoadTarget>(
    target: &mut T,
    (source, path): (&ModelSource, &TransferPath),
    spec: &ModelSpec,
    offload: &Offload,
) -> Result<(PackedLayers, usize)> {
    let Divided { layers, slab, stores } = divide(target.device_sizes(), source, spec, offload)?;
    let (folder, store) = match T::READS_DATA {
        false => (stores.folder(), None),
        true => {
            let store = match stores.open(&source.progress)? {
                Some(store) => store,
                None => pack(target, source, spec, slab, stores.write()?)?,
            };
            (store.folder().to_owned(), Some(store))
        }
    };
    Ok((PackedLayers::new((offload, path), layers, (folder, store))?, slab))
}

/// Writes the store of the shard's part of `source` beside the model, or to the folder of all stores if that
/// cannot be written, in the layout of `target`. The source's settings of its store count. Fails if the store
/// cannot be written, or if the work is stopped.
pub fn write_store<T: LoadTarget>(
    target: &mut T,
    source: &ModelSource,
    offload: &Offload,
    shard: &Shard,
) -> Result<PackedStore> {
    let spec = source.shard_spec(shard)?;
    let Divided { slab, stores, .. } = divide(target.device_sizes(), source, &spec, offload)?;
    if let Some(store) = stores.open_beside(&source.progress)? {
        return Ok(store);
    }
    let writer = stores.write_beside(&source.progress)?;
    pack(target, source, &spec, slab, writer).with_context(|| format!("loading {}", source.path.display()))
}

/// The matrices of a model's layers, divided by rows.
struct Divided {
    layers: Vec<Vec<LayerMatrix>>,
    /// Largest size of a weight in bytes.
    slab: usize,
    stores: ModelStores,
}

fn divide(
    sizes: &dyn DeviceSizes,
    source: &ModelSource,
    spec: &ModelSpec,
    offload: &Offload,
) -> Result<Divided> {
    let count = |slab| count_on(sizes, spec, &|piece| source.load_type(piece), slab);
    let whole = count(usize::MAX).layer_matrices;
    // Experts are never divided.
    let divisible = whole.iter().flatten().filter(|matrix| matrix.expert.is_none());
    let slab = offload.slab(divisible.map(|matrix| matrix.layout.bytes).sum());
    let layers = count(slab).layer_matrices;
    let places = (&offload.place, source.stores_beside());
    let files = (&source.checkpoint, source.file_marks.of(&source.checkpoint)?);
    let stores = ModelStores::new(&source.path, files, layers.iter().flatten(), places);
    Ok(Divided { layers, slab, stores })
}

/// Writes all layers of a model to a store.
fn pack<T: LoadTarget>(
    target: &mut T,
    source: &ModelSource,
    spec: &ModelSpec,
    slab: usize,
    writer: StoreWriter,
) -> Result<PackedStore> {
    source.progress.add_total(writer.bytes());
    let tensors = ModelTensors { types: &|piece| source.load_type(piece), data: Some(source), slab };
    let mut loader = Loader::new(target, tensors, None);
    loader.layers.packing = Some(writer);
    let stacks = spec.encoder.iter().chain(&spec.decoder);
    for layer in stacks.flat_map(|stack| &stack.layers) {
        loader.block(layer)?;
    }
    loader.layers.packing.take().expect("it was given above; anything else is a bug").finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ModelRef;
    use crate::model::offload::testing::mixture;
    use crate::model::offload::{Residency, StorePlace, TierRules};
    use crate::testing::Scratch;
    use mainstem_kernels::ActivationPrecision;
    use mainstem_kernels::cpu::{CpuBackend, CpuConfig, CpuSizes, Isa};
    use std::path::Path;

    /// Regression: a layer was in memory at a time, with all experts of a mixture, which nothing had counted.
    #[test]
    fn packing_holds_no_more_than_a_few_matrices() {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
        for fixture in ["gqa".to_owned(), mixture()] {
            let source = ModelSource::open(&ModelRef::Path(fixtures.join(&fixture)), None).unwrap();
            let (folder, resident) = (Scratch::new(), Residency(0.0));
            let (place, tiers) = (StorePlace(folder.path().to_owned()), TierRules::default());
            let offload = Offload { resident, tiers, place, overlaps: true, max_slab: 4 << 10 };
            let config =
                CpuConfig { threads: 1, isa: Isa::Auto, activation_precision: ActivationPrecision::F32 };
            let sizes = CpuSizes::new(config).unwrap();
            let Divided { layers, slab, stores } = divide(&sizes, &source, &source.spec, &offload).unwrap();
            let bytes = |layer: &Vec<LayerMatrix>| layer.iter().map(|it| it.layout.bytes).sum::<usize>();
            let layer = layers.iter().map(bytes).max().unwrap();
            let largest = layers.iter().flatten().map(|it| it.layout.bytes).max().unwrap();
            // The layer's vectors stay until it ends.
            let memory = largest + (4 << 10);
            assert!(memory < layer / 2, "{fixture}: {largest} of {layer}");
            let mut device = CpuBackend::new(config).unwrap().with_memory(memory);
            let writer = stores.write().unwrap();
            pack(&mut device, &source, &source.spec, slab, writer).unwrap();
        }
    }
}
