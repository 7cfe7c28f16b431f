//! llama2.c checkpoints: a header of seven numbers, then every tensor, those of one kind for all layers
//! together. Version 0 begins with the numbers; later versions begin with a magic number and have a header of
//! 256 bytes. Versions 0 and 1 store F32; version 2 stores signed bytes in groups that share a scale.
//!
//! Invariant: an accepted file has exactly the length its header implies.

mod header;

mod tensors;

#[cfg(test)]
mod tests;

pub use header::{Llama2cHeader, Llama2cVersion};

use super::folder::FileBytes;
use super::mmap::MappedFile;
use super::{Checkpoint, Dtype, Layout, TensorEntry, Tensors};
use anyhow::{Context, Result};
use mainstem_kernels::QuantType;
use std::path::Path;

impl Checkpoint {
    /// Opens a llama2.c file of version 0, 1 or 2. Tensors have the names of Meta's Llama checkpoints and are
    /// F32; those of version 2 are dequantized when they are read. The rotary tables of version 0 follow from
    /// the header and are left out.
    pub fn open_llama2c(path: &Path) -> Result<(Checkpoint, Llama2cHeader)> {
        let file = MappedFile::open(path)?;
        let (tensors, header) = read(file.bytes()).with_context(|| path.display().to_string())?;
        Ok((Checkpoint { files: vec![FileBytes::Mapped(file.into())], tensors }, header))
    }
}

fn read(bytes: &[u8]) -> Result<(Tensors, Llama2cHeader)> {
    let header = Llama2cHeader::read(bytes)?;
    let parts = tensors::tensor_specs(&header);
    tensors::check_length(&header, &parts, bytes.len())?;
    let mut begin = header.bytes();
    let mut tensors = Tensors::new();
    for part in parts {
        let len = part.bytes().expect("check_length has computed the size; this is a bug");
        for copy in 0..part.copy_count(&header) {
            let bytes = begin..begin + len;
            begin = bytes.end;
            if let Some(name) = part.tensor_name(copy) {
                let layout = part.groups.map_or(Layout::Dense, Layout::Grouped);
                let (dtype, shape) = (Dtype::Known(QuantType::F32), part.shape.clone());
                tensors.insert(name, TensorEntry { dtype, shape, file: 0, bytes, layout });
            }
        }
    }
    Ok((tensors, header))
}
