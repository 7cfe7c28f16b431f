//! Storages and tensors as a pickle describes them.
//!
//! Invariant: these are plain data, not yet validated.

use super::dtypes::TorchDtype;

/// A storage, which is a sequence of elements in the file that tensors refer to, or a part of one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Storage<'a> {
    /// Key of the whole storage in the file.
    pub(super) key: &'a str,
    /// Element type; `None` for a storage of raw bytes.
    pub(super) ty: Option<&'static TorchDtype>,
    /// Bytes of the whole storage.
    pub(super) bytes: usize,
    /// Start and end of the part in use, in bytes from the start of the storage.
    pub(super) view_range: [usize; 2],
}

/// A tensor as the pickle describes it, not yet validated.
#[derive(Debug)]
pub(super) struct PickledTensor<'a> {
    pub(super) storage: Storage<'a>,
    pub(super) ty: &'static TorchDtype,
    /// Index of the first element in the storage.
    pub(super) offset: usize,
    pub(super) shape: Vec<usize>,
    /// Distance between consecutive indices of each dimension, in elements.
    pub(super) strides: Vec<usize>,
}
