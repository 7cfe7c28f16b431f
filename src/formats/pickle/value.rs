//! The values that a pickle creates, and the heap that stores their contents.
//!
//! Invariant: a value is a few words and owns nothing; it refers to its contents by heap index. Values can
//! therefore be shared, nested and cyclic in any way, and copying or dropping one is cheap and not recursive.
//! The heap's size is bounded by [`CELLS_MAX`] for any sequence of opcodes.

use super::globals::Global;
use super::storage::{PickledTensor, Storage};
use anyhow::{Result, bail, ensure};

/// Maximum size of a pickle's containers, tensors and memo together, in values; larger objects count as
/// several values. An ordinary tensor takes about sixty, including its description.
pub(super) const CELLS_MAX: usize = 1 << 22;
const CONTAINER_CELLS: usize = 2;
const STORAGE_CELLS: usize = 4;
pub(super) const TENSOR_CELLS: usize = 8;

/// A value. Text borrows from the file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Value<'a> {
    None,
    Bool(bool),
    Int(i128),
    /// Its number is never needed.
    Float,
    Text(&'a str),
    Tuple(HeapIndex),
    List(HeapIndex),
    /// A dict or an OrderedDict.
    Dict(HeapIndex),
    Global(Global),
    Storage(HeapIndex),
    Tensor(HeapIndex),
}

/// An index into one of the heap's lists.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct HeapIndex(u32);

impl Value<'_> {
    /// Describes the value's type, for error messages.
    pub(super) fn kind(self) -> String {
        let kind = match self {
            Value::None => "None",
            Value::Bool(_) => "a bool",
            Value::Int(_) => "an integer",
            Value::Float => "a float",
            Value::Text(_) => "a string",
            Value::Tuple(_) => "a tuple",
            Value::List(_) => "a list",
            Value::Dict(_) => "a dict",
            Value::Global(global) => return global.to_string(),
            Value::Storage(_) => "a storage",
            Value::Tensor(_) => "a tensor",
        };
        kind.to_owned()
    }
}

/// Keys and values in insertion order.
pub(super) type Pairs<'a> = Vec<(Value<'a>, Value<'a>)>;

/// Storage of the contents of values.
#[derive(Default)]
pub(super) struct Heap<'a> {
    cells: usize,
    tuples: Vec<Box<[Value<'a>]>>,
    lists: Vec<Vec<Value<'a>>>,
    dicts: Vec<Pairs<'a>>,
    storages: Vec<Storage<'a>>,
    tensors: Vec<PickledTensor<'a>>,
}

impl<'a> Heap<'a> {
    /// Accounts for `cells` more values. Fails if the total exceeds [`CELLS_MAX`].
    pub(super) fn charge(&mut self, cells: usize) -> Result<()> {
        self.cells += cells;
        ensure!(self.cells <= CELLS_MAX, "it creates more than {CELLS_MAX} values");
        Ok(())
    }

    pub(super) fn new_tuple(&mut self, items: &[Value<'a>]) -> Result<Value<'a>> {
        self.charge(CONTAINER_CELLS + items.len())?;
        self.tuples.push(items.into());
        Ok(Value::Tuple(last_index(&self.tuples)))
    }

    pub(super) fn new_list(&mut self) -> Result<Value<'a>> {
        self.charge(CONTAINER_CELLS)?;
        self.lists.push(Vec::new());
        Ok(Value::List(last_index(&self.lists)))
    }

    pub(super) fn new_dict(&mut self) -> Result<Value<'a>> {
        self.charge(CONTAINER_CELLS)?;
        self.dicts.push(Vec::new());
        Ok(Value::Dict(last_index(&self.dicts)))
    }

    pub(super) fn add_storage(&mut self, storage: Storage<'a>) -> Result<Value<'a>> {
        self.charge(STORAGE_CELLS)?;
        self.storages.push(storage);
        Ok(Value::Storage(last_index(&self.storages)))
    }

    pub(super) fn add_tensor(&mut self, tensor: PickledTensor<'a>) -> Result<Value<'a>> {
        self.charge(TENSOR_CELLS + tensor.shape.len())?;
        self.tensors.push(tensor);
        Ok(Value::Tensor(last_index(&self.tensors)))
    }

    /// Appends items to a list.
    pub(super) fn append(&mut self, list: Value<'a>, items: &[Value<'a>]) -> Result<()> {
        let Value::List(HeapIndex(at)) = list else { bail!("it appends to {}", list.kind()) };
        self.charge(items.len())?;
        self.lists[at as usize].extend_from_slice(items);
        Ok(())
    }

    /// Sets entries of a dict; `items` has alternating keys and values.
    pub(super) fn set_items(&mut self, dict: Value<'a>, items: &[Value<'a>]) -> Result<()> {
        let Value::Dict(HeapIndex(at)) = dict else { bail!("it sets an entry of {}", dict.kind()) };
        let (pairs, []) = items.as_chunks() else { bail!("it sets a key without a value") };
        self.charge(items.len())?;
        self.dicts[at as usize].extend(pairs.iter().map(|[key, value]| (*key, *value)));
        Ok(())
    }

    /// Returns the items of a tuple or a list; empty for any other value.
    pub(super) fn items(&self, value: Value<'a>) -> &[Value<'a>] {
        match value {
            Value::Tuple(HeapIndex(at)) => &self.tuples[at as usize],
            Value::List(HeapIndex(at)) => &self.lists[at as usize],
            _ => &[],
        }
    }

    /// Returns the entries of a dict; `None` for any other value.
    pub(super) fn pairs(&self, value: Value<'a>) -> Option<&[(Value<'a>, Value<'a>)]> {
        match value {
            Value::Dict(HeapIndex(at)) => Some(&self.dicts[at as usize]),
            _ => None,
        }
    }

    /// Returns all storages that were referenced, even by no tensor.
    pub(super) fn storages(&self) -> &[Storage<'a>] {
        &self.storages
    }

    pub(super) fn get_storage(&self, value: Value<'a>) -> Option<Storage<'a>> {
        match value {
            Value::Storage(HeapIndex(at)) => Some(self.storages[at as usize]),
            _ => None,
        }
    }

    pub(super) fn get_tensor(&self, value: Value<'a>) -> Option<&PickledTensor<'a>> {
        match value {
            Value::Tensor(HeapIndex(at)) => Some(&self.tensors[at as usize]),
            _ => None,
        }
    }
}

/// Returns the index of the last item.
fn last_index<T>(items: &[T]) -> HeapIndex {
    HeapIndex(u32::try_from(items.len() - 1).expect("the number of cells is bounded; this is a bug"))
}
