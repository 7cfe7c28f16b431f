//! What a pickle's opcodes make: values, and the heap that holds what they are made of.
//!
//! Invariant: a value is a few words and owns nothing; it names its parts by their place in the heap. So values
//! can be shared, nested and knotted in any way, and to copy, keep or drop one is the same small work. What a
//! pickle can make the heap hold is bounded by [`CELLS_MAX`], whatever its opcodes say.

use super::globals::Global;
use super::tensor::{Storage, Tensor};
use anyhow::{Result, bail, ensure};

/// How much a pickle's containers, tensors and memo hold together, in values; whatever takes more memory than a
/// value counts as several. An ordinary tensor takes some sixty with all that describes it.
pub(super) const CELLS_MAX: usize = 1 << 22;
const CONTAINER_CELLS: usize = 2;
const STORAGE_CELLS: usize = 4;
pub(super) const TENSOR_CELLS: usize = 8;

/// A value. Text is where the file has it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Value<'a> {
    None,
    Bool(bool),
    Int(i128),
    /// Nobody asks how much.
    Float,
    Text(&'a str),
    Tuple(Place),
    List(Place),
    /// A dict or an OrderedDict.
    Dict(Place),
    Global(Global),
    Storage(Place),
    Tensor(Place),
}

/// Where in the heap.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Place(u32);

impl Value<'_> {
    /// What it is, for errors.
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

/// Keys and values in the order they were set.
pub(super) type Pairs<'a> = Vec<(Value<'a>, Value<'a>)>;

/// The parts of values.
#[derive(Default)]
pub(super) struct Heap<'a> {
    cells: usize,
    tuples: Vec<Box<[Value<'a>]>>,
    lists: Vec<Vec<Value<'a>>>,
    dicts: Vec<Pairs<'a>>,
    storages: Vec<Storage<'a>>,
    tensors: Vec<Tensor<'a>>,
}

impl<'a> Heap<'a> {
    /// Takes the right to keep that many more values.
    pub(super) fn charge(&mut self, cells: usize) -> Result<()> {
        self.cells += cells;
        ensure!(self.cells <= CELLS_MAX, "it makes more than {CELLS_MAX} values");
        Ok(())
    }

    pub(super) fn tuple(&mut self, items: &[Value<'a>]) -> Result<Value<'a>> {
        self.charge(CONTAINER_CELLS + items.len())?;
        self.tuples.push(items.into());
        Ok(Value::Tuple(last(&self.tuples)))
    }

    pub(super) fn list(&mut self) -> Result<Value<'a>> {
        self.charge(CONTAINER_CELLS)?;
        self.lists.push(Vec::new());
        Ok(Value::List(last(&self.lists)))
    }

    pub(super) fn dict(&mut self) -> Result<Value<'a>> {
        self.charge(CONTAINER_CELLS)?;
        self.dicts.push(Vec::new());
        Ok(Value::Dict(last(&self.dicts)))
    }

    pub(super) fn storage(&mut self, storage: Storage<'a>) -> Result<Value<'a>> {
        self.charge(STORAGE_CELLS)?;
        self.storages.push(storage);
        Ok(Value::Storage(last(&self.storages)))
    }

    pub(super) fn tensor(&mut self, tensor: Tensor<'a>) -> Result<Value<'a>> {
        self.charge(TENSOR_CELLS + tensor.shape.len())?;
        self.tensors.push(tensor);
        Ok(Value::Tensor(last(&self.tensors)))
    }

    /// Adds to a list.
    pub(super) fn append(&mut self, list: Value<'a>, items: &[Value<'a>]) -> Result<()> {
        let Value::List(Place(at)) = list else { bail!("it appends to {}", list.kind()) };
        self.charge(items.len())?;
        self.lists[at as usize].extend_from_slice(items);
        Ok(())
    }

    /// Sets entries of a dict; `items` has its keys and values in turn.
    pub(super) fn set(&mut self, dict: Value<'a>, items: &[Value<'a>]) -> Result<()> {
        let Value::Dict(Place(at)) = dict else { bail!("it sets an entry of {}", dict.kind()) };
        let (pairs, []) = items.as_chunks() else { bail!("it sets a key without a value") };
        self.charge(items.len())?;
        self.dicts[at as usize].extend(pairs.iter().map(|[key, value]| (*key, *value)));
        Ok(())
    }

    /// The items of a tuple or a list, of anything else nothing.
    pub(super) fn items(&self, value: Value<'a>) -> &[Value<'a>] {
        match value {
            Value::Tuple(Place(at)) => &self.tuples[at as usize],
            Value::List(Place(at)) => &self.lists[at as usize],
            _ => &[],
        }
    }

    /// The entries of a dict.
    pub(super) fn pairs(&self, value: Value<'a>) -> Option<&[(Value<'a>, Value<'a>)]> {
        match value {
            Value::Dict(Place(at)) => Some(&self.dicts[at as usize]),
            _ => None,
        }
    }

    /// All storages that were named, whoever uses them.
    pub(super) fn storages(&self) -> &[Storage<'a>] {
        &self.storages
    }

    pub(super) fn storage_of(&self, value: Value<'a>) -> Option<Storage<'a>> {
        match value {
            Value::Storage(Place(at)) => Some(self.storages[at as usize]),
            _ => None,
        }
    }

    pub(super) fn tensor_of(&self, value: Value<'a>) -> Option<&Tensor<'a>> {
        match value {
            Value::Tensor(Place(at)) => Some(&self.tensors[at as usize]),
            _ => None,
        }
    }
}

/// The place of the item that was added last.
fn last<T>(items: &[T]) -> Place {
    Place(u32::try_from(items.len() - 1).expect("cells are bounded; this is a bug"))
}
