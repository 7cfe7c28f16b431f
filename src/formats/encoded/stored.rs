//! The stored tensors of an encoded matrix.
//!
//! Invariant: after [`StoredPart::check`] the tensor has as many bytes as its type and shape require.

use super::super::folder::FileBytes;
use super::super::packed::DTYPES;
use super::super::{Checkpoint, Dtype, Layout, TensorEntry, elements};
use anyhow::{Context, Result, bail, ensure};
use mainstem_kernels::QuantType;
use std::ops::Range;

/// Types of scales.
pub(super) const FLOATS: [&str; 3] = ["F16", "BF16", "F32"];

/// A stored tensor that is part of an encoded matrix.
#[derive(Debug)]
pub(super) struct StoredPart {
    /// Name of the tensor, for error messages.
    pub(super) name: String,
    /// Type in the file's header.
    pub(super) dtype: String,
    pub(super) shape: Vec<usize>,
    /// Index of the file, and range of the tensor's bytes in it.
    pub(super) file: usize,
    pub(super) bytes: Range<usize>,
}

impl StoredPart {
    fn new(name: String, entry: TensorEntry) -> StoredPart {
        let TensorEntry { dtype, shape, file, bytes, .. } = entry;
        let named = |ty: QuantType| DTYPES.iter().find(|(_, known)| *known == ty).map(|(name, _)| *name);
        let dtype = match dtype {
            Dtype::Known(ty) => named(ty).unwrap_or(ty.name()).to_owned(),
            Dtype::Unsupported(name) => name,
        };
        StoredPart { name, dtype, shape, file, bytes }
    }

    /// Checks that the tensor has one of these types and the shape.
    pub(super) fn check(&self, dtypes: &[&str], shape: &[usize]) -> Result<()> {
        ensure!(
            dtypes.contains(&self.dtype.as_str()) && self.shape == shape,
            "'{}' is {} {:?}, but it has to be {} {shape:?}",
            self.name,
            self.dtype,
            self.shape,
            dtypes.join(" or ")
        );
        let size = match self.dtype.as_str() {
            "I64" => 8,
            "I32" | "F32" => 4,
            "F16" | "BF16" => 2,
            _ => 1,
        };
        let needed = elements(shape).and_then(|count| count.checked_mul(size));
        ensure!(
            needed == Some(self.bytes.len()),
            "'{}' of shape {shape:?} has {} bytes, which do not fit its type {}",
            self.name,
            self.bytes.len(),
            self.dtype
        );
        Ok(())
    }

    /// Returns the tensor's dimensions. Fails if it has another number of them, or one that is 0.
    pub(super) fn dimensions<const N: usize>(&self) -> Result<[usize; N]> {
        let shape: [usize; N] = self.shape.clone().try_into().ok().with_context(|| {
            format!("'{}' of shape {:?} has to have {N} dimensions", self.name, self.shape)
        })?;
        ensure!(!shape.contains(&0), "'{}' of shape {shape:?} is empty", self.name);
        Ok(shape)
    }

    /// Returns the number format of scales.
    pub(super) fn float_type(&self) -> Result<QuantType> {
        let ty = DTYPES.iter().find(|(name, _)| *name == self.dtype).map(|(_, ty)| *ty);
        ty.with_context(|| format!("'{}' has the type {}, not {}", self.name, self.dtype, FLOATS.join(", ")))
    }

    pub(super) fn data<'a>(&self, files: &'a [FileBytes]) -> &'a [u8] {
        &files[self.file].bytes()[self.bytes.clone()]
    }
}

/// The stored tensors of one module, which are taken out of the checkpoint one by one.
pub(super) struct Module<'a> {
    checkpoint: &'a mut Checkpoint,
    name: &'a str,
}

impl<'a> Module<'a> {
    pub(super) fn new(checkpoint: &'a mut Checkpoint, name: &'a str) -> Module<'a> {
        Module { checkpoint, name }
    }

    /// Takes the tensor whose name is the module's with this suffix. Fails if there is none.
    pub(super) fn take(&mut self, suffix: &str) -> Result<StoredPart> {
        match self.take_if_stored(suffix) {
            Some(part) => Ok(part),
            None => bail!("'{}{suffix}' is missing, which belongs to it", self.name),
        }
    }

    /// Takes the tensor whose name is the module's with this suffix, if there is one.
    pub(super) fn take_if_stored(&mut self, suffix: &str) -> Option<StoredPart> {
        let (name, entry) = self.checkpoint.tensors.remove_entry(&format!("{}{suffix}", self.name))?;
        Some(StoredPart::new(name, entry))
    }

    /// Returns the data of a tensor.
    pub(super) fn data(&self, part: &StoredPart) -> &[u8] {
        part.data(&self.checkpoint.files)
    }

    /// Returns the integers of a small tensor of type I32 or I64 whose type and shape have been checked.
    pub(super) fn integers(&self, part: &StoredPart) -> Vec<i64> {
        let data = self.data(part);
        match part.dtype.as_str() {
            "I64" => data.as_chunks().0.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect(),
            _ => data.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes).into()).collect(),
        }
    }

    /// Whether the module has a bias of zeros.
    pub(super) fn has_zero_bias(&self) -> bool {
        let bias = self.checkpoint.tensors.get(&format!("{}.bias", self.name));
        bias.is_some_and(|entry| {
            let bytes = &self.checkpoint.files[entry.file].bytes()[entry.bytes.clone()];
            matches!(entry.layout, Layout::Dense) && bytes.iter().all(|byte| *byte == 0)
        })
    }
}
