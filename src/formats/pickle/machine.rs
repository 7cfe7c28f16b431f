//! The stack machine that a pickle is a program for.
//!
//! Invariant: it makes values and nothing else. There is no opcode that reaches outside, and what a program can
//! make is bounded before it is made: the stack here, everything else in the heap.

use super::globals::{self, Global};
use super::opcodes::{Op, Reader};
use super::tensor;
use super::value::{Heap, Value};
use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;

/// Bytes of the longest pickle that is read.
const PICKLE_BYTES_MAX: usize = 100_000_000;

/// How many values the stack holds, and how many marks.
const STACK_MAX: usize = 1 << 20;

/// What an entry of the memo takes, in values.
const MEMO_CELLS: usize = 2;

/// What a pickle made.
pub(super) struct Pickle<'a> {
    pub(super) heap: Heap<'a>,
    pub(super) root: Value<'a>,
    /// Bytes that it had.
    pub(super) bytes: usize,
}

/// Runs the pickle that `bytes` begin with.
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
    /// The height of the stack at each open mark. What lies below the last one is out of reach.
    marks: Vec<usize>,
    memo: BTreeMap<u32, Value<'a>>,
    heap: Heap<'a>,
}

impl<'a> Machine<'a> {
    /// Does what one opcode says; at the end, what the program made.
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
        ensure!(self.stack.is_empty() && self.marks.is_empty(), "it ends with values left over");
        Ok(root)
    }

    fn push(&mut self, value: Value<'a>) -> Result<()> {
        ensure!(self.stack.len() < STACK_MAX, "the stack holds more than {STACK_MAX} values");
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
            // A mark counts as a value here.
            Some(mark) if *mark == self.stack.len() => self.discard_to_mark(),
            _ => self.pop().map(drop),
        }
    }

    fn discard_to_mark(&mut self) -> Result<()> {
        self.above_mark().map(drop)
    }

    /// Takes the last mark away, and what lies above it.
    fn above_mark(&mut self) -> Result<Vec<Value<'a>>> {
        let mark = self.marks.pop().context("no mark is there")?;
        Ok(self.stack.split_off(mark))
    }

    fn put(&mut self, index: u32) -> Result<()> {
        self.heap.charge(MEMO_CELLS)?;
        self.memo.insert(index, self.top()?);
        Ok(())
    }

    fn get(&mut self, index: u32) -> Result<()> {
        let value = self.memo.get(&index).with_context(|| format!("nothing is memorised as {index}"))?;
        self.push(*value)
    }

    fn tuple(&mut self, op: Op) -> Result<()> {
        let items = match op {
            Op::TupleOf(count) => self.last(count)?,
            _ => self.above_mark()?,
        };
        let tuple = self.heap.tuple(&items)?;
        self.push(tuple)
    }

    /// Takes the last values away.
    fn last(&mut self, count: usize) -> Result<Vec<Value<'a>>> {
        let floor = self.marks.last().copied().unwrap_or(0);
        let at = self.stack.len().checked_sub(count).filter(|at| *at >= floor);
        Ok(self.stack.split_off(at.context("the stack is empty")?))
    }

    fn container(&mut self, op: Op) -> Result<()> {
        let container = match op {
            Op::EmptyList => self.heap.list(),
            _ => self.heap.dict(),
        };
        self.push(container?)
    }

    fn append(&mut self, op: Op) -> Result<()> {
        let items = match op {
            Op::Append => self.last(1)?,
            _ => self.above_mark()?,
        };
        self.heap.append(self.top()?, &items)
    }

    fn set(&mut self, op: Op) -> Result<()> {
        let items = match op {
            Op::SetItem => self.last(2)?,
            _ => self.above_mark()?,
        };
        self.heap.set(self.top()?, &items)
    }

    fn stack_global(&mut self) -> Result<()> {
        let (name, module) = (self.pop()?, self.pop()?);
        let (Value::Text(module), Value::Text(name)) = (module, name) else {
            bail!("a global is named by {} and {}", module.kind(), name.kind());
        };
        self.push(Value::Global(Global::find(module, name)?))
    }

    fn reduce(&mut self) -> Result<()> {
        let (args, callable) = (self.pop()?, self.pop()?);
        let made = globals::call(&mut self.heap, callable, args)?;
        self.push(made)
    }

    /// A dict may be given attributes, such as the `_metadata` of a state dict. They are not kept.
    fn build(&mut self) -> Result<()> {
        let (state, object) = (self.pop()?, self.top()?);
        match (object, state) {
            (Value::Dict(_), Value::Dict(_)) => Ok(()),
            _ => bail!("it sets the state of {} to {}", object.kind(), state.kind()),
        }
    }

    fn persistent_id(&mut self) -> Result<()> {
        let id = self.pop()?;
        let storage = tensor::storage(&mut self.heap, id)?;
        self.push(storage)
    }
}
