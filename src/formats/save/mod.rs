//! Writing models: file headers, and the atomic placement of the output.
//!
//! Invariant: a header depends only on names, formats and shapes, so the whole file layout is known before
//! any element is read; the final output path never holds a partial model, except while a folder is being
//! replaced.

mod gguf;

mod output;

mod safetensors;

pub use gguf::{GgufEntries, GgufMetadata, check_gguf, gguf_file, gguf_settings_file, new_gguf_file};
pub use output::{AtomicOutput, Existing, check_only_known_files};
pub use safetensors::safetensors_files;

use super::elements;
use mainstem_kernels::QuantType;

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedTensor {
    pub name: String,
    pub ty: QuantType,
    /// Outermost dimension first.
    pub shape: Vec<usize>,
    /// Whether the bytes are those of matrices (N, K), although the shape is (K, N).
    pub transposed: bool,
}

impl SavedTensor {
    /// Bytes of the tensor in the file.
    pub fn bytes(&self) -> usize {
        let bytes = elements(&self.shape).and_then(|count| self.ty.bytes(count));
        bytes.expect("the size was checked when the tensor was read; this is a bug")
    }
}

/// A file to be written: its header, then its tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedFile {
    pub name: String,
    pub header: Vec<u8>,
    /// Indices into the list of all written tensors, in the file's order.
    pub tensors: Vec<usize>,
    /// Each tensor after the header starts at a multiple of this many bytes, and the file ends at one.
    pub alignment: usize,
}
