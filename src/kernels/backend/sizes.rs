//! The memory that a device takes, computed without creating the device.
//!
//! Invariant: the buffers that a device allocates have the bytes that its sizes say. The state of rows and
//! slots on the host and the buffers of sampling are not counted.

use super::{ActivationType, DeviceError, KvLayout, MoeShape, StepLimits, Weight};
use crate::quant::QuantType;
use std::fmt;

/// The sizes of the buffers that a device with certain settings allocates. They are known before the device
/// is created.
pub trait DeviceSizes: Send {
    /// Returns the name, instruction set and number of threads, for the startup report.
    fn describe(&self) -> String;

    /// Returns the element type of activation buffers.
    fn activation_type(&self) -> ActivationType;

    /// Returns the layout in which the device holds a matrix (n, k) of format `ty`, whose rows are whole
    /// blocks of the format.
    fn packed_layout(&self, ty: QuantType, n: usize, k: usize) -> PackedLayout;

    /// Returns the bytes of K and of V in the cache of one layer. Fails as [`super::Backend::alloc_kv`] does,
    /// but not for lack of memory.
    fn kv_bytes(&self, layout: &KvLayout) -> Result<[usize; 2], DeviceError>;

    /// Returns the bytes of the scratch memory for steps within `limits` on a device that holds `shapes`.
    fn step_bytes(&self, limits: &StepLimits, shapes: &HeldShapes) -> usize;

    /// Returns the number of columns to prepare for ([`super::Backend::prepare_weight`]) before the products
    /// of so many heads with matrices of `k` columns each: those of the heads that are computed at once.
    fn columns_of_heads(&self, heads: usize, k: usize) -> usize {
        heads * k
    }

    /// Returns the bytes of the device's memory that a buffer of `bytes` bytes takes.
    fn buffer_bytes(&self, bytes: usize) -> usize {
        bytes
    }

    /// Returns the bytes of the device's memory that code for `shapes` takes, which is no buffer.
    fn code_bytes(&self, shapes: &HeldShapes) -> usize {
        let _ = shapes;
        0
    }
}

/// The shapes of what a device holds, as far as the size of its scratch memory depends on them.
#[derive(Clone, Debug, Default)]
pub struct HeldShapes {
    /// Formats and numbers of columns of the weights.
    pub weights: Vec<(QuantType, usize)>,
    /// Layouts of the KV caches.
    pub caches: Vec<KvLayout>,
    /// Mixtures of experts, each with the width of its input.
    pub mixtures: Vec<(MoeShape, usize)>,
}

/// The layout of a weight in device memory. Weights with equal values and equal layouts have equal bytes, on
/// every device and in every later version of the program. So packed bytes may be kept in a file beside the
/// text of their layout, and are valid for every device whose layout has the same text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedLayout {
    /// Arrangement of the elements. The name includes the type of the other operand and the instruction set,
    /// if the arrangement depends on them.
    pub arrangement: &'static str,
    /// Version of the arrangement, which increases whenever its bytes change.
    pub version: u32,
    /// Storage format.
    pub ty: QuantType,
    /// Rows of the matrix.
    pub n: usize,
    /// Columns of the matrix.
    pub k: usize,
    /// Total bytes, padding included.
    pub bytes: usize,
}

impl PackedLayout {
    /// Returns the layout of a matrix that is held as it is stored in files: row by row, in little-endian
    /// blocks. `k` must be whole blocks.
    pub fn rows(ty: QuantType, n: usize, k: usize) -> PackedLayout {
        let bytes = ty.bytes(k).expect("rows are whole blocks; this is a bug") * n;
        PackedLayout { arrangement: "rows", version: 1, ty, n, k, bytes }
    }

    /// Checks that `packed` bytes in the layout `given` can replace a weight that has this layout. Fails with
    /// [`DeviceError::Unsupported`].
    pub fn check(&self, given: &PackedLayout, packed: &[u8]) -> Result<(), DeviceError> {
        if given != self {
            return Err(DeviceError::Unsupported(format!("a weight packed as {given} is not {self}")));
        }
        if packed.len() != self.bytes {
            let (found, bytes) = (packed.len(), self.bytes);
            return Err(DeviceError::Unsupported(format!("{self} takes {bytes} bytes, not {found}")));
        }
        Ok(())
    }
}

impl fmt::Display for PackedLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PackedLayout { arrangement, version, ty, n, k, .. } = self;
        write!(f, "{arrangement}/{version} {ty} ({n}, {k})")
    }
}

impl HeldShapes {
    /// Adds the shape of a weight.
    pub fn add_weight(&mut self, ty: QuantType, k: usize) {
        push_new(&mut self.weights, (ty, k));
    }

    /// Adds the layout of a cache.
    pub fn add_cache(&mut self, layout: KvLayout) {
        push_new(&mut self.caches, layout);
    }

    /// Adds a mixture of experts with inputs of width `hidden`.
    pub fn add_mixture(&mut self, shape: MoeShape, hidden: usize) {
        push_new(&mut self.mixtures, (shape, hidden));
    }
}

/// Appends an item unless it is in the list.
fn push_new<T: PartialEq>(list: &mut Vec<T>, item: T) {
    if !list.contains(&item) {
        list.push(item);
    }
}

impl<Buf> Weight<Buf> {
    /// Returns the layout of the weight on a device with these sizes.
    pub fn packed_layout(&self, sizes: &dyn DeviceSizes) -> PackedLayout {
        sizes.packed_layout(self.ty, self.n, self.k)
    }
}
