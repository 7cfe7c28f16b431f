//! Converts and writes tensors one after another.
//!
//! Invariant: every written file has been synced when its function returns; errors give its final name.

use super::plan::{OutputPlan, PlannedTensor};
use crate::formats::save::SavedFile;
use crate::model::source::ModelSource;
use crate::model::tensor_slices;
use crate::quantize::{Rounding, SourceRows, requantize};
use anyhow::{Context, Result};
use std::borrow::Cow;
use std::fs::File;
use std::io::Write;
use std::path::Path;

/// Number of values that are converted at once before they are written.
const ELEMENTS_PER_CHUNK: usize = 1 << 22;

pub(super) struct TensorWriter<'a> {
    pub(super) plan: &'a OutputPlan<'a>,
    pub(super) threads: usize,
}

impl TensorWriter<'_> {
    /// Writes a file to `path`. Errors call it `named`, its final name.
    pub(super) fn write(&self, file: &SavedFile, path: &Path, named: &Path) -> Result<()> {
        let context = || format!("cannot write {}", named.display());
        let mut out = File::create_new(path).with_context(context)?;
        out.write_all(&file.header).with_context(context)?;
        for at in &file.tensors {
            let tensor = self.plan.tensor(*at);
            self.write_tensor(tensor, &mut out)
                .with_context(|| format!("tensor '{}'", tensor.saved.name))
                .with_context(context)?;
            let bytes = tensor.saved.bytes();
            let padding = bytes.next_multiple_of(file.alignment) - bytes;
            out.write_all(&vec![0; padding]).with_context(context)?;
        }
        out.sync_all().with_context(context)
    }

    fn write_tensor(&self, tensor: &PlannedTensor, out: &mut File) -> Result<()> {
        let ModelSource { checkpoint, rounding: policy, .. } = self.plan.source();
        let (matrices, transposed) = (tensor.matrices(), tensor.needs_transpose());
        let stored = if transposed { Cow::default() } else { tensor.stored.bytes() };
        let len = stored.len() / matrices.len().max(1);
        for (plane, piece) in matrices.iter().enumerate() {
            // Formats without blocks have nothing to choose when rounding, and their rows may be columns
            // here.
            let rounding =
                if tensor.saved.ty.is_blocked() { piece.rounding(policy) } else { Rounding::RoundToNearest };
            match transposed {
                true => self.write_rows(
                    tensor,
                    rounding,
                    &tensor_slices::read_slice(checkpoint, piece)?.bytes,
                    out,
                )?,
                false => self.write_rows(tensor, rounding, &stored[plane * len..][..len], out)?,
            }
        }
        if matrices.is_empty() {
            self.write_rows(tensor, Rounding::RoundToNearest, &stored, out)?;
        }
        checkpoint.release(&tensor.saved.name);
        Ok(())
    }

    /// Writes rows, given in the tensor's stored format, in its new format.
    fn write_rows(
        &self,
        tensor: &PlannedTensor,
        rounding: Rounding,
        bytes: &[u8],
        out: &mut File,
    ) -> Result<()> {
        let (width, progress) = (tensor.width(), &self.plan.source().progress);
        let row = tensor.ty.bytes(width).context("rows are whole blocks; this is a bug")?;
        let rows = (ELEMENTS_PER_CHUNK / width.max(1)).max(1);
        for bytes in bytes.chunks((rows * row).max(1)) {
            match tensor.saved.ty == tensor.ty {
                true => out.write_all(bytes)?,
                false => {
                    let rows = SourceRows { ty: tensor.ty, width, bytes };
                    out.write_all(&requantize(rows, tensor.saved.ty, rounding, self.threads)?)?;
                }
            }
            progress.advance(bytes.len())?;
        }
        Ok(())
    }
}

/// Writes a new file with this content and syncs it.
pub(super) fn write_file(path: &Path, content: &[u8]) -> Result<()> {
    let write = || {
        let mut out = File::create_new(path)?;
        out.write_all(content)?;
        out.sync_all()
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}
