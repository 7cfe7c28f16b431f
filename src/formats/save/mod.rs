//! Models written: the heads of files whose tensors follow, and the place where a written model appears.
//!
//! Invariant: a head is made of names, formats and shapes alone, so that no number is read before all is known of the file;
//! and what stands at a model's place is whole.

mod gguf;

mod place;

mod safetensors;

pub use gguf::{check_gguf, gguf_file, gguf_settings};
pub use place::{Existing, Place, check_names};
pub use safetensors::safetensors_files;

use super::elements;
use super::safetensors::DTYPES;
use mainstem_kernels::QuantType;

/// A tensor that is to be written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedTensor {
    pub name: String,
    pub ty: QuantType,
    /// Outermost dimension first.
    pub shape: Vec<usize>,
    /// Whether its bytes are those of matrices (out, in), though its shape is (in, out).
    pub turned: bool,
}

impl SavedTensor {
    /// Bytes of its numbers.
    pub fn bytes(&self) -> usize {
        let bytes = elements(&self.shape).and_then(|count| self.ty.bytes(count));
        bytes.expect("rows are whole blocks, and it was in a file; this is a bug")
    }

    /// Whether safetensors has no type for it.
    pub(super) fn is_coded(&self) -> bool {
        self.turned || !DTYPES.iter().any(|(_, ty)| *ty == self.ty)
    }
}

/// A file that is to be written: its head, then its tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SavedFile {
    pub name: String,
    pub head: Vec<u8>,
    /// By their places among those that are written, in the file's order.
    pub tensors: Vec<usize>,
    /// Tensors begin at multiples of this many bytes behind the head, and the file ends at one.
    pub alignment: usize,
}
