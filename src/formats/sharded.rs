//! Weights in a single file of a model folder, or in several shards listed by an index, independent of the
//! format.
//!
//! Invariant: the index and the files agree on where each tensor is, and every file is directly in the
//! folder.

use super::folder::{FileBytes, Folder, is_plain_name};
use super::{Checkpoint, Tensors};
use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, Visitor};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::marker::PhantomData;

/// File names of a weight format, and the function that parses one file.
pub(super) struct FolderFormat {
    pub(super) single: &'static str,
    pub(super) index: &'static str,
    /// Parses the tensors of one file. The second argument is the file's index in the checkpoint.
    pub(super) read: fn(&[u8], usize) -> Result<Tensors>,
}

impl FolderFormat {
    /// Whether the folder has such a file or its index.
    pub(super) fn is_present_in(&self, folder: &Folder) -> bool {
        folder.has(self.single) || folder.has(self.index)
    }

    /// Opens the weights as [`FolderFormat::open`] does. Fails if the folder has none of this format.
    pub(super) fn open_required(&self, folder: &Folder) -> Result<Checkpoint> {
        self.open(folder)?.with_context(|| {
            format!("{}: found neither {} nor {}", folder.path().display(), self.single, self.index)
        })
    }

    /// Opens the folder's single file, or else all shards its index lists. Returns `None` if neither exists.
    pub(super) fn open(&self, folder: &Folder) -> Result<Option<Checkpoint>> {
        match (folder.has(self.single), folder.has(self.index)) {
            (true, _) => self.open_single(folder).map(Some),
            (false, true) => self.open_sharded(folder).map(Some),
            (false, false) => Ok(None),
        }
    }

    fn open_single(&self, folder: &Folder) -> Result<Checkpoint> {
        let (file, tensors) = self.open_file(folder, self.single, 0)?;
        Ok(Checkpoint { files: vec![file], tensors })
    }

    /// Opens every file the folder's index lists. Fails if the index and the files disagree about a tensor.
    fn open_sharded(&self, folder: &Folder) -> Result<Checkpoint> {
        let index = folder.read_required(self.index)?;
        let shards = read_index(&index).with_context(|| folder.file(self.index).display().to_string())?;
        let mut checkpoint = Checkpoint { files: Vec::new(), tensors: Tensors::new() };
        for (shard, names) in &shards {
            let (file, tensors) = self.open_file(folder, shard, checkpoint.files.len())?;
            let name = file.path().display();
            if let Some(missing) = names.iter().find(|name| !tensors.contains_key(*name)) {
                bail!("{name}: tensor '{missing}': it is listed in the index, but not in this file");
            }
            if let Some(stray) = tensors.keys().find(|name| !names.contains(*name)) {
                bail!("{name}: tensor '{stray}': it is in this file, but the index does not say so");
            }
            checkpoint.files.push(file);
            checkpoint.tensors.extend(tensors);
        }
        Ok(checkpoint)
    }

    /// Opens one file and parses its tensors. `place` is the file's index in the checkpoint.
    fn open_file(&self, folder: &Folder, name: &str, place: usize) -> Result<(FileBytes, Tensors)> {
        let file = folder.open(name)?;
        let tensors = (self.read)(file.bytes(), place).with_context(|| file.path().display().to_string())?;
        Ok((file, tensors))
    }
}

/// Parses an index: the names of the tensors in each shard.
fn read_index(content: &[u8]) -> Result<BTreeMap<String, BTreeSet<String>>> {
    #[derive(Deserialize)]
    struct Index {
        weight_map: ByTensor<String>,
    }
    let index: Index = serde_json::from_slice(content)?;
    let mut shards = BTreeMap::<String, BTreeSet<String>>::new();
    for (tensor, shard) in index.weight_map.tensors {
        ensure!(
            is_plain_name(&shard),
            "tensor '{tensor}': '{shard}' is not the name of a file in this folder"
        );
        shards.entry(shard).or_default().insert(tensor);
    }
    Ok(shards)
}

/// The one key of a safetensors header that is not a tensor: a map from string to string.
pub(super) const METADATA: &str = "__metadata__";

/// A JSON object keyed by tensor name. Unlike a plain map, which keeps the last of two equal keys, it rejects
/// duplicate names; errors in a value name the tensor.
pub(super) struct ByTensor<V> {
    pub(super) tensors: BTreeMap<String, V>,
    pub(super) metadata: Metadata,
}

/// The metadata keys that are recognized; all others are ignored.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Metadata {
    #[serde(rename = "mainstem.format_version")]
    pub(super) version: Option<String>,
    #[serde(rename = "mainstem.tensors")]
    pub(super) tensors: Option<String>,
}

impl<'de, V: Deserialize<'de>> Deserialize<'de> for ByTensor<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(ByTensorVisitor(PhantomData))
    }
}

struct ByTensorVisitor<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for ByTensorVisitor<V> {
    type Value = ByTensor<V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object keyed by tensor name")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<ByTensor<V>, A::Error> {
        let (mut tensors, mut metadata) = (BTreeMap::new(), None);
        while let Some(name) = access.next_key::<String>()? {
            if name == METADATA {
                let twice = metadata.replace(access.next_value()?).is_some();
                if twice {
                    return Err(Error::custom(format!("{METADATA} appears twice")));
                }
                continue;
            }
            let value = access.next_value().map_err(|e| Error::custom(format!("tensor '{name}': {e}")))?;
            if tensors.contains_key(&name) {
                return Err(Error::custom(format!("tensor '{name}': it is described twice")));
            }
            tensors.insert(name, value);
        }
        Ok(ByTensor { tensors, metadata: metadata.unwrap_or_default() })
    }
}
