//! Layers whose matrices come from a store, in parts that are placed one by one.
//!
//! Invariant: a store is packed by the same code that loads a model without one.

use super::{Loader, ModelTensors, count_on};
use crate::model::load_target::LoadTarget;
use crate::model::offload::{Offload, PackedLayers, StoreKey, StoreWriter, TransferPath};
use crate::model::source::ModelSource;
use crate::model::spec::ModelSpec;
use anyhow::Result;

/// Prepares the layers of a model that are loaded from a store. If there is none, it is written. Also returns
/// the largest size of their weights in bytes.
pub(super) fn packed_layers<T: LoadTarget>(
    target: &mut T,
    (source, path): (&ModelSource, &TransferPath),
    spec: &ModelSpec,
    offload: &Offload,
) -> Result<(PackedLayers, usize)> {
    let count = |slab| count_on(target.device_sizes(), spec, &|piece| source.load_type(piece), slab);
    let whole = count(usize::MAX).layer_matrices;
    let slab = offload.slab(whole.iter().flatten().map(|matrix| matrix.layout.bytes).sum());
    let layers = count(slab).layer_matrices;
    let key = StoreKey::new(&source.path, &source.checkpoint, layers.iter().flatten())?;
    let mut pack = |writer: &mut StoreWriter| {
        source.progress.add_total(writer.bytes());
        let tensors = ModelTensors { types: &|piece| source.load_type(piece), data: Some(source), slab };
        let stacks = spec.encoder.iter().chain(&spec.decoder);
        stacks.flat_map(|stack| &stack.layers).try_for_each(|layer| {
            // One layer at a time is in memory.
            let mut weights = Loader::new(target, tensors, None).block(layer)?;
            writer.append_layer(target, &mut weights)
        })
    };
    let packed = PackedLayers::open((offload, path), key, layers, T::READS_DATA.then_some(&mut pack))?;
    Ok((packed, slab))
}
