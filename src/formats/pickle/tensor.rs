//! Storages and tensors: from their description in the pickle to the location of their elements in the file.
//!
//! Invariant: an entry created here lies inside its storage, which lies inside the file. All arithmetic is
//! checked, because every number comes from the file.

use super::dtypes::TorchDtype;
use super::globals::Global;
use super::storage::{PickledTensor, Storage};
use super::value::{Heap, Value};
use crate::formats::gather::{Gather, StoredElement};
use crate::formats::{Layout, TensorEntry, elements};
use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;
use std::ops::Range;

/// Maximum number of dimensions, as in PyTorch.
const DIMENSIONS_MAX: usize = 64;

/// Byte range of each storage in the file, by storage key.
pub(super) type StorageRanges = BTreeMap<String, Range<usize>>;

/// Creates the storage for a persistent id: ('storage', class, key, device, count), in older files followed
/// by a view, which is None or (key, offset, count).
pub(super) fn storage_from_id<'a>(heap: &mut Heap<'a>, id: Value<'a>) -> Result<Value<'a>> {
    let (class, key, count, view) = match *heap.items(id) {
        [Value::Text("storage"), Value::Global(class), Value::Text(key), Value::Text(_), count] => {
            (class, key, count, Value::None)
        }
        [Value::Text("storage"), Value::Global(class), Value::Text(key), Value::Text(_), count, view] => {
            (class, key, count, view)
        }
        _ => bail!("it has a persistent id that is not a storage"),
    };
    let ty = match class {
        Global::Storage(ty) => Some(ty),
        Global::UntypedStorage => None,
        other => bail!("storage '{key}': {other} is not a storage class"),
    };
    let storage = Storage::new(key, ty, count).and_then(|storage| storage.apply_view(heap, view));
    heap.add_storage(storage.with_context(|| format!("storage '{key}'"))?)
}

impl<'a> Storage<'a> {
    fn new(key: &'a str, ty: Option<&'static TorchDtype>, count: Value<'a>) -> Result<Storage<'a>> {
        let unit = ty.map_or(1, |ty| ty.bytes);
        let bytes = parse_size(count)?.checked_mul(unit).context("it has too many elements")?;
        Ok(Storage { key, ty, bytes, view_range: [0, bytes] })
    }

    /// Bytes per element.
    pub(super) fn element_bytes(&self) -> usize {
        self.ty.map_or(1, |ty| ty.bytes)
    }

    /// Returns the part of the storage that `view` selects.
    fn apply_view(self, heap: &Heap<'a>, view: Value<'a>) -> Result<Storage<'a>> {
        let (offset, count) = match *heap.items(view) {
            [] if view == Value::None => return Ok(self),
            [Value::Text(_), offset, count] => (parse_size(offset)?, parse_size(count)?),
            _ => bail!("its view is {}, not a tuple", view.kind()),
        };
        let begin = offset.checked_mul(self.element_bytes());
        let end = offset.checked_add(count).and_then(|end| end.checked_mul(self.element_bytes()));
        match (begin, end) {
            (Some(begin), Some(end)) if end <= self.bytes => Ok(Storage { view_range: [begin, end], ..self }),
            _ => bail!("a view of {count} elements from element {offset} exceeds its {} bytes", self.bytes),
        }
    }
}

/// Creates a tensor from its storage, offset, sizes and strides. `ty` is the element type if the storage has
/// none.
pub(super) fn rebuild<'a>(
    heap: &mut Heap<'a>,
    [storage, offset, sizes, strides]: [Value<'a>; 4],
    ty: Option<&'static TorchDtype>,
) -> Result<Value<'a>> {
    let Some(storage) = heap.get_storage(storage) else {
        bail!("it creates a tensor from {}, not from a storage", storage.kind());
    };
    let ty = ty.or(storage.ty).context("it creates a tensor from raw bytes without a dtype")?;
    let tensor = PickledTensor {
        storage,
        ty,
        offset: parse_size(offset).context("a tensor's offset")?,
        shape: parse_size_tuple(heap, sizes).context("a tensor's sizes")?,
        strides: parse_size_tuple(heap, strides).context("a tensor's strides")?,
    };
    ensure!(
        tensor.shape.len() == tensor.strides.len(),
        "a tensor with {} sizes and {} strides",
        tensor.shape.len(),
        tensor.strides.len()
    );
    heap.add_tensor(tensor)
}

fn parse_size_tuple(heap: &Heap, value: Value) -> Result<Vec<usize>> {
    ensure!(matches!(value, Value::Tuple(_)), "expected a tuple, found {}", value.kind());
    let items = heap.items(value);
    ensure!(items.len() <= DIMENSIONS_MAX, "{} dimensions, more than {DIMENSIONS_MAX}", items.len());
    items.iter().map(|item| parse_size(*item)).collect()
}

fn parse_size(value: Value) -> Result<usize> {
    let Value::Int(number) = value else { bail!("expected an integer, found {}", value.kind()) };
    usize::try_from(number).ok().with_context(|| format!("{number} is not a valid size"))
}

impl PickledTensor<'_> {
    /// Validates the tensor and returns its entry. `places` are the byte ranges of the storages in the file
    /// with index `file`.
    pub(super) fn entry(&self, places: &StorageRanges, file: usize) -> Result<TensorEntry> {
        let run = self.storage_range(places)?;
        let strides = self.effective_strides();
        let Some((count, bytes)) = self.extent(&strides) else {
            bail!("shape {:?} of {} is too large", self.shape, self.ty.dtype());
        };
        ensure!(
            bytes.end <= run.len(),
            "shape {:?} with strides {:?} from element {} exceeds the {} bytes of storage '{}'",
            self.shape,
            self.strides,
            self.offset,
            run.len(),
            self.storage.key
        );
        let layout = self.layout(strides, count, run.len() / self.ty.bytes)?;
        let bytes = run.start + bytes.start..run.start + bytes.end;
        Ok(TensorEntry { dtype: self.ty.dtype(), shape: self.shape.clone(), file, bytes, layout })
    }

    /// Returns the number of elements, and the range of the storage's bytes that they span; `None` on
    /// overflow.
    fn extent(&self, strides: &[usize]) -> Option<(usize, Range<usize>)> {
        let count = elements(&self.shape)?;
        let begin = self.offset.checked_mul(self.ty.bytes)?;
        let bytes = reached_elements(&self.shape, strides)?.checked_mul(self.ty.bytes)?;
        Some((count, begin..begin.checked_add(bytes)?))
    }

    /// Chooses the layout. Dense elements of a supported type stay in place; `held` is the number of elements
    /// of the storage.
    fn layout(&self, strides: Vec<usize>, count: usize, held: usize) -> Result<Layout> {
        let Some(stored) = self.ty.stored() else { return Ok(Layout::Dense) };
        let is_dense = count == 0 || strides == dense_strides(&self.shape);
        if is_dense && stored != StoredElement::F64 {
            return Ok(Layout::Dense);
        }
        // Otherwise, a stride of 0 could turn a small file into any amount of memory.
        ensure!(
            count <= held,
            "shape {:?} repeats the elements of a storage that has only {held}",
            self.shape
        );
        Ok(Layout::Gathered(Gather { strides, stored }))
    }

    /// Returns the range of the storage's bytes in the file.
    fn storage_range(&self, places: &StorageRanges) -> Result<Range<usize>> {
        let Storage { key, bytes, view_range: [begin, end], .. } = self.storage;
        let place = places.get(key).with_context(|| format!("its storage '{key}' is not in the file"))?;
        ensure!(
            place.len() == bytes,
            "its storage '{key}' has {} bytes in the file, but {bytes} in the pickle",
            place.len()
        );
        Ok(place.start + begin..place.start + end)
    }

    /// Returns the strides; dimensions of size 0 or 1, whose stride is irrelevant, get that of a dense
    /// tensor.
    fn effective_strides(&self) -> Vec<usize> {
        let dense = dense_strides(&self.shape);
        let strides = self.shape.iter().zip(&self.strides).zip(dense);
        strides.map(|((size, stride), dense)| if *size <= 1 { dense } else { *stride }).collect()
    }
}

/// Returns the strides of a tensor without gaps. They saturate for a tensor that is too large.
fn dense_strides(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1usize; shape.len()];
    for at in (1..shape.len()).rev() {
        strides[at - 1] = strides[at].saturating_mul(shape[at]);
    }
    strides
}

/// Returns the number of elements from the first to the last one that the strides reach, inclusive; 0 for an
/// empty tensor, `None` on overflow.
fn reached_elements(shape: &[usize], strides: &[usize]) -> Option<usize> {
    if shape.contains(&0) {
        return Some(0);
    }
    let dimensions = shape.iter().zip(strides);
    dimensions
        .map(|(size, stride)| (size - 1).checked_mul(*stride))
        .try_fold(1usize, |sum, span| sum.checked_add(span?))
}
