//! The stack machine that executes a pickle.
//!
//! Invariant: execution only creates values; no opcode has other effects. What a program can create is
//! bounded before it is created: the stack here, everything else in the heap.

use super::calls;
use super::globals::Global;
use super::opcodes::{Op, Reader};
use super::tensor;
use super::value::{Heap, Value};
use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;

/// Maximum size of a pickle, in bytes.
const PICKLE_BYTES_MAX: usize = 100_000_000;

/// Maximum number of values on the stack, and of open marks.
const STACK_MAX: usize = 1 << 20;

/// Cost of a memo entry, in values.
const MEMO_CELLS: usize = 2;

/// The result of executing a pickle.
pub(super) struct Pickle<'a> {
    pub(super) heap: Heap<'a>,
    pub(super) root: Value<'a>,
    /// Length of the pickle in bytes.
    pub(super) bytes: usize,
}

/// Executes the pickle at the start of `bytes`.
pub(super) fn run(bytes: &[u8]) -> Result<Pickle<'_>> {
    let mut reader = Reader::new(&bytes[..bytes.len().min(PICKLE_BYTES_MAX)]);
    let mut machine = Machine::default();
    loop {
        let at = reader.at();
        let root = reader.next().and_then(|op| machine.step(op));
        if let Some(root) = root.with_context(|| format!("in the pickle, at byte {at}"))? {
            return Ok(Pickle { heap: machine.heap, root, bytes: reader.at() });
        }
    }
}

#[derive(Default)]
struct Machine<'a> {
    stack: Vec<Value<'a>>,
    /// Stack height at each open mark. Values below the last mark are out of reach.
    marks: Vec<usize>,
    memo: BTreeMap<u32, Value<'a>>,
    heap: Heap<'a>,
}

impl<'a> Machine<'a> {
    /// Executes one opcode. Returns the program's result after the last one.
    fn step(&mut self, op: Op<'a>) -> Result<Option<Value<'a>>> {
        match op {
            Op::Frame => {}
            Op::Stop => return self.stop().map(Some),
            Op::Push(value) => self.push(value)?,
            Op::Mark => self.mark()?,
            Op::Pop => self.discard()?,
            Op::PopMark => self.discard_to_mark()?,
            Op::Dup => self.push(self.top()?)?,
            Op::Put(index) => self.put(index)?,
            Op::Memoize => self.put(self.memo.len() as u32)?,
            Op::Get(index) => self.get(index)?,
            Op::Tuple | Op::TupleOf(_) => self.tuple(op)?,
            Op::EmptyList | Op::EmptyDict => self.container(op)?,
            Op::Append | Op::Appends => self.append(op)?,
            Op::SetItem | Op::SetItems => self.set(op)?,
            Op::Global { module, name } => self.push(Value::Global(Global::find(module, name)?))?,
            Op::StackGlobal => self.stack_global()?,
            Op::Reduce => self.reduce()?,
            Op::Build => self.build()?,
            Op::PersistentId => self.persistent_id()?,
        }
        Ok(None)
    }

    fn stop(&mut self) -> Result<Value<'a>> {
        let root = self.pop()?;
        ensure!(self.stack.is_empty() && self.marks.is_empty(), "it ends with values left on the stack");
        Ok(root)
    }

    fn push(&mut self, value: Value<'a>) -> Result<()> {
        ensure!(self.stack.len() < STACK_MAX, "the stack has more than {STACK_MAX} values");
        self.stack.push(value);
        Ok(())
    }

    fn pop(&mut self) -> Result<Value<'a>> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    fn top(&self) -> Result<Value<'a>> {
        let floor = self.marks.last().copied().unwrap_or(0);
        self.stack[floor..].last().copied().context("the stack is empty")
    }

    fn mark(&mut self) -> Result<()> {
        ensure!(self.marks.len() < STACK_MAX, "more than {STACK_MAX} marks");
        self.marks.push(self.stack.len());
        Ok(())
    }

    fn discard(&mut self) -> Result<()> {
        match self.marks.last() {
            // POP removes the topmost mark if no value is above it.
            Some(mark) if *mark == self.stack.len() => self.discard_to_mark(),
            _ => self.pop().map(drop),
        }
    }

    fn discard_to_mark(&mut self) -> Result<()> {
        self.pop_to_mark().map(drop)
    }

    /// Pops the last mark and returns the values above it.
    fn pop_to_mark(&mut self) -> Result<Vec<Value<'a>>> {
        let mark = self.marks.pop().context("there is no open mark")?;
        Ok(self.stack.split_off(mark))
    }

    fn put(&mut self, index: u32) -> Result<()> {
        self.heap.charge(MEMO_CELLS)?;
        self.memo.insert(index, self.top()?);
        Ok(())
    }

    fn get(&mut self, index: u32) -> Result<()> {
        let value = self.memo.get(&index).with_context(|| format!("the memo has no entry {index}"))?;
        self.push(*value)
    }

    fn tuple(&mut self, op: Op) -> Result<()> {
        let items = match op {
            Op::TupleOf(count) => self.pop_n(count)?,
            _ => self.pop_to_mark()?,
        };
        let tuple = self.heap.new_tuple(&items)?;
        self.push(tuple)
    }

    /// Pops the last `count` values and returns them in order.
    fn pop_n(&mut self, count: usize) -> Result<Vec<Value<'a>>> {
        let floor = self.marks.last().copied().unwrap_or(0);
        let at = self.stack.len().checked_sub(count).filter(|at| *at >= floor);
        Ok(self.stack.split_off(at.context("the stack is empty")?))
    }

    fn container(&mut self, op: Op) -> Result<()> {
        let container = match op {
            Op::EmptyList => self.heap.new_list(),
            _ => self.heap.new_dict(),
        };
        self.push(container?)
    }

    fn append(&mut self, op: Op) -> Result<()> {
        let items = match op {
            Op::Append => self.pop_n(1)?,
            _ => self.pop_to_mark()?,
        };
        self.heap.append(self.top()?, &items)
    }

    fn set(&mut self, op: Op) -> Result<()> {
        let items = match op {
            Op::SetItem => self.pop_n(2)?,
            _ => self.pop_to_mark()?,
        };
        self.heap.set_items(self.top()?, &items)
    }

    fn stack_global(&mut self) -> Result<()> {
        let (name, module) = (self.pop()?, self.pop()?);
        let (Value::Text(module), Value::Text(name)) = (module, name) else {
            bail!("a global is named by {} and {}, not by strings", module.kind(), name.kind());
        };
        self.push(Value::Global(Global::find(module, name)?))
    }

    fn reduce(&mut self) -> Result<()> {
        let (args, callable) = (self.pop()?, self.pop()?);
        let made = calls::call(&mut self.heap, callable, args)?;
        self.push(made)
    }

    /// Handles BUILD: a dict may be given attributes, such as the `_metadata` of a state dict. They are
    /// dropped.
    fn build(&mut self) -> Result<()> {
        let (state, object) = (self.pop()?, self.top()?);
        match (object, state) {
            (Value::Dict(_), Value::Dict(_)) => Ok(()),
            _ => bail!("it sets the state of {} to {}", object.kind(), state.kind()),
        }
    }

    fn persistent_id(&mut self) -> Result<()> {
        let id = self.pop()?;
        let storage = tensor::storage_from_id(&mut self.heap, id)?;
        self.push(storage)
    }
}
