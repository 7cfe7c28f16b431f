//! Storages and the tensors that look into them, from what the pickle says of them to where their numbers lie.
//!
//! Invariant: an [`Entry`] made here lies inside its storage, which lies inside the file; all of it is computed
//! with checks, because every number comes from the file.

use super::globals::Global;
use super::numbers::NumberType;
use super::value::{Heap, Value};
use crate::formats::gather::{Gather, Stored};
use crate::formats::{Entry, Layout, elements};
use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;
use std::ops::Range;

/// PyTorch's own bound on a tensor's dimensions.
const DIMENSIONS_MAX: usize = 64;

/// Where each storage's bytes lie in the file, by its key.
pub(super) type Places = BTreeMap<String, Range<usize>>;

/// A run of numbers in the file that tensors look into, or a part of one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Storage<'a> {
    /// What the file calls the whole run.
    pub(super) key: &'a str,
    /// The type of its numbers; `None` where it counts bytes.
    ty: Option<&'static NumberType>,
    /// Bytes of the whole run.
    bytes: usize,
    /// The part of it that is meant, in bytes from its beginning.
    part: [usize; 2],
}

/// A tensor as the pickle describes it; nothing has been held against anything yet.
#[derive(Debug)]
pub(super) struct Tensor<'a> {
    storage: Storage<'a>,
    ty: &'static NumberType,
    /// Numbers before its first.
    offset: usize,
    pub(super) shape: Vec<usize>,
    /// From one index of a dimension to the next, in numbers.
    pub(super) strides: Vec<usize>,
}

/// The storage that a persistent id means:
/// ('storage', class, key, device, count), and of older files a view, None or (key, offset, count).
pub(super) fn storage<'a>(heap: &mut Heap<'a>, id: Value<'a>) -> Result<Value<'a>> {
    let (class, key, count, view) = match *heap.items(id) {
        [Value::Text("storage"), Value::Global(class), Value::Text(key), Value::Text(_), count] => {
            (class, key, count, Value::None)
        }
        [Value::Text("storage"), Value::Global(class), Value::Text(key), Value::Text(_), count, view] => {
            (class, key, count, view)
        }
        _ => bail!("it refers to something outside that is no storage"),
    };
    let ty = match class {
        Global::Storage(ty) => Some(ty),
        Global::UntypedStorage => None,
        other => bail!("storage '{key}': {other} is no class of storages"),
    };
    let storage = Storage::new(key, ty, count).and_then(|storage| storage.seen(heap, view));
    heap.storage(storage.with_context(|| format!("storage '{key}'"))?)
}

impl<'a> Storage<'a> {
    fn new(key: &'a str, ty: Option<&'static NumberType>, count: Value<'a>) -> Result<Storage<'a>> {
        let unit = ty.map_or(1, |ty| ty.bytes);
        let bytes = size(count)?.checked_mul(unit).context("its numbers are too many to count")?;
        Ok(Storage { key, ty, bytes, part: [0, bytes] })
    }

    /// Bytes of one of its numbers.
    pub(super) fn unit(&self) -> usize {
        self.ty.map_or(1, |ty| ty.bytes)
    }

    /// The part of it that the view is.
    fn seen(self, heap: &Heap<'a>, view: Value<'a>) -> Result<Storage<'a>> {
        let (offset, count) = match *heap.items(view) {
            [] if view == Value::None => return Ok(self),
            [Value::Text(_), offset, count] => (size(offset)?, size(count)?),
            _ => bail!("its view is {}", view.kind()),
        };
        let begin = offset.checked_mul(self.unit());
        let end = offset.checked_add(count).and_then(|end| end.checked_mul(self.unit()));
        match (begin, end) {
            (Some(begin), Some(end)) if end <= self.bytes => Ok(Storage { part: [begin, end], ..self }),
            _ => bail!("a view of {count} numbers from {offset} on leaves its {} bytes", self.bytes),
        }
    }
}

/// The tensor of these parts: its storage, its offset, its sizes and its strides. `ty` is its type where the
/// storage does not say.
pub(super) fn rebuild<'a>(
    heap: &mut Heap<'a>,
    [storage, offset, sizes, strides]: [Value<'a>; 4],
    ty: Option<&'static NumberType>,
) -> Result<Value<'a>> {
    let Some(storage) = heap.storage_of(storage) else {
        bail!("it makes a tensor of {}, not of a storage", storage.kind());
    };
    let ty = ty.or(storage.ty).context("it makes a tensor of bytes without saying their type")?;
    let tensor = Tensor {
        storage,
        ty,
        offset: size(offset).context("a tensor's offset")?,
        shape: size_tuple(heap, sizes).context("a tensor's sizes")?,
        strides: size_tuple(heap, strides).context("a tensor's strides")?,
    };
    ensure!(
        tensor.shape.len() == tensor.strides.len(),
        "a tensor with {} sizes and {} strides",
        tensor.shape.len(),
        tensor.strides.len()
    );
    heap.tensor(tensor)
}

fn size_tuple(heap: &Heap, value: Value) -> Result<Vec<usize>> {
    ensure!(matches!(value, Value::Tuple(_)), "{} where a tuple should be", value.kind());
    let items = heap.items(value);
    ensure!(items.len() <= DIMENSIONS_MAX, "{} of them: at most {DIMENSIONS_MAX} are allowed", items.len());
    items.iter().map(|item| size(*item)).collect()
}

fn size(value: Value) -> Result<usize> {
    let Value::Int(number) = value else { bail!("{} where an integer should be", value.kind()) };
    usize::try_from(number).ok().with_context(|| format!("{number} is no size"))
}

impl Tensor<'_> {
    /// Where its numbers lie. `places` are those of the storages in file number `file`.
    pub(super) fn entry(&self, places: &Places, file: usize) -> Result<Entry> {
        let run = self.run(places)?;
        let strides = self.strides();
        let Some((count, bytes)) = self.span(&strides) else {
            bail!("shape {:?} of {} is too large to count", self.shape, self.ty.dtype());
        };
        ensure!(
            bytes.end <= run.len(),
            "shape {:?} with strides {:?} from number {} on leaves the {} bytes of storage '{}'",
            self.shape,
            self.strides,
            self.offset,
            run.len(),
            self.storage.key
        );
        let layout = self.layout(strides, count, run.len() / self.ty.bytes)?;
        let bytes = run.start + bytes.start..run.start + bytes.end;
        Ok(Entry { dtype: self.ty.dtype(), shape: self.shape.clone(), file, bytes, layout })
    }

    /// How many numbers it has, and the bytes of its storage that they lie in, if they can be counted.
    fn span(&self, strides: &[usize]) -> Option<(usize, Range<usize>)> {
        let count = elements(&self.shape)?;
        let begin = self.offset.checked_mul(self.ty.bytes)?;
        let bytes = reach(&self.shape, strides)?.checked_mul(self.ty.bytes)?;
        Some((count, begin..begin.checked_add(bytes)?))
    }

    /// Numbers that lie as they are wanted stay where they are; `held` is how many the storage has.
    fn layout(&self, strides: Vec<usize>, count: usize, held: usize) -> Result<Layout> {
        let Some(stored) = self.ty.stored() else { return Ok(Layout::Dense) };
        let is_dense = count == 0 || strides == dense(&self.shape);
        if is_dense && stored != Stored::Double {
            return Ok(Layout::Dense);
        }
        // Else a few numbers in a file could ask for any amount of memory.
        ensure!(
            count <= held,
            "shape {:?} repeats the numbers of a storage that has {held} of them",
            self.shape
        );
        Ok(Layout::Gathered(Gather { strides, stored }))
    }

    /// The bytes of its storage within the file.
    fn run(&self, places: &Places) -> Result<Range<usize>> {
        let Storage { key, bytes, part: [begin, end], .. } = self.storage;
        let place = places.get(key).with_context(|| format!("its storage '{key}' is not in the file"))?;
        ensure!(
            place.len() == bytes,
            "its storage '{key}' has {} bytes in the file, and {bytes} by the pickle",
            place.len()
        );
        Ok(place.start + begin..place.start + end)
    }

    /// Its strides, with those of dimensions that have no second index as if it were dense.
    fn strides(&self) -> Vec<usize> {
        let dense = dense(&self.shape);
        let strides = self.shape.iter().zip(&self.strides).zip(dense);
        strides.map(|((size, stride), dense)| if *size <= 1 { dense } else { *stride }).collect()
    }
}

/// The strides of a tensor without gaps. Those of one too large to count do not matter.
fn dense(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1usize; shape.len()];
    for at in (1..shape.len()).rev() {
        strides[at - 1] = strides[at].saturating_mul(shape[at]);
    }
    strides
}

/// How many numbers lie from the first that the strides lead to up to the last, with both; none for a tensor
/// of none.
fn reach(shape: &[usize], strides: &[usize]) -> Option<usize> {
    if shape.contains(&0) {
        return Some(0);
    }
    let dimensions = shape.iter().zip(strides);
    dimensions
        .map(|(size, stride)| (size - 1).checked_mul(*stride))
        .try_fold(1usize, |sum, span| sum.checked_add(span?))
}
