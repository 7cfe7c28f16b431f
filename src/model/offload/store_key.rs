//! The key of a store, by which it is found: the model's files, and the matrices with their layouts.
//!
//! Invariant: stores whose bytes may differ have different keys, up to what marks of files do not see.

use super::direct::to_blocks;
use super::mark::{FileMark, canonical};
use super::matrix::LayerMatrix;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};

/// Version of the folder's layout.
pub(super) const VERSION: u32 = 3;

/// Identifies a store: the model's files, and the matrices with their layouts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct StoreKey {
    pub(super) version: u32,
    /// Version of the program: another one may convert weights differently.
    pub(super) program: String,
    /// Folder or file of the model; empty for a store beside it, which goes where the model goes.
    pub(super) model: PathBuf,
    pub(super) files: Vec<FileMark>,
    /// In the order of use.
    pub(super) matrices: Vec<MatrixKey>,
}

/// A matrix as a device holds it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct MatrixKey {
    name: String,
    part: String,
    pub(super) layout: String,
    pub(super) bytes: usize,
}

impl StoreKey {
    /// Returns the key of the store for `matrices` of the model `model`, whose files have these marks.
    pub fn new<'a>(
        model: &Path,
        files: &[FileMark],
        matrices: impl Iterator<Item = &'a LayerMatrix>,
    ) -> StoreKey {
        let matrix = |LayerMatrix { name, part, layout, .. }: &LayerMatrix| MatrixKey {
            name: name.clone(),
            part: part.clone(),
            layout: layout.to_string(),
            bytes: layout.bytes,
        };
        StoreKey {
            version: VERSION,
            program: env!("CARGO_PKG_VERSION").to_owned(),
            model: canonical(model),
            files: files.to_vec(),
            matrices: matrices.map(matrix).collect(),
        }
    }

    /// Returns the key of the same store beside the model, whose files have paths relative to it.
    pub(super) fn beside(&self, relative: Vec<PathBuf>) -> StoreKey {
        let files = self.files.iter().zip(relative).map(|(mark, path)| FileMark { path, ..mark.clone() });
        StoreKey { model: PathBuf::new(), files: files.collect(), ..self.clone() }
    }

    /// Returns whether the store is beside its model.
    pub(super) fn is_beside(&self) -> bool {
        self.model.as_os_str().is_empty()
    }

    /// Returns the key without what may differ between a store that is found and the one that is needed:
    /// copies of a model have other times of change.
    fn identity(&self) -> StoreKey {
        let time = |mark: &FileMark| if self.is_beside() { 0 } else { mark.changed };
        let files = self.files.iter().map(|mark| FileMark { changed: time(mark), ..mark.clone() });
        StoreKey { files: files.collect(), ..self.clone() }
    }

    /// Returns whether a store with the key `other` is this one, if the files have the contents that it was
    /// made of.
    pub(super) fn accepts(&self, other: &StoreKey) -> bool {
        self.identity() == other.identity()
    }

    /// Returns the beginning of messages about the place of the store: the setting that determines it.
    pub(super) fn setting(&self) -> &'static str {
        if self.is_beside() { "" } else { "tiers.disk_path: " }
    }

    /// Returns the name of the store's folder.
    pub(super) fn folder_name(&self) -> String {
        let json = serde_json::to_vec(&self.identity());
        let json = json.expect("a key is plain data; anything else is a bug");
        let digest = Sha256::digest(json);
        let digest: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
        let model = self.model.file_stem().map_or("model".into(), |name| name.to_string_lossy());
        let model: String =
            model.chars().map(|c| if c.is_alphanumeric() || c == '-' { c } else { '_' }).take(64).collect();
        format!("{model}-{digest}")
    }

    /// Returns the bytes of the data file.
    pub(super) fn data_bytes(&self) -> u64 {
        self.matrices.iter().map(|matrix| to_blocks(matrix.bytes) as u64).sum()
    }

    /// Returns the matrices with their places in the data file.
    pub(super) fn stored(&self, checksums: &[u64]) -> Vec<StoredMatrix> {
        let mut end = 0;
        let stored = |(matrix, checksum): (&MatrixKey, &u64)| {
            let offset = end;
            end += to_blocks(matrix.bytes) as u64;
            StoredMatrix { name: matrix.name.clone(), offset, bytes: matrix.bytes, checksum: *checksum }
        };
        self.matrices.iter().zip(checksums).map(stored).collect()
    }

    /// Returns whether a store with the key `other` is of the same model with other files, or of another
    /// version.
    pub(super) fn makes_useless(&self, other: &StoreKey) -> bool {
        let (own, other) = (self.identity(), other.identity());
        own.model == other.model
            && (own.version, own.program, own.files) != (other.version, other.program, other.files)
    }
}

/// A matrix in the data file.
#[derive(Clone, Debug, PartialEq)]
pub struct StoredMatrix {
    pub name: String,
    /// Offset of its first byte, a multiple of a block.
    pub offset: u64,
    pub bytes: usize,
    /// XXH3 of its bytes.
    pub(super) checksum: u64,
}
