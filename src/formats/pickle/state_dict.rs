//! Finding the state dict, the tensors by name, in the result of a pickle.
//!
//! Invariant: a tensor name is unique or rejected; only dicts are searched, and at most [`DEPTH_MAX`] levels
//! deep.

use super::machine::Pickle;
use super::tensor::StorageRanges;
use super::value::{Heap, TENSOR_CELLS, Value};
use crate::formats::Tensors;
use anyhow::{Context, Result, bail, ensure};

/// Keys under which training programs store the state dict next to other data.
const WRAPPERS: [&str; 3] = ["model", "state_dict", "module"];

/// Maximum nesting depth of such keys.
const DEPTH_MAX: usize = 4;

/// Maximum length of a tensor's name, in bytes.
const NAME_BYTES_MAX: usize = 1024;

/// Returns the tensors of the pickle's state dict. `places` are the byte ranges of the storages in the file
/// with index `file`.
pub(super) fn entries(pickle: Pickle, places: &StorageRanges, file: usize) -> Result<Tensors> {
    let Pickle { mut heap, root, .. } = pickle;
    let pairs = state_dict(&heap, root)?.to_vec();
    let mut entries = Tensors::new();
    for (key, value) in pairs {
        let Some(tensor) = heap.get_tensor(value) else { continue };
        let Value::Text(name) = key else { bail!("{} is used as a tensor's name", key.kind()) };
        ensure!(
            name.len() <= NAME_BYTES_MAX,
            "a tensor's name has {} bytes, more than {NAME_BYTES_MAX}",
            name.len()
        );
        let entry = tensor.entry(places, file).with_context(|| format!("tensor '{name}'"))?;
        heap.charge(TENSOR_CELLS + entry.shape.len())?;
        if entries.insert(name.to_owned(), entry).is_some() {
            bail!("tensor '{name}': it appears twice");
        }
    }
    ensure!(!entries.is_empty(), "the pickle has no named tensors");
    Ok(entries)
}

/// Returns the entries of the dict that has the tensors.
fn state_dict<'h, 'a>(heap: &'h Heap<'a>, root: Value<'a>) -> Result<&'h [(Value<'a>, Value<'a>)]> {
    let mut found = root;
    for _ in 0..=DEPTH_MAX {
        let Some(pairs) = heap.pairs(found) else {
            bail!("the pickle holds {}, not a dict of tensors", found.kind());
        };
        let is_wrapper = |key| matches!(key, Value::Text(key) if WRAPPERS.contains(&key));
        let mut inner = pairs.iter().filter(|(key, value)| is_wrapper(*key) && heap.pairs(*value).is_some());
        match (inner.next(), inner.next()) {
            (None, _) => return Ok(pairs),
            (Some((_, value)), None) => found = *value,
            (Some(_), Some(_)) => {
                bail!("the state dict is ambiguous: more than one of {} is present", WRAPPERS.join(", "))
            }
        }
    }
    bail!("the state dict is nested more than {DEPTH_MAX} dicts deep")
}
