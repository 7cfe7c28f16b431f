//! The state dict within what a pickle made: the tensors by their names.
//!
//! Invariant: a tensor is found once or refused; nothing is followed into values other than dicts, and not
//! further than [`DEPTH_MAX`].

use super::machine::Pickle;
use super::tensor::Places;
use super::value::{Heap, TENSOR_CELLS, Value};
use crate::formats::Tensors;
use anyhow::{Context, Result, bail, ensure};

/// Keys under which training programs keep the state dict, beside whatever else they save.
const WRAPPERS: [&str; 3] = ["model", "state_dict", "module"];

/// How many such keys lead one into another at most.
const DEPTH_MAX: usize = 4;

/// Bytes of a tensor's longest name.
const NAME_BYTES_MAX: usize = 1024;

/// The tensors of the pickle's state dict. `places` are those of the storages in file number `file`.
pub(super) fn entries(pickle: Pickle, places: &Places, file: usize) -> Result<Tensors> {
    let Pickle { mut heap, root, .. } = pickle;
    let pairs = state_dict(&heap, root)?.to_vec();
    let mut entries = Tensors::new();
    for (key, value) in pairs {
        let Some(tensor) = heap.tensor_of(value) else { continue };
        let Value::Text(name) = key else { bail!("{} is a tensor's name", key.kind()) };
        ensure!(name.len() <= NAME_BYTES_MAX, "a tensor's name has {} bytes", name.len());
        let entry = tensor.entry(places, file).with_context(|| format!("tensor '{name}'"))?;
        heap.charge(TENSOR_CELLS + entry.shape.len())?;
        if entries.insert(name.to_owned(), entry).is_some() {
            bail!("tensor '{name}': it is there twice");
        }
    }
    ensure!(!entries.is_empty(), "the pickle has no tensors by name");
    Ok(entries)
}

/// The entries of the dict that the tensors are in.
fn state_dict<'h, 'a>(heap: &'h Heap<'a>, root: Value<'a>) -> Result<&'h [(Value<'a>, Value<'a>)]> {
    let mut found = root;
    for _ in 0..=DEPTH_MAX {
        let Some(pairs) = heap.pairs(found) else {
            bail!("the pickle holds {}, not a dict of tensors by name", found.kind());
        };
        let is_wrapper = |key| matches!(key, Value::Text(key) if WRAPPERS.contains(&key));
        let mut inner = pairs.iter().filter(|(key, value)| is_wrapper(*key) && heap.pairs(*value).is_some());
        match (inner.next(), inner.next()) {
            (None, _) => return Ok(pairs),
            (Some((_, value)), None) => found = *value,
            (Some(_), Some(_)) => bail!("more than one of {} may be the state dict", WRAPPERS.join(", ")),
        }
    }
    bail!("the state dict is more than {DEPTH_MAX} dicts deep")
}
