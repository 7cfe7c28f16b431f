//! A model's weights in one file of a folder, or in several that an index names, whatever their format.
//!
//! Invariant: index and files agree on where each tensor is, and every file lies in the folder.

use super::folder::{FileBytes, Folder, is_plain_name};
use super::{Checkpoint, Tensors};
use anyhow::{Context, Result, bail, ensure};
use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, Visitor};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::marker::PhantomData;

/// What the files of a format are called, and how one is read.
pub(super) struct Naming {
    pub(super) single: &'static str,
    pub(super) index: &'static str,
    /// The tensors of a file with these bytes, which has this place among the checkpoint's files.
    pub(super) read: fn(&[u8], usize) -> Result<Tensors>,
}

impl Naming {
    /// Whether the folder has such a file, or an index of them.
    pub(super) fn is_in(&self, folder: &Folder) -> bool {
        folder.has(self.single) || folder.has(self.index)
    }

    /// The same as [`Naming::open`] where one of them must be there.
    pub(super) fn open_needed(&self, folder: &Folder) -> Result<Checkpoint> {
        self.open(folder)?.with_context(|| {
            format!("{}: neither {} nor {} is there", folder.path().display(), self.single, self.index)
        })
    }

    /// Opens the folder's one file, else those that its index names; `None` where neither is there.
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

    /// Opens every file that the folder's index names. Index and files must agree on where each tensor is.
    fn open_sharded(&self, folder: &Folder) -> Result<Checkpoint> {
        let index = folder.read_needed(self.index)?;
        let shards = read_index(&index).with_context(|| folder.file(self.index).display().to_string())?;
        let mut checkpoint = Checkpoint { files: Vec::new(), tensors: Tensors::new() };
        for (shard, names) in &shards {
            let (file, tensors) = self.open_file(folder, shard, checkpoint.files.len())?;
            let name = file.path().display();
            if let Some(missing) = names.iter().find(|name| !tensors.contains_key(*name)) {
                bail!("{name}: tensor '{missing}': the index says it is here, but it is not");
            }
            if let Some(stray) = tensors.keys().find(|name| !names.contains(*name)) {
                bail!("{name}: tensor '{stray}': the index does not say that it is here");
            }
            checkpoint.files.push(file);
            checkpoint.tensors.extend(tensors);
        }
        Ok(checkpoint)
    }

    /// Opens one file and reads its tensors. `place` is where it stands among the checkpoint's files.
    fn open_file(&self, folder: &Folder, name: &str, place: usize) -> Result<(FileBytes, Tensors)> {
        let file = folder.open(name)?;
        let tensors = (self.read)(file.bytes(), place).with_context(|| file.path().display().to_string())?;
        Ok((file, tensors))
    }
}

/// The tensors that each shard should hold.
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

/// The one key of a safetensors header that is no tensor: texts by keys.
pub(super) const METADATA: &str = "__metadata__";

/// A JSON object by names of tensors. The usual map would silently keep the last of two equal names; here a
/// name that comes twice is an error, and an error in a value names its tensor.
pub(super) struct ByTensor<V> {
    pub(super) tensors: BTreeMap<String, V>,
    pub(super) metadata: Metadata,
}

/// What a header's metadata says that is understood here; all else is passed over.
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
        f.write_str("an object by names of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<ByTensor<V>, A::Error> {
        let (mut tensors, mut metadata) = (BTreeMap::new(), None);
        while let Some(name) = access.next_key::<String>()? {
            if name == METADATA {
                let twice = metadata.replace(access.next_value()?).is_some();
                if twice {
                    return Err(Error::custom(format!("{METADATA} is there twice")));
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
